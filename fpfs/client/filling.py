"""Fills the tensors of a state, where they are, from a torch.save file.

torch.load reads the pickle and makes tensors without memory (on the device meta), which know where
in the file their bytes are. Of a DTensor only this rank's part is read. What lies in one piece in
the file and in memory is read by native threads straight to where it stays, all tensors at once;
the rest comes through a buffer of some MiB, as `Tensor.copy_` would convert it.

Concurrency: as `load`. The state is the caller's, who must not use it meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from fpfs.client.sharding import Box, part_of, runs_of

BUFFER_BYTES = 64 * 1024 * 1024

Piece = tuple[int, int, int]
"""Address, bytes, and offset in the file."""


class ReadableFile(Protocol):
    """A file that torch.load takes, and from which pieces are read."""

    def read_pieces(self, pieces: list[Piece], owners: object) -> None:
        """Fill memory, which `owners` keeps."""


class Filling(NamedTuple):
    """A tensor of the caller's, and what it is filled from."""

    name: str
    target: torch.Tensor
    """This rank's part, detached."""
    box: Box
    """Where that is in the whole."""
    source: torch.Tensor
    """The whole as the file has it, without memory."""

    @property
    def offset(self) -> int:
        """Of the source's first element in the file."""
        start = int(self.source.storage_offset()) * int(self.source.itemsize)
        return _offset_of(self.source.untyped_storage()) + start

    def is_direct(self) -> bool:
        """Whether the part's bytes are the file's, in few pieces."""
        same = self.target.dtype == self.source.dtype and self.target.device.type == "cpu"
        is_plain = self.source.is_contiguous() and self.target.is_contiguous()
        is_plain = is_plain and not (self.target.is_conj() or self.target.is_neg())
        is_plain = is_plain and not (self.source.is_conj() or self.source.is_neg())
        return same and is_plain and len(self.pieces()) == 1

    def pieces(self) -> list[Piece]:
        """What to read to where, if the part lies in one piece."""
        runs = runs_of(self.box, self.source.shape, self.source.itemsize)
        if len(runs) != 1 or runs[0].count != 1:
            return []
        return [(self.target.data_ptr(), runs[0].bytes, self.offset + runs[0].offset)]


def fill(file: ReadableFile, into: Any, *, weights_only: bool, begin: float = 0.0) -> Any:
    """Fill `into` from the file; returns it, with what is no tensor as the file has it.

    begin: which part of the bytes is read before those ahead of it, from 0 to 1.

    Raises ValueError of what does not fit, before anything is read, and what torch.load raises.
    """
    loaded = torch.load(file, map_location="meta", mmap=False, weights_only=weights_only)
    fillings: list[Filling] = []
    filled = _match(into, loaded, "", fillings)
    fillings = [filling for filling in fillings if filling.box.elements > 0]
    direct = [filling for filling in fillings if filling.is_direct()]
    pieces = [piece for filling in direct for piece in filling.pieces()]
    pieces = _begun_at(begin, sorted(pieces, key=lambda piece: piece[2]))
    file.read_pieces(pieces, [filling.target for filling in direct])
    for filling in fillings:
        if not filling.is_direct():
            _fill_by_buffer(file, filling)
    return filled


