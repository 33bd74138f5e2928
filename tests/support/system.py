"""System calls that Python's os module lacks, through the C library.

All raise OSError with the errno of the call, as os.* does.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_STATX_FORCE_SYNC = 0x2000
STATX_BASIC_STATS = 0x7FF
CAP_NET_BIND_SERVICE = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)
"""A file's capabilities (struct vfs_cap_data, revision 2): one of them, effective."""


class RenameFlag(enum.IntFlag):
    """Flags of renameat2(2)."""

    NONE = 0
    NOREPLACE = 1
    EXCHANGE = 2
    WHITEOUT = 4


class FallocateMode(enum.IntFlag):
    """Modes of fallocate(2)."""

    ALLOCATE = 0
    KEEP_SIZE = 1
    PUNCH_HOLE = 2
    COLLAPSE_RANGE = 8
    ZERO_RANGE = 16
    INSERT_RANGE = 32


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def renameat2(source: Path | str, target: Path | str, flags: RenameFlag) -> None:
    """renameat2(2) relative to the working directory."""
    result = _libc.renameat2(
        AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)
    )
    _check(result, f"renameat2 {source}")


def fallocate(fd: int, *, mode: FallocateMode, offset: int, length: int) -> None:
    """fallocate(2), without glibc's emulation."""
    result = _libc.fallocate(fd, ctypes.c_int(mode), ctypes.c_int64(offset), ctypes.c_int64(length))
    _check(result, f"fallocate mode {int(mode)} offset {offset} length {length}")


class ServerStat(NamedTuple):
    """Attributes as the server of a filesystem has them now."""

    nlink: int
    uid: int
    gid: int
    mode: int
    atime_ns: int
    ctime_ns: int
    mtime_ns: int


_STATX = struct.Struct("=16xIIIH2x32x qI4x 16x qI4x qI4x")


def stat_from_server(path: Path | str) -> ServerStat:
    """statx(2), not from the kernel's cache."""
    buffer = ctypes.create_string_buffer(256)
    result = _libc.statx(
        AT_FDCWD,
        os.fsencode(path),
        ctypes.c_int(AT_STATX_FORCE_SYNC | AT_SYMLINK_NOFOLLOW),
        ctypes.c_uint(STATX_BASIC_STATS),
        buffer,
    )
    _check(result, f"statx {path}")
    nlink, uid, gid, mode, *times = _STATX.unpack_from(buffer, 0)
    seconds, nanoseconds = times[::2], times[1::2]
    return ServerStat(
        nlink, uid, gid, mode, *(s * 10**9 + n for s, n in zip(seconds, nanoseconds, strict=True))
    )


_SYS_CACHESTAT = 451
_CACHE_STATISTICS = struct.Struct("=5Q")


def _page_cache(fd: int) -> tuple[int, int, int]:
    """Pages of a file that the kernel holds, that are dirty, under writeback: Linux 6.5."""
    whole = struct.pack("=2Q", 0, 0)
    found = ctypes.create_string_buffer(_CACHE_STATISTICS.size)
    _check(_libc.syscall(ctypes.c_long(_SYS_CACHESTAT), fd, whole, found, 0), "cachestat")
    cached, dirty, written_back, *_ = _CACHE_STATISTICS.unpack(found.raw)
    return int(cached), int(dirty), int(written_back)


def cached_pages(fd: int) -> int:
    """Pages of a file that the kernel holds: cachestat(2)."""
    return _page_cache(fd)[0]


def dirty_pages(path: Path | str) -> int:
    """Pages of a file that are not on its device yet: cachestat(2)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        _cached, dirty, written_back = _page_cache(fd)
    finally:
        os.close(fd)
    return dirty + written_back


def syncfs(fd: int) -> None:
    """syncfs(2)."""
    _check(_libc.syncfs(fd), "syncfs")


def errno_of(call: Callable[..., object], *arguments: object, **named: object) -> str:
    """Name of the errno that a call fails with, or "OK"."""
    try:
        result = call(*arguments, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    if isinstance(result, int) and call in (os.open, os.dup):
        os.close(result)
    return "OK"
