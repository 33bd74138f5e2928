"""Full devices: ENOSPC comes from write(2), nothing acknowledged is lost, and freed space is used.

The devices are small XFS and ext4 filesystems of the test's own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.daemon.devices.label import lock_directory
from fpfs.testing.lab import unavailable_reason
from fpfs.testing.mounted import Mount, check_fpfs
from tests.support.contents import assert_same, random_bytes
from tests.support.failures import faults
from tests.support.failures.faults import MEBIBYTE, FaultyDevices, Filesystem, faulty_mount
from tests.support.processes import python_child
from tests.support.servers import kill
from tests.support.system import FallocateMode, cached_pages, fallocate
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    unavailable_reason(throttled=False) is not None,
    reason=unavailable_reason(throttled=False) or "",
)

RESERVE_BYTES = 8 * MEBIBYTE
"""What the engine leaves free on each device."""

ROOM_BYTES = 40 * MEBIBYTE
KILLS = 40
PIECES = [random_bytes(MEBIBYTE, seed=seed) for seed in range(7)]


@pytest.fixture(params=Filesystem, ids=lambda filesystem: filesystem.value)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Mount, FaultyDevices]]:
    """A mount on two devices that are about to be full."""
    with faulty_mount(tmp_path, filesystem=request.param) as (mount, devices):
        for number in range(2):
            devices.fill(number, leave_bytes=ROOM_BYTES)
        yield mount, devices


def piece(number: int) -> bytes:
    """The content of the mebibyte `number` of a file that `fill` wrote."""
    return PIECES[number % len(PIECES)]


def fill(fd: int, *, first: int = 0) -> int:
    """Write until write(2) refuses for want of space; returns the mebibytes acknowledged."""
    count = first
    while True:
        try:
            assert os.write(fd, piece(count)) == MEBIBYTE
        except OSError as error:
            assert error.errno == errno.ENOSPC
            assert error.strerror == "No space left on device"
            return count
        count += 1


def fill_to_the_last_block(mount: Mount) -> None:
    """Let a file take all that its devices give, durably."""
    with (mount.root / "filler").open("wb", buffering=0) as filler:
        fill(filler.fileno())
        with pytest.raises(OSError, match="No space left on device"):
            while True:
                filler.write(bytes(64 * 1024))
    mount.flush()


def free_bytes(mount: Mount) -> int:
    found = os.statvfs(mount.root)
    return found.f_bfree * found.f_frsize


def test_what_is_taken_is_missing_in_statfs(small: tuple[Mount, FaultyDevices]) -> None:
    """What is allocated, and at most as much again of what a filesystem takes for it."""
    mount, devices = small
    before = free_bytes(mount)
    there = [os.statvfs(mountpoint) for mountpoint in devices.mountpoints]
    assert 0 < before <= sum(each.f_bfree * each.f_frsize for each in there) + MEBIBYTE
    with (mount.root / "file").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 32 * MEBIBYTE)
        os.fsync(file.fileno())
        taken = before - free_bytes(mount)
        assert 32 * MEBIBYTE <= taken <= 64 * MEBIBYTE


def assert_pieces(path: Path, count: int) -> None:
    """Compare a file with what `fill` wrote."""
    assert path.stat().st_size == count * MEBIBYTE
    with path.open("rb") as file:
        for number in range(count):
            assert_same(file.read(MEBIBYTE), piece(number))


def test_a_full_mount_refuses_in_write_and_goes_on_after_an_unlink(
    small: tuple[Mount, FaultyDevices],
) -> None:
    mount, devices = small
    other = random_bytes(5 * MEBIBYTE + 17, seed=11)
    (mount.root / "other").write_bytes(other)
    (mount.root / "victim").write_bytes(random_bytes(16 * MEBIBYTE, seed=12))
    mount.flush()
    fd = os.open(mount.root / "file", os.O_WRONLY | os.O_CREAT)
    try:
        count = fill(fd)
        assert count > 16
        os.fsync(fd)  # what was acknowledged has its place: no error comes later
        assert_same((mount.root / "other").read_bytes(), other)
        free_bytes = [devices.free_bytes(number) for number in range(2)]
        figures = os.statvfs(mount.root)
        left_bytes = sum(max(0, free - RESERVE_BYTES) for free in free_bytes)
        assert abs(figures.f_bavail * figures.f_frsize - left_bytes) < MEBIBYTE
        assert max(free_bytes) < RESERVE_BYTES + 2 * MEBIBYTE
        (mount.root / "victim").unlink()
        assert os.write(fd, piece(count)) == MEBIBYTE
        full_again = fill(fd, first=count + 1)
        assert full_again >= count + 8
        os.fsync(fd)
    finally:
        os.close(fd)
    mount.remount()
    assert_pieces(mount.root / "file", full_again)
    assert_same((mount.root / "other").read_bytes(), other)
    assert sorted(os.listdir(mount.root)) == ["file", "other"]


def test_what_was_just_closed_gives_its_space_back_to_the_next(
    small: tuple[Mount, FaultyDevices],
) -> None:
    """There is room for one at a time, and each is removed while it is being committed."""
    mount, _devices = small
    for name in ("first", "second", "third", "fourth"):
        with (mount.root / name).open("wb", buffering=0) as file:
            for number in range(45):
                assert file.write(piece(number)) == MEBIBYTE
        if name != "fourth":
            (mount.root / name).unlink()
    assert_pieces(mount.root / "fourth", 45)
    with (mount.root / "fifth").open("wb", buffering=0) as file:
        assert fill(file.fileno()) < 45


def test_what_was_removed_while_it_was_open_gives_its_space_back_to_the_next(
    small: tuple[Mount, FaultyDevices],
) -> None:
    """As what fpfs.save has reserved and not filled: the kernel tells of its close afterwards."""
    mount, _devices = small
    # For a moment an allocation has all there is, and the catalog what it keeps for that.
    mount.allow_log(r"WARNING fpfs\.daemon\.catalog\.")
    size = ROOM_BYTES  # of the two devices
    for number in range(8):
        path = mount.root / str(number)
        with path.open("wb", buffering=0) as file:
            with pytest.raises(OSError, match="No space left on device"):
                os.posix_fallocate(file.fileno(), 0, 3 * size)
            path.unlink()
        with path.open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            path.unlink()


def test_overwriting_needs_space_for_both_and_loses_nothing(
    small: tuple[Mount, FaultyDevices],
) -> None:
    mount, _ = small
    mount.expect_log(
        r"no space for file: overwriting needs the space of both contents, and the one before"
        r" holds 40\.0 MiB .* replace=inplace\)"
    )
    before = random_bytes(40 * MEBIBYTE, seed=13)
    path = mount.root / "file"
    path.write_bytes(before)
    mount.flush()
    fd = os.open(path, os.O_RDWR)
    try:
        # What was allocated ahead of the first version may be on its way back.
        assert os.write(fd, piece(0)) == MEBIBYTE
        count = fill(fd, first=1)
        assert count < 40
        os.fsync(fd)
    finally:
        os.close(fd)
    mount.remount()
    found = path.read_bytes()
    assert len(found) == len(before)
    for number in range(count):
        assert_same(found[number * MEBIBYTE :][:MEBIBYTE], piece(number))
    assert_same(found[count * MEBIBYTE :], before[count * MEBIBYTE :])


@pytest.mark.parametrize("cut_to", [None, 1, 0], ids=["overwritten", "cut to a byte", "cut"])
def test_what_is_rewritten_and_never_closed_takes_no_more_than_its_size(
    small: tuple[Mount, FaultyDevices], cut_to: int | None
) -> None:
    """Ten times what the devices have room for, in a file that no commit knows."""
    mount, _ = small
    with (mount.root / "file").open("wb", buffering=0) as file:
        for count in range(20 * ROOM_BYTES // MEBIBYTE // 8):
            for number in range(8):
                assert os.pwrite(file.fileno(), piece(count + number), number * MEBIBYTE)
            if cut_to is not None:
                os.ftruncate(file.fileno(), cut_to)
        os.ftruncate(file.fileno(), 8 * MEBIBYTE)
        os.fsync(file.fileno())
    expected = b"".join(piece(count + number) for number in range(8))
    if cut_to is not None:
        expected = expected[:cut_to].ljust(8 * MEBIBYTE, b"\0")
    mount.remount()
    assert_same((mount.root / "file").read_bytes(), expected)


def test_writes_taken_between_refused_ones_keep_their_space(
    small: tuple[Mount, FaultyDevices],
) -> None:
    """Chunks that are partly filled, each with blocks that were promised before a refusal."""
    mount, devices = small
    devices.fill(0, leave_bytes=RESERVE_BYTES + 12 * MEBIBYTE)
    devices.fill(1, leave_bytes=0)
    mount.allow_log("the catalog's device is full: its reserve is in use")
    chooser = random.Random(1)
    expected = bytearray(800 * 65_536)
    fd = os.open(mount.root / "file", os.O_RDWR | os.O_CREAT)
    refused = 0
    for number in range(2000):
        offset = chooser.randrange(800) * 65_536 + chooser.randrange(60_000)
        data = piece(number)[: chooser.choice([100, 5_000, 70_000, 200_000])]
        data = data[: len(expected) - offset]
        try:
            assert os.pwrite(fd, data, offset) == len(data)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            refused += 1
        else:
            expected[offset : offset + len(data)] = data
    assert refused
    os.fsync(fd)
    os.truncate(fd, len(expected))
    os.close(fd)
    assert_same((mount.root / "file").read_bytes(), expected)
    devices.empty(1)  # whether there is direct I/O is found out with a block of each device
    mount.remount()
    assert_same((mount.root / "file").read_bytes(), expected)


@pytest.mark.parametrize("full", [0, 1])
def test_one_full_device_leaves_the_other(tmp_path: Path, full: int) -> None:
    with faulty_mount(tmp_path) as (mount, devices):
        devices.fill(full, leave_bytes=RESERVE_BYTES)
        written_before = mount.status().devices[1 - full].bytes_written
        fd = os.open(mount.root / "file", os.O_WRONLY | os.O_CREAT)
        try:
            for number in range(48):
                assert os.write(fd, piece(number)) == MEBIBYTE
            os.fsync(fd)
        finally:
            os.close(fd)
        written = mount.status().devices[1 - full].bytes_written - written_before
        assert written >= 48 * MEBIBYTE
        mount.remount()
        assert_pieces(mount.root / "file", 48)


def test_unlink_on_devices_that_others_filled_to_the_last_block(tmp_path: Path) -> None:
    with faulty_mount(tmp_path) as (mount, devices):
        # Whether the catalog needs its reserve depends on its log's length.
        mount.allow_log("catalog transaction of 1 operations failed: database or disk is full")
        mount.allow_log("the catalog's device is full: its reserve is in use")
        (mount.root / "victim").write_bytes(random_bytes(24 * MEBIBYTE, seed=14))
        (mount.root / "other").write_bytes(piece(0))
        mount.flush()
        for number in range(2):
            devices.fill(number, leave_bytes=0)
        with pytest.raises(OSError, match="No space left on device") as refused:
            (mount.root / "new").write_bytes(piece(1) * 4)
        assert refused.value.errno == errno.ENOSPC
        (mount.root / "victim").unlink()
        with (mount.root / "after").open("wb", buffering=0) as file:
            assert os.write(file.fileno(), piece(2)) == MEBIBYTE
        assert_same((mount.root / "other").read_bytes(), piece(0))
        for number in range(2):
            devices.empty(number)
        mount.remount()
        assert_same((mount.root / "after").read_bytes(), piece(2))
        assert_same((mount.root / "other").read_bytes(), piece(0))
        assert not (mount.root / "victim").exists()


@pytest.mark.parametrize("filesystem", Filesystem, ids=lambda filesystem: filesystem.value)
@pytest.mark.parametrize("full", [(0, 1), (0,), (1,)], ids=["both", "first", "second"])
def test_devices_without_a_free_block_are_mounted_and_make_room(
    tmp_path: Path, full: tuple[int, ...], filesystem: Filesystem
) -> None:
    with faulty_mount(tmp_path, filesystem=filesystem) as (mount, devices):
        (mount.root / "victim").write_bytes(random_bytes(24 * MEBIBYTE, seed=14))
        (mount.root / "other").write_bytes(piece(0))
        mount.unmount()
        for number in full:
            devices.fill(number, leave_bytes=0)
        # A probe for it that finds no room takes it that there is none.
        mount.allow_log("no direct I/O on this filesystem")
        mount.mount()
        assert not any(copy.trouble for copy in mount.status().catalog.copies)
        assert_same((mount.root / "other").read_bytes(), piece(0))
        (mount.root / "victim").unlink()
        (mount.root / "after").write_bytes(piece(2))
        mount.remount()
        assert_same((mount.root / "after").read_bytes(), piece(2))
        assert_same((mount.root / "other").read_bytes(), piece(0))
        assert not (mount.root / "victim").exists()


@pytest.mark.parametrize("filesystem", Filesystem, ids=lambda filesystem: filesystem.value)
def test_a_lock_is_taken_without_a_free_block(tmp_path: Path, filesystem: Filesystem) -> None:
    """The block that says who holds it is not let go of: there may be none for it again."""
    with faulty_mount(tmp_path, filesystem=filesystem) as (mount, devices):
        mount.unmount()
        for _ in range(5):
            devices.fill(0, leave_bytes=0)
            os.close(lock_directory(str(devices.folders[0]), mountpoint="/ckpt", asked="test"))
        devices.empty(0)
        mount.mount()


def keep_former(mount: Mount, path: Path, *, count: int) -> list[Path]:
    """Replace a file's content `count` times; returns where its former versions are."""
    check_fpfs("policy", "set", mount.root, f"versions={count}", module="fpfs.cli.ctl")
    for seed in range(count + 1):
        path.write_bytes(random_bytes(5 * MEBIBYTE, seed=seed))
        mount.flush()
    view = mount.root / ".fpfs" / "versions"
    kept = [view / f"{path.name}@{number}" for number in range(1, count + 1)]
    assert all(each.exists() for each in kept)
    return kept


