"""The server's end of the control protocol, without a mount: what is asked at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
import trio
import trio.testing

from fpfs.core.errors import InvalidOperation
from fpfs.core.mounts import MountEntry
from fpfs.core.protocol.control import ControlClient, Reply, outcome_path
from fpfs.core.protocol.questions import (
    AskStatus,
    FlushAll,
    Question,
    RestartServer,
    ScrubNext,
    WaitDurable,
    WaitForEnd,
)
from fpfs.core.protocol.reports import Failure, Flushed, Renewing
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.rows.queries import Asker
from fpfs.daemon.control import server as control_server
from fpfs.daemon.control.server import Access, ControlServer, Handler

PATIENCE_S = 60
NOT_KEPT = Failure(ino=18, errno=errno.EIO, message="inode 18 keeps its previous version")


class Ending:
    """A server in which nothing ever becomes durable. Once closed, nothing may be asked of it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.closed = False

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """What is left to be answered; nothing else may be asked for."""
        return {
            WaitDurable: self.wait_durable,
            RestartServer: self.prepare_renewal,
            **dict.fromkeys((AskStatus, FlushAll, ScrubNext), self.refuse),
        }

    async def refuse(self, question: Question[Any]) -> msgspec.Struct:
        """Not to be asked: there is nothing any more."""
        raise AssertionError("asked after the end")

    async def wait_durable(self, question: WaitDurable) -> Flushed:
        """Wait for what does not come."""
        assert not self.closed, f"asked for inode {question.ino} after the end"
        self.waiting += 1
        try:
            await trio.sleep_forever()
        finally:
            assert not self.closed, "still waiting after the end"
            self.waiting -= 1

    async def prepare_renewal(self, question: RestartServer) -> Renewing:
        """There is no program that could go on."""
        raise InvalidOperation("the installed fpfs does not start")

    async def answer_other(self, question: Question[Any], asker: Asker) -> msgspec.Struct:
        """Nobody else asks."""
        raise AssertionError(f"user {asker.uid} asked for {question.verb()}")

    def renew(self) -> NoReturn:
        """Not to be asked: that was refused."""
        raise AssertionError("renewed although it cannot be")


@contextlib.asynccontextmanager
async def serving(
    path: Path, server: Ending, *, takes_over: bool = False
) -> AsyncIterator[ControlServer]:
    """A control server of a server that is about to end."""
    control = ControlServer(
        path=str(path), controlled=server, access=Access(), takes_over=takes_over
    )
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(control.serve)
            yield control
            nursery.cancel_scope.cancel()


async def ask(path: Path, question: Question[Any]) -> Reply:
    """Send one request and return its reply."""
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all(msgspec.json.encode(question) + b"\n")
        return msgspec.json.decode(await stream.receive_some(), type=Reply)


@trio.testing.trio_test
async def test_who_waits_when_the_server_ends_learns_what_it_left(tmp_path: Path) -> None:
    server = Ending()
    path = tmp_path / "socket"
    errors: dict[int, str] = {}

    async def wait(ino: int) -> None:
        errors[ino] = (await ask(path, WaitDurable(ino=ino))).error

    async with serving(path, server) as control, trio.open_nursery() as nursery:
        for ino in (17, 18):
            nursery.start_soon(wait, ino)
        while server.waiting < 2:
            await trio.testing.wait_all_tasks_blocked(0.01)
        await control.end_requests()
        server.closed = True
        await control.announce_end(Flushed(failures=(NOT_KEPT,)))
    assert errors == {17: "", 18: NOT_KEPT.message}


@trio.testing.trio_test
async def test_what_is_asked_at_the_end_is_answered_without_the_server(tmp_path: Path) -> None:
    server = Ending()
    path = tmp_path / "socket"
    replies: dict[Question[Any], Reply] = {}

    async def ask_for(question: Question[Any]) -> None:
        replies[question] = await ask(path, question)

    async with serving(path, server) as control:
        await control.end_requests()
        server.closed = True
        for question in (AskStatus(), ScrubNext()):
            assert (await ask(path, question)).error == "the mount has ended"
        final = Flushed(failures=(NOT_KEPT,))
        async with trio.open_nursery() as nursery:
            below = WaitDurable(ino=17, below=True)
            for question in (WaitDurable(ino=17), FlushAll(), WaitForEnd(), below):
                nursery.start_soon(ask_for, question)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await control.announce_end(final)
    assert {reply.error for reply in replies.values()} == {""}
    assert msgspec.json.decode(replies[WaitDurable(ino=17)].result, type=Flushed) == Flushed()
    assert msgspec.json.decode(replies[FlushAll()].result, type=Flushed) == final
    assert msgspec.json.decode(replies[below].result, type=Flushed) == final
    assert msgspec.json.decode(replies[WaitForEnd()].result, type=Flushed) == final


def pid_of_nobody() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


