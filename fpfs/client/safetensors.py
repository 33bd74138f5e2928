"""Saves tensors as safetensors does: byte for byte the same file, written as `save` writes.

A JSON header says where each tensor is, and the tensors follow without gaps, so the file is laid
out before any tensor's bytes are moved. Hugging Face's libraries load a model from one such file,
or from shards and an index of them: https://huggingface.co/docs/safetensors

Concurrency: as `save`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import re
import stat
import time
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fpfs.client.agreement import LayOut
from fpfs.client.archives import is_plain
from fpfs.client.boxes import Box, Sharding
from fpfs.client.container import Container, Record, Text
from fpfs.client.paths import check_flag, resolve
from fpfs.client.peers import Alone, peers_of
from fpfs.client.replacement import remove_left
from fpfs.client.saving import Save, Saved
from fpfs.client.sharding import Sharded, is_dtensor, part_of
from fpfs.client.snapshot import reach
from fpfs.client.topology import TIMEOUT_S
from fpfs.core.temporary_names import target_of

if TYPE_CHECKING:
    import torch.distributed as dist

HEADER_BYTES_MAX = 100_000_000
"""safetensors reads no longer one."""
SHARING_WORK_MAX = 100_000
"""So much numpy tries to find an element that two tensors share; some milliseconds."""
PAIRS_MAX = 20_000
"""So many tensors that reach into each other are looked at; a tenth of a second."""
ALIGNMENT = 8
"""Of the first tensor's begin."""

_NAMES = {
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
    "F4": "float4_e2m1fn_x2",
    "BOOL": "bool",
}
"""Its types and torch's. In a file tensors are in this order, those of one type by their names."""
# Older versions of torch have not all.
TYPES = {
    getattr(torch, of_torch): name for name, of_torch in _NAMES.items() if hasattr(torch, of_torch)
}
_ORDER = {dtype: number for number, dtype in enumerate(TYPES)}


def save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    path: str | bytes | os.PathLike[Any],
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | None = None,
    group: dist.ProcessGroup | Alone | None = None,
    durable: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Saved:
    """Save `tensors` as safetensors' save_file does, faster, and whole or not at all.

    As `fpfs.save`, which tells of `group`, `durable`, `timeout_s`, and of what is promised.

    tensors: by their names. Those that are not contiguous become so in the file. A DTensor is saved
        whole, by the ranks of its mesh.
    metadata: texts for the file's header, rank 0's.
    max_shard_bytes: a model that is larger is divided over several files, as huggingface_hub does:
        beside `path` ("model.safetensors") lie model-00001-of-00002.safetensors and so on, and
        model.safetensors.index.json names them. All of them get their names when the last one is
        written, the index at last, and replace files and links; what was there of the model in
        other files is removed then. Whoever fails, is interrupted or killed between two of these
        names, or whose power is lost, leaves some of both: an atomic directory (docs/semantics.md)
        has one or the other. None: one file, and links are followed.

    Returns what was saved in all files; `path` is the index, if there is one.

    Raises what `fpfs.save` raises; TypeError of what are no names, tensors or texts, ValueError of
    tensors that safetensors has no type for, that are not dense, or that share memory.
    """
    started = time.monotonic()
    lay_out: LayOut = functools.partial(lay_out_safetensors, metadata=metadata)
    peers = peers_of(group, timeout_s=timeout_s, call="save_safetensors")
    with Save(peers) as steps:
        check_flag("durable", durable)
        # (content, path, how it is laid out), and what is done at the end.
        files: list[tuple[Any, str | bytes | os.PathLike[Any], LayOut]] = [(tensors, path, lay_out)]
        remove = None
        if max_shard_bytes is not None:
            _check_limit(max_shard_bytes)
            # What cannot be saved is told before it is divided.
            _items(tensors, whole=peers.is_group)
            model = _Model.at(path)
            divided = model.divide(tensors, max_shard_bytes)
            if peers.rank == 0:
                model.check_former([*divided, model.index_name])
            remove = functools.partial(model.remove_former, kept=divided)
            files = [
                (
                    content,
                    os.path.join(model.directory, name),
                    lay_out_text if name == model.index_name else lay_out,
                )
                for name, content in divided.items()
            ]
        for content, file, how in files:
            steps.agree(content, file, None, lay_out=how, follow=remove is None)
        laid_out = time.monotonic()
        finished = steps.write(durable=durable, then=remove)
    return finished.saved(
        steps.path, seconds=time.monotonic() - started, lay_out_s=laid_out - started
    )


