"""Inodes without a name that a group still refers to: a crash would bring them back.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fpfs.daemon.catalog.executor import Transaction


def are_there(transaction: Transaction) -> bool:
    """Whether there is a group that was committed, so that an inode may be held."""
    return transaction.execute("SELECT 1 FROM group_members LIMIT 1").fetchone() is not None


def is_held(transaction: Transaction, ino: int) -> bool:
    """Whether a group refers to an inode: by a name that it had, or as a former version."""
    row = transaction.execute(
        "SELECT EXISTS (SELECT 1 FROM group_names WHERE ino = ?1)"
        " OR EXISTS (SELECT 1 FROM group_members WHERE former = ?1 AND former > 0)",
        (ino,),
    ).fetchone()
    return bool(row[0])


def list_held(transaction: Transaction) -> frozenset[int]:
    """Return inodes without a name that groups refer to."""
    rows = transaction.execute(
        "SELECT i.ino FROM inodes i WHERE i.nlink = 0 AND i.ino IN (SELECT ino FROM group_names"
        " UNION SELECT former FROM group_members WHERE former > 0)"
    ).fetchall()
    return frozenset(ino for (ino,) in rows)
