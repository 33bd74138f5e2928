"""Ranks that do not make a call together: one fails before it begins, is too late, or gives up."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fpfs import client
from fpfs.client import peers, writing
from fpfs.client import store as stores
from fpfs.client.shares import reading
from tests.support.failures.calls import Slow
from tests.support.ranks import Worlds
from tests.support.states import (
    FORMER,
    answer_patiently,
    is_as_before,
    large_state,
    own_directory,
)

LONG_S = 1000.0
"""A timeout that a test does not live to see."""


def said_of(call: Callable[[], object]) -> str:
    """The type and text of what a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "done"


def default_store() -> dist.Store:
    """Of all ranks."""
    return dist.distributed_c10d._get_default_store()


NO_BEGIN: dict[str, tuple[Any, str, Exception]] = {
    "OSError: [Errno 24] Too many open files": (
        peers.Process,
        "own",
        OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    ),
    "RuntimeError: can't start new thread": (
        threading.Thread,
        "start",
        RuntimeError("can't start new thread"),
    ),
}
"""What a call fails with before it does anything: what fails, and how."""


def fail_at_the_beginning(path: str, failing: int, cause: str) -> list[str]:
    """As a rank: save three times; of the first call one rank fails before it does anything."""
    of, name, error = NO_BEGIN[cause]
    patch, said = pytest.MonkeyPatch(), []

    def fail(*_: object) -> None:
        patch.undo()
        raise error

    if dist.get_rank() == failing:
        patch.setattr(of, name, fail)
    for step in range(3):
        state = {"weight": torch.full((300_000,), float(step))}
        said.append(said_of(lambda state=state: client.save(state, path, timeout_s=LONG_S)))
    return said


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("cause", NO_BEGIN)
def test_a_call_that_fails_at_its_beginning_counts(
    forks: Worlds, path: Path, failing: int, cause: str
) -> None:
    outcomes = forks.start(3, fail_at_the_beginning, path, failing, cause).values()
    assert outcomes.pop(failing) == [cause, "done", "done"]
    assert outcomes == [[f"RankFailed: rank {failing}: {cause}", "done", "done"]] * 2
    assert client.load(path)["weight"].unique().tolist() == [2.0]


def fail_at_once(path: str) -> str:
    """As a rank: ranks 1 and 2 fail, neither of which knows of the other, before rank 0 comes."""
    rank, check = dist.get_rank(), stores.Store.check

    def see_no_failure(self: stores.Store, keys: Sequence[str]) -> bool:
        return not keys[0].endswith("/failed") and check(self, keys)

    if rank != 0:
        pytest.MonkeyPatch().setattr(stores.Store, "check", see_no_failure)
    if rank != 1:
        default_store().wait([f"failed {2 if rank == 0 else 1}"])
    said = said_of(lambda: client.save({"bad": lambda: None} if rank else {}, path))
    default_store().set(f"failed {rank}", "")
    return said


def test_the_first_of_two_failures_is_told(forks: Worlds, path: Path) -> None:
    told, *own = forks.start(3, fail_at_once, path).values()
    assert told.startswith("RankFailed: rank 1: AttributeError: ")
    assert [each.split(":")[0] for each in own] == ["AttributeError"] * 2


def save_in_groups(path: str) -> str:
    """As a rank: save; rank 1 takes another group than the others."""
    part = dist.new_group([0, 1])
    group = part if dist.get_rank() == 1 else None
    limit_s = LONG_S if dist.get_rank() == 2 else 4.0  # rank 0 gives up for it
    return said_of(lambda: client.save(large_state(seed=1), path, group=group, timeout_s=limit_s))


def test_ranks_that_take_unlike_groups(forks: Worlds, path: Path) -> None:
    client.save(FORMER, path)
    for rank, said in enumerate(forks.start(3, save_in_groups, path).values()):
        missing = 0 if rank == 1 else 1
        assert said.startswith(f"RankFailed: rank {missing}: did not call save within ")
    assert is_as_before(path)


def call_wrongly(root: str) -> list[str]:
    """As a rank: rank 1 gives what cannot be."""
    wrong = dist.get_rank() == 1
    own = own_directory(root, 2)
    place: Any = 7 if wrong else own
    calls: list[Callable[[], object]] = [
        lambda: client.load_shares(place, timeout_s=LONG_S),
        lambda: client.save_shares({}, own, copies=0 if wrong else 1, timeout_s=LONG_S),
        lambda: client.save_shares({}, own, copies=2 if wrong else 1, timeout_s=LONG_S),
        lambda: client.save_shares({}, place, timeout_s=LONG_S),
        lambda: client.save_shares({}, own, timeout_s=LONG_S),
    ]
    return [said_of(call) for call in calls]


