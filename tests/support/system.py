"""System calls that Python's os module lacks, through the C library.

All raise OSError with the errno of the call, as os.* does.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
from collections.abc import Callable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100


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
