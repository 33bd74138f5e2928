"""Fills the tensors of a state, where they are, from a torch.save file.

torch.load reads the pickle and makes tensors without memory (on the device meta), which know where
in the file their bytes are. Of a DTensor only this rank's part is read. What lies in one piece in
the file and in memory is read by native threads straight to where it stays, all tensors at once. To
other devices it goes by two buffers, of which one is read while the other is copied. The rest comes
through a buffer of some MiB, as `Tensor.copy_` would convert it.

Concurrency: as `load`. The state is the caller's, who must not use it meanwhile.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, Protocol, cast

import torch

from fpfs.client.accelerators import Copies, memory_for, now
from fpfs.client.archives import check_archive, is_located, offset_of
from fpfs.client.boxes import Box, runs_of
from fpfs.client.parallel_file import Piece
from fpfs.client.sharding import is_dtensor, part_of
from fpfs.client.snapshot import ALIGNMENT, bytes_of_tensor, reach

BUFFER_BYTES = 64 * 1024 * 1024


class ReadableFile(Protocol):
    """A file that torch.load and zipfile take, and from which pieces are read."""

    def seek(self, offset: int) -> int:
        """As files do."""

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
    archive_offset: int = 0
    """Of what torch.load was given, in the file."""
    dtensor: torch.Tensor | None = None
    """That the target is this rank's part of."""

    @property
    def offset(self) -> int:
        """Of the source's first element in the file."""
        start = int(self.source.storage_offset()) * int(self.source.itemsize)
        return self.archive_offset + offset_of(self.source.untyped_storage()) + start

    def is_as_in_file(self) -> bool:
        """Whether the part's bytes are the file's, in one piece."""
        same = self.target.dtype == self.source.dtype
        # Of others, copy_ knows where their bytes are.
        is_plain = type(self.target) is torch.Tensor
        is_plain = is_plain and self.source.is_contiguous() and self.target.is_contiguous()
        is_plain = is_plain and not (self.target.is_conj() or self.target.is_neg())
        is_plain = is_plain and not (self.source.is_conj() or self.source.is_neg())
        return same and is_plain and len(self.pieces()) == 1

    def pieces(self) -> list[Piece]:
        """What to read to where, if the part lies in one piece."""
        runs = runs_of(self.box, self.source.shape, self.source.itemsize)
        if len(runs) != 1 or runs[0].count != 1:
            return []
        return [(self.target.data_ptr(), runs[0].bytes, self.offset + runs[0].offset)]


def fill(file: ReadableFile, into: Any, *, weights_only: bool | None, begin: float = 0.0) -> Any:
    """Fill `into` from the file; returns it, with what is no tensor as the file has it.

    begin: which part of the bytes is read before those ahead of it, from 0 to 1.

    Raises ValueError of what does not fit, before anything is read, and what torch.load raises.
    """
    entries = check_archive(cast("IO[bytes]", file))
    loaded = torch.load(file, map_location="meta", mmap=False, weights_only=weights_only)
    fillings: list[Filling] = []
    filled = _match(into, loaded, "", fillings)
    for filling in fillings:
        entries.check(filling.source, filling.name)
    read(file, fillings, begin=begin)
    return filled


def read(file: ReadableFile, fillings: Sequence[Filling], *, begin: float = 0.0) -> None:
    """Fill what is to be filled; `begin` as `fill` has it."""
    _count_changes(fillings)
    here, elsewhere, others = list[Filling](), list[Filling](), list[Filling]()
    alone, together = _apart(fillings)
    for filling in alone:
        is_here = filling.target.device.type == "cpu"
        kind = here if is_here else elsewhere
        (kind if filling.is_as_in_file() else others).append(filling)
    pieces = [piece for filling in here for piece in filling.pieces()]
    pieces = _begun_at(begin, sorted(pieces, key=lambda piece: piece[2]))
    file.read_pieces(pieces, [filling.target for filling in here])
    _fill_devices(file, elsewhere, begin=begin)
    for filling in (*others, *together):
        _fill_by_buffer(file, filling)


class _Span(NamedTuple):
    """Memory that a filling changes some of, or all."""

    begin: int
    end: int
    number: int
    """Of the filling."""


