"""The naive peer: a small pyfuse3 filesystem with a Python write handler that writes to one file.

Fair on purpose: direct I/O on writes (faster than going through the page cache first), the largest
requests libfuse grants, and one os.pwrite for each request. Files live flat in a backing directory.
Run with ``python -m benchmarks.peers.naive_fs BACKING MOUNTPOINT``; ends when unmounted.

Concurrency: one trio task at a time runs Python, and os.pwrite blocks it, as naive ones do.
"""

from __future__ import annotations

# ruff: noqa: ARG002, ASYNC240 (handlers have the signature of pyfuse3, and block: see above)
import errno
import os
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio

Attributes = pyfuse3.EntryAttributes
Context = pyfuse3.RequestContext


class NaiveOperations(pyfuse3.Operations):
    """One flat directory; inode numbers are given out at the first lookup."""

    enable_writeback_cache = False

    def __init__(self, backing: Path) -> None:
        super().__init__()
        self._backing = backing
        self._names: dict[int, bytes] = {}
        self._inodes: dict[bytes, int] = {}

    def _inode(self, name: bytes) -> int:
        inode = self._inodes.setdefault(name, pyfuse3.ROOT_INODE + 1 + len(self._inodes))
        self._names[inode] = name
        return inode

    def _path(self, inode: int) -> bytes:
        if inode == pyfuse3.ROOT_INODE:
            return os.fsencode(self._backing)
        return os.path.join(os.fsencode(self._backing), self._names[inode])

    def _attributes(self, inode: int) -> Attributes:
        try:
            found = os.lstat(self._path(inode))
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks"):
            setattr(entry, name, getattr(found, name))
        for name in ("st_atime_ns", "st_mtime_ns", "st_ctime_ns"):
            setattr(entry, name, getattr(found, name))
        entry.st_blksize = 4096
        entry.entry_timeout = entry.attr_timeout = 300
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: Context) -> Attributes:
        """Names of the backing directory."""
        if not os.path.lexists(os.path.join(os.fsencode(self._backing), name)):
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._attributes(self._inode(name))

    async def getattr(self, inode: int, ctx: Context) -> Attributes:
        """Those of the backing file."""
        return self._attributes(inode)

    async def setattr(
        self, inode: int, attr: Attributes, fields: Any, fh: int | None, ctx: Context
    ) -> Attributes:
        """Size only."""
        if fields.update_size:
            os.truncate(self._path(inode), attr.st_size)
        return self._attributes(inode)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Context
    ) -> tuple[pyfuse3.FileInfo, Attributes]:
        """A file in the backing directory, opened."""
        inode = self._inode(name)
        return await self.open(inode, flags | os.O_CREAT, ctx), self._attributes(inode)

    async def open(self, inode: int, flags: int, ctx: Context) -> pyfuse3.FileInfo:
        """Writers go past the page cache; readers keep it."""
        fd = os.open(self._path(inode), flags & ~os.O_EXCL, 0o644)
        writable = flags & (os.O_WRONLY | os.O_RDWR) != 0
        return pyfuse3.FileInfo(fh=fd, direct_io=writable, keep_cache=not writable)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        """One pread."""
        return os.pread(fh, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """One pwrite."""
        return os.pwrite(fh, buf, off)

    async def fsync(self, fh: int, datasync: bool) -> None:
        """That of the backing file."""
        os.fsync(fh)

    async def release(self, fh: int) -> None:
        """Close the backing file."""
        os.close(fh)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Context) -> None:
        """Remove the backing file."""
        os.unlink(os.path.join(os.fsencode(self._backing), name))


def main() -> None:
    """Mount and serve until unmounted."""
    backing, mountpoint = Path(sys.argv[1]), sys.argv[2]
    options = set(pyfuse3.default_options) | {"fsname=naive"}
    pyfuse3.init(NaiveOperations(backing), mountpoint, options)
    print("mounted", flush=True)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
