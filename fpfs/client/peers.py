"""The ranks that save one checkpoint together, and how each learns what became of the others.

A save is a few steps. In each, every rank hands in what it has done and rank 0 answers every rank.
Messages go through the key-value store that torch.distributed has made for the group (TCPStore),
not through its collectives: so a save waits for nothing of the training's, works beside any
backend, and a rank that does not come costs an error and not the group.

Who waits looks whether another rank has failed or died (pidfd, on one machine), so that all end
within a moment. What cannot be seen, as a rank that is stopped, is given up after the timeout; not
one whose process moves bytes, of which it gives signs, however slow its devices are.

Invariants:
  * A rank that fails says so first, and leaves when rank 0 has undone what was begun.
  * Saves are numbered by the calls of each rank, which are counted in the store. A rank that missed
    one joins the one that the others are in.
  * Keys are deleted when nobody may look at them any more: a message and its answer by the rank
    that they are from and for, the rest by the last rank that leaves the call.

Concurrency: used by one thread at a time, but for `check`, `last_signs`, and what is published. A
group may have several calls under way, which all ranks enter in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec
import torch.distributed as dist

from fpfs.client.paths import check_timeout
from fpfs.client.store import Store
from fpfs.core.transfers import moved_bytes

logger = logging.getLogger(__name__)

POLL_MIN_S = 0.0005
POLL_MAX_S = 0.02
POLL_EACH_S = 20e-6
"""Of a large group, whose ranks ask one store."""
LOOK_EACH_S = 0.001
"""Who waits for many does not look at once for whom, which takes 80 us for each of them."""
SIGNS = 4
"""So often within the timeout a rank gives a sign if its process has moved bytes."""
SIGNS_AFTER = 1 / 8
"""Of the timeout: who waits so long looks for signs."""
LOOK_FACTOR = 20
"""Who waits spends one part in so many on finding out for whom."""
LOOK_MAX_S = 10.0
"""And looks again after so long: a look may have taken long because its process was held up."""
SAY_AFTER_S = 10.0
"""A rank that waits so long for others to come says so in the log."""

CAUSE_CHARS_MAX = 10_000
"""Of an error, as others are told it: TCPStore refuses values above 8 MiB."""
ANSWER_KEYS = ("answer/0", "answer/1")

GONE = "its process is no more"

T = TypeVar("T")
R = TypeVar("R")


class RankFailed(RuntimeError):
    """Another rank of the group failed, died or did not come, and so nothing was saved.

    (Or it was saved, but may not survive power loss: the cause says so, or a `Saving` is
    acknowledged. And who has given up waiting for rank 0 does not know whether that one has saved
    all the same.)

    It is raised on all ranks but the one that failed, which raises its own error; also on one that
    does not know that it has, since others have given up waiting for it.
    """

    def __init__(self, rank: int, cause: str, *, errno: int | None = None, gone: bool = False):
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        """In the group."""
        self.cause = cause
        self.errno = errno
        """Of what the rank raised, if it has one: ENOSPC and the like."""
        self.gone = gone
        """The rank's process is no more."""


