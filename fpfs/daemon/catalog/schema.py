"""The catalog's tables, its format version, and how a database file is made and opened.

Invariants:
  * `names.cookie`, `inodes.ino`, `inodes.version` and `removals.id` come from one counter that
    never repeats, so an inode number is never reused, a directory offset never points to another
    entry's place, and of two versions, of whatever files, the later one has the larger number.
  * Rows that locate bytes (inline, segments, objects, shares, removals) carry a CRC-32 over what
    they say and whose it is, so that a damaged or misplaced row is found before it is followed.
  * The -wal file is written before an operation is answered; it is flushed by `Catalog` only.

Concurrency: the functions block; they run before trio starts, or in the catalog's worker.
"""

from __future__ import annotations

import enum
import errno
import os
import sqlite3
import stat
import struct
import time
import zlib
from typing import TYPE_CHECKING

import msgspec

from fpfs.core.engine import CatalogFiles
from fpfs.core.errors import CatalogBusy, CatalogError, NoSpace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CATALOG_NAME = "catalog.db"
"""The database of each copy, in its device directory."""

FORMAT_VERSION = 6
"""1: no `requests`. 2: layout segments without checksums of blocks; no `.fpfs`, nothing shared.
3: no policies of directories, no former versions, deferred unlinks or groups. 4: no index of names
by inode, versions without numbers; devices have no state and no tags. 5: not known what objects
hold."""
APPLICATION_ID = 0x46504653  # "FPFS"
ROOT_INO = 1
FPFS_INO = 2
"""The directory `.fpfs` in the root: not listed there, and nobody's to change."""
PARTIAL_INO = 3
"""The directory `.fpfs/partial`: contents whose writer was killed."""
VERSIONS_INO = 4
"""The directory `.fpfs/versions`: former versions, see `rows.versions`."""
VIEW_BASE = 1 << 62
"""Added to a directory's inode number: that of the view of its former versions. No inode's own
number comes near it."""
UNCOMMITTED_INO = 5
"""The directory `.fpfs/uncommitted`: groups that were never committed."""
SEQUENCE = "sequence"
"""Name of the value that counts transactions."""
LOG_BYTES_KEPT = 4 * 1024 * 1024
"""What a log that starts over keeps of its file: room for an unlink on a full device."""

NUMBER_FIRST = 16
"""First value of the counter; smaller ones are fixed inodes and names and, in listings, the offsets
of "." and ".."."""

FIXED_DIRECTORIES = (
    # Inode, permissions, parent, name and its cookie.
    (FPFS_INO, 0o755, ROOT_INO, b".fpfs", 8),
    (PARTIAL_INO, 0o1777, FPFS_INO, b"partial", 9),
    (VERSIONS_INO, 0o755, FPFS_INO, b"versions", 10),
    (UNCOMMITTED_INO, 0o1777, FPFS_INO, b"uncommitted", 11),
)