def test_former_versions_give_way_the_oldest_first(small: tuple[Mount, FaultyDevices]) -> None:
    mount, _devices = small
    path = mount.root / "model.pt"
    kept = keep_former(mount, path, count=5)
    other = os.open(mount.root / "other", os.O_WRONLY | os.O_CREAT)
    try:
        without = 0
        while all(each.exists() for each in kept):
            assert os.write(other, piece(without)) == MEBIBYTE
            without += 1
        gone = [each.exists() for each in kept]
        assert gone == sorted(gone), "the oldest go first"
        count = fill(other, first=without)
        assert count - without >= 20, "what they held was used before a write was refused"
        assert not any(each.exists() for each in kept)
    finally:
        os.close(other)
    mount.flush()
    assert_pieces(mount.root / "other", count)
    assert_same(path.read_bytes(), random_bytes(5 * MEBIBYTE, seed=5))


@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("step.pt", "ends"),
        ("step.pt", "meets another server"),
        ("step.pt", "finds space"),
        ("step.pt", "cuts"),
        ("step.pt", "has copied"),
        ("step.log", "ends"),
    ],
)
def test_what_found_no_space_for_all_of_it_replaces_no_checkpoint(
    small: tuple[Mount, FaultyDevices], name: str, then: str
) -> None:
    """Unless its writer writes the rest after all, or cuts the file before it."""
    mount, _devices = small
    path, other = mount.root / name, mount.root / "other"
    path.write_bytes(piece(3))
    other.write_bytes(bytes(8 * MEBIBYTE))
    mount.flush()
    mount.allow_log(f"no space for {name}: overwriting needs the space of both")
    is_cut_off = name == "step.pt" and then not in ("finds space", "cuts")
    if is_cut_off:
        mount.expect_log(f"the writer of {name} was cut off by a full device: ")
    with path.open("wb", buffering=0) as file:
        if then == "has copied":
            with other.open("rb") as source, pytest.raises(OSError, match="No space left"):
                while True:
                    os.copy_file_range(source.fileno(), file.fileno(), MEBIBYTE, offset_src=0)
        else:
            count = fill(file.fileno())
        if then == "meets another server":
            mount.expect_log("died .signal 9.: starting another")
            kill(mount)
            assert file.write(b"what there is room for") > 0
        elif then == "finds space":
            other.unlink()
            file.write(piece(count))
            count += 1
        elif then == "cuts":
            count -= 1
            file.truncate(count * MEBIBYTE)
    mount.flush()
    left = [(each.path, each.killed_by) for each in mount.status().quarantined]
    assert left == ([(name, "a full device")] if is_cut_off else [])
    if is_cut_off:
        assert_same(path.read_bytes(), piece(3))
    else:
        assert_pieces(path, count)


