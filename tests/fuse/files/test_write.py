"""write(2) and its relatives: odd offsets and sizes, appending, several writers and processes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.contents import assert_same, random_bytes
from tests.support.processes import expect_line, python_child, tell
from tests.support.shadow import ShadowFile
from tests.support.target import Target

BLOCK = 64 * 1024
CHUNK = 1024 * 1024
INLINE = 16 * 1024


@pytest.mark.parametrize("size", [0, 1, 4095, INLINE - 1, INLINE, INLINE + 1, BLOCK, CHUNK + 1])
def test_sizes_around_the_limits(target: Target, directory: Path, size: int) -> None:
    path = directory / "file"
    with ShadowFile(path) as file:
        file.write(0, size)
        file.check()
    target.remount()
    with ShadowFile(path) as file:
        assert len(file.content) == size
        file.write(size, 3)
        file.check()


@pytest.mark.parametrize("edge", [INLINE, BLOCK, CHUNK, 2 * CHUNK, 64 * CHUNK])
def test_writes_across_an_edge(target: Target, directory: Path, edge: int) -> None:
    """Small writes that end before, at and behind a boundary of the layout."""
    path = directory / "file"
    with ShadowFile(path) as file:
        for offset, count in (
            (edge - 7, 5),
            (edge - 3, 3),
            (edge - 1, 2),
            (edge, 1),
            (edge + 9, 9),
        ):
            file.write(offset, count)
        file.check()
        expected = bytes(file.content)
    target.remount()
    assert_same(path.read_bytes(), expected)


def test_partial_rewrites_at_odd_offsets(target: Target, directory: Path) -> None:
    """Rewrites of committed blocks, of blocks in staging, and of both at once."""
    chooser = random.Random(1)
    path = directory / "file"
    size = 3 * CHUNK + 4321
    with ShadowFile(path, seed=1) as file:
        file.write(0, size)
    for seed in range(2, 5):
        target.remount()
        with ShadowFile(path, seed=seed) as file:
            assert len(file.content) == size
            for _ in range(60):
                offset = chooser.randrange(size)
                count = min(chooser.choice([1, 13, 511, 4097, BLOCK - 1, BLOCK + 1]), size - offset)
                file.write(offset, count)
                if chooser.random() < 0.1:
                    os.fsync(file.fd)
            file.check()


def test_backwards(target: Target, directory: Path) -> None:
    """The next-offset prediction is wrong each time."""
    path = directory / "file"
    with ShadowFile(path) as file:
        for offset in range(40 * 100_003, -1, -100_003):
            file.write(offset, 70_001)
        file.check()
        expected = bytes(file.content)
    target.remount()
    assert_same(path.read_bytes(), expected)


def test_two_streams_in_one_file(directory: Path) -> None:
    with ShadowFile(directory / "file") as file:
        for step in range(60):
            file.write(step * 33_333, 33_333)
            file.write(10 * CHUNK + step * 44_441, 44_441)
        file.check()


def test_vectors(directory: Path) -> None:
    """One pwritev of many odd pieces, more than one request can hold."""
    pieces = [random_bytes(count, seed=count) for count in (1, 64, 704, CHUNK, 3 * CHUNK + 5, 0, 9)]
    fd = os.open(directory / "file", os.O_RDWR | os.O_CREAT)
    assert os.pwritev(fd, pieces, 703) == sum(map(len, pieces))
    assert_same(os.pread(fd, 10 * CHUNK, 0), bytes(703) + b"".join(pieces))
    buffers = [bytearray(count) for count in (703, 1, 64, 704, 2 * CHUNK)]
    os.preadv(fd, buffers, 0)
    assert_same(b"".join(buffers), (bytes(703) + b"".join(pieces))[: sum(map(len, buffers))])
    os.close(fd)


def test_read_at_and_behind_the_end(directory: Path) -> None:
    with ShadowFile(directory / "file") as file:
        file.write(0, 100_001)
        assert os.pread(file.fd, 10, 100_001) == b""
        assert os.pread(file.fd, 10, 10**12) == b""
        assert_same(os.pread(file.fd, 100, 99_991), file.content[99_991:])


def test_append_with_two_handles(target: Target, directory: Path) -> None:
    """Each write lands at the end that the other handle's write made."""
    path = directory / "log"
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    handles = [os.open(path, flags), os.open(path, flags)]
    expected = b""
    for step in range(200):
        record = f"{step} by {step % 2}\n".encode() * (step % 17)
        os.write(handles[step % 2], record)
        expected += record
    assert path.stat().st_size == len(expected)
    for fd in handles:
        os.close(fd)
    assert path.read_bytes() == expected
    target.remount()
    with path.open("ab") as file:
        file.write(b"last")
    assert path.read_bytes() == expected + b"last"


