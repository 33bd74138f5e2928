"""Changes of committed groups: noted as they happen, forgotten at a commit point, or taken back.

A name that is made, removed or replaced in a committed group leaves a row that says what was there
at the last commit point; a content that is replaced is kept as an inode of its own
(`rows.group_contents`). Programs see nothing of either.

Invariants:
  * For each name that is not as it was there is one row in `group_names`: what it was first.
  * A directory is a member of one group at most, so that a name is noted for one.
  * Names in directories that were made since are not noted: they go with their directory.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.policy import VERSIONS_MAX
from fpfs.daemon.catalog.rows.attributes import copy_inode
from fpfs.daemon.catalog.rows.dirents import DIRECTORY_TYPE, look_up, path_of, touch_directory
from fpfs.daemon.catalog.rows.group_contents import (
    NOT_THERE,
    UNCHANGED,
    content_at_commit_point,
    mark_changed,
)
from fpfs.daemon.catalog.rows.group_pins import is_held
from fpfs.daemon.catalog.rows.quarantine import quarantine_name
from fpfs.daemon.catalog.rows.versions import move, prune
from fpfs.daemon.catalog.rows.walk import Entry, has_content, parent_of, remove_below, walk
from fpfs.daemon.catalog.schema import UNCOMMITTED_INO

if TYPE_CHECKING:
    from collections.abc import Collection

    from fpfs.daemon.catalog.executor import Transaction

REGULAR_TYPE = stat.S_IFREG >> 12


def note_name(transaction: Transaction, parent: int, name: bytes) -> None:
    """Note what a name is that is about to change, if it is one of a committed group."""
    groups = groups_of(transaction, parent)
    if not groups:
        return
    transaction.execute(
        "INSERT OR IGNORE INTO group_names"
        " SELECT ?1, ?2, ?3, coalesce(n.ino, 0), coalesce(n.type, 0)"
        " FROM (SELECT 1) LEFT JOIN names n ON n.parent = ?2 AND n.name = ?3",
        (groups[0], parent, name),
    )
    mark_changed(transaction, groups[0])


def groups_of(transaction: Transaction, ino: int) -> list[int]:
    """Return the committed groups that an inode was in at their last commit points."""
    rows = transaction.execute("SELECT group_ino FROM group_members WHERE ino = ?", (ino,))
    return [group for (group,) in rows.fetchall()]


def groups_left(transaction: Transaction, directory: int) -> list[int]:
    """Return the committed group that a directory was in, if it was moved out of it."""
    return [
        group
        for group in groups_of(transaction, directory)
        if group != directory and not _is_below(transaction, directory, group)
    ]


def _is_below(transaction: Transaction, directory: int, group: int) -> bool:
    row = transaction.execute(
        "WITH RECURSIVE up (ino) AS (VALUES (?) UNION"
        " SELECT i.parent FROM up JOIN inodes i ON i.ino = up.ino)"
        " SELECT 1 FROM up WHERE ino = ?",
        (directory, group),
    ).fetchone()
    return row is not None


def begin(transaction: Transaction, group: int) -> list[int]:
    """Begin anew at a commit point; returns the inodes that nobody refers to any more."""
    freed = forget(transaction, group)
    transaction.executemany(
        "INSERT OR IGNORE INTO group_members VALUES (?, ?, ?)",
        [
            (ino, group, UNCHANGED)
            for ino in (group, *(entry.ino for entry in walk(transaction, group)))
        ],
    )
    return freed


def forget(transaction: Transaction, group: int) -> list[int]:
    """Forget what a group was; returns the inodes that nobody refers to any more."""
    rows = transaction.execute(
        "SELECT ino FROM group_names WHERE group_ino = ?1 AND ino > 0 UNION"
        " SELECT former FROM group_members WHERE group_ino = ?1 AND former > 0",
        (group,),
    ).fetchall()
    transaction.execute("DELETE FROM group_names WHERE group_ino = ?", (group,))
    transaction.execute("DELETE FROM group_members WHERE group_ino = ?", (group,))
    return [ino for (ino,) in rows if _is_unnamed(transaction, ino)]


def _is_unnamed(transaction: Transaction, ino: int) -> bool:
    row = transaction.execute("SELECT nlink FROM inodes WHERE ino = ?", (ino,)).fetchone()
    return row == (0,) and not is_held(transaction, ino)


class RolledBack(NamedTuple):
    """A group that is as it was at its last commit point.

    What was written since is in `displaced`, a directory of `.fpfs/uncommitted` (0, without `name`:
    there was nothing); `inos` are the inodes in it. `nlinks` are the new counts of names of inodes.
    """

    path: bytes
    name: bytes
    displaced: int
    inos: frozenset[int]
    nlinks: dict[int, int]


def roll_back(
    transaction: Transaction, group: int, *, changed: Collection[int], now_ns: int
) -> RolledBack:
    """Take back what has changed in a group since its last commit point.

    `changed` are inodes with bytes that were acknowledged and are about to become current.
    """
    work = _RollBack(transaction, group, changed, now_ns)
    return work.run()


class _RollBack:
    """The work on one group."""

    def __init__(
        self, transaction: Transaction, group: int, changed: Collection[int], now_ns: int
    ) -> None:
        self._transaction = transaction
        self._group = group
        self._changed = changed
        self._now_ns = now_ns
        self._path = path_of(transaction, group)
        self._counterparts: dict[int, int] = {}
        """By directory of the group: the one that has what was displaced there."""
        self._name = b""
        self._formers = self._list_formers()
        self._displaced: list[Entry] = []
        self._put_back: set[int] = set()

    def _list_formers(self) -> dict[int, int]:
        """Return former versions, by file, also of those that are about to change."""
        rows = self._transaction.execute(
            "SELECT m.ino, m.former, i.mode FROM group_members m JOIN inodes i ON i.ino = m.ino"
            " WHERE m.group_ino = ?",
            (self._group,),
        ).fetchall()
        formers = {ino: former for ino, former, _mode in rows if former > 0}
        for ino, former, mode in rows:
            if former == UNCHANGED and ino in self._changed and stat.S_ISREG(mode):
                made = content_at_commit_point(self._transaction, self._group, ino)
                if made != NOT_THERE:
                    formers[ino] = made
        return formers

    def run(self) -> RolledBack:
        """Do it."""
        transaction = self._transaction
        rows = [
            Entry(0, *row)
            for row in transaction.execute(
                "SELECT parent, name, ino, type FROM group_names WHERE group_ino = ?",
                (self._group,),
            ).fetchall()
        ]
        for row in rows:
            self._displace(row)
        for row in rows:
            if row.ino:
                self._restore(row)
        for entry in list(walk(transaction, self._group)):
            if entry.ino in self._formers:
                self._exchange(entry)
        for entry in self._displaced:
            self._keep(entry)
        self._move_former_versions_back(rows)
        nlinks = self._count_names()
        begin(transaction, self._group)
        displaced = self._counterparts.get(self._group, 0)
        entries = walk(transaction, displaced) if displaced else ()
        inos = frozenset(entry.ino for entry in entries)
        return RolledBack(self._path, self._name, displaced, inos, nlinks)

    def _displace(self, row: Entry) -> None:
        """Take out what a changed name is now."""
        current = self._transaction.execute(
            "DELETE FROM names WHERE parent = ? AND name = ? RETURNING cookie, ino, type",
            (row.parent, row.name),
        ).fetchall()
        for cookie, ino, kind in current:
            self._displaced.append(Entry(cookie, row.parent, row.name, ino, kind))

    def _restore(self, row: Entry) -> None:
        """Make a changed name what it was."""
        transaction = self._transaction
        if row.type == DIRECTORY_TYPE:
            # It may be elsewhere in the group by now.
            transaction.execute("DELETE FROM names WHERE ino = ?", (row.ino,))
            transaction.execute("UPDATE inodes SET parent = ? WHERE ino = ?", (row.parent, row.ino))
        target = self._formers.get(row.ino, row.ino)
        self._put_back.add(target)
        self._enter(row.parent, row.name, target, row.type)

    def _exchange(self, entry: Entry) -> None:
        """Give a name that stayed its former version."""
        self._transaction.execute(
            "UPDATE names SET ino = ? WHERE cookie = ?", (self._formers[entry.ino], entry.cookie)
        )
        self._displaced.append(entry)

    def _move_former_versions_back(self, rows: Collection[Entry]) -> None:
        """Move what a policy keeps of names that moved back with them; that of new ones goes."""
        places = {row.ino: (row.parent, row.name) for row in rows if row.ino}
        new = {(row.parent, row.name) for row in rows if not row.ino}
        for entry in self._displaced:
            here = (entry.parent, entry.name)
            if here in new and entry.ino in places:
                move(self._transaction, here, places[entry.ino], count=VERSIONS_MAX)
        for parent, name in new:
            prune(self._transaction, parent, name, count=0)

    def _keep(self, entry: Entry) -> None:
        """Move what has content of what was displaced to `.fpfs/uncommitted`."""
        if entry.ino in self._put_back:
            return
        self._put_back.add(entry.ino)
        below = []
        if entry.type == DIRECTORY_TYPE:
            below = list(walk(self._transaction, entry.ino))
        if has_content(self._transaction, [entry, *below], self._changed):
            directory = self._counterpart(entry.parent)
            self._enter(directory, self._free(directory, entry.name), entry.ino, entry.type)
            if entry.type == DIRECTORY_TYPE:
                self._transaction.execute(
                    "UPDATE inodes SET parent = ? WHERE ino = ?", (directory, entry.ino)
                )
        else:
            remove_below(self._transaction, below, now_ns=self._now_ns)
            self._transaction.execute(
                "UPDATE inodes SET nlink = 0 WHERE ino = ? AND mode & 61440 = ?",
                (entry.ino, stat.S_IFDIR),
            )

    def _counterpart(self, directory: int) -> int:
        """Return where in `.fpfs/uncommitted` goes what was displaced from a directory."""
        if directory in self._counterparts:
            return self._counterparts[directory]
        if directory == self._group:
            made = self._make_first_counterpart()
        else:
            above = parent_of(self._transaction, directory)
            (name,) = self._transaction.execute(
                "SELECT name FROM names WHERE parent = ? AND ino = ?", (above, directory)
            ).fetchone()
            place = self._counterpart(above)
            made = self._make_directory(directory, place, self._free(place, name))
        self._counterparts[directory] = made
        return made

    def _free(self, directory: int, name: bytes) -> bytes:
        """Return a name for what was displaced: several things may have had this one in turn."""
        if look_up(self._transaction, directory, name) is None:
            return name
        return quarantine_name(name, self._transaction.take_number(), self._now_ns)

    def _make_first_counterpart(self) -> int:
        name = self._path.rsplit(b"/", 1)[-1]
        self._name = quarantine_name(name, self._transaction.take_number(), self._now_ns)
        touch_directory(self._transaction, UNCOMMITTED_INO, self._now_ns)
        return self._make_directory(self._group, UNCOMMITTED_INO, self._name)

    def _make_directory(self, like: int, parent: int, name: bytes) -> int:
        ino = copy_inode(self._transaction, like, nlink=2)
        self._transaction.execute("UPDATE inodes SET parent = ? WHERE ino = ?", (parent, ino))
        self._enter(parent, name, ino, DIRECTORY_TYPE)
        return ino

    def _enter(self, parent: int, name: bytes, ino: int, kind: int) -> None:
        self._transaction.execute(
            "INSERT INTO names VALUES (?, ?, ?, ?, ?)",
            (self._transaction.take_number(), parent, name, ino, kind),
        )

    def _count_names(self) -> dict[int, int]:
        """Set the counts of names of all that was moved; returns them, by inode."""
        transaction = self._transaction
        trees = [self._group, *([self._counterparts[self._group]] if self._counterparts else [])]
        entries = [entry for tree in trees for entry in walk(transaction, tree)]
        directories = {*trees, UNCOMMITTED_INO}
        directories.update(entry.ino for entry in entries if entry.type == DIRECTORY_TYPE)
        files = {entry.ino for entry in (*entries, *self._displaced)} - directories
        files -= {entry.ino for entry in self._displaced if entry.type == DIRECTORY_TYPE}
        nlinks = {}
        for ino in (*files, *self._formers, *self._formers.values()):
            (nlinks[ino],) = transaction.execute(
                "SELECT count(*) FROM names WHERE ino = ?", (ino,)
            ).fetchone()
        for ino in directories:
            (count,) = transaction.execute(
                "SELECT count(*) FROM names WHERE parent = ? AND type = ?", (ino, DIRECTORY_TYPE)
            ).fetchone()
            nlinks[ino] = 2 + count
        transaction.executemany(
            "UPDATE inodes SET nlink = ? WHERE ino = ?", [(n, ino) for ino, n in nlinks.items()]
        )
        return nlinks
