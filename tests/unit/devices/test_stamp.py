"""A device directory's stamp, lock and identity, one by one; tests of sets are in test_devices.py.

Invariants:
  * No function leaves a descriptor open that it does not return.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from fpfs.core.refusal import Refused
from fpfs.daemon.devices.label import (
    FORMAT_VERSION,
    LOCK_NAME,
    STAMP_NAME,
    Backing,
    LockHolder,
    Stamp,
    lock_directory,
    lock_holder,
    read_backing,
    read_stamp,
    write_stamp,
)
from tests.support.images import make_image, mounted_image, needs_filesystem_identity
from tests.support.servers import draining

STAMP = Stamp(
    format_version=FORMAT_VERSION,
    filesystem_id="f" * 32,
    device_number=3,
    device_id="d" * 32,
    device_count=4,
    backing=Backing(uuid="", inode=12),
    paths=("/a", "/b"),
)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """Every test gives back what it was given."""
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def test_a_stamp_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        done.append(("fsync", path.name if path.is_dir() else path.read_text()))
        fsync(fd)

    def recorded_rename(source: str, destination: str) -> None:
        done.append(("rename", Path(destination).name))
        rename(source, destination)

    write_stamp(str(tmp_path), STAMP)
    content = (tmp_path / STAMP_NAME).read_text()
    (tmp_path / STAMP_NAME).unlink()
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    write_stamp(str(tmp_path), STAMP)
    assert done == [("fsync", content), ("rename", STAMP_NAME), ("fsync", tmp_path.name)]
    assert os.listdir(tmp_path) == [STAMP_NAME]
    assert read_stamp(str(tmp_path), asked="test") == STAMP


def test_a_stamp_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stamp(str(tmp_path), STAMP)

    def failing(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output"):
        patched.setattr(os, "fsync", failing)
        write_stamp(str(tmp_path), msgspec.structs.replace(STAMP, device_count=5))
    assert read_stamp(str(tmp_path), asked="test") == STAMP


def test_a_stamp_of_which_there_is_room_for_a_part_leaves_the_old_one(tmp_path: Path) -> None:
    write_stamp(str(tmp_path), STAMP)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            write_stamp(str(tmp_path), msgspec.structs.replace(STAMP, device_count=5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_stamp(str(tmp_path), asked="test") == STAMP


def test_a_lock_excludes_and_names_its_holder(tmp_path: Path) -> None:
    # A longer record of an earlier holder must not show through.
    (tmp_path / LOCK_NAME).write_bytes(_record(1, Path("/long" * 20)))
    held = lock_directory(str(tmp_path), mountpoint="", asked="first")
    try:
        assert lock_holder(str(tmp_path)) == LockHolder(os.getpid(), "")
        with pytest.raises(Refused, match=re.escape(f"in use (process {os.getpid()})")):
            lock_directory(str(tmp_path), mountpoint="/x", asked="second")
        assert lock_holder(str(tmp_path)) == LockHolder(os.getpid(), "")
    finally:
        os.close(held)
    os.close(lock_directory(str(tmp_path), mountpoint="/x", asked="third"))
    assert lock_holder(str(tmp_path)) == LockHolder(os.getpid(), "/x")


def test_a_lock_that_somebody_else_holds_is_not_taken_from_one_that_ended(tmp_path: Path) -> None:
    """Who is named as the holder is gone, and yet the lock is held: by a child of it, say."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    record = _record(ended.pid, tmp_path / "not mounted")
    (tmp_path / LOCK_NAME).write_bytes(record)
    held = os.open(tmp_path / LOCK_NAME, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Refused, match="in use"):
            lock_directory(str(tmp_path), mountpoint="/x", asked="test")
        assert (tmp_path / LOCK_NAME).read_bytes() == record
    finally:
        os.close(held)


def test_a_server_that_drains_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was unmounted, lives on, and lets go of the lock by ending."""
    caplog.set_level(logging.INFO)
    with draining(tmp_path, monkeypatch) as tries:
        os.close(lock_directory(str(tmp_path), mountpoint="/x", asked="test"))
    assert tries == [False, True]
    (said,) = caplog.messages
    assert re.match(rf"{tmp_path} is in use by process \d+, whose mount at .* is not seen", said)


def test_who_asked_and_has_gone_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter, told = os.pipe()
    try:
        with (
            draining(tmp_path, monkeypatch, last=lambda: os.close(starter)) as tries,
            pytest.raises(Refused, match="did not wait until"),
        ):
            lock_directory(str(tmp_path), mountpoint="/x", asked="test", starter_fd=told)
    finally:
        os.close(told)
    assert tries == [False]


def test_where_the_kernel_knows_no_identity() -> None:
    assert read_backing("/proc") == Backing(uuid="", inode=os.stat("/proc").st_ino)


@pytest.mark.root
@needs_filesystem_identity
def test_the_identity_is_that_of_the_filesystem(tmp_path: Path) -> None:
    for name in ("first", "second"):
        image = tmp_path / f"{name}.img"
        identity = make_image(image)
        with mounted_image(image) as mountpoint:
            folder = mountpoint / "folder"
            folder.mkdir()
            assert read_backing(str(folder)) == Backing(
                uuid=identity.hex, inode=folder.stat().st_ino
            )


def _record(pid: int, mountpoint: Path) -> bytes:
    return msgspec.json.encode(LockHolder(pid, str(mountpoint)))
