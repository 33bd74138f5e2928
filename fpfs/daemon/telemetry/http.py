"""The HTTP server that Prometheus scrapes: GET /metrics, on TCP or on a Unix socket.

It is in the server's process and must not disturb it: h11 parses, everything is bounded, and what
comes slowly or not at all makes room for what comes.

Invariants:
  * At most CONNECTIONS_MAX connections are open; one more ends the one that has waited longest.
  * A request has REQUEST_S to arrive and as long for its answer to be taken; a connection waits
    IDLE_S for its next one.
  * The figures are gathered at most once in FRESH_S, for however many clients.

Concurrency: trio thread only; one task for each connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import h11
import trio

from fpfs.core.refusal import Refused

if TYPE_CHECKING:
    from fpfs.core.addresses import ListenAddress

CONNECTIONS_MAX = 64
REQUEST_S = 10.0
IDLE_S = 60.0
FRESH_S = 0.1
HEADER_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 64 * 1024
"""Of a request, which has no use for one."""
RECEIVE_BYTES = 16 * 1024
BACKLOG = 64
TAKEN_AGAIN_S = 5.0
"""How often a server that took over tries to get a place that somebody else has taken."""

OPEN_METRICS = "application/openmetrics-text"
_TEXT = "text/plain; charset=utf-8"

_log = logging.getLogger(__name__)

Render = Callable[[str], Awaitable[tuple[bytes, str]]]
"""Makes the text for an Accept header, and says its content type."""


def listen(address: ListenAddress, *, open_to_others: bool) -> socket.socket:
    """Take the place where metrics are served. OSError when that cannot be.

    A Unix socket that nobody listens on any more is replaced; any other file is not.
    """
    if address.path:
        return _listen_unix(address.path, mode=0o666 if open_to_others else 0o600)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The connections of the server before, which died, are no reason to wait.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address.host, address.port))
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _listen_unix(path: str, *, mode: int) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fresh = f"{path}.{os.getpid()}.new"
    try:
        _refuse_taken(path)
        made.bind(fresh)
        try:
            os.chmod(fresh, mode)
            made.listen(BACKLOG)
            os.rename(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
    except BaseException:
        made.close()
        raise
    return made


def _refuse_taken(path: str) -> None:
    """Raise OSError if there is anything at `path` but a socket that nobody listens on."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket")
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            probe.connect(path)
            raise OSError(errno.EADDRINUSE, "somebody listens there already")


def listen_or_refuse(
    address: ListenAddress, *, asked: str, text: str, open_to_others: bool
) -> socket.socket:
    """As `listen`, for a mount that is being made. Raises `Refused`."""
    try:
        return listen(address, open_to_others=open_to_others)
    except OSError as error:
        raise Refused(
            asked=asked,
            wrong=f"metrics cannot be served at {text} ({error.strerror})",
            remedy="take another address or port for metrics=, or leave it out",
        ) from None


