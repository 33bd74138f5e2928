"""Files of which large pieces are read by several native threads, straight to where they stay.

torch.load asks an object that it reads as a file for each tensor's bytes by one `readinto` of the
tensor's own memory; `filling` asks for many pieces at once.
"""

from __future__ import annotations

import ctypes
import io
import os
from typing import Any

from fpfs.client.paths import default_threads
from fpfs.core.transfers import PieceReader, read_pieces, run_to_end

REQUEST_BYTES = 4 * 1024 * 1024
LARGE_BYTES = REQUEST_BYTES
"""From here on threads are worth their start."""
THREADS_MIN = 8
"""A server has a read of each thread in flight. Of 1 GiB eight read 2.39 GB/s and four 2.01 into
tensors that are there, 1.04 and 1.00 into new ones (medians of 14 alternating rounds, 2 cores,
November 2026)."""

Piece = tuple[int, int, int]
"""Address, bytes, and offset in the file."""


def start_reading(pieces: list[Piece], *, fd: int, owners: object) -> PieceReader:
    """Begin to fill memory, which `owners` keeps, from the file that `fd` is open for."""
    return read_pieces(
        pieces,
        owners=owners,
        fd=fd,
        request_bytes=REQUEST_BYTES,
        threads=max(THREADS_MIN, default_threads()),
    )


class LargeReads(io.BufferedReader):
    """A file that reads what is large by `read_pieces`, and the rest through its buffer."""

    def __init__(
        self, raw: io.RawIOBase, size: int, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE
    ) -> None:
        super().__init__(raw, buffer_bytes)
        self._size = size
        self.failure: BaseException | None = None
        """What reading has raised."""

    def read_pieces(self, pieces: list[Piece], owners: object) -> None:
        """Fill memory, which `owners` keeps."""
        raise NotImplementedError

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, but for what lies behind the end of the file."""
        with memoryview(buffer) as wanted:
            at = self.tell()
            count = max(0, min(wanted.nbytes, self._size - at))
            try:
                if count < LARGE_BYTES:
                    return super().readinto(buffer)
                memory = (ctypes.c_char * count).from_buffer(wanted)
                self.read_pieces([(ctypes.addressof(memory), count, at)], memory)
            except BaseException as error:
                self.failure = error
                raise
            self.seek(at + count)
            return count


class ParallelFile(LargeReads):
    """An ordinary file.

    past_cache: past the kernel's page cache, which would have to be filled first: 1.45 GB/s instead
        of 1.10 on a mount of fpfs (2 cores, November 2026). Other filesystems ask for aligned
        memory then. What several processes read, one of them reads for all, to the page cache.
    """

    _direct_fd = -1

    def __init__(self, path: str, *, past_cache: bool) -> None:
        raw = io.FileIO(path)
        super().__init__(raw, os.fstat(raw.fileno()).st_size)
        if past_cache:
            flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
            self._direct_fd = os.open(f"/proc/self/fd/{self.fileno()}", flags)

    def read_pieces(self, pieces: list[Piece], owners: object) -> None:
        """Fill memory, which `owners` keeps."""
        large = [piece for piece in pieces if piece[1] >= LARGE_BYTES]
        small = [piece for piece in pieces if piece[1] < LARGE_BYTES]
        for some, fd in ((large, self._direct_fd), (small, -1)):
            run_to_end(start_reading(some, fd=fd if fd >= 0 else self.fileno(), owners=owners))

    def close(self) -> None:
        """Close both descriptors."""
        fd, self._direct_fd = self._direct_fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()


__all__ = ["LargeReads", "ParallelFile", "Piece", "start_reading"]
