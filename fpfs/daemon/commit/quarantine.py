"""Quarantined saves: what memory, the engine and the kernel follow when a content is quarantined.

The catalog has quarantined it (`rows.quarantine`) in the transaction before.

Concurrency: trio thread only; used by `pipeline`, which holds the inode's lock meanwhile.
"""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

from fpfs.core.paths import show_name
from fpfs.daemon.catalog.schema import PARTIAL_INO

if TYPE_CHECKING:
    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.rows.quarantine import Quarantined
    from fpfs.daemon.inodes.table import Inode, InodeTable

log = logging.getLogger(__name__)

ABANDONED = 127
"""In the place of a signal: nobody saw how the writer ended, since the mount ended before it."""


class Quarantine:
    """Changes inodes in memory as transactions did that quarantined a save."""

    def __init__(self, *, engine: Engine, inodes: InodeTable) -> None:
        """Keep the parts."""
        self._engine = engine
        self._inodes = inodes

    def apply(self, stored: tuple[Quarantined | None, int]) -> tuple[Quarantined | None, int]:
        """Change names in memory as the transaction did, in its order."""
        quarantined, _removal = stored
        if quarantined is None:
            return stored
        for parent, name in quarantined.lost:
            self._name_removed(parent, name)
            self._directory_changed(parent, quarantined.now_ns)
        for ino, names, nlink in quarantined.replaced:
            for name in names:
                self._name_removed(PARTIAL_INO, name)
            replaced = self._inodes.cached(ino)
            if replaced is not None:
                replaced.nlink = nlink
        self._inodes.directories.added(PARTIAL_INO, quarantined.name)
        self._directory_changed(PARTIAL_INO, quarantined.now_ns)
        self._inodes.count += 1
        origin = self._origin(quarantined)
        origin.mode = quarantined.reverted.mode
        if quarantined.lost:
            origin.nlink = 0
            origin.stale = True
        return stored

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
            for ino, _names, nlink in quarantined.replaced:
                if nlink == 0:
                    self._inodes.drop_if_unused(await self._inodes.get(ino))
        except OSError as error:
            log.error("an earlier content cannot be removed before the next mount: %s", error)
        log.warning(
            "the writer of %s was cut off by %s: what it wrote, %d bytes, is .fpfs/partial/%s; %s",
            show_name(quarantined.path),
            signal_name(quarantined.killed_by),
            quarantined.size,
            show_name(quarantined.name),
            "there was none before" if quarantined.lost else "the content before stays",
        )

    def _origin(self, quarantined: Quarantined) -> Inode:
        origin = self._inodes.cached(quarantined.reverted.ino)
        assert origin is not None, "an inode is in the table while a version of it is queued"
        return origin


def signal_name(number: int) -> str:
    """The name of a signal, for messages."""
    if number == ABANDONED:
        return "the end of the mount"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal
