"""Single calls that fail below a mount: the control page of `native/faults`.

Concurrency: the processes of a mount share the page; the test alone sets it.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

from tests.crash.power.recording import recorder_library

_HEAD = struct.Struct("<IIQiI")
_COUNT = struct.Struct("<Q")
PAGE_BYTES = 4096
SHORT = 0
"""Instead of an errno: a part of what was asked for is done."""


class Call(enum.IntEnum):
    """What is counted and may fail, as in native/faults/control.h."""

    RING_WRITE = 1
    RING_FLUSH = 2
    RING_READ = 3
    ALLOCATE = 4
    CREATE = 5
    FOLDER_FLUSH = 6
    CATALOG_WRITE = 7
    CATALOG_FLUSH = 8
    TRUNCATE = 9
    REMOVE = 10
    READ = 11


ERRORS = {
    Call.RING_WRITE: (errno.EIO, errno.ENOSPC, SHORT),
    Call.RING_FLUSH: (errno.EIO, errno.ENOSPC),
    Call.RING_READ: (errno.EIO, SHORT),
    Call.ALLOCATE: (errno.EIO, errno.ENOSPC),
    Call.CREATE: (errno.EIO, errno.ENOSPC),
    Call.FOLDER_FLUSH: (errno.EIO,),
    Call.CATALOG_WRITE: (errno.EIO, errno.ENOSPC, SHORT),
    Call.CATALOG_FLUSH: (errno.EIO, errno.ENOSPC),
    Call.TRUNCATE: (errno.EIO,),
    Call.REMOVE: (errno.EIO,),
    Call.READ: (errno.EIO, errno.EINVAL),
}
"""What each call may come to."""


class Fault(NamedTuple):
    """The `number`-th of some calls (1 is the first) ends with `error`, or does a part."""

    call: Call
    number: int
    error: int

    def __str__(self) -> str:
        """For reports."""
        what = "short" if self.error == SHORT else errno.errorcode[self.error]
        return f"{self.call.name.lower()}:{self.number}:{what}"


class Injector:
    """The page; a mount that is started with `environment` obeys it."""

    def __init__(self, path: Path) -> None:
        """Make a page that lets nothing fail."""
        path.write_bytes(bytes(PAGE_BYTES))
        self._path = path
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES)

    def environment(self, folders: list[Path]) -> dict[str, str]:
        """What makes the servers of a mount obey, for what they do in `folders`."""
        return {
            "LD_PRELOAD": str(recorder_library("faults")),
            "FPFS_FAULTS": str(self._path),
            "FPFS_RECORD_FOLDERS": ":".join(os.path.realpath(folder) for folder in folders),
        }

    def begin(self, fault: Fault | None = None) -> None:
        """Count from now on, and let one call fail."""
        self._page[:] = bytes(PAGE_BYTES)
        if fault is not None:
            _HEAD.pack_into(self._page, 0, 0, fault.call, fault.number, fault.error, 0)
        struct.pack_into("<I", self._page, 0, 1)

    def end(self) -> bool:
        """Let nothing fail any more; returns whether something did."""
        struct.pack_into("<I", self._page, 0, 0)
        return bool(_HEAD.unpack_from(self._page)[4])

    def counts(self) -> dict[Call, int]:
        """How many calls there were since the beginning."""
        at = _HEAD.size
        return {call: _COUNT.unpack_from(self._page, at + 8 * call)[0] for call in Call}
