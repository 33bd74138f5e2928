"""The server's end of the control protocol, without a mount: what is asked at the end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import trio
import trio.testing

from fpfs.core.control import Flushed, Reply, Request, Status, Verb
from fpfs.daemon.control import ControlServer

PATIENCE_S = 30


class Ending:
    """A server in which nothing ever becomes durable. Once closed, nothing may be asked of it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.closed = False

    async def status(self) -> Status:
        """Not to be asked: there are no figures any more."""
        raise AssertionError("asked after the end")

    async def wait_durable(self, ino: int) -> Flushed:
        """Wait for what does not come."""
        assert not self.closed, f"asked for inode {ino} after the end"
        self.waiting += 1
        try:
            await trio.sleep_forever()
        finally:
            assert not self.closed, "still waiting after the end"
            self.waiting -= 1

    async def flush(self) -> Flushed:
        """Not to be asked: there is nothing left to flush."""
        raise AssertionError("asked after the end")


@contextlib.asynccontextmanager
async def serving(path: Path, server: Ending) -> AsyncIterator[ControlServer]:
    """A control server of a server that is about to end."""
    control = ControlServer(path=str(path), controlled=server, open_to_others=False)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(control.serve)
            yield control
            nursery.cancel_scope.cancel()


async def ask(path: Path, verb: Verb) -> Reply:
    """Send one request and return its reply."""
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(msgspec.json.encode(Request(verb=verb)) + b"\n")
        return msgspec.json.decode(await stream.receive_some(), type=Reply)


@trio.testing.trio_test
async def test_who_waits_when_the_server_ends_is_told(tmp_path: Path) -> None:
    server = Ending()
    path = tmp_path / "socket"
    replies: list[Reply] = []

    async def wait() -> None:
        replies.append(await ask(path, Verb.WAIT))

    async with serving(path, server) as control, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        while server.waiting < 3:
            await trio.testing.wait_all_tasks_blocked(0.01)
        await control.end_requests()
        server.closed = True
    assert [reply.error for reply in replies] == ["the mount has ended"] * 3


@trio.testing.trio_test
async def test_what_is_asked_after_the_end_is_refused(tmp_path: Path) -> None:
    server = Ending()
    path = tmp_path / "socket"
    async with serving(path, server) as control:
        await control.end_requests()
        server.closed = True
        for verb in (Verb.STATUS, Verb.WAIT, Verb.FLUSH):
            assert (await ask(path, verb)).error == "the mount has ended"
        await control.announce_end(Flushed())
        assert (await ask(path, Verb.END)).error == ""
