"""Devices that fail under a mount: errors reach who wrote, everything else goes on.

`FaultyDevices.fail` lets every access to a device's disk end with EIO; `make_read_only` lets ext4
find an error in itself. What lies there is unreadable until the device is repaired, which the tests
do before they compare what a new mount shows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fpfs.core.protocol.reports import DeviceState
from fpfs.testing.lab import unavailable_reason
from fpfs.testing.mounted import CommandFailed, Mount, run_fpfs
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.faults import MEBIBYTE, FaultyDevices, Filesystem, faulty_mount

pytestmark = pytest.mark.skipif(
    unavailable_reason(throttled=False) is not None,
    reason=unavailable_reason(throttled=False) or "",
)

PIECE = random_bytes(MEBIBYTE, seed=21)
OLD = random_bytes(8 * MEBIBYTE, seed=22)
NEW = random_bytes(12 * MEBIBYTE + 5, seed=23)

Break = Callable[[FaultyDevices, int], None]
WAYS = {
    "xfs-eio": (Filesystem.XFS, FaultyDevices.fail),
    "ext4-eio": (Filesystem.EXT4, FaultyDevices.fail),
    "ext4-read-only": (Filesystem.EXT4, FaultyDevices.make_read_only),
}
CODES = (errno.EIO, errno.EROFS)

# What the server logs, by who says it.
CAUSE = "(Input/output error|Read-only file system)"
AVOIDED = rf"fpfs\.engine: device \d failed \({CAUSE}\): new chunks avoid it"
STAGED = (
    r"fpfs\.engine: inode \d+: (reading from device \d what a write leaves of a block failed"
    rf"|writing to device \d failed|staged bytes could be written to no device).* \(?{CAUSE}"
)
NOT_KEPT = (
    r"fpfs\.(daemon\.commit\.pipeline|server): "
    r".*inode \d+ keeps its previous version, the new one failed"
)
OUT_OF_SERVICE = (
    r"fpfs\.daemon\.catalog\.replicas: (the catalog's copy .* is out of service"
    r"|it cannot be noted that catalog .* goes on alone)"
)
UNREADABLE = r"fpfs\.engine: inode \d+: what lies on device \d cannot be read: Input/output error"
REMADE = r"fpfs\.daemon\.catalog\.open_replicas: catalog .* was made anew from"
CATALOG = (
    r"fpfs\.daemon\.catalog\.executor: (catalog (transaction of \d+ operations|checkpoint) failed"
    r"|the catalog's (device fails|database could not be closed))"
)
NOT_FLUSHED = (
    r"fpfs\.(daemon\.commit\.pipeline|server): .*names and versions (are no longer made durable"
    rf"|since the last flush may be lost): .*the catalog cannot be flushed: .*{CAUSE}"
)
REFUSED = (
    r"fpfs\.daemon\.names\.fuse_ops: (mkdir|create|unlink) of inode or handle 1 failed: \[Errno 5\]"
    r" the catalog"
)


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def breakable(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Mount, FaultyDevices, Break]]:
    """A mount on two devices, and a way to break one."""
    filesystem, break_device = request.param
    with faulty_mount(tmp_path, filesystem=filesystem) as (mount, devices):
        mount.expect_log(AVOIDED)
        mount.allow_log(f"{OUT_OF_SERVICE}|{REMADE}|{UNREADABLE}")
        yield mount, devices, break_device


def write_durably(path: Path, content: bytes) -> None:
    """Create a file, write, fsync."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), MEBIBYTE):
            file.write(content[start : start + MEBIBYTE])
        os.fsync(file.fileno())


def expect_logs(mount: Mount, *patterns: str) -> None:
    """Expect each of several log lines, and no other but of the catalog's copy on the device."""
    mount.allow_log(f"{OUT_OF_SERVICE}|{REMADE}|{UNREADABLE}")
    for pattern in patterns:
        mount.expect_log(pattern)