TABLES = (
    """CREATE TABLE filesystem (
        name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID""",
    # `state` is a `DeviceUse`: a device that was removed keeps its row, and its number with it.
    # `bytes` is what its objects hold together.
    """CREATE TABLE devices (
        number INTEGER PRIMARY KEY, device_id TEXT NOT NULL UNIQUE, path TEXT NOT NULL,
        state INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0) STRICT""",
    """CREATE TABLE device_tags (
        number INTEGER NOT NULL, tag TEXT NOT NULL,
        PRIMARY KEY (number, tag)) STRICT, WITHOUT ROWID""",
    # `parent` is the directory that holds a directory (0 for anything else). `layout` is where new
    # chunks of a regular file go, in MessagePack. `unfinished` is 1 from when a file is made under
    # an all-or-nothing name until it is closed; `kept` of a former version.
    # `version` is the number of the content that is current (0: none was committed since format 5).
    """CREATE TABLE inodes (
        ino INTEGER PRIMARY KEY, mode INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
        nlink INTEGER NOT NULL, size INTEGER NOT NULL, allocated_bytes INTEGER NOT NULL,
        atime_ns INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
        rdev INTEGER NOT NULL, parent INTEGER NOT NULL, target BLOB, layout BLOB,
        unfinished INTEGER NOT NULL DEFAULT 0, kept INTEGER NOT NULL DEFAULT 0,
        version INTEGER NOT NULL DEFAULT 0) STRICT""",
    "CREATE INDEX orphans ON inodes (ino) WHERE nlink = 0",
    "CREATE INDEX unfinished ON inodes (ino) WHERE unfinished = 1",
    # The second index carries the cookie (a rowid) behind the parent: the order of readdir.
    """CREATE TABLE names (
        cookie INTEGER PRIMARY KEY, parent INTEGER NOT NULL, name BLOB NOT NULL,
        ino INTEGER NOT NULL, type INTEGER NOT NULL) STRICT""",
    "CREATE UNIQUE INDEX names_by_name ON names (parent, name)",
    "CREATE INDEX names_by_parent ON names (parent)",
    "CREATE INDEX names_by_ino ON names (ino)",
    """CREATE TABLE xattrs (
        ino INTEGER NOT NULL, name BLOB NOT NULL, value BLOB NOT NULL,
        PRIMARY KEY (ino, name)) STRICT""",
    """CREATE TABLE inline (
        ino INTEGER PRIMARY KEY, content BLOB NOT NULL, crc INTEGER NOT NULL) STRICT""",
    """CREATE TABLE segments (
        ino INTEGER NOT NULL, segment INTEGER NOT NULL, blob BLOB NOT NULL, crc INTEGER NOT NULL,
        PRIMARY KEY (ino, segment)) STRICT""",
    # `bytes` is what an object holds of contents (see `rows.objects`).
    """CREATE TABLE objects (
        device INTEGER NOT NULL, id INTEGER NOT NULL, ino INTEGER NOT NULL, crc INTEGER NOT NULL,
        bytes INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (device, id)) STRICT, WITHOUT ROWID""",
    "CREATE INDEX objects_by_ino ON objects (ino)",
    # What may go once the transaction that wrote the row is durable. count 0: the whole object.
    """CREATE TABLE removals (
        id INTEGER PRIMARY KEY, device INTEGER NOT NULL, object INTEGER NOT NULL,
        block INTEGER NOT NULL, count INTEGER NOT NULL, crc INTEGER NOT NULL) STRICT""",
    # What an inode refers to in an object that belongs to another (see `rows.shared_extents`).
    """CREATE TABLE shares (
        device INTEGER NOT NULL, object INTEGER NOT NULL, ino INTEGER NOT NULL,
        block INTEGER NOT NULL, count INTEGER NOT NULL, crc INTEGER NOT NULL,
        PRIMARY KEY (device, object, ino, block)) STRICT, WITHOUT ROWID""",
    "CREATE INDEX shares_by_ino ON shares (ino)",
    # Contents that were quarantined (see `rows.quarantine`).
    """CREATE TABLE partials (
        ino INTEGER PRIMARY KEY, origin INTEGER NOT NULL, path BLOB NOT NULL,
        killed_by INTEGER NOT NULL, time_ns INTEGER NOT NULL, noted INTEGER NOT NULL) STRICT""",
    # What was set for a directory and all below it (see `rows.policies`).
    """CREATE TABLE policies (
        ino INTEGER NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL,
        PRIMARY KEY (ino, key)) STRICT, WITHOUT ROWID""",
    # Former versions of names (see `rows.versions`).
    """CREATE TABLE former (
        ino INTEGER PRIMARY KEY, parent INTEGER NOT NULL, name BLOB NOT NULL,
        number INTEGER NOT NULL, time_ns INTEGER NOT NULL) STRICT""",
    "CREATE UNIQUE INDEX former_by_name ON former (parent, name, number)",
    # Names that were removed while versions that were closed before are not current yet (see
    # `rows.deferred_unlink`). `mark` is the last of those.
    """CREATE TABLE withheld (
        cookie INTEGER PRIMARY KEY, parent INTEGER NOT NULL, name BLOB NOT NULL,
        ino INTEGER NOT NULL, type INTEGER NOT NULL, mark INTEGER NOT NULL) STRICT""",
    "CREATE INDEX withheld_by_mark ON withheld (mark)",
    # Directories that commit as a whole (see `rows.groups`).
    """CREATE TABLE groups (
        ino INTEGER PRIMARY KEY, state INTEGER NOT NULL, settled INTEGER NOT NULL,
        path BLOB NOT NULL, time_ns INTEGER NOT NULL) STRICT""",
    # What is in a group as of its last commit point, and what was in its place where that has
    # changed since (see `rows.group_undo`).
    """CREATE TABLE group_members (
        ino INTEGER NOT NULL, group_ino INTEGER NOT NULL, former INTEGER NOT NULL,
        PRIMARY KEY (ino, group_ino)) STRICT, WITHOUT ROWID""",
    "CREATE INDEX group_members_by_group ON group_members (group_ino)",
    "CREATE INDEX group_formers ON group_members (former) WHERE former > 0",
    """CREATE TABLE group_names (
        group_ino INTEGER NOT NULL, parent INTEGER NOT NULL, name BLOB NOT NULL,
        ino INTEGER NOT NULL, type INTEGER NOT NULL,
        PRIMARY KEY (parent, name)) STRICT, WITHOUT ROWID""",
    "CREATE INDEX group_names_by_group ON group_names (group_ino)",
    "CREATE INDEX group_names_by_ino ON group_names (ino)",
    # What requests of this connection came to, for a server that takes over (`inodes.replay_log`).
    """CREATE TABLE requests (
        slot INTEGER PRIMARY KEY, number INTEGER NOT NULL, ino INTEGER NOT NULL) STRICT""",
)


