"""Holes and space: truncate, fallocate in its modes, SEEK_HOLE and SEEK_DATA, copy_file_range."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount
from tests.support.contents import assert_same, random_bytes
from tests.support.shadow import ShadowFile
from tests.support.system import FallocateMode, errno_of, fallocate
from tests.support.target import Target

BLOCK = 64 * 1024
CHUNK = 1024 * 1024
ALLOCATE, KEEP = FallocateMode.ALLOCATE, FallocateMode.KEEP_SIZE
PUNCH = FallocateMode.PUNCH_HOLE | FallocateMode.KEEP_SIZE
ZERO = FallocateMode.ZERO_RANGE


@pytest.mark.parametrize("committed", [False, True])
def test_truncate_brings_no_bytes_back(target: Target, directory: Path, committed: bool) -> None:
    """Shrink to an odd size and extend again: zeros, in staging, committed, after a remount."""
    path = directory / "file"
    for number, size in enumerate((1, 4097, 15_999, 16_385, BLOCK - 1, BLOCK + 3, CHUNK + 77)):
        with ShadowFile(path, seed=number) as file:
            file.truncate(0)
            file.write(0, 2 * CHUNK + 5)
        if committed:
            target.remount()
        with ShadowFile(path, seed=number + 50) as file:
            file.truncate(size)
            file.truncate(2 * CHUNK + 9)
            file.check()
            file.write(size + 1000, 10)
            file.check()
            expected = bytes(file.content)
        if committed:
            target.remount()
        assert_same(path.read_bytes(), expected)


def test_truncate_by_name_while_written(directory: Path) -> None:
    with ShadowFile(directory / "file") as file:
        for size in (500_000, 3, 70_000, 0, 1, CHUNK):
            file.write(0, 300_000)
            os.truncate(file.path, size)
            file.resize(size)
            file.check()


def test_random_truncates_and_writes(target: Target, directory: Path) -> None:
    chooser = random.Random(3)
    path = directory / "file"
    with ShadowFile(path, seed=3) as file:
        for _ in range(150):
            if chooser.random() < 0.4:
                file.truncate(chooser.randrange(3 * CHUNK))
            else:
                file.write(chooser.randrange(3 * CHUNK), chooser.randrange(100_000))
            if chooser.random() < 0.1:
                file.check()
        file.check()
        expected = bytes(file.content)
    target.remount()
    assert_same(path.read_bytes(), expected)


def test_sparse_file_takes_little_space(target: Target, directory: Path) -> None:
    path = directory / "file"
    with ShadowFile(path) as file:
        file.write(5, 10)
        file.write(20 * CHUNK + 1, 10)
        file.write(70 * CHUNK - 1, 3)
        file.check()
        assert os.fstat(file.fd).st_blocks * 512 <= 4 * CHUNK
        expected = bytes(file.content)
    target.remount()
    assert path.stat().st_blocks * 512 <= 4 * CHUNK
    assert_same(path.read_bytes(), expected)


@pytest.mark.parametrize("mode", [ALLOCATE, KEEP, ZERO, ZERO | KEEP, PUNCH])
def test_fallocate(target: Target, directory: Path, mode: FallocateMode) -> None:
    """Each mode inside, across and behind the end, at odd places, over data and holes."""
    chooser = random.Random(int(mode))
    path = directory / "file"
    with ShadowFile(path, seed=int(mode)) as file:
        file.write(0, CHUNK + 12_345)
        file.write(2 * CHUNK, 100_000)
    target.remount()
    with ShadowFile(path, seed=int(mode) + 99) as file:
        for _ in range(25):
            file.allocate(mode, chooser.randrange(3 * CHUNK), chooser.randrange(1, 300_000))
            file.write(chooser.randrange(3 * CHUNK), chooser.randrange(1, 50_000))
        file.check()
        expected = bytes(file.content)
    target.remount()
    assert_same(path.read_bytes(), expected)


def test_allocated_space_is_counted_and_reads_as_zeros(target: Target, directory: Path) -> None:
    path = directory / "file"
    with ShadowFile(path) as file:
        file.allocate(ALLOCATE, 0, 8 * CHUNK)
        assert os.fstat(file.fd).st_blocks * 512 >= 8 * CHUNK
        file.check()
        file.write(3 * CHUNK + 1, 100)
        file.check()
        expected = bytes(file.content)
    target.remount()
    assert path.stat().st_blocks * 512 >= 8 * CHUNK
    assert_same(path.read_bytes(), expected)


def test_keep_size_reserves_behind_the_end(directory: Path) -> None:
    with ShadowFile(directory / "file") as file:
        file.write(0, 1000)
        file.allocate(KEEP, 0, 4 * CHUNK)
        file.check()
        file.truncate(3 * CHUNK)
        file.check()


def test_punched_space_comes_back(target: Target, directory: Path) -> None:
    path = directory / "file"
    with ShadowFile(path) as file:
        file.write(0, 8 * CHUNK)
        os.fsync(file.fd)
        file.allocate(PUNCH, CHUNK, 6 * CHUNK)
        assert os.fstat(file.fd).st_blocks * 512 <= 3 * CHUNK
        file.check()
        expected = bytes(file.content)
    target.remount()
    assert path.stat().st_blocks * 512 <= 3 * CHUNK
    assert_same(path.read_bytes(), expected)


def test_posix_fallocate(target: Target, directory: Path) -> None:
    path = directory / "file"
    with ShadowFile(path) as file:
        file.write(10, 100)
        os.posix_fallocate(file.fd, 50, 5 * CHUNK)
        file.resize(50 + 5 * CHUNK)
        file.check()
        expected = bytes(file.content)
    target.remount()
    assert_same(path.read_bytes(), expected)


def test_fallocate_refusals(directory: Path) -> None:
    with ShadowFile(directory / "file") as file:
        for mode, offset, length, expected in (
            (ALLOCATE, 0, 0, "EINVAL"),
            (ALLOCATE, -1, 10, "EINVAL"),
            (ALLOCATE, 2**62, 2**62, "EFBIG"),
            (FallocateMode.PUNCH_HOLE, 0, 10, "ENOTSUP"),
        ):
            found = errno_of(fallocate, file.fd, mode=mode, offset=offset, length=length)
            assert found == expected, (mode, offset, length)
    fd = os.open(directory / "file", os.O_RDONLY)
    assert errno_of(fallocate, fd, mode=ALLOCATE, offset=0, length=10) == "EBADF"
    os.close(fd)


def extents(fd: int) -> list[tuple[int, int]]:
    """The data of a file as SEEK_DATA and SEEK_HOLE tell it: (start, end)."""
    found, offset, size = [], 0, os.fstat(fd).st_size
    while offset < size:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:
            break
        offset = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, offset))
    return found


@pytest.mark.parametrize("committed", [False, True])
def test_seek_hole_and_data(target: Target, directory: Path, committed: bool) -> None:
    """All data lies in what SEEK_DATA finds, and large holes are found as such."""
    path = directory / "file"
    islands = [(0, 1000), (5 * CHUNK + 17, 200_000), (9 * CHUNK - 1, 1)]
    with ShadowFile(path) as file:
        for offset, count in islands:
            file.write(offset, count)
        file.truncate(12 * CHUNK)
    if committed:
        target.remount()
    fd = os.open(path, os.O_RDONLY)
    found = extents(fd)
    for offset, count in islands:
        assert any(start <= offset and offset + count <= end for start, end in found)
    assert sum(end - start for start, end in found) < CHUNK
    assert os.lseek(fd, 3 * CHUNK, os.SEEK_DATA) <= islands[1][0]
    assert os.lseek(fd, 3 * CHUNK, os.SEEK_DATA) > 4 * CHUNK
    assert os.lseek(fd, 3 * CHUNK, os.SEEK_HOLE) == 3 * CHUNK
    assert os.lseek(fd, 11 * CHUNK, os.SEEK_HOLE) == 11 * CHUNK
    assert errno_of(os.lseek, fd, 11 * CHUNK, os.SEEK_DATA) == "ENXIO"
    assert errno_of(os.lseek, fd, 12 * CHUNK, os.SEEK_HOLE) == "ENXIO"
    os.close(fd)


def test_seek_in_a_full_and_an_empty_file(directory: Path) -> None:
    with ShadowFile(directory / "full") as file:
        file.write(0, 100_003)
        assert os.lseek(file.fd, 5, os.SEEK_DATA) == 5
        assert os.lseek(file.fd, 5, os.SEEK_HOLE) == 100_003
    with ShadowFile(directory / "empty") as file:
        assert errno_of(os.lseek, file.fd, 0, os.SEEK_DATA) == "ENXIO"
        assert errno_of(os.lseek, file.fd, 0, os.SEEK_HOLE) == "ENXIO"


def copy_all(source: int, target: int, *, at: tuple[int, int], count: int) -> None:
    """copy_file_range(2) until everything is copied."""
    done = 0
    while done < count:
        copied = os.copy_file_range(source, target, count - done, at[0] + done, at[1] + done)
        assert copied > 0
        done += copied


@pytest.mark.parametrize("committed", [False, True])
def test_copy_file_range(target: Target, directory: Path, committed: bool) -> None:
    """Between files and inside one, aligned and at odd offsets, over data and holes."""
    with ShadowFile(directory / "source", seed=1) as source:
        source.write(0, CHUNK + 4321)
        source.write(2 * CHUNK, CHUNK)
    if committed:
        target.remount()
    with (
        ShadowFile(directory / "source", seed=2) as source,
        ShadowFile(directory / "copy", seed=3) as copy,
    ):
        copy.write(0, 500_000)
        for from_offset, to_offset, count in (
            (0, 0, BLOCK),
            (13, 100_007, 777_777),
            (CHUNK, 3 * CHUNK, 2 * CHUNK),
            (2 * CHUNK + 1, 5, 1),
        ):
            copy_all(source.fd, copy.fd, at=(from_offset, to_offset), count=count)
            copy.apply(to_offset, bytes(source.content[from_offset : from_offset + count]))
        copy_all(copy.fd, copy.fd, at=(1000, 4 * CHUNK + 1), count=70_001)
        copy.apply(4 * CHUNK + 1, bytes(copy.content[1000:71_001]))
        copy.check()
        source.check()
        source.write(0, 2 * CHUNK)
        copy.check()
        expected = bytes(copy.content)
    target.remount()
    assert_same((directory / "copy").read_bytes(), expected)


def test_copy_file_range_ends_at_the_source_end(directory: Path) -> None:
    with (
        ShadowFile(directory / "source") as source,
        ShadowFile(directory / "copy") as copy,
    ):
        source.write(0, 5000)
        assert os.copy_file_range(source.fd, copy.fd, 10_000, 4000, 0) == 1000
        assert os.copy_file_range(source.fd, copy.fd, 10_000, 5000, 0) == 0
        copy.apply(0, bytes(source.content[4000:]))
        copy.check()
        overlap = errno_of(os.copy_file_range, source.fd, source.fd, 1000, 0, 500)
        assert overlap == "EINVAL"


def change_by_write(source: int, fd: int) -> None:
    os.pwrite(fd, os.pread(source, 5000, 0), 70_000)


def change_by_copy(source: int, fd: int) -> None:
    copy_all(source, fd, at=(0, 70_000), count=5000)


def change_by_punch(source: int, fd: int) -> None:
    fallocate(fd, mode=PUNCH, offset=70_000, length=5000)


def change_by_truncation(source: int, fd: int) -> None:
    os.ftruncate(fd, 70_000)
    os.ftruncate(fd, 200_000)


@pytest.mark.parametrize(
    "change", [change_by_write, change_by_copy, change_by_punch, change_by_truncation]
)
def test_what_a_reader_has_cached_does_not_outlive_a_change(
    directory: Path, change: Callable[[int, int], None]
) -> None:
    """A file that was opened and mapped while nobody wrote; the change comes from elsewhere."""
    path = directory / "file"
    path.write_bytes(random_bytes(200_000, seed=3))
    (directory / "source").write_bytes(random_bytes(5000, seed=4))
    with path.open("rb", buffering=0) as reader:
        mapped = mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ)
        before = reader.read(200_000)
        assert_same(mapped[:], before)
        with path.open("r+b", buffering=0) as file, (directory / "source").open("rb") as source:
            change(source.fileno(), file.fileno())
            expected = os.pread(file.fileno(), 200_000, 0)
            assert expected != before
            assert_same(os.pread(reader.fileno(), 200_000, 0), expected)
            assert_same(mapped[:], expected)
        mapped.close()


def test_sizes_that_no_file_can_have(directory: Path) -> None:
    with ShadowFile(directory / "file") as file:
        assert errno_of(os.ftruncate, file.fd, -1) == "EINVAL"
        assert errno_of(os.pwrite, file.fd, b"x", 2**63 - 1) in ("EFBIG", "EINVAL")
        file.write(0, 10)
        file.check()


def test_truncate_of_an_inline_file(target: Target, directory: Path) -> None:
    """Contents that live in the catalog grow out of it and shrink again."""
    path = directory / "file"
    path.write_bytes(random_bytes(10_000, seed=1))
    expected = random_bytes(10_000, seed=1)
    for size in (5_000, 12_000, 200_000, 7_001, 16_384, 16_385, 100):
        target.remount()
        os.truncate(path, size)
        expected = expected[:size] + bytes(max(0, size - len(expected)))
        assert_same(path.read_bytes(), expected)
    target.remount()
    assert_same(path.read_bytes(), expected)


def test_fsync_before_close_keeps_no_preallocation(mount: Mount, directory: Path) -> None:
    """The close has nothing to commit then, and still gives back what was allocated ahead."""
    before = mount.stored_bytes()
    fd = os.open(directory / "file", os.O_WRONLY | os.O_CREAT)
    for _ in range(48):
        os.write(fd, bytes(CHUNK))
    os.fsync(fd)
    os.close(fd)
    deadline_s = time.monotonic() + 60
    while mount.stored_bytes() > before + 49 * CHUNK and time.monotonic() < deadline_s:
        mount.flush()
    assert mount.stored_bytes() <= before + 49 * CHUNK