def test_wrong_arguments_of_one_rank(forks: Worlds, tmp_path: Path) -> None:
    right, wrong = forks.start(2, call_wrongly, str(tmp_path)).values()
    copies = "keeps 2 copies, and rank 0 1: all ranks give the same"
    no_path = "TypeError: fpfs takes a path, not int"
    assert [each.partition(":")[0] for each in wrong[:2]] == ["TypeError", "ValueError"]
    assert wrong[2] == right[2] == f"RankFailed: rank 1: {copies}"
    for number, cause in ((0, no_path), (1, "ValueError: copies is 0"), (3, no_path)):
        assert wrong[number].startswith(cause)
        assert right[number] == f"RankFailed: rank 1: {wrong[number]}"
    assert right[4] == wrong[4] == "done"


def give_up_on_rank_0(path: str) -> str:
    """As a rank: rank 0 writes for longer than others wait."""
    if dist.get_rank() == 0:

        def write(*arguments: Any, **options: Any) -> Any:
            default_store().wait(["1 gave up", "2 gave up"])
            return sound(*arguments, **options)

        sound = writing.write_pieces
        writing.write_pieces = write  # type: ignore[assignment]
    else:
        exchange = peers.Ranks.exchange

        def exchange_impatiently(self: peers.Ranks, step: str, *arguments: Any, **of: Any) -> Any:
            if step == "part":
                self._timeout_s = 1.0
            return exchange(self, step, *arguments, **of)

        peers.Ranks.exchange = exchange_impatiently  # type: ignore[method-assign]
    tell = peers.Ranks.tell

    def tell_and_say(self: peers.Ranks, error: BaseException) -> None:
        tell(self, error)
        default_store().set(f"{self.rank} gave up", "")

    peers.Ranks.tell = tell_and_say  # type: ignore[method-assign]
    return said_of(lambda: client.save(large_state(seed=3), path, timeout_s=LONG_S))


def test_what_others_gave_up_is_not_saved(forks: Worlds, path: Path) -> None:
    client.save(FORMER, path)
    first, *others = forks.start(3, give_up_on_rank_0, path).values()
    for each in others:
        assert each.startswith("RankFailed: rank 0: has not come to the end of a step (part), and ")
        assert "moved no byte for 2 s: if" in each
    assert first in others
    assert is_as_before(path)


def be_slow(root: str, slow: int, how: str) -> list[str]:
    """As a rank: save and load; one rank takes longer for each than others wait for silent ones."""
    limit_s = 5.0
    # The others wait for rank 0 twice as long as it for them.
    slow_s = limit_s * (1.5 if slow else 2.5)
    path = os.path.join(root, "state.pt")

    def slow_at_first(module: Any, name: str) -> None:
        function = getattr(module, name)

        def be_slow(*arguments: Any, **named: Any) -> Slow:
            setattr(module, name, function)
            return Slow(function(*arguments, **named), slow_s)

        setattr(module, name, be_slow)

    if dist.get_rank() == slow:
        slow_at_first(writing, "write_pieces")
        slow_at_first(reading.OpenShare, "start")
    state = large_state(seed=3)
    if how == "one file":
        return [said_of(lambda: client.save(state, path, timeout_s=limit_s))]
    if how == "beside":
        with client.AsyncSaver(timeout_s=limit_s) as saver:
            saver.save(state, path)
            return [said_of(saver.wait)]
    own = own_directory(root, 1)
    return [
        said_of(lambda: client.save_shares(state, own, timeout_s=limit_s)),
        said_of(lambda: client.load_shares(own, into=state, timeout_s=limit_s)),
    ]


@pytest.mark.parametrize(
    ("slow", "how"),
    [
        (1, "beside"),
        pytest.param(0, "one file", marks=pytest.mark.long),
        pytest.param(1, "shares", marks=pytest.mark.long),
    ],
)
def test_who_is_slow_is_waited_for(forks: Worlds, in_memory: Path, slow: int, how: str) -> None:
    said = forks.start(3, be_slow, in_memory, slow, how).values()
    assert said == [["done"] * (2 if how == "shares" else 1)] * 3