def _apart(fillings: Sequence[Filling]) -> tuple[list[Filling], list[Filling]]:
    """Those whose memory no other one fills, and those that are to be filled in their order.

    So tensors that share memory, as tied weights do, have the last one's bytes, as load_state_dict
    leaves them. Where that one fills all that the others do, these are left out.
    """
    spans: dict[torch.device, list[_Span]] = {}
    alone, together = list[int](), list[int]()
    for number, (_, target, box, *_) in enumerate(fillings):
        if box.elements > 0:
            begin = _address_of(target)
            span = _Span(begin, begin + reach(target), number)
            spans.setdefault(target.device, []).append(span)
    for on_device in spans.values():
        for cluster in _overlapping(on_device):
            last = max(cluster, key=lambda span: span.number)
            begin, end = cluster[0].begin, max(span.end for span in cluster)
            reaches_all = (last.begin, last.end) == (begin, end)
            if len(cluster) == 1 or (reaches_all and _has_all(fillings[last.number].target)):
                alone.append(last.number)
            else:
                together += [span.number for span in cluster]
    return [fillings[number] for number in sorted(alone)], [
        fillings[number] for number in sorted(together)
    ]


def _address_of(tensor: torch.Tensor) -> int:
    """Where its first element is; 0: it knows that by itself."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def _has_all(tensor: torch.Tensor) -> bool:
    """Whether it has all bytes that it reaches."""
    is_plain = type(tensor) is torch.Tensor
    return is_plain and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _overlapping(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """The spans, those together that reach into each other."""
    cluster, reached = list[_Span](), 0
    for span in sorted(spans):
        if cluster and span.begin >= reached:
            yield cluster
            cluster = []
        cluster.append(span)
        reached = max(reached, span.end)
    yield cluster


def _count_changes(fillings: Sequence[Filling]) -> None:
    """Have torch count what native threads change, as autograd and `Held.check` rely on it.

    Called before the first byte: who finds the former count has read none of them.
    """
    for filling in fillings:
        for tensor in (filling.target, filling.dtensor):
            if tensor is not None and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


class _Wave:
    """What is read together, and goes to other devices from there."""

    def __init__(self) -> None:
        self.bytes = 0
        self.parts = list[tuple[torch.Tensor, int, int]]()
        """Of tensors' bytes; where in the buffer, and in the file."""

    def add(self, part: torch.Tensor, offset: int) -> None:
        self.parts.append((part, self.bytes, offset))
        self.bytes += -(-len(part) // ALIGNMENT) * ALIGNMENT


def _fill_devices(file: ReadableFile, fillings: Sequence[Filling], *, begin: float) -> None:
    """Fill tensors of other devices: while one wave goes there, the next one is read."""
    if not fillings:
        return
    devices = {filling.target.device for filling in fillings}
    waves = _waves_of(fillings, begin=begin)
    buffers = [memory_for(max(wave.bytes for wave in waves), devices) for _ in waves[:2]]
    # What is queued there may still use the tensors.
    moment = now(devices)
    under_way = [Copies(moment), Copies(moment)]
    with contextlib.ExitStack() as stack:
        for copies in under_way:
            # Also if this fails: who has the memory then would find it changed.
            stack.callback(copies.wait)
        for number, wave in enumerate(waves):
            buffer, copies = buffers[number % 2], under_way[number % 2]
            copies.wait()
            address = buffer.data_ptr()
            file.read_pieces([(address + at, len(part), to) for part, at, to in wave.parts], buffer)
            for part, at, _ in wave.parts:
                copies.begin(part, buffer[at : at + len(part)])


def _waves_of(fillings: Sequence[Filling], *, begin: float) -> list[_Wave]:
    """The tensors' bytes in the order of the file, of at most BUFFER_BYTES each."""
    tensors, pieces, end = list[torch.Tensor](), list[Piece](), 0
    for filling in sorted(fillings, key=lambda filling: filling.pieces()[0][2]):
        tensors.append(bytes_of_tensor(filling.target))
        pieces.append((end, len(tensors[-1]), filling.pieces()[0][2]))
        end += len(tensors[-1])
    begins = [at for at, _, _ in pieces]
    waves = [_Wave()]
    for each, size, offset in _begun_at(begin, pieces):
        number = bisect.bisect_right(begins, each) - 1
        first, done = each - begins[number], 0
        while done < size:
            room = BUFFER_BYTES - waves[-1].bytes
            if room <= 0:
                waves.append(_Wave())
                continue
            count = min(size - done, room)
            at = first + done
            waves[-1].add(tensors[number][at : at + count], offset + done)
            done += count
    return waves


def _match(into: Any, loaded: Any, name: str, fillings: list[Filling]) -> Any:
    """`into` with what is no tensor from `loaded`; adds what is to be filled."""
    if isinstance(into, torch.Tensor):
        if not isinstance(loaded, torch.Tensor):
            raise ValueError(_differs(name, f"a {type(loaded).__name__}", "a tensor"))
        fillings.append(_filling(into, loaded, name))
        return into
    # A history grows, and milestones change: of plain values the file's are taken whole.
    if not _has_targets(into) and not _has_tensors(loaded):
        return loaded
    if isinstance(into, Mapping):
        if not isinstance(loaded, Mapping):
            raise ValueError(_differs(name, f"a {type(loaded).__name__}", "a dictionary"))
        if not into:
            raise ValueError(_differs(name, f"{len(loaded)} items", "none"))
        made: Any = copy.copy(into) if isinstance(into, dict) else dict(into)
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
    raise ValueError(_differs(name, "tensors", f"a {type(into).__name__}"))


def _filling(target: torch.Tensor, source: torch.Tensor, name: str) -> Filling:
    for tensor, owner in ((source, "the file"), (target, "the state")):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ValueError(f"{name} of {owner} is no dense tensor: load it without into=")
    if is_dtensor(source):
        raise ValueError(
            f"{name} of the file is a DTensor, as one rank by itself has saved it: load it without"
            " into="
        )
    if target.device.type == "meta":
        raise ValueError(f"{name} of the state has no memory: to_empty() it first")
    if not is_located(source):
        raise ValueError(
            f"where {name} is in the file is not known, as in files older than torch 1.6 or with"
            " a torch older than 2.13: load it without into="
        )
    if source.shape != target.shape:
        raise ValueError(_differs(name, tuple(source.shape), tuple(target.shape)))
    if not _converts(source.dtype, target.dtype):
        raise ValueError(_differs(name, source.dtype, target.dtype))
    whole = Box((0,) * target.ndim, tuple(target.shape))
    _, box, part = part_of(target, name) or (None, whole, target)
    if torch._debug_has_internal_overlap(part) == 1:  # noqa: SLF001
        raise ValueError(f"elements of {name} of the state share memory: clone() it first")
    dtensor = target if is_dtensor(target) else None
    # What detach() returns shares the count of changes, as views do.
    return Filling(name, part.detach(), box, source, dtensor=dtensor)


@functools.cache
def _converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether copy_ knows how."""
    try:
        made = torch.empty(1, dtype=source, device="cpu")
        torch.empty(1, dtype=target, device="cpu").copy_(made)
    except (RuntimeError, NotImplementedError):
        return False
    return True


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
    """Fill a part block by block, as copy_ does."""
    source = filling.source
    # The dimension with the largest stride first: so a block lies close together in the file.
    order = sorted(range(source.ndim), key=lambda dim: -source.stride(dim))
    box = filling.box
    start = sum(at * stride for at, stride in zip(box.offsets, source.stride(), strict=True))
    _fill_block(
        file, filling, filling.target.permute(order), start, [source.stride(dim) for dim in order]
    )


def _fill_block(
    file: ReadableFile, filling: Filling, target: torch.Tensor, start: int, strides: list[int]
) -> None:
    """Fill `target` from the element `start` of the source on, from where it has `strides`."""
    source = filling.source
    spread = [(size - 1) * stride for size, stride in zip(target.shape, strides, strict=True)]
    elements = sum(spread) + 1
    if elements * source.itemsize > BUFFER_BYTES and target.numel() > 1:
        dim = next(dim for dim, size in enumerate(target.shape) if size > 1)
        half = target.shape[dim] // 2
        first, second = target.split([half, target.shape[dim] - half], dim)
        _fill_block(file, filling, first, start, strides)
        _fill_block(file, filling, second, start + half * strides[dim], strides)
        return
    buffer = torch.empty(elements, dtype=source.dtype, device="cpu")
    at = filling.offset + start * source.itemsize
    file.read_pieces([(buffer.data_ptr(), buffer.nbytes, at)], buffer)
    block = buffer.as_strided(target.shape, strides)
    if source.is_conj():
        block = block.conj()
    if source.is_neg():
        block = torch._neg_view(block)  # noqa: SLF001
    # What is made in inference mode can be changed in it alone.
    mode = torch.inference_mode if target.is_inference() else torch.no_grad
    with mode():
        target.copy_(block)


def _has_targets(into: Any) -> bool:
    """Whether there are tensors to fill: those in other objects are not filled."""
    if isinstance(into, Mapping):
        return any(map(_has_targets, into.values()))
    if isinstance(into, list | tuple):
        return any(map(_has_targets, into))
    return isinstance(into, torch.Tensor)


class _Finder(pickle.Pickler):
    """Finds tensors and storages in any object, by pickling it to nowhere."""

    found = False

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor | torch.UntypedStorage | torch.TypedStorage):
            self.found = True
            return True
        return None


def _has_tensors(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return False
    finder = _Finder(io.BytesIO())
    finder.dump(value)
    return finder.found


def _named(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _differs(name: str, found: Any, wanted: Any) -> str:
    return f"{name or 'the state'}: the file has {found}, the state {wanted}"


__all__ = ["Filling", "ReadableFile", "fill", "read"]
