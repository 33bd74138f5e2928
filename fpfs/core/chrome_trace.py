"""A trace of one save in the format of Chrome's tracing, which ui.perfetto.dev reads, too.

The format is Google's "Trace Event Format". Its complete events (X) of one thread must nest, so
what overlaps gets lanes, which are the threads here: the lowest lane of its group that is free. The
lanes of a device are its queue, so to say. Times are microseconds from the opening of the file.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fpfs.core.protocol.trace import CommitStep, EventKind, TraceEvent, TransferKind

Event = dict[str, Any]

REQUESTS_PID, CHUNKS_PID, COMMIT_PID, DEVICE_PID = 1, 2, 3, 10
"""The groups, as processes; device N is DEVICE_PID + N."""

FUSE_NAMES = {
    1: "LOOKUP", 3: "GETATTR", 4: "SETATTR", 14: "OPEN", 15: "READ", 16: "WRITE", 18: "RELEASE",
    20: "FSYNC", 21: "SETXATTR", 22: "GETXATTR", 23: "LISTXATTR", 24: "REMOVEXATTR", 25: "FLUSH",
    31: "GETLK", 32: "SETLK", 33: "SETLKW", 34: "ACCESS", 39: "IOCTL", 40: "POLL",
    43: "FALLOCATE", 46: "LSEEK", 47: "COPY_FILE_RANGE", 52: "STATX",
}  # fmt: skip
"""Operations by their numbers in <linux/fuse.h>, as far as a file has them."""


class Traced(msgspec.Struct, kw_only=True):
    """All that was read of one trace."""

    path: str
    opened_ns: int
    ended_ns: int
    state: str
    lost: int
    device_paths: Mapping[int, str]
    events: list[TraceEvent] = []
    steps: list[CommitStep] = []


class _Span(NamedTuple):
    """Something that lasts, with what it consists of."""

    began_ns: int
    ended_ns: int
    name: str
    category: str
    about: Mapping[str, object]
    parts: Sequence[tuple[str, int, int]] = ()


def chrome_trace(traced: Traced) -> Event:
    """The whole document, ready to be encoded as JSON."""
    groups: dict[int, list[_Span]] = defaultdict(list)
    for event in traced.events:
        pid, span = _span_of(event)
        groups[pid].append(span)
    groups[COMMIT_PID] += [
        _Span(step.began_ns, step.ended_ns, step.name, "commit", {}) for step in traced.steps
    ]
    groups[COMMIT_PID].append(
        _Span(traced.opened_ns, traced.ended_ns, f"save of {traced.path}", "save", {})
    )
    events: list[Event] = []
    for pid, spans in sorted(groups.items()):
        events += _named(pid, _group_name(pid, traced.device_paths))
        events += _laid_out(pid, spans, zero_ns=traced.opened_ns)
        if pid >= DEVICE_PID:
            events += _in_flight(pid, spans, zero_ns=traced.opened_ns)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"file": traced.path, "state": traced.state, "events_lost": traced.lost},
    }


def _span_of(event: TraceEvent) -> tuple[int, _Span]:
    """The group and the span of an event."""
    about: dict[str, object] = {"offset": event.offset, "length": event.length}
    if event.errno:
        about["errno"] = event.errno
    match event.kind:
        case EventKind.REQUEST:
            name = FUSE_NAMES.get(event.detail, f"operation {event.detail}")
            return REQUESTS_PID, _Span(event.first_ns, event.second_ns, name, "request", about)
        case EventKind.CHUNK:
            about |= {"slot": event.detail, "device": event.device}
            parts = [
                ("filling", event.first_ns, event.second_ns),
                ("sealed", event.second_ns, event.third_ns),
                ("writing", event.third_ns, event.fourth_ns),
            ]
            return CHUNKS_PID, _Span(
                event.first_ns, event.fourth_ns, f"chunk at {event.offset}", "chunk", about, parts
            )
        case EventKind.TRANSFER:
            about["device"] = event.device
            parts = [
                ("queued", event.first_ns, event.second_ns),
                ("in flight", event.second_ns, event.third_ns),
            ]
            name = TransferKind(event.op).name.lower()
            return DEVICE_PID + event.device, _Span(
                event.first_ns, event.third_ns, name, "transfer", about, parts
            )


def _group_name(pid: int, device_paths: Mapping[int, str]) -> str:
    names = {REQUESTS_PID: "requests", CHUNKS_PID: "chunks in staging", COMMIT_PID: "commit"}
    if pid in names:
        return names[pid]
    number = pid - DEVICE_PID
    return f"device {number} ({device_paths.get(number, 'unknown')})"


def _named(pid: int, name: str) -> list[Event]:
    about: dict[str, dict[str, object]] = {
        "process_name": {"name": name},
        "process_sort_index": {"sort_index": pid},
    }
    return [
        {"ph": "M", "pid": pid, "tid": 0, "name": what, "args": told}
        for what, told in about.items()
    ]


def _laid_out(pid: int, spans: Iterable[_Span], *, zero_ns: int) -> list[Event]:
    """The spans of a group on lanes, on each of which one ends before the next begins."""
    events: list[Event] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    lanes = 0
    for span in sorted(spans, key=lambda span: (span.began_ns, span.ended_ns)):
        while busy and busy[0][0] <= span.began_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lanes += 1
            lane = lanes
        # One that takes no time still keeps the next from the same place.
        heapq.heappush(busy, (max(span.ended_ns, span.began_ns + 1), lane))
        events.append(_complete(pid, lane, span.name, span, span.began_ns, span.ended_ns, zero_ns))
        for name, began_ns, ended_ns in span.parts:
            events.append(_complete(pid, lane, name, span, began_ns, ended_ns, zero_ns))
    return events


def _complete(
    pid: int, lane: int, name: str, span: _Span, began_ns: int, ended_ns: int, zero_ns: int
) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": lane,
        "name": name,
        "cat": span.category if name == span.name else f"{span.category} part",
        "ts": (began_ns - zero_ns) / 1000,
        "dur": (ended_ns - began_ns) / 1000,
        "args": dict(span.about),
    }


def _in_flight(pid: int, spans: Iterable[_Span], *, zero_ns: int) -> list[Event]:
    """How many requests the kernel works on, whenever that changes."""
    changes: dict[int, int] = defaultdict(int)
    for span in spans:
        for name, began_ns, ended_ns in span.parts:
            if name == "in flight":
                changes[began_ns] += 1
                changes[ended_ns] -= 1
    events: list[Event] = []
    count = 0
    for time_ns, change in sorted(changes.items()):
        count += change
        events.append(
            {
                "ph": "C",
                "pid": pid,
                "tid": 0,
                "name": "in flight",
                "ts": (time_ns - zero_ns) / 1000,
                "args": {"requests": count},
            }
        )
    return events
