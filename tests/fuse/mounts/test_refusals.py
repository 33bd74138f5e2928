"""Refusals for what the machine lacks: places, tools, memory, writable devices.

What a machine lacks is taken from the command alone: by its environment, or by mounts that only it
and its server see.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fpfs.daemon.devices.arena import ARENA_FOLDER, arena_path
from fpfs.daemon.devices.label import STAMP_NAME, read_stamp, write_stamp
from fpfs.daemon.devices.opened_set import OBJECTS_NAME
from fpfs.daemon.mount.paths import make_runtime_folder
from fpfs.testing.mounted import REPOSITORY, check_fpfs, mounted
from tests.support.catalog.catalogs import LEFT_BY_A_CATALOG, LEFT_BY_NO_CATALOG, leave
from tests.support.processes import run
from tests.support.refusals import refusal, with_mounts

Places = tuple[Path, Path]

READ_ONLY = "mount --bind {0} {0} && mount -o remount,bind,ro {0}"


def can_be_mounted(device: Path, mountpoint: Path) -> bool:
    """Whether the refusal left nothing that keeps a device from its next mount."""
    check_fpfs("mount", "-d", device, "--staging", "16M", "-o", f"log={device}.log", mountpoint)
    check_fpfs("umount", mountpoint)
    return True


def test_the_control_socket_would_be_covered(places: Places) -> None:
    device, _ = places
    folder = make_runtime_folder(asked="test")
    # Read-only, so that nothing would be formatted and mounted if the place were taken.
    message = refusal("mount", "-d", device, "-o", "ro", folder)
    assert f"the control socket {folder} lies under the mountpoint {folder}; put it" in message
    assert os.listdir(device) == []


@pytest.mark.root
@pytest.mark.parametrize(
    "runtime",
    [
        "mount -t tmpfs -o ro tmpfs /run",
        "mount -t tmpfs tmpfs /run && touch /run/fpfs",
        "mount -t tmpfs tmpfs /run && ln -s missing /run/fpfs",
        "mount -t tmpfs tmpfs /run && mkdir /run/fpfs && chown nobody /run/fpfs",
    ],
    ids=["read-only", "a file", "a link to nothing", "somebody else's"],
)
def test_no_folder_for_the_control_socket(places: Places, tmp_path: Path, runtime: str) -> None:
    device, mountpoint = places
    command = ("mount", "-d", device, "--log", tmp_path / "log", mountpoint)
    assert refusal(*command, prefix=with_mounts(runtime)) == (
        f"fpfs: mount at {mountpoint}: no folder for the control socket can be made"
        " (tried /run/fpfs); see that it is a folder of root's\n"
    )
    assert os.listdir(device) == []


def test_a_mount_without_fusermount3(places: Places, tmp_path: Path) -> None:
    device, mountpoint = places
    command = ("mount", "-d", device, "--staging", "16M", "--log", tmp_path / "log", mountpoint)
    assert refusal(*command, environment={"PATH": str(tmp_path)}) == (
        f"fpfs: mount at {mountpoint}: fusermount3 is not installed; install the package fuse3\n"
    )
    assert not arena_of(device).exists()
    assert can_be_mounted(device, mountpoint)


def test_an_unmount_without_fusermount3(tmp_path: Path) -> None:
    with mounted() as mount:
        (mount.root / "file").write_bytes(b"content")
        message = refusal("umount", mount.root, environment={"PATH": str(tmp_path)})
        assert "fusermount3 is not installed; install the package fuse3" in message
        assert (mount.root / "file").read_bytes() == b"content"


def test_a_server_that_ends_before_it_is_ready(places: Places, tmp_path: Path) -> None:
    """The module that stands in for pyfuse3 is where it fails; only the server imports that."""
    device, mountpoint = places
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "pyfuse3.py").write_text("raise SystemExit('libfuse3 is broken')\n")
    log = tmp_path / "log"
    message = refusal(
        *("mount", "-d", device, "--log", log, mountpoint),
        environment={"PYTHONPATH": f"{tmp_path / 'broken'}:{REPOSITORY}"},
    )
    assert message == (
        f"fpfs: mount at {mountpoint}: the server ended before it was ready (exit status 1);"
        f" see the end of its log {log}\n"
    )
    assert log.read_text() == "libfuse3 is broken\n"
    assert os.listdir(device) == []


def arena_of(device: Path) -> Path:
    """Where a server of this device alone stages."""
    stamp = read_stamp(str(device), asked="test")
    assert stamp is not None
    return Path(arena_path(stamp.filesystem_id))


@pytest.mark.root
def test_staging_beyond_the_memory(places: Places, tmp_path: Path) -> None:
    """In a tmpfs that takes it: only the memory is too small."""
    device, mountpoint = places
    message = refusal(
        *("mount", "-d", device, "--staging", "900T", "--log", tmp_path / "log", mountpoint),
        prefix=with_mounts(f"mount -t tmpfs -o size=2000T tmpfs {ARENA_FOLDER}"),
    )
    assert message.startswith(f"fpfs: mount at {mountpoint}: the server failed (staging arena ")
    assert message.endswith(
        " bytes: Cannot allocate memory); ask for less staging: it must be free memory, within the"
        " limit of the memory cgroup\n"
    )
    assert can_be_mounted(device, mountpoint)


@pytest.mark.root
@pytest.mark.parametrize("formatted", [False, True], ids=["empty", "formatted"])
def test_a_device_on_a_read_only_filesystem(
    places: Places, tmp_path: Path, *, formatted: bool
) -> None:
    device, mountpoint = places
    if formatted:
        check_fpfs("format", "-d", device)
    command = ("mount", "-d", device, "--log", tmp_path / "log", mountpoint)
    assert refusal(*command, prefix=with_mounts(READ_ONLY.format(device))) == (
        f"fpfs: mount at {mountpoint}: the device directory {device} cannot be used (Read-only file"
        " system); see that it is on a writable filesystem and belongs to you; fpfs mount"
        " --degraded does without a device that is lost\n"
    )
    assert (device / STAMP_NAME).exists() == formatted
    assert can_be_mounted(device, mountpoint)


@pytest.mark.root
def test_objects_on_a_read_only_filesystem(places: Places, tmp_path: Path) -> None:
    device, mountpoint = places
    check_fpfs("format", "-d", device)
    command = ("mount", "-d", device, "--log", tmp_path / "log", mountpoint)
    message = refusal(*command, prefix=with_mounts(READ_ONLY.format(device / OBJECTS_NAME)))
    assert f"mount at {mountpoint}: the server failed (" in message
    assert message.endswith("); mount the device's filesystem writable\n")
    assert not arena_of(device).exists()
    assert can_be_mounted(device, mountpoint)


@pytest.mark.root
def test_staging_on_a_read_only_filesystem(places: Places, tmp_path: Path) -> None:
    device, mountpoint = places
    command = ("mount", "-d", device, "--log", tmp_path / "log", mountpoint)
    message = refusal(*command, prefix=with_mounts(READ_ONLY.format(ARENA_FOLDER)))
    assert f"the server failed (staging arena {ARENA_FOLDER}/fpfs-" in message
    assert message.endswith(f": Read-only file system); mount {ARENA_FOLDER} writable\n")
    assert can_be_mounted(device, mountpoint)


def test_too_few_open_files(places: Places, tmp_path: Path) -> None:
    device, mountpoint = places
    message = refusal(
        *("mount", "-d", device, "--log", tmp_path / "log", mountpoint),
        prefix=("sh", "-euc", 'ulimit -n 20\nexec "$@"', "sh"),
    )
    assert message == (
        f"fpfs: mount at {mountpoint}: the server failed (descriptors of events: Too many open"
        " files); let it open more files (ulimit -n)\n"
    )
    assert can_be_mounted(device, mountpoint)


@pytest.fixture
def full_device(tmp_path: Path) -> Iterator[Path]:
    """An empty device directory on a filesystem of its own that a ballast fills."""
    filesystem = tmp_path / "filesystem"
    filesystem.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=24M", "tmpfs", filesystem)
    try:
        device = filesystem / "device"
        device.mkdir()
        check_fpfs("format", "-d", device)
        with (filesystem / "ballast").open("wb") as ballast:
            free = os.statvfs(filesystem)
            os.posix_fallocate(ballast.fileno(), 0, free.f_bavail * free.f_frsize)
        yield device
    finally:
        run("umount", filesystem)


@pytest.mark.root
def test_a_first_mount_on_a_full_device(full_device: Path, places: Places, tmp_path: Path) -> None:
    """What is half made is taken back: with room, the same directory mounts."""
    _, mountpoint = places
    message = refusal("mount", "-d", full_device, "--log", tmp_path / "log", mountpoint)
    assert (
        f"catalog {full_device}/catalog.db cannot be made: database or disk is full); " in message
    )
    assert message.endswith("; make room on the devices\n")
    assert sorted(os.listdir(full_device)) == ["fpfs.json", "lock", "objects"]
    (full_device.parent / "ballast").unlink()
    assert can_be_mounted(full_device, mountpoint)


@pytest.mark.parametrize("left", LEFT_BY_A_CATALOG)
def test_a_catalog_that_is_lost_is_not_made_anew(places: Places, tmp_path: Path, left: str) -> None:
    device, mountpoint = places
    check_fpfs("format", "-d", device)
    leave(device / left)
    message = refusal("mount", "-d", device, "--log", tmp_path / "log", mountpoint)
    assert f"(there is no catalog at {device}/catalog.db, which names what lies on the" in message
    assert message.endswith(
        "; put it back from a backup, without -wal, or empty the devices to begin anew\n"
    )
    assert not (device / "catalog.db").exists()
    assert not arena_of(device).exists()


@pytest.mark.parametrize("left", LEFT_BY_NO_CATALOG)
def test_what_a_first_mount_that_was_killed_leaves_is_mounted(places: Places, left: str) -> None:
    device, mountpoint = places
    check_fpfs("format", "-d", device)
    leave(device / left)
    assert can_be_mounted(device, mountpoint)


def test_a_catalog_of_another_filesystem(places: Places, tmp_path: Path) -> None:
    device, mountpoint = places
    other = tmp_path / "other"
    other.mkdir()
    identities = []
    for folder in (device, other):
        assert can_be_mounted(folder, mountpoint)
        stamp = read_stamp(str(folder), asked="test")
        assert stamp is not None
        identities.append(stamp.filesystem_id)
    own = tmp_path / "own"
    own.mkdir()
    for name in ("catalog.db", "catalog.sums"):
        (device / name).rename(own / name)
        shutil.copy(other / name, device)
    message = refusal("mount", "-d", device, "--log", tmp_path / "log", mountpoint)
    assert (
        f"catalog {device}/catalog.db is of filesystem {identities[1]}, the stamps of the devices"
        f" are of filesystem {identities[0]}); put back the catalog and the stamps"
    ) in message
    for name in ("catalog.db", "catalog.sums"):
        (own / name).rename(device / name)
    assert can_be_mounted(device, mountpoint)


def test_stamps_with_each_others_numbers(places: Places, tmp_path: Path) -> None:
    """Layouts name devices by number: what they locate would be looked for in the wrong place."""
    first, mountpoint = places
    second = tmp_path / "second"
    second.mkdir()
    options = ("--staging", "16M", "--log", tmp_path / "log")
    check_fpfs("mount", "-d", first, "-d", second, *options, mountpoint)
    check_fpfs("umount", mountpoint)
    for folder, number in ((first, 1), (second, 0)):
        stamp = read_stamp(str(folder), asked="test")
        assert stamp is not None
        write_stamp(str(folder), msgspec.structs.replace(stamp, device_number=number))
    (first / "catalog.db").rename(second / "catalog.db")
    message = refusal("mount", "-d", first, "-d", second, *options, mountpoint)
    assert "is of devices {0: " in message


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ("exit 1", "fusermount3 failed without a word; see that the mountpoint belongs to you"),
        (
            "echo fusermount3: it rains >&2; exit 1",
            "fusermount3: it rains; see that the mountpoint",
        ),
    ],
)
def test_a_mount_that_fusermount3_refuses(
    places: Places, tmp_path: Path, script: str, wrong: str
) -> None:
    """A program in its place: the real one says why whenever it refuses."""
    device, mountpoint = places
    program = tmp_path / "fusermount3"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    message = refusal(
        *("mount", "-d", device, "--staging", "16M", "--log", tmp_path / "log", mountpoint),
        environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert message.startswith(f"fpfs: mount at {mountpoint}: {wrong}")
    assert not arena_of(device).exists()
    assert can_be_mounted(device, mountpoint)
