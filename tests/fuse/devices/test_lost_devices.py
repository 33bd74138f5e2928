"""Devices that are lost: while mounted, at a mount, and when they come back.

The devices are directories of one filesystem where their loss is that of the directory, and small
filesystems of their own (`tests.support.failures.faults`) where a disk fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.protocol.reports import DeviceState, RecoveryStatus
from fpfs.testing.lab import unavailable_reason
from fpfs.testing.mounted import CommandFailed, Mount, live_mounts, mounted, run_fpfs
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.damage import blocks_of, unknown_objects
from tests.support.failures.faults import MEBIBYTE, Filesystem, faulty_mount
from tests.support.servers import wait_collected

OLD = random_bytes(4 * MEBIBYTE, seed=31)
NEW = random_bytes(3 * MEBIBYTE + 5, seed=32)
SMALL = b"a content that lies in the catalog"

MISSING = r"fpfs\.server: device {number} is missing \(.*\): what lies there gives EIO"
UNREADABLE = r"fpfs\.engine: inode \d+: what lies on device \d cannot be read: "
AVOIDED = r"fpfs\.engine: device \d failed \(.*\): new chunks avoid it"
DIED = r"fpfs\.keeper: server \d+ died"
NOT_KEPT = (
    r"inode \d+ keeps its previous version, the new one failed"
    r"|inode \d+: (flushing to a device failed|staged bytes could be written to no device"
    r"|reading from device \d what a write leaves of a block failed|writing to device \d failed)"
)
CATALOG = (
    r"the catalog's copy .* is out of service|goes on alone|the catalog has .* alone"
    r"|fpfs\.daemon\.catalog\.(executor|open_replicas): .*"
)
UNCOLLECTED = (
    r"fpfs\.daemon\.maintenance\.orphan_objects: objects that no version refers to stay on device"
)

needs_devices = pytest.mark.skipif(
    unavailable_reason(throttled=False) is not None,
    reason=unavailable_reason(throttled=False) or "",
)


def write(path: Path, content: bytes) -> None:
    """Create or replace a file, durably."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), MEBIBYTE):
            file.write(content[start : start + MEBIBYTE])
        os.fsync(file.fileno())


def read_pieces(path: Path, expected: bytes) -> list[str]:
    """What each MiB of a file is: right, or EIO; anything else fails."""
    found = []
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(expected), MEBIBYTE):
            try:
                piece = os.pread(file.fileno(), MEBIBYTE, start)
            except OSError as error:
                assert error.errno == errno.EIO
                found.append("eio")
            else:
                assert_same(piece, expected[start : start + MEBIBYTE])
                found.append("right")
    return found


def objects_on(device: Path) -> set[str]:
    """Names of the objects on a device."""
    return {path.name for path in (device / "objects").glob("??/*")}


@contextlib.contextmanager
def taken_away(device: Path) -> Iterator[None]:
    """A device's directory is somewhere else for a while, as if its filesystem were not mounted."""
    away = device.with_name(f"{device.name}-away")
    device.rename(away)
    try:
        yield
    finally:
        if device.exists():
            assert not list(device.iterdir()), "something was made in the place of a device"
            device.rmdir()
        away.rename(device)


def fill(mount: Mount) -> None:
    """Contents on all devices, and in the catalog."""
    write(mount.root / "old", OLD)
    write(mount.root / "gone", OLD)
    write(mount.root / "small", SMALL)
    (mount.root / "folder").mkdir()
    mount.flush()


def check_without(mount: Mount, number: int) -> None:
    """A mount that does without one of two devices, and changes a lot."""
    assert read_pieces(mount.root / "old", OLD).count("eio") == 2
    assert read_pieces(mount.root / "old", OLD).count("right") == 2
    assert (mount.root / "small").read_bytes() == SMALL
    write(mount.root / "new", NEW)
    assert_same((mount.root / "new").read_bytes(), NEW)
    places = blocks_of(mount, mount.root / "new", copy=1 - number)
    assert {block.device for block in places} == {1 - number}
    (mount.root / "gone").unlink()
    (mount.root / "folder").rename(mount.root / "renamed")
    mount.flush()
    status = mount.status()
    assert [device.number for device in status.devices] == [0, 1]
    lost = status.devices[number]
    assert (lost.state, lost.path) == (DeviceState.MISSING, str(mount.devices[number]))
    assert lost.error.startswith("missing: ")
    assert status.devices[1 - number].state is DeviceState.OK
    assert status.catalog.copies_in_service == 1
    shown = run_fpfs("status", mount.root, module="fpfs.cli.ctl").stdout
    assert f"warning: device {number} ({mount.devices[number]}): missing: " in shown
    assert os.statvfs(mount.root).f_bavail > 0