IS_KILLED = """
import os, sys
with open(sys.argv[1], "wb") as file:
    file.write(os.urandom(5 << 20))
    file.flush()
    os.kill(os.getpid(), 9)
"""


def test_what_killed_writers_left_gives_way_the_oldest_first(
    small: tuple[Mount, FaultyDevices],
) -> None:
    """Before former versions do, and without what somebody has moved, or given another name.

    Another server knows of it, too.
    """
    mount, _devices = small
    mount.expect_log("died .signal 9.: starting another")
    mount.allow_log("was cut off by SIGKILL|gave up what a writer of .* had left that was cut off")
    (former,) = keep_former(mount, mount.root / "model.pt", count=1)
    left = []
    for name in ("moved.pt", "linked.pt", "1.pt", "2.pt", "3.pt"):
        with python_child(IS_KILLED, mount.root / name) as child:
            assert child.wait(60) == -signal.SIGKILL
        wait_until(lambda: len(mount.status().quarantined) > len(left))
        left.append(mount.root / ".fpfs/partial" / mount.status().quarantined[-1].name)
    mine = [mount.root / "mine", mount.root / "link"]
    os.rename(left[0], mine[0])
    os.link(left[1], mine[1])
    kill(mount)
    other = os.open(mount.root / "other", os.O_WRONLY | os.O_CREAT)
    try:
        written = 0
        while left[2].exists():
            assert left[4].exists(), "the oldest go first"
            assert os.write(other, piece(written)) == MEBIBYTE
            written += 1
        while left[4].exists():
            assert not left[2].exists()
            assert former.exists()
            assert os.write(other, piece(written)) == MEBIBYTE
            written += 1
        written = fill(other, first=written)
    finally:
        os.close(other)
    mount.flush()
    assert not former.exists()
    assert {each.path for each in mount.status().quarantined} == {"linked.pt"}
    for path in (left[1], *mine):
        assert len(path.read_bytes()) == 5 * MEBIBYTE
    assert_pieces(mount.root / "other", written)