def unmount_with_losses(mount: Mount) -> str:
    """Unmount a filesystem that cannot keep everything; returns what the command says."""
    with pytest.raises(CommandFailed) as failed:
        mount.unmount()
    assert mount.entry() is None
    mount.forget()
    return str(failed.value)


def test_new_writes_go_to_the_device_that_lives(
    breakable: tuple[Mount, FaultyDevices, Break],
) -> None:
    mount, devices, break_device = breakable
    (mount.root / "small").write_bytes(b"small")
    mount.flush()
    break_device(devices, 1)
    write_durably(mount.root / "new", NEW)
    assert_same((mount.root / "new").read_bytes(), NEW)
    write_durably(mount.root / "second", OLD)
    assert (mount.root / "small").read_bytes() == b"small"
    assert "failed" in mount.status().devices[1].error
    assert mount.status().devices[0].error == ""
    mount.unmount()
    assert "device 1 failed" in mount.log_text()
    devices.repair(1)
    mount.mount()
    assert_same((mount.root / "new").read_bytes(), NEW)
    assert_same((mount.root / "second").read_bytes(), OLD)
    assert (mount.root / "small").read_bytes() == b"small"


def test_what_is_staged_for_a_device_that_breaks_goes_to_another(
    breakable: tuple[Mount, FaultyDevices, Break],
) -> None:
    """Half a chunk each of two files, of which one begins on the device that breaks."""
    mount, devices, break_device = breakable
    half = MEBIBYTE // 2
    paths = [mount.root / "one", mount.root / "two"]
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("wb", buffering=0)) for path in paths]
        for file in files:
            file.write(NEW[:half])
        assert [device.bytes_written for device in mount.status().devices] == [0, 0]
        break_device(devices, 1)
        for file in files:
            file.write(NEW[half:])
            os.fsync(file.fileno())
    for path in paths:
        assert_same(path.read_bytes(), NEW)
    assert "failed" in mount.status().devices[1].error
    mount.unmount()
    devices.repair(1)
    mount.mount()
    for path in paths:
        assert_same(path.read_bytes(), NEW)


def test_what_lies_on_a_dead_device_is_eio_and_never_wrong(tmp_path: Path) -> None:
    with faulty_mount(tmp_path) as (mount, devices):
        mount.allow_log(f"{OUT_OF_SERVICE}|{REMADE}|{UNREADABLE}")
        (mount.root / "old").write_bytes(OLD)
        mount.remount()  # so that no page of it is cached
        devices.fail(1)
        fd = os.open(mount.root / "old", os.O_RDONLY)
        try:
            outcomes = [read_chunk(fd, number) for number in range(8)]
        finally:
            os.close(fd)
        assert outcomes.count("eio") == 4
        assert outcomes.count("right") == 4
        status = mount.status().devices[1]
        assert status.state is DeviceState.FAILED
        assert status.read_errors
        assert "cannot be read: Input/output error" in status.error
        assert len([line for line in mount.log_text().splitlines() if "on device 1" in line]) == 1
        mount.unmount()
        devices.repair(1)
        mount.mount()
        assert_same((mount.root / "old").read_bytes(), OLD)


def read_chunk(fd: int, number: int) -> str:
    """Read one chunk of OLD: right, or EIO; anything else fails."""
    try:
        found = os.pread(fd, MEBIBYTE, number * MEBIBYTE)
    except OSError as error:
        assert error.errno == errno.EIO
        return "eio"
    assert_same(found, OLD[number * MEBIBYTE :][:MEBIBYTE])
    return "right"


def test_a_version_that_cannot_be_kept_is_reported_and_the_previous_one_stays(
    tmp_path: Path,
) -> None:
    """Its new bytes need the rest of a block that lies on the dead device."""
    with faulty_mount(tmp_path) as (mount, devices):
        expect_logs(mount, AVOIDED, STAGED, NOT_KEPT)
        (mount.root / "file").write_bytes(OLD)
        (mount.root / "other").write_bytes(b"other")
        mount.flush()
        devices.fail(1)
        fd = os.open(mount.root / "file", os.O_RDWR)
        for number in range(8):
            os.pwrite(fd, b"new", number * MEBIBYTE + 100)
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(fd)
        for _ in range(5):
            with pytest.raises(OSError, match="Input/output error"):
                os.fsync(fd)  # nothing has changed: the bytes are still not durable
            os.pwrite(fd, b"new", 100)
        lines = mount.log_text().splitlines()
        assert len([line for line in lines if "keeps its previous version" in line]) == 1
        told = [line.partition(" ")[2] for line in lines if " ERROR " in line]
        assert len(told) == len(set(told)), "each thing is said once, not at each try"
        assert not [line for line in told if "fsync of inode" in line]
        os.close(fd)  # each handle hears of an error once
        assert [read_new(mount.root / "file", number) for number in range(8)].count(False) == 4
        write_durably(mount.root / "elsewhere", NEW)
        failures = mount.flush().failures
        assert ["keeps its previous version" in each.message for each in failures] == [True]
        assert "keeps its previous version" in unmount_with_losses(mount)
        devices.repair(1)
        mount.mount()
        assert_same((mount.root / "file").read_bytes(), OLD)
        assert_same((mount.root / "elsewhere").read_bytes(), NEW)
        assert (mount.root / "other").read_bytes() == b"other"


def read_new(path: Path, number: int) -> bool:
    """Whether the three bytes that were written last can be read; wrong ones fail."""
    with path.open("rb", buffering=0) as file:
        try:
            found = os.pread(file.fileno(), 3, number * MEBIBYTE + 100)
        except OSError as error:
            assert error.errno == errno.EIO
            return False
    assert found == b"new"
    return True


def test_close_reports_what_nothing_else_did(tmp_path: Path) -> None:
    with faulty_mount(tmp_path) as (mount, devices):
        expect_logs(mount, AVOIDED, STAGED, NOT_KEPT)
        (mount.root / "file").write_bytes(OLD)
        mount.flush()
        fd = os.open(mount.root / "file", os.O_RDWR)
        second = os.open(mount.root / "file", os.O_RDWR)
        devices.fail(1)
        os.pwrite(fd, b"new", MEBIBYTE + 100)
        os.pwrite(fd, b"new", 100)
        mount.flush()  # the background has met the error now
        with pytest.raises(OSError, match="Input/output error"):
            os.close(fd)
        with pytest.raises(OSError, match="Input/output error"):
            os.pwrite(second, b"more", 0)
        os.close(second)
        unmount_with_losses(mount)
        devices.repair(1)
        mount.mount()
        assert_same((mount.root / "file").read_bytes(), OLD)


def test_what_cannot_be_kept_takes_no_other_along(tmp_path: Path) -> None:
    """It replaces nothing by a rename, and what is removed behind it comes back."""
    with faulty_mount(tmp_path) as (mount, devices):
        back = "old was removed after something was saved that is lost: it is back"
        expect_logs(mount, AVOIDED, STAGED, NOT_KEPT, back, "rename of .* failed: .Errno 5.")
        for name in ("good", "old", "new"):
            (mount.root / name).write_bytes(OLD)
        mount.flush()
        fd = os.open(mount.root / "new", os.O_RDWR)
        devices.fail(1)
        os.pwrite(fd, b"new", MEBIBYTE + 100)
        os.pwrite(fd, b"new", 100)
        with contextlib.suppress(OSError):  # told here where the background has met it already
            os.close(fd)
        assert len(mount.flush().failures) == 1
        with pytest.raises(OSError, match="Input/output error"):
            (mount.root / "new").rename(mount.root / "good")
        (mount.root / "old").unlink()
        write_durably(mount.root / "other", NEW)
        assert sorted(os.listdir(mount.root)) == ["good", "new", "other"]
        unmount_with_losses(mount)
        devices.repair(1)
        mount.mount()
        assert sorted(os.listdir(mount.root)) == ["good", "new", "old", "other"]
        for name in ("good", "old", "new"):
            assert_same((mount.root / name).read_bytes(), OLD)
        assert_same((mount.root / "other").read_bytes(), NEW)


