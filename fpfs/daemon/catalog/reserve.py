"""Reserve: a preallocated file that the catalog gives up when its device is full.

A full device must still take the transaction that removes a file, or nothing could ever make room.
The engine leaves some space when it allocates, but others may fill the filesystem too.

Concurrency: any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from fpfs.daemon.catalog.safe_open import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RESERVE_NAME = "reserve"
RESERVE_BYTES = 8 * 1024 * 1024

log = logging.getLogger(__name__)


def empty(path: Path) -> None:
    """Give up the space of a reserve."""
    os.close(open_regular(path, os.O_WRONLY | os.O_TRUNC))


def empty_if_full(path: Path) -> None:
    """Give up a reserve, if there is one, on a device that has less free than it holds."""
    figures = os.statvfs(path.parent)
    if figures.f_bavail * figures.f_frsize >= RESERVE_BYTES:
        return
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size:
            empty(path)


class Reserve:
    """Space that is kept for the catalog."""

    def __init__(self, path: Path) -> None:
        """Name the file. Its space is not held before `restore`."""
        self._path = path
        self._changing = threading.Lock()
        self.held = False

    def give_up(self) -> bool:
        """Free the space for the catalog; returns whether there was any."""
        with self._changing:
            was_held = self._give_up()
            if was_held:
                self._tell()
            return was_held

    @contextlib.contextmanager
    def lent(self) -> Iterator[bool]:
        """Free the space, and let nobody take it again within the block; whether there was any.

        Afterwards it is taken back where the device has it: who looks for space for contents may
        have had all there is for a moment.
        """
        with self._changing:
            was_held = self._give_up()
            try:
                yield was_held
            finally:
                if was_held and not self._restore():
                    self._tell()

    def _give_up(self) -> bool:
        if not self.held:
            return False
        empty(self._path)
        self.held = False
        return True

    def _tell(self) -> None:
        log.warning(
            "the catalog's device is full: its reserve is in use, remove files (%s)",
            self._path.parent,
        )

    def restore(self) -> bool:
        """Take the space again, if the device has it; returns whether it is held."""
        if self.held:
            return True
        with self._changing:
            return self._restore()

    def _restore(self) -> bool:
        try:
            descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            log.warning("there is no reserve for the catalog: %s", error)
            return False
        try:
            os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            self.held = True
        except OSError as error:
            log.debug("no reserve for the catalog yet: %s", error)
            # What was allocated before the device was full must not stay either.
            with contextlib.suppress(OSError):
                os.truncate(descriptor, 0)
        finally:
            os.close(descriptor)
        return self.held
