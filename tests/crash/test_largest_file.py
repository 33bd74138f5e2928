"""A file with bytes up to the last one that a file can have: 2**58 - 1, in the last segment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fpfs.core.limits import FILE_BYTES_MAX
from fpfs.testing.mounted import Mount, check_fpfs, mounted
from tests.support.contents import assert_same, random_bytes
from tests.support.servers import kill
from tests.support.system import FallocateMode, errno_of, fallocate

CTL = "fpfs.cli.ctl"
TAIL = random_bytes(300_001, seed=1)
START = FILE_BYTES_MAX - len(TAIL)


@pytest.fixture
def mount() -> Iterator[Mount]:
    """A mount whose server may die."""
    with mounted(devices=2) as made:
        made.allow_log(r"fpfs.keeper: server \d+ died")
        yield made


def read_tail(mount: Mount) -> bytes:
    """What is in the file where it is not sparse."""
    with (mount.root / "file").open("rb", buffering=0) as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == START // 65536 * 65536
        return os.pread(file.fileno(), len(TAIL) + 1, START)


def test_its_last_bytes_live_on(mount: Mount) -> None:
    path = mount.root / "file"
    with path.open("w+b", buffering=0) as file:
        assert os.pwrite(file.fileno(), TAIL, START) == len(TAIL)
        assert errno_of(os.pwrite, file.fileno(), b"x", FILE_BYTES_MAX) == "EFBIG"
        kill(mount)
        assert_same(read_tail(mount), TAIL)
        # What is staged goes to the devices before it is committed: there is no room for more.
        (mount.root / "other").write_bytes(bytes(2 * mount.status().staging.bytes_total))
        kill(mount)
        assert_same(read_tail(mount), TAIL)
    mount.flush()
    kill(mount)
    mount.remount()
    assert_same(read_tail(mount), TAIL)
    check_fpfs("scrub", path, module=CTL)


def test_its_last_bytes_can_be_taken_away(mount: Mount) -> None:
    path = mount.root / "file"
    with path.open("w+b", buffering=0) as file:
        fallocate(file.fileno(), mode=FallocateMode.ALLOCATE, offset=START, length=len(TAIL))
        assert os.fstat(file.fileno()).st_size == FILE_BYTES_MAX
        os.pwrite(file.fileno(), TAIL, START)
        os.fsync(file.fileno())
        hole = FallocateMode.PUNCH_HOLE | FallocateMode.KEEP_SIZE
        fallocate(file.fileno(), mode=hole, offset=FILE_BYTES_MAX - 100_000, length=100_000)
    mount.flush()
    mount.remount()
    assert_same(read_tail(mount), TAIL[:-100_000] + bytes(100_000))
    os.truncate(path, START + 10)
    mount.remount()
    assert_same(read_tail(mount), TAIL[:10])
    path.unlink()
    mount.flush()
    assert mount.stored_bytes() == 0
