"""The server's end of the control protocol: requests of ``fpfs-ctl`` and ``fpfs umount``.

Invariants:
  * Root and the server's user may ask everything; members of the control group, if there is one,
    everything but what is the owner's alone (`Question.owner_alone`). Others are answered on a
    mount that is open to them, and told what that lets them see; what is the `owners`' question is
    not for them. Who asks is what the kernel says he is.
  * What clients take up is bounded (`control.limits`). One that breaks a rule is told so in one
    line and disconnected.
  * The socket is as old as the mount, whichever server made it: of those with one device number the
    newest belongs to the mount that has the number now.
  * A socket whose path is gone, as a session's folder goes when its user logs out, is made again.
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
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec
import outcome
import trio

from fpfs.core.protocol.control import LINE_BYTES_MAX, Peer, Reply, outcome_path, peer, reply_at_end
from fpfs.core.protocol.questions import (
    PROTOCOL_VERSION,
    AnyQuestion,
    AnyVersion,
    Handler,
    Question,
    WaitForEnd,
)
from fpfs.core.protocol.reports import Flushed, Renewing
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.rows.queries import Asker
from fpfs.daemon.control.limits import (
    IDLE_S,
    Connections,
    Lines,
    Refusing,
    send_in_time,
    wait_gone,
)

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

ACCEPT_AGAIN_S = 0.1
"""How soon the next client is looked for where the process has no descriptor left for one."""

LOOK_AGAIN_S = 10
"""How soon a socket is made again whose path has gone."""

BACKLOG = 128
"""Clients that wait for the server to look for the next one."""

_DEVICES_REMEDY = "ask as one of them: control_group lets nobody add, drain or remove devices"

_QUESTIONS = msgspec.json.Decoder(AnyQuestion)
_VERSION = msgspec.json.Decoder(AnyVersion)


class Controlled(Protocol):
    """What the protocol drives: the server of a mount."""

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers each question, but `WaitForEnd`."""

    async def answer_other(self, question: Question[Any], asker: Asker) -> msgspec.Struct:
        """Answer somebody who may see no more than the mount shows him. OSError as a handler."""

    def renew(self) -> NoReturn:
        """Make room for the next server."""


class Access(NamedTuple):
    """Who may ask: others on a mount that is open to them, and members of `group` as its owner."""

    open_to_others: bool = False
    group: int | None = None

    @property
    def mode(self) -> int:
        """Permission bits of the socket."""
        if self.open_to_others:
            return 0o666
        return 0o600 if self.group is None else 0o660

    def give(self, path: str | Path, mode: int) -> None:
        """Set permission bits and group of what clients are to reach."""
        if self.group is not None:
            os.chown(path, -1, self.group)
        os.chmod(path, mode)

    def is_owner(self, who: Peer) -> bool:
        """Whether somebody is root or the server's user, who may ask everything."""
        return who.uid in (0, os.geteuid())

    def is_member(self, who: Peer) -> bool:
        """Whether somebody may ask what the owner may, but for what is his alone."""
        return self.is_owner(who) or self.group in who.gids


