"""Where a torch.save file holds its storages, and in which order torch.load asks for them.

Nothing that the file names is imported or called to find out.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from typing import IO, Any, NamedTuple

_LOCAL_HEADER = struct.Struct("<26x2H")
_LOCAL_HEADER_BYTES = 30
_UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    AttributeError,
    EOFError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    UnicodeDecodeError,
    ValueError,
)
"""What a pickle may raise that is damaged, or does with objects what `_Anything` cannot."""


class Stored(NamedTuple):
    """The bytes of one storage in the file."""

    offset: int
    bytes: int


def find_storages(file: IO[bytes]) -> list[Stored] | None:
    """Storages of some bytes, in the order of their first use in the pickle.

    None: the file is not as torch.save writes it, and its bytes are not simply there.
    """
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile:
        return None
    size = file.seek(0, io.SEEK_END)
    with archive:
        names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "data.pkl" not in names or "constants.pkl" in names:
            return None
        if "byteorder" in names:
            if archive.read(names["byteorder"]) != sys.byteorder.encode():
                return None
        elif sys.byteorder != "little":
            return None
        found = []
        try:
            keys = _keys(archive.read(names["data.pkl"]))
        except _UNREADABLE:
            return None  # torch.load says what is wrong with it
        for key in keys:
            info = names.get(f"data/{key}")
            if info is None or info.compress_type != zipfile.ZIP_STORED:
                return None
            if info.file_size > 0:
                found.append(Stored(_offset(file, info), info.file_size))
                if found[-1].offset + info.file_size > size:
                    return None
    return found


def _offset(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER_BYTES))
    return info.header_offset + _LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)


def _keys(pickled: bytes) -> list[str]:
    """Keys of storages, each once, in the order of their first use."""
    reader = _KeyReader(io.BytesIO(pickled))
    reader.load()
    return list(reader.keys)


class _Anything:
    """Stands for every class, function and object that a pickle names."""

    def __new__(cls, *_: Any, **__: Any) -> _Anything:
        return super().__new__(cls)

    def __call__(self, *_: Any, **__: Any) -> _Anything:
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass

    def add(self, _: Any) -> None:
        pass


class _KeyReader(pickle.Unpickler):
    """Goes through a pickle for the storages that it names; makes nothing else."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.keys: dict[str, None] = {}

    def find_class(self, _: str, __: str) -> Any:
        return _Anything

    def persistent_load(self, saved: Any) -> Any:
        if isinstance(saved, tuple) and len(saved) == 5 and saved[0] == "storage":
            self.keys[str(saved[2])] = None
        return _Anything()
