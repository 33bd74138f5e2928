"""Deferred unlinks: names that are removed for everybody, and yet there after power loss, until
what was closed before their removal is current.

A program saves a checkpoint, closes it, and removes the one before. The removal is a transaction at
once; the new checkpoint becomes current later, when it is on the devices. Were the power to fail in
between, both would be lost. So the removal leaves a row that says what was removed, and the
transaction that makes the last of these contents current takes the row away.

Invariants:
  * A row is there from the transaction that removed the name until what was closed before is
    current; until then the inode and what it holds are not deleted. Of a content that cannot be
    kept, until another one of its file is current, the file is removed, or the space is needed.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple

from fpfs.daemon.catalog.rows.dirents import DIRECTORY_TYPE, look_up, path_of

if TYPE_CHECKING:
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.dirents import Name

REGULAR_TYPE = stat.S_IFREG >> 12


def defer(transaction: Transaction, parent: int, name: bytes, removed: Name, *, mark: int) -> None:
    """Note a name that is being removed. The table is called `withheld`."""
    transaction.execute(
        "INSERT INTO withheld VALUES (?, ?, ?, ?, ?, ?)",
        (removed.cookie, parent, name, removed.ino, removed.type, mark),
    )


def finalize(transaction: Transaction, mark: int) -> None:
    """Make removals final that only waited for contents up to `mark`."""
    transaction.execute("DELETE FROM withheld WHERE mark <= ?", (mark,))


def list_deferred(transaction: Transaction) -> list[int]:
    """Return the inodes of all names whose removal is deferred."""
    return [ino for (ino,) in transaction.execute("SELECT DISTINCT ino FROM withheld")]


def mark_anew(transaction: Transaction, mark: int) -> None:
    """Let all names wait for another content, in a new server's count."""
    transaction.execute("UPDATE withheld SET mark = ?", (mark,))


class _Row(NamedTuple):
    """A name whose removal is deferred, and the size of its inode."""

    cookie: int
    parent: int
    name: bytes
    ino: int
    type: int
    size: int


def put_back(transaction: Transaction) -> list[bytes]:
    """Put all names back, after power loss; returns a path of each.

    Not where something else has the name by now, unless that is an empty file, nor a file that
    never had a content. What was in a directory goes where its name leads to now.
    """
    rows = [
        _Row._make(row)
        for row in transaction.execute(
            "SELECT w.cookie, w.parent, w.name, w.ino, w.type, i.size FROM withheld w"
            " JOIN inodes i ON i.ino = w.ino ORDER BY w.cookie"
        ).fetchall()
    ]
    work = _PutBack(transaction, {row.ino: row for row in rows if row.type == DIRECTORY_TYPE})
    for row in rows:
        if row.type == DIRECTORY_TYPE:
            work.find_place(row.ino)
    for row in rows:
        if row.type != DIRECTORY_TYPE and (row.type != REGULAR_TYPE or row.size):
            work.put_back_file(row)
    transaction.execute("DELETE FROM withheld")
    return [path_of(transaction, ino) for ino in work.back]


class _PutBack:
    """The work on all names. `back` are the inodes that have one again."""

    def __init__(self, transaction: Transaction, directories: dict[int, _Row]) -> None:
        self._transaction = transaction
        self._directories = directories
        """Those that were removed and are not looked at yet, by inode."""
        self._places: dict[int, int] = {}
        """Where the names of a directory that was removed belong now (0: nowhere)."""
        self.back: list[int] = []

    def find_place(self, directory: int) -> int:
        """Return where the names of a directory belong: there, if it is there, or is put back."""
        above = []
        while directory in self._directories:
            above.append(self._directories.pop(directory))
            directory = above[-1].parent
        place = self._places.get(directory)
        if place is None:
            place = directory if self._is_there(directory) else 0
        while above:
            row = above.pop()
            place = self._put_back_directory(row, place) if place else 0
            self._places[row.ino] = place
        return place

    def _is_there(self, directory: int) -> bool:
        row = self._transaction.execute(
            "SELECT nlink FROM inodes WHERE ino = ?", (directory,)
        ).fetchone()
        return row is not None and row[0] > 0

    def _put_back_directory(self, row: _Row, parent: int) -> int:
        """Put a directory back; returns what has its name, if that is a directory, otherwise 0."""
        if not _make_room(self._transaction, parent, row.name):
            present = look_up(self._transaction, parent, row.name)
            return present.ino if present is not None and stat.S_ISDIR(present.mode) else 0
        self._enter(row, parent)
        self._transaction.execute(
            "UPDATE inodes SET nlink = 2, parent = ? WHERE ino = ?", (parent, row.ino)
        )
        self._transaction.execute("UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", (parent,))
        return row.ino

    def put_back_file(self, row: _Row) -> None:
        """Put a name of anything else back."""
        parent = self.find_place(row.parent)
        if parent and _make_room(self._transaction, parent, row.name):
            self._enter(row, parent)
            self._transaction.execute(
                "UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", (row.ino,)
            )

    def _enter(self, row: _Row, parent: int) -> None:
        self._transaction.execute(
            "INSERT INTO names VALUES (?, ?, ?, ?, ?)",
            (row.cookie, parent, row.name, row.ino, row.type),
        )
        self.back.append(row.ino)


def _make_room(transaction: Transaction, parent: int, name: bytes) -> bool:
    """Take an empty file that has the name now out of the way; False when it is something else."""
    row = transaction.execute(
        "SELECT n.cookie, n.ino, n.type, i.size FROM names n JOIN inodes i ON i.ino = n.ino"
        " WHERE n.parent = ? AND n.name = ?",
        (parent, name),
    ).fetchone()
    if row is None:
        return True
    cookie, ino, kind, size = row
    if kind != REGULAR_TYPE or size:
        return False
    transaction.execute("DELETE FROM names WHERE cookie = ?", (cookie,))
    transaction.execute("UPDATE inodes SET nlink = nlink - 1 WHERE ino = ?", (ino,))
    return True
