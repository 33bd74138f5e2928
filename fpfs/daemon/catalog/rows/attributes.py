"""Catalog operations on single inodes: attributes, symbolic link targets, extended attributes.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.errors import NoAttribute, NoSuchEntry
from fpfs.core.limits import TIME_NS_MAX

if TYPE_CHECKING:
    from fpfs.daemon.catalog.executor import Transaction


CAPABILITIES = b"security.capability"
"""The attribute that holds a file's capabilities."""


class InodeRow(NamedTuple):
    """An inode as stored; `layout` is MessagePack, `parent` is 0 unless it is a directory."""

    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int
    size: int
    allocated_bytes: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    rdev: int
    parent: int
    layout: bytes | None
    unfinished: int
    kept: int
    has_xattrs: bool


INODE_COLUMNS = (
    "i.ino, i.mode, i.uid, i.gid, i.nlink, i.size, i.allocated_bytes, i.atime_ns, i.mtime_ns, "
    "i.ctime_ns, i.rdev, i.parent, i.layout, i.unfinished, i.kept, "
    "EXISTS (SELECT 1 FROM xattrs x WHERE x.ino = i.ino)"
)


def fetch_inode(transaction: Transaction, ino: int) -> InodeRow:
    """Return an inode; `NoSuchEntry` when there is none."""
    row = transaction.execute(
        f"SELECT {INODE_COLUMNS} FROM inodes i WHERE i.ino = ?", (ino,)
    ).fetchone()
    if row is None:
        raise NoSuchEntry(f"inode {ino} does not exist")
    return InodeRow._make(row)


_COPIED_COLUMNS = (
    "mode, uid, gid, size, allocated_bytes, atime_ns, mtime_ns, ctime_ns, rdev, parent, target,"
    " layout, version"
)


def copy_inode(transaction: Transaction, ino: int, *, nlink: int) -> int:
    """Make an inode with the attributes of another, extended ones too; returns its number."""
    made = transaction.take_number()
    transaction.execute(
        f"INSERT INTO inodes (ino, nlink, {_COPIED_COLUMNS})"
        f" SELECT ?, ?, {_COPIED_COLUMNS} FROM inodes WHERE ino = ?",
        (made, nlink, ino),
    )
    transaction.execute(
        "INSERT INTO xattrs SELECT ?, name, value FROM xattrs WHERE ino = ?", (made, ino)
    )
    return made


def store_layout(transaction: Transaction, ino: int, layout: bytes) -> None:
    """Let new chunks of a file go where `layout` says."""
    transaction.execute("UPDATE inodes SET layout = ? WHERE ino = ?", (layout, ino))


class Changes(NamedTuple):
    """New values of attributes; None keeps the old one."""

    permissions: int | None = None
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None

    def truncated(self) -> Changes:
        """Return these with times that can be stored, as the kernel's `timestamp_truncate` does."""
        return self._replace(atime_ns=_truncated(self.atime_ns), mtime_ns=_truncated(self.mtime_ns))


def _truncated(time_ns: int | None) -> int | None:
    return None if time_ns is None else max(-TIME_NS_MAX, min(time_ns, TIME_NS_MAX))


def store_attributes(
    transaction: Transaction, ino: int, changes: Changes, *, ctime_ns: int
) -> None:
    """Change attributes of an inode. `permissions` are the low twelve bits of the mode."""
    transaction.execute(
        "UPDATE inodes SET mode = (mode & ~4095) | coalesce(?, mode & 4095), "
        "uid = coalesce(?, uid), gid = coalesce(?, gid), atime_ns = coalesce(?, atime_ns), "
        "mtime_ns = coalesce(?, mtime_ns), ctime_ns = ? WHERE ino = ?",
        (*changes, ctime_ns, ino),
    )


def drop_privileges(transaction: Transaction, ino: int) -> None:
    """Take away what a change of content or owner by others ends: set-uid, set-gid, capabilities.

    Set-gid without group execution marks mandatory locking, not a privilege: it stays.
    """
    transaction.execute(
        "UPDATE inodes SET mode = mode & ~2048 & ~(CASE WHEN mode & 8 THEN 1024 ELSE 0 END) "
        "WHERE ino = ?",
        (ino,),
    )
    transaction.execute("DELETE FROM xattrs WHERE ino = ? AND name = ?", (ino, CAPABILITIES))


def fetch_target(transaction: Transaction, ino: int) -> bytes:
    """Return a symbolic link's target; `NoSuchEntry` when there is no such link."""
    row = transaction.execute("SELECT target FROM inodes WHERE ino = ?", (ino,)).fetchone()
    if row is None or row[0] is None:
        raise NoSuchEntry(f"symbolic link {ino} does not exist")
    target: bytes = row[0]
    return target


def fetch_xattr(transaction: Transaction, ino: int, name: bytes) -> bytes:
    """Return an extended attribute's value; `NoAttribute` when there is none."""
    row = transaction.execute(
        "SELECT value FROM xattrs WHERE ino = ? AND name = ?", (ino, name)
    ).fetchone()
    if row is None:
        raise NoAttribute(f"inode {ino} has no attribute {name!r}")
    value: bytes = row[0]
    return value


def list_xattrs(transaction: Transaction, ino: int) -> list[bytes]:
    """Return the names of an inode's extended attributes."""
    rows = transaction.execute("SELECT name FROM xattrs WHERE ino = ? ORDER BY name", (ino,))
    return [name for (name,) in rows]


def store_xattr(
    transaction: Transaction, ino: int, name: bytes, value: bytes, *, ctime_ns: int
) -> None:
    """Set an extended attribute."""
    transaction.execute("INSERT OR REPLACE INTO xattrs VALUES (?, ?, ?)", (ino, name, value))
    transaction.execute("UPDATE inodes SET ctime_ns = ? WHERE ino = ?", (ctime_ns, ino))


def remove_xattr(transaction: Transaction, ino: int, name: bytes, *, ctime_ns: int) -> None:
    """Remove an extended attribute; `NoAttribute` when there is none."""
    removed = transaction.execute("DELETE FROM xattrs WHERE ino = ? AND name = ?", (ino, name))
    if removed.rowcount == 0:
        raise NoAttribute(f"inode {ino} has no attribute {name!r}")
    transaction.execute("UPDATE inodes SET ctime_ns = ? WHERE ino = ?", (ctime_ns, ino))
