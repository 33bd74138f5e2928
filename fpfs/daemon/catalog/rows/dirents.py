"""Catalog operations on names: make, find, link, remove, move, list.

Each function checks and changes in one transaction, so that no lock on a directory is needed above:
what POSIX wants to be atomic is.

Invariants:
  * An inode's nlink is its count of names, plus one for "." and one for each subdirectory's "..".
  * A directory that was removed has nlink 0; nothing is ever entered into it.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import enum
import stat
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from fpfs.core.errors import (
    DirectoryNotEmpty,
    EntryExists,
    InvalidOperation,
    IsADirectory,
    NoSuchEntry,
    NotADirectory,
    NotPermitted,
    ReadOnly,
    TooManyLinks,
)
from fpfs.core.limits import LINK_COUNT_MAX
from fpfs.daemon.catalog.rows.attributes import INODE_COLUMNS, InodeRow
from fpfs.daemon.catalog.schema import FPFS_INO, ROOT_INO, VERSIONS_INO, VIEW_BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fpfs.daemon.catalog.executor import Transaction

DIRECTORY_TYPE = stat.S_IFDIR >> 12

PATH_PARTS_MAX = 10_000
"""No path is followed further: a damaged catalog may lead in circles."""


class NewInode(NamedTuple):
    """What a new inode starts with."""

    mode: int
    uid: int
    gid: int
    rdev: int
    now_ns: int
    target: bytes | None = None
    layout: bytes | None = None
    unfinished: bool = False


class Removed(NamedTuple):
    """The inode that lost a name, and how many names (0: none, also for directories) it has.

    `freed` are inodes without a name that a group referred to and does not any more.
    """

    ino: int
    nlink: int
    freed: Sequence[int] = ()


class RenameMode(enum.Enum):
    """What a rename does about an existing name at the destination."""

    REPLACE = 0
    NO_REPLACE = 1
    EXCHANGE = 2


class Renamed(NamedTuple):
    """The inode moved, and the one replaced or exchanged, if any, and which are directories.

    `unchanged`: both names are of one inode, and POSIX wants nothing done. `freed` as of `Removed`.
    """

    moved: int
    moved_is_directory: bool
    replaced: Removed | None = None
    exchanged: int | None = None
    other_is_directory: bool = False
    unchanged: bool = False
    freed: Sequence[int] = ()


class Entry(NamedTuple):
    """One name of a directory, and the inode behind it."""

    cookie: int
    name: bytes
    row: InodeRow


class Name(NamedTuple):
    """A directory's entry: the inode it leads to, and its type as in readdir."""

    cookie: int
    ino: int
    type: int

    @property
    def is_directory(self) -> bool:
        """Whether it leads to a directory."""
        return self.type == DIRECTORY_TYPE


OnRemoved: TypeAlias = "Callable[[Transaction, Name], None]"


def _find(transaction: Transaction, parent: int, name: bytes) -> Name | None:
    row = transaction.execute(
        "SELECT cookie, ino, type FROM names WHERE parent = ? AND name = ?", (parent, name)
    ).fetchone()
    return None if row is None else Name._make(row)


def _find_existing(transaction: Transaction, parent: int, name: bytes) -> Name:
    found = _find(transaction, parent, name)
    if found is None:
        raise NoSuchEntry(f"{name!r} does not exist in directory {parent}")
    return found


def touch_directory(
    transaction: Transaction, ino: int, now_ns: int, *, nlink_change: int = 0
) -> None:
    """Set a directory's times after a change of its names.

    Raises `NoSuchEntry` if it was removed, `NotPermitted` for `.fpfs`, `ReadOnly` for a view.
    """
    if ino == VERSIONS_INO or ino >= VIEW_BASE:
        raise ReadOnly("names in .fpfs/versions are not to be changed")
    if ino == FPFS_INO:
        raise NotPermitted("names in .fpfs are not to be changed")
    changed = transaction.execute(
        "UPDATE inodes SET mtime_ns = ?, ctime_ns = ?, nlink = nlink + ? "
        "WHERE ino = ? AND nlink > 0",
        (now_ns, now_ns, nlink_change, ino),
    )
    if changed.rowcount == 0:
        raise NoSuchEntry(f"directory {ino} was removed")


