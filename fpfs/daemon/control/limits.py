"""What a client of the control socket can take up: connections, memory and time.

Invariants:
  * Nothing is kept of a request beyond `REQUEST_BYTES_MAX`, and of a connection no more than one
    request and one reply at a time.
  * Root and the owner get a connection however many others ask for one.

Concurrency: trio thread only.
"""

from __future__ import annotations

import contextlib
import math
import select
from collections import Counter
from collections.abc import Iterator

import trio

from fpfs.core.protocol.control import LINE_BYTES_MAX

CONNECTIONS_MAX = 512
"""In all."""
CONNECTIONS_OTHERS_MAX = 384
"""Of those who are neither root nor the owner."""
CONNECTIONS_ONE_MAX = 256
"""Of one such user."""

REQUEST_BYTES_MAX = 64 * 1024
assert REQUEST_BYTES_MAX <= LINE_BYTES_MAX

REQUEST_S = 10.0
"""How long a request may take from its first byte to its last."""

REPLY_S = 30.0
"""How long a client may take to receive a reply."""

IDLE_S = 60.0
"""How long others than root and the owner may stay connected without asking for anything."""

LOOK_AGAIN_S = 1.0
"""How soon is looked again whether a client that has said all is gone."""


class Refusing(Exception):
    """A client is to be told why it is not served any more, and disconnected."""


class Connections:
    """Counts who is connected."""

    def __init__(self) -> None:
        """Start without connections."""
        self._others: Counter[int] = Counter()
        self._count = 0

    @contextlib.contextmanager
    def one_of(self, uid: int, *, is_owner: bool) -> Iterator[None]:
        """Count a connection while it lasts. Raises `Refusing` when it is one too many."""
        is_too_many = self._count >= CONNECTIONS_MAX
        if not is_owner:
            is_too_many |= self._others.total() >= CONNECTIONS_OTHERS_MAX
            is_too_many |= self._others[uid] >= CONNECTIONS_ONE_MAX
        if is_too_many:
            raise Refusing("there are too many connections to this mount: ask again later")
        self._count += 1
        self._others[uid] += not is_owner
        try:
            yield
        finally:
            self._count -= 1
            self._others[uid] -= not is_owner
            if not self._others[uid]:
                del self._others[uid]


class Lines:
    """The requests of one connection, a line each."""

    def __init__(self, stream: trio.SocketStream, *, idle_s: float = math.inf) -> None:
        """Give up a client that says nothing for `idle_s`."""
        self._stream = stream
        self._idle_s = idle_s
        self._pending = bytearray()

    async def receive(self) -> bytes | None:
        """Return the next line, or None when the client has no more.

        Raises `Refusing` for a line that is too long or takes too long.
        """
        deadline = trio.current_time() + (REQUEST_S if self._pending else self._idle_s)
        looked_at = 0
        while (end := self._pending.find(b"\n", looked_at)) < 0:
            looked_at = len(self._pending)
            if looked_at > REQUEST_BYTES_MAX:
                raise Refusing("the request is too long")
            piece = await self._receive_some(deadline)
            if not piece:
                return None
            if not self._pending:
                deadline = trio.current_time() + REQUEST_S
            self._pending += piece
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        if len(line) > REQUEST_BYTES_MAX:
            raise Refusing("the request is too long")
        return line

    async def _receive_some(self, deadline: float) -> bytes:
        with trio.CancelScope(deadline=deadline):
            return bytes(await self._stream.receive_some(REQUEST_BYTES_MAX))
        if self._pending:
            raise Refusing(f"the request did not come within {REQUEST_S:g} s")
        raise Refusing(f"nothing was asked for {self._idle_s:g} s")


async def send_in_time(stream: trio.SocketStream, reply: bytes) -> None:
    """Send a reply. Raises BrokenResourceError when the client does not take it in time."""
    with trio.move_on_after(REPLY_S) as scope:
        await stream.send_all(reply)
    if scope.cancelled_caught:
        raise trio.BrokenResourceError(f"a reply was not received within {REPLY_S:g} s")


async def wait_gone(connection: trio.socket.SocketType) -> None:
    """Return when the client has closed its end, and so cannot get a reply any more.

    One that has only said that it will ask no more, or has asked more already, is not gone.
    """
    await trio.lowlevel.wait_readable(connection)
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # hang-ups are always told
    while not poll.poll(0):  # noqa: ASYNC110 (the kernel tells nobody who waits for more input)
        await trio.sleep(LOOK_AGAIN_S)