class Peers(contextlib.AbstractContextManager["Peers"], Protocol):
    """The ranks of a group, of which this process is one."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    """Their numbers in the default group."""
    is_group: bool
    """Whether tensors of which each rank has a part are one tensor to them."""
    signed_s: float
    """When this rank learned last that another has moved bytes: of time.monotonic()."""

    def exchange(
        self, step: str, mine: T, answer: Callable[[list[T]], list[R]], *, of: type[R]
    ) -> R:
        """Hand in `mine`; return what rank 0 answers this rank, which is of type `of`.

        Rank 0 calls `answer` with what all ranks have handed in, by rank. Raises RankFailed.
        """

    def check(self) -> None:
        """Raise RankFailed if a rank is known to have failed or died."""

    def tell(self, error: BaseException) -> None:
        """Let the others know that this rank has failed, before anything is undone."""

    def verdict(self, mine: bool) -> bool | None:
        """After a failure: whether what was begun stays, which rank 0 knows (`mine`) and tells.

        None: it is no more, or does not tell.
        """


class Alone:
    """One process."""

    rank = 0
    size = 1
    signed_s = 0.0

    def __init__(self, *, ranks: tuple[int, ...] = (0,), is_group: bool = False) -> None:
        self.ranks = ranks
        self.is_group = is_group

    def exchange(
        self, step: str, mine: T, answer: Callable[[list[T]], list[R]], *, of: type[R]
    ) -> R:
        """Answer oneself."""
        del step, of
        (own,) = answer([mine])
        return own

    def check(self) -> None:
        """Nobody else can fail."""

    def tell(self, error: BaseException) -> None:
        """Nobody else wants to know."""

    def verdict(self, mine: bool) -> bool | None:
        """It is one's own."""
        return mine

    def __enter__(self) -> Alone:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


ALONE = Alone()
"""As `group`: this process saves by itself, whatever torch.distributed has been told."""


class _Failure(msgspec.Struct, array_like=True):
    rank: int
    cause: str
    errno: int | None
    gone: bool


class Process(msgspec.Struct, array_like=True):
    """A process, as those on the same machine and in the same container know it."""

    kernel: str
    pid_namespace: int
    pid: int

    @staticmethod
    def own() -> Process:
        """This one."""
        with open("/proc/sys/kernel/random/boot_id") as file:
            kernel = file.read().strip()
        return Process(kernel, os.stat("/proc/self/ns/pid").st_ino, os.getpid())

    def is_near(self) -> bool:
        """Whether its pid means the same here."""
        own = Process.own()
        return (self.kernel, self.pid_namespace) == (own.kernel, own.pid_namespace)