def look_up(transaction: Transaction, parent: int, name: bytes) -> InodeRow | None:
    """Return the inode behind a name, or None."""
    row = transaction.execute(
        f"SELECT {INODE_COLUMNS} FROM names n JOIN inodes i ON i.ino = n.ino "
        "WHERE n.parent = ? AND n.name = ?",
        (parent, name),
    ).fetchone()
    return None if row is None else InodeRow._make(row)


def list_names(transaction: Transaction, directory: int, *, count: int) -> list[bytes]:
    """Return up to `count` names of a directory."""
    rows = transaction.execute(
        "SELECT name FROM names WHERE parent = ? LIMIT ?", (directory, count)
    )
    return [name for (name,) in rows]


def make(transaction: Transaction, parent: int, name: bytes, new: NewInode) -> int:
    """Make an inode of any type with one name; returns its number.

    Raises `EntryExists`, or `NoSuchEntry` when the directory was removed.
    """
    if _find(transaction, parent, name) is not None:
        raise EntryExists(f"{name!r} exists in directory {parent}")
    is_directory = stat.S_ISDIR(new.mode)
    touch_directory(transaction, parent, new.now_ns, nlink_change=int(is_directory))
    ino = transaction.take_number()
    transaction.execute(
        "INSERT INTO inodes VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0)",
        (
            ino,
            new.mode,
            new.uid,
            new.gid,
            2 if is_directory else 1,
            len(new.target or b""),
            new.now_ns,
            new.now_ns,
            new.now_ns,
            new.rdev,
            parent if is_directory else 0,
            new.target,
            new.layout,
            new.unfinished,
        ),
    )
    # The inode's number serves as its first name's cookie: both come from one counter.
    transaction.execute(
        "INSERT INTO names VALUES (?, ?, ?, ?, ?)", (ino, parent, name, ino, new.mode >> 12)
    )
    transaction.touch(ino, is_directory=is_directory)
    return ino


def link(transaction: Transaction, ino: int, parent: int, name: bytes, *, now_ns: int) -> None:
    """Give an inode another name.

    Raises `EntryExists`, `NotPermitted` for a directory, `TooManyLinks`, `NoSuchEntry` when the
    inode has no name any more or the directory was removed.
    """
    row = transaction.execute("SELECT mode, nlink FROM inodes WHERE ino = ?", (ino,)).fetchone()
    if row is None or row[1] == 0:
        raise NoSuchEntry(f"inode {ino} was removed")
    mode, nlink = row
    if _find(transaction, parent, name) is not None:
        raise EntryExists(f"{name!r} exists in directory {parent}")
    if stat.S_ISDIR(mode):
        raise NotPermitted(f"inode {ino} is a directory, which cannot have a second name")
    if nlink >= LINK_COUNT_MAX:
        raise TooManyLinks(f"inode {ino} has {nlink} names already")
    touch_directory(transaction, parent, now_ns)
    transaction.execute(
        "UPDATE inodes SET nlink = nlink + 1, ctime_ns = ? WHERE ino = ?", (now_ns, ino)
    )
    transaction.execute(
        "INSERT INTO names VALUES (?, ?, ?, ?, ?)",
        (transaction.take_number(), parent, name, ino, mode >> 12),
    )
    transaction.touch(ino)


def unlink(
    transaction: Transaction,
    parent: int,
    name: bytes,
    *,
    now_ns: int,
    on_removed: OnRemoved | None = None,
) -> Removed:
    """Remove a name of anything but a directory. The inode stays, with nlink 0 after the last.

    `on_removed` is told of the entry, in the same transaction.
    """
    found = _find_existing(transaction, parent, name)
    if found.is_directory:
        raise IsADirectory(f"{name!r} in directory {parent} is a directory")
    transaction.execute("DELETE FROM names WHERE cookie = ?", (found.cookie,))
    touch_directory(transaction, parent, now_ns)
    if on_removed is not None:
        on_removed(transaction, found)
    return _drop_link(transaction, found.ino, now_ns)


def _drop_link(transaction: Transaction, ino: int, now_ns: int) -> Removed:
    (nlink,) = transaction.execute(
        "UPDATE inodes SET nlink = nlink - 1, ctime_ns = ? WHERE ino = ? RETURNING nlink",
        (now_ns, ino),
    ).fetchone()
    return Removed(ino, nlink)


