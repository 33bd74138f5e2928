"""Names through a crash and through a loss of power.

A loss of power is the server killed and its filesystem (XFS) shut down without its log: what was
not flushed is gone. That something was flushed is seen in the page cache: none of the log's pages
is dirty any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.testing.lab import unavailable_reason
from fpfs.testing.mounted import Mount, mounted
from tests.support.failures.crash import crash, crash_and_mount
from tests.support.failures.faults import FaultyDevices, faulty_mount
from tests.support.system import dirty_pages, errno_of

LAB_REASON = unavailable_reason(throttled=False)
FLUSHED_S = 20.0
"""The kernel itself writes dirty pages back after 30 s: a flush within this is the server's."""

NAMES = ["folder", "link", "new"]


@pytest.fixture
def powered(tmp_path: Path) -> Iterator[tuple[Mount, FaultyDevices]]:
    """A mount on devices that can lose power."""
    if LAB_REASON is not None:
        pytest.skip(LAB_REASON)
    with faulty_mount(tmp_path) as opened:
        yield opened


def change_names(root: Path) -> None:
    """Make names of every kind, move one, and take one away."""
    (root / "folder").mkdir()
    (root / "link").symlink_to("folder")
    os.mkfifo(root / "old")
    (root / "old").rename(root / "new")
    (root / "gone").touch()
    (root / "gone").unlink()


def test_names_survive_a_crash_at_once() -> None:
    with mounted() as mount:
        change_names(mount.root)
        crash_and_mount(mount)
        assert sorted(os.listdir(mount.root)) == NAMES


def test_names_are_durable_soon_without_being_asked_for(
    powered: tuple[Mount, FaultyDevices],
) -> None:
    mount, devices = powered
    mount.flush()
    log = devices.folders[0] / "catalog.db-wal"
    if errno_of(dirty_pages, log) == "ENOSYS":
        pytest.skip("kernels before 6.5 do not tell which pages are dirty")
    change_names(mount.root)
    wait_until_clean(log)
    crash(mount)
    devices.fail(0)
    devices.repair(0)
    mount.mount()
    assert sorted(os.listdir(mount.root)) == NAMES


@pytest.mark.parametrize("removed", [0, 1])
def test_names_that_were_synced_survive_with_either_copy_of_the_catalog(
    removed: int, powered: tuple[Mount, FaultyDevices]
) -> None:
    mount, devices = powered
    mount.expect_log(rf"catalog .*{removed}.*/catalog\.db was made anew from")
    change_names(mount.root)
    sync_folder(mount.root)
    (mount.root / "folder").chmod(0o700)
    sync_folder(mount.root / "folder")
    crash(mount)
    for number in range(2):
        devices.fail(number)
        devices.repair(number)
    for name in ("catalog.db", "catalog.db-wal", "catalog.sums"):
        (devices.folders[removed] / name).unlink(missing_ok=True)
    mount.mount()
    assert sorted(os.listdir(mount.root)) == NAMES
    assert (mount.root / "folder").stat().st_mode & 0o777 == 0o700
    assert mount.status().catalog.copies_in_service == 2


def sync_folder(path: Path) -> None:
    """fsync(2) of a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def wait_until_clean(path: Path) -> None:
    """Return when the kernel has written all of a file."""
    deadline_s = time.monotonic() + FLUSHED_S
    while dirty_pages(path):
        assert time.monotonic() < deadline_s, f"{path} is not flushed"
        time.sleep(0.01)  # nothing tells of a flush