class _Watch:
    """Which of the other ranks' processes are no more, of those that can be seen from here.

    `gone` is for any thread.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()
        self._gone: set[int] = set()
        self._polling = threading.Lock()

    def add(self, rank: int, process: Process) -> None:
        if not process.is_near():
            return
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._gone.add(rank)
            return
        except OSError:  # a sandbox without pidfds, where the timeout has to do
            return
        self._pidfds[pidfd] = rank
        self._poll.register(pidfd, select.POLLIN)

    def gone(self, *, wait_s: float = 0.0) -> list[int]:
        with self._polling:
            for pidfd, _ in self._poll.poll(wait_s * 1000):
                self._gone.add(self._pidfds[pidfd])
            return sorted(self._gone)

    def close(self) -> None:
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()


class Ranks:
    """The ranks of a group of torch.distributed. `timeout_s`: docs/client.md, Errors."""

    is_group = True

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float, call: str) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.size = len(self.ranks)
        self._awaited = range(1) if self.rank != 0 else range(1, self.size)
        """The ranks that this one hears of."""
        self._timeout_s = timeout_s
        self._call = call
        self._store = Store(
            group.get_group_store(),
            prefix="fpfs.save",
            timeout_s=timeout_s,
            beat=self._give_sign,
            beat_s=timeout_s / SIGNS,
        )
        self._number = 0
        self._watch = _Watch()
        self._exchanges = 0
        self._exchange = ""
        """The key of the last one, under which its messages are counted."""
        self._came: set[int] = set()
        """Ranks that are seen to have made this call."""
        self._unseen = list(self._awaited)
        """Ranks whose processes are not known."""
        self._look_at_s = self._first_look(time.monotonic())
        """When to ask for these."""
        self._poll_max_s = max(POLL_MAX_S, self.size * POLL_EACH_S)
        self.signed_s = 0.0
        self._signs: dict[int, tuple[int, float]] = {}
        """How many each rank had given, of those looked at, and since when that is known."""
        self._moved_bytes = moved_bytes()
        """When the last sign was given."""
        self._checking = threading.Lock()

    def __enter__(self) -> Ranks:
        try:
            self._store.open()
            with self._reaching_store():
                self._come()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def _come(self) -> None:
        """Say that this rank has come, and find out which call the others are in."""
        self._count()
        # The own signs have a number from now on.
        *awaited, _ = self._store.numbers(
            [*(f"calls/{rank}" for rank in self._awaited), _signs_key(self.rank)]
        )
        for _ in range(max(awaited) - self._number):
            if not self._failed_for_want_of_me():
                break
            self._leave()
            self._number = 0
            self._count()
        self._store.set(f"process/{self.rank}", msgspec.msgpack.encode(Process.own()))

    def _count(self) -> None:
        """Count a call: who sees the number knows what is called. Nothing, if it is counted."""
        (counted,) = self._store.numbers([f"calls/{self.rank}"])
        self._number = self._number or counted + 1
        if counted < self._number:
            self._store.set(f"call/{self.rank}", f"{self._number} {self._call}")
            self._store.add(f"calls/{self.rank}", 1)

    def _failed_for_want_of_me(self) -> bool:
        """Whether the others have given this call up, since this rank did not come."""
        if not self._store.check([self._key("failed")]):
            return False
        failure = msgspec.msgpack.decode(self._store.get(self._key("failed")), type=_Failure)
        return bool(failure.rank == self.rank)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # As in tell().
            with contextlib.suppress(dist.DistError):
                if error is not None:
                    # An interrupt may have come before.
                    self._count()
                    self._fail(error)
                self._leave()
        finally:
            self._watch.close()
            self._store.close()

    def exchange(
        self, step: str, mine: T, answer: Callable[[list[T]], list[R]], *, of: type[R]
    ) -> R:
        """Hand in `mine`; return what rank 0 answers this rank."""
        # Different calls may have steps of one name, and a call a step twice: they must not meet.
        self._exchanges += 1
        self._exchange = name = self._key(f"{self._call}.{self._exchanges}.{step}")
        if self.rank != 0:
            with self._reaching_store():
                answered = self._ask(step, msgspec.msgpack.encode(mine))
            return msgspec.msgpack.decode(answered, type=of)
        keys = {rank: f"{name}/{rank}" for rank in self._awaited}
        with self._reaching_store():
            # To ask for all keys takes a second where there are 16,384.
            self._wait(keys, step, lambda: self._store.add(name, 0) == len(keys), self._timeout_s)
            self._store.delete_key(name)
            # One may have handed in its message and given up then.
            self._check_failed()
            messages = self._store.read(list(keys.values()))
        handed_in = [mine, *(msgspec.msgpack.decode(each, type=type(mine)) for each in messages)]
        own, *answers = answer(handed_in)
        with self._reaching_store():
            self._answer(answers)
        return own

    def _ask(self, step: str, message: bytes) -> bytes:
        """Hand in a message, and count it; return the answer."""
        key = f"{self._exchange}/{self.rank}"
        self._store.put({key: message})
        self._store.add(self._exchange, 1)
        of_all = self._answer_key(self._exchanges)
        # Rank 0 may come as late as this rank may wait, and wait as long for others.
        self._wait({0: of_all}, step, lambda: self._store.check([of_all]), 2 * self._timeout_s)
        self._store.remove([key])
        (answered,) = self._store.read([of_all])
        if answered:
            return answered
        own = f"{of_all}.{self.rank}"
        (answered,) = self._store.read([own])
        self._store.remove([own])
        return answered

    def _answer(self, answers: Sequence[Any]) -> None:
        """Rank 0: answer all by one message; it is empty if each finds one of its own beside it."""
        # All have read the one before, or they would not have asked again.
        self._store.remove([self._answer_key(self._exchanges - 1)])
        of_all = self._answer_key(self._exchanges)
        if all(each is answers[0] for each in answers):
            self._store.put({of_all: msgspec.msgpack.encode(answers[0])})
            return
        encoded = map(msgspec.msgpack.encode, answers)
        keys = (f"{of_all}.{rank}" for rank in self._awaited)
        self._store.put({**dict(zip(keys, encoded, strict=True)), of_all: b""})

    def _answer_key(self, exchange: int) -> str:
        # Two are enough, and known to who forgets them.
        return self._key(ANSWER_KEYS[exchange % 2])

    def check(self) -> None:
        """Raise RankFailed if a rank is known to have failed or died."""
        with self._checking, self._reaching_store():
            # Who has ended, first: a rank that fails says so before it ends.
            gone = self._gone()
            self._check_failed()
            for rank in gone:
                raise RankFailed(rank, GONE, gone=True)

    def _check_failed(self) -> None:
        """Raise RankFailed if a rank has said that it has failed."""
        if self._store.check([self._key("failed")]):
            content = self._store.get(self._key("failed"))
            failure = msgspec.msgpack.decode(content, type=_Failure)
            raise RankFailed(failure.rank, failure.cause, errno=failure.errno, gone=failure.gone)

    def _give_sign(self, store: dist.Store) -> None:
        """Say that this process has moved bytes, if it has since this was called last."""
        found = moved_bytes()
        if found != self._moved_bytes:
            self._moved_bytes = found
            store.add(_signs_key(self.rank), 1)

    def last_signs(self, ranks: Sequence[int]) -> list[float]:
        """Return since when each rank has given no sign, at the latest: of time.monotonic()."""
        with self._reaching_store():
            counts = self._store.numbers(list(map(_signs_key, ranks)))
        has_moved = False
        for rank, count in zip(ranks, counts, strict=True):
            before, _ = self._signs.get(rank, (-1, 0.0))
            if count != before:
                has_moved = has_moved or before >= 0
                self.signed_s = time.monotonic()
                self._signs[rank] = (count, self.signed_s)
        if has_moved and self.rank == 0:
            # The others wait for this one as long as it waits.
            with self._reaching_store():
                self._store.add(_signs_key(0), 1)
        return [self._signs[rank][1] for rank in ranks]

    def tell(self, error: BaseException) -> None:
        """Let the others know that this rank has failed, unless one has before."""
        # The store may have gone, as the others find: what was raised before is told.
        with contextlib.suppress(dist.DistError):
            failure = msgspec.msgpack.encode(_failure_of(error, rank=self.rank))
            self._store.set_first(self._key("failed"), failure)

    def publish(self, name: str, value: bytes) -> None:
        """Let others of this call read a value, until it is withdrawn. For any thread."""
        with self._reaching_store():
            self._set(name, value)

    def published(self, name: str) -> bytes | None:
        """Return what another rank has published, if anything. For any thread."""
        with self._reaching_store():
            return self._store.find(self._key(name))

    def withdraw(self, name: str) -> None:
        """Let nobody read a value any more; nothing, if the store has gone."""
        with contextlib.suppress(dist.DistError):
            self._store.delete_key(self._key(name))

    def verdict(self, mine: bool) -> bool | None:
        """After a failure: whether what was begun stays."""
        try:
            if self.rank == 0:
                self._set("stays", bytes([mine]))
                return mine
            if self._saw("stays"):
                told = bytes(self._store.get(self._key("stays")))
                return told == bytes([True])
        except dist.DistError:  # the store has gone, with rank 0 perhaps
            pass
        return None

    def _gone(self) -> list[int]:
        """Ranks whose processes are no more, of those that this rank waits for."""
        began = time.monotonic()
        if self._unseen and began >= self._look_at_s:
            # One that has come to a save before is known also if it does not come to this one.
            keys = {rank: f"process/{rank}" for rank in self._unseen}
            there = self._store.those_there(list(keys.values()))
            seen = [rank for rank, is_there in zip(keys, there, strict=True) if is_there]
            for rank, process in zip(
                seen, self._store.get_all([keys[rank] for rank in seen]), strict=True
            ):
                self._watch.add(rank, msgspec.msgpack.decode(process, type=Process))
            self._unseen = [
                rank for rank, is_there in zip(keys, there, strict=True) if not is_there
            ]
            self._look_at_s = _next_look(began)
        return self._watch.gone()

    def _absent(self, missing: Mapping[int, str]) -> list[int]:
        """Which ranks, whose messages are missed, have not made this call.

        Raises ValueError if one has made another instead.
        """
        ranks = [rank for rank in missing if rank not in self._came]
        numbers = self._store.numbers([f"calls/{rank}" for rank in ranks])
        came = [rank for rank, number in zip(ranks, numbers, strict=True) if number >= self._number]
        for rank, said in zip(
            came, self._store.get_all([f"call/{rank}" for rank in came]), strict=True
        ):
            number, call = said.decode().split(" ", 1)
            if int(number) == self._number and call != self._call:
                raise ValueError(
                    f"rank {rank} called {call} where this rank called {self._call}: all ranks of"
                    " a group make the same calls, in the same order"
                )
        self._came.update(came)
        return [rank for rank in ranks if rank not in self._came]

    @contextlib.contextmanager
    def _reaching_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            # It may have been rank 0's, which closes connections before it is seen to have ended.
            if self.rank != 0 and 0 in self._watch.gone(wait_s=1.0):
                raise RankFailed(0, GONE, gone=True) from error
            text = str(error).partition("\n")[0]
            raise RankFailed(
                0, f"cannot be reached by torch.distributed's store: {text}"
            ) from error

    def _wait(
        self,
        keys: Mapping[int, str],
        step: str,
        have_come: Callable[[], bool],
        seconds: float,
    ) -> None:
        """Wait for a message from each of some ranks, which has its key.

        seconds: how long a rank may give no sign.
        """
        began = time.monotonic()
        missing = dict(keys)
        poll_s, said, look_at_s = POLL_MIN_S, False, self._first_look(began)
        while not have_come():
            try:
                self.check()
            except RankFailed:
                # What has come counts, whoever failed or ended since.
                if have_come():
                    return
                raise
            now = time.monotonic()
            if now >= look_at_s:
                there = self._store.those_there(list(missing.values()))
                missing = {
                    rank: key
                    for (rank, key), is_there in zip(missing.items(), there, strict=True)
                    if not is_there
                }
                absent = self._absent(missing)
                look_at_s = _next_look(now)
                if not missing and now - began > seconds:
                    return  # who has not counted its message is missed by the next exchange
                if now - began > SIGNS_AFTER * seconds:
                    signs = self.last_signs(list(missing))
                    silent = [
                        rank
                        for rank, sign_s in zip(missing, signs, strict=True)
                        if now - max(began, sign_s) > seconds
                    ]
                    self._give_up(silent, absent, step, seconds)
                if absent and not said and now - began > SAY_AFTER_S:
                    said = True
                    logger.warning(
                        "rank %d waits for %s to call %s", self.rank, named(absent), self._call
                    )
            # The store's own wait cannot be interrupted, and prints a warning each time it is over.
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, self._poll_max_s)

    def _first_look(self, now: float) -> float:
        """When to find out for whom this rank waits."""
        return now + (len(self._awaited) - 1) * LOOK_EACH_S

    def _give_up(
        self, silent: Sequence[int], absent: Sequence[int], step: str, seconds: float
    ) -> None:
        for rank in [rank for rank in absent if rank in silent]:
            raise RankFailed(
                rank,
                f"did not call {self._call} within {seconds:.0f} s. All ranks of a group"
                f" do; to {self._call} with one alone, give group=fpfs.ALONE",
            )
        for rank in silent:
            raise RankFailed(
                rank,
                f"has not come to the end of a step ({step}), and moved no byte for {seconds:.0f}"
                " s: if its devices may take that long, give more as timeout_s",
            )

    def _fail(self, error: BaseException) -> None:
        """Tell the others, and return when rank 0 has undone what was begun."""
        self.tell(error)
        if self.rank == 0:
            self._store.delete_key(self._exchange)
        # Then it reads and writes no more messages of this save.
        elif self._exchange and (not self._rank_0_is_in() or self._saw("ended")):
            own_answers = (f"{self._key(name)}.{self.rank}" for name in ANSWER_KEYS)
            self._store.remove([f"{self._exchange}/{self.rank}", *own_answers])
            self._store.delete_key(self._exchange)

    def _leave(self) -> None:
        """Say that this rank looks at no key of this call any more; the last one deletes them."""
        if self.rank == 0:
            self._set("ended", b"")
        if self._store.add(self._key("left"), 1) == self.size:
            for name in ("failed", "ended", "stays", "left"):
                self._store.delete_key(self._key(name))
            self._store.remove([self._key(name) for name in ANSWER_KEYS])

    def _rank_0_is_in(self) -> bool:
        """Whether rank 0 has come to this call, and has not left it."""
        (number,) = self._store.numbers(["calls/0"])
        return number >= self._number and not self._store.check([self._key("ended")])

    def _saw(self, name: str) -> bool:
        """Wait until rank 0 has said something of this save. Whether it has."""
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([self._key(name)]):
            if self._gone() or not self._rank_0_is_in() or time.monotonic() > deadline:
                return self._store.check([self._key(name)])
            time.sleep(self._poll_max_s)
        return True

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _set(self, name: str, value: bytes) -> None:
        self._store.set(self._key(name), value)


def _signs_key(rank: int) -> str:
    """Of all calls of the rank's process."""
    return f"signs/{rank}"


