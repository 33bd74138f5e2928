"""What a trace of one save tells: requests, chunks, device transfers and commit steps, with times.

All times are nanoseconds by ``time.monotonic_ns()`` of the machine that serves the mount.
"""

from __future__ import annotations

import enum

import msgspec


class TraceState(enum.StrEnum):
    """How far the traced save is."""

    WAITING = "waiting"
    """Nobody has opened the file for writing since the trace began."""
    OPEN = "open"
    """It is open for writing."""
    CLOSED = "closed"
    """It is closed, and not durable yet."""
    DURABLE = "durable"
    QUARANTINED = "quarantined"
    """Its writer was killed: what it wrote is in .fpfs/partial."""
    NOT_KEPT = "not kept"
    """Its bytes could be kept on no device, or the catalog failed."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens to the save."""
        return self in (TraceState.DURABLE, TraceState.QUARANTINED, TraceState.NOT_KEPT)


class EventKind(enum.IntEnum):
    """As in native/src/base/tracer.h, where the times of each kind are named."""

    REQUEST = 1
    CHUNK = 2
    TRANSFER = 3


class TransferKind(enum.IntEnum):
    """As `IoOp` in native/src/device/device.h; the others are not traced."""

    READ = 0
    WRITE = 1
    FLUSH = 2


class TraceEvent(msgspec.Struct, frozen=True, array_like=True):
    """What the engine saw.

    `op` is the `TransferKind` of a transfer, `detail` the FUSE operation of a request and the slot
    of a chunk, `errno` 0 or why it failed. `offset` and `length` are bytes in the file. The times
    are, of a request: received, answered; of a chunk: opened, sealed, issued, done; of a transfer:
    submitted, issued to the kernel, completed. Those that a kind has not are 0.
    """

    kind: EventKind
    op: int
    device: int
    detail: int
    errno: int
    offset: int
    length: int
    first_ns: int
    second_ns: int
    third_ns: int
    fourth_ns: int


class CommitStep(msgspec.Struct, frozen=True, array_like=True):
    """A step of a commit of the traced file: its name, begin and end."""

    name: str
    began_ns: int
    ended_ns: int


class TraceBegun(msgspec.Struct, frozen=True, kw_only=True):
    """A trace waits for its save; `trace` names it. It ends when it is not read for `lease_s`."""

    trace: int
    lease_s: float


class TraceRead(msgspec.Struct, frozen=True, kw_only=True):
    """What happened since the last answer; with `has_more` there is more at once.

    `opened_ns` and `ended_ns` are 0 until then; `ended_ns` is when the save was seen to be over.
    `lost` counts events that found no room, in all.
    """

    state: TraceState
    has_more: bool = False
    opened_ns: int = 0
    ended_ns: int = 0
    lost: int = 0
    events: tuple[TraceEvent, ...] = ()
    steps: tuple[CommitStep, ...] = ()
    device_paths: dict[int, str] = {}