APPENDER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
print("ready", flush=True)
sys.stdin.readline()
for number in range(2000):
    os.write(fd, f"{sys.argv[2]} {number:06}\\n".encode())
print("done", flush=True)
"""


def test_append_from_two_processes(directory: Path) -> None:
    """No record is lost or torn, and each process's records keep their order."""
    path = directory / "log"
    path.touch()
    with python_child(APPENDER, path, "a") as one, python_child(APPENDER, path, "b") as other:
        for child in (one, other):
            expect_line(child, "ready")
        for child in (one, other):
            tell(child)
        for child in (one, other):
            expect_line(child, "done")
    lines = path.read_text().splitlines()
    for name in "ab":
        mine = [line for line in lines if line.startswith(name)]
        assert mine == [f"{name} {number:06}" for number in range(2000)]
    assert len(lines) == 4000


RANGE_WRITER = """
import os, sys
path, mine, step, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
fd = os.open(path, os.O_RDWR)
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    offset = (number * 2 + mine) * step
    os.pwrite(fd, bytes([mine + 1]) * step, offset)
print("done", flush=True)
"""


@pytest.mark.parametrize("step", [37, 4096, 60_001])
def test_two_processes_write_disjoint_ranges(target: Target, directory: Path, step: int) -> None:
    """Interleaved pieces, so that both processes share pages, blocks and chunks."""
    path, count = directory / "file", 100
    path.write_bytes(bytes(2 * count * step))
    with (
        python_child(RANGE_WRITER, path, 0, step, count) as one,
        python_child(RANGE_WRITER, path, 1, step, count) as other,
    ):
        for child in (one, other):
            expect_line(child, "ready")
        for child in (one, other):
            tell(child)
        for child in (one, other):
            expect_line(child, "done")
    expected = (b"\1" * step + b"\2" * step) * count
    assert_same(path.read_bytes(), expected)
    target.remount()
    assert_same(path.read_bytes(), expected)


OVERLAP_WRITER = """
import os, random, sys
chooser = random.Random(int(sys.argv[2]))
fd = os.open(sys.argv[1], os.O_RDWR)
print("ready", flush=True)
sys.stdin.readline()
for number in range(400):
    offset, count = chooser.randrange(300_000), chooser.randrange(1, 90_000)
    os.pwrite(fd, sys.argv[2].encode() * count, offset)
print("done", flush=True)
"""


def test_two_processes_write_overlapping_ranges(directory: Path) -> None:
    """Every byte comes from one of the two, and behind the size there is nothing."""
    path = directory / "file"
    path.write_bytes(b"0" * 300_000)
    with python_child(OVERLAP_WRITER, path, 1) as one, python_child(OVERLAP_WRITER, path, 2) as two:
        for child in (one, two):
            expect_line(child, "ready")
        for child in (one, two):
            tell(child)
        while one.poll() is None or two.poll() is None:
            content = path.read_bytes()
            assert set(content) <= set(b"012")
        for child in (one, two):
            expect_line(child, "done")
    content = path.read_bytes()
    assert set(content) <= set(b"012")
    assert len(content) == path.stat().st_size
    extra = random.Random(1), random.Random(2)
    ends = [max(c.randrange(300_000) + c.randrange(1, 90_000) for _ in range(400)) for c in extra]
    assert len(content) == max(300_000, *ends)


def test_large_offsets(directory: Path) -> None:
    """A byte at 4 TiB, one below the largest size, and none above it."""
    fd = os.open(directory / "far", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x", 2**42)
    assert os.fstat(fd).st_size == 2**42 + 1
    assert os.pread(fd, 3, 2**42 - 1) == b"\0x"
    assert os.fstat(fd).st_blocks * 512 <= 2 * CHUNK
    os.close(fd)


def test_reopen_through_proc(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"one")
    with path.open("rb") as file:
        fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR)
        os.pwrite(fd, b"two", 3)
        os.close(fd)
        assert file.read() == b"onetwo"


def test_truncating_open_empties_the_file(target: Target, directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(random_bytes(300_000, seed=1))
    target.remount()
    reader = os.open(path, os.O_RDONLY)
    writer = os.open(path, os.O_WRONLY | os.O_TRUNC)
    assert os.fstat(reader).st_size == 0
    assert os.pread(reader, 100, 0) == b""
    os.pwrite(writer, b"new", 200_000)
    assert_same(os.pread(reader, 300_000, 0), bytes(200_000) + b"new")
    os.close(writer)
    os.close(reader)
