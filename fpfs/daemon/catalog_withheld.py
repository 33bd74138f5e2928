"""Withheld names: removed for everybody, and yet there after power loss, until what was closed
before their removal is current.

A program saves a checkpoint, closes it, and removes the one before. The removal is a transaction at
once; the new checkpoint becomes current later, when it is on the devices. Were the power to fail in
between, both would be lost. So the removal leaves a row that says what was removed, and the
transaction that follows the contents takes the row away.

Invariants:
  * A row is there from the transaction that removed the name until what was closed before is
    current, or given up; until then the inode and what it holds are not deleted.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from fpfs.daemon.catalog_names import DIRECTORY_TYPE, path_of

if TYPE_CHECKING:
    from fpfs.daemon.catalog_names import Name
    from fpfs.daemon.catalog_worker import Transaction

REGULAR_TYPE = stat.S_IFREG >> 12


def withhold(
    transaction: Transaction, parent: int, name: bytes, removed: Name, *, mark: int
) -> None:
    """Note a name that is being removed."""
    transaction.execute(
        "INSERT INTO withheld VALUES (?, ?, ?, ?, ?, ?)",
        (removed.cookie, parent, name, removed.ino, removed.type, mark),
    )


def let_go(transaction: Transaction, mark: int) -> None:
    """Forget names that only waited for contents up to `mark`."""
    transaction.execute("DELETE FROM withheld WHERE mark <= ?", (mark,))


def list_withheld(transaction: Transaction) -> list[int]:
    """Return the inodes of all names that are withheld."""
    return [ino for (ino,) in transaction.execute("SELECT DISTINCT ino FROM withheld")]


def mark_anew(transaction: Transaction, mark: int) -> None:
    """Let all names wait for another content, in a new server's count."""
    transaction.execute("UPDATE withheld SET mark = ?", (mark,))


def put_back(transaction: Transaction) -> list[bytes]:
    """Put all names back, after power loss; returns a path of each.

    Not where something else has the name by now, unless that is an empty file, nor a file that
    never had a content.
    """
    rows = transaction.execute(
        "SELECT w.cookie, w.parent, w.name, w.ino, w.type, i.size FROM withheld w"
        " JOIN inodes i ON i.ino = w.ino ORDER BY w.type <> ?, w.cookie",
        (DIRECTORY_TYPE,),
    ).fetchall()
    transaction.execute(
        "UPDATE inodes SET nlink = 2 WHERE nlink = 0 AND ino IN"
        " (SELECT ino FROM withheld WHERE type = ?)",
        (DIRECTORY_TYPE,),
    )
    back = []
    for cookie, parent, name, ino, kind, size in rows:
        never_had = kind == REGULAR_TYPE and size == 0
        if never_had or not _make_room(transaction, parent, name):
            _leave(transaction, ino, kind)
            continue
        transaction.execute(
            "INSERT INTO names VALUES (?, ?, ?, ?, ?)", (cookie, parent, name, ino, kind)
        )
        changed = parent if kind == DIRECTORY_TYPE else ino
        transaction.execute("UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", (changed,))
        back.append(ino)
    transaction.execute("DELETE FROM withheld")
    return [path_of(transaction, ino) for ino in back]


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


def _leave(transaction: Transaction, ino: int, kind: int) -> None:
    """Let a directory that is not put back go the way of inodes without a name."""
    if kind == DIRECTORY_TYPE:
        transaction.execute("UPDATE inodes SET nlink = 0 WHERE ino = ?", (ino,))
