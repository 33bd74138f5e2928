"""A file under test together with the bytes that it must hold.

Every change is made to the file by a system call and to the shadow in memory; `check` compares.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.contents import assert_same, random_bytes
from tests.support.system import FallocateMode, fallocate


class ShadowFile:
    """An open file and its expected content. Close it with `close` or a with statement."""

    def __init__(self, path: Path, *, flags: int = os.O_RDWR | os.O_CREAT, seed: int = 0) -> None:
        self.path = path
        self.fd = os.open(path, flags, 0o644)
        self.content = bytearray(os.pread(self.fd, os.fstat(self.fd).st_size, 0))
        self._seed = seed * 1_000_003

    def __enter__(self) -> ShadowFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.fd)

    def fresh_bytes(self, count: int) -> bytes:
        """Bytes unlike those given before."""
        self._seed += 1
        return random_bytes(count, seed=self._seed)

    def write(self, offset: int, count: int) -> None:
        """pwrite(2) of fresh bytes."""
        data = self.fresh_bytes(count)
        assert os.pwrite(self.fd, data, offset) == count
        self.apply(offset, data)

    def apply(self, offset: int, data: bytes) -> None:
        """Only the shadow changes: somebody else writes, or wrote, the file."""
        if not data:
            return
        self.content.extend(bytes(max(0, offset + len(data) - len(self.content))))
        self.content[offset : offset + len(data)] = data

    def truncate(self, size: int) -> None:
        """ftruncate(2) in either direction."""
        os.ftruncate(self.fd, size)
        self.resize(size)

    def resize(self, size: int) -> None:
        """Only the shadow changes its size."""
        del self.content[size:]
        self.content.extend(bytes(size - len(self.content)))

    def allocate(self, mode: FallocateMode, offset: int, length: int) -> None:
        """fallocate(2): what it zeroes and extends is done to the shadow, too."""
        fallocate(self.fd, mode=mode, offset=offset, length=length)
        if not mode & FallocateMode.KEEP_SIZE:
            self.resize(max(len(self.content), offset + length))
        if mode & (FallocateMode.PUNCH_HOLE | FallocateMode.ZERO_RANGE):
            end = min(offset + length, len(self.content))
            self.apply(offset, bytes(max(0, end - offset)))

    def check(self) -> None:
        """Size and content are right through this handle and through a fresh one."""
        assert os.fstat(self.fd).st_size == len(self.content)
        assert_same(os.pread(self.fd, len(self.content) + 1, 0), self.content)
        assert self.path.stat().st_size == len(self.content)
        assert_same(self.path.read_bytes(), self.content)