def test_waiting_for_a_version_that_cannot_be_kept(tmp_path: Path) -> None:
    with faulty_mount(tmp_path) as (mount, devices):
        expect_logs(mount, AVOIDED, STAGED, NOT_KEPT)
        path = mount.root / "file"
        path.write_bytes(OLD)
        mount.flush()
        fd = os.open(path, os.O_RDWR)
        devices.fail(1)
        os.pwrite(fd, b"new", MEBIBYTE + 100)
        os.pwrite(fd, b"new", 100)
        with contextlib.suppress(OSError):  # told here where the background has met it already
            os.close(fd)
        done = run_fpfs("wait", path, module="fpfs.cli.ctl")
        assert (done.returncode, done.stdout, done.stderr) == (
            1,
            "",
            f"fpfs-ctl: wait for {path}: Input/output error; the server's log may say more\n",
        )
        unmount_with_losses(mount)
        devices.repair(1)
        mount.mount()
        assert_same(path.read_bytes(), OLD)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_device_of_the_catalog_fails(
    way: tuple[Filesystem, Break], number: int, tmp_path: Path
) -> None:
    filesystem, break_device = way
    with faulty_mount(tmp_path, filesystem=filesystem) as (mount, devices):
        fail_a_copy(mount, devices, break_device, number)


def fail_a_copy(mount: Mount, devices: FaultyDevices, break_device: Break, number: int) -> None:
    """Names go on with the other copy, those too that were not durable yet, and are kept."""
    mount.expect_log(OUT_OF_SERVICE)
    mount.allow_log(f"{AVOIDED}|{REMADE}")
    # Who meets the error first: a checkpoint, or a transaction that is then run again.
    mount.allow_log(CATALOG)
    (mount.root / "folder").mkdir(mode=0o711)
    mount.flush()
    assert mount.status().catalog.copies_in_service == 2
    (mount.root / "folder" / "small").write_bytes(b"small")
    (mount.root / "undurable").mkdir()
    break_device(devices, number)
    (mount.root / "other").mkdir()
    (mount.root / "new").write_bytes(PIECE[:10_000])
    (mount.root / "new").rename(mount.root / "renamed")
    (mount.root / "undurable").rmdir()
    mount.flush()
    names = ["folder", "other", "renamed"]
    assert sorted(os.listdir(mount.root)) == names
    status = mount.status().catalog
    assert status.copies_in_service == 1
    assert [bool(copy.trouble) for copy in status.copies] == [number == 0, number == 1]
    shown = run_fpfs("status", mount.root, module="fpfs.cli.ctl").stdout
    assert "catalog: 1 of 2 copies in service" in shown
    assert f"warning: {devices.folders[number]}/catalog.db: out of service until" in shown
    mount.unmount()
    devices.repair(number)
    mount.mount()
    assert sorted(os.listdir(mount.root)) == names
    assert (mount.root / "folder").stat().st_mode & 0o777 == 0o711
    assert (mount.root / "folder" / "small").read_bytes() == b"small"
    assert (mount.root / "renamed").read_bytes() == PIECE[:10_000]
    assert mount.status().catalog.copies_in_service == 2


