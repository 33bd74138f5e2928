"""The recorder's log as operations and events: what was asked of the device directories, in order.

`native/recorder/log.h` defines the log. An operation begins and ends; both are events, and the
order of events is the order of the log, over all processes. A cut is a number of events: those
before it have happened.

Concurrency: a log is read when nobody writes it any more.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fpfs.testing.mounted import REPOSITORY

MAGIC = 0x474F4C4352465046
FIRST_RECORD = 4096
LOG_BYTES = 4 << 30
"""Room in a log; the file is sparse."""

_HEAD = struct.Struct("<QQQ")
_RECORD = struct.Struct("<IHHQQQQQIIII")


class Kind(enum.IntEnum):
    """What an operation does; its fields as in log.h."""

    END = 0
    CREATE = 1
    MAKE_FOLDER = 2
    LINK = 3
    RENAME = 4
    REMOVE = 5
    REMOVE_FOLDER = 6
    WRITE = 7
    TRUNCATE = 8
    ALLOCATE = 9
    SYNC_FILE = 10
    SYNC_FOLDER = 11
    MARK = 12
    UNKNOWN = 13


class Operation:
    """One operation. `begin` and `end` are numbers of events; `end` is 0 if it never ended."""

    __slots__ = (
        "begin", "count", "data", "end", "file", "kind", "mode", "offset", "other", "path",
        "result", "time_ns",
    )  # fmt: skip

    def __init__(self, kind: Kind, *, begin: int, file: int, time_ns: int) -> None:
        """An operation that has begun."""
        self.kind = kind
        self.begin = begin
        self.end = 0
        self.result = 0
        self.file = file
        self.time_ns = time_ns
        self.offset = 0
        """Of a write or an allocation; the size of a truncation."""
        self.count = 0
        self.mode = 0
        self.path = ""
        self.other = ""
        self.data = memoryview(b"")

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.result < 0

    def __repr__(self) -> str:
        """For reports of violations."""
        what = f"{self.kind.name} {self.path or self.file}"
        return f"{what} {self.offset}+{self.count} [{self.begin}, {self.end or '-'})"


class Event(NamedTuple):
    """An operation begins, or ends."""

    operation: Operation
    is_end: bool
    time_ns: int


class Recording(NamedTuple):
    """Everything that was recorded."""

    events: list[Event]


class BadRecording(AssertionError):
    """The log cannot be replayed: something was done that no replay knows, or it is not whole."""


def make_log(path: Path) -> None:
    """Make an empty log."""
    with path.open("wb") as file:
        file.truncate(LOG_BYTES)
        file.write(_HEAD.pack(MAGIC, LOG_BYTES, FIRST_RECORD))


def read_log(path: Path) -> Recording:
    """Read a log. Raises `BadRecording`."""
    with path.open("rb") as file:
        _magic, size, tail = _HEAD.unpack(file.read(_HEAD.size))
        if tail > size:
            raise BadRecording(f"the log was full: {tail} bytes were needed")
        view = memoryview(mmap.mmap(file.fileno(), tail, prot=mmap.PROT_READ))
    events: list[Event] = []
    by_place: dict[int, Operation] = {}
    place = FIRST_RECORD
    while place < tail:
        length = _take(view, place, events, by_place)
        place += length
    return Recording(events)


def _take(view: memoryview, place: int, events: list[Event], by_place: dict[int, Operation]) -> int:
    """Append the event of one record; returns the record's length."""
    (
        length, kind, written, begin, file, a, b, time_ns, mode,
        path_bytes, other_bytes, data_bytes,
    ) = _RECORD.unpack_from(view, place)  # fmt: skip
    if not length:
        raise BadRecording(f"a process was killed between two instructions, at {place}")
    if not written:
        # It was killed before it had asked for what this is about, or seen the result.
        return int(length)
    if kind == Kind.END:
        operation = by_place.pop(begin)
        operation.end = len(events)
        operation.result = a - (1 << 64) if a >> 63 else a
        operation.file = operation.file or file
        events.append(Event(operation, True, time_ns))
        return int(length)
    operation = Operation(Kind(kind), begin=len(events), file=file, time_ns=time_ns)
    operation.offset, operation.count, operation.mode = a, b, mode
    start = place + _RECORD.size
    operation.path = str(view[start : start + path_bytes], "utf-8")
    start += path_bytes
    operation.other = str(view[start : start + other_bytes], "utf-8")
    start += other_bytes
    operation.data = view[start : start + data_bytes]
    if operation.kind is Kind.UNKNOWN:
        raise BadRecording(f"{operation.path} of {operation.other} cannot be replayed")
    by_place[place] = operation
    events.append(Event(operation, False, time_ns))
    return int(length)


def recorder_library(name: str = "recorder") -> Path:
    """Build a library to be preloaded where it is missing or old; returns its path."""
    build = REPOSITORY / "build" / "recorder"
    build.parent.mkdir(exist_ok=True)
    tools = Path(sys.executable).parent
    configure: list[str | Path] = [
        tools / "cmake", "-S", REPOSITORY / "native", "-B", build, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DFPFS_TESTS=OFF", "-DFPFS_RECORDER=ON",
    ]  # fmt: skip
    with (build.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make: list[str | Path] = [tools / "cmake", "--build", build, "--target", f"fpfs_{name}"]
        for command in (configure, make):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (
                f"the {name} library does not build\n{done.stdout}{done.stderr}"
            )
    return build / name / f"libfpfs_{name}.so"


def recording_environment(log: Path, folders: list[Path]) -> dict[str, str]:
    """What makes a process record into `log` what it does in `folders`."""
    return {
        "LD_PRELOAD": str(recorder_library()),
        "FPFS_RECORD_LOG": str(log),
        "FPFS_RECORD_FOLDERS": ":".join(os.path.realpath(folder) for folder in folders),
    }
