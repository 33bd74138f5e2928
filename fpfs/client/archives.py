"""torch.save archives: several in one file, one for each tensor, and where the entries of one are.

Several in one file are torch.distributed.checkpoint's. Tensors of one type, shape and strides have
the same archive but for their bytes, so each is laid out once. Where a tensor lies in one piece in
memory, it is written from there.

Of a tensor without memory, torch.load calculates where the bytes are from what the pickle says of
the tensors before it. torch compares that with the archive's directory only when torch reads the
bytes. Who reads the bytes instead of torch compares it by `Entries`, or a damaged pickle would fill
a tensor with the bytes of others.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import struct
import sys
import zipfile
from collections.abc import Iterable, Sequence
from typing import IO, Any, NamedTuple

import torch

from fpfs.client.container import Container, Record, Text, lay_out
from fpfs.client.sharding import StandIns

ALIGNMENT = 64
"""Of each archive's begin: what torch aligns tensors to within."""

_HEADER = struct.Struct("<4s5H3L2H")
_HAS_DESCRIPTOR = 0x08
_DESCRIPTOR_BYTES = 16
_DESCRIPTOR64_BYTES = 24
_UINT32_MAX = 0xFFFFFFFF


class Archive(NamedTuple):
    """Where an item is in the file."""

    offset: int
    bytes: int


def lay_out_each(items: Iterable[torch.Tensor | memoryview]) -> tuple[Container, list[Archive]]:
    """Lay out a file with an archive for each tensor, in order; other bytes are as they are.

    Raises what torch.save raises.
    """
    layouts = _Layouts()
    container = Container(bytes=0, text=bytearray(), parts=[], crc_places={}, tensors=[], lies=[])
    text, parts, places = container.text, container.parts, container.crc_places
    archives = []
    at = text_offset = text_start = 0
    for item in items:
        padding = bytes(-at % ALIGNMENT)
        text += padding
        at = begin = at + len(padding)
        if isinstance(item, memoryview) or not is_plain(item):
            content = item if isinstance(item, memoryview) else _saved(item)
            text += content
            at += len(content)
        else:
            layout, storage, start = layouts.of(item)
            number = len(parts) // 2
            for part in layout.parts:
                if isinstance(part, Text):
                    text += layout.text[part.start : part.start + part.bytes]
                else:
                    parts.append(Text(text_offset, len(text) - text_start, text_start))
                    parts.append(Record(at, part.bytes, storage, start))
                    text_offset, text_start = at + part.bytes, len(text)
                at += part.bytes
            for found in layout.crc_places.values():
                here = places.setdefault(number + 1, [])
                here += [(number, begin + offset) for _, offset in found]
        archives.append(Archive(begin, at - begin))
    parts.append(Text(text_offset, len(text) - text_start, text_start))
    return container._replace(bytes=at), archives


class _Layouts:
    """Archives of one tensor without its bytes."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Container] = {}
        self._stand_ins = StandIns()

    def of(self, tensor: torch.Tensor) -> tuple[Container, torch.UntypedStorage, int]:
        """The layout of a tensor's archive, and where its bytes begin in which storage."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            tensor = tensor.contiguous()
        key = (tensor.dtype, tensor.shape, tensor.stride())
        layout = self._known.get(key)
        if layout is None:
            stand_in = self._stand_ins.make((tensor.numel(),), tensor.dtype)
            strided = stand_in.as_strided(tensor.shape, tensor.stride())
            layout = self._known[key] = lay_out(strided)
        return layout, tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether all there is of it lies in one storage, as its strides say."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but its bytes, type, shape and strides."""
    return type(tensor.detach()) is torch.Tensor and is_dense(tensor)


def _saved(tensor: torch.Tensor) -> memoryview:
    """The archive of a tensor that only torch knows to save."""
    tensor = tensor.detach().cpu()
    has_one = tensor.layout is torch.strided and not tensor.is_nested
    if has_one and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # or it would be saved with all of its storage
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getbuffer()


class Entries:
    """Of an archive, as the directory names them."""

    def __init__(
        self, file: IO[bytes], entries: Sequence[zipfile.ZipInfo] = (), directory_offset: int = 0
    ) -> None:
        self._file = file
        self._entries = sorted(entries, key=lambda entry: entry.header_offset)
        self._offsets = [entry.header_offset for entry in self._entries]
        self._directory_offset = directory_offset

    def check(self, source: torch.Tensor, name: str) -> None:
        """Raise ValueError unless the storage of a tensor without memory is one of the entries."""
        storage = source.untyped_storage()
        if source.numel() == 0:  # of which nothing is read
            return
        offset, count = offset_of(storage), storage.nbytes()
        number = bisect.bisect_right(self._offsets, offset) - 1
        if number < 0 or not self._begins_at(number, offset):
            raise ValueError(
                f"the file does not have {name} where torch calculates it: the file is damaged, or"
                " another program has written it again; load it without into="
            )
        found = self._entries[number].file_size
        if found != count:
            raise ValueError(
                f"the file is damaged: it has {found} bytes for {name}, which takes {count}"
            )

    def _begins_at(self, number: int, offset: int) -> bool:
        """Whether the content of an entry does."""
        entry = self._entries[number]
        is_last = number + 1 == len(self._entries)
        end = self._directory_offset if is_last else self._offsets[number + 1]
        if entry.flag_bits & _HAS_DESCRIPTOR:
            is_large = max(entry.header_offset, entry.file_size) >= _UINT32_MAX
            end -= _DESCRIPTOR64_BYTES if is_large else _DESCRIPTOR_BYTES
        # As torch writes it: an entry ends where the next one begins, and no header must be read.
        return offset == end - entry.compress_size or offset == self._begin_by_header(entry)

    def _begin_by_header(self, entry: zipfile.ZipInfo) -> int:
        """Where the content begins; negative: there is no header."""
        self._file.seek(entry.header_offset)
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return -1
        *_, name_bytes, extra_bytes = _HEADER.unpack(header)
        return int(entry.header_offset + _HEADER.size + name_bytes + extra_bytes)


def check_archive(file: IO[bytes]) -> Entries:
    """Return an archive's entries.

    Raises ValueError of files in which tensors' bytes are not as memory has them.
    """
    entries = Entries(file)
    with contextlib.suppress(zipfile.BadZipFile):  # torch.load says so, or knows an old format
        archive = zipfile.ZipFile(file)
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("the file is compressed: load it without into=")
            if entry.filename.endswith("/byteorder"):
                order = archive.read(entry).decode()
                if order != sys.byteorder:
                    raise ValueError(f"the file is {order}-endian: load it without into=")
        entries = Entries(file, archive.infolist(), archive.start_dir)
    file.seek(0)
    return entries


def is_located(source: torch.Tensor) -> bool:
    """Whether torch.load has found where in the file a tensor without memory is."""
    return offset_of(source.untyped_storage()) >= 0


def offset_of(storage: Any) -> int:
    """Where torch.load has found a storage in the file; negative: it has not."""
    offset = getattr(storage, "_checkpoint_offset", None)
    return -1 if offset is None else int(offset)


__all__ = [
    "Archive",
    "Entries",
    "check_archive",
    "is_dense",
    "is_located",
    "is_plain",
    "lay_out_each",
    "offset_of",
]