def _next_look(began_s: float) -> float:
    """When to look again for what was looked for since `began_s`."""
    now = time.monotonic()
    return now + min(LOOK_FACTOR * (now - began_s), LOOK_MAX_S)


def _failure_of(error: BaseException, *, rank: int) -> _Failure:
    if isinstance(error, RankFailed):
        return _Failure(error.rank, error.cause, error.errno, error.gone)
    number = error.errno if isinstance(error, OSError) and type(error.errno) is int else None
    return _Failure(rank, cause_of(error), number, False)


def cause_of(error: BaseException) -> str:
    """Return an error as other ranks are told it."""
    # A path may hold what is no UTF-8.
    cause = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    return cause if len(cause) <= CAUSE_CHARS_MAX else f"{cause[:CAUSE_CHARS_MAX]}…"


def named(ranks: Sequence[int]) -> str:
    """Ranks in a line for people."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def place_in(group: dist.ProcessGroup | Alone | None) -> tuple[int, int]:
    """Return this process's rank in `group` and how many ranks that has; raises as `group_of`."""
    found = group_of(group)
    return (0, 1) if found is None else (dist.get_rank(found), dist.get_world_size(found))


def group_of(group: dist.ProcessGroup | Alone | None) -> dist.ProcessGroup | None:
    """Return the group that is meant; None: this process alone.

    None means torch.distributed's default group, if there is one. Raises TypeError of what is no
    group, ValueError in a process that is not in it.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if isinstance(group, Alone):
        return None
    if group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}, not a group of torch.distributed")
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError("this process is not a rank of the group")
    return group


def peers_of(
    group: dist.ProcessGroup | Alone | None, *, timeout_s: float, call: str = "save"
) -> Peers:
    """Return the ranks of `group`, as `group_of` understands it, which raises what that does.

    call: what all of them call. Raises ValueError of what is no time to wait, too.
    """
    check_timeout(timeout_s)
    found = group_of(group)
    if found is None:
        return ALONE
    if dist.get_world_size(found) == 1:
        return Alone(ranks=(dist.get_rank(),), is_group=True)
    return Ranks(found, timeout_s=timeout_s, call=call)
