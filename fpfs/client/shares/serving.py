"""Ranks read shares for those who do not see them.

Who needs bytes of a share connects to a rank that sees it and asks; that one reads them and sends
them to where they belong. The connections are the ranks' own (`network`): a backend of
torch.distributed connects all ranks with all, cannot be interrupted while it does, and is the
training's. So a rank connects to those that it needs, and whoever waits looks whether another rank
has failed or died.

Concurrency: `start` and `close` are called by one thread. For each connection a thread answers, one
question at a time; each that asks is used by one thread at a time.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import errno
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import NoReturn

import msgspec
import torch

from fpfs.client.boxes import Ints
from fpfs.client.parallel_file import Piece
from fpfs.client.paths import naming
from fpfs.client.peers import POLL_MAX_S, POLL_MIN_S, RankFailed, Ranks
from fpfs.client.shares import network
from fpfs.client.shares.format import Manifest, decode_header
from fpfs.client.shares.reading import OpenShare, Place
from fpfs.core.transfers import Transfer, run_to_end

ANSWER_BYTES = 16 * 1024 * 1024
PIECES_MAX = 10_000
"""Of an answer."""
CONNECTIONS = 2
"""To one rank: while one answer is sent, the next is read."""
THREADS_MAX = 8
TOLD_S = 5.0
"""How long it may take until a rank's end is known by all."""


class _Question(msgspec.Struct, array_like=True):
    share: int
    pieces: list[tuple[int, int]]
    """Offset and bytes, in the share."""


class _Answer(msgspec.Struct, array_like=True):
    """It is followed by the bytes, unless reading has failed."""

    errno: int | None = None
    error: str = ""


