"""Devices that stand still, and who waits for them: staging that is full as long as a test wants.

A device is frozen with fsfreeze, on a loop device of its own. The first of two holds the catalog
and stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.testing.lab import lab, unavailable_reason
from tests.support.processes import run

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


def waits_in_a_request(pid: int) -> bool:
    """Whether a process waits for the answer of a FUSE server."""
    return "request_wait_answer" in Path(f"/proc/{pid}/stack").read_text()


def wait_until_waiting(child: subprocess.Popen[str]) -> None:
    """Return when a process has been in one FUSE request for a second: staging is full."""
    deadline_s = time.monotonic() + 60
    before, since_s = b"", time.monotonic()
    while time.monotonic() < deadline_s:
        assert child.poll() is None
        switches = Path(f"/proc/{child.pid}/status").read_bytes().rsplit(b"voluntary", 2)[1]
        if switches != before or not waits_in_a_request(child.pid):
            before, since_s = switches, time.monotonic()
        elif time.monotonic() - since_s > 1:
            return
        os.sched_yield()
    raise AssertionError("the writer never waited for staging")
