"""Taking over from a server that died: what it had acknowledged, and what it had open.

The arena holds what was written and not committed, and the open handles; the catalog holds names.
Both are as they were at the death, since neither needs its process to survive.

Invariants:
  * Nothing is served before everything is taken over.
  * Versions that were closed and not committed are queued in the order of their closes.
  * Changes that may not be whole, since what tells of them is damaged, are not taken over: the
    version before stays, and who has the file open for writing gets EIO.

Concurrency: one coroutine, before the mount answers again.
"""

from __future__ import annotations

import logging
import os
import stat
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from fpfs.core.errors import NoSuchEntry
from fpfs.core.paths import show_name
from fpfs.daemon import catalog_shares as shares
from fpfs.daemon.asides import ABANDONED
from fpfs.daemon.catalog_aside import forget_noted, list_noted, remove_unfinished
from fpfs.daemon.catalog_contents import list_names, list_orphans
from fpfs.daemon.catalog_held import list_held
from fpfs.daemon.inodes import LOOKUPS_UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fpfs.core.engine import Engine, Left, LeftHandle
    from fpfs.daemon.catalog import Catalog
    from fpfs.daemon.commit import Commit
    from fpfs.daemon.groups import Groups
    from fpfs.daemon.inodes import Inode, InodeTable
    from fpfs.daemon.namespace import Namespace
    from fpfs.daemon.requests import Requests

