"""The zip container of a torch.save file, laid out before any tensor's bytes are moved.

`lay_out` lets torch.save itself write the container under `torch.serialization.skip_data`, so the
format is torch's own, byte for byte; what torch would have copied from storages is left out and
known as `records`. Only the CRC32s of these are missing then: each stands behind its record and in
the archive's directory (`crc_places`), and is entered while the file is written.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import hashlib
import os
import pickle
import struct
import traceback
import types
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from fpfs.client.accelerators import Moment
from fpfs.client.boxes import Sharding
from fpfs.client.plan import Records
from fpfs.client.sharding import Sharded, StandIns, sharded_of

_DESCRIPTOR = b"PK\x07\x08"
_ENTRY = struct.Struct("<4s6H3L5H2L")
_ENTRY_SIGNATURE = b"PK\x01\x02"
_END = struct.Struct("<4s4H2LH")
_END_SIGNATURE = b"PK\x05\x06"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_END64 = struct.Struct("<4sQ2H2L4Q")
_CRC_IN_ENTRY = 16

_DICTS = frozenset((dict, collections.OrderedDict))
_CONTAINERS = _DICTS | {tuple, list}
_LEAVES = frozenset(
    (
        *(bool, int, float, str, bytes, type(None), torch.dtype, torch.Size),
        *(types.FunctionType, types.BuiltinFunctionType, type, type(torch.FloatStorage)),
    )
)
_PLAIN = _CONTAINERS | _LEAVES
"""Types whose objects are no tensors or storages: there are twenty for each tensor."""

_TOLD = frozenset((bool, int, float, complex, bytes, type(None), torch.dtype))
"""Types of keys that say the same in every process."""


class Unsupported(ValueError):
    """This torch lays out its files in a way that is not known here."""


class Text(NamedTuple):
    """Part of the container that lies in one piece, in the file and in `Container.text`."""

    offset: int
    bytes: int
    start: int
    """In `Container.text`."""


class Record(NamedTuple):
    """The bytes of one storage in the file."""

    offset: int
    bytes: int
    storage: torch.UntypedStorage
    start: int = 0
    """Of the bytes that this rank has, in the storage."""
    sharded: Sharded | None = None
    """What part of the bytes this rank has; None: all."""


class Container(NamedTuple):
    """A torch.save file but for the bytes of its storages and their CRC32s."""

    bytes: int
    """Of the file."""
    text: bytearray
    """All that is not storages' bytes."""
    parts: list[Text | Record]
    """The file from its begin to its end: a text, a record, a text, and so on, to the last text.
    Storages of no bytes are left out."""
    crc_places: dict[int, list[tuple[int, int]]]
    """The records whose CRC32s are in each text, by its number, and where in the file, in order."""
    tensors: list[str]
    """Of each the keys that lead to it, type and shape, as they were pickled."""
    lies: list[str]
    """How each lies in memory, as the file says of rank 0's; "" of what is made to lie alike."""
    moment: Moment | None = None
    """When it was to be saved, for what other devices have of it; None: it is to be now."""

    def record(self, number: int) -> Record:
        """One of the records, counted from 0."""
        part = self.parts[2 * number + 1]
        assert isinstance(part, Record)
        return part

    def text_part(self, number: int) -> Text:
        """One of the texts: 0 is before the first record, k + 1 behind record k."""
        part = self.parts[2 * number]
        assert isinstance(part, Text)
        return part

    @property
    def sharded(self) -> list[tuple[int, Sharded]]:
        """What this rank has of each record of which it may have only a part, by its number."""
        found = []
        for number in range(len(self.parts) // 2):
            sharded = self.record(number).sharded
            if sharded is not None:
                found.append((number, sharded))
        return found

    def records(self) -> Records:
        """What a plan needs to know of the records."""
        count = len(self.parts) // 2
        shardings: dict[Sharding, int] = {}
        sharding_of = np.full(count, -1, dtype=np.int64)
        for number, sharded in self.sharded:
            sharding_of[number] = shardings.setdefault(sharded.sharding, len(shardings))
        offsets = np.array([part.offset for part in self.parts[1::2]], dtype=np.int64)
        sizes = np.array([part.bytes for part in self.parts[1::2]], dtype=np.int64)
        digest = hashlib.blake2b(repr(self.tensors).encode(errors="surrogatepass"))
        for sharding in shardings:
            mesh = sharding.mesh
            digest.update(repr((*sharding[:2], mesh.shape, mesh.ranks, sharding.cuts)).encode())
        digest.update(sizes.tobytes() + sharding_of.tobytes())
        return Records(offsets, sizes, self.bytes, tuple(shardings), sharding_of, digest.digest())

    def layout(self) -> Layout:
        """Where the records lie, and what is between them."""
        count = len(self.parts) // 2
        return Layout(
            origin=self.record(0).offset if count else 0,
            file_bytes=self.bytes,
            text_bytes=[self.text_part(number).bytes for number in range(1, count)],
            texts=zlib.compress(self._between, level=1),
        )

    def layout_digest(self) -> str:
        """What is laid out in another way has another one."""
        digest = hashlib.blake2b(self._between)
        digest.update(repr([self.bytes, *(part.offset for part in self.parts)]).encode())
        return digest.hexdigest()

    @property
    def _between(self) -> memoryview:
        """All texts but the first and the last."""
        count = len(self.parts) // 2
        first, last = self.text_part(min(1, count)), self.text_part(count)
        return memoryview(self.text)[first.start : last.start]

    def laid_out_as(self, layout: Layout) -> Container:
        """Return the same records as they lie in the file of another rank.

        That has another text before the first one, and behind the last one, which are left out.
        """
        text = bytearray(zlib.decompress(layout.texts))
        parts: list[Text | Record] = []
        places = {}
        at, start = layout.origin, 0
        sizes = [0, *layout.text_bytes]
        for number, count in enumerate(sizes[: len(self.parts) // 2]):
            if number > 0 and self.crc_places:  # of a format that has CRC32s
                places[number] = [(number - 1, at + len(_DESCRIPTOR))]
            parts.append(Text(at if number else 0, count, start))
            at, start = at + count, start + count
            record = self.record(number)
            parts.append(record._replace(offset=at))
            at += record.bytes
        parts.append(Text(at, 0, start))
        return self._replace(bytes=layout.file_bytes, text=text, parts=parts, crc_places=places)


class Layout(msgspec.Struct, array_like=True):
    """How a file is laid out, but for its first and its last text."""

    origin: int
    """Where the first record begins."""
    file_bytes: int
    text_bytes: list[int]
    """Of each text between two records."""
    texts: bytes
    """They, compressed."""


class _Sink:
    """What torch.save writes to: keeps what is written and notes what is skipped."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.texts: list[Text] = []
        self.skipped: list[tuple[int, int]] = []
        """Offset and bytes of what lies behind each text but the last."""
        self._at = 0

    def write(self, data: bytes | memoryview) -> int:
        self.text += data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR:
            raise Unsupported(f"torch.save wants to seek from {whence}")
        self.end_text()
        self.skipped.append((self._at, offset))
        self._at += offset
        return self._at

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def end_text(self) -> None:
        start = self.texts[-1].start + self.texts[-1].bytes if self.texts else 0
        count = len(self.text) - start
        self.texts.append(Text(self._at - count, count, start))

    def has_raised(self, error: BaseException) -> bool:
        """Whether an error came out of one of the methods above.

        The methods cannot note that: a signal's handler may raise before their first line.
        """
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        return any(frame.f_locals.get("self") is self for frame in frames)


class _Pickling:
    """Stands for the module pickle in torch.save, and sees which storages it saves.

    `pickled` is called between the pickling and the writing of the first record. `whole`: tensors
    of which this rank has a part are pickled as ordinary ones.
    """

    def __init__(self, *, whole: bool, pickled: Callable[[], object]) -> None:
        storages: dict[str, torch.UntypedStorage] = {}
        self.storages = storages
        """By torch's keys, in the order that they have in the file."""
        seen = self.seen = _Seen()
        places = seen.places
        wholes = self._wholes = _Wholes()
        before: Any = None
        name = ""

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls, **arguments: Any) -> None:
                # torch's pickler derives from this one; its persistent_id gives storages keys.
                super().__init_subclass__(**arguments)
                torchs = cls.persistent_id

                def persistent_id(self: pickle.Pickler, obj: Any) -> Any:
                    nonlocal before, name
                    previous, before = before, obj
                    kind = type(obj)
                    if kind in _PLAIN:
                        # There are three tuples for each tensor, to which no keys lead.
                        if kind in _CONTAINERS and (id(obj) in places or kind in _DICTS):
                            seen.enter(obj)
                        return None
                    if isinstance(obj, torch.Tensor):
                        # A dictionary's key is pickled before its value.
                        name = previous if isinstance(previous, str) else ""
                        seen.add(obj, name)
                        return None
                    saved = torchs(self, obj)
                    if isinstance(saved, tuple) and saved[0] == "storage":
                        typed = isinstance(obj, torch.storage.TypedStorage)
                        # Its function untyped() warns, of what torch itself does.
                        storage = obj._untyped_storage if typed else obj  # noqa: SLF001
                        storages[saved[2]] = storage
                        seen.add_storage(obj, storage, previous)
                    else:
                        seen.enter(obj)
                    return saved

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

            def reducer_override(self, obj: Any) -> Any:
                if whole and isinstance(obj, torch.Tensor):
                    sharded = sharded_of(obj, name)
                    if sharded is not None:
                        made = wholes.stand_in(obj, sharded)
                        seen.stands_in(made)
                        return made.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                return NotImplemented

            def dump(self, obj: Any) -> None:
                super().dump(obj)
                pickled()

        self.Pickler = Pickler

    def records(self, skipped: list[tuple[int, int]]) -> list[Record]:
        """The storages that have bytes, of each of which offset and bytes are given.

        Raises `Unsupported` if they have others.
        """
        storages = [storage for storage in self.storages.values() if storage.nbytes() > 0]
        if [storage.nbytes() for storage in storages] != [count for _, count in skipped]:
            raise Unsupported("torch.save left out other bytes than those of the storages")
        records = []
        for storage, (offset, count) in zip(storages, skipped, strict=True):
            sharded = self._wholes.sharded.get(storage._cdata)  # noqa: SLF001
            if sharded is None:
                records.append(Record(offset, count, storage))
            else:
                local = sharded.local
                start = local.storage_offset() * sharded.sharding.itemsize
                records.append(Record(offset, count, local.untyped_storage(), start, sharded))
        return records

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


class _Seen:
    """What the pickler has come to, by which ranks compare what they save.

    It comes to each container before what is in it, so the keys that lead to a tensor are known.
    Objects are known by their ids: the pickler keeps them alive.
    """

    def __init__(self) -> None:
        self.tensors: list[str] = []
        """`Container.tensors`."""
        self.lies: list[str] = []
        """`Container.lies`."""
        self.places: dict[int, str] = {}
        """The keys that lead to what the pickler has not come to yet, by its id."""
        self._numbers: dict[int, int] = {}
        """Of storages that have bytes, in order, by what torch knows them by."""
        self._kept: list[Any] = []
        """What the pickler may not keep alive, and another object could have the id of."""

    def enter(self, obj: Any) -> None:
        """The pickler has come to what is no tensor, and comes to what is in it next."""
        own = self.places.pop(id(obj), "")
        if isinstance(obj, dict):
            for key, value in dict.items(obj):
                if type(value) not in _LEAVES:
                    self.places.setdefault(id(value), _under(own, key))
        elif own and isinstance(obj, (list, tuple)):
            # Not by their indices: one rank may have more that is no tensor.
            for value in obj:
                if type(value) not in _LEAVES:
                    self.places.setdefault(id(value), f"{own}[]")
        if own and type(obj) not in _CONTAINERS and type(obj).__dictoffset__ != 0:
            self._kept.append(obj.__dict__)
            self.places.setdefault(id(self._kept[-1]), own)

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """The pickler has come to a tensor, behind that text."""
        # Nested tensors have no shape, nor have a lazy module's yet.
        has_none = tensor.is_nested or torch.nn.parameter.is_lazy(tensor)
        shape = "" if has_none else tuple(tensor.shape)
        self.tensors.append(f"{self._named(tensor, name)} {tensor.dtype} {shape}")
        self.lies.append("" if has_none else self._lie(tensor))

    def add_storage(self, obj: Any, storage: torch.UntypedStorage, previous: Any) -> None:
        """The pickler has come to a storage: to one that no tensor has, if it is not known yet."""
        if storage.nbytes() > 0 and storage._cdata not in self._numbers:  # noqa: SLF001
            self._number(storage)
            name = previous if isinstance(previous, str) else ""
            self.tensors.append(f"{self._named(obj, name)} storage")
            self.lies.append("")

    def stands_in(self, made: torch.Tensor) -> None:
        """This is pickled instead of the last tensor."""
        self.tensors[-1] += " sharded"
        self._number(made.untyped_storage())

    def _named(self, obj: Any, name: str) -> str:
        place = self.places.pop(id(obj), "")
        return f"{place}{name}" if place == "" or place.endswith("[]") else place

    def _number(self, storage: torch.UntypedStorage) -> int:
        return self._numbers.setdefault(storage._cdata, len(self._numbers))  # noqa: SLF001

    def _lie(self, tensor: torch.Tensor) -> str:
        """Tell what the file says of a tensor besides type and shape, if that tells its bytes."""
        if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
            return self._lie_of_own(tensor)
        # Of those that torch_dispatch is for, torch saves the tensors that they are made of.
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return ""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return self._lie_of_own(tensor)

    def _lie_of_own(self, tensor: torch.Tensor) -> str:
        if tensor.is_meta or not torch._C._has_storage(tensor):  # noqa: SLF001
            return ""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return ""
        number = self._number(storage)
        if tensor.numel() == 0:
            return f"{number}"
        strides: tuple[int, ...] = ()
        if not tensor.is_contiguous():
            # What a dimension of one element has for a stride, nobody goes.
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            strides = tuple(stride for count, stride in pairs if count != 1)
        offset, conj, neg = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()
        return f"{number} {offset} {strides} {conj} {neg}"


def _under(place: str, key: Any) -> str:
    """Where a dictionary at `place` leads by a key."""
    if place == "" and type(key) is str and "[" not in key:
        return key
    return f"{place}[{_key_text(key)}]"


def _key_text(key: Any) -> str:
    """What a key is, or only of what type if that may be told otherwise in another process."""
    if isinstance(key, str):
        return str.__repr__(key)
    if type(key) in _TOLD or isinstance(key, np.generic):
        return repr(key)
    if type(key) is tuple:
        return f"({', '.join(map(_key_text, key))})"
    if isinstance(key, enum.Enum):
        return f"{type(key).__qualname__}.{key.name}"
    return type(key).__qualname__


class _Wholes:
    """The tensors that stand in the file for those of which this rank has parts.

    Two of them are one tensor in the file if they are one object. Whether they share memory cannot
    be told by a rank that has nothing of them, and all ranks must come to the same file.
    """

    def __init__(self) -> None:
        self.sharded: dict[int, Sharded] = {}
        """By the stand-ins' storages."""
        self._made: list[torch.Tensor] = []
        self._stand_ins = StandIns()

    def stand_in(self, tensor: torch.Tensor, sharded: Sharded) -> torch.Tensor:
        """Return the ordinary tensor to pickle instead."""
        made = self._stand_ins.make(sharded.sharding.shape, tensor.dtype)
        self._made.append(made)
        self.sharded[made.untyped_storage()._cdata] = sharded  # noqa: SLF001
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def lay_out(state: Any, *, whole: bool = False) -> Container:
    """Lay out the file that torch.save would write of `state`; nothing of its tensors is read.

    whole: tensors of which each rank has a part (DTensors) become ordinary ones in the file.

    Raises what torch.save raises of a state that it cannot save, what a signal's handler raises,
    and `Unsupported`; with `whole` ValueError of tensors whose part this rank cannot tell.
    """
    sink = _Sink()
    with contextlib.ExitStack() as skipping:
        # Not while it pickles: some tensors are refused then that are saved as all others.
        pickling = _Pickling(
            whole=whole,
            pickled=lambda: skipping.enter_context(torch.serialization.skip_data()),
        )
        try:
            torch.save(state, sink, pickle_module=pickling)
        except RuntimeError as error:
            # torch ends the file also after a write has failed, and that fails in its own way.
            if error.__context__ is not None and sink.has_raised(error.__context__):
                raise error.__context__ from None
            raise
    sink.end_text()
    records = pickling.records(sink.skipped)
    parts: list[Text | Record] = []
    for text, record in zip(sink.texts, records, strict=False):
        parts += (text, record)
    parts.append(sink.texts[-1])
    behind = _places_behind(sink)
    places = {number + 1: [(number, offset)] for number, offset in enumerate(behind)}
    # The directory is in the last text.
    places.setdefault(len(records), []).extend(enumerate(_places_in_directory(sink)))
    return Container(
        bytes=sink.tell(),
        text=sink.text,
        parts=parts,
        crc_places=places,
        tensors=pickling.seen.tensors,
        lies=pickling.seen.lies,
    )


def _places_behind(sink: _Sink) -> list[int]:
    """Each record's CRC32 is the first of what follows it."""
    for text in sink.texts[1:]:
        if not sink.text.startswith(_DESCRIPTOR, text.start):
            raise Unsupported("torch.save writes no CRC32 behind what it left out")
    return [text.offset + len(_DESCRIPTOR) for text in sink.texts[1:]]


def _places_in_directory(sink: _Sink) -> list[int]:
    """The directory is the last of the file, and names the records in order."""
    text, last = sink.text, sink.texts[-1]
    count, offset = _find_directory(text)
    if offset < last.offset:
        raise Unsupported("torch.save's directory is not at the end")
    places: list[int] = []
    at = last.start + (offset - last.offset)
    for _ in range(count):
        fields = _ENTRY.unpack_from(text, at)
        signature, crc, size = fields[0], fields[7], fields[9]
        name_bytes, extra_bytes, comment_bytes = fields[10:13]
        if signature != _ENTRY_SIGNATURE:
            raise Unsupported("torch.save's directory cannot be read")
        name = bytes(text[at + _ENTRY.size : at + _ENTRY.size + name_bytes])
        folder, _, key = name.rpartition(b"/")
        if size > 0 and key.isdigit() and folder.endswith(b"/data"):
            if crc != 0:
                raise Unsupported("torch.save has the CRC32 of what it left out")
            places.append(last.offset + (at - last.start) + _CRC_IN_ENTRY)
        at += _ENTRY.size + name_bytes + extra_bytes + comment_bytes
    if len(places) != len(sink.skipped):
        raise Unsupported("torch.save's directory does not name each storage")
    return places


def _find_directory(text: bytearray) -> tuple[int, int]:
    """How many entries the archive's directory has, and its offset in the file."""
    end = len(text) - _END.size
    signature, _, _, _, count, _, offset, _ = _END.unpack_from(text, end)
    if signature != _END_SIGNATURE:
        raise Unsupported("torch.save's file does not end as a zip archive")
    locator = end - _LOCATOR.size
    end64 = locator - _END64.size
    if text.startswith(_LOCATOR_SIGNATURE, locator):
        fields = _END64.unpack_from(text, end64)
        count, offset = fields[7], fields[9]
    return count, offset


__all__ = ["Container", "Layout", "Record", "Text", "Unsupported", "lay_out"]
