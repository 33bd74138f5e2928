"""Taking over from a server that died: what it had acknowledged, and what it had open.

The arena holds what was written and not committed, and the open handles; the catalog holds names.
Both are as they were at the death, since neither needs its process to survive.

Invariants:
  * Nothing is served before everything is taken over.
  * Versions that were closed and not committed are queued in the order of their closes. One that
    somebody wrote on after its drain had begun is drained by itself, before the rest comes back.
  * Changes that may not be whole, since what tells of them is damaged, are not taken over: the
    version before stays, and who has the file open for writing gets EIO.

Concurrency: one coroutine, before the mount answers again.
"""

from __future__ import annotations

import logging
import os
import stat
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fpfs.core.engine import Part
from fpfs.core.errors import NoSuchEntry
from fpfs.core.paths import show_name
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.extents import list_names, list_orphans
from fpfs.daemon.catalog.rows.group_pins import list_held
from fpfs.daemon.catalog.rows.quarantine import forget_noted, list_noted, remove_unfinished
from fpfs.daemon.commit.quarantine import ABANDONED
from fpfs.daemon.inodes.table import LOOKUPS_UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fpfs.core.engine import Engine, Left, LeftHandle
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.commit.groups import Groups
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.inodes.replay_log import Requests
    from fpfs.daemon.inodes.table import Inode, InodeTable
    from fpfs.daemon.names.namespace import Namespace

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


class _Changed(NamedTuple):
    """An inode with changes, or one of two parts of them."""

    inode: Inode
    killed_by: int
    part: Part
    trim: bool


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
            self._inodes.lookups_known = False
            await self._requests.take_over()
        else:
            await self._requests.start_over()
        unnamed = frozenset(await self._catalog.read(list_orphans))
        kept = unnamed if with_handles else frozenset()
        left = self._engine.left()
        changed, lost = await self._recover_all(left, gone=unnamed - kept)
        abandoned = set() if with_handles else _written_to(left.handles)
        if left.handles_damaged:  # who knows who could write
            abandoned = {each.inode.ino for each in changed}
        if not with_handles:
            dirty = {each.inode.ino for each in changed if self._inodes.refresh(each.inode)}
            taken_away = await self._groups.take_away(dirty)
            # What goes with its group stays in one piece: it is not quarantined by itself, too.
            changed = [
                each._replace(killed_by=0) if each.inode.ino in taken_away else each
                for each in changed
            ]
            abandoned -= taken_away
        restored = 0
        for handle in left.handles:
            if with_handles and await self._restore_handle(handle):
                restored += 1
            else:
                self._engine.forget(handle.handle)
        lost |= self._spoil_written(left)
        await self._tell_lost(lost)
        if with_handles:
            await self._keep_referenced(kept - await self._catalog.read(list_held))
        closed = await self._queue_closed(changed, abandoned=abandoned)
        if not with_handles:
            await self._remove_unfinished({each.inode.ino for each in changed})
        for inode in self._held:
            self._inodes.release(inode)
        return Taken(
            handles=restored,
            changed=len({each.inode.ino for each in changed}),
            closed=closed,
            kept=kept,
            lost=frozenset(lost),
        )

    async def _queue_closed(
        self, changed: Sequence[_Changed], *, abandoned: Collection[int]
    ) -> int:
        """Queue what was closed and is not committed; returns how much that is."""
        closed = 0
        in_parts = {each.inode.ino for each in changed if each.part is Part.LATER}
        for inode, killed_by, part, trim in changed:
            if part is Part.LATER:
                await self._engine.recover_later(inode.ino, trim=trim)
            is_changed = self._inodes.refresh(inode)
            if part is Part.CLOSED and (inode.writers or inode.ino in in_parts):
                await self._commit.closed_before(inode)
                closed += 1
            elif is_changed and not inode.writers:
                is_abandoned = inode.ino in abandoned and part is not Part.CLOSED
                self._commit.closed(inode, killed_by=ABANDONED if is_abandoned else killed_by)
                closed += 1
        return closed

    def _spoil_written(self, left: Left) -> set[int]:
        """Refuse further writes where something is missing before; returns the inodes."""
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
                "inode %d (%s): what was written and not committed is lost, since not all of it is"
                " there; the version before stays",
                ino,
                ", ".join(show_name(name) for _parent, name in names.get(ino, ()))
                or "without a name",
            )

    async def delete_forgotten(self, unnamed: frozenset[int]) -> None:
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
    ) -> tuple[list[_Changed], set[int]]:
        """Recover all inodes with changes, of those in two parts the first; returns what there is.

        And the inodes whose changes may not be whole, which are given up.
        """
        noted = await self._catalog.read(list_noted)
        sharers = await self._catalog.read(shares.sharers)
        last: dict[int, int] = {}
        for each in left.changed:
            last[each.ino] = max(each.sequence, last.get(each.ino, 0))
        changed = []
        lost = set()
        recovered: dict[int, Inode | None] = {}
        for ino, _sequence, killed_by, part in left.changed:
            trim = ino not in sharers
            if part is not Part.LATER:
                # What was quarantined is another inode's, although the arena was not told of it.
                is_wanted = ino not in gone and last[ino] > noted.get(ino, 0)
                if is_wanted and left.is_suspect(ino):
                    lost.add(ino)
                    is_wanted = False
                recovered[ino] = await self._recover(ino, trim=trim) if is_wanted else None
            inode = recovered[ino]
            if inode is None:
                self._engine.abandon(ino)
            else:
                changed.append(_Changed(inode, killed_by, part, trim))
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
        for ino in unnamed:
            inode = await self._inodes.get(ino)
            inode.lookups = LOOKUPS_UNKNOWN
            # A killed writer's, whose name went with what it left: who was on the way to open it by
            # that name comes here. What lost its name otherwise was closed, or is open.
            inode.stale = inode.unfinished and inode.handles == 0

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

    async def _restore_handle(self, left: LeftHandle) -> bool:
        inode = await self._load(left.ino)
        if inode is None:
            log.error("inode %d of open handle %d is gone", left.ino, left.handle)
            return False
        if stat.S_ISDIR(inode.mode):
            self._namespace.directories.restore_handle(left.handle, inode, request=left.request)
        else:
            await self._namespace.files.restore_handle(
                left.handle, inode, flags=left.flags, request=left.request
            )
        return True


def _written_to(handles: Sequence[LeftHandle]) -> set[int]:
    """Inodes that somebody could write to when the mount ended."""
    return {left.ino for left in handles if left.flags & os.O_ACCMODE != os.O_RDONLY}