class Unpicklable:
    """Raises what it is told to."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> Any:
        """Fail to be pickled."""
        raise self._error


def fail_oddly(path: str) -> list[str]:
    """As a rank: rank 1 fails of what is hard to tell."""
    said = []
    for error in (ValueError("x" * 9_000_000), OSError("backend", "detail")):
        state = {"bad": Unpicklable(error) if dist.get_rank() == 1 else None}
        said.append(said_of(lambda state=state: client.save(state, path, timeout_s=LONG_S))[:100])
    client.save({}, path)
    return said


def test_errors_that_are_hard_to_tell(forks: Worlds, path: Path) -> None:
    right, wrong = forks.start(2, fail_oddly, path).values()
    for told, own in zip(right, wrong, strict=True):
        assert told == f"RankFailed: rank 1: {own}"[:100]
    assert wrong[0].startswith("ValueError: xxx")
    assert wrong[1] == "OSError: [Errno backend] detail"


def interrupt_waiting(path: str) -> str:
    """As a rank: rank 1 is interrupted while it waits for rank 0, which comes then."""
    if dist.get_rank() == 0:
        default_store().wait(["interrupted"])
        return said_of(lambda: client.save({}, path, timeout_s=LONG_S))
    wait = peers.Ranks._wait

    def be_interrupted(self: peers.Ranks, *arguments: Any) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait(self, *arguments)

    peers.Ranks._wait = be_interrupted  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        client.save({}, path, timeout_s=LONG_S)
    default_store().set("interrupted", "")
    return "interrupted"


def test_who_waits_for_rank_0_can_be_interrupted(forks: Worlds, path: Path) -> None:
    first, second = forks.start(2, interrupt_waiting, path).values()
    assert second == "interrupted"
    assert first == "RankFailed: rank 1: KeyboardInterrupt: "
    assert not path.exists()


def interrupt_counting(path: str, rank: int, calls: int) -> list[Any]:
    """As a rank: one is interrupted after so many calls of the store; how many keys are left."""
    keys, said = [], []
    call = stores.Store._call
    left = calls

    def be_interrupted(self: stores.Store, *arguments: Any) -> Any:
        nonlocal left
        found = call(self, *arguments)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return found

    for number in range(3):
        if number == 1 and dist.get_rank() == rank:
            stores.Store._call = be_interrupted  # type: ignore[method-assign]
        try:
            client.save({}, path, timeout_s=LONG_S)
        except (KeyboardInterrupt, client.RankFailed) as error:
            said.append(f"{type(error).__name__}: {error}")
        dist.barrier()
        keys.append(default_store().num_keys())
        dist.barrier()
    return [said, keys[1] == keys[0] == keys[2]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_who_is_interrupted_while_it_comes_says_so(
    forks: Worlds, path: Path, rank: int, calls: int
) -> None:
    for other, (said, same_keys) in enumerate(
        forks.start(2, interrupt_counting, path, rank, calls).values()
    ):
        cause = "KeyboardInterrupt: "
        assert said == [cause if other == rank else f"RankFailed: rank {rank}: {cause}"]
        assert same_keys


def look_for_long(path: str) -> str:
    """As a rank: rank 1 does not come, and each look of rank 0 takes as if it had been held up."""
    peers.LOOK_FACTOR, peers.LOOK_MAX_S = 10**9, 0.1  # type: ignore[misc]
    answer_patiently()
    said = ""
    if dist.get_rank() == 0:
        said = said_of(lambda: client.save({}, path, timeout_s=0.5))
    dist.barrier()
    return said


def test_a_look_that_took_long_is_not_the_last(forks: Worlds, path: Path) -> None:
    said = forks.start(2, look_for_long, path).values()
    assert said[0].startswith("RankFailed: rank 1: did not call save within ")


def miss_calls(path: str) -> list[int]:
    """As a rank: rank 0 misses calls; returns how many keys the store has when all have saved."""
    answer_patiently()
    state, keys = large_state(seed=3), []
    for round_ in range(3):
        if dist.get_rank() != 0 and round_ > 0:
            with pytest.raises(client.RankFailed, match="rank 0: did not call save within 0 s"):
                client.save(state, path, timeout_s=0.1)
        dist.barrier()
        for _ in range(3):
            with contextlib.suppress(client.RankFailed):
                client.save(state, path)
                break
        dist.barrier()
        client.save(state, path)
        dist.barrier()
        keys.append(default_store().num_keys())
        dist.barrier()
    return keys


def test_nothing_is_left_of_calls_that_rank_0_missed(forks: Worlds, path: Path) -> None:
    for keys in forks.start(3, miss_calls, path).values():
        assert keys[1:] == keys[:1] * 2
