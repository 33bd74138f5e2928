"""Tensors of which each rank has a part: where it belongs in the whole, and what stands for that.

A part is a box, as DTensor's placements make it. In the file lies the whole, as an ordinary tensor
in the order of its elements, so a box is runs of bytes at equal distances. Part and whole are what
torch.distributed.checkpoint takes them for.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np
import torch

_ADDRESSES_BYTES = 1 << 40


class Box(msgspec.Struct, array_like=True, frozen=True):
    """A part of a tensor: where it begins in each dimension, and its shape. In elements."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many; a rank that has no part at all has offsets or shape of other dimensions."""
        return math.prod(self.shape) if len(self.shape) == len(self.offsets) else 0


class Runs(msgspec.Struct, frozen=True):
    """Bytes of a tensor in `count` runs of `bytes` each; the part has them in one piece."""

    offset: int
    """Of the first run in the whole."""
    bytes: int
    count: int
    step: int
    """From the begin of one run to the begin of the next, in the whole."""
    start: int
    """Of the first run in the part."""


class Sharded(NamedTuple):
    """What a rank has of a tensor."""

    name: str
    """Of the tensor, if it has one."""
    shape: tuple[int, ...]
    """Of the whole."""
    itemsize: int
    box: Box
    local: torch.Tensor
    """The part, without gaps. In the processor's memory if it is of several runs."""


def _spans(box: Box, shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Begin, length and size of the dimensions, of which the box has a part, from outer to inner.

    A dimension of which the box has all is one with the dimension before it.
    """
    spans = [(0, 1, 1)]
    for offset, count, size in zip(box.offsets, box.shape, shape, strict=True):
        if count == size:
            spans[-1] = (spans[-1][0] * size, spans[-1][1] * size, spans[-1][2] * size)
        else:
            spans.append((offset, count, size))
    return spans


def runs_of(box: Box, shape: Sequence[int], itemsize: int) -> list[Runs]:
    """The bytes of a box that has elements, in order, where the whole has `shape`."""
    spans = _spans(box, shape)
    *outer, (first, length, step) = spans
    strides = [math.prod(size for _, _, size in spans[dim + 1 :]) for dim in range(len(outer))]
    base = first + sum(span[0] * stride for span, stride in zip(outer, strides, strict=True))
    count = outer[-1][1] if outer else 1
    found = []
    for number, index in enumerate(itertools.product(*(range(span[1]) for span in outer[:-1]))):
        offset = base + sum(at * stride for at, stride in zip(index, strides, strict=False))
        start = number * count * length
        found.append(
            Runs(offset * itemsize, length * itemsize, count, step * itemsize, start * itemsize)
        )
    return found


def is_one_run(box: Box, shape: Sequence[int]) -> bool:
    """Whether the box lies in one piece in the whole, as others cut so do, or has nothing."""
    return box.elements == 0 or all(size == 1 for _, _, size in _spans(box, shape)[:-1])


def is_tiling(boxes: set[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes are the whole, cut at right angles: each element is in one of them."""
    cells = 1
    for dim, size in enumerate(shape):
        intervals = sorted({(box.offsets[dim], box.shape[dim]) for box in boxes})
        end = 0
        for offset, count in intervals:
            if offset != end:
                return False
            end += count
        if end != size:
            return False
        cells *= len(intervals)
    # Each is one of the cells, no two are the same.
    return len(boxes) == cells


def sharded_of(tensor: torch.Tensor, name: str) -> Sharded | None:
    """What this rank has of `tensor`; None: it is an ordinary tensor.

    Raises ValueError of those whose part cannot be told.
    """
    found = part_of(tensor, name)
    if found is None:
        return None
    box, local = found
    local = local.resolve_conj().resolve_neg().contiguous()
    if not is_one_run(box, tensor.shape):
        local = local.cpu()  # where other ranks can read it
    return Sharded(name, tuple(tensor.shape), local.element_size(), box, local)


def part_of(tensor: torch.Tensor, name: str) -> tuple[Box, torch.Tensor] | None:
    """This rank's part of `tensor` and where that lies; None: it is an ordinary tensor.

    Raises ValueError as `sharded_of` does.
    """
    if not is_dtensor(tensor):
        if any(base.__name__ == "ShardedTensor" for base in type(tensor).__mro__):
            _refuse(name, "it is a ShardedTensor, the predecessor of DTensor")
        return None
    given: Any = tensor
    if any(placement.is_partial() for placement in given.placements):
        _refuse(name, "its sum is still to be made: redistribute() it")
    with torch.no_grad():
        local = given.to_local()
    if type(local) is not torch.Tensor or local.layout is not torch.strided or local.is_quantized:
        _refuse(name, f"its parts are {type(local).__name__}s of layout {local.layout}")
    (chunk,) = given.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    if box.elements != local.numel():
        _refuse(name, f"a part of shape {tuple(local.shape)} is said to have {box.shape}")
    if not _are_boxes(tuple(given.shape), given.device_mesh.shape, given.placements):
        _refuse(name, "it lies in several pieces: redistribute() it")
    return box, local


@functools.lru_cache(maxsize=4096)
def _are_boxes(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...]) -> bool:
    """Whether each rank's part is a box. Of a _StridedShard it is only if another one follows."""
    if all(type(each).__name__ != "_StridedShard" for each in placements):
        return True
    from torch.distributed.tensor._utils import (
        _compute_local_shape_and_global_offset,
    )

    boxes = set()
    for coordinate in itertools.product(*map(range, mesh)):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        boxes.add(Box(tuple(offsets), tuple(sizes)))
    return is_tiling({box for box in boxes if box.elements > 0}, shape)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    # Importing it takes a second, so who has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(f"fpfs cannot tell what this rank has of the sharded tensor {name!r}: {why}")


class StandIns:
    """Ordinary tensors, as large as wholes, of which only the addresses exist.

    Nothing may read them. They may not be used when this object is gone.
    """

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []
        self._free = memoryview(b"")

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return one."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        if size > len(self._free):
            try:
                self._free = self._addresses(max(size, _ADDRESSES_BYTES))
            except OSError:  # a limit on addresses (ulimit -v)
                self._free = self._addresses(size)
        # Each has an address of its own, by which torch.save tells storages apart.
        storage = torch.frombuffer(self._free[:size], dtype=torch.uint8).untyped_storage()
        self._free = self._free[size:]
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))

    def _addresses(self, count: int) -> memoryview:
        # Private and not to be written: the kernel promises no memory for it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, count, flags=flags, prot=mmap.PROT_READ)
        self._mappings.append(mapping)
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        # torch.frombuffer warns of buffers that are not to be written.
        return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


__all__ = [
    "Box",
    "Runs",
    "Sharded",
    "StandIns",
    "is_dtensor",
    "is_one_run",
    "is_tiling",
    "part_of",
    "runs_of",
    "sharded_of",
]