def _match(into: Any, loaded: Any, name: str, fillings: list[Filling]) -> Any:
    """`into` with what is no tensor from `loaded`; adds what is to be filled."""
    if isinstance(into, torch.Tensor):
        if not isinstance(loaded, torch.Tensor):
            raise ValueError(_differs(name, f"a {type(loaded).__name__}", "a tensor"))
        fillings.append(_filling(into, loaded, name))
        return into
    if isinstance(into, Mapping):
        if not isinstance(loaded, Mapping):
            raise ValueError(_differs(name, f"a {type(loaded).__name__}", "a dictionary"))
        made: Any = copy.copy(into)
        for key, value in into.items():
            if key not in loaded:
                raise ValueError(f"the file has no {_named(name, key)}")
            made[key] = _match(value, loaded[key], _named(name, key), fillings)
        return made
    if isinstance(into, list | tuple):
        if not isinstance(loaded, list | tuple) or len(loaded) != len(into):
            found = f"{len(loaded)} items" if isinstance(loaded, list | tuple) else repr(loaded)
            raise ValueError(_differs(name, found, f"{len(into)} items"))
        items = [
            _match(value, other, _named(name, number), fillings)
            for number, (value, other) in enumerate(zip(into, loaded, strict=True))
        ]
        return type(into)(*items) if hasattr(into, "_fields") else type(into)(items)
    if _has_tensors(loaded):
        raise ValueError(_differs(name, "tensors", f"a {type(into).__name__}"))
    return loaded


def _filling(target: torch.Tensor, source: torch.Tensor, name: str) -> Filling:
    for tensor, owner in ((source, "the file"), (target, "the state")):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ValueError(f"{name} of {owner} is no dense tensor: load it without into=")
    if target.device.type == "meta":
        raise ValueError(f"{name} of the state has no memory: to_empty() it first")
    if _offset_of(source.untyped_storage()) < 0:
        raise ValueError(
            f"where {name} is in the file is not known, as in files older than torch 1.6 or with"
            " a torch older than 2.13: load it without into="
        )
    if source.shape != target.shape:
        raise ValueError(_differs(name, tuple(source.shape), tuple(target.shape)))
    part = part_of(target, name)
    if part is None:
        part = Box((0,) * target.ndim, tuple(target.shape)), target.detach()
    return Filling(name, part[1], part[0], source)


def _begun_at(begin: float, pieces: list[Piece]) -> list[Piece]:
    """The pieces from a part of their bytes on, and then those before."""
    first, later, at = list[Piece](), list[Piece](), 0
    cut = int(begin * sum(count for _, count, _ in pieces))
    for address, count, offset in pieces:
        before = min(count, max(0, cut - at))
        if before > 0:
            later.append((address, before, offset))
        if before < count:
            first.append((address + before, count - before, offset + before))
        at += count
    return first + later


def _fill_by_buffer(file: ReadableFile, filling: Filling) -> None:
    """Fill a part block by block of its first dimension, as copy_ does."""
    source, target, box = filling.source, filling.target, filling.box
    if source.ndim == 0:
        source, target, box = source.reshape(1), target.reshape(1), Box((0,), (1,))
    inner = tuple(slice(at, at + n) for at, n in zip(box.offsets[1:], box.shape[1:], strict=True))
    strides = [abs(stride) for stride in source.stride()]
    spread = [(size - 1) * stride for size, stride in zip(source.shape, strides, strict=True)]
    row_elements = max(strides[0], 1) + sum(spread[1:])
    rows = max(1, BUFFER_BYTES // (row_elements * source.itemsize))
    for row in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - row)
        first = (box.offsets[0] + row) * strides[0]
        elements = (count - 1) * strides[0] + sum(spread[1:]) + 1
        buffer = torch.empty(elements, dtype=source.dtype)
        at = filling.offset + first * source.itemsize
        file.read_pieces([(buffer.data_ptr(), buffer.nbytes, at)], buffer)
        block = buffer.as_strided((count, *source.shape[1:]), strides)
        if source.is_conj():
            block = block.conj()
        if source.is_neg():
            block = torch._neg_view(block)  # noqa: SLF001
        with torch.no_grad():
            target[row : row + count].copy_(block[(slice(None), *inner)])


def _offset_of(storage: Any) -> int:
    """Where torch.load has found a storage in the file; negative: it has not."""
    offset = getattr(storage, "_checkpoint_offset", None)
    return -1 if offset is None else int(offset)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    return isinstance(value, torch.Tensor)


def _named(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _differs(name: str, found: Any, wanted: Any) -> str:
    return f"{name or 'the state'}: the file has {found}, the state {wanted}"


__all__ = ["ReadableFile", "fill"]
