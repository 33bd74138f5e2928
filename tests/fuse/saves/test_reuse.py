"""Blocks of removed files take new ones: which do, and that nobody reads what was there.

The devices are small XFS and ext4 filesystems of the test's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fpfs.testing.lab import unavailable_reason
from fpfs.testing.mounted import Mount
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.faults import MEBIBYTE, FaultyDevices, Filesystem, faulty_mount
from tests.support.servers import kill, wait_collected
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    unavailable_reason(throttled=False) is not None,
    reason=unavailable_reason(throttled=False) or "",
)

SAVE_BYTES = 48 * MEBIBYTE
OLD = random_bytes(SAVE_BYTES, seed=1)
NEW = random_bytes(SAVE_BYTES + 12_345, seed=2)
KEPT_BYTES_MIN = 16 * MEBIBYTE


@pytest.fixture(params=Filesystem, ids=lambda filesystem: filesystem.value)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Mount, FaultyDevices]]:
    """A mount on one small device."""
    with faulty_mount(
        tmp_path, filesystem=request.param, device_count=1, options=("reuse=90",)
    ) as opened:
        yield opened


def large_objects(devices: FaultyDevices) -> dict[int, str]:
    """Names of objects that are kept when they are removed, by inode."""
    found = {}
    for folder in (devices.folders[0] / "objects").iterdir():
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has got another name meanwhile
                status = path.stat()
                if status.st_size >= KEPT_BYTES_MIN:
                    found[status.st_ino] = path.name
    return found


def save(path: Path, content: bytes) -> None:
    """Write a file, as a stream whose length nobody knows, and make it durable."""
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(content), MEBIBYTE):
            file.write(content[at : at + MEBIBYTE])
        os.fsync(file.fileno())


def free_bytes(mount: Mount) -> int:
    space = os.statvfs(mount.root)
    return space.f_bavail * space.f_frsize


def keep_one(
    mount: Mount, devices: FaultyDevices, *, save: Callable[[Path, bytes], None] = save
) -> set[int]:
    """Save and remove a file; returns the inodes of the objects that can be taken then."""
    path = mount.root / "old.pt"
    free = free_bytes(mount)
    save(path, OLD)
    mount.flush()
    before = large_objects(devices)
    assert before
    path.unlink()
    wait_until(lambda: not set(before.values()) & set(large_objects(devices).values()))
    # The new names come first, a flush behind them; what can be taken after it counts as free.
    wait_until(lambda: free_bytes(mount) >= free - 4 * MEBIBYTE)
    kept = set(large_objects(devices))
    assert kept <= set(before)
    return kept


def test_a_save_goes_to_the_blocks_of_a_removed_one(small: tuple[Mount, FaultyDevices]) -> None:
    mount, devices = small
    kept = keep_one(mount, devices)
    assert kept
    path = mount.root / "new.pt"
    save(path, NEW)
    mount.flush()
    # Nothing else was made for it: what is kept and not used would be there beside new ones.
    # (What was allocated ahead of its end is removed behind it.)
    wait_until(lambda: set(large_objects(devices)) == kept)
    assert_same(path.read_bytes(), NEW)
    mount.remount()
    assert_same(path.read_bytes(), NEW)
    path.unlink()
    mount.unmount()
    assert not large_objects(devices)
    mount.mount()


def save_of_known_size(path: Path, content: bytes) -> None:
    """Write a file whose room is reserved first, and make it durable."""
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, len(content))
        for at in range(0, len(content), MEBIBYTE):
            os.pwrite(file.fileno(), content[at : at + MEBIBYTE], at)
        os.fsync(file.fileno())


def test_a_somewhat_smaller_file_takes_it_too(small: tuple[Mount, FaultyDevices]) -> None:
    mount, devices = small
    kept = keep_one(mount, devices, save=save_of_known_size)
    assert kept
    path = mount.root / "new.pt"
    content = NEW[: SAVE_BYTES - 3 * MEBIBYTE - 99]
    before = free_bytes(mount)
    save_of_known_size(path, content)
    mount.flush()
    wait_until(lambda: set(large_objects(devices)) == kept)
    # What is over is given back.
    wait_until(lambda: before - free_bytes(mount) < len(content) + MEBIBYTE)
    mount.remount()
    assert_same(path.read_bytes(), content)


def test_nobody_reads_what_was_there(small: tuple[Mount, FaultyDevices]) -> None:
    mount, devices = small
    kept = keep_one(mount, devices)
    path = mount.root / "new.pt"
    # Its size is known first, so that all of it goes to what is kept.
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 20 * MEBIBYTE)
        assert os.pwrite(file.fileno(), b"in the middle", 3 * MEBIBYTE + 77) == 13
        assert os.pwrite(file.fileno(), b"end", 20 * MEBIBYTE) == 3
    expected = bytearray(24 * MEBIBYTE)
    expected[3 * MEBIBYTE + 77 : 3 * MEBIBYTE + 90] = b"in the middle"
    expected[20 * MEBIBYTE : 20 * MEBIBYTE + 3] = b"end"
    mount.flush()
    # A new object for it would be one of them.
    wait_until(lambda: set(large_objects(devices)) <= kept)
    os.truncate(path, 24 * MEBIBYTE)
    assert_same(path.read_bytes(), expected)
    mount.remount()
    assert_same(path.read_bytes(), expected)
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"later", 20 * MEBIBYTE + 100_000)
        os.pwrite(file.fileno(), b"later", 9 * MEBIBYTE)
    expected[20 * MEBIBYTE + 100_000 : 20 * MEBIBYTE + 100_005] = b"later"
    expected[9 * MEBIBYTE : 9 * MEBIBYTE + 5] = b"later"
    assert_same(path.read_bytes(), expected)
    mount.remount()
    assert_same(path.read_bytes(), expected)


def test_what_is_kept_is_free_and_is_given_up_for_anything(
    small: tuple[Mount, FaultyDevices],
) -> None:
    mount, devices = small
    before = os.statvfs(mount.root)
    kept = keep_one(mount, devices)
    after = os.statvfs(mount.root)
    assert (before.f_bavail - after.f_bavail) * after.f_frsize < 4 * MEBIBYTE
    assert kept
    room_bytes = after.f_bavail * after.f_frsize
    with (mount.root / "large").open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, room_bytes - 8 * MEBIBYTE)
        with pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(file.fileno(), room_bytes - 8 * MEBIBYTE, 16 * MEBIBYTE)


def test_nothing_is_lost_of_it_when_the_server_dies(small: tuple[Mount, FaultyDevices]) -> None:
    mount, devices = small
    assert keep_one(mount, devices)
    path = mount.root / "new.pt"
    save(path, NEW)
    with (mount.root / "late.pt").open("wb", buffering=0) as file:
        file.write(OLD)
        kill(mount)
        file.write(OLD)
    mount.allow_log(r"fpfs.keeper: server \d+ died \(signal 9\)")
    wait_collected(mount)
    mount.flush()
    assert_same(path.read_bytes(), NEW)
    assert_same((mount.root / "late.pt").read_bytes(), OLD + OLD)
    for each in mount.root.iterdir():
        each.unlink()
    mount.unmount()
    assert not large_objects(devices)
    mount.mount()