class _Item(NamedTuple):
    """A tensor, and what this rank has of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    local: torch.Tensor
    sharding: Sharding | None
    """None: this rank has all of it."""
    box: Box

    @property
    def bytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


def lay_out_safetensors(
    tensors: Any, *, whole: bool = False, metadata: Mapping[str, str] | None = None
) -> Container:
    """Lay out the file of `tensors`, by their names; nothing of them is read.

    whole: DTensors become ordinary tensors in the file, of which each rank has a part.

    Raises TypeError of what are no names, tensors or texts, ValueError of tensors that the format
    does not know, or that share memory, which it does not keep.
    """
    items = _items(tensors, whole=whole)
    header: dict[str, Any] = {}
    if metadata is not None:
        header["__metadata__"] = _checked(metadata)
    begin = 0
    for item in items:
        shape = list(item.shape)
        if TYPES[item.dtype] == "F4":  # torch's element is two of the format's
            if not shape:
                raise ValueError(f"{item.name!r} of {item.dtype} has no dimension: unsqueeze() it")
            shape[-1] *= 2
        header[item.name] = {
            "dtype": TYPES[item.dtype],
            "shape": shape,
            "data_offsets": [begin, begin + item.bytes],
        }
        begin += item.bytes
    text = _encoded(header)
    parts: list[Text | Record] = [Text(0, len(text), 0)]
    at = len(text)
    for item in items:
        if item.bytes == 0:
            continue
        local = item.local.resolve_conj().resolve_neg().contiguous()
        sharded = None
        if item.sharding is not None:
            sharded = Sharded(item.name, item.sharding, item.box, local)
        start = local.storage_offset() * local.itemsize
        parts.append(Record(at, item.bytes, local.untyped_storage(), start, sharded))
        at += item.bytes
        parts.append(Text(at, 0, len(text)))
    return Container(
        bytes=at,
        text=text,
        parts=parts,
        crc_places={},
        tensors=[
            f"{item.name} {item.dtype} {item.shape}{' sharded' * (item.sharding is not None)}"
            for item in items
        ],
        lies=[],
    )


def lay_out_text(state: bytes, *, whole: bool = False) -> Container:
    """Lay out a file of `state` alone."""
    del whole
    text = bytearray(memoryview(state))  # of a number it would make so many zeros
    return Container(len(text), text, [Text(0, len(text), 0)], crc_places={}, tensors=[], lies=[])


def _items(tensors: Any, *, whole: bool) -> list[_Item]:
    """The tensors, in their order in the file. Raises as `lay_out_safetensors`."""
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"safetensors holds a dictionary of tensors, not a {type(tensors).__name__}: give a"
            " model's state_dict()"
        )
    items = [_item(name, tensor, whole=whole) for name, tensor in tensors.items()]
    _check_apart(items)
    return sorted(items, key=lambda item: (_ORDER[item.dtype], item.name))


def _item(name: Any, tensor: Any, *, whole: bool) -> _Item:
    if not isinstance(name, str) or name == "__metadata__":
        raise TypeError(f"{name!r} is no name that safetensors has: name each tensor by a text")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{name!r} is of type {type(tensor).__name__}: safetensors holds tensors alone; what"
            " else a checkpoint has, fpfs.save saves"
        )
    found = part_of(tensor, name) if whole else None
    sharding: Sharding | None
    if found is not None:
        sharding, box, local = found
    else:
        if is_dtensor(tensor):
            raise ValueError(
                f"{name!r} is a DTensor: let the ranks of its mesh save it together (group=)"
            )
        if not is_plain(tensor):
            kind = tensor.layout if type(tensor) is torch.Tensor else type(tensor).__name__
            raise ValueError(f"{name!r} is no dense tensor ({kind}): make it one, or use fpfs.save")
        if tensor.device.type == "meta":
            raise ValueError(f"{name!r} has no memory (it is on the device meta): leave it out")
        sharding, box, local = None, Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor
    if local.dtype not in TYPES:
        raise ValueError(
            f"{name!r} is of {local.dtype}, which safetensors has not: convert it, or use fpfs.save"
        )
    return _Item(name, local.dtype, tuple(tensor.shape), local.detach(), sharding, box)


def _check_apart(items: Iterable[_Item]) -> None:
    """Raise ValueError of tensors that share memory."""
    spans = []
    views = dict[tuple[Any, ...], str]()
    for item in items:
        local = item.local
        if local.numel() > 0:
            view = (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())
            if view in views:
                raise _shared(views[view], item.name)
            views[view] = item.name
            # As far as it reaches, with its gaps.
            begin = local.data_ptr()
            spans.append((str(local.device), begin, begin + reach(local), item))
    before: list[tuple[str, int, int, _Item]] = []
    pairs = 0
    for span in sorted(spans, key=lambda span: span[:3]):
        before = [each for each in before if each[0] == span[0] and span[1] < each[2]]
        pairs += len(before)
        # Of so many views of one tensor as this, what is shared is saved twice.
        for each in before if pairs < PAIRS_MAX else ():
            if _share_memory(each[3].local, span[3].local):
                raise _shared(each[3].name, span[3].name)
        before.append(span)


def _shared(one: str, other: str) -> ValueError:
    return ValueError(
        f"{one!r} and {other!r} share memory, which safetensors does not keep: leave one of them"
        " out, or save a clone() of it"
    )


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        # numpy's types know special values alone.
        work_max: Any = SHARING_WORK_MAX
        return np.shares_memory(_addresses(one), _addresses(other), max_work=work_max)
    except np.exceptions.TooHardError:
        return True


def _addresses(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Where its elements are, of whatever device; nobody looks there."""
    size = tensor.itemsize
    strides = tuple(stride * size for stride in tensor.stride())
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "typestr": f"|V{size}",
        "strides": strides,
        "data": (tensor.data_ptr(), True),
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def _checked(metadata: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(metadata, Mapping):
        raise TypeError(
            f"metadata is a {type(metadata).__name__}: give a dictionary of texts, or None"
        )
    found = dict(metadata)
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata has {key!r}: {value!r}: safetensors has texts alone there")
    return found


def _encoded(header: dict[str, Any]) -> bytearray:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a name or metadata is no UTF-8: {error}") from None
    content += b" " * (-len(content) % ALIGNMENT)
    if len(content) > HEADER_BYTES_MAX:
        raise ValueError(
            f"the header has {len(content)} bytes, and safetensors reads no more than"
            f" {HEADER_BYTES_MAX}: save fewer tensors in a file (max_shard_bytes=)"
        )
    return bytearray(len(content).to_bytes(8, "little") + content)


class _Model(NamedTuple):
    """The names that the files of one model have."""

    directory: str
    """Absolute, links followed; those of the files are not, which are replaced themselves."""
    base: str
    """Of the one file, or what the names of shards are made of."""

    @staticmethod
    def at(path: str | bytes | os.PathLike[Any]) -> _Model:
        """Of `path`. Raises what `resolve` raises, and IsADirectoryError of a name that is none."""
        resolve(path)
        directory, base = os.path.split(os.path.abspath(os.fsdecode(path)))
        if not base:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), directory)
        return _Model(os.path.realpath(directory), base)

    @property
    def index_name(self) -> str:
        """Says which tensor is in which shard."""
        return f"{self.base}.index.json"

    def divide(self, tensors: Mapping[str, Any], shard_bytes: int) -> dict[str, Any]:
        """What goes to which file, in order: tensors, and the index as bytes if there are several.

        As huggingface_hub divides: in order; a tensor that is larger has a file of its own, and all
        tensors without elements are where the first of them is.
        """
        full: list[dict[str, Any]] = []
        current: dict[str, Any] = {}
        empty: dict[str, Any] | None = None
        current_bytes = total_bytes = 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.itemsize
            if size == 0:
                empty = current if empty is None else empty
                empty[name] = tensor
                continue
            total_bytes += size
            if size > shard_bytes:
                full.append({name: tensor})
                continue
            if current_bytes + size > shard_bytes:
                full.append(current)
                current, current_bytes = {}, 0
            current[name] = tensor
            current_bytes += size
        full += [current] if current else []
        if len(full) <= 1:
            return {self.base: tensors}
        stem, ending = os.path.splitext(self.base)
        files: dict[str, Any] = {
            f"{stem}-{number:05d}-of-{len(full):05d}{ending}": shard
            for number, shard in enumerate(full, 1)
        }
        places = {name: file for file, shard in files.items() for name in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
        files[self.index_name] = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
        return files

    def has(self, name: str) -> bool:
        """Whether a file of that name is this model's, in one file or in many."""
        stem, ending = os.path.splitext(self.base)
        shard = rf"{re.escape(stem)}-[0-9]{{5}}-of-[0-9]{{5}}{re.escape(ending)}"
        return name in (self.base, self.index_name) or bool(re.fullmatch(shard, name, re.DOTALL))

    def check_former(self, names: Iterable[str]) -> None:
        """Raise OSError of what is no file that may be replaced or removed: in `names`, or former.

        Before anything is written.
        """
        folder, user = os.stat(self.directory), os.geteuid()
        others = folder.st_mode & stat.S_ISVTX and user not in (0, folder.st_uid)
        for name in {*names, *filter(self.has, os.listdir(self.directory))}:
            path = os.path.join(self.directory, name)
            try:
                found = os.lstat(path)
            except FileNotFoundError:
                continue
            mode = found.st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                raise OSError(errno.EINVAL, "not a regular file: remove it first", path)
            is_refused = stat.S_ISREG(mode) and not os.access(path, os.W_OK, effective_ids=True)
            # Another save may have removed it.
            if is_refused and os.path.lexists(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            if others and user != found.st_uid:
                raise PermissionError(errno.EPERM, "another user's, in a sticky directory", path)

    def remove_former(self, kept: Iterable[str]) -> None:
        """Remove the files that held the model before, and what killed saves of it have left."""
        former = set(filter(self.has, os.listdir(self.directory))).difference(kept)
        # The index first: it names the others.
        for name in sorted(former, key=lambda name: name != self.index_name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory, name))

        def is_left(found: bytes) -> bool:
            target = target_of(found)
            return target is not None and self.has(os.fsdecode(target))

        remove_left(os.path.join(self.directory, self.base), of=is_left)


def _check_limit(max_shard_bytes: Any) -> None:
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes!r}: give a number of bytes")


__all__ = ["lay_out_safetensors", "save_safetensors"]
