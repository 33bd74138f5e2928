"""opendir(3), readdir(3), telldir(3) and seekdir(3) through the C library.

os.scandir hides positions, so what happens to a listing while entries change needs these.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("d_ino", ctypes.c_uint64),
        ("d_off", ctypes.c_int64),
        ("d_reclen", ctypes.c_uint16),
        ("d_type", ctypes.c_uint8),
        ("d_name", ctypes.c_char * 256),
    )


_libc.opendir.restype = ctypes.c_void_p
_libc.opendir.argtypes = (ctypes.c_char_p,)
_libc.readdir.restype = ctypes.POINTER(_Dirent)
_libc.readdir.argtypes = (ctypes.c_void_p,)
_libc.telldir.restype = ctypes.c_long
_libc.telldir.argtypes = (ctypes.c_void_p,)
_libc.seekdir.restype = None
_libc.seekdir.argtypes = (ctypes.c_void_p, ctypes.c_long)
_libc.rewinddir.restype = None
_libc.rewinddir.argtypes = (ctypes.c_void_p,)
_libc.closedir.argtypes = (ctypes.c_void_p,)


class Entry(NamedTuple):
    """One entry; `type` is S_IFMT >> 12."""

    name: str
    ino: int
    type: int


class DirectoryStream:
    """An open directory. Iterating reads from the current position."""

    def __init__(self, path: Path) -> None:
        self._stream = _libc.opendir(os.fsencode(path))
        if not self._stream:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))

    def __enter__(self) -> DirectoryStream:
        return self

    def __exit__(self, *exception: object) -> None:
        _libc.closedir(self._stream)

    def __iter__(self) -> Iterator[Entry]:
        while True:
            ctypes.set_errno(0)
            entry = _libc.readdir(self._stream)
            if not entry:
                if number := ctypes.get_errno():
                    raise OSError(number, os.strerror(number))
                return
            found = entry.contents
            yield Entry(os.fsdecode(found.d_name), found.d_ino, found.d_type)

    def tell(self) -> int:
        """The position behind the entry that was read last."""
        return int(_libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        """Go to a position that `tell` gave."""
        _libc.seekdir(self._stream, position)

    def rewind(self) -> None:
        """Go to the start, and see what is there now."""
        _libc.rewinddir(self._stream)
