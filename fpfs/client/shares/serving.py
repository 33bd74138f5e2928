"""Ranks read shares for those who do not see them.

Who needs bytes of a share asks a rank that sees it, through the key-value store of the group, and
that one reads them and sends them by gloo, over connections of their own. So the training's backend
is not waited for, and whoever waits for an answer looks whether another rank has failed or died.

A rank that asks and gives up, since another one has failed, says so before the answer comes: either
the answer is taken, or it is not sent. For gloo waits for the receiver of each message.

Concurrency: `start` and `close` are called by one thread. A thread answers, one at a time; others
ask, each one rank at a time.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import datetime as dt
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from fpfs.client.parallel_file import Piece
from fpfs.client.peers import POLL_MAX_S, POLL_MIN_S, RankFailed, Ranks
from fpfs.client.shares.reading import OpenShare
from fpfs.core.transfers import Transfer, run_to_end

logger = logging.getLogger(__name__)

ANSWER_BYTES = 16 * 1024 * 1024
PIECES_MAX = 10_000
"""Of an answer."""
ASKED_AT_ONCE = 2
"""While one answer is sent, the next is read."""
THREADS_MAX = 8
_TAGS = 1 << 30
_GIVEN_UP = "given up"
"""Instead of an answer."""


_senders: weakref.WeakKeyDictionary[dist.ProcessGroup, Any] = weakref.WeakKeyDictionary()
"""What bytes are sent by, of each group of ranks. It is kept: connecting takes its time."""


def _sender_of(peers: Ranks, timeout_s: float) -> Any:
    """Return the same on all ranks: the one that all have, or a new one."""
    found = _senders.get(peers.group)
    all_have = peers.exchange(
        "sender", found is not None, lambda have: [all(have)] * len(have), of=bool
    )
    if not all_have:
        # Not by dist.new_group, which gives one of the same ranks the same name, and so would find
        # the addresses of one that has failed.
        store = dist.PrefixStore("sender", peers.store)
        limit = dt.timedelta(seconds=timeout_s)
        try:
            found = dist.ProcessGroupGloo(store, peers.rank, peers.size, limit)
        except RuntimeError as error:
            peers.check()
            text = str(error).partition("\n")[0]
            raise RankFailed(peers.rank, f"cannot connect to the others by gloo: {text}") from error
        _senders[peers.group] = found
    return found


class _Question(msgspec.Struct, array_like=True):
    rank: int
    """Who asks."""
    share: int
    pieces: list[tuple[int, int]]
    """Offset and bytes, in the share."""


class _Answer(msgspec.Struct, array_like=True):
    """It is followed by the bytes, unless reading has failed."""

    errno: int | None = None
    error: str = ""


class _Asked(NamedTuple):
    server: int
    ticket: int
    pieces: list[Piece]
    """Where they belong, in order."""

    @property
    def bytes(self) -> int:
        """Of all."""
        return sum(count for _, count, _ in self.pieces)

    @property
    def key(self) -> str:
        """Where the answer is."""
        return f"answer/{self.server}/{self.ticket}"


class Serving:
    """Answers other ranks, and asks them. `shares`: those that this rank reads for others.

    All ranks of the group make one at the same time. As a context it is closed in the end; a rank
    leaves it when no other needs it any more, or when one has failed.
    """

    def __init__(self, peers: Ranks, shares: Mapping[int, OpenShare], *, timeout_s: float) -> None:
        self._peers = peers
        self._shares = shares
        self._timeout_s = timeout_s
        self._store = peers.store
        self._checking = threading.Lock()
        self._ends = threading.Event()
        """Nobody is answered any more."""
        self._gives_up = threading.Event()
        self._sender = _sender_of(peers, timeout_s)
        self._asking = concurrent.futures.ThreadPoolExecutor(THREADS_MAX, "fpfs-ask")
        self._answering = threading.Thread(target=self._answer_all, name="fpfs-answer")
        self._answering.start()

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # What has failed may have broken its connections.
            _senders.pop(self._peers.group, None)
        self.close()

    def close(self) -> None:
        """Give up what is asked, answer nobody any more, and return when nothing is under way."""
        self.give_up()
        self._ends.set()
        self._asking.shutdown(cancel_futures=True)
        self._answering.join()

    def give_up(self) -> None:
        """Ask nothing any more, for the call fails."""
        self._gives_up.set()

    def start(self, server: int, share: int, pieces: list[Piece], owners: object) -> Transfer:
        """Begin to fill memory, which `owners` keeps, with what `server` reads of a share."""
        return _Pending(self, self._asking.submit(self._ask_all, server, share, pieces, owners))

    def _ask_all(self, server: int, share: int, pieces: list[Piece], owners: object) -> None:
        asked: collections.deque[_Asked] = collections.deque()
        try:
            for some in _answers(pieces):
                asked.append(self._ask(server, share, some))
                if len(asked) == ASKED_AT_ONCE:
                    self._receive(asked[0])
                    asked.popleft()
            while asked:
                self._receive(asked[0])
                asked.popleft()
        except BaseException:
            for each in asked:
                self._give_up(each)
            raise
        finally:
            del owners

    def _ask(self, server: int, share: int, pieces: list[Piece]) -> _Asked:
        places = [(offset, count) for _, count, offset in pieces]
        question = msgspec.msgpack.encode(_Question(self._peers.rank, share, places))
        ticket = self._store.add(f"tickets/{server}", 1)
        self._store.set(f"question/{server}/{ticket}", question)
        return _Asked(server, ticket, pieces)

    def _receive(self, asked: _Asked) -> None:
        """Wait for an answer, and put it where it belongs."""
        deadline_s = time.monotonic() + self._timeout_s
        poll_s = POLL_MIN_S
        while not self._store.check([asked.key]):
            self._check()
            if self._gives_up.is_set():
                raise concurrent.futures.CancelledError
            if time.monotonic() > deadline_s:
                raise RankFailed(asked.server, f"did not answer for {self._timeout_s:.0f} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, POLL_MAX_S)
        self._take(asked)

    def _take(self, asked: _Asked) -> None:
        """Receive an answer that is there."""
        answer = msgspec.json.decode(self._store.get(asked.key), type=_Answer)
        self._store.delete_key(asked.key)
        if answer.errno is not None:
            raise OSError(answer.errno, answer.error)
        if len(asked.pieces) == 1:
            target = _tensor_at(asked.pieces[0][0], asked.bytes)
        else:
            target = torch.empty(asked.bytes, dtype=torch.uint8, device="cpu")
        try:
            self._sender.recv([target], asked.server, asked.ticket % _TAGS).wait()
        except RuntimeError as error:
            self._check()
            text = str(error).partition("\n")[0]
            raise RankFailed(asked.server, f"does not send what it has read: {text}") from error
        if len(asked.pieces) > 1:
            at = target.data_ptr()
            for address, count, _ in asked.pieces:
                ctypes.memmove(address, at, count)
                at += count

    def _give_up(self, asked: _Asked) -> None:
        """Let an answer not be sent, or take it."""
        try:
            if bytes(self._store.compare_set(asked.key, "", _GIVEN_UP)) != _GIVEN_UP.encode():
                scratch = torch.empty(asked.bytes, dtype=torch.uint8, device="cpu")
                self._take(asked._replace(pieces=[(scratch.data_ptr(), asked.bytes, 0)]))
        except (RuntimeError, OSError) as error:
            # Something has failed before, which is told; the other rank may have died of it.
            logger.debug("an answer of rank %d is lost: %s", asked.server, error)

    def _check(self) -> None:
        with self._checking:
            self._peers.check()

    def _answer_all(self) -> None:
        """Answer questions in the order of their tickets, until it ends."""
        rank, ticket, poll_s = self._peers.rank, 1, POLL_MIN_S
        buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * ASKED_AT_ONCE
        sent: list[dist.Work | None] = [None] * ASKED_AT_ONCE
        try:
            while not self._ends.is_set():
                key = f"question/{rank}/{ticket}"
                if not self._store.check([key]):
                    time.sleep(poll_s)
                    poll_s = min(2 * poll_s, POLL_MAX_S)
                    continue
                question = msgspec.msgpack.decode(self._store.get(key), type=_Question)
                self._store.delete_key(key)
                place = ticket % ASKED_AT_ONCE
                _wait_for(sent[place])
                size = sum(count for _, count in question.pieces)
                if buffers[place].numel() < size:
                    buffers[place] = torch.empty(size, dtype=torch.uint8, device="cpu")
                sent[place] = self._answer(question, ticket, buffers[place][:size])
                ticket, poll_s = ticket + 1, POLL_MIN_S
            for work in sent:
                _wait_for(work)
            self._store.delete_key(f"tickets/{rank}")
        except (RuntimeError, dist.DistError) as error:
            # The store or a rank has gone, which each rank that waits for it finds out itself.
            logger.debug("rank %d answers nobody any more: %s", rank, error)

    def _answer(self, question: _Question, ticket: int, content: torch.Tensor) -> dist.Work | None:
        """Read what is asked for, and begin to send it."""
        answer = _Answer()
        address, pieces = content.data_ptr(), list[Piece]()
        for offset, count in question.pieces:
            pieces.append((address, count, offset))
            address += count
        share = self._shares[question.share]
        try:
            run_to_end(share.start(pieces, content))
        except OSError as error:
            number = error.errno or errno.EIO
            answer = _Answer(number, f"{os.strerror(number)} (as rank {self._peers.rank} reads it)")
        told = msgspec.json.encode(answer)
        key = f"answer/{self._peers.rank}/{ticket}"
        if bytes(self._store.compare_set(key, "", told.decode())) != told:
            self._store.delete_key(key)  # given up
            return None
        if answer.errno is not None:
            return None
        return self._sender.send([content], question.rank, ticket % _TAGS)


class _Pending:
    """What is asked for."""

    def __init__(self, serving: Serving, future: concurrent.futures.Future[None]) -> None:
        self._serving = serving
        self._future = future

    def wait(self, seconds: float, /) -> bool:
        return bool(concurrent.futures.wait([self._future], seconds).done)

    def check(self) -> None:
        self._future.result()

    def close(self) -> None:
        if not self._future.done():
            self._serving.give_up()
            concurrent.futures.wait([self._future])


def _wait_for(work: dist.Work | None) -> None:
    try:
        if work is not None:
            work.wait()
    except RuntimeError as error:
        # Who was to receive it has gone, which who waits for that rank finds out.
        logger.debug("what was read could not be sent: %s", error)


def _tensor_at(address: int, count: int) -> torch.Tensor:
    memory = (ctypes.c_char * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


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


__all__ = ["Serving"]