def remove_directory(
    transaction: Transaction,
    parent: int,
    name: bytes,
    *,
    now_ns: int,
    on_removed: OnRemoved | None = None,
) -> Removed:
    """Remove an empty directory. Its inode stays, with nlink 0. `on_removed` as for `unlink`."""
    found = _find_existing(transaction, parent, name)
    if not found.is_directory:
        raise NotADirectory(f"{name!r} in directory {parent} is not a directory")
    _refuse_entries(transaction, found.ino)
    transaction.execute("DELETE FROM names WHERE cookie = ?", (found.cookie,))
    touch_directory(transaction, parent, now_ns, nlink_change=-1)
    if on_removed is not None:
        on_removed(transaction, found)
    return _drop_directory(transaction, found.ino, now_ns)


def _drop_directory(transaction: Transaction, ino: int, now_ns: int) -> Removed:
    transaction.execute("UPDATE inodes SET nlink = 0, ctime_ns = ? WHERE ino = ?", (now_ns, ino))
    return Removed(ino, 0)


def _refuse_entries(transaction: Transaction, ino: int) -> None:
    if transaction.execute("SELECT 1 FROM names WHERE parent = ? LIMIT 1", (ino,)).fetchone():
        raise DirectoryNotEmpty(f"directory {ino} is not empty")


def rename(
    transaction: Transaction,
    source: tuple[int, bytes],
    destination: tuple[int, bytes],
    *,
    mode: RenameMode,
    now_ns: int,
    on_removed: OnRemoved | None = None,
) -> Renamed:
    """Move a name, with the meanings of renameat2(2). `source` and so on are (directory, name).

    `on_removed` is told of the entry that it replaces, which is still there.
    """
    moving = _find_existing(transaction, *source)
    existing = _find(transaction, *destination)
    if FPFS_INO in (moving.ino, existing.ino if existing else None):
        raise NotPermitted(".fpfs is not to be moved")
    if mode is RenameMode.EXCHANGE:
        if existing is None:
            raise NoSuchEntry(f"{destination[1]!r} does not exist in directory {destination[0]}")
        if existing.ino == moving.ino:
            return Renamed(moving.ino, moving.is_directory, unchanged=True)
        return _exchange(transaction, source, moving, destination, existing, now_ns)
    if existing is not None and mode is RenameMode.NO_REPLACE:
        raise EntryExists(f"{destination[1]!r} exists in directory {destination[0]}")
    if existing is not None and existing.ino == moving.ino:
        return Renamed(moving.ino, moving.is_directory, unchanged=True)
    _refuse_own_subtree(transaction, moving, source[0], destination[0])
    touch_directory(transaction, source[0], now_ns)
    touch_directory(transaction, destination[0], now_ns)
    if existing is None:
        _place(transaction, moving, source[0], destination, now_ns)
        return Renamed(moving.ino, moving.is_directory)
    if on_removed is not None and not existing.is_directory and not moving.is_directory:
        on_removed(transaction, existing)
    replaced = _replace(transaction, moving, existing, destination[0], now_ns)
    _place(transaction, moving, source[0], destination, now_ns)
    return Renamed(
        moving.ino, moving.is_directory, replaced, other_is_directory=existing.is_directory
    )


def _replace(
    transaction: Transaction, moving: Name, existing: Name, directory: int, now_ns: int
) -> Removed:
    """Take the name that a rename replaces out of its directory."""
    if existing.is_directory and not moving.is_directory:
        raise IsADirectory(f"inode {existing.ino} is a directory")
    if moving.is_directory and not existing.is_directory:
        raise NotADirectory(f"inode {existing.ino} is not a directory")
    if existing.is_directory:
        _refuse_entries(transaction, existing.ino)
    transaction.execute("DELETE FROM names WHERE cookie = ?", (existing.cookie,))
    if not existing.is_directory:
        return _drop_link(transaction, existing.ino, now_ns)
    _change_nlink(transaction, directory, -1)
    return _drop_directory(transaction, existing.ino, now_ns)


def _exchange(
    transaction: Transaction,
    source: tuple[int, bytes],
    moving: Name,
    destination: tuple[int, bytes],
    existing: Name,
    now_ns: int,
) -> Renamed:
    """Let two names change places."""
    _refuse_own_subtree(transaction, moving, source[0], destination[0])
    _refuse_own_subtree(transaction, existing, destination[0], source[0])
    touch_directory(transaction, source[0], now_ns)
    touch_directory(transaction, destination[0], now_ns)
    # The unique index on (parent, name) holds after every statement: step aside first. No name
    # has zero bytes, so the empty one is free.
    transaction.execute("UPDATE names SET name = x'' WHERE cookie = ?", (existing.cookie,))
    _place(transaction, moving, source[0], destination, now_ns)
    _place(transaction, existing, destination[0], source, now_ns)
    return Renamed(
        moving.ino,
        moving.is_directory,
        exchanged=existing.ino,
        other_is_directory=existing.is_directory,
    )