@trio.testing.trio_test
async def test_what_a_server_left_that_ended_before_it_answered_is_the_answer(
    tmp_path: Path,
) -> None:
    path = tmp_path / f"0-999999.{pid_of_nobody()}.sock"
    entry = MountEntry(1, "0:999999", "/gone", "fuse.fpfs", "fpfs-gone", os.geteuid())
    final = Flushed(failures=(NOT_KEPT,))
    answers = {}
    with contextlib.ExitStack() as clients:
        asked = {}
        async with serving(path, Ending()) as control:
            await control.end_requests()
            for question in (WaitForEnd(), FlushAll(), WaitDurable(ino=17), WaitDurable(ino=18)):
                client = await trio.to_thread.run_sync(partial(ControlClient, entry, asked="test"))
                asked[question] = clients.enter_context(client)
                client.send(question)
            control.leave_outcome(final)
        for question, client in asked.items():
            receive = partial(client.receive, Flushed, timeout_s=PATIENCE_S)
            try:
                answers[question] = await trio.to_thread.run_sync(receive)
            except Refused as refused:
                assert (question, refused.wrong) == (WaitDurable(ino=18), NOT_KEPT.message)
    assert answers == {
        WaitForEnd(): final,
        FlushAll(): final,
        WaitDurable(ino=17): Flushed(),
    }


def leave_socket(path: Path) -> None:
    """Leave what a server leaves that is killed."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))


@trio.testing.trio_test
async def test_of_mounts_with_one_number_the_youngest_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of the older one that was killed while it ended has made no younger one of it."""
    monkeypatch.setattr("fpfs.core.protocol.control.runtime_folders", lambda _uid: [str(tmp_path)])
    entry = MountEntry(1, "0:999999", "/there", "fuse.fpfs", "fpfs-there", os.geteuid())
    older, younger = (tmp_path / f"0-999999.{pid}.sock" for pid in (os.getpid(), pid_of_nobody()))
    leave_socket(older)
    before_s = older.stat().st_mtime - 1
    os.utime(older, (before_s, before_s))
    there, gone = Ending(), Ending()
    async with serving(younger, there), serving(older, gone, takes_over=True):
        with await trio.to_thread.run_sync(partial(ControlClient, entry, asked="test")) as client:
            client.send(WaitDurable(ino=17))
            while not there.waiting + gone.waiting:
                await trio.testing.wait_all_tasks_blocked(0.01)
            assert (there.waiting, gone.waiting) == (1, 0)


@trio.testing.trio_test
async def test_none_is_asked_that_had_the_number_of_a_mount_whose_processes_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fpfs.core.protocol.control.runtime_folders", lambda _uid: [str(tmp_path)])
    entry = MountEntry(1, "0:999999", "/there", "fuse.fpfs", "fpfs-there", os.geteuid())
    async with serving(tmp_path / f"0-999999.{os.getpid()}.sock", Ending()):
        leave_socket(killed := tmp_path / f"0-999999.{pid_of_nobody()}.sock")
        after_s = killed.stat().st_mtime + 1
        os.utime(killed, (after_s, after_s))
        with pytest.raises(Refused, match="no server of user"):
            await trio.to_thread.run_sync(partial(ControlClient, entry, asked="test"))


@trio.testing.trio_test
async def test_what_an_earlier_mount_left_is_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "0-999999.1.sock"
    await trio.Path(outcome_path(str(path))).write_bytes(b"{}")
    async with serving(path, Ending()):
        assert os.listdir(tmp_path) == [path.name]


@trio.testing.trio_test
async def test_a_process_without_descriptors_answers_when_it_has_some_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "socket"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(path, Ending()):
        with socket.socket(socket.AF_UNIX) as client:
            lowest_free = os.dup(client.fileno())
            os.close(lowest_free)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
                client.connect(str(path))
                while "Too many open files" not in caplog.text:
                    await trio.testing.wait_all_tasks_blocked(0.001)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(client))
            await stream.send_all(msgspec.json.encode(RestartServer()) + b"\n")
            reply = msgspec.json.decode(await stream.receive_some(), type=Reply)
    assert reply.error == "the installed fpfs does not start"


@trio.testing.trio_test
async def test_a_request_that_fails_is_told_so_and_the_next_one_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path / "socket", Ending()):
        reply = await ask(tmp_path / "socket", AskStatus())
        assert reply.error == "the server failed at it (AssertionError: asked after the end)"
        assert "a request to status failed" in caplog.text
        assert (await ask(tmp_path / "socket", RestartServer())).error.startswith("the installed")


@trio.testing.trio_test
async def test_a_restart_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path / "socket", Ending()):
        reply = await ask(tmp_path / "socket", RestartServer())
        assert reply.error == "the installed fpfs does not start"


@trio.testing.trio_test
async def test_a_socket_whose_folder_goes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the folder of a user's session goes when he logs out, and is made when he logs in."""
    monkeypatch.setattr(control_server, "LOOK_AGAIN_S", 0.01)
    folder = tmp_path / "user" / "fpfs"
    folder.mkdir(parents=True)
    path = folder / "socket"
    async with serving(path, Ending()):
        born_ns = path.stat().st_mtime_ns
        for _ in range(2):
            shutil.rmtree(folder.parent)
            while "no tool reaches this mount" not in caplog.text:
                await trio.testing.wait_all_tasks_blocked(0.001)
            folder.parent.mkdir()
            while not path.exists():
                await trio.testing.wait_all_tasks_blocked(0.001)
            assert path.stat().st_mtime_ns == born_ns
            assert (await ask(path, RestartServer())).error == "the installed fpfs does not start"
            caplog.clear()
    assert os.listdir(folder) == []


@trio.testing.trio_test
async def test_the_next_server_serves_although_the_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "LOOK_AGAIN_S", 0.01)
    path = tmp_path / "user" / "fpfs" / "socket"
    async with serving(path, Ending(), takes_over=True):
        path.parent.parent.mkdir()
        while not path.exists():
            await trio.testing.wait_all_tasks_blocked(0.001)
        assert (await ask(path, RestartServer())).error == "the installed fpfs does not start"
