"""The server's end of the control protocol: requests of ``fpfs-ctl`` and ``fpfs umount``.

Invariants:
  * Only root, the server's user and, on a mount that is open to others, others are answered; what
    is the `owners`' question only for the first two.
  * The socket is as old as the mount, whichever server made it: of those with one device number the
    newest belongs to the mount that has the number now.
  * A request that fails, whatever the reason, ends neither the mount nor the server.
  * The end is announced after everything else of the server was closed, so that whoever waited for
    it can mount the same devices at once.
  * What the end came to is in a file before the keeper is told that no other server is needed: who
    waited for one that is killed after that, or had no time to ask it, finds it there.

Concurrency: trio; one task for each connection. A request never blocks another.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import msgspec
import trio

from fpfs.core.control import LINE_BYTES_MAX, Reply, outcome_path, peer, reply_at_end
from fpfs.core.questions import (
    PROTOCOL_VERSION,
    AnyQuestion,
    AnyVersion,
    Question,
    WaitForEnd,
)
from fpfs.core.refusal import Refused
from fpfs.core.reports import Flushed, Renewing

_log = logging.getLogger(__name__)
_REQUEST_BYTES_MAX = 64 * 1024
assert _REQUEST_BYTES_MAX <= LINE_BYTES_MAX

_QUESTIONS = msgspec.json.Decoder(AnyQuestion)
_VERSION = msgspec.json.Decoder(AnyVersion)

Handler: TypeAlias = Callable[[Any], Awaitable[msgspec.Struct]]
"""Answers one kind of question. OSError when what is asked for cannot be."""


class Controlled(Protocol):
    """What the protocol drives: the server of a mount."""

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers each question, but `WaitForEnd`."""

    def renew(self) -> NoReturn:
        """Make room for the next server."""


