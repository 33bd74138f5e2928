"""Copies of tensors that are written while training goes on.

A rank copies what it writes itself, and its parts of tensors that others read from it. The memory
is kept from one snapshot to the next: memory that was never touched takes ten times as long.

Concurrency: used by one thread at a time, but for what `copy` leaves to another. Nobody may write
to the memory until the save that was copied to it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Collection, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fpfs.client.container import Container
from fpfs.client.plan import Share
from fpfs.client.updates import NOTHING_HELD, Held
from fpfs.core.units import format_size

ALIGNMENT = 64
"""Of each copy: a cache line, and a multiple of every type's size."""


Uncopied = list[tuple[torch.Tensor, torch.Tensor]]
"""Bytes that are still to be copied: to the first of each two from the second."""


def touched_memory(size: int) -> mmap.mmap:
    """Return so many bytes, one or more, that the kernel need not find when they are used."""
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"a snapshot needs {format_size(size)}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(mapping, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    return mapping


class Part(NamedTuple):
    """What of a file is copied."""

    container: Container
    share: Share
    whole: Collection[int]
    """Records of which everything is copied that this rank has."""


class Memory:
    """Where snapshots lie, one at a time."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return len(self._bytes)

    def reserve(self, size: int) -> None:
        """Have at least so many bytes, touched."""
        if size <= self.size:
            return
        # Released first: both together may be too much.
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        # What is made in inference mode could not be changed outside of it.
        with torch.inference_mode(mode=False):
            self._bytes = torch.frombuffer(touched_memory(size), dtype=torch.uint8)

    def copy(
        self, parts: Sequence[Part], *, later: Held = NOTHING_HELD
    ) -> list[tuple[Container, Uncopied]]:
        """Return each container with copies of what its share has of it, instead of the tensors.

        later: what is not copied now.
        """
        ranges = [_ranges(part.container, part.share, set(part.whole)) for part in parts]
        self.reserve(sum(_padded(end - start) for each in ranges for _, start, end in each))
        copied, at = [], 0
        for part, of_part in zip(parts, ranges, strict=True):
            container, uncopied, at = self._copy(part, of_part, at, later)
            copied.append((container, uncopied))
        return copied

    def _copy(
        self, part: Part, ranges: list[tuple[int, int, int]], at: int, later: Held
    ) -> tuple[Container, Uncopied, int]:
        """Copy one to memory from `at` on; returns where the next one goes, too."""
        parts = list(part.container.parts)
        storage = self._bytes.untyped_storage()
        uncopied: Uncopied = []
        for number, start, end in ranges:
            record = part.container.record(number)
            with torch.inference_mode(mode=False):
                source = torch.empty(0, dtype=torch.uint8, device=record.storage.device)
                source = source.set_(record.storage)[record.start + start : record.start + end]
                copy = self._bytes[at : at + len(source)]
                if later.covers(source):
                    uncopied.append((copy, source))
                else:
                    copy.copy_(source)
            copied = record._replace(storage=storage, start=at - start)
            if record.sharded is not None and number in part.whole:
                copied = copied._replace(sharded=record.sharded._replace(local=copy))
            parts[2 * number + 1] = copied
            at += _padded(len(source))
        return part.container._replace(parts=parts), uncopied, at


def copy_rest(uncopied: Uncopied) -> None:
    """Copy what `Memory.copy` has left, on this thread alone: torch would use others beside it."""
    while uncopied:
        copy, source = uncopied.pop()
        np.copyto(_bytes_of(copy), _bytes_of(source))


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    # What Tensor.numpy() was called for can never be resized again.
    memory = (ctypes.c_uint8 * len(tensor)).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(memory)


def _ranges(container: Container, share: Share, whole: Set[int]) -> list[tuple[int, int, int]]:
    """What to copy: numbers of records, and from where to where of the bytes that are here."""
    ranges = []
    for number in whole:
        sharded = container.record(number).sharded
        assert sharded is not None
        if sharded.local.nbytes > 0:
            ranges.append((number, 0, sharded.local.nbytes))
    _, sizes, records, starts, counts, _ = share.table.T
    numbers, inverse = np.unique(records, return_inverse=True)
    firsts = np.full(len(numbers), np.iinfo(np.int64).max)
    ends = np.zeros(len(numbers), dtype=np.int64)
    np.minimum.at(firsts, inverse, starts)
    np.maximum.at(ends, inverse, starts + sizes * counts)
    for number, first, end in zip(numbers.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        if number not in whole:
            ranges.append((number, first, end))
    return ranges


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


__all__ = ["Memory", "Part", "Uncopied", "copy_rest", "touched_memory"]
