"""Work counted instead of timed: how it grows can be tested on any machine, however busy it is."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Work:
    """What was counted so far."""

    def __init__(self) -> None:
        self.count = 0


@contextlib.contextmanager
def lines_run() -> Iterator[Work]:
    """Count the lines of Python that what is called here runs, each turn of a loop anew."""
    work = Work()

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        work.count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield work
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def steps_of_sqlite(connection: sqlite3.Connection) -> Iterator[Work]:
    """Count the instructions that SQLite carries out on a connection."""
    work = Work()

    def step() -> int:
        work.count += 1
        return 0

    connection.set_progress_handler(step, 1)
    try:
        yield work
    finally:
        connection.set_progress_handler(None, 0)
