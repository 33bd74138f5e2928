"""What a mount does to the catalog after a crash, done to an image: what is not whole is not shown.

A crash leaves names that were removed too early, groups that nobody committed, and files that were
made and never finished. A mount sees to them before it answers; an export shows what it would show
after a loss of power, since what staging memory holds is not copied.

Concurrency: one thread; the function owns the image that it changes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fpfs.core.paths import show_name
from fpfs.daemon.catalog.executor import Transaction
from fpfs.daemon.catalog.rows import deferred_unlink, groups, quarantine

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

_LEFT = (
    "SELECT EXISTS (SELECT 1 FROM withheld)"
    " OR EXISTS (SELECT 1 FROM groups WHERE state IN (0, 3) AND settled = 0)"
    " OR EXISTS (SELECT 1 FROM inodes WHERE unfinished = 1)"
)


def see_to_it(connection: sqlite3.Connection) -> list[str]:
    """Do to an image what a mount would do first; returns what that was, in words.

    A catalog in which that cannot be done, since names or inodes are missing, is left as it is.
    """
    (is_left,) = connection.execute(_LEFT).fetchone()
    if not is_left:
        return []
    connection.execute("BEGIN")
    try:
        done = list(_see_to_it(Transaction(connection)))
    except (OSError, TypeError, ValueError) as error:
        connection.execute("ROLLBACK")
        return [f"what a crash left is copied with the rest: the catalog is damaged ({error})"]
    connection.execute("COMMIT")
    return done


def _see_to_it(transaction: Transaction) -> Iterator[str]:
    for path in deferred_unlink.put_back(transaction):
        yield f"{show_name(path)} was removed after something was saved that is lost: it is copied"
    for group in groups.take_away(transaction, changed=(), now_ns=time.time_ns()):
        where = "what was written is copied with --path .fpfs/uncommitted"
        yield (
            f"group {show_name(group.path)} was not committed:"
            f" {where if group.name else 'nothing of that was durable'}"
        )
    for path in quarantine.remove_unfinished(transaction, kept=set()):
        yield f"{show_name(path)} was made and never finished: it is left out"
