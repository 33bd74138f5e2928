"""Operations of the model: each is done under a mount and under a plain directory, and compared.

A `World` is a directory with open handles; a `Pair` holds two of them, does every operation in
both, and fails at the first difference in results, errno, content or attributes.

Invariants:
  * Handles are named by numbers that mean the same file in both worlds.
  * What filesystems may count differently (inode numbers, blocks, sizes of folders, times) is not
    compared.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.contents import assert_same
from tests.support.system import FallocateMode, RenameFlag, fallocate, renameat2

Outcome = tuple[str, object]
PAGE = mmap.PAGESIZE


def file_size(fd: int) -> int:
    """Size of an open file; 0 of a folder, whose size is the filesystem's business."""
    status = os.fstat(fd)
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size


class World:
    """One directory and the handles that are open in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.handles: dict[int, int] = {}

    def path(self, name: str) -> Path:
        return self.root / name

    def open(self, number: int, name: str, flags: int) -> None:
        self.handles[number] = os.open(self.path(name), flags, 0o644)

    def close(self, number: int) -> None:
        os.close(self.handles.pop(number))

    def pwrite(self, number: int, data: bytes, offset: int) -> int:
        return os.pwrite(self.handles[number], data, offset)

    def append(self, number: int, data: bytes) -> int:
        """write(2) at the end of the file."""
        fd = self.handles[number]
        os.lseek(fd, 0, os.SEEK_END)
        return os.write(fd, data)

    def pread(self, number: int, count: int, offset: int) -> bytes:
        return os.pread(self.handles[number], count, offset)

    def direct_write(self, name: str, data: bytes, page: int) -> None:
        """Write whole pages with O_DIRECT from an aligned buffer."""
        fd = os.open(self.path(name), os.O_WRONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, len(data)) as buffer:
                buffer[:] = data
                os.pwrite(fd, buffer, page * PAGE)
        finally:
            os.close(fd)

    def truncate_handle(self, number: int, size: int) -> None:
        os.ftruncate(self.handles[number], size)

    def truncate(self, name: str, size: int) -> None:
        os.truncate(self.path(name), size)

    def allocate(self, number: int, mode: FallocateMode, offset: int, length: int) -> None:
        fallocate(self.handles[number], mode=mode, offset=offset, length=length)

    def fsync(self, number: int) -> None:
        os.fsync(self.handles[number])

    def status(self, number: int) -> tuple[int, int, str]:
        """Size (0 of a folder), links and mode of an open file."""
        fd = self.handles[number]
        status = os.fstat(fd)
        return file_size(fd), status.st_nlink, stat.filemode(status.st_mode)

    def seek(self, number: int, offset: int, whence: int) -> bool:
        """Whether a file has such a place; where exactly is the filesystem's business."""
        fd = self.handles[number]
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            return False
        os.lseek(fd, offset, whence)
        return True

    def store(self, number: int, offset: int, data: bytes, *, synchronous: bool) -> bool:
        """Store through a shared map, within the file's size."""
        fd = self.handles[number]
        size = file_size(fd)
        if size == 0 or offset + len(data) > size:  # nothing can be mapped of an empty file
            return False
        with mmap.mmap(fd, 0) as mapped:
            mapped[offset : offset + len(data)] = data
            if synchronous:
                mapped.flush()
        return True

    def peek(self, number: int) -> bytes:
        """The whole file through a private map."""
        fd = self.handles[number]
        if file_size(fd) == 0:
            return b""
        with mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as mapped:
            return mapped[:]

    def copy_range(self, source: int, target: int, *, at: tuple[int, int], count: int) -> int:
        """copy_file_range(2) until nothing more is copied."""
        done = 0
        while done < count:
            copied = os.copy_file_range(
                self.handles[source], self.handles[target], count - done, at[0] + done, at[1] + done
            )
            if copied == 0:
                break
            done += copied
        return done

    def rename(self, source: str, target: str, flags: RenameFlag) -> None:
        renameat2(self.path(source), self.path(target), flags)

    def link(self, source: str, target: str) -> None:
        os.link(self.path(source), self.path(target), follow_symlinks=False)

    def symlink(self, content: str, name: str) -> None:
        os.symlink(content, self.path(name))

    def unlink(self, name: str) -> None:
        os.unlink(self.path(name))

    def mkdir(self, name: str) -> None:
        os.mkdir(self.path(name))

    def rmdir(self, name: str) -> None:
        os.rmdir(self.path(name))

    def chmod(self, name: str, mode: int) -> None:
        os.chmod(self.path(name), mode)

    def set_attribute(self, name: str, attribute: str, value: bytes) -> None:
        os.setxattr(self.path(name), attribute, value)

    def read_whole(self, name: str) -> bytes:
        """read(2) through a fresh handle, if it is a regular file."""
        if not stat.S_ISREG(os.stat(self.path(name)).st_mode):
            return b""
        return self.path(name).read_bytes()

    def tree(self) -> dict[str, tuple[object, ...]]:
        """Everything by name: type and mode, link count, size, target and attributes."""
        found: dict[str, tuple[object, ...]] = {}
        for path in sorted(self.root.rglob("*")):
            status = path.lstat()
            mode = stat.filemode(status.st_mode)
            name = str(path.relative_to(self.root))
            if stat.S_ISLNK(status.st_mode):
                found[name] = (mode, os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                found[name] = (mode, status.st_nlink)
            else:
                attributes = tuple((a, os.getxattr(path, a)) for a in sorted(os.listxattr(path)))
                found[name] = (mode, status.st_nlink, status.st_size, attributes)
        return found

    def close_all(self) -> None:
        for fd in self.handles.values():
            os.close(fd)
        self.handles.clear()


class Pair:
    """The world under test and the plain one, always in the same state."""

    def __init__(self, tested: Path, plain: Path) -> None:
        self.tested = World(tested)
        self.plain = World(plain)
        self.counts: dict[str, int] = {}  # attempts, by name
        self.done: dict[str, int] = {}  # those that succeeded, with more than no bytes

    def do(self, name: str, operation: Callable[[World], object]) -> bool:
        """Do an operation in both worlds and compare; returns whether it succeeded."""
        found, expected = (self._attempt(world, operation) for world in (self.tested, self.plain))
        self.counts[name] = self.counts.get(name, 0) + 1
        if isinstance(found[1], bytes) and isinstance(expected[1], bytes):
            assert_same(found[1], expected[1])
        assert found == expected, f"{name}: {found} instead of {expected}"
        status, value = expected
        if status == "OK" and (value is None or value):
            self.done[name] = self.done.get(name, 0) + 1
        return status == "OK"

    @staticmethod
    def _attempt(world: World, operation: Callable[[World], object]) -> Outcome:
        try:
            return "OK", operation(world)
        except OSError as error:
            return errno.errorcode[error.errno or 0], None

    def check(self) -> None:
        """Compare all names, all contents and all open handles."""
        found, expected = self.tested.tree(), self.plain.tree()
        assert found == expected
        for name, entry in expected.items():
            if str(entry[0]).startswith("-"):
                assert_same(self.tested.read_whole(name), self.plain.read_whole(name))
        assert self.tested.handles.keys() == self.plain.handles.keys()
        for number in self.plain.handles:
            self.do("status", lambda world, n=number: world.status(n))
            size = self.plain.status(number)[0]
            self.do("read all", lambda world, n=number, s=size: world.pread(n, s + 1, 0))

    def close_all(self) -> None:
        """Close every handle in both worlds."""
        self.tested.close_all()
        self.plain.close_all()


@contextlib.contextmanager
def pair(tested: Path, plain: Path) -> Iterator[Pair]:
    """A pair whose handles are closed at the end."""
    made = Pair(tested, plain)
    try:
        yield made
    finally:
        made.close_all()
