"""A trace of one save: when it begins and ends, and the document that is made of it."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given

from fpfs.core.chrome_trace import Traced, chrome_trace
from fpfs.core.errors import BusyFile, NoSuchEntry
from fpfs.core.protocol.questions import BeginTrace, EndTrace, ReadTrace
from fpfs.core.protocol.trace import CommitStep, EventKind, TraceEvent, TraceRead, TraceState
from fpfs.daemon.telemetry.tracing import LEASE_S, Tracing
from tests.support.catalog.rig import LARGE, ROOT, Rig, rig
from tests.support.chrome_traces import check_format, spans_of


@asynccontextmanager
async def tracing(
    folder: Path, *, durable_within_s: float = 10_000
) -> AsyncIterator[tuple[Rig, Tracing]]:
    """A mount whose saves can be traced; nothing becomes durable by itself."""
    async with (
        rig(folder, durable_within_s=durable_within_s) as mount,
        trio.open_nursery() as nursery,
    ):
        made = Tracing(
            catalog=mount.catalog,
            engine=mount.engine,
            namespace=mount.namespace,
            commit=mount.commit,
            device_paths=lambda: {0: "/a"},
        )
        nursery.start_soon(made.run)
        yield mount, made
        nursery.cancel_scope.cancel()


async def begin(made: Tracing, name: bytes = b"file") -> int:
    return (await made.begin(BeginTrace(directory=ROOT, name=name))).trace


async def read(made: Tracing, trace: int) -> TraceRead:
    return await made.read(ReadTrace(trace=trace))


@trio.testing.trio_test
async def test_a_trace_follows_a_save_until_it_is_durable(tmp_path: Path) -> None:
    async with tracing(tmp_path) as (mount, made):
        trace = await begin(made)
        other = await mount.create("other")
        assert (await read(made, trace)).state is TraceState.WAITING
        handle = await mount.create("file")
        inode = await mount.resolve("file")
        opened = await read(made, trace)
        assert opened.state is TraceState.OPEN
        assert opened.opened_ns > 0
        assert mount.engine.tracer().take(1) == []
        mount.engine.write(handle, 0, bytes(LARGE))
        mount.engine.write(other, 0, bytes(LARGE))
        mount.namespace.files.release(other)
        mount.namespace.files.release(handle)
        await mount.commit.wait_queued()
        closed = await read(made, trace)
        assert closed.state is TraceState.CLOSED
        assert [step.name for step in closed.steps] == ["drain", "transaction"]
        assert closed.ended_ns == 0
        await mount.catalog.make_durable()
        durable = await read(made, trace)
        assert durable.state is TraceState.DURABLE
        assert [step.name for step in durable.steps] == ["log flush"]
        assert durable.ended_ns > opened.opened_ns
        assert durable.lost == 0
        assert durable.device_paths == {0: "/a"}
        with pytest.raises(NoSuchEntry):
            await read(made, trace)
        assert inode.ino not in mount.commit.queued()


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR | os.O_TRUNC])
@trio.testing.trio_test
async def test_a_file_that_exists_is_traced_when_it_is_opened_again(
    flags: int, tmp_path: Path
) -> None:
    async with tracing(tmp_path) as (mount, made):
        handle = await mount.create("file")  # who writes already is not the next save
        trace = await begin(made)
        other = await mount.create("other")
        reader = await mount.open("file", flags=os.O_RDONLY)
        assert (await read(made, trace)).state is TraceState.WAITING
        again = await mount.open("file", flags=flags)
        assert (await read(made, trace)).state is TraceState.OPEN
        for each in (handle, again, reader, other):
            mount.namespace.files.release(each)
        await mount.commit.make_names_durable()
        assert (await read(made, trace)).state is TraceState.DURABLE


@trio.testing.trio_test
async def test_one_trace_at_a_time(tmp_path: Path) -> None:
    async with tracing(tmp_path) as (_, made):
        first = await begin(made)
        with pytest.raises(BusyFile):
            await begin(made, b"other")
        await made.end(EndTrace(trace=first + 1))  # not this one
        with pytest.raises(BusyFile):
            await begin(made)
        await made.end(EndTrace(trace=first))
        with pytest.raises(NoSuchEntry):
            await read(made, first)
        second = await begin(made, b"other")
        assert second != first


@trio.testing.trio_test
async def test_a_trace_that_is_ended_leaves_nothing_on(tmp_path: Path) -> None:
    async with tracing(tmp_path) as (mount, made):
        trace = await begin(made)
        handle = await mount.create("file")
        await made.end(EndTrace(trace=trace))
        mount.engine.write(handle, 0, b"content")
        mount.namespace.files.release(handle)
        await mount.commit.make_names_durable()
        assert mount.commit.steps.take() == []


def test_a_trace_that_nobody_reads_ends(tmp_path: Path) -> None:
    clock = trio.testing.MockClock(rate=1)

    async def pass_time(seconds: float) -> None:
        clock.jump(seconds)
        await trio.testing.wait_all_tasks_blocked()

    async def run() -> None:
        async with tracing(tmp_path) as (_, made):
            trace = await begin(made)
            await pass_time(LEASE_S * 0.6)
            await read(made, trace)
            await pass_time(LEASE_S * 0.6)
            await read(made, trace)  # it was read in time
            await pass_time(LEASE_S * 1.1)
            with pytest.raises(NoSuchEntry):
                await read(made, trace)
            await begin(made)

    trio.run(run, clock=clock)


@trio.testing.trio_test
async def test_what_a_killed_writer_leaves(tmp_path: Path) -> None:
    async with tracing(tmp_path) as (mount, made):
        await mount.write_file("file.pt", b"before")
        await mount.commit.make_names_durable()
        trace = await begin(made, b"file.pt")
        handle = await mount.open("file.pt", flags=os.O_WRONLY | os.O_TRUNC)
        mount.engine.write(handle, 0, b"later")
        mount.namespace.files.release(handle, killed_by=signal.SIGKILL)
        await mount.commit.make_names_durable()
        assert (await read(made, trace)).state is TraceState.QUARANTINED


@trio.testing.trio_test
async def test_what_could_not_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with tracing(tmp_path) as (mount, made):
        trace = await begin(made)
        handle = await mount.create("file")
        inode = await mount.resolve("file")
        mount.engine.write(handle, 0, bytes(LARGE))
        mount.engine.fail_drains(inode.ino, errno.EIO)
        mount.namespace.files.release(handle)
        await mount.commit.wait_queued()
        failed = await read(made, trace)
        assert failed.state is TraceState.NOT_KEPT
        assert [step.name for step in failed.steps] == ["drain"]
        mount.engine.fail_drains(inode.ino, 0)


TIMES = st.lists(st.integers(0, 10**10), min_size=4, max_size=4).map(sorted)
EVENTS = st.builds(
    lambda kind, op, device, detail, code, times: TraceEvent(
        kind, op, device, detail, code, 4096 * detail, 4096, *times
    ),
    st.sampled_from(EventKind),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 60),
    st.sampled_from([0, 5]),
    TIMES,
)
STEPS = st.builds(
    lambda name, times: CommitStep(name, times[0], times[1]),
    st.sampled_from(["drain", "transaction"]),
    TIMES,
)


@given(st.lists(EVENTS, max_size=60), st.lists(STEPS, max_size=5))
def test_any_events_make_a_document_that_keeps_the_rules(
    events: list[TraceEvent], steps: list[CommitStep]
) -> None:
    traced = Traced(
        path="/ckpt/file.pt",
        opened_ns=10**6,
        ended_ns=10**10,
        state="durable",
        lost=3,
        device_paths={0: "/a"},
        events=events,
        steps=steps,
    )
    document = json.loads(msgspec.json.encode(chrome_trace(traced)))
    check_format(document)
    assert document["otherData"]["events_lost"] == 3
    by_kind = {
        EventKind.REQUEST: "request",
        EventKind.CHUNK: "chunk",
        EventKind.TRANSFER: "transfer",
    }
    for kind, category in by_kind.items():
        assert len(spans_of(document, category)) == sum(event.kind is kind for event in events)
    assert len(spans_of(document, "commit")) == len(steps)
    transfers = [event for event in events if event.kind is EventKind.TRANSFER]
    for device in range(4):
        in_flight = [
            span
            for span in spans_of(document, "transfer part")
            if span.name == "in flight" and span.about["device"] == device
        ]
        assert len(in_flight) == sum(event.device == device for event in transfers)
        counted = {
            round(event["ts"] * 1000): event["args"]["requests"]
            for event in document["traceEvents"]
            if event["ph"] == "C" and event["pid"] == 10 + device
        }
        assert list(counted.values())[-1:] in ([], [0])
        for time_ns, count in counted.items():
            assert count == sum(
                round(span.began_us * 1000) <= time_ns < round(span.ended_us * 1000)
                for span in in_flight
            )


def test_a_wrong_document_is_found() -> None:
    """The check is one: spans of one thread that overlap are refused."""

    def span(ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "pid": 1, "tid": 1, "name": "n", "cat": "c", "ts": ts, "dur": dur}

    name = {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "x"}}
    good = {"displayTimeUnit": "ms", "traceEvents": [name, span(0, 10), span(2, 3), span(10, 1)]}
    check_format(good)
    with pytest.raises(AssertionError):
        check_format({**good, "traceEvents": [name, span(0, 10), span(5, 10)]})
    with pytest.raises(AssertionError):
        check_format({**good, "traceEvents": [span(0, 10)]})
