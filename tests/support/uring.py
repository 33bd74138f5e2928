"""io_uring(7) for clients of a mount: one request after the other, through the system calls.

No library of Python's brings it. Numbers of system calls are those of all architectures.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_REGISTER_BUFFERS, _REGISTER_FILES = 0, 2
_GET_EVENTS_AND_WAKE_UP = 1 | 2
_COMPLETION_RING_OFFSET, _REQUESTS_OFFSET = 0x8000000, 0x10000000
_REQUEST = struct.Struct("=BBHiQQIIQHHiQQ")
_COMPLETION = struct.Struct("=QiI")
_ENTRIES = 8

_libc = ctypes.CDLL(None, use_errno=True)


class Op(enum.IntEnum):
    """Operations of a request."""

    FSYNC = 3
    READ_FIXED = 4
    WRITE_FIXED = 5
    OPENAT = 18
    CLOSE = 19


class Flag(enum.IntFlag):
    """Flags of a request."""

    NONE = 0
    FIXED_FILE = 1
    ASYNC = 16


class Setup(enum.IntFlag):
    """Flags of a ring."""

    NONE = 0
    SQPOLL = 2


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Ring:
    """A ring with one registered buffer, `memory`, and eight registered places for files."""

    def __init__(self, *, memory_bytes: int, setup: Setup = Setup.NONE) -> None:
        """Make the ring and register both."""
        parameters = bytearray(struct.pack("=10I", 0, 0, setup, 0, 1000, *[0] * 5)) + bytes(80)
        parameters_in = (ctypes.c_char * len(parameters)).from_buffer(parameters)
        self.fd = _call(_SETUP, _ENTRIES, parameters_in)
        self._sq = struct.unpack_from("=8I", parameters, 40)
        self._cq = struct.unpack_from("=8I", parameters, 80)
        entries = struct.unpack_from("=2I", parameters)
        self._submissions = self._map(self._sq[6] + 4 * entries[0], 0)
        self._completions = self._map(self._cq[5] + 16 * entries[1], _COMPLETION_RING_OFFSET)
        self._requests = self._map(_REQUEST.size * entries[0], _REQUESTS_OFFSET)
        self.memory = mmap.mmap(-1, memory_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        buffers = struct.pack("=QQ", self._address, memory_bytes)
        _call(_REGISTER, self.fd, _REGISTER_BUFFERS, buffers, 1)
        _call(_REGISTER, self.fd, _REGISTER_FILES, struct.pack("=8i", *[-1] * 8), 8)

    def _map(self, size: int, offset: int) -> mmap.mmap:
        return mmap.mmap(self.fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset)

    def run(self, request: bytes) -> int:
        """Submit one request, wait for it, return its result; OSError when it failed."""
        _head, tail, mask, _entries, _flags, _dropped, array, _ = self._sq
        (place,) = struct.unpack_from("=I", self._submissions, tail)
        index = place & struct.unpack_from("=I", self._submissions, mask)[0]
        struct.pack_into("=I", self._submissions, array + 4 * index, index)
        self._requests[index * _REQUEST.size : (index + 1) * _REQUEST.size] = request
        struct.pack_into("=I", self._submissions, tail, place + 1)
        _call(_ENTER, self.fd, 1, 1, _GET_EVENTS_AND_WAKE_UP, None, ctypes.c_size_t(0))
        head, _tail, mask, _entries, _overflow, completions, *_ = self._cq
        (place,) = struct.unpack_from("=I", self._completions, head)
        index = place & struct.unpack_from("=I", self._completions, mask)[0]
        at = completions + index * _COMPLETION.size
        _, result, _ = _COMPLETION.unpack_from(self._completions, at)
        struct.pack_into("=I", self._completions, head, place + 1)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return int(result)

    def transfer(
        self, op: Op, fd: int, *, memory_at: int, size: int, offset: int, flags: Flag = Flag.NONE
    ) -> int:
        """READ_FIXED or WRITE_FIXED of a part of `memory`."""
        address = self._address + memory_at
        return self.run(_REQUEST.pack(op, flags, 0, fd, offset, address, size, *[0] * 7))

    def open_in_place(self, path: str, open_flags: int, *, place: int) -> None:
        """Open a file that gets no descriptor, only a registered place."""
        name = ctypes.create_string_buffer(os.fsencode(path))
        address = ctypes.addressof(name)
        self.run(
            _REQUEST.pack(
                Op.OPENAT, 0, 0, -100, 0, address, 0o644, open_flags, 0, 0, 0, place + 1, 0, 0
            )
        )

    def close_place(self, place: int) -> None:
        """Close what was opened in a registered place."""
        self.run(_REQUEST.pack(Op.CLOSE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, place + 1, 0, 0))