@pytest.mark.parametrize("is_empty", [False, True], ids=["gone", "empty"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_mount_without_a_device(number: int, is_empty: bool) -> None:
    with mounted(devices=2) as mount:
        mount.expect_log(MISSING.format(number=number))
        mount.expect_log(UNREADABLE + "the device is missing")
        mount.allow_log(CATALOG)
        mount.expect_log("fpfs.server: mount at .*--degraded")
        fill(mount)
        mount.flush()
        held_bytes = mount.status().devices[number].bytes_used
        mount.unmount()
        device = mount.devices[number]
        known = objects_on(device)
        with taken_away(device):
            if is_empty:
                device.mkdir()
            with pytest.raises(CommandFailed, match=r"--degraded") as refused:
                mount.mount()
            assert str(device) in str(refused.value)
            mount.mount("degraded")
            assert mount.status().devices[number].bytes_used == held_bytes > 0
            check_without(mount, number)
            mount.unmount()
            mount.mount("degraded")
            assert_same((mount.root / "new").read_bytes(), NEW)
            mount.unmount()
        assert objects_on(device) == known
        mount.mount()
        check_back(mount)
        wait_collected(mount)
        mount.unmount()
        assert objects_on(device) < known
        assert not unknown_objects(mount)
        mount.mount()
        assert mount.status().recovery == RecoveryStatus()


def test_what_lies_on_a_missing_device_is_called_missing_and_not_lost() -> None:
    with mounted(devices=2) as mount:
        mount.expect_log(MISSING.format(number=1))
        mount.allow_log(f"{CATALOG}|{UNREADABLE}")
        fill(mount)
        mount.unmount()
        with taken_away(mount.devices[1]):
            mount.mount("degraded")
            done = run_fpfs("scrub", mount.root, module="fpfs.cli.ctl")
            assert (done.returncode, done.stderr) == (1, "")
            *damaged, _ = done.stdout.splitlines()
            assert len(damaged) == 4  # of two files, two chunks each
            for line in damaged:
                assert f" on {mount.devices[1]}: the device is missing" in line
            done = run_fpfs("fsck", mount.root, module="fpfs.cli.ctl")
            assert (done.returncode, done.stderr) == (4, "")
            first, *findings, last = done.stdout.splitlines()
            told = (
                f"device 1 ({mount.devices[1]}) is missing: what 2 files have there is not checked"
            )
            assert first == f"wrong: {told}"
            assert all(line.startswith("note: ") for line in findings)
            assert last.endswith("0 corrected, 1 left as they are")
            mount.unmount()
        mount.mount()


def check_back(mount: Mount) -> None:
    """Everything is there when the device is back."""
    assert_same((mount.root / "old").read_bytes(), OLD)
    assert_same((mount.root / "new").read_bytes(), NEW)
    assert (mount.root / "small").read_bytes() == SMALL
    assert sorted(os.listdir(mount.root)) == ["new", "old", "renamed", "small"]
    status = mount.status()
    assert [device.state for device in status.devices] == [DeviceState.OK, DeviceState.OK]
    assert status.catalog.copies_in_service == 2


def test_one_device_of_the_catalog_is_enough(tmp_path: Path) -> None:
    """Of three devices, the two without the one that is missing; both copies missing is refused."""
    with mounted(devices=3, parent=tmp_path) as mount:
        mount.expect_log("fpfs.server: mount at .* no other device has the catalog")
        mount.expect_log(MISSING.format(number=2))
        mount.allow_log(f"{UNREADABLE}|{DIED}")
        fill(mount)
        mount.unmount()
        with taken_away(mount.devices[2]):
            mount.mount("degraded")
            assert mount.status().catalog.copies_in_service == 2
            write(mount.root / "new", NEW)
            mount.kill(mount.server_pid)
            assert_same((mount.root / "new").read_bytes(), NEW)
            mount.note_processes()
            assert mount.status().restarts == 1
            states = [device.state for device in mount.status().devices]
            assert states == [DeviceState.OK, DeviceState.OK, DeviceState.MISSING]
            mount.unmount()
        with (
            taken_away(mount.devices[0]),
            taken_away(mount.devices[1]),
            pytest.raises(CommandFailed, match="bring back device 0 or 1"),
        ):
            mount.mount("degraded")
        mount.mount()
        assert_same((mount.root / "old").read_bytes(), OLD)
        assert_same((mount.root / "new").read_bytes(), NEW)


def test_each_device_changed_without_the_other_is_refused(tmp_path: Path) -> None:
    with mounted(devices=2, parent=tmp_path) as mount:
        mount.allow_log(f"{CATALOG}|is missing")
        mount.expect_log("were each changed without the other.*choose one state")
        fill(mount)
        mount.unmount()
        for number in range(2):
            with taken_away(mount.devices[number]):
                mount.mount("degraded")
                (mount.root / f"without{number}").mkdir()
                mount.unmount()
        with pytest.raises(CommandFailed, match="choose one state"):
            mount.mount()
        copy = tmp_path / "copy"
        for words, status in ([["fsck"], 8], [["fsck", "--repair"], 8], [["export"], 1]):
            done = run_fpfs(*words, *mount.devices, *([copy] if words == ["export"] else []))
            assert (done.returncode, done.stdout) == (status, "")
            assert "were each changed without the other" in done.stderr
            assert "choose one state" in done.stderr
        assert not copy.exists()
        for name in ("catalog.db", "catalog.alone"):
            (mount.devices[1] / name).unlink()
        mount.mount()
        assert (mount.root / "without1").is_dir()
        assert not (mount.root / "without0").exists()


def test_a_copy_of_the_catalog_that_is_out_of_date_takes_no_contents_away(tmp_path: Path) -> None:
    """It had gone out of service; without the other one nobody knows what it does not name."""
    with mounted(devices=2, parent=tmp_path) as mount:
        mount.allow_log(f"{CATALOG}|is missing")
        mount.expect_log("were each changed without the other.*choose one state")
        fill(mount)
        leader, follower = mount.devices
        out_of_date = shutil.copytree(
            follower, tmp_path / "copy", ignore=shutil.ignore_patterns("objects")
        )
        write(mount.root / "new", NEW)
        mount.unmount()
        known = objects_on(follower)
        for path in out_of_date.glob("catalog.*"):
            shutil.copy(path, follower)
        (leader / "catalog.alone").touch()
        with taken_away(leader):
            mount.mount("degraded")
            wait_collected(mount)
            assert not (mount.root / "new").exists()
            mount.unmount()
        assert known <= objects_on(follower)
        with pytest.raises(CommandFailed, match="choose one state"):
            mount.mount()
        for name in ("catalog.db", "catalog.alone"):
            (follower / name).unlink()
        mount.mount()
        assert_same((mount.root / "old").read_bytes(), OLD)
        assert_same((mount.root / "new").read_bytes(), NEW)


def remove(folder: Path) -> None:
    """Remove a directory from which a server removes files, too."""

    def is_gone(_: object, path: str, raised: tuple[object, BaseException, object]) -> None:
        if not isinstance(raised[1], FileNotFoundError):
            raise raised[1]

    shutil.rmtree(folder, onerror=is_gone)


@pytest.mark.parametrize("number", [0, 1])
def test_a_directory_that_is_removed_under_a_mount(number: int, tmp_path: Path) -> None:
    """What was open there is no place any more: what is written from then on goes elsewhere."""
    with mounted(devices=2, parent=tmp_path) as mount:
        mount.allow_log(f"{UNREADABLE}|{NOT_KEPT}|{CATALOG}|{UNCOLLECTED}|{MISSING[:21]}")
        mount.allow_log(r"dev\d: (unused objects could not be removed|removed objects may come)")
        mount.allow_log(r"trimming an object|space on device \d cannot be given back")
        # Removed behind a save that no device took.
        mount.allow_log("gone was removed after something was saved that is lost: it is back")
        mount.expect_log(AVOIDED)
        fill(mount)
        mount.remount()
        remove(mount.devices[number])
        with contextlib.suppress(OSError):  # who meets it first may be told
            write(mount.root / "first", NEW)
        write(mount.root / "new", NEW)
        assert_same((mount.root / "new").read_bytes(), NEW)
        assert read_pieces(mount.root / "old", OLD).count("right") >= 2
        (mount.root / "gone").unlink()
        assert (mount.root / "small").read_bytes() == SMALL
        status = mount.status()
        assert status.devices[number].state is DeviceState.FAILED
        assert "failed: new chunks avoid it" in status.devices[number].error
        assert status.catalog.copies_in_service == 1
        with contextlib.suppress(CommandFailed):  # the first one is what it could not keep
            mount.unmount()
        if mount.entry() is None and mount in live_mounts:
            mount.forget()
        mount.expect_log("fpfs.server: mount at .* does not exist; .*--degraded|is missing")
        mount.mount("degraded")
        assert_same((mount.root / "new").read_bytes(), NEW)
        assert (mount.root / "small").read_bytes() == SMALL
        assert "eio" in read_pieces(mount.root / "old", OLD)


@needs_devices
def test_a_server_that_takes_over_goes_on_without_a_device_that_fails(tmp_path: Path) -> None:
    with faulty_mount(tmp_path) as (mount, devices):
        mount.allow_log(f"{CATALOG}|{UNREADABLE}|{AVOIDED}|{UNCOLLECTED}|{NOT_KEPT}|{DIED}")
        mount.allow_log("trimming an object")
        mount.expect_log(MISSING.format(number=1))
        write(mount.root / "old", OLD)
        devices.fail(1)
        mount.kill(mount.server_pid)
        write(mount.root / "new", NEW)
        mount.note_processes()
        assert_same((mount.root / "new").read_bytes(), NEW)
        assert mount.status().devices[1].state is DeviceState.MISSING
        mount.unmount()
        devices.repair(1)
        mount.mount()
        assert_same((mount.root / "old").read_bytes(), OLD)
        assert_same((mount.root / "new").read_bytes(), NEW)


@needs_devices
def test_a_device_that_turns_read_only(tmp_path: Path) -> None:
    """It is read on; the next mount is refused, and is one without it when that is asked for."""
    with faulty_mount(tmp_path, filesystem=Filesystem.EXT4) as (mount, devices):
        mount.allow_log(f"{CATALOG}|{UNREADABLE}|{UNCOLLECTED}|{NOT_KEPT}")
        mount.allow_log(r"dev\d: (unused objects|removed objects)|trimming an object|given back")
        mount.expect_log(AVOIDED)
        mount.expect_log(MISSING.format(number=1))
        mount.expect_log("fpfs.server: mount at .*Read-only file system.*--degraded")
        write(mount.root / "old", OLD)
        devices.make_read_only(1)
        write(mount.root / "new", NEW)
        assert read_pieces(mount.root / "old", OLD) == ["right"] * 4
        assert mount.status().devices[1].state is DeviceState.FAILED
        mount.unmount()
        with pytest.raises(CommandFailed, match="Read-only file system"):
            mount.mount()
        mount.mount("degraded")
        assert_same((mount.root / "new").read_bytes(), NEW)
        assert read_pieces(mount.root / "old", OLD).count("eio") == 2
        mount.unmount()
        devices.repair(1)
        mount.mount()
        assert_same((mount.root / "old").read_bytes(), OLD)


@needs_devices
def test_what_is_left_on_a_device_that_failed_is_collected_when_it_is_back(tmp_path: Path) -> None:
    with faulty_mount(tmp_path, filesystem=Filesystem.EXT4) as (mount, devices):
        mount.allow_log(f"{CATALOG}|{UNREADABLE}|{UNCOLLECTED}|{NOT_KEPT}")
        mount.allow_log(r"dev\d: (unused objects|removed objects)|trimming an object|given back")
        mount.expect_log(AVOIDED)
        path = mount.root / "step.pt"
        for _ in range(5):
            write(path, OLD)
        devices.make_read_only(1)
        for _ in range(5):
            write(path, NEW)
        mount.unmount()
        devices.repair(1)
        mount.mount()
        wait_collected(mount)
        assert mount.status().recovery.objects_removed
        assert_same(path.read_bytes(), NEW)
        mount.unmount()
        assert not unknown_objects(mount)


@needs_devices
def test_a_server_that_takes_over_although_a_device_has_no_room_for_a_file(tmp_path: Path) -> None:
    """Nor does a mount need any: what takes space could not be removed otherwise."""
    with faulty_mount(tmp_path, filesystem=Filesystem.XFS) as (mount, devices):
        mount.expect_log(DIED)
        mount.allow_log(f"{CATALOG}|{NOT_KEPT}|{UNCOLLECTED}|given back|its reserve is in use")
        write(mount.root / "old", OLD)
        mount.flush()  # what was allocated ahead of the file is given back a moment after its close
        devices.leave_no_room_for_a_file(1)
        mount.kill(mount.server_pid)
        assert_same((mount.root / "old").read_bytes(), OLD)
        write(mount.root / "new", NEW)
        mount.note_processes()
        mount.remount()
        assert_same((mount.root / "old").read_bytes(), OLD)
        assert_same((mount.root / "new").read_bytes(), NEW)
        assert [device.direct for device in mount.status().devices] == [True, True]
        devices.empty(1)
