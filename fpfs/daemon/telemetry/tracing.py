"""Tracing one save of one file: waits for its next writer, then gathers what happens to its bytes.

The engine keeps its events in a ring of fixed size, the commit module its steps; a client takes
both in answers of bounded size, and so often that neither fills up.

Invariants:
  * One trace at a time. It ends when its save is over, when it is told to, and when nobody has
    asked for it for LEASE_S: a client that dies leaves nothing that costs.

Concurrency: trio thread only.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from fpfs.core.errors import BusyFile, NoSuchEntry
from fpfs.core.protocol.questions import BeginTrace, EndTrace, ReadTrace
from fpfs.core.protocol.reports import Flushed
from fpfs.core.protocol.trace import CommitStep, TraceBegun, TraceEvent, TraceRead, TraceState
from fpfs.core.temporary_names import is_temporary
from fpfs.daemon.catalog.rows.dirents import first_name, look_up
from fpfs.daemon.commit.lag import StepKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fpfs.core.engine import Engine
    from fpfs.core.protocol.questions import Handler, Question
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.inodes.table import Inode
    from fpfs.daemon.names.namespace import Namespace

LEASE_S = 30.0
READ_S = 0.1
"""How long an answer waits for something to tell."""
LOOKS = 10
"""How often it looks meanwhile."""
EVENTS_MAX = 4096
"""Events in one answer."""


class _Trace:
    """One trace: which name it is of, and how far it is."""

    def __init__(self, number: int, directory: int, name: bytes) -> None:
        self.number = number
        self.directory = directory
        self.name = name
        self.ino = 0
        self.opened_ns = 0
        self.ended_ns = 0
        self.state = TraceState.WAITING
        self.has_more = False
        self.asked_s = trio.current_time()

    def is_of(self, transaction: Transaction, ino: int) -> bool:
        """Whether an inode has the name, or one that fpfs.save gives what will have it."""
        row = look_up(transaction, self.directory, self.name)
        if row is not None and row.ino == ino:
            return True
        first = first_name(transaction, ino)
        return (
            first is not None and first[0] == self.directory and is_temporary(first[1], self.name)
        )


class Tracing:
    """The trace that runs, if one does."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        namespace: Namespace,
        commit: Commit,
        device_paths: Callable[[], Mapping[int, str]],
    ) -> None:
        """Follow who opens files for writing, from now on."""
        self._catalog = catalog
        self._engine = engine
        self._namespace = namespace
        self._commit = commit
        self._device_paths = device_paths
        self._numbers = itertools.count(1)
        self._trace: _Trace | None = None
        self._begun = trio.Event()
        namespace.files.on_writer(self._opened)

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers each question."""
        return {BeginTrace: self.begin, ReadTrace: self.read, EndTrace: self.end}

    async def run(self) -> None:
        """End traces that nobody asks for any more, until cancelled."""
        while True:
            if self._trace is None:
                self._begun = trio.Event()
                await self._begun.wait()
            elif (left_s := self._trace.asked_s + LEASE_S - trio.current_time()) > 0:
                await trio.sleep(left_s)
            else:
                self._stop()

    async def begin(self, question: BeginTrace) -> TraceBegun:
        """Wait for the next writer of a name, which need not exist. Raises `BusyFile`."""
        if self._trace is not None:
            raise BusyFile("somebody traces a file of this mount already: one can be at a time")
        self._trace = _Trace(next(self._numbers), question.directory, question.name)
        self._begun.set()
        return TraceBegun(trace=self._trace.number, lease_s=LEASE_S)

    async def end(self, question: EndTrace) -> Flushed:
        """Stop a trace; what was not read is gone."""
        if self._trace is not None and self._trace.number == question.trace:
            self._stop()
        return Flushed()

    async def read(self, question: ReadTrace) -> TraceRead:
        """Return what happened since the last answer. Raises `NoSuchEntry` for one that is over."""
        trace = self._found(question.trace)
        trace.asked_s = trio.current_time()
        await self._wait_for_news(trace)
        trace = self._found(question.trace)
        tracer = self._engine.tracer()
        found = tracer.take(EVENTS_MAX)
        steps = self._commit.steps.take()
        told = TraceRead(
            state=trace.state,
            has_more=len(found) == EVENTS_MAX,
            opened_ns=trace.opened_ns,
            ended_ns=trace.ended_ns,
            lost=tracer.lost() + self._commit.steps.lost,
            events=msgspec.convert(found, tuple[TraceEvent, ...]),
            steps=tuple(CommitStep(str(kind), began, ended) for kind, began, ended in steps),
            device_paths=dict(self._device_paths()),
        )
        trace.has_more = told.has_more
        trace.asked_s = trio.current_time()
        if trace.state.is_over and not told.has_more:
            self._stop()
        return told

    async def _wait_for_news(self, trace: _Trace) -> None:
        """Wait for another state, a moment long; not where there is something to tell already."""
        state = trace.state
        for _ in range(LOOKS):
            if self._look(trace) is not state or trace.has_more:
                return
            await trio.sleep(READ_S / LOOKS)

    def _found(self, number: int) -> _Trace:
        if self._trace is None or self._trace.number != number:
            raise NoSuchEntry("this trace is over: the server was replaced, or nobody asked for it")
        return self._trace

    async def _opened(self, inode: Inode) -> None:
        """Begin to trace, if this is the file that a trace waits for."""
        trace = self._trace
        if trace is None or trace.ino:
            return
        is_it = await self._catalog.read(lambda t: trace.is_of(t, inode.ino))
        if not is_it or self._trace is not trace or trace.ino:
            return
        trace.ino = inode.ino
        trace.opened_ns = time.monotonic_ns()
        trace.state = TraceState.OPEN
        self._commit.steps.watch(inode.ino)
        self._engine.tracer().start(inode.ino)

    def _look(self, trace: _Trace) -> TraceState:
        """How far the save is now."""
        self._namespace.catch_up()
        if trace.ino and not trace.state.is_over:
            trace.state = self._state_of(trace.ino)
            if trace.state.is_over:
                trace.ended_ns = time.monotonic_ns()
                self._engine.tracer().stop()
        return trace.state

    def _state_of(self, ino: int) -> TraceState:
        if any(inode.ino == ino for inode in self._namespace.files.written()):
            return TraceState.OPEN
        if ino in self._commit.queued() or self._commit.durability.is_waiting(ino):
            return TraceState.CLOSED
        if any(failure.ino == ino for failure in self._commit.statistics().failures):
            return TraceState.NOT_KEPT
        if self._commit.steps.last is StepKind.QUARANTINED:
            return TraceState.QUARANTINED
        return TraceState.DURABLE

    def _stop(self) -> None:
        self._engine.tracer().stop()
        self._commit.steps.watch(0)
        self._trace = None