class ControlServer:
    """Listens on the socket of one mount."""

    def __init__(
        self, *, path: str, controlled: Controlled, access: Access, takes_over: bool
    ) -> None:
        """Listen at `path` in `serve`, where `takes_over` says whether another server did before.

        What an earlier mount left there is replaced.
        """
        self._path = path
        self._takes_over = takes_over
        self._controlled = controlled
        self._access = access
        self._connections = Connections()
        self._requests: set[trio.CancelScope] = set()
        self._refusing = False
        self._requests_ended = trio.Event()
        self._ended = trio.Event()
        self._final = Flushed()
        self._waiting_for_end = 0
        self._told_everybody = trio.Event()
        self._socket = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        self._born_ns = 0

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer requests until cancelled. OSError when a new mount's socket cannot be made."""
        try:
            if self._takes_over:
                await self._listen_again()
            else:
                await self._listen()
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    with trio.move_on_after(LOOK_AGAIN_S):
                        nursery.start_soon(self._converse, await self._accept())
                    if not self._is_there():
                        await self._listen_again()
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._socket.close()

    def _is_there(self) -> bool:
        return os.path.lexists(self._path)

    async def _listen_again(self) -> None:
        """Listen where a server listened before; without a folder for that, at the next look."""
        folder = os.path.dirname(self._path)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
                os.chmod(folder, 0o755)
            await self._listen()
        except OSError as error:
            if self._socket.fileno() != -1:
                _log.warning(
                    "no tool reaches this mount until there is a control socket at %s again: %s",
                    self._path,
                    error.strerror,
                )
            self._socket.close()

    async def _listen(self) -> None:
        # The server before left one, which tells clients that there is a keeper: it is replaced
        # without a moment in between.
        made = f"{self._path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        try:
            await listening.bind(made)
            self._access.give(made, self._access.mode)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(outcome_path(self._path))  # of a mount that had the same numbers
            listening.listen(BACKLOG)
            if self._takes_over:
                with contextlib.suppress(FileNotFoundError):  # it died before it came so far
                    self._born_ns = os.stat(self._path).st_mtime_ns
            self._born_ns = self._born_ns or os.stat(made).st_mtime_ns
            os.utime(made, ns=(self._born_ns, self._born_ns))
            os.rename(made, self._path)
        except BaseException:
            listening.close()
            raise
        self._socket.close()
        self._socket = listening

    async def _accept(self) -> trio.socket.SocketType:
        if self._socket.fileno() == -1:
            await trio.sleep_forever()
        while True:
            try:
                connection, _ = await self._socket.accept()
            except OSError as error:  # no descriptor or no memory is left, or the client has gone
                _log.warning("a control client cannot be served now: %s", error.strerror)
                await trio.sleep(ACCEPT_AGAIN_S)
            else:
                return connection

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
            self._access.give(made, self._access.mode & 0o644)
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
        who = peer(connection)  # type: ignore[arg-type]
        is_member = self._access.is_member(who)
        async with stream:
            try:
                if not is_member and not self._access.open_to_others:
                    raise Refusing("this mount belongs to another user")
                with self._connections.one_of(who.uid, is_owner=is_member):
                    await self._answer_lines(stream, who)
            except Refusing as refused:
                with contextlib.suppress(trio.BrokenResourceError, ConnectionError):
                    await self._send(stream, Reply(error=str(refused)))
            except (trio.BrokenResourceError, ConnectionError) as error:
                _log.debug("a control client went away before its answer: %s", error)

    async def _answer_lines(self, stream: trio.SocketStream, who: Peer) -> None:
        """Answer one request after the other."""
        asker = None if self._access.is_member(who) else Asker(who.uid, who.gids)
        lines = Lines(stream, idle_s=IDLE_S if asker else math.inf)
        while (line := await lines.receive()) is not None:
            question = _decode(line)
            if refusal := self._refusal(question, who):
                await self._send(stream, refusal)
            else:
                await self._answer(stream, question, asker)

    def _refusal(self, question: Question[Any], who: Peer) -> Reply | None:
        """Why somebody may not ask a question; None if he may."""
        if not question.needs_owner or self._access.is_owner(who):
            return None
        wrong = f"only root and the mount's owner may ask for '{question.verb()}'"
        if question.owner_alone:
            return Reply(error=wrong, remedy=_DEVICES_REMEDY)
        if self._access.is_member(who):
            return None
        remedy = "ask as one of them; -o control_group=NAME lets a group of users, too"
        return Reply(error=wrong, remedy=remedy)

    async def _answer(
        self, stream: trio.SocketStream, question: Question[Any], asker: Asker | None
    ) -> None:
        """Answer what somebody may ask; None asks for the owner."""
        if isinstance(question, WaitForEnd):
            await self._answer_end(stream, question)
            return
        try:
            result = await self._unless_ended(stream, question, asker)
        except Refused as refused:
            await self._send(stream, Reply(error=refused.wrong, remedy=refused.remedy))
            return
        except OSError as error:
            wrong, remedy = error.strerror or str(error), getattr(error, "remedy", "")
            await self._send(stream, Reply(error=wrong, remedy=remedy))
            return
        except trio.BrokenResourceError:
            raise
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

    async def _unless_ended(
        self, stream: trio.SocketStream, question: Question[Any], asker: Asker | None
    ) -> msgspec.Struct | None:
        """The result of a question, or None when there is no server to ask any more.

        Raises BrokenResourceError when a client has gone whose question may be given up.
        """
        result: msgspec.Struct | None = None
        if not self._refusing:
            with trio.CancelScope() as scope:
                self._requests.add(scope)
                try:
                    work = partial(self._ask, question, asker)
                    result = await _while_there(stream, question, work)
                finally:
                    self._request_ended(scope)
        return result

    async def _ask(self, question: Question[Any], asker: Asker | None) -> msgspec.Struct:
        if asker is not None:
            return await self._controlled.answer_other(question, asker)
        return await self._controlled.handlers[type(question)](question)

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
            await _while_there(stream, question, self._ended.wait)
            await self._send(stream, reply_at_end(question, self._final))
        finally:
            self._waiting_for_end -= 1
            if not self._waiting_for_end:
                self._told_everybody.set()

    async def _send(self, stream: trio.SocketStream, reply: Reply) -> None:
        line = msgspec.json.encode(reply) + b"\n"
        if len(line) > LINE_BYTES_MAX:
            line = msgspec.json.encode(Reply(error="the answer is too long")) + b"\n"
        await send_in_time(stream, line)


async def _while_there(
    stream: trio.SocketStream, question: Question[Any], work: Callable[[], Awaitable[Result]]
) -> Result:
    """Do some work, but cancel it when the client has gone whose `question` may be given up.

    Raises BrokenResourceError then.
    """
    if not question.given_up:
        return await work()
    done: outcome.Outcome[Result] = outcome.Error(
        trio.BrokenResourceError("the client has closed its end")
    )

    async def watch() -> None:
        await wait_gone(stream.socket)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            done = outcome.Value(await work())
        except Exception as error:  # noqa: BLE001 (it is raised behind the nursery)
            done = outcome.Error(error)
        nursery.cancel_scope.cancel()
    return done.unwrap()


def _decode(line: bytes) -> Question[Any]:
    """Return what is asked. Raises `Refusing` for what is no question of this protocol."""
    try:
        version = _VERSION.decode(line).version
        if version != PROTOCOL_VERSION:
            raise Refusing(f"the server speaks version {PROTOCOL_VERSION}, not {version}")
        question: Question[Any] = _QUESTIONS.decode(line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Refusing(f"the request cannot be read ({error})") from None
    return question


def _reply(result: msgspec.Struct) -> Reply:
    return Reply(result=msgspec.Raw(msgspec.json.encode(result)))