class _Connection:
    """One client; `scope` ends it."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.is_ending = False


class MetricsServer:
    """Answers scrapes until it is cancelled."""

    def __init__(self, *, address: ListenAddress, open_to_others: bool, render: Render) -> None:
        """Serve at `address` what `render` makes."""
        self._address = address
        self._open_to_others = open_to_others
        self._render = render
        self._waiting: dict[_Connection, None] = {}
        """Connections that wait for their client, the longest waiting first."""
        self._open = 0
        self._ending = 0
        """Of these, those that were told to make room."""
        self._rendering = trio.Lock()
        self._rendered: dict[bool, tuple[float, bytes, str]] = {}
        """When what was made, by whether it is in the format of OpenMetrics."""

    async def serve(self, listener: socket.socket | None) -> None:
        """Serve on what `listen` made; without it the place is taken when it is free."""
        if listener is None:
            listener = await self._take_place()
        served = trio.socket.from_stdlib_socket(listener)
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    connection = await _accept(served)
                    if self._make_room():
                        nursery.start_soon(self.converse, trio.SocketStream(connection))
                    else:
                        connection.close()
        finally:
            served.close()
            if self._address.path:
                with contextlib.suppress(OSError):
                    os.unlink(self._address.path)

    async def _take_place(self) -> socket.socket:
        """Take the place of the server before, however long somebody else has it."""
        said = False
        while True:
            try:
                return listen(self._address, open_to_others=self._open_to_others)
            except OSError as error:
                if not said:
                    _log.error("metrics are not served until they can be: %s", error.strerror)
                    said = True
            await trio.sleep(TAKEN_AGAIN_S)

    def _make_room(self) -> bool:
        """See that one more connection is not too many; False where all are being answered."""
        if self._open - self._ending < CONNECTIONS_MAX:
            return True
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        del self._waiting[longest]
        self._ending += 1
        longest.is_ending = True
        longest.scope.cancel()
        return True

    async def converse(self, stream: trio.abc.Stream) -> None:
        """Answer one client; its connection is closed then."""
        own = _Connection()
        self._open += 1
        try:
            with own.scope:
                await self._answer_requests(stream, own)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            _log.debug("a metrics client went away: %s", error)
        finally:
            self._waiting.pop(own, None)
            self._open -= 1
            self._ending -= own.is_ending
            await trio.aclose_forcefully(stream)

    async def _answer_requests(self, stream: trio.abc.Stream, own: _Connection) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES_MAX)
        wait_s = REQUEST_S
        while http.our_state is h11.IDLE:
            if not own.is_ending:
                self._waiting[own] = None
            try:
                with trio.fail_after(wait_s):
                    request = await _receive_request(stream, http)
            except trio.TooSlowError:
                return
            except h11.RemoteProtocolError as error:
                status = error.error_status_hint
                await self._send(stream, http, status, f"{error}\n".encode(), close=True)
                return
            finally:
                self._waiting.pop(own, None)
            if request is None:
                return
            await self._answer(stream, http, request)
            if {http.our_state, http.their_state} != {h11.DONE}:
                return
            http.start_next_cycle()
            wait_s = IDLE_S

    async def _answer(
        self, stream: trio.abc.Stream, http: h11.Connection, request: h11.Request
    ) -> None:
        path = request.target.split(b"?", 1)[0]
        if request.method != b"GET":
            await self._send(stream, http, 405, b"GET /metrics\n", close=True)
        elif path != b"/metrics":
            await self._send(stream, http, 404, b"metrics are at /metrics\n")
        else:
            accept = b",".join(value for name, value in request.headers if name == b"accept")
            try:
                body, content_type = await self._rendered_for(accept.decode("latin-1"))
            except Exception:  # noqa: BLE001 (one scrape fails, not what serves them)
                _log.exception("the metrics cannot be told")
                await self._send(stream, http, 500, b"see the server's log\n", close=True)
                return
            await self._send(stream, http, 200, body, content_type=content_type)

    async def _rendered_for(self, accept: str) -> tuple[bytes, str]:
        """What `render` makes; what it made a moment ago does as well."""
        async with self._rendering:
            is_open = OPEN_METRICS in accept
            found = self._rendered.get(is_open)
            if found is None or found[0] < trio.current_time() - FRESH_S:
                body, content_type = await self._render(OPEN_METRICS if is_open else "")
                self._rendered[is_open] = found = (trio.current_time(), body, content_type)
            return found[1:]

    async def _send(
        self,
        stream: trio.abc.Stream,
        http: h11.Connection,
        status: int,
        body: bytes,
        *,
        content_type: str = _TEXT,
        close: bool = False,
    ) -> None:
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        if close:
            headers.append(("Connection", "close"))
        if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        parts = [
            http.send(h11.Response(status_code=status, headers=headers)),
            http.send(h11.Data(data=body)),
            http.send(h11.EndOfMessage()),
        ]
        with trio.move_on_after(REQUEST_S):
            await stream.send_all(b"".join(part for part in parts if part))


async def _accept(served: trio.socket.SocketType) -> trio.socket.SocketType:
    """Accept a connection; where descriptors are short, when there are some again."""
    while True:
        try:
            return (await served.accept())[0]
        except OSError as error:
            _log.debug("a metrics client cannot be accepted: %s", error)
            await trio.sleep(1)


async def _receive_request(stream: trio.abc.Stream, http: h11.Connection) -> h11.Request | None:
    """The next whole request, its body thrown away; None when the client has no more."""
    request: h11.Request | None = None
    body_bytes = 0
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(bytes(await stream.receive_some(RECEIVE_BYTES)))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body_bytes += len(event.data)
            if body_bytes > BODY_BYTES_MAX:
                raise h11.RemoteProtocolError("the request is too long", error_status_hint=413)
        elif isinstance(event, h11.EndOfMessage):
            return request
        else:
            return None