class DeviceUse(enum.IntEnum):
    """What a device is to the filesystem."""

    IN_USE = 0
    DRAINING = 1
    """It takes no new chunks, and what it holds is being moved elsewhere."""
    REMOVED = 2
    """It is none of the filesystem's any more. Its number is never used again."""


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One device as the catalog knows it: its number in layouts, its identity, its first path."""

    number: int
    device_id: str
    path: str
    use: DeviceUse = DeviceUse.IN_USE
    tags: frozenset[str] = frozenset()


class RootOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Owner and permission bits of the root directory of a new filesystem."""

    uid: int
    gid: int
    permissions: int = 0o755


def row_crc(*numbers: int, content: bytes = b"") -> int:
    """Return the checksum of a row that locates or holds bytes."""
    return zlib.crc32(content, zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers)))


def create_database(
    path: Path, *, filesystem_id: str, devices: Sequence[DeviceRecord], root: RootOwner
) -> None:
    """Make an empty catalog at `path`, durable on return: whole or not at all.

    Raises FileExistsError when there is one, `NoSpace` or `CatalogError` when none can be made.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    made = path.with_name(f".{path.name}.new")
    _remove_database(made)  # what a server that died in the middle left
    os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        _write_database(made, filesystem_id=filesystem_id, devices=devices, root=root)
    except sqlite3.Error as error:
        _remove_database(made)
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        kind = NoSpace if is_full else CatalogError
        raise kind(f"catalog {path} cannot be made: {error}") from error
    # A log without its database, which a server that died left, would be replayed into the new one.
    _remove_database(path)
    # Sums without a database are none; a database without sums would be taken for damaged.
    CatalogFiles(str(made)).make_sums(filesystem_id)
    os.rename(made, path)
    flush_directory(path.parent)


def _write_database(
    path: Path, *, filesystem_id: str, devices: Sequence[DeviceRecord], root: RootOwner
) -> None:
    """Fill an empty file; it alone is the database then, and durable."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA page_size = 4096")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in TABLES:
            connection.execute(statement)
        _fill(connection, filesystem_id=filesystem_id, devices=devices, root=root)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL")
    finally:
        connection.close()