def test_allocation_copies_and_names_make_former_versions_give_way(
    small: tuple[Mount, FaultyDevices],
) -> None:
    mount, _devices = small
    path = mount.root / "model.pt"
    kept = keep_former(mount, path, count=8)
    fd = os.open(mount.root / "allocated", os.O_RDWR | os.O_CREAT)
    try:
        free_bytes = os.statvfs(mount.root).f_bavail * os.statvfs(mount.root).f_frsize
        os.posix_fallocate(fd, 0, free_bytes + 10 * MEBIBYTE)
        assert not kept[0].exists()
        assert kept[-1].exists()
        os.pwrite(fd, piece(1), 0)
        end = free_bytes + 10 * MEBIBYTE
        for _ in range(6):
            end += os.copy_file_range(fd, fd, MEBIBYTE, 0, end)
    finally:
        os.close(fd)
    mount.flush()
    assert_same(path.read_bytes(), random_bytes(5 * MEBIBYTE, seed=8))


def test_more_than_there_is_makes_former_versions_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what is asked for at once is so large that it is compared with what is free."""
    monkeypatch.setattr(faults, "DEVICE_BYTES", 1024 * MEBIBYTE)
    with faulty_mount(tmp_path) as (mount, _devices):
        check_fpfs("policy", "set", mount.root, "versions=1", module="fpfs.cli.ctl")
        path, large = mount.root / "model.pt", mount.root / "large"
        for count in (200, 1):
            with path.open("wb") as file:
                for number in range(count):
                    file.write(piece(number))
            mount.flush()
        former = mount.root / ".fpfs" / "versions" / "model.pt@1"
        assert_pieces(former, 200)
        wanted = free_bytes(mount) + 100 * MEBIBYTE
        assert wanted > 1024 * MEBIBYTE
        with large.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, wanted)
            assert not former.exists()
            with pytest.raises(OSError, match="No space left on device"):
                os.posix_fallocate(file.fileno(), wanted, wanted)
        assert large.stat().st_size == wanted


def test_zeroing_that_finds_no_space_for_the_rest_is_seen_by_who_has_read(
    small: tuple[Mount, FaultyDevices],
) -> None:
    mount, _devices = small
    path = mount.root / "file"
    content = random_bytes(2 * MEBIBYTE, seed=31)
    path.write_bytes(content)
    mount.flush()
    reader, writer = os.open(path, os.O_RDONLY), os.open(path, os.O_WRONLY)
    assert_same(os.pread(reader, len(content), 0), content)
    assert cached_pages(reader) > 0
    length = free_bytes(mount) + 10 * MEBIBYTE
    mount.expect_log("WARNING .*no space for file: overwriting needs the space of both contents")
    with pytest.raises(OSError, match="No space left on device"):
        fallocate(writer, mode=FallocateMode.ZERO_RANGE, offset=1000, length=length)
    after = os.pread(reader, len(content), 0)
    for fd in (reader, writer):
        os.close(fd)
    mount.flush()
    mount.remount()
    assert_same(path.read_bytes(), after)
    assert_same(after, content[:1000] + bytes(len(content) - 1000))


def test_replace_inplace_needs_the_space_of_one(small: tuple[Mount, FaultyDevices]) -> None:
    mount, _devices = small
    path = mount.root / "model.pt"
    with path.open("wb") as file:
        count = fill(file.fileno())
        file.truncate(count // 4 * 3 * MEBIBYTE)
    mount.flush()
    check_fpfs("policy", "set", mount.root, "replace=inplace", module="fpfs.cli.ctl")
    for seed in range(3):
        content = random_bytes(count // 4 * 3 * MEBIBYTE, seed=seed)
        path.write_bytes(content)
        assert_same(path.read_bytes(), content)
    mount.flush()


def test_a_file_is_cut_with_the_space_for_its_last_block_or_not_at_all(
    small: tuple[Mount, FaultyDevices],
) -> None:
    """What is behind the new end in its last block must not come back when the file grows again."""
    mount, _devices = small
    content = b"x" * 160 * 1024
    paths = [mount.root / f"file{number}" for number in range(60)]
    for path in paths:
        path.write_bytes(content)
    mount.flush()
    fill_to_the_last_block(mount)
    expected = {}
    with contextlib.ExitStack() as stack:
        # What is open and was not synced does not give back the blocks that it had before.
        for path in paths:
            file = stack.enter_context(path.open("r+b", buffering=0))
            try:
                file.truncate(100_001)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                expected[path] = content
            else:
                file.truncate(len(content))
                expected[path] = content[:100_001] + bytes(len(content) - 100_001)
            assert_same(file.read(), expected[path])
        assert content in expected.values()
        file.truncate(128 * 1024)  # nothing is left of what was its last block
        expected[path] = expected[path][: 128 * 1024]
    mount.remount()
    for path in paths:
        assert_same(path.read_bytes(), expected[path])


def test_servers_that_die_one_after_another_on_full_devices_leave_room_for_the_next(
    small: tuple[Mount, FaultyDevices],
) -> None:
    """What each of them had allocated and not come to use is not the next one's loss."""
    mount, _devices = small
    mount.expect_log(r"fpfs\.keeper: server \d+ died")
    mount.allow_log(r"fpfs\.daemon\.commit\.versions: no space for")
    paths = [mount.root / f"file{number}" for number in range(KILLS)]
    for path in paths:
        path.write_bytes(b"x" * 400_000)
    mount.flush()
    fill_to_the_last_block(mount)
    expected = dict.fromkeys(paths, b"x" * 1000)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("r+b", buffering=0)) for path in paths]
        for path, file in zip(paths, files, strict=True):
            try:
                os.pwrite(file.fileno(), b"y" * 1000, 100_000)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                expected[path] = b"y" * 1000
            mount.note_processes()
            mount.kill(mount.server_pid)
            assert_same(os.pread(file.fileno(), 1000, 300_000), b"x" * 1000)
        assert b"y" * 1000 in expected.values()
        for path, file in zip(paths, files, strict=True):
            assert_same(os.pread(file.fileno(), 1000, 100_000), expected[path])
    mount.remount()
    for path in paths:
        assert_same(path.read_bytes()[100_000:101_000], expected[path])
