"""Directories with everything below them, as the catalog has them.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.errors import DamagedData
from fpfs.daemon.catalog.rows.dirents import DIRECTORY_TYPE, touch_directory
from fpfs.daemon.catalog.rows.versions import prune

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from fpfs.daemon.catalog.executor import Transaction


class Entry(NamedTuple):
    """A name somewhere below a directory."""

    cookie: int
    parent: int
    name: bytes
    ino: int
    type: int


def walk(transaction: Transaction, directory: int) -> Iterator[Entry]:
    """Yield all names below a directory, those of a directory before those in it.

    Each directory once, although a damaged catalog may have them in a circle.
    """
    todo = [directory]
    seen = {directory}
    while todo:
        rows = transaction.execute(
            "SELECT cookie, parent, name, ino, type FROM names WHERE parent = ?", (todo.pop(),)
        ).fetchall()
        for row in rows:
            entry = Entry._make(row)
            yield entry
            if entry.type == DIRECTORY_TYPE and entry.ino not in seen:
                seen.add(entry.ino)
                todo.append(entry.ino)


def has_content(
    transaction: Transaction, entries: Collection[Entry], changed: Collection[int]
) -> bool:
    """Whether any of these names is of a file with bytes in it."""
    for entry in entries:
        if entry.type != stat.S_IFREG >> 12:
            continue
        row = transaction.execute("SELECT size FROM inodes WHERE ino = ?", (entry.ino,)).fetchone()
        if (row and row[0]) or entry.ino in changed:
            return True
    return False


def remove_tree(
    transaction: Transaction, directory: int, entries: Collection[Entry], *, now_ns: int
) -> None:
    """Remove a directory with everything in it. Inodes without a name stay, with nlink 0."""
    remove_below(transaction, entries, now_ns=now_ns)
    parent = parent_of(transaction, directory)
    transaction.execute("DELETE FROM names WHERE parent = ? AND ino = ?", (parent, directory))
    transaction.execute("UPDATE inodes SET nlink = 0 WHERE ino = ?", (directory,))
    touch_directory(transaction, parent, now_ns, nlink_change=-1)


def parent_of(transaction: Transaction, directory: int) -> int:
    """Return the directory that a directory is in. Raises `DamagedData` when it is not there."""
    row = transaction.execute("SELECT parent FROM inodes WHERE ino = ?", (directory,)).fetchone()
    if row is None:
        raise DamagedData(f"directory inode {directory} is not in the catalog: run fpfs fsck")
    return int(row[0])


def remove_below(transaction: Transaction, entries: Collection[Entry], *, now_ns: int) -> None:
    """Remove names, their former versions, and everything below them, which is among them."""
    for entry in entries:
        transaction.execute("DELETE FROM names WHERE cookie = ?", (entry.cookie,))
        prune(transaction, entry.parent, entry.name, count=0)
        lost = "0" if entry.type == DIRECTORY_TYPE else "nlink - 1"
        transaction.execute(
            f"UPDATE inodes SET nlink = {lost}, ctime_ns = ? WHERE ino = ?", (now_ns, entry.ino)
        )
