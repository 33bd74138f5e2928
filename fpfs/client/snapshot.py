"""Copies of tensors that are written while training goes on.

A rank copies what it writes itself, and its parts of tensors that others read from it. The memory
is kept from one snapshot to the next: memory that was never touched takes ten times as long. Where
it is bounded, and a state larger, some tensors stay where they lie: these are written first, and
may change then.

Concurrency: used by one thread at a time, but for what `copy` leaves to another. Nobody may write
to the memory until the save that was copied to it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from fpfs.client.accelerators import Copies, Moment, free_bytes, has_streams, now, pin
from fpfs.client.container import Container, Record
from fpfs.client.plan import Share
from fpfs.client.updates import NOTHING_HELD, Held
from fpfs.core.transfers import count_moved
from fpfs.core.units import format_size

ALIGNMENT = 64
"""Of each copy: a cache line, and a multiple of every type's size."""

_BLOCK_BYTES = 64 * 1024 * 1024
"""After so many that are copied, who waits for them learns that they move."""

_SMALL_BYTES = 64 * 1024
"""Of what is copied without a tensor of it, which takes longer to make than to copy."""


class Uncopied:
    """Bytes that are still to be copied, and what devices still copy.

    moment: what devices copy is of then.
    held: whose bytes are copied later.
    """

    def __init__(self, moment: Moment, held: Held = NOTHING_HELD) -> None:
        self.copies = Copies(moment)
        """Of other devices' bytes."""
        self.held = held
        self._later = list[tuple[torch.Tensor, torch.Tensor]]()

    def add(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Have `copy_rest` copy as many bytes."""
        self._later.append((to, source))

    def take(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What was added, which is forgotten: to the first of each two from the second."""
        found, self._later = self._later, []
        return found

    def __len__(self) -> int:
        return len(self._later)


class TouchedMemory(mmap.mmap):
    """Bytes, one or more, that the kernel need not find when they are used.

    Raises MemoryError.
    """

    _is_for_devices = False
    _unpin: Callable[[], object] | None = None

    def __new__(cls, size: int) -> Self:
        """Take and touch them."""
        try:
            made = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"a snapshot needs {format_size(size)}") from error
        with contextlib.suppress(OSError):  # a kernel without huge pages
            made.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(made, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
        return made

    def pin_for(self, devices: Iterable[torch.device]) -> None:
        """Have devices copy to it by themselves, if they can."""
        for device in filter(has_streams, devices):
            if not self._is_for_devices:
                self._is_for_devices = True
                address = np.frombuffer(self, dtype=np.uint8).ctypes.data
                self._unpin = pin(address, len(self), device)

    def __del__(self) -> None:
        if self._unpin is not None:
            self._unpin()


class Part(NamedTuple):
    """What of a file is copied."""

    container: Container
    share: Share
    whole: Collection[int]
    """Records of which everything is copied that this rank has."""


class Copied(NamedTuple):
    """What a file is written from."""

    container: Container
    """With copies, instead of the tensors."""
    uncopied: Uncopied
    in_place: frozenset[int]
    """Records without a copy."""


class InPlace(NamedTuple):
    """What is written from where it lies."""

    bytes: int
    is_held: bool
    """Whether none of it changes before the next step."""


class _Range(NamedTuple):
    """Bytes of a record that are copied."""

    part: int
    number: int
    start: int
    """Of those that are here."""
    storage: torch.UntypedStorage
    first: int
    """In the storage."""
    size: int
    is_held: bool
    is_needed: bool
    """Others read it."""

    @property
    def room(self) -> int:
        """What a copy takes."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT

    @property
    def is_here(self) -> bool:
        """Whether the processor has them in its memory."""
        return bool(self.storage.device.type == "cpu")

    @property
    def source(self) -> torch.Tensor:
        """The bytes, where they lie."""
        return bytes_of(self.storage, self.first, self.first + self.size)


class Memory:
    """Where snapshots lie, one at a time. max_bytes: of them; None: what they need."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._mapping: TouchedMemory | None = None
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
        self._bytes, self._mapping = torch.empty(0, dtype=torch.uint8, device="cpu"), None
        self._mapping = TouchedMemory(size)
        # What is made in inference mode could not be changed outside of it.
        with torch.inference_mode(mode=False):
            self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def copy(
        self, parts: Sequence[Part], *, later: Held = NOTHING_HELD
    ) -> tuple[list[Copied], InPlace]:
        """Copy what of each container its share has, as far as there is room.

        later: what is not copied now. What is queued on current streams of other devices after this
            call changes the rest when it is copied.

        Raises ValueError if there is no room for what must be copied.
        """
        ranges = [each for index, part in enumerate(parts) for each in _ranges(index, part, later)]
        in_place = self._without_room(ranges)
        copied = [each for each in ranges if (each.part, each.number) not in in_place]
        self.reserve(sum(each.room for each in copied))
        devices = {each.storage.device for each in ranges}
        roomy = _with_room(copied)
        copied = [_on_its_device(each) if each.storage.device in roomy else each for each in copied]
        moment = now(devices)
        if self._mapping is not None:
            self._mapping.pin_for(devices)
        found = [
            Copied(
                part.container._replace(parts=list(part.container.parts), moment=moment),
                Uncopied(moment, later),
                frozenset(number for of, number in in_place if of == index),
            )
            for index, part in enumerate(parts)
        ]
        at = 0
        with contextlib.ExitStack() as on_failure, torch.inference_mode(mode=False):
            for to in found:
                on_failure.callback(to.uncopied.copies.wait)
            for each in copied:
                self._copy(each, at, parts[each.part], found[each.part])
                at += each.room
            for to in found:
                to.uncopied.copies.hold_back(devices - roomy)
            on_failure.pop_all()
        left = [each for each in ranges if (each.part, each.number) in in_place]
        total_bytes = sum(each.size for each in left)
        return found, InPlace(total_bytes, all(each.is_held for each in left))

    def _without_room(self, ranges: Sequence[_Range]) -> set[tuple[int, int]]:
        """Which records, of which parts, are not copied: first those that are held, and large."""
        room = self._max_bytes
        if room is None or sum(each.room for each in ranges) <= room:
            return set()
        needed = sum(each.room for each in ranges if each.is_needed)
        if needed > room:
            raise ValueError(
                f"{format_size(needed)} must be copied (parts of tensors that other ranks read),"
                f" and staging_bytes is {room}: give {needed} or more, or leave it out"
            )
        found = set()
        for each in sorted(ranges, key=lambda each: (not each.is_needed, each.is_held, each.room)):
            if each.room <= room:
                room -= each.room
            else:
                found.add((each.part, each.number))
        return found

    def _copy(self, found: _Range, at: int, part: Part, to: Copied) -> None:
        """Copy one to memory from `at` on."""
        record = part.container.record(found.number)
        sharded = record.sharded
        is_whole = sharded is not None and found.number in part.whole
        if found.size <= _SMALL_BYTES and found.is_here and not (found.is_held or is_whole):
            from_address = found.storage.data_ptr() + found.first
            ctypes.memmove(self._bytes.data_ptr() + at, from_address, found.size)
        else:
            copy = self._bytes[at : at + found.size]
            if found.is_held:
                to.uncopied.add(copy, found.source)
            elif found.is_here:
                copy.copy_(found.source)
                count_moved(found.size)
            else:
                to.uncopied.copies.begin(copy, found.source)
            if sharded is not None and is_whole:
                sharded = sharded._replace(local=copy)
        to.container.parts[2 * found.number + 1] = Record(
            record.offset, record.bytes, self._bytes.untyped_storage(), at - found.start, sharded
        )


def bytes_of(storage: torch.UntypedStorage, start: int, end: int) -> torch.Tensor:
    """Some bytes of a storage, where they lie."""
    with torch.inference_mode(mode=False):
        found = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return found.set_(storage)[start:end]


def bytes_of_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that has them in one piece, where they lie."""
    start = tensor.storage_offset() * tensor.itemsize
    return bytes_of(tensor.untyped_storage(), start, start + tensor.nbytes)


def reach(tensor: torch.Tensor) -> int:
    """Return how many bytes there are from its first element, of some, to the end of its last."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return int(elements * tensor.itemsize)


def copy_rest(uncopied: Uncopied) -> None:
    """Copy what `Memory.copy` has left, on this thread alone: torch would use others beside it.

    Raises RuntimeError of what is no longer as it was (`Held.check`), of memory that was given back
    before it is read.
    """
    uncopied.held.check()
    here = []
    for copy, source in uncopied.take():
        if source.device.type == "cpu":
            here.append((copy, source))
        else:
            uncopied.copies.begin(copy, source)
    for copy, source in here:
        to, of = _array_of(copy), _array_of(source)
        for at in range(0, len(of), _BLOCK_BYTES):
            block = slice(at, at + _BLOCK_BYTES)
            np.copyto(to[block], of[block])
            count_moved(len(of[block]))
    uncopied.copies.wait()
    uncopied.held.check()


def _array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    # What Tensor.numpy() was called for can never be resized again.
    memory = (ctypes.c_uint8 * len(tensor)).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(memory)


def _with_room(ranges: Iterable[_Range]) -> set[torch.device]:
    """Devices that can copy their bytes to their own memory, and keep as much free as that takes.

    What training queues waits for that alone then: it is ten and more times as fast.
    """
    sizes: dict[torch.device, int] = {}
    for each in ranges:
        device = each.storage.device
        if not each.is_held and has_streams(device):
            sizes[device] = sizes.get(device, 0) + each.size
    return {device for device, size in sizes.items() if 2 * size <= free_bytes(device)}


def _on_its_device(found: _Range) -> _Range:
    """Have a copy read instead of what may change."""
    if found.is_held:
        return found
    return found._replace(storage=found.source.clone().untyped_storage(), first=0)


def _ranges(index: int, part: Part, later: Held) -> Iterator[_Range]:
    """What to copy of a part."""
    whole = set(part.whole)
    for number, start, end in _extents(part.container, part.share, whole):
        record = part.container.record(number)
        yield _Range(
            index,
            number,
            start,
            record.storage,
            record.start + start,
            end - start,
            is_held=later.has(record.storage),
            is_needed=number in whole,
        )


def _extents(container: Container, share: Share, whole: Set[int]) -> list[tuple[int, int, int]]:
    """Numbers of records, and from where to where of the bytes that are here."""
    extents = []
    for number in whole:
        sharded = container.record(number).sharded
        assert sharded is not None
        if sharded.local.nbytes > 0:
            extents.append((number, 0, sharded.local.nbytes))
    _, sizes, records, starts, counts, _ = share.table.T
    numbers, inverse = np.unique(records, return_inverse=True)
    firsts = np.full(len(numbers), np.iinfo(np.int64).max)
    ends = np.zeros(len(numbers), dtype=np.int64)
    np.minimum.at(firsts, inverse, starts)
    np.maximum.at(ends, inverse, starts + sizes * counts)
    for number, first, end in zip(numbers.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        if number not in whole:
            extents.append((number, first, end))
    return extents


__all__ = [
    "Copied",
    "InPlace",
    "Memory",
    "Part",
    "TouchedMemory",
    "Uncopied",
    "bytes_of",
    "bytes_of_tensor",
    "copy_rest",
    "reach",
]