class Serving:
    """Answers other ranks, and asks them. `shares`: those that this rank reads for others.

    As a context it is closed in the end; a rank leaves it when no other needs it any more, or when
    one has failed.
    """

    def __init__(self, peers: Ranks, shares: Mapping[int, OpenShare], *, timeout_s: float) -> None:
        self._peers = peers
        self._shares = shares
        self._timeout_s = timeout_s
        self._gives_up = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        """To others."""
        self._idle: dict[int, list[socket.socket]] = {}
        """Those that nobody uses, by rank."""
        self._asking = concurrent.futures.ThreadPoolExecutor(THREADS_MAX, "fpfs-ask")
        self._listener: network.Listener | None = None

    def __enter__(self) -> Serving:
        if self._shares:
            store = self._peers.group.get_group_store()
            self._listener = network.Listener(self._answer_all, store)
            address = msgspec.msgpack.encode(self._listener.address)
            try:
                self._peers.publish(_key(self._peers.rank), address)
            except BaseException:
                self._listener.close()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                # First, or those whose connections end would not know why.
                self._peers.tell(error)
        finally:
            self.close()

    def close(self) -> None:
        """Give up what is asked, answer nobody any more, and return when nothing is under way."""
        # Whatever interrupts a step: a thread that accepts would keep the process from ending.
        with contextlib.ExitStack() as last_first:
            if self._listener is not None:
                last_first.callback(self._peers.withdraw, _key(self._peers.rank))
                last_first.callback(self._listener.close)
            last_first.callback(self._close_connections)
            last_first.callback(self._asking.shutdown, cancel_futures=True)
            last_first.callback(self.give_up)

    def _close_connections(self) -> None:
        for connection in self._connections:
            connection.close()

    def give_up(self) -> None:
        """Ask nothing any more, for the call ends."""
        with self._lock:
            self._gives_up.set()
            for connection in self._connections:
                network.shut_down(connection)

    def start(self, server: int, share: int, pieces: list[Piece], owners: object) -> Transfer:
        """Begin to fill memory, which `owners` keeps, with what `server` reads of a share."""
        answers = collections.deque(_answers(pieces))
        return _Pending(
            self,
            [
                self._asking.submit(self._ask, server, share, answers, owners)
                for _ in range(min(CONNECTIONS, len(answers)))
            ],
        )

    def _ask(
        self, server: int, share: int, answers: collections.deque[list[Piece]], owners: object
    ) -> None:
        """Ask for answers that nobody has asked for, until there are none."""
        try:
            connection = self._connection_to(server)
            while True:
                try:
                    pieces = answers.popleft()
                except IndexError:
                    break
                self._receive(connection, server, share, pieces)
            with self._lock:
                self._idle.setdefault(server, []).append(connection)
        except BaseException:
            answers.clear()
            raise
        finally:
            del owners

    def _receive(
        self, connection: socket.socket, server: int, share: int, pieces: list[Piece]
    ) -> None:
        """Have an answer put where it belongs."""
        deadline_s = time.monotonic() + self._timeout_s
        look_at_s = 0.0

        def look() -> None:
            nonlocal look_at_s
            if time.monotonic() >= look_at_s:
                self._look(server, deadline_s)
                look_at_s = time.monotonic() + network.LOOK_S

        places = [(offset, count) for _, count, offset in pieces]
        try:
            network.send_message(connection, _Question(share, places), idle=look)
            answer = network.receive_message(connection, _Answer, idle=look)
            if answer.errno is None:
                for address, count, _ in pieces:
                    network.receive(connection, _memory_at(address, count), idle=look)
        except (OSError, EOFError) as error:
            self._find_out(server, f"its connection has ended: {error}")
        if answer.errno is not None:
            raise OSError(answer.errno, answer.error)

    def _look(
        self, server: int, deadline_s: float, lacking: str = "has not sent what it was asked for"
    ) -> None:
        """Raise what ends the waiting for a rank, if anything does."""
        self._peers.check()
        if self._gives_up.is_set():
            raise concurrent.futures.CancelledError
        if time.monotonic() > deadline_s:
            # It reads and sends, though not yet what this rank has asked for.
            (sign_s,) = self._peers.last_signs([server])
            if time.monotonic() - sign_s > self._timeout_s:
                raise RankFailed(server, f"{lacking} within {self._timeout_s:.0f} s")

    def _find_out(self, server: int, cause: str) -> NoReturn:
        """Raise why a rank is no longer there; `cause`, if nobody says so."""
        deadline_s = time.monotonic() + min(TOLD_S, self._timeout_s)
        while time.monotonic() < deadline_s:
            self._look(server, math.inf)
            time.sleep(POLL_MAX_S)
        raise RankFailed(server, cause)

    def _connection_to(self, server: int) -> socket.socket:
        """Return one that nobody uses."""
        with self._lock:
            if self._idle.get(server):
                return self._idle[server].pop()
        deadline_s = time.monotonic() + self._timeout_s
        poll_s = POLL_MIN_S
        while (published := self._peers.published(_key(server))) is None:
            self._look(server, deadline_s, "has not told its address")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, POLL_MAX_S)
        address = msgspec.msgpack.decode(published, type=network.Address)
        lacking = f"has not answered at {', '.join(address.hosts)}, port {address.port},"

        def look() -> None:
            self._look(server, deadline_s, lacking)

        try:
            connection = network.connect(address, look=look)
        except ConnectionError as error:
            self._find_out(server, f"cannot be reached: {error}")
        with self._lock:
            self._connections.add(connection)
            if self._gives_up.is_set():
                raise concurrent.futures.CancelledError
        return connection

    def _answer_all(self, connection: socket.socket) -> None:
        """Answer what is asked over a connection, until it is closed."""
        buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        while True:
            question = network.receive_message(connection, _Question)
            size = sum(count for _, count in question.pieces)
            answer = _Answer()
            try:
                if buffer.numel() < size:
                    buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
                self._read(question, buffer)
            except OSError as error:
                answer = self._failed(error.errno or errno.EIO, error.strerror or str(error))
            except Exception as error:  # noqa: BLE001 who asks raises it
                answer = self._failed(errno.EIO, f"{type(error).__name__}: {error}")
            network.send_message(connection, answer)
            if answer.errno is None:
                network.send(connection, memoryview(buffer[:size].numpy()))

    def _read(self, question: _Question, buffer: torch.Tensor) -> None:
        """Read what is asked for."""
        address, pieces = buffer.data_ptr(), list[Piece]()
        for offset, count in question.pieces:
            pieces.append((address, count, offset))
            address += count
        run_to_end(self._shares[question.share].start(pieces, buffer))

    def _failed(self, number: int, cause: str) -> _Answer:
        return _Answer(number, f"{cause} (as rank {self._peers.rank} reads it)")


