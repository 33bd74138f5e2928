"""Space: size and free space of the devices, each backing filesystem counted once.

Concurrency: trio thread; the system calls run in threads, those of programs that ask for statfs(2)
apart from those of removals and of new files.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NamedTuple

import trio

from fpfs.core.engine import RESERVE_BYTES
from fpfs.core.limits import NAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

BLOCK_BYTES = 4096

TIGHT_BYTES = 256 * 1024 * 1024
"""A device with less than this, or than TIGHT_SHARE of it, free is nearly full."""

TIGHT_SHARE = 1 / 20


THREADS = 4
"""Threads for each kind of question. Where a filesystem does not answer, who asks next waits."""


class Space(NamedTuple):
    """Figures of statfs(2); blocks are of `block_bytes`."""

    block_bytes: int
    blocks: int
    blocks_free: int
    blocks_available: int
    inodes: int
    inodes_free: int
    name_bytes_max: int


class DeviceSpace:
    """The filesystems that hold the device directories."""

    def __init__(self, paths: Callable[[], Mapping[int, str]]) -> None:
        """Measure the filesystems of the directories that `paths` names then, by device."""
        self._paths = paths
        self._measuring = trio.CapacityLimiter(THREADS)
        self._looking = trio.CapacityLimiter(THREADS)
        self._comparing = trio.CapacityLimiter(THREADS)

    async def measure(self, *, inode_count: int) -> Space:
        """Return the figures of now, for a filesystem of `inode_count` inodes.

        More inodes can be made as long as the backing filesystems have some for objects.
        """
        figures = await self._figures(self._measuring)
        inodes_free = sum(f.f_favail for f in figures)
        return Space(
            block_bytes=BLOCK_BYTES,
            blocks=sum(f.f_blocks * f.f_frsize for f in figures) // BLOCK_BYTES,
            blocks_free=sum(f.f_bfree * f.f_frsize for f in figures) // BLOCK_BYTES,
            blocks_available=sum(
                max(0, f.f_bavail * f.f_frsize - RESERVE_BYTES) // BLOCK_BYTES for f in figures
            ),
            inodes=inode_count + inodes_free,
            inodes_free=inodes_free,
            name_bytes_max=NAME_BYTES_MAX,
        )

    async def is_tight(self, *, wanted_bytes: int) -> bool:
        """Whether some device is nearly full, or has less than is likely to be wanted next."""
        figures = await self._figures(self._looking)
        return any(
            f.f_bavail * f.f_frsize
            < max(wanted_bytes, TIGHT_BYTES, f.f_blocks * f.f_frsize * TIGHT_SHARE)
            for f in figures
        )

    async def free_by_device(self) -> dict[int, int]:
        """Return the free space of each device; one that is lost has none."""
        return await trio.to_thread.run_sync(free_bytes, self._paths(), limiter=self._comparing)

    async def _figures(self, limiter: trio.CapacityLimiter) -> list[os.statvfs_result]:
        paths = list(self._paths().values())
        return await trio.to_thread.run_sync(_figures, paths, limiter=limiter)


def free_bytes(paths: Mapping[int, str]) -> dict[int, int]:
    """Return the free space of devices by number (blocks: run in a thread)."""
    found = {}
    for number, path in paths.items():
        try:
            figures = os.statvfs(path)
        except OSError as error:
            log.debug("no space is counted for %s: %s", path, error)
        else:
            found[number] = figures.f_bavail * figures.f_frsize
    return found


def _figures(paths: Sequence[str]) -> list[os.statvfs_result]:
    """Return statvfs(3) of each backing filesystem (blocks: run in a thread).

    A device that is lost while mounted has no space.
    """
    found = {}
    for path in paths:
        try:
            found[os.stat(path).st_dev] = os.statvfs(path)
        except OSError as error:
            log.debug("no space is counted for %s: %s", path, error)
    return list(found.values())