def _remove_database(path: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _fill(
    connection: sqlite3.Connection,
    *,
    filesystem_id: str,
    devices: Sequence[DeviceRecord],
    root: RootOwner,
) -> None:
    """Insert what an empty filesystem holds: its identity, its devices, its root directory."""
    values = {
        "filesystem_id": filesystem_id,
        "object_base": 0,
        "next_number": NUMBER_FIRST,
        SEQUENCE: 0,
    }
    connection.executemany("INSERT INTO filesystem VALUES (?, ?)", values.items())
    connection.executemany(
        "INSERT INTO devices (number, device_id, path, state) VALUES (?, ?, ?, ?)",
        [(d.number, d.device_id, d.path, d.use) for d in devices],
    )
    _fill_directory(connection, ROOT_INO, root.permissions, ROOT_INO, root)
    fill_fixed_directories(connection, root)


def fill_fixed_directories(connection: sqlite3.Connection, root: RootOwner) -> None:
    """Insert the directories that every filesystem has. The root does not count `.fpfs`."""
    there = {ino for (ino,) in connection.execute("SELECT ino FROM inodes WHERE ino < 16")}
    for ino, permissions, parent, name, cookie in FIXED_DIRECTORIES:
        if ino in there:
            continue
        _fill_directory(connection, ino, permissions, parent, root)
        if parent != ROOT_INO:
            connection.execute("UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", (parent,))
        connection.execute(
            "INSERT INTO names VALUES (?, ?, ?, ?, ?)",
            (cookie, parent, name, ino, stat.S_IFDIR >> 12),
        )


def _fill_directory(
    connection: sqlite3.Connection, ino: int, permissions: int, parent: int, root: RootOwner
) -> None:
    now = time.time_ns()
    connection.execute(
        "INSERT INTO inodes VALUES (?, ?, ?, ?, 2, 0, 0, ?, ?, ?, 0, ?, NULL, NULL, 0, 0, 0)",
        (ino, stat.S_IFDIR | permissions, root.uid, root.gid, now, now, now, parent),
    )


def open_database(path: Path) -> sqlite3.Connection:
    """Open the catalog at `path` for this process alone and replay its log.

    Raises `CatalogBusy`, or `CatalogError` for what is no sound catalog. The connection may move to
    another thread; it must be used by one at a time.
    """
    # A catalog has a log and never a journal. SQLite would follow one, to any file that it names.
    path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=0,
        cached_statements=256,
    )
    try:
        _take(connection)
        _check_format(connection, path)
    except sqlite3.OperationalError as error:
        connection.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise CatalogBusy(f"catalog {path} is in use by another process") from error
        raise CatalogError(f"catalog {path} cannot be opened: {error}") from error
    except sqlite3.Error as error:
        connection.close()
        raise CatalogError(f"catalog {path} is damaged: {error}") from error
    except CatalogError:
        connection.close()
        raise
    return connection


def _take(connection: sqlite3.Connection) -> None:
    """Set up a connection: alone, write-ahead log, no checkpoint and no flush on its own."""
    # Exclusive before the first access: SQLite then keeps the log's index in its heap, and no
    # other process can come between.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES_KEPT}")
    connection.execute("PRAGMA cache_size = -16384")
    connection.execute("PRAGMA temp_store = MEMORY")
    # Takes the lock now, so that a second process is refused at its mount and not later.
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("COMMIT")


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that is not a catalog this program can write."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    if application_id != APPLICATION_ID:
        raise CatalogError(f"{path} is not a catalog of fpfs")


def flush_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
