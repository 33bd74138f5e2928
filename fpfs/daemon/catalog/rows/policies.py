"""Catalog operations on policies: what was set for directories, and where a directory is.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from fpfs.core.errors import NoSuchEntry, NotADirectory, NotPermitted
from fpfs.daemon.catalog.rows.dirents import PATH_PARTS_MAX
from fpfs.daemon.catalog.schema import NUMBER_FIRST, ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpfs.daemon.catalog.executor import Transaction


def fetch_policies(transaction: Transaction) -> dict[int, dict[str, str]]:
    """Return all settings, by directory."""
    found: dict[int, dict[str, str]] = {}
    for ino, key, value in transaction.execute("SELECT ino, key, value FROM policies"):
        found.setdefault(ino, {})[key] = value
    return found


def store_policies(
    transaction: Transaction, changes: Mapping[int, tuple[Mapping[str, str], Sequence[str]]]
) -> dict[int, dict[str, str]]:
    """Set and unset settings of directories; returns all settings of all directories.

    Raises `NoSuchEntry` when one was removed, `NotADirectory`, `NotPermitted` for those of fpfs.
    """
    for ino, (values, unset) in changes.items():
        _check_directory(transaction, ino)
        transaction.executemany(
            "INSERT OR REPLACE INTO policies VALUES (?, ?, ?)",
            [(ino, key, value) for key, value in values.items()],
        )
        transaction.executemany(
            "DELETE FROM policies WHERE ino = ? AND key = ?", [(ino, key) for key in unset]
        )
    return fetch_policies(transaction)


def _check_directory(transaction: Transaction, ino: int) -> None:
    if ROOT_INO < ino < NUMBER_FIRST:
        raise NotPermitted("what is in .fpfs has no policy")
    row = transaction.execute("SELECT mode, nlink FROM inodes WHERE ino = ?", (ino,)).fetchone()
    if row is None or row[1] == 0:
        raise NoSuchEntry(f"inode {ino} was removed")
    if not stat.S_ISDIR(row[0]):
        raise NotADirectory(f"inode {ino} is not a directory")


def name_of_inode(transaction: Transaction, ino: int) -> tuple[int, bytes] | None:
    """Return the directory and the name of a file: its oldest one; None when it has none."""
    found: tuple[int, bytes] | None = transaction.execute(
        "SELECT parent, name FROM names WHERE ino = ? ORDER BY cookie LIMIT 1", (ino,)
    ).fetchone()
    return found


def list_ancestors(transaction: Transaction, directory: int) -> list[int]:
    """Return a directory and those above it, up to the root."""
    found = [directory]
    while directory != ROOT_INO and len(found) < PATH_PARTS_MAX:
        row = transaction.execute(
            "SELECT parent FROM inodes WHERE ino = ?", (directory,)
        ).fetchone()
        if row is None or row[0] == directory:
            break
        directory = row[0]
        found.append(directory)
    return found
