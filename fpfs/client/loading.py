"""Loads a torch.save file: its tensors' bytes are read side by side, straight to where they stay.

How: `archive` tells where each storage lies. Memory for all is taken, native threads begin to read,
and torch.load unpickles under `torch.serialization.skip_data`, with torch's own restrictions. A
storage that it asks for is waited for first, since what is rebuilt from tensors may look at them.

Concurrency: `load` may be called from several threads at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, TypeAlias

import torch

from fpfs.client.archive import Stored, find_storages
from fpfs.client.paths import default_threads, resolve
from fpfs.core.mounts import mount_containing
from fpfs.core.transfers import PieceReader, finish, read_pieces

REQUEST_BYTES = 4 * 1024 * 1024
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
    map_location: MapLocation = None,
    mmap: bool = False,
    weights_only: bool = True,
) -> Any:
    """Load what torch.save, or `fpfs.client.save`, has saved: as torch.load does, faster.

    map_location, weights_only: as torch.load has them.
    mmap: map the file instead of reading it, which is left to torch.load.

    What was not written as torch.save writes (the format before torch 1.6, compressed archives,
    TorchScript, the other byte order) is left to torch.load.

    Raises OSError as open(2) and read(2) do (EIO of damaged bytes on a mount of fpfs), TypeError of
    what is no path, and what torch.load raises.
    """
    name = resolve(path)
    arguments: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only}
    if mmap:
        return torch.load(name, mmap=True, **arguments)
    with open(name, "rb") as file:
        stored = None if _is_meta(map_location) else find_storages(file)
        file.seek(0)
        if stored is None:
            return torch.load(file, **arguments)
        try:
            return _load(file, stored, map_location, weights_only=weights_only)
        except _Otherwise:
            file.seek(0)
            return torch.load(file, **arguments)


class _Otherwise(Exception):
    """torch.load asks for other storages than the file was thought to have."""


def _load(
    file: IO[bytes], stored: list[Stored], map_location: MapLocation, *, weights_only: bool
) -> Any:
    storages = [torch.UntypedStorage(each.bytes) for each in stored]
    pieces = [
        (storage.data_ptr(), each.bytes, each.offset)
        for storage, each in zip(storages, stored, strict=True)
    ]
    with contextlib.ExitStack() as stack:
        reader = read_pieces(
            pieces,
            owners=tuple(storages),
            fd=stack.enter_context(_descriptor(file)),
            request_bytes=REQUEST_BYTES,
            threads=max(THREADS_MIN, default_threads()),
        )
        stack.callback(finish, reader)
        stack.enter_context(torch.serialization.skip_data())
        storages.reverse()
        return torch.load(
            file,
            map_location=_Places(reader, storages, map_location),
            weights_only=weights_only,
        )


@contextlib.contextmanager
def _descriptor(file: IO[bytes]) -> Iterator[int]:
    """What to read a file's tensors from: of a mount of fpfs past the kernel's page cache.

    A page cache that has to be filled first costs a third of the speed: 1.10 GB/s instead of 1.45
    (2 cores, November 2026). Other filesystems ask for aligned memory then.
    """
    if not mount_containing(file.name).is_fpfs:
        yield file.fileno()
        return
    fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class _Places:
    """torch.load's map_location: gives it, instead of a storage without bytes, the one with them.

    torch asks for each storage of some bytes once, in the order of `find_storages`.
    """

    def __init__(
        self, reader: PieceReader, storages: list[torch.UntypedStorage], asked: MapLocation
    ) -> None:
        self._reader = reader
        self._storages = storages
        self._asked = asked
        self._next = 0

    def __call__(self, empty: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if empty.nbytes() == 0:
            return self._place(empty, location)
        if not self._storages or self._storages[-1].nbytes() != empty.nbytes():
            raise _Otherwise
        storage = self._storages.pop()
        if not self._reader.wait_for(self._next):
            self._reader.check()
        self._next += 1
        placed = self._place(storage, location)
        # torch would ask for it again, since it does not know what it has.
        if placed.device.type == "meta":
            raise _Otherwise
        return placed

    def _place(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        asked = self._asked
        if isinstance(asked, Mapping):
            location = asked.get(location, location)
        elif isinstance(asked, str | torch.device):
            location = str(asked)
        elif asked is not None:
            placed = asked(storage, location)
            if placed is not None:
                return placed
        return torch.serialization.default_restore_location(storage, location)


def _is_meta(map_location: MapLocation) -> bool:
    return isinstance(map_location, str | torch.device) and str(map_location) == "meta"
