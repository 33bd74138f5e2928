"""O_DIRECT: aligned and unaligned requests, mixed with buffered ones and with maps."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
from pathlib import Path

import pytest

from tests.support.contents import assert_same, random_bytes
from tests.support.system import errno_of
from tests.support.target import Target

CHUNK = 2**20
SIZE = 3 * CHUNK


def aligned(count: int, *, seed: int = 0) -> mmap.mmap:
    """A buffer on a page boundary, filled with random bytes."""
    buffer = mmap.mmap(-1, count)
    buffer[:] = random_bytes(count, seed=seed)
    return buffer


@pytest.mark.parametrize("request_bytes", [512, 4096, 65_536, CHUNK, SIZE])
def test_aligned_writes_and_reads(target: Target, directory: Path, request_bytes: int) -> None:
    size = min(SIZE, 300 * request_bytes)
    buffer = aligned(size, seed=request_bytes)
    view = memoryview(buffer)
    fd = os.open(directory / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    for offset in range(0, size, request_bytes):
        assert os.pwrite(fd, view[offset : offset + request_bytes], offset) == request_bytes
    expected = bytes(buffer)
    back = mmap.mmap(-1, size)
    assert os.preadv(fd, [back], 0) == size
    assert_same(back[:], expected)
    os.close(fd)
    assert_same((directory / "file").read_bytes(), expected)
    target.remount()
    fd = os.open(directory / "file", os.O_RDONLY | os.O_DIRECT)
    back[:] = bytes(size)
    assert os.preadv(fd, [back], 0) == size
    assert_same(back[:], expected)
    os.close(fd)
    view.release()


def test_read_ends_at_an_odd_end(target: Target, directory: Path) -> None:
    content = random_bytes(CHUNK + 4097, seed=1)
    (directory / "file").write_bytes(content)
    target.remount()
    fd = os.open(directory / "file", os.O_RDONLY | os.O_DIRECT)
    back = mmap.mmap(-1, 2 * CHUNK)
    assert os.preadv(fd, [back], CHUNK) == 4097
    assert_same(back[:4097], content[CHUNK:])
    assert os.preadv(fd, [back], 2 * CHUNK) == 0
    os.close(fd)


def test_unaligned_requests_work_or_are_refused_as_a_whole(directory: Path) -> None:
    """Filesystems may refuse unaligned direct requests; half of one is never done."""
    content = bytearray(random_bytes(200_000, seed=2))
    path = directory / "file"
    path.write_bytes(content)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    buffer = aligned(8192, seed=3)
    view = memoryview(buffer)
    for offset, start, count in ((1, 0, 512), (512, 1, 512), (0, 0, 511), (100_001, 7, 3333)):
        data = view[start : start + count]
        outcome = errno_of(os.pwrite, fd, data, offset)
        assert outcome in ("OK", "EINVAL")
        if outcome == "OK":
            content[offset : offset + count] = data
        assert_same(path.read_bytes(), content)
    view.release()
    os.close(fd)


def test_direct_and_buffered_handles_agree(target: Target, directory: Path) -> None:
    """What one handle writes, the other reads at once, whatever was cached before."""
    chooser = random.Random(4)
    path = directory / "file"
    expected = bytearray(random_bytes(SIZE, seed=4))
    path.write_bytes(expected)
    target.remount()
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    buffered = os.open(path, os.O_RDWR)
    reader = os.open(path, os.O_RDONLY)
    buffer = mmap.mmap(-1, 128 * 1024)
    for step in range(60):
        count = chooser.randrange(1, 32) * 4096
        offset = chooser.randrange((SIZE - count) // 4096) * 4096
        data = random_bytes(count, seed=1000 + step)
        expected[offset : offset + count] = data
        if step % 2:
            os.pwrite(buffered, data, offset)
        else:
            buffer[:count] = data
            with memoryview(buffer) as view, view[:count] as part:
                assert os.pwrite(direct, part, offset) == count
        assert_same(os.pread(reader, SIZE, 0), expected)
        assert os.preadv(direct, [buffer], offset) > 0
        assert_same(buffer[:count], data)
    for fd in (direct, buffered, reader):
        os.close(fd)


def test_direct_writes_are_seen_through_a_map(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(SIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert mapped[:SIZE] == bytes(SIZE)
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
        buffer = aligned(8192, seed=5)
        os.pwrite(fd, buffer, 65_536)
        os.close(fd)
        assert_same(mapped[65_536 : 65_536 + 8192], buffer[:])


def test_direct_handle_that_becomes_buffered_beside_a_cached_reader(
    target: Target, directory: Path
) -> None:
    """As dd does before an odd tail: its pages are locked while the server has the request."""
    expected = bytearray(random_bytes(300_000, seed=5))
    (directory / "file").write_bytes(expected)
    reader = os.open(directory / "file", os.O_RDONLY)
    assert os.pread(reader, len(expected), 0) == expected
    fd = os.open(directory / "file", os.O_RDWR | os.O_DIRECT)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    # In a page that is cached, in one that is not, over several, and behind the end.
    for offset, length in [(100, 100), (200_001, 7), (12_365, 10_000), (300_500, 333)]:
        os.posix_fadvise(reader, 200_000, 4096, os.POSIX_FADV_DONTNEED)
        data = random_bytes(length, seed=offset)
        assert os.pwrite(fd, data, offset) == length
        expected.extend(bytes(max(0, offset + length - len(expected))))
        expected[offset : offset + length] = data
        assert_same(os.pread(reader, len(expected), 0), expected)
    os.close(fd)
    os.close(reader)
    target.remount()
    assert_same((directory / "file").read_bytes(), expected)


def test_direct_extension_leaves_zeros_between(target: Target, directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"odd")
    fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    buffer = aligned(4096, seed=6)
    os.pwrite(fd, buffer, 2 * CHUNK)
    os.close(fd)
    expected = b"odd" + bytes(2 * CHUNK - 3) + buffer[:]
    assert_same(path.read_bytes(), expected)
    target.remount()
    assert_same(path.read_bytes(), expected)


def test_direct_append(directory: Path) -> None:
    path = directory / "file"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_APPEND)
    expected = b""
    for seed in range(5):
        buffer = aligned(4096 * (seed + 1), seed=seed)
        os.write(fd, buffer)
        expected += buffer[:]
    os.close(fd)
    assert_same(path.read_bytes(), expected)
