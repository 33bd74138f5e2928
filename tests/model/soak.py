"""Hammers one file with random operations and checks every byte, as fsx does.

Usage: python -m tests.model.soak [--seconds N] [--seed S] [--operations N] DIR

DIR is a directory on the filesystem under test. The file's content is also kept in memory; reads
compare at once, and everything is compared now and then and at the end. The seed is printed first:
the same seed does the same operations, so a failure can be repeated with --operations, which also
prints the last operations before it. Exit status 1 means that bytes differed.

Invariants:
  * Operations are drawn from the seed alone, never from time or from what the filesystem answers.
"""

from __future__ import annotations

import argparse
import collections
import errno
import mmap
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.contents import assert_same
from tests.support.system import FallocateMode, fallocate

SIZE_MAX = 6 * 2**20
PAGE = mmap.PAGESIZE
CHECK_EVERY = 200
KEPT_IN_LOG = 30
EDGES = (0, PAGE, 16 * 1024, 64 * 1024, 2**20, 2 * 2**20, 4 * 2**20)
COUNTS = (1, 3, 511, 4095, 4096, 4097, 16_385, 65_535, 65_537, 262_144, 1_000_003, 2**21)


class Soak:
    """The file, its expected content, and the operations."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.choose = random.Random(seed)
        self.path = folder / "hammered"
        self.other_path = folder / "other"
        self.content = bytearray()
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self.counts: collections.Counter[str] = collections.Counter()
        self.log: collections.deque[str] = collections.deque(maxlen=KEPT_IN_LOG)
        self.operations: list[tuple[Callable[[], str], int]] = [
            (self.write, 30),
            (self.read, 20),
            (self.append, 6),
            (self.truncate, 6),
            (self.direct_write, 10),
            (self.direct_read, 6),
            (self.mapped_store, 8),
            (self.mapped_read, 6),
            (self.punch, 6),
            (self.zero, 4),
            (self.preallocate, 4),
            (self.copy_inside, 6),
            (self.copy_outside, 3),
            (self.vector_write, 4),
            (self.fsync, 4),
            (self.reopen, 4),
            (self.rename, 2),
            (self.seek, 3),
        ]

    # What is drawn.

    def _offset(self) -> int:
        if self.choose.random() < 0.4:
            return max(0, self.choose.choice(EDGES) + self.choose.randrange(-5, 6))
        if self.content and self.choose.random() < 0.7:
            return self.choose.randrange(len(self.content) + 1)
        return self.choose.randrange(SIZE_MAX)

    def _count(self, offset: int) -> int:
        count = self.choose.choice(COUNTS)
        if self.choose.random() < 0.5:
            count = self.choose.randrange(1, count + 1)
        return max(0, min(count, SIZE_MAX - offset))

    def _inside(self) -> tuple[int, int]:
        """A range within the file, possibly empty."""
        offset = min(self._offset(), len(self.content))
        return offset, min(self._count(offset), len(self.content) - offset)

    def _apply(self, offset: int, data: bytes) -> None:
        if data:
            self.content.extend(bytes(max(0, offset + len(data) - len(self.content))))
            self.content[offset : offset + len(data)] = data

    def _clear(self, offset: int, count: int) -> None:
        end = min(offset + count, len(self.content))
        self._apply(offset, bytes(max(0, end - offset)))

    # The operations; each returns what it did, for the log.

    def write(self) -> str:
        offset = self._offset()
        data = self.choose.randbytes(self._count(offset))
        assert os.pwrite(self.fd, data, offset) == len(data)
        self._apply(offset, data)
        return f"write {offset} {len(data)}"

    def vector_write(self) -> str:
        offset = self._offset()
        pieces = [self.choose.randbytes(self.choose.randrange(1, 70_000)) for _ in range(5)]
        data = b"".join(pieces)
        assert os.pwritev(self.fd, pieces, offset) == len(data)
        self._apply(offset, data)
        return f"vector write {offset} {[len(piece) for piece in pieces]}"

    def append(self) -> str:
        data = self.choose.randbytes(self._count(len(self.content)))
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, data)
        os.close(fd)
        self._apply(len(self.content), data)
        return f"append {len(data)}"

    def read(self) -> str:
        offset = self._offset()
        count = self._count(offset)
        assert_same(os.pread(self.fd, count, offset), self.content[offset : offset + count])
        return f"read {offset} {count}"

    def truncate(self) -> str:
        size = min(self._offset(), SIZE_MAX)
        os.ftruncate(self.fd, size)
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))
        return f"truncate {size}"

    def _pages(self) -> tuple[int, int]:
        offset = self._offset() // PAGE * PAGE
        return offset, self.choose.randrange(1, 300) * PAGE

    def direct_write(self) -> str:
        offset, count = self._pages()
        fd = os.open(self.path, os.O_WRONLY | os.O_DIRECT)
        data = self.choose.randbytes(count)
        with mmap.mmap(-1, count) as buffer:
            buffer[:] = data
            assert os.pwrite(fd, buffer, offset) == count
        os.close(fd)
        self._apply(offset, data)
        return f"direct write {offset} {count}"

    def direct_read(self) -> str:
        offset, count = self._pages()
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, count) as buffer:
            done = os.preadv(fd, [buffer], offset)
            expected = self.content[offset : offset + count]
            assert_same(buffer[:done], expected[:done])
            assert done == len(expected), f"{done} bytes instead of {len(expected)}"
        os.close(fd)
        return f"direct read {offset} {count}"

    def mapped_store(self) -> str:
        offset, count = self._inside()
        if count == 0:
            return "mapped store of nothing"
        data = self.choose.randbytes(count)
        with mmap.mmap(self.fd, len(self.content)) as mapped:
            mapped[offset : offset + count] = data
            if self.choose.random() < 0.5:
                mapped.flush()
        self._apply(offset, data)
        return f"mapped store {offset} {count}"

    def mapped_read(self) -> str:
        offset, count = self._inside()
        if not self.content:
            return "mapped read of nothing"
        shared = self.choose.choice([mmap.MAP_SHARED, mmap.MAP_PRIVATE])
        with mmap.mmap(self.fd, len(self.content), flags=shared, prot=mmap.PROT_READ) as mapped:
            assert_same(mapped[offset : offset + count], self.content[offset : offset + count])
        return f"mapped read {offset} {count}"

    def punch(self) -> str:
        offset = self._offset()
        count = max(1, self._count(offset))
        mode = FallocateMode.PUNCH_HOLE | FallocateMode.KEEP_SIZE
        fallocate(self.fd, mode=mode, offset=offset, length=count)
        self._clear(offset, count)
        return f"punch {offset} {count}"

    def _extend(self, size: int, mode: FallocateMode) -> None:
        if not mode & FallocateMode.KEEP_SIZE:
            self.content.extend(bytes(max(0, size - len(self.content))))

    def zero(self) -> str:
        offset = self._offset()
        count = max(1, self._count(offset))
        keep = self.choose.choice([FallocateMode.ALLOCATE, FallocateMode.KEEP_SIZE])
        fallocate(self.fd, mode=FallocateMode.ZERO_RANGE | keep, offset=offset, length=count)
        self._extend(offset + count, keep)
        self._clear(offset, count)
        return f"zero {offset} {count} {keep.name}"

    def preallocate(self) -> str:
        offset = self._offset()
        count = max(1, self._count(offset))
        keep = self.choose.choice([FallocateMode.ALLOCATE, FallocateMode.KEEP_SIZE])
        fallocate(self.fd, mode=keep, offset=offset, length=count)
        self._extend(offset + count, keep)
        return f"preallocate {offset} {count} {keep.name}"

    def _copy(self, source: int, target: int, at: tuple[int, int], count: int) -> None:
        done = 0
        while done < count:
            part = os.copy_file_range(source, target, count - done, at[0] + done, at[1] + done)
            assert part > 0
            done += part

    def copy_inside(self) -> str:
        """copy_file_range(2) to a place that does not overlap."""
        start, count = self._inside()
        to = self._offset()
        if abs(to - start) < count:
            to = start + count
        self._copy(self.fd, self.fd, (start, to), count)
        self._apply(to, bytes(self.content[start : start + count]))
        return f"copy {start} to {to} {count}"

    def copy_outside(self) -> str:
        """A part goes into another file and comes back elsewhere."""
        start, count = self._inside()
        to = self._offset()
        other = os.open(self.other_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._copy(self.fd, other, (start, 7), count)
        data = bytes(self.content[start : start + count])
        assert_same(os.pread(other, count + 7, 0), bytes(7 if count else 0) + data)
        self._copy(other, self.fd, (7, to), count)
        os.close(other)
        self._apply(to, data)
        return f"copy {start} over another file to {to} {count}"

    def fsync(self) -> str:
        os.fsync(self.fd)
        return "fsync"

    def reopen(self) -> str:
        os.close(self.fd)
        extra = self.choose.choice([0, 0, 0, os.O_SYNC])
        self.fd = os.open(self.path, os.O_RDWR | extra)
        return f"reopen {extra:#x}"

    def rename(self) -> str:
        target = self.path.with_name(f"hammered{self.choose.randrange(3)}")
        self.path.rename(target)
        self.path = target
        return f"rename {target.name}"

    def seek(self) -> str:
        """Between a found hole and the data behind it there is nothing but zeros."""
        if not self.content:
            return "seek in nothing"
        offset = self.choose.randrange(len(self.content))
        hole = os.lseek(self.fd, offset, os.SEEK_HOLE)
        try:
            data = os.lseek(self.fd, hole, os.SEEK_DATA)
        except OSError as error:
            assert error.errno == errno.ENXIO
            data = len(self.content)
        assert not any(self.content[hole:data]), f"data in the hole {hole} to {data}"
        return f"seek {offset}: hole {hole} to {data}"

    # Running them.

    def check(self) -> None:
        """Compare everything, through this handle and a fresh one."""
        assert os.fstat(self.fd).st_size == len(self.content)
        assert_same(os.pread(self.fd, len(self.content) + 1, 0), self.content)
        assert_same(self.path.read_bytes(), self.content)

    def step(self) -> None:
        """One operation, drawn by weight."""
        operations, weights = zip(*self.operations, strict=True)
        (operation,) = self.choose.choices(operations, weights)
        self.log.append(f"{operation.__name__}: not finished")
        self.log[-1] = operation()
        self.counts[operation.__name__] += 1
        if self.counts.total() % CHECK_EVERY == 0:
            self.check()


def run(folder: Path, *, seconds: float, seed: int, operations: int | None) -> int:
    """Hammer until the time or the number of operations is up; returns the exit status."""
    print(f"seed {seed}", flush=True)
    soak = Soak(folder, seed=seed)
    deadline_s = time.monotonic() + seconds
    try:
        while soak.counts.total() != operations and (operations or time.monotonic() < deadline_s):
            soak.step()
        soak.check()
    except (AssertionError, OSError) as error:
        print("\n".join(soak.log))
        print(f"operation {soak.counts.total()}: {error}")
        print(
            f"repeat: python -m tests.model.soak --seed {seed} "
            f"--operations {soak.counts.total() + 1} {folder.parent}"
        )
        return 1
    finally:
        os.close(soak.fd)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(soak.counts.items()))
    print(f"{soak.counts.total()} operations, all bytes right: {counts}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--operations", type=int, default=None)
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="soak-", dir=arguments.directory) as folder:
        return run(
            Path(folder), seconds=arguments.seconds, seed=seed, operations=arguments.operations
        )


if __name__ == "__main__":
    sys.exit(main())
