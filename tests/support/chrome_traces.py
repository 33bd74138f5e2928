"""The rules of Chrome's trace format, and what a trace says."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

METADATA = {"process_name": "name", "process_sort_index": "sort_index"}


class Span(NamedTuple):
    """A complete event."""

    began_us: float
    ended_us: float
    name: str
    category: str
    pid: int
    about: dict[str, Any]


def check_format(document: dict[str, Any]) -> None:
    """Fail unless a document keeps the rules: known phases, their fields, spans that nest."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    named = set()
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                assert set(event["args"]) == {METADATA[event["name"]]}
                named.add(event["pid"])
            case "X":
                assert math.isfinite(event["ts"])
                assert event["dur"] >= 0
                assert event["cat"]
                begin = event["ts"]
                by_thread[event["pid"], event["tid"]].append((begin, -event["dur"]))
            case "C":
                assert all(value >= 0 for value in event["args"].values())
                assert event["args"]
            case phase:
                raise AssertionError(f"unknown phase {phase}")
    assert {pid for pid, _ in by_thread} <= named
    for spans in by_thread.values():
        check_nesting(sorted(spans))


def check_nesting(spans: list[tuple[float, float]]) -> None:
    """Fail where one begins within another and outlives it; by begin, the longest first."""
    epsilon_us = 1e-3  # a nanosecond is lost in adding doubles
    open_until: list[float] = []
    for begin, minus_length in spans:
        end = begin - minus_length
        while open_until and open_until[-1] <= begin + epsilon_us:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + epsilon_us
        open_until.append(end)


def spans_of(document: dict[str, Any], category: str) -> list[Span]:
    """The complete events of a category, in the order of their begins."""
    found = [
        Span(
            event["ts"],
            event["ts"] + event["dur"],
            event["name"],
            event["cat"],
            event["pid"],
            event["args"],
        )
        for event in document["traceEvents"]
        if event["ph"] == "X" and event["cat"] == category
    ]
    return sorted(found, key=lambda span: span[:2])


def most_at_once(spans: list[Span]) -> int:
    """How many of these lasted at one moment, at most."""
    changes = sorted(
        change for span in spans for change in ((span.began_us, 1), (span.ended_us, -1))
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