log = logging.getLogger(__name__)


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What was taken over. `kept` are inodes without a name that must not be deleted yet, `lost`
    those whose changes could not be taken over.
    """

    handles: int
    changed: int
    closed: int
    kept: frozenset[int]
    lost: frozenset[int] = frozenset()


class TakeOver:
    """Takes over what an engine that was opened with `take_over` found."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        inodes: InodeTable,
        namespace: Namespace,
        commit: Commit,
        requests: Requests,
        groups: Groups,
    ) -> None:
        """Keep the parts."""
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self._namespace = namespace
        self._commit = commit
        self._requests = requests
        self._groups = groups
        self._held: list[Inode] = []

    async def run(self, *, with_handles: bool) -> Taken:
        """Take everything over. Without the kernel's handles what was open counts as closed."""
        if with_handles:
            await self._requests.take_over()
        else:
            await self._requests.start_over()
        unnamed = frozenset(await self._catalog.read(list_orphans))
        kept = unnamed if with_handles else frozenset()
        left = self._engine.left()
        changed, lost = await self._recover_all(left, gone=unnamed - kept)
        abandoned = set() if with_handles else _written_to(left.handles)
        if left.handles_damaged:  # who knows who could write
            abandoned = {inode.ino for inode, _killed_by in changed}
        if not with_handles:
            dirty = {inode.ino for inode, _ in changed if self._inodes.refresh(inode)}
            taken_away = await self._groups.take_away(dirty)
            # What goes with its group stays in one piece: it is not put aside by itself, too.
            changed = [(i, 0 if i.ino in taken_away else killed_by) for i, killed_by in changed]
            abandoned -= taken_away
        adopted = 0
        for handle in left.handles:
            if with_handles and await self._adopt(handle):
                adopted += 1
            else:
                self._engine.forget(handle.handle)
        lost |= self._spoil_written(left)
        await self._tell_lost(lost)
        if with_handles:
            await self._keep_referenced(kept - await self._catalog.read(list_held))
        closed = self._queue_closed(changed, abandoned=abandoned)
        if not with_handles:
            await self._remove_unfinished({inode.ino for inode, _killed_by in changed})
        for inode in self._held:
            self._inodes.release(inode)
        return Taken(
            handles=adopted, changed=len(changed), closed=closed, kept=kept, lost=frozenset(lost)
        )

    def _queue_closed(
        self, changed: Sequence[tuple[Inode, int]], *, abandoned: Collection[int]
    ) -> int:
        """Queue what was closed and is not committed; returns how much that is."""
        closed = 0
        for inode, killed_by in changed:
            if not inode.writers and self._inodes.refresh(inode):
                is_abandoned = inode.ino in abandoned
                self._commit.closed(inode, killed_by=ABANDONED if is_abandoned else killed_by)
                closed += 1
        return closed

    def _spoil_written(self, left: Left) -> set[int]:
        """Let nobody write on where something is missing before; returns the inodes."""
        spoilt = set()
        for inode in self._held:
            if inode.writers and left.is_suspect(inode.ino):
                spoilt.add(inode.ino)
        for ino in spoilt:
            self._engine.spoil(ino)
        return spoilt

    async def _tell_lost(self, lost: set[int]) -> None:
        names = (
            await self._catalog.read_many(partial(list_names, inos=sorted(lost))) if lost else {}
        )
        for ino in sorted(lost):
            log.error(
                "inode %d (%s): what was written and not committed is lost, since the staging arena"
                " is damaged; the version before stays",
                ino,
                ", ".join(map(show_name, names.get(ino, ()))) or "without a name",
            )

    async def let_go(self, unnamed: frozenset[int]) -> None:
        """Delete inodes without a name that the kernel has forgotten; after the mount answers.

        The server that died may have taken the kernel's word of that, which comes only once.
        """
        for ino in unnamed:
            is_known = await self._engine.known(ino)
            inode = self._inodes.cached(ino)
            if not is_known and inode is not None and inode.lookups == LOOKUPS_UNKNOWN:
                self._inodes.forget(ino, LOOKUPS_UNKNOWN)

    async def _recover_all(
        self, left: Left, *, gone: frozenset[int]
    ) -> tuple[list[tuple[Inode, int]], set[int]]:
        """Recover all inodes with changes; returns them, with the signals that ended writers.

        And the inodes whose changes may not be whole, which are given up.
        """
        noted = await self._catalog.read(list_noted)
        sharers = await self._catalog.read(shares.sharers)
        changed = []
        lost = set()
        for ino, sequence, killed_by in left.changed:
            inode = None
            # What was put aside is another inode's, although the arena was not told of it any more.
            is_wanted = ino not in gone and sequence > noted.get(ino, 0)
            if is_wanted and left.is_suspect(ino):
                lost.add(ino)
            elif is_wanted:
                inode = await self._recover(ino, trim=ino not in sharers)
            if inode is None:
                self._engine.abandon(ino)
            else:
                changed.append((inode, killed_by))
        if noted:
            await self._catalog.write_urgently(forget_noted)
        return changed, lost

    async def _remove_unfinished(self, kept: set[int]) -> None:
        """Remove files that were made, never closed, and of which nothing is left but a name."""
        removed = await self._catalog.write_urgently(lambda t: remove_unfinished(t, kept=kept))
        for path in removed:
            log.warning(
                "%s was made and never finished when the last mount ended: it is removed",
                show_name(path),
            )

    async def _keep_referenced(self, unnamed: frozenset[int]) -> None:
        """Hold inodes without a name until the kernel forgets them: it may refer to any of them."""
        self._inodes.lookups_known = False
        for ino in unnamed:
            (await self._inodes.get(ino)).lookups = LOOKUPS_UNKNOWN

    async def _load(self, ino: int) -> Inode | None:
        """A regular file's inode, loaded and in use until the end."""
        try:
            inode = await self._inodes.get(ino)
        except NoSuchEntry:
            return None
        inode.users += 1
        self._held.append(inode)
        if inode.is_regular:
            await self._inodes.load(inode)
        return inode

    async def _recover(self, ino: int, *, trim: bool) -> Inode | None:
        inode = await self._load(ino)
        if inode is not None:
            await self._engine.recover(ino, trim=trim)
            self._inodes.refresh(inode)
        return inode

    async def _adopt(self, left: LeftHandle) -> bool:
        inode = await self._load(left.ino)
        if inode is None:
            log.error("inode %d of open handle %d is gone", left.ino, left.handle)
            return False
        if stat.S_ISDIR(inode.mode):
            self._namespace.directories.adopt(left.handle, inode, request=left.request)
        else:
            self._namespace.files.adopt(left.handle, inode, flags=left.flags, request=left.request)
        return True


def _written_to(handles: Sequence[LeftHandle]) -> set[int]:
    """Inodes that somebody could write to when the mount ended."""
    return {left.ino for left in handles if left.flags & os.O_ACCMODE != os.O_RDONLY}
