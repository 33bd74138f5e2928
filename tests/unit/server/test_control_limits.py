"""What clients of the control socket can take up, against a real server on a real socket."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import msgspec
import pytest
import trio
import trio.testing
from hypothesis import strategies as st

from fpfs.core.protocol.control import Reply
from fpfs.core.protocol.questions import (
    AskStatus,
    DescribeFiles,
    FlushAll,
    ListVersions,
    Question,
    WaitDurable,
    WaitForEnd,
)
from fpfs.core.protocol.reports import Failure, FilesShown, Flushed, VersionsShown
from fpfs.daemon.catalog.rows.queries import Asker
from fpfs.daemon.control import limits
from fpfs.daemon.control.limits import Connections, Refusing
from fpfs.daemon.control.server import Access, ControlServer, Handler

PATIENCE_S = 60
LARGE = Failure(ino=1, errno=5, message="x" * 4_000_000)
"""More than a socket's buffers hold."""


class Served:
    """A server of few words: one wait never ends, and a flush has a long answer."""

    def __init__(self) -> None:
        self.waiting = 0
        self._changed = trio.lowlevel.ParkingLot()

    async def until_waiting(self, count: int) -> None:
        """Return when so many wait for what does not come."""
        while self.waiting != count:
            await self._changed.park()

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers what the tests ask."""
        return {
            WaitDurable: self.wait_durable,
            DescribeFiles: self.describe,
            FlushAll: self.flush,
            ListVersions: self.list_versions,
        }

    async def wait_durable(self, question: WaitDurable) -> Flushed:
        """Wait for what does not come, but for inode 0."""
        if question.ino == 0:
            return Flushed()
        self.waiting += 1
        self._changed.unpark_all()
        try:
            await trio.sleep_forever()
        finally:
            self.waiting -= 1
            self._changed.unpark_all()

    async def describe(self, question: DescribeFiles) -> FilesShown:
        """There are none."""
        return FilesShown(files=())

    async def flush(self, question: FlushAll) -> Flushed:
        """A long answer."""
        return Flushed(failures=(LARGE,))

    async def list_versions(self, question: ListVersions) -> VersionsShown:
        """There are none."""
        return VersionsShown(versions=())

    async def answer_other(self, question: Question[Any], asker: Asker) -> msgspec.Struct:
        """Nobody else asks."""
        raise AssertionError(f"user {asker.uid} asked for {question.verb()}")

    def renew(self) -> NoReturn:
        """Nobody asks for it."""
        raise AssertionError("renewed")


@contextlib.asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Served]:
    """A control server."""
    served = Served()
    control = ControlServer(path=str(path), controlled=served, access=Access(), takes_over=False)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(control.serve)
            yield served
            nursery.cancel_scope.cancel()


async def read_all(stream: trio.SocketStream) -> bytes:
    """Everything until the other end closes."""
    received = b""
    with contextlib.suppress(trio.BrokenResourceError):
        async for piece in stream:
            received += piece
    return received


@trio.testing.trio_test
async def test_a_request_that_does_not_come_to_its_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REQUEST_S", 0.2)
    async with serving(tmp_path / "socket"):
        for is_dribbling in (False, True):
            async with await trio.open_unix_socket(tmp_path / "socket") as stream:
                async with trio.open_nursery() as nursery:
                    if is_dribbling:
                        nursery.start_soon(dribble, stream)
                    else:
                        await stream.send_all(b'{"verb": "st')
                    told = json.loads(await read_all(stream))
                    nursery.cancel_scope.cancel()
                assert told["error"] == "the request did not come within 0.2 s"


async def dribble(stream: trio.SocketStream) -> None:
    """Send a byte now and then."""
    with contextlib.suppress(trio.BrokenResourceError):
        while True:
            await stream.send_all(b" ")
            await trio.sleep(0.02)


@trio.testing.trio_test
async def test_a_reply_that_nobody_receives_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPLY_S", 0.2)
    async with serving(tmp_path / "socket"):
        async with await trio.open_unix_socket(tmp_path / "socket") as stream:
            await stream.send_all(b'{"verb": "flush"}\n' * 100)
            await limits.wait_gone(stream.socket)
            assert len(await read_all(stream)) < len(LARGE.message)
        async with await trio.open_unix_socket(tmp_path / "socket") as stream:
            await stream.send_all(b'{"verb": "describe", "inos": [1]}\n')
            assert json.loads(await stream.receive_some())["error"] == ""


@trio.testing.trio_test
async def test_who_leaves_is_not_worked_for_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOOK_AGAIN_S", 0.01)
    question = msgspec.json.encode(WaitDurable(ino=7)) + b"\n"
    async with serving(tmp_path / "socket") as served:
        for rest in (b"", question, b"nonsense"):
            async with await trio.open_unix_socket(tmp_path / "socket") as stream:
                await stream.send_all(question + rest)
                await served.until_waiting(1)
            await served.until_waiting(0)


@trio.testing.trio_test
async def test_who_has_said_all_still_gets_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOOK_AGAIN_S", 0.01)
    async with serving(tmp_path / "socket") as served:
        async with await trio.open_unix_socket(tmp_path / "socket") as stream:
            await stream.send_all(msgspec.json.encode(WaitDurable(ino=0)) + b"\n")
            await stream.send_eof()
            assert json.loads(await read_all(stream))["error"] == ""
        async with await trio.open_unix_socket(tmp_path / "socket") as stream:
            await stream.send_all(msgspec.json.encode(WaitDurable(ino=7)) + b"\n")
            await stream.send_eof()
            await served.until_waiting(1)
            await trio.sleep(0.05)  # several looks
            assert served.waiting == 1, "it waits on"


@trio.testing.trio_test
async def test_one_connection_too_many_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 3)
    async with serving(tmp_path / "socket") as served, contextlib.AsyncExitStack() as stack:
        for number in range(3):
            stream = await stack.enter_async_context(
                await trio.open_unix_socket(tmp_path / "socket")
            )
            await stream.send_all(msgspec.json.encode(WaitDurable(ino=7)) + b"\n")
            await served.until_waiting(number + 1)
        async with await trio.open_unix_socket(tmp_path / "socket") as one_more:
            assert "too many connections" in json.loads(await read_all(one_more))["error"]
        await stream.aclose()
        await served.until_waiting(2)
        async with await trio.open_unix_socket(tmp_path / "socket") as another:
            await another.send_all(b'{"verb": "describe", "inos": [1]}\n')
            assert json.loads(await another.receive_some())["error"] == ""


def test_others_leave_room_for_the_owner_and_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 5)
    monkeypatch.setattr(limits, "CONNECTIONS_OTHERS_MAX", 4)
    monkeypatch.setattr(limits, "CONNECTIONS_ONE_MAX", 3)
    connections = Connections()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connections.one_of(1000, is_owner=False))
        with pytest.raises(Refusing), connections.one_of(1000, is_owner=False):
            pass
        with connections.one_of(1001, is_owner=False):
            with pytest.raises(Refusing), connections.one_of(1002, is_owner=False):
                pass
            stack.enter_context(connections.one_of(0, is_owner=True))
            with pytest.raises(Refusing), connections.one_of(0, is_owner=True):
                pass
    with connections.one_of(1000, is_owner=False):
        pass


FIELDS = st.dictionaries(
    st.sampled_from(["ino", "inos", "directory", "name", "below", "version", "step", "junk"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        ),
        max_leaves=8,
    ),
    max_size=4,
)
VERBS = st.sampled_from(["describe", "wait", "versions", "flush", "runs", "policy", "none", ""])
ASKED = st.builds(lambda verb, fields: json.dumps({"verb": verb, **fields}).encode(), VERBS, FIELDS)
LINES = st.lists(ASKED | st.binary(max_size=200) | st.just(b"x" * 70_000), max_size=6)


@hypothesis.settings(
    max_examples=150,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(lines=LINES, cuts=st.lists(st.integers(1, 5000), max_size=5))
def test_whatever_is_sent_is_answered_line_by_line_until_the_first_bad_one(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int]
) -> None:
    sent = b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines)

    async def speak() -> bytes:
        path = tmp_path_factory.mktemp("control") / "socket"
        async with serving(path) as served:
            async with await trio.open_unix_socket(path) as stream, trio.open_nursery() as nursery:
                nursery.start_soon(send_in_pieces, stream, sent, cuts)
                received = await read_until_waiting(stream, served)
                nursery.cancel_scope.cancel()
            async with await trio.open_unix_socket(path) as stream:
                await stream.send_all(b'{"verb": "describe", "inos": []}\n')
                assert json.loads(await stream.receive_some())["error"] == ""
        return received

    received = trio.run(speak)
    assert received == b"" or received.endswith(b"\n")
    replies = [msgspec.json.decode(line, type=Reply) for line in received.splitlines()]
    assert len(replies) <= len(lines)
    bad = [reply.error.startswith(("the request", "the server speaks")) for reply in replies]
    assert not any(bad[:-1]), "nothing is answered behind a bad line"
    if len(replies) < len(lines):
        assert (bad and bad[-1]) or any(b'"wait"' in line for line in lines)


async def read_until_waiting(stream: trio.SocketStream, served: Served) -> bytes:
    """Everything until the other end closes, or waits for what does not come."""
    received = b""
    with contextlib.suppress(trio.BrokenResourceError):
        while not served.waiting:
            with trio.move_on_after(0.05):
                piece = await stream.receive_some()
                if not piece:
                    break
                received += piece
    return received


async def send_in_pieces(stream: trio.SocketStream, sent: bytes, cuts: list[int]) -> None:
    """Send everything, cut at some places, and say that it is all."""
    with contextlib.suppress(trio.BrokenResourceError):
        for cut in cuts:
            piece, sent = sent[:cut], sent[cut:]
            if piece:
                await stream.send_all(piece)
                await trio.lowlevel.checkpoint()
        if sent:
            await stream.send_all(sent)
        await stream.send_eof()


def test_the_questions_that_wait_long_may_be_given_up() -> None:
    assert {kind.given_up for kind in (WaitDurable, WaitForEnd)} == {True}
    assert {kind.given_up for kind in (AskStatus, FlushAll, DescribeFiles)} == {False}
