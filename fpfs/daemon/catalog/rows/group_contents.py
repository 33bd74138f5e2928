"""Contents of committed groups: what a file had at the last commit point outlives its next version.

When the first version after a commit point becomes current, the content before is split off as an
inode of its own, which shares its blocks, and has no name. A commit point drops it; the mount after
a crash gives it the name of the file (`rows.group_undo`).

Invariants:
  * What is in a committed group at its commit point has a row in `group_members`.
  * An inode that a group refers to is not deleted, whatever becomes of its names (`held`).

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfs.daemon.catalog.rows import extents
from fpfs.daemon.catalog.rows.clone import split_off
from fpfs.daemon.catalog.rows.group_pins import are_there

if TYPE_CHECKING:
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.extents import Version

UNCHANGED = 0
"""In the place of a former version: the file's own is the one of the commit point."""
NOT_THERE = -1
"""The same: at the commit point somebody had made the file, and finished nothing of it."""

CHANGED = 3
"""The state of a group that was committed, and has changed since."""


def make_one_current(transaction: Transaction, version: Version) -> int:
    """Make a version current as `rows.extents.make_one_current`, and keep what groups need."""
    if are_there(transaction):
        keep_former(transaction, version.ino)
    return extents.make_one_current(transaction, version)


def keep_former(transaction: Transaction, ino: int) -> None:
    """Keep the committed content of an inode for the groups that it is in."""
    rows = transaction.execute(
        "SELECT group_ino FROM group_members WHERE ino = ? AND former = ?", (ino, UNCHANGED)
    ).fetchall()
    for (group,) in rows:
        former = content_at_commit_point(transaction, group, ino)
        transaction.execute(
            "UPDATE group_members SET former = ? WHERE ino = ? AND group_ino = ?",
            (former, ino, group),
        )
        mark_changed(transaction, group)


def content_at_commit_point(transaction: Transaction, group: int, ino: int) -> int:
    """Make an inode of what a file in a group has, which is about to change; returns it.

    `NOT_THERE`: nothing of it was finished, and its names are noted to have been nobody's.
    """
    if not _is_unfinished(transaction, ino):
        return split_off(transaction, ino, nlink=0)
    _note_absence(transaction, group, ino)
    return NOT_THERE


def mark_changed(transaction: Transaction, group: int) -> None:
    """Note that a committed group is not as it was at its commit point any more."""
    transaction.execute(
        "UPDATE groups SET state = ?, settled = 0 WHERE ino = ? AND state <> ?",
        (CHANGED, group, CHANGED),
    )


def _is_unfinished(transaction: Transaction, ino: int) -> bool:
    row = transaction.execute("SELECT unfinished FROM inodes WHERE ino = ?", (ino,)).fetchone()
    return bool(row[0])


def _note_absence(transaction: Transaction, group: int, ino: int) -> None:
    """Note that the names of a file that was not finished at the commit point were nobody's."""
    transaction.execute(
        "INSERT OR IGNORE INTO group_names SELECT ?, n.parent, n.name, 0, 0 FROM names n"
        " JOIN group_members m ON m.ino = n.parent AND m.group_ino = ? WHERE n.ino = ?",
        (group, group, ino),
    )
