"""Devices that stand still, and who waits for them: staging that is full as long as a test wants.

A device is frozen with fsfreeze, on a loop device of its own. The first of two holds the catalog
and stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_at
from fpfs.core.protocol.control import ControlClient
from fpfs.core.protocol.questions import AskStatus
from fpfs.core.protocol.reports import Status
from fpfs.testing.lab import lab, unavailable_reason
from tests.support.processes import run
from tests.support.waiting import TIMEOUT_S, wait_until

STAGING = "16M"
STAGING_BYTES = 16 * 2**20
DEVICE_BYTES = 600 * 2**20
needs_lab = pytest.mark.skipif(
    unavailable_reason(throttled=False) is not None,
    reason=unavailable_reason(throttled=False) or "",
)


class Freezer:
    """Freezes and thaws the filesystem of one device."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._frozen = False

    def freeze(self) -> None:
        """Let writes to the device wait."""
        run("fsfreeze", "--freeze", self._path)
        self._frozen = True

    def thaw(self) -> None:
        """Let them go on."""
        if self._frozen:
            run("fsfreeze", "--unfreeze", self._path)
            self._frozen = False


@contextlib.contextmanager
def devices_to_freeze(parent: Path) -> Iterator[tuple[list[Path], Freezer]]:
    """Two device directories, and the means to make the second stand still."""
    with lab(device_count=2, mib_per_s=0, size_bytes=DEVICE_BYTES, parent=parent) as made:
        folders = [path / "device" for path in made.mountpoints]
        for folder in folders:
            folder.mkdir()
        freezer = Freezer(made.mountpoints[1])
        try:
            yield folders, freezer
        finally:
            freezer.thaw()


FILLER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
# Space promised beforehand, so that only staging is missing later.
os.posix_fallocate(fd, 0, 512 * 2**20)
print("open", flush=True)
sys.stdin.readline()
written = 0
while written < 512 * 2**20:
    written += os.write(fd, b"x" * 2**20)
"""
"""Makes staging full, when it is told to, and waits then."""


def wait_until_full(root: Path) -> None:
    """Return when all of staging is on its way to the frozen device of a mount, and a write waits.

    It waits until that is thawed: nothing is on its way to the other one, and so comes back.
    """

    def is_full() -> bool:
        status = _status(root)
        staging = status.staging
        staying_bytes = status.devices[1].requests_in_flight * staging.buffer_bytes
        return staying_bytes == staging.bytes_total and status.channel["writes_waiting"] > 0

    wait_until(is_full, "staging never was full")


def wait_until_writes_wait(root: Path, count: int) -> None:
    """Return when so many writes to a mount wait for staging, or for space on a device."""
    wait_until(
        lambda: _status(root).channel["writes_waiting"] >= count, f"never did {count} writes wait"
    )


def _status(root: Path) -> Status:
    entry = mount_at(str(root))
    assert entry is not None
    with ControlClient(entry, asked="test") as client:
        return client.ask(AskStatus(), timeout_s=TIMEOUT_S)
