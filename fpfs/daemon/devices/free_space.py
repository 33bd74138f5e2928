"""Space: size and free space of the devices, each backing filesystem counted once.

What a device keeps of removed objects, for new bytes, is free.

Concurrency: trio thread; the system calls run in threads, those of programs that ask for statfs(2)
apart from those of removals and of new files.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import trio

from fpfs.core.engine import RESERVE_BYTES
from fpfs.core.limits import NAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


class _Figures(NamedTuple):
    """One backing filesystem, in bytes."""

    total_bytes: int
    free_bytes: int
    available_bytes: int
    inodes_available: int


class DeviceSpace:
    """The filesystems that hold the device directories."""

    def __init__(
        self, paths: Callable[[], Mapping[int, str]], kept_bytes: Callable[[], Mapping[int, int]]
    ) -> None:
        """Measure the filesystems of the directories that `paths` names then, by device.

        `kept_bytes` tells what each device keeps of removed objects.
        """
        self._paths = paths
        self._kept_bytes = kept_bytes
        self._measuring = trio.CapacityLimiter(THREADS)
        self._looking = trio.CapacityLimiter(THREADS)
        self._comparing = trio.CapacityLimiter(THREADS)

    async def measure(self, *, inode_count: int) -> Space:
        """Return the figures of now, for a filesystem of `inode_count` inodes.

        More inodes can be made as long as the backing filesystems have some for objects.
        """
        figures = await self._figures(self._measuring)
        inodes_free = sum(f.inodes_available for f in figures)
        return Space(
            block_bytes=BLOCK_BYTES,
            blocks=sum(f.total_bytes for f in figures) // BLOCK_BYTES,
            blocks_free=sum(f.free_bytes for f in figures) // BLOCK_BYTES,
            blocks_available=sum(
                max(0, f.available_bytes - RESERVE_BYTES) // BLOCK_BYTES for f in figures
            ),
            inodes=inode_count + inodes_free,
            inodes_free=inodes_free,
            name_bytes_max=NAME_BYTES_MAX,
        )

    async def is_tight(self, *, wanted_bytes: int) -> bool:
        """Whether some device is nearly full, or has less than is likely to be wanted next."""
        figures = await self._figures(self._looking)
        return any(
            f.available_bytes < max(wanted_bytes, TIGHT_BYTES, f.total_bytes * TIGHT_SHARE)
            for f in figures
        )

    async def free_by_device(self) -> dict[int, int]:
        """Return the free space of each device; one that is lost has none."""
        return await trio.to_thread.run_sync(
            free_bytes, self._paths(), self._kept_bytes(), limiter=self._comparing
        )

    async def _figures(self, limiter: trio.CapacityLimiter) -> list[_Figures]:
        return await trio.to_thread.run_sync(
            _figures, self._paths(), self._kept_bytes(), limiter=limiter
        )


def free_bytes(paths: Mapping[int, str], kept_bytes: Mapping[int, int]) -> dict[int, int]:
    """Return the free space of devices by number (blocks: run in a thread).

    `kept_bytes` is what devices keep of removed objects.
    """
    found = {}
    for number, path in paths.items():
        try:
            figures = os.statvfs(path)
        except OSError as error:
            log.debug("no space is counted for %s: %s", path, error)
        else:
            found[number] = figures.f_bavail * figures.f_frsize + kept_bytes.get(number, 0)
    return found


def _figures(paths: Mapping[int, str], kept_bytes: Mapping[int, int]) -> list[_Figures]:
    """Return the figures of each backing filesystem (blocks: run in a thread).

    A device that is lost while mounted has no space.
    """
    found: dict[int, os.statvfs_result] = {}
    kept: Counter[int] = Counter()
    for number, path in paths.items():
        try:
            filesystem = os.stat(path).st_dev
            found[filesystem] = os.statvfs(path)
            kept[filesystem] += kept_bytes.get(number, 0)
        except OSError as error:
            log.debug("no space is counted for %s: %s", path, error)
    return [
        _Figures(
            total_bytes=f.f_blocks * f.f_frsize,
            free_bytes=f.f_bfree * f.f_frsize + kept[filesystem],
            available_bytes=f.f_bavail * f.f_frsize + kept[filesystem],
            inodes_available=f.f_favail,
        )
        for filesystem, f in found.items()
    ]
