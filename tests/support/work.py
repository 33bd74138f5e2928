"""Work counted instead of timed: how it grows can be tested on any machine, however busy it is."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fpfs.daemon.catalog_worker import Transaction


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
def steps_of_sqlite(transaction: Transaction) -> Iterator[Work]:
    """Count the instructions that SQLite carries out for a transaction."""
    work = Work()

    def step() -> int:
        work.count += 1
        return 0

    connection = transaction.execute.__self__  # type: ignore[attr-defined]
    assert isinstance(connection, sqlite3.Connection)
    connection.set_progress_handler(step, 1)
    try:
        yield work
    finally:
        connection.set_progress_handler(None, 0)
