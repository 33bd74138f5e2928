"""Groups: directories that a crash leaves with all their files or not at all.

A directory that is made in, or moved into, a directory with the policy `commit=group` is a group,
with everything below it; so is one that was there before, from its first commit point on. What lies
inside a group belongs to it and is no group of its own. Programs see nothing of it: it only tells
the mount after a crash which directories somebody has said to be complete.

Invariants:
  * A row of `groups` and the names that it is about change in one transaction.
  * No group lies in another, and none in `.fpfs`, but those that were taken away (DISPLACED).
  * A group that was never committed (OPEN) is where it was made until a crash ends the mount. Then
    it goes to `.fpfs/uncommitted`, or altogether when nothing in it has content.
  * A group that was committed and has changed since (CHANGED) is taken back to what it was at its
    last commit point then (`rows.group_undo`).
  * An end in good order leaves groups as they are (`note_clean_end`): all in them is durable.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.errors import FpfsError, InvalidOperation
from fpfs.core.policy import CommitPoint
from fpfs.daemon.catalog.rows import group_undo as changes
from fpfs.daemon.catalog.rows.dirents import DIRECTORY_TYPE, path_of, touch_directory
from fpfs.daemon.catalog.rows.group_contents import CHANGED
from fpfs.daemon.catalog.rows.policies import list_ancestors
from fpfs.daemon.catalog.rows.quarantine import quarantine_name
from fpfs.daemon.catalog.rows.walk import has_content, parent_of, remove_tree, walk
from fpfs.daemon.catalog.schema import FPFS_INO, ROOT_INO, UNCOMMITTED_INO

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from fpfs.core.policy import Policy
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.dirents import Renamed

    PolicyOf = Callable[[Transaction, int], Policy]
    """Returns what holds in a directory."""


class State(enum.IntEnum):
    """What is known of a group."""

    OPEN = 0
    """Made, and never committed."""
    COMMITTED = 1
    """As it was at its last commit point."""
    DISPLACED = 2
    """In `.fpfs/uncommitted`: what a crash found to be in no committed group."""
    CHANGED = CHANGED
    """Committed, and changed since."""


class TakenAway(NamedTuple):
    """What was not committed of a group when the mount ended: the group's path, and its name now.

    `name` is empty when nothing of it had content, so that nothing is left; `inos` are the inodes
    in it otherwise. `is_rolled_back`: the group itself stays, as it was at its last commit point.
    `nlinks` are counts of names that have changed, by inode.
    """

    path: bytes
    name: bytes
    inos: frozenset[int]
    is_rolled_back: bool = False
    nlinks: Mapping[int, int] = MappingProxyType({})


class Uncommitted(NamedTuple):
    """A group that is not committed: its path, and its name in `.fpfs/uncommitted` if it is there.

    `time_ns` is when it was made, or taken away.
    """

    path: bytes
    name: bytes
    time_ns: int


def are_there(transaction: Transaction) -> bool:
    """Whether there is any group."""
    return transaction.execute("SELECT 1 FROM groups LIMIT 1").fetchone() is not None


def state_of(transaction: Transaction, directory: int) -> State | None:
    """Return the state of a group; None for what is none."""
    row = transaction.execute("SELECT state FROM groups WHERE ino = ?", (directory,)).fetchone()
    return None if row is None else State(row[0])


def is_place(transaction: Transaction, directory: int, policy_of: PolicyOf) -> bool:
    """Whether directories that are made in this one are groups."""
    if policy_of(transaction, directory).commit is not CommitPoint.GROUP:
        return False
    ancestors = list_ancestors(transaction, directory)
    return FPFS_INO not in ancestors and all(
        state_of(transaction, ino) is None for ino in ancestors
    )


def made(
    transaction: Transaction, parent: int, ino: int, policy_of: PolicyOf, *, now_ns: int
) -> None:
    """Note that a directory was made: a group, where that holds."""
    if is_place(transaction, parent, policy_of):
        _set_state(transaction, ino, State.OPEN, now_ns=now_ns)


def removed(transaction: Transaction, ino: int) -> list[int]:
    """Note that a directory is no group any more; returns inodes that it referred to alone."""
    transaction.execute("DELETE FROM groups WHERE ino = ?", (ino,))
    return changes.forget(transaction, ino)


def renamed(
    transaction: Transaction,
    names: Collection[tuple[int, bytes]],
    done: Renamed,
    policy_of: PolicyOf,
    *,
    now_ns: int,
) -> tuple[list[int], list[int]]:
    """Note that names were moved; `names` are those that have appeared.

    A directory that is moved into a place of groups is committed by that, so is a group in which
    its marker appears, and a committed one when a directory leaves it. Returns the groups that are
    committed by it, and inodes without a name that no group refers to any more.
    """
    committed: list[int] = []
    freed: list[int] = []
    if done.unchanged:
        return committed, freed
    if done.replaced is not None:
        freed += removed(transaction, done.replaced.ino)
    moved = [done.moved] if done.moved_is_directory else []
    moved += [done.exchanged] if done.exchanged is not None and done.other_is_directory else []
    for ino in moved:
        committed += changes.groups_left(transaction, ino)
        if is_place(transaction, parent_of(transaction, ino), policy_of):
            committed.append(ino)
        else:
            # It is part of another group, or of none.
            freed += removed(transaction, ino)
    for directory, name in names:
        marker = policy_of(transaction, directory).commit_marker
        if name == marker.encode(errors="surrogateescape") and _is_group(
            transaction, directory, policy_of
        ):
            committed.append(directory)
    for ino in committed:
        freed += commit(transaction, ino, now_ns=now_ns)
    return committed, freed


def commit_asked_for(
    transaction: Transaction, ino: int, policy_of: PolicyOf, *, now_ns: int
) -> list[int]:
    """Commit a group that somebody names; returns what is freed, as `commit`.

    Raises `InvalidOperation` for what is none.
    """
    if state_of(transaction, ino) is State.DISPLACED:
        raise InvalidOperation("it was taken away by a crash: move it back, which commits it")
    if not _is_group(transaction, ino, policy_of):
        raise InvalidOperation("it is no group: commit=group has to hold in the directory above it")
    return commit(transaction, ino, now_ns=now_ns)


def commit(transaction: Transaction, ino: int, *, now_ns: int) -> list[int]:
    """Note that a group is complete; returns inodes that were kept for its last commit point.

    What were groups in it, before it was one itself, are none any more.
    """
    freed: list[int] = []
    for entry in list(walk(transaction, ino)):
        if entry.type == DIRECTORY_TYPE and state_of(transaction, entry.ino) is not None:
            freed += removed(transaction, entry.ino)
    _set_state(transaction, ino, State.COMMITTED, now_ns=now_ns)
    return freed + changes.begin(transaction, ino)


def refuse_incomplete(transaction: Transaction, group: int, failed: Collection[int]) -> None:
    """Raise EIO when one of the inodes that could not be kept lies in a group."""
    lost = {entry.ino for entry in walk(transaction, group)}.intersection(failed)
    if lost:
        raise FpfsError(
            f"group {group} is not committed: the content of inode {min(lost)} could not be kept"
        )


def take_away(
    transaction: Transaction, *, changed: Collection[int], now_ns: int
) -> list[TakenAway]:
    """Take away what nobody committed before a crash ended the mount.

    `changed` are inodes with bytes that were acknowledged and are about to become current.
    """
    rows = transaction.execute(
        "SELECT ino FROM groups WHERE state = ? AND settled = 0", (State.OPEN,)
    ).fetchall()
    taken = [_take_away(transaction, ino, changed, now_ns) for (ino,) in rows]
    rows = transaction.execute(
        "SELECT ino FROM groups WHERE state = ? AND settled = 0", (State.CHANGED,)
    ).fetchall()
    groups = {ino for (ino,) in rows}
    for ino in changed:
        groups.update(changes.groups_of(transaction, ino))
    taken += [_roll_back(transaction, ino, changed, now_ns) for ino in sorted(groups)]
    transaction.execute("UPDATE groups SET settled = 0 WHERE settled <> 0")
    return taken


def _take_away(
    transaction: Transaction, group: int, changed: Collection[int], now_ns: int
) -> TakenAway:
    path = path_of(transaction, group)
    entries = list(walk(transaction, group))
    if not has_content(transaction, entries, changed):
        remove_tree(transaction, group, entries, now_ns=now_ns)
        removed(transaction, group)
        return TakenAway(path, b"", frozenset())
    name = quarantine_name(path.rsplit(b"/", 1)[-1], group, now_ns)
    parent = parent_of(transaction, group)
    transaction.execute(
        "UPDATE names SET parent = ?, name = ? WHERE parent = ? AND ino = ?",
        (UNCOMMITTED_INO, name, parent, group),
    )
    transaction.execute("UPDATE inodes SET parent = ? WHERE ino = ?", (UNCOMMITTED_INO, group))
    touch_directory(transaction, parent, now_ns, nlink_change=-1)
    touch_directory(transaction, UNCOMMITTED_INO, now_ns, nlink_change=1)
    transaction.execute(
        "UPDATE groups SET state = ?, path = ?, time_ns = ? WHERE ino = ?",
        (State.DISPLACED, path, now_ns, group),
    )
    return TakenAway(path, name, frozenset(entry.ino for entry in entries))


def _roll_back(
    transaction: Transaction, group: int, changed: Collection[int], now_ns: int
) -> TakenAway:
    done = changes.roll_back(transaction, group, changed=changed, now_ns=now_ns)
    _set_state(transaction, group, State.COMMITTED, now_ns=now_ns)
    if done.displaced:
        _set_state(transaction, done.displaced, State.DISPLACED, now_ns=now_ns, path=done.path)
    return TakenAway(done.path, done.name, done.inos, is_rolled_back=True, nlinks=done.nlinks)


def note_clean_end(transaction: Transaction) -> None:
    """Note that the mount ends in good order: what is not committed stays where it is."""
    transaction.execute(
        "UPDATE groups SET settled = 1 WHERE state IN (?, ?)", (State.OPEN, State.CHANGED)
    )


def list_uncommitted(transaction: Transaction) -> list[Uncommitted]:
    """Return groups that are not committed as they are, the oldest first."""
    rows = transaction.execute(
        "SELECT g.ino, g.path, g.time_ns, n.name FROM groups g"
        " LEFT JOIN names n ON n.parent = ? AND n.ino = g.ino"
        " WHERE g.state <> ? ORDER BY g.time_ns",
        (UNCOMMITTED_INO, State.COMMITTED),
    ).fetchall()
    return [
        Uncommitted(path or path_of(transaction, ino), name or b"", time_ns)
        for ino, path, time_ns, name in rows
    ]


def _is_group(transaction: Transaction, directory: int, policy_of: PolicyOf) -> bool:
    """Whether a directory is a group, or becomes one with its first commit point."""
    state = state_of(transaction, directory)
    if state is not None:
        return state is not State.DISPLACED
    return directory != ROOT_INO and is_place(
        transaction, parent_of(transaction, directory), policy_of
    )


def _set_state(
    transaction: Transaction, ino: int, state: State, *, now_ns: int, path: bytes = b""
) -> None:
    transaction.execute(
        "INSERT OR REPLACE INTO groups VALUES (?, ?, 0, ?, ?)", (ino, state, path, now_ns)
    )