class ControlServer:
    """Listens on the socket of one mount."""

    def __init__(
        self, *, path: str, controlled: Controlled, open_to_others: bool, takes_over: bool
    ) -> None:
        """Listen at `path` in `serve`, where `takes_over` says whether another server did before.

        What an earlier mount left there is replaced.
        """
        self._path = path
        self._takes_over = takes_over
        self._controlled = controlled
        self._open_to_others = open_to_others
        self._requests: set[trio.CancelScope] = set()
        self._refusing = False
        self._requests_ended = trio.Event()
        self._ended = trio.Event()
        self._final = Flushed()
        self._waiting_for_end = 0
        self._told_everybody = trio.Event()
        self._socket = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer requests until cancelled."""
        # The server before left one, which tells clients that there is a keeper: it is replaced
        # without a moment in between.
        made = f"{self._path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        await self._socket.bind(made)
        os.chmod(made, 0o666 if self._open_to_others else 0o600)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(outcome_path(self._path))  # of a mount that had the same numbers
        self._socket.listen(64)
        if self._takes_over:
            with contextlib.suppress(FileNotFoundError):  # it died before it came so far
                born_ns = os.stat(self._path).st_mtime_ns
                os.utime(made, ns=(born_ns, born_ns))
        os.rename(made, self._path)
        try:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    connection, _ = await self._socket.accept()
                    nursery.start_soon(self._converse, connection)
        finally:
            os.unlink(self._path)
            self._socket.close()

    async def end_requests(self) -> None:
        """Refuse requests from now on; returns when none of those before is under way any more."""
        self._refusing = True
        if self._requests:
            for scope in self._requests:
                scope.cancel()
            await self._requests_ended.wait()

    def leave_outcome(self, final: Flushed) -> None:
        """Leave for those who cannot be told what the end came to; the next mounts remove it."""
        path = Path(outcome_path(self._path))
        made = path.with_name(f"{path.name}.new")
        try:
            made.write_bytes(msgspec.json.encode(final))
            made.chmod(0o644 if self._open_to_others else 0o600)
            made.rename(path)
        except OSError as error:
            # Who waits for a server that lives to its end is told all the same.
            _log.warning("what the end came to cannot be left in %s: %s", path, error.strerror)

    async def announce_end(self, final: Flushed) -> None:
        """Tell everybody who waits for the end; returns when they were told."""
        self._final = final
        self._ended.set()
        if self._waiting_for_end:
            await self._told_everybody.wait()

    async def _converse(self, connection: trio.socket.SocketType) -> None:
        stream = trio.SocketStream(connection)
        uid = peer(connection).uid  # type: ignore[arg-type]
        is_owner = uid in (0, os.geteuid())
        async with stream:
            try:
                if is_owner or self._open_to_others:
                    await self._answer_lines(stream, is_owner=is_owner)
                else:
                    await self._send(stream, Reply(error="this mount belongs to another user"))
            except (trio.BrokenResourceError, ConnectionError):
                _log.debug("a control client went away before its answer")

    async def _answer_lines(self, stream: trio.SocketStream, *, is_owner: bool) -> None:
        pending = b""
        async for piece in stream:
            pending += piece
            while b"\n" in pending:
                line, pending = pending.split(b"\n", 1)
                await self._answer(stream, line, is_owner=is_owner)
            if len(pending) > _REQUEST_BYTES_MAX:
                await self._send(stream, Reply(error="the request is too long"))
                return

    async def _answer(self, stream: trio.SocketStream, line: bytes, *, is_owner: bool) -> None:
        try:
            version = _VERSION.decode(line).version
            if version != PROTOCOL_VERSION:
                wrong = f"the server speaks version {PROTOCOL_VERSION}, not {version}"
                await self._send(stream, Reply(error=wrong))
                return
            question = _QUESTIONS.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            await self._send(stream, Reply(error=f"the request cannot be read ({error})"))
            return
        if question.owners and not is_owner:
            wrong = f"only root and the mount's owner may {question.verb()} it"
            await self._send(stream, Reply(error=wrong))
            return
        if isinstance(question, WaitForEnd):
            await self._answer_end(stream, question)
            return
        try:
            result = await self._unless_ended(question)
        except Refused as refused:
            await self._send(stream, Reply(error=refused.wrong, remedy=refused.remedy))
            return
        except OSError as error:
            await self._send(stream, Reply(error=error.strerror or str(error)))
            return
        except Exception as error:  # noqa: BLE001 (programs that use the mount are not to feel it)
            _log.exception("a request to %s failed", question.verb())
            wrong = f"the server failed at it ({type(error).__name__}: {error})"
            await self._send(stream, Reply(error=wrong))
            return
        if result is not None:
            await self._send(stream, _reply(result))
            if isinstance(result, Renewing):
                self._controlled.renew()
        elif question.ended_well:
            await self._answer_end(stream, question)
        else:
            await self._send(stream, Reply(error="the mount has ended"))

    async def _unless_ended(self, question: Question[Any]) -> msgspec.Struct | None:
        """The result of a question, or None when there is no server to ask any more."""
        result: msgspec.Struct | None = None
        if not self._refusing:
            with trio.CancelScope() as scope:
                self._requests.add(scope)
                try:
                    result = await self._controlled.handlers[type(question)](question)
                finally:
                    self._request_ended(scope)
        return result

    def _request_ended(self, scope: trio.CancelScope) -> None:
        self._requests.discard(scope)
        if self._refusing and not self._requests:
            self._requests_ended.set()

    async def _answer_end(self, stream: trio.SocketStream, question: Question[Any]) -> None:
        """Answer with what the end left: all is durable then, but for the failures."""
        if not self._waiting_for_end:
            self._told_everybody = trio.Event()
        self._waiting_for_end += 1
        try:
            await self._ended.wait()
            await self._send(stream, reply_at_end(question, self._final))
        finally:
            self._waiting_for_end -= 1
            if not self._waiting_for_end:
                self._told_everybody.set()

    async def _send(self, stream: trio.SocketStream, reply: Reply) -> None:
        await stream.send_all(msgspec.json.encode(reply) + b"\n")


def _reply(result: msgspec.Struct) -> Reply:
    return Reply(result=msgspec.Raw(msgspec.json.encode(result)))