def test_the_only_device_of_the_catalog_fails(tmp_path: Path) -> None:
    """Without the catalog nothing new is kept; every call ends, and what was durable stays."""
    with faulty_mount(tmp_path, device_count=1) as (mount, devices):
        expect_logs(mount, CATALOG, REFUSED)
        mount.allow_log(f"{AVOIDED}|{NOT_FLUSHED}")
        write_durably(mount.root / "old", OLD)
        (mount.root / "folder").mkdir()
        mount.flush()
        devices.fail(0)
        for change in (
            lambda: (mount.root / "other").mkdir(),
            lambda: (mount.root / "new").write_bytes(NEW),
            lambda: (mount.root / "old").unlink(),
        ):
            with pytest.raises(OSError, match="Input/output error|Read-only file system"):
                change()
        assert mount.status().devices[0].error != ""
        assert mount.status().catalog.copies_in_service == 1, "nothing could take its place"
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        devices.repair(0)
        mount.mount()
        assert_same((mount.root / "old").read_bytes(), OLD)
        assert sorted(os.listdir(mount.root)) == ["folder", "old"]


def test_what_is_asked_when_all_devices_have_failed_is_answered_in_one_line(
    tmp_path: Path,
) -> None:
    """The status tells what it can, and where the catalog is needed why it cannot.

    What the server has read before it can tell of a file. The log has lines, and no stack.
    """
    with faulty_mount(tmp_path) as (mount, devices):
        expect_logs(mount, CATALOG)
        mount.allow_log(f"{AVOIDED}|{STAGED}|{NOT_KEPT}|{NOT_FLUSHED}")
        path = mount.root / "folder" / "old"
        path.parent.mkdir()
        write_durably(path, OLD)
        mount.flush()
        mount.remount()  # the server has read none of this yet
        file = os.open(path, os.O_RDWR)
        os.pwrite(file, b"staged", 100)
        for number in range(2):
            devices.fail(number)
        shown = run_fpfs("status", mount.root, module="fpfs.cli.ctl")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert "cannot be read: Input/output error" in shown.stdout
        asked = run_fpfs("status", path, module="fpfs.cli.ctl")
        pattern = f"fpfs-ctl: status of {path}: the catalog('s device| answered).*\n"
        assert re.fullmatch(pattern if asked.returncode else "", asked.stderr)
        with contextlib.suppress(OSError):  # told here where the background has met it already
            os.close(file)
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        for number in range(2):
            devices.repair(number)
        mount.mount()
        assert path.read_bytes() in (OLD, OLD[:100] + b"staged" + OLD[106:])


def test_all_devices_fail(breakable: tuple[Mount, FaultyDevices, Break]) -> None:
    mount, devices, break_device = breakable
    expect_logs(mount, STAGED, NOT_KEPT)
    # Whether the catalog has anything left to flush depends on when it was flushed last.
    mount.allow_log(f"{CATALOG}|{NOT_FLUSHED}")
    write_durably(mount.root / "old", OLD)
    mount.flush()
    fd = os.open(mount.root / "old", os.O_RDWR)
    os.pwrite(fd, b"staged", 100)
    fresh = os.open(mount.root / "fresh.pt", os.O_RDWR | os.O_CREAT)
    os.pwrite(fresh, PIECE[:100_000], 0)
    for number in range(2):
        break_device(devices, number)
    with pytest.raises(OSError, match="Input/output error|Read-only file system"):
        os.pwrite(fd, PIECE, MEBIBYTE)  # there is no place for it: nothing is acknowledged
    with pytest.raises(OSError, match="Input/output error|Read-only file system"):
        os.fsync(fd)
    os.close(fd)
    with pytest.raises(OSError, match="Input/output error|Read-only file system"):
        os.fsync(fresh)
    with pytest.raises(OSError, match="Input/output error"):
        os.pread(fresh, 100_000, 0)  # acknowledged and lost: not the zeros of a hole
    os.close(fresh)
    assert all(device.error for device in mount.status().devices)
    assert "keeps its previous version" in unmount_with_losses(mount)
    for number in range(2):
        devices.repair(number)
    mount.mount()
    assert_same((mount.root / "old").read_bytes(), OLD)