class _Pending:
    """What is asked for."""

    def __init__(self, serving: Serving, futures: list[concurrent.futures.Future[None]]) -> None:
        self._serving = serving
        self._futures = futures

    def wait(self, seconds: float, /) -> bool:
        return not concurrent.futures.wait(self._futures, seconds).not_done

    def check(self) -> None:
        for future in self._futures:
            future.result()

    def close(self) -> None:
        if not all(future.done() for future in self._futures):
            self._serving.give_up()
            concurrent.futures.wait(self._futures)


class FarShare:
    """A share that another rank reads."""

    ranges: Ints
    container: tuple[int, int]

    def __init__(self, serving: Serving, server: int, manifest: Manifest, number: int) -> None:
        self._serving, self._server = serving, server
        self._manifest, self._number = manifest, number
        file = manifest.shares[number]
        self.path = f"{file.name} of node {file.node!r}, which rank {server} reads"
        self.begin = file.header_bytes
        self.header = bytearray(self.begin)
        self._opening: Transfer | None = None
        self._container = b""
        self._container_at = 0

    def begin_opening(self) -> None:
        """Ask for the header."""
        memory = (ctypes.c_char * self.begin).from_buffer(self.header)
        self._opening = self.start([(ctypes.addressof(memory), self.begin, 0)], memory)

    def finish_opening(self) -> None:
        """Wait for the header. `Damaged`: it is not what the manifest says."""
        assert self._opening is not None
        with naming(self.path):
            run_to_end(self._opening)
        content = bytes(self.header)
        found = decode_header(content, self._manifest, self._number, self.path)
        self.ranges, self.container = found

    def open_to_load(self) -> None:
        """Have the header, and fetch what is read bit by bit."""
        if self._opening is None:
            self.begin_opening()
        self.finish_opening()
        at, size = self.container
        content = bytearray(size)
        self.read([(memoryview(content), at)])
        self._container, self._container_at = bytes(content), at

    def read(self, places: Sequence[Place]) -> None:
        """Fill memory."""
        pieces, owners = list[Piece](), []
        for view, at in places:
            within = at - self._container_at
            if within >= 0 and within + len(view) <= len(self._container):
                view[:] = self._container[within : within + len(view)]
            elif len(view):
                memory = (ctypes.c_char * len(view)).from_buffer(view)
                owners.append(memory)
                pieces.append((ctypes.addressof(memory), len(view), self.begin + at))
        if pieces:
            with naming(self.path):
                run_to_end(self.start(pieces, owners))

    def start(self, pieces: list[Piece], owners: object) -> Transfer:
        """Begin to fill memory, which `owners` keeps, with pieces of the file."""
        return self._serving.start(self._server, self._number, pieces, owners)


def _key(rank: int) -> str:
    return f"address/{rank}"


def _memory_at(address: int, count: int) -> memoryview:
    memory = (ctypes.c_char * count).from_address(address)
    return memoryview(memory).cast("B")


def _answers(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Divide pieces into what one answer has."""
    some: list[Piece] = []
    room = ANSWER_BYTES
    for address, count, offset in pieces:
        done = 0
        while done < count:
            taken = min(count - done, room)
            some.append((address + done, taken, offset + done))
            done += taken
            room -= taken
            if room == 0 or len(some) == PIECES_MAX:
                yield some
                some, room = [], ANSWER_BYTES
    if some:
        yield some


__all__ = ["FarShare", "Serving"]