def _place(
    transaction: Transaction,
    moving: Name,
    directory: int,
    destination: tuple[int, bytes],
    now_ns: int,
) -> None:
    """Move an entry of `directory` to a free place; a directory takes its ".." along."""
    new_directory, new_name = destination
    crosses = new_directory != directory
    transaction.execute(
        "UPDATE names SET parent = ?, name = ? WHERE cookie = ?",
        (new_directory, new_name, moving.cookie),
    )
    transaction.execute("UPDATE inodes SET ctime_ns = ? WHERE ino = ?", (now_ns, moving.ino))
    transaction.touch(moving.ino, is_directory=moving.is_directory)
    if moving.is_directory and crosses:
        _change_nlink(transaction, directory, -1)
        _change_nlink(transaction, new_directory, 1)
        transaction.execute(
            "UPDATE inodes SET parent = ? WHERE ino = ?", (new_directory, moving.ino)
        )


def _change_nlink(transaction: Transaction, ino: int, change: int) -> None:
    transaction.execute("UPDATE inodes SET nlink = nlink + ? WHERE ino = ?", (change, ino))


def _refuse_own_subtree(
    transaction: Transaction, moving: Name, source: int, destination: int
) -> None:
    """Raise `InvalidOperation` when a directory would become its own ancestor."""
    if not moving.is_directory or source == destination:
        return
    ancestors = transaction.execute(
        "WITH RECURSIVE up (ino) AS (VALUES (?) UNION "
        "SELECT i.parent FROM up JOIN inodes i ON i.ino = up.ino) SELECT ino FROM up",
        (destination,),
    ).fetchall()
    if (moving.ino,) in ancestors:
        raise InvalidOperation(f"directory {moving.ino} cannot be moved below itself")


def list_entries(
    transaction: Transaction, directory: int, *, after_cookie: int, below_cookie: int, count: int
) -> list[Entry]:
    """Return up to `count` entries between two cookies, in the order of cookies."""
    rows = transaction.execute(
        f"SELECT n.cookie, n.name, {INODE_COLUMNS} FROM names n JOIN inodes i ON i.ino = n.ino "
        "WHERE n.parent = ? AND n.cookie > ? AND n.cookie < ? ORDER BY n.cookie LIMIT ?",
        (directory, after_cookie, below_cookie, count),
    )
    return [Entry(row[0], row[1], InodeRow._make(row[2:])) for row in rows]


def path_of(transaction: Transaction, ino: int) -> bytes:
    """Return a path of an inode from the root, or nothing when it has no name.

    Without an index by inode this may look at every name: it is for reports.
    """
    parts: list[bytes] = []
    former = transaction.execute(
        "SELECT parent, CAST(name || '@' || number AS BLOB) FROM former WHERE ino = ?", (ino,)
    ).fetchone()
    if former is not None:
        above = path_of(transaction, former[0])
        return b"/".join(filter(None, (b".fpfs/versions", above, former[1])))
    while ino != ROOT_INO:
        row = _name_of(transaction, ino)
        if row is None or len(parts) > PATH_PARTS_MAX:
            return b""
        ino, name = row
        parts.append(name)
    return b"/".join(reversed(parts))


def _name_of(transaction: Transaction, ino: int) -> tuple[int, bytes] | None:
    """Return the directory and the name of an entry for an inode."""
    row = first_name(transaction, ino)
    if row is None:
        query = "SELECT parent, name FROM names WHERE ino = ? LIMIT 1"
        row = transaction.execute(query, (ino,)).fetchone()
    return None if row is None else (int(row[0]), bytes(row[1]))


def first_name(transaction: Transaction, ino: int) -> tuple[int, bytes] | None:
    """Return the directory and the name that an inode was made with, if it still has that name."""
    # The entry has the same number.
    query = "SELECT parent, name FROM names WHERE cookie = ?1 AND ino = ?1"
    row = transaction.execute(query, (ino,)).fetchone()
    return None if row is None else (int(row[0]), bytes(row[1]))
