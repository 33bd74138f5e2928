"""Loads a torch.save file: what is large in it is read side by side, straight to where it stays.

torch.load does the loading, from an object that it reads as a file. It asks for each tensor's bytes
by one `readinto` of the tensor's own memory, which several native threads fill. Tensors that are
there already are filled by `filling`.

Concurrency: `load` may be called from several threads at once.
"""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from fpfs.client.filling import fill
from fpfs.client.paths import default_threads, is_on_fpfs, resolve
from fpfs.client.peers import Alone, place_in
from fpfs.core.transfers import read_pieces, run_to_end

if TYPE_CHECKING:
    import torch.distributed as dist

REQUEST_BYTES = 4 * 1024 * 1024
LARGE_BYTES = REQUEST_BYTES
"""From here on threads are worth their start."""
THREADS_MIN = 4
"""A server has a read of each thread in flight; two kept a disk less busy than four."""

MapLocation: TypeAlias = (
    Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | torch.device
    | str
    | Mapping[str, str]
    | None
)


def load(
    path: str | bytes | os.PathLike[Any],
    *,
    group: dist.ProcessGroup | Alone | None = None,
    map_location: MapLocation = None,
    mmap: bool = False,
    weights_only: bool | None = True,
    into: Any = None,
) -> Any:
    """Load what torch.save, or `fpfs.save`, has saved, as torch.load does.

    group: whose ranks load the file at about the same time, on a mount of fpfs: each byte is read
        from a device once, for all ranks of a machine. They do not wait for each other. None: the
        default group of torch.distributed, if that is initialized. ALONE: this process only.
    map_location, weights_only: as torch.load has them. None: what it takes when they are left out.
    mmap: map the file instead of reading it, which is left to torch.load.
    into: a state like the saved one, whose tensors are filled where they are, and returned; what
        is no tensor is as the file has it. Of a DTensor only this rank's part is read, and of the
        file only what `into` has. Types are converted as `Tensor.copy_` does. After a failure some
        tensors may be filled and others not.

    Raises OSError as open(2) and read(2) do (EIO of damaged bytes on a mount of fpfs), TypeError of
    what is no path, ValueError of an `into` that the file does not fit, before it is changed, and
    what torch.load raises.
    """
    name = resolve(path)
    if into is not None and (mmap or map_location is not None):
        raise ValueError("into= says where tensors are: leave mmap= and map_location= out")
    if mmap:
        return torch.load(name, map_location=map_location, mmap=True, weights_only=weights_only)
    rank, size = place_in(group)
    # One rank tells where it is.
    on_fpfs = rank == 0 and is_on_fpfs(name)
    with ParallelFile(name, past_cache=on_fpfs and size == 1) as file:
        try:
            if into is not None:
                return fill(file, into, weights_only=weights_only, begin=rank / size)
            return torch.load(
                file, map_location=map_location, mmap=False, weights_only=weights_only
            )
        except BaseException as error:
            # torch loses what a read raises, and says something of its own.
            failure = error if file.failure is None else file.failure
            if isinstance(failure, OSError) and failure.filename is None:
                failure.filename = name
            if failure is not error:
                raise failure from error
            raise


class ParallelFile(io.BufferedReader):
    """A file, of which large pieces are read by several threads.

    past_cache: past the kernel's page cache, which would have to be filled first: 1.45 GB/s instead
        of 1.10 on a mount of fpfs (2 cores, November 2026). Other filesystems ask for aligned
        memory then. What several processes read, one of them reads for all, to the page cache.
    """

    _direct_fd = -1

    def __init__(self, path: str, *, past_cache: bool) -> None:
        super().__init__(io.FileIO(path))
        self.failure: BaseException | None = None
        """What reading has raised."""
        if past_cache:
            flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
            self._direct_fd = os.open(f"/proc/self/fd/{self.fileno()}", flags)

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, but for what lies behind the end of the file."""
        with memoryview(buffer) as wanted:
            at = self.tell()
            count = min(wanted.nbytes, os.fstat(self.fileno()).st_size - at)
            try:
                if count < LARGE_BYTES:
                    return super().readinto(buffer)
                self._read_side_by_side(wanted, count, at)
            except BaseException as error:
                self.failure = error
                raise
            self.seek(at + count)
            return count

    def read_pieces(self, pieces: list[tuple[int, int, int]], owners: object) -> None:
        """Fill memory: (address, bytes, offset in the file), which `owners` keeps."""
        large = [piece for piece in pieces if piece[1] >= LARGE_BYTES]
        small = [piece for piece in pieces if piece[1] < LARGE_BYTES]
        for some, fd in ((large, self._direct_fd), (small, -1)):
            reader = read_pieces(
                some,
                owners=owners,
                fd=fd if fd >= 0 else self.fileno(),
                request_bytes=REQUEST_BYTES,
                threads=max(THREADS_MIN, default_threads()),
            )
            run_to_end(reader)

    def _read_side_by_side(self, wanted: memoryview, count: int, at: int) -> None:
        memory = (ctypes.c_char * count).from_buffer(wanted)
        self.read_pieces([(ctypes.addressof(memory), count, at)], memory)

    def close(self) -> None:
        """Close both descriptors."""
        fd, self._direct_fd = self._direct_fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()
