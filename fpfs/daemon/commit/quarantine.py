"""Quarantined saves: what memory, the engine and the kernel follow when a content is quarantined.

The catalog has quarantined it (`rows.quarantine`) in the transaction before.

Concurrency: trio thread only; used by `pipeline`, which holds the inode's lock meanwhile.
"""

from __future__ import annotations

import logging
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from fpfs.core.paths import show_name
from fpfs.daemon.catalog.rows.quarantine import give_up_oldest, list_quarantined
from fpfs.daemon.catalog.schema import PARTIAL_INO
from fpfs.daemon.commit.versions import GIVEN_UP_BYTES, GIVEN_UP_MAX

if TYPE_CHECKING:
    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.rows.quarantine import Quarantined, Replaced
    from fpfs.daemon.inodes.table import Inode, InodeTable

log = logging.getLogger(__name__)

ABANDONED = 127
"""In the place of a signal: nobody saw how the writer ended, since the mount ended before it."""

REFUSED_FOR_SPACE = 126
"""In the place of a signal: the writer was refused space, and closed the file without the rest."""


class Quarantine:
    """Changes inodes in memory as transactions did that quarantined a save."""

    def __init__(self, *, catalog: Catalog, engine: Engine, inodes: InodeTable) -> None:
        """Keep the parts; nothing gives way before `load`."""
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self.gives_way = False
        """Whether something may be there that `give_up_oldest` would give up."""

    async def load(self) -> None:
        """Look whether something is there."""
        if await self._catalog.read(list_quarantined):
            self._may_give_way()

    def _may_give_way(self) -> None:
        self.gives_way = True
        self._engine.set_gives_way()

    def apply(self, stored: tuple[Quarantined | None, int]) -> tuple[Quarantined | None, int]:
        """Change names in memory as the transaction did, in its order."""
        quarantined, _removal = stored
        if quarantined is None:
            return stored
        for parent, name in quarantined.lost:
            self._name_removed(parent, name)
            self._directory_changed(parent, quarantined.now_ns)
        for replaced in quarantined.replaced:
            self._apply_replaced(replaced)
        self._may_give_way()
        self._inodes.directories.added(PARTIAL_INO, quarantined.name)
        self._directory_changed(PARTIAL_INO, quarantined.now_ns)
        self._inodes.count += 1
        origin = self._origin(quarantined)
        origin.mode = quarantined.reverted.mode
        if quarantined.lost:
            origin.nlink = 0
            origin.stale = True
        return stored

    def _apply_replaced(self, replaced: Replaced) -> None:
        for name in replaced.names:
            self._name_removed(PARTIAL_INO, name)
        inode = self._inodes.cached(replaced.ino)
        if inode is not None:
            inode.nlink = replaced.nlink

    async def give_up_oldest(self) -> list[Inode]:
        """Give up some of what is quarantined, the oldest first; returns the inodes."""
        if not self.gives_way:
            return []
        given_up = await self._catalog.write_urgently(
            partial(give_up_oldest, size_bytes=GIVEN_UP_BYTES, count=GIVEN_UP_MAX)
        )
        self.gives_way = bool(given_up)
        inodes = []
        for replaced in given_up:
            log.warning(
                "the devices are full: gave up what a writer of %s had left that was cut off",
                show_name(replaced.path),
            )
            self._apply_replaced(replaced)
            inodes.append(await self._inodes.get(replaced.ino))
        if given_up:
            self._directory_changed(PARTIAL_INO, time.time_ns())
        return inodes

    def _name_removed(self, parent: int, name: bytes) -> None:
        """Let the kernel, which did not ask for it, forget the name: it holds the inode by it."""
        self._inodes.directories.removed(parent, name)
        self._engine.invalidate_name(parent, name)

    def _directory_changed(self, ino: int, now_ns: int) -> None:
        """Apply a change of names that the kernel did not ask for: it has to forget times."""
        directory = self._inodes.cached(ino)
        if directory is not None:
            self._inodes.names_changed(directory, now_ns)
            self._engine.invalidate(ino)

    async def finish(self, quarantined: Quarantined) -> None:
        """Revert the origin to its committed content, and say in the log what happened.

        Raises RuntimeError, which ends the server, when the engine does not do what the catalog has
        done: another one begins with what the catalog says.
        """
        origin, row = self._origin(quarantined), quarantined.reverted
        try:
            self._engine.revert(
                origin.ino,
                size=row.size,
                mtime_ns=row.mtime_ns,
                ctime_ns=quarantined.now_ns,
                inline=quarantined.content.inline,
                segments=quarantined.content.segments,
            )
        except OSError as error:
            raise RuntimeError(f"inode {origin.ino} does not go back: {error}") from error
        self._inodes.reverted(origin)
        try:
            for replaced in quarantined.replaced:
                if replaced.nlink == 0:
                    self._inodes.drop_if_unused(await self._inodes.get(replaced.ino))
        except OSError as error:
            log.error("an earlier content cannot be removed before the next mount: %s", error)
        log.warning(
            "the writer of %s was cut off by %s: what it wrote, %d bytes, is .fpfs/partial/%s; what"
            " was there before stays",
            show_name(quarantined.path),
            signal_name(quarantined.killed_by),
            quarantined.size,
            show_name(quarantined.name),
        )

    def _origin(self, quarantined: Quarantined) -> Inode:
        origin = self._inodes.cached(quarantined.reverted.ino)
        assert origin is not None, "an inode is in the table while a version of it is queued"
        return origin


def signal_name(number: int) -> str:
    """The name of a signal, for messages."""
    if number == ABANDONED:
        return "the end of the mount"
    if number == REFUSED_FOR_SPACE:
        return "a full device"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal
