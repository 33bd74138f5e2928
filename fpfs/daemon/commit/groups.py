"""Groups in a running server: which changes of names the catalog notes, and what commits them.

Invariants:
  * Where no directory has commit=group, and there is no group, no operation does more than to look
    at a flag.
  * A commit point comes after everything that was closed before it is current.

Concurrency: trio thread only; what `making` and the like return runs in the catalog's worker.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fpfs.core.errors import NoSuchEntry
from fpfs.core.paths import show_name
from fpfs.daemon.catalog.rows import group_undo as changes
from fpfs.daemon.catalog.rows import groups
from fpfs.daemon.catalog.rows.dirents import look_up

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.dirents import Removed, Renamed
    from fpfs.daemon.catalog.rows.groups import TakenAway, Uncommitted
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.inodes.policies import Policies
    from fpfs.daemon.inodes.table import InodeTable

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Groups:
    """The groups of one mounted filesystem."""

    def __init__(
        self, *, catalog: Catalog, inodes: InodeTable, policies: Policies, commit: Commit
    ) -> None:
        """Know of no group before `load`."""
        self._catalog = catalog
        self._inodes = inodes
        self._policies = policies
        self._commit = commit
        self._are_there = False

    async def load(self) -> None:
        """See whether there are any."""
        self._are_there = await self._catalog.read(groups.are_there)

    @property
    def _are_wanted(self) -> bool:
        """Whether there may be a group, now or with the next name."""
        if not self._are_there:
            self._are_there = self._policies.any_sets("commit")
        return self._are_there

    # What changes of names do besides.

    def making(
        self,
        parent: int,
        name: bytes,
        make: Callable[[Transaction], Result],
        *,
        is_directory: bool = False,
    ) -> Callable[[Transaction], Result]:
        """Return an operation that makes a name, and notes that; a directory may be a group."""
        if not self._are_wanted:
            return make

        def making(transaction: Transaction) -> Result:
            changes.note_name(transaction, parent, name)
            made = make(transaction)
            if is_directory:
                assert isinstance(made, int), "the inode of the directory"
                policy_of = self._policies.effective
                groups.made(transaction, parent, made, policy_of, now_ns=time.time_ns())
            return made

        return making

    def removing(
        self, parent: int, name: bytes, remove: Callable[[Transaction], Removed]
    ) -> Callable[[Transaction], Removed]:
        """Return an operation that removes a name, and notes that."""
        if not self._are_wanted:
            return remove

        def removing(transaction: Transaction) -> Removed:
            changes.note_name(transaction, parent, name)
            gone = remove(transaction)
            # Only directories have anything to free.
            return (
                gone if gone.nlink else gone._replace(freed=groups.removed(transaction, gone.ino))
            )

        return removing

    def renaming(
        self,
        source: tuple[int, bytes],
        destination: tuple[int, bytes],
        rename: Callable[[Transaction], Renamed],
    ) -> Callable[[Transaction], Renamed]:
        """Return an operation that renames, notes that, and commits what it completes.

        It fails with EIO when a content of such a group could not be kept.
        """
        if not self._are_wanted:
            return rename
        failed = self._failed()

        def renaming(transaction: Transaction) -> Renamed:
            changes.note_name(transaction, *source)
            changes.note_name(transaction, *destination)
            done = rename(transaction)
            # Exchanged names have both appeared.
            appeared = [destination] if done.exchanged is None else [destination, source]
            committed, freed = groups.renamed(
                transaction, appeared, done, self._policies.effective, now_ns=time.time_ns()
            )
            if failed:
                for group in committed:
                    groups.refuse_incomplete(transaction, group, failed)
            return done._replace(freed=freed)

        return renaming

    async def wait_removable(self, parent: int, name: bytes) -> bool:
        """Return when a directory may be removed: a group goes after what was closed before.

        Says whether it is one: then its removal is final at once, since it would be back empty.
        """
        if not self._are_wanted:
            return False

        def is_group(transaction: Transaction) -> bool:
            row = look_up(transaction, parent, name)
            return row is not None and groups.state_of(transaction, row.ino) is not None

        if not await self._catalog.read(is_group):
            return False
        await self._commit.wait_queued()
        return True

    async def delete_freed(self, freed: Sequence[int]) -> None:
        """Delete inodes without a name that a group referred to and does not any more."""
        for ino in freed:
            was_kept = self._inodes.cached(ino) is None
            with contextlib.suppress(NoSuchEntry):  # it went meanwhile
                inode = await self._inodes.get(ino)
                self._inodes.count += was_kept  # It was not counted while it was kept.
                self._inodes.drop_if_unused(inode)

    def _failed(self) -> frozenset[int]:
        """Inodes whose last content could not be kept."""
        return frozenset(failure.ino for failure in self._commit.statistics().failures)

    # What the tools and the server ask for.

    async def commit(self, ino: int) -> None:
        """Commit a group, durably, with everything in it that was closed before.

        Raises `InvalidOperation` for what is no group, EIO when a content could not be kept.
        """
        await self._commit.wait_queued()
        failed = self._failed()

        def commit(transaction: Transaction) -> list[int]:
            freed = groups.commit_asked_for(
                transaction, ino, self._policies.effective, now_ns=time.time_ns()
            )
            groups.refuse_incomplete(transaction, ino, failed)
            return freed

        await self.delete_freed(await self._catalog.write(commit))
        await self._catalog.make_durable()

    async def uncommitted(self) -> Sequence[Uncommitted]:
        """Return groups that are not committed."""
        if not self._are_there:
            return ()
        return await self._catalog.read_many(groups.list_uncommitted)

    async def take_away(self, changed: Collection[int]) -> frozenset[int]:
        """Take away what nobody committed before a crash; returns the inodes in what is left of it.

        `changed` are inodes with acknowledged bytes that are about to become current.
        """
        if not self._are_there:
            return frozenset()
        taken = await self._catalog.write_many(
            partial(groups.take_away, changed=changed, now_ns=time.time_ns())
        )
        for group in taken:
            for ino, nlink in group.nlinks.items():
                inode = self._inodes.cached(ino)
                if inode is not None:
                    inode.nlink = nlink
            _report(group)
        return frozenset().union(*(group.inos for group in taken))

    async def note_clean_end(self) -> None:
        """Note, durably, that the mount ends in good order: groups stay as they are."""
        if self._are_there:
            await self._catalog.write_urgently(groups.note_clean_end)
            await self._catalog.make_durable()


def _report(group: TakenAway) -> None:
    """Say in the log what became of a group."""
    if group.is_rolled_back:
        what = "was changed and not committed again"
        if group.name:
            outcome = f"what was written is .fpfs/uncommitted/{show_name(group.name)}, and"
        else:
            outcome = "nothing of that was durable, and"
        outcome += " it is as it was"
    else:
        what = "was not committed"
        if group.name:
            outcome = f"it is .fpfs/uncommitted/{show_name(group.name)}"
        else:
            outcome = "nothing in it was durable, and it is removed"
    path = show_name(group.path)
    log.warning("group %s %s when the last mount ended: %s", path, what, outcome)
