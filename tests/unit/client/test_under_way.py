"""Ranks that have several calls under way: saves beside training, and others meanwhile."""

from __future__ import annotations

import errno
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fpfs import client
from fpfs.client import AsyncSaver, async_saving, writing
from fpfs.client.replacement import Replacement
from fpfs.client.shares.format import MANIFEST
from fpfs.client.updates import Held
from fpfs.core import transfers
from tests.support.failures.calls import die
from tests.support.ranks import Worlds
from tests.support.states import (
    answer_patiently,
    directories,
    numbered,
    own_directory,
    same,
    when_awaited,
)

SAVES = 4


def store_of() -> dist.Store:
    """The one of the ranks' default group."""
    return dist.distributed_c10d._get_default_store()


def write_when_told(rank: int) -> threading.Event:
    """Have a rank write nothing beside training until it is told to."""
    go = threading.Event()
    if dist.get_rank() != rank:
        return go

    def write(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith("fpfs-save"):
            assert go.wait(60)
        return transfers.write_pieces(*arguments, **options)

    writing.write_pieces = write  # type: ignore[attr-defined, assignment]
    return go


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "tensor": torch.full((300_000,), step)}


def save_when_one_is_closed(path: str, what: str) -> list[str]:
    """As a rank: save, though 1 cannot, and save again. What is raised."""
    saver = AsyncSaver()
    errors = []
    if dist.get_rank() == 1 and what == "closed":
        saver.close()
    for step in range(2):
        if dist.get_rank() == 1 and step == 1:
            saver = AsyncSaver()
        elif dist.get_rank() == 1 and what == "no memory":
            saver._updates.hold = fail_for_memory  # type: ignore[method-assign]
        try:
            saver.save(state_of(step), path).durable.result(60)
        except (ValueError, MemoryError, client.RankFailed) as error:
            errors.append(f"{type(error).__name__}: {error}")
    saver.close()
    return errors


def fail_for_memory() -> Held:
    raise MemoryError("none")


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("closed", "ValueError: the AsyncSaver is closed: make another one"),
        ("no memory", "MemoryError: none"),
    ],
)
def test_one_that_cannot_begin_is_told_of(
    forks: Worlds, tmp_path: Path, what: str, error: str
) -> None:
    """And does not come to the call after it while the others are at this one."""
    path = tmp_path / "state.pt"
    found = forks.start(2, save_when_one_is_closed, str(path), what).values()
    assert found == [[f"RankFailed: rank 1: {error}"], [error]]
    assert client.load(path)["step"] == 1


def save_several(root: str, waits: int) -> list[Any]:
    """As a rank: have several saves under way, of which one rank writes nothing yet."""
    go = write_when_told(waits)
    with AsyncSaver(in_flight=SAVES) as saver:
        began = []
        for step in range(SAVES):
            state = state_of(step)
            began.append(saver.save(state, os.path.join(root, f"{step}.pt")))
            state["tensor"].fill_(-1)
        none = [saving.acknowledged.done() for saving in began]
        dist.barrier()
        go.set()
        for step in range(SAVES, 2 * SAVES):
            saver.save(state_of(step), os.path.join(root, f"{step}.pt"))
            assert began[step - SAVES].durable.done()
        saver.wait()
    return none


@pytest.mark.parametrize("waits", [0, 1])
def test_ranks_have_several_under_way(forks: Worlds, tmp_path: Path, waits: int) -> None:
    assert forks.start(3, save_several, str(tmp_path), waits).values() == [[False] * SAVES] * 3
    for step in range(2 * SAVES):
        assert same(client.load(tmp_path / f"{step}.pt"), state_of(step))
    assert len(os.listdir(tmp_path)) == 2 * SAVES


def save_beside_what_hangs(root: str, hangs: int) -> str:
    """As a rank: save while one rank's part of a save before is not written."""
    go = write_when_told(hangs)
    path = os.path.join(root, "state.pt")
    ends = async_saving.ends
    with AsyncSaver(strict=False, timeout_s=60) as saver:
        began = saver.save(state_of(1), path)
        if dist.get_rank() == hangs:
            async_saving.ends = lambda future, *, moved, silent_s: ends(  # type: ignore[assignment]
                future, moved=moved, silent_s=0.5
            )
        failed = saver.save(state_of(2), path)
        async_saving.ends = ends
        go.set()
        began.durable.exception(60)
        dist.barrier()
        saver.save(state_of(3), path).durable.result(60)
    error = failed.durable.exception(60)
    return f"{type(error).__name__}: {error}"


def test_one_that_hung_and_goes_on_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def write(*arguments: Any, **options: Any) -> Any:
        assert go.wait(60)
        return transfers.write_pieces(*arguments, **options)

    monkeypatch.setattr(writing, "write_pieces", write)
    with AsyncSaver(timeout_s=0.1) as saver:
        began = saver.save(state_of(1), tmp_path / "state.pt")
        with pytest.raises(TimeoutError):
            saver.save(state_of(2), tmp_path / "state.pt")
        saver._timeout_s = 60
        transfers.count_moved(1)
        when_awaited(began.durable, go.set)
        saver.save(state_of(3), tmp_path / "state.pt")
    assert client.load(tmp_path / "state.pt")["step"] == 3


@pytest.mark.parametrize("hangs", [0, 1])
def test_all_are_told_of_a_save_that_hangs(forks: Worlds, tmp_path: Path, hangs: int) -> None:
    found = forks.start(3, save_beside_what_hangs, str(tmp_path), hangs).values()
    cause = (
        f"TimeoutError: the save of {tmp_path}/state.pt has not ended, and moved no byte for 60 s"
    )
    for rank, error in enumerate(found):
        assert error == (cause if rank == hangs else f"RankFailed: rank {hangs}: {cause}")
    assert client.load(tmp_path / "state.pt")["step"] == 3


def keys_of_many(root: str) -> list[int]:
    """As a rank: how many keys the store has after each of some rounds."""
    keys = []
    with AsyncSaver(in_flight=3, strict=False) as saver:
        for round_ in range(4):
            for step in range(5):
                saver.save(state_of(step), os.path.join(root, f"{step}.pt"))
            if round_ == 2:  # A save that fails leaves nothing, either.
                saver.save(state_of(0), os.path.join(root, "none", "state.pt"))
            client.load(os.path.join(root, "former.pt"))
            saver.wait()
            dist.barrier()
            keys.append(store_of().num_keys())
            dist.barrier()
    return keys


def test_nothing_is_left_in_the_store(forks: Worlds, tmp_path: Path) -> None:
    client.save(state_of(7), tmp_path / "former.pt")
    for keys in forks.start(3, keys_of_many, str(tmp_path)).values():
        assert keys == keys[:1] * 4


def call_meanwhile(root: str, waits: int) -> list[Any]:
    """As a rank: save and load by other calls while a save is under way."""
    go = write_when_told(waits)
    with AsyncSaver() as saver:
        began = saver.save(state_of(1), os.path.join(root, "beside.pt"))
        found = [client.load(os.path.join(root, "former.pt"))["step"]]
        directory = own_directory(root, 2)
        client.save_shares(numbered(2), directory, timeout_s=30)
        found.append(client.load(directories(Path(root), 2))["step"])
        found.append(began.acknowledged.done())
        dist.barrier()
        go.set()
    return found


@pytest.mark.parametrize("waits", [0, 1, 2])
def test_other_calls_meanwhile(forks: Worlds, tmp_path: Path, waits: int) -> None:
    """They neither wait for the save nor take its messages."""
    client.save(state_of(7), tmp_path / "former.pt")
    assert forks.start(3, call_meanwhile, str(tmp_path), waits).values() == [[7, 2, False]] * 3
    assert same(client.load(tmp_path / "beside.pt"), state_of(1))


def fail_once(root: str, killed: bool) -> list[str]:
    """As a rank: the second of several saves fails on rank 1; what each call has raised."""
    count = 0

    def write(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2 and dist.get_rank() == 1:
            if killed:
                die()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return transfers.write_pieces(*arguments, **options)

    writing.write_pieces = write  # type: ignore[attr-defined, assignment]
    said, began = [], []
    saver = AsyncSaver(in_flight=2, timeout_s=60)
    for step in range(6):
        if step == 2 and dist.get_rank() == 1:
            began[1].durable.exception(60)  # It knows, and waits for the same call nevertheless.
        try:
            began.append(saver.save(state_of(step), os.path.join(root, f"{step}.pt")))
            said.append("")
        except (OSError, client.RankFailed) as error:
            said.append(f"{type(error).__name__}: {str(error).partition(' No')[0]}")
            if killed:
                return said
    saver.close()
    return said


def test_all_learn_of_a_failure_at_the_same_call(forks: Worlds, tmp_path: Path) -> None:
    other, failed, last = forks.start(3, fail_once, str(tmp_path), False).values()
    # The call that waits for the second save begins none.
    assert other == last
    assert other[3].startswith("RankFailed: rank 1: OSError: [Errno 28]")
    assert failed[3] == "OSError: [Errno 28]"
    assert [said[:3] + said[4:] for said in (other, failed)] == [[""] * 5] * 2
    assert sorted(os.listdir(tmp_path)) == ["0.pt", "2.pt", "4.pt", "5.pt"]
    for step in (0, 2, 4, 5):
        assert same(client.load(tmp_path / f"{step}.pt"), state_of(step))


def learn_different_things(path: str, given_up: bool) -> list[Any]:
    """As a rank: a flush takes longer than rank 1 waits for it, or fails of a limit of its own.

    Returns of each step whether it failed, and as rank 0 which values the file has.
    """
    answer_patiently()
    flush, flushes = Replacement.flush, 0

    def flush_at_last(self: Replacement) -> None:
        nonlocal flushes
        flushes += 1
        if flushes == 1 and not given_up:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if flushes == 1:
            store_of().wait(["given up"], timedelta(seconds=60))
        flush(self)

    Replacement.flush = flush_at_last  # type: ignore[method-assign]
    is_first = dist.get_rank() == 0
    saver = AsyncSaver(timeout_s=60 if is_first or not given_up else 3)
    found: list[Any] = []
    for step in range(5):
        try:
            failed = saver.save(state_of(step), path).durable.exception(60) is not None
        except (OSError, client.RankFailed):
            failed = True
        store_of().set("given up", "")
        values = torch.load(path)["tensor"].unique().tolist() if is_first and not failed else []
        found.append([failed, values])
    return found


@pytest.mark.parametrize("given_up", [False, True])
def test_ranks_that_learn_different_things_stay_at_the_same_call(
    forks: Worlds, in_memory: Path, given_up: bool
) -> None:
    path = in_memory / "state.pt"
    first, other = forks.start(2, learn_different_things, str(path), given_up).values()
    assert other == [[True, []]] * 2 + [[False, []]] * 3
    assert first[0] == ([False, [0]] if given_up else [True, []])
    assert first[1:] == [[True, []], [False, [2]], [False, [3]], [False, [4]]]


def give_up_late(path: str, call: str, who: int) -> str:
    """As a rank: 1 gives a save up before it has written, or 0 when all is written but the name.

    Returns what the save of who does not fails of.
    """
    saver = AsyncSaver(strict=False)
    getattr(saver, call)(numbered(1), path).durable.result(60)
    held, go, is_who = threading.Event(), threading.Event(), dist.get_rank() == who
    complete, write_pieces = Replacement.complete, writing.write_pieces

    def complete_when_told(self: Replacement, *, durable: bool) -> None:
        if os.path.basename(self.path) in ("state.pt", MANIFEST):
            held.set()
            assert go.wait(60)
        complete(self, durable=durable)

    def write_when_told(*arguments: Any, **options: Any) -> Any:
        held.set()
        assert go.wait(60)
        return write_pieces(*arguments, **options)

    patch = pytest.MonkeyPatch()
    if is_who and who == 0:
        patch.setattr(Replacement, "complete", complete_when_told)
    elif is_who:
        patch.setattr(writing, "write_pieces", write_when_told)
    saving = getattr(saver, call)(numbered(2), path)
    if is_who:
        assert held.wait(60)
        saving.give_up(TimeoutError("no byte was moved"))
        go.set()
        saver._writing.submit(int).result(60)
    return str(saving.durable.exception(60))


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("call", ["save", "save_shares"])
def test_what_one_rank_gives_up_gets_no_name(
    forks: Worlds, path: Path, call: str, who: int
) -> None:
    said = forks.start(2, give_up_late, str(path), call, who).values()
    assert said[who] == "no byte was moved"
    assert said[1 - who] == f"rank {who}: TimeoutError: no byte was moved"
    assert same(client.load(path), numbered(1))


def test_a_rank_that_dies(forks: Worlds, tmp_path: Path) -> None:
    """What came to an end before stays; what came after fails, and nobody hangs."""
    other, dead, last = forks.start(3, fail_once, str(tmp_path), True).outcomes()
    assert dead.error == -signal.SIGKILL
    for outcome in (other, last):
        assert outcome.value[-1] == "RankFailed: rank 1: its process is no more"
    assert "0.pt" in os.listdir(tmp_path)
    assert same(client.load(tmp_path / "0.pt"), state_of(0))
    assert not (tmp_path / "1.pt").exists()


def fail_while_rank_0_is_ahead(path: str) -> list[bool]:
    """As a rank: rank 1 fails of a save, while rank 0 is in the next call, too."""
    undo = Replacement.discard

    def undo_slowly(self: Replacement) -> None:
        if not store_of().check(["undone"]):
            with pytest.raises(dist.DistStoreError):
                store_of().wait(["rank 1 has returned"], timedelta(seconds=1))
        undo(self)
        store_of().set("undone", "")

    Replacement.discard = undo_slowly  # type: ignore[method-assign]
    go = write_when_told(1)
    told = writing.write_pieces

    def write(*arguments: Any, **options: Any) -> Any:
        told(*arguments, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() == 1:
        writing.write_pieces = write  # type: ignore[attr-defined, assignment]
    with AsyncSaver(in_flight=2, strict=False) as saver:
        first = saver.save(state_of(1), path)
        saver.save(state_of(2), path)
        dist.barrier()
        go.set()
        first.durable.exception(60)
        is_undone = store_of().check(["undone"])
        if dist.get_rank() == 1:
            store_of().set("rank 1 has returned", "")
            writing.write_pieces = transfers.write_pieces  # type: ignore[attr-defined]
    return [is_undone]


def test_who_fails_waits_until_rank_0_has_undone_it(forks: Worlds, path: Path) -> None:
    assert forks.start(2, fail_while_rank_0_is_ahead, str(path)).values()[1] == [True]


def save_to_one_directory(root: str) -> None:
    """As a rank: many checkpoints of one directory, several under way."""
    with AsyncSaver(in_flight=4) as saver:
        for step in range(12):
            saver.save_shares(numbered(step), own_directory(root, 2), copies=1 + step % 2)


def test_the_last_of_several_is_the_newest(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_to_one_directory, str(tmp_path)).values()
    assert same(client.load(directories(tmp_path, 2)), numbered(11))


def test_the_last_of_several_of_one_process_is_the_newest(tmp_path: Path) -> None:
    with AsyncSaver(in_flight=8) as saver:
        for step in range(12):
            saver.save_shares(numbered(step), tmp_path)
    assert client.load(tmp_path)["step"] == 11
    assert len(os.listdir(tmp_path)) == 2


def miss_one(root: str, misses: int) -> list[str]:
    """As a rank: one misses the second of some saves, of which one is under way."""
    said = []
    with AsyncSaver(in_flight=2) as saver:
        saver.save(state_of(0), os.path.join(root, "0.pt"))
        dist.barrier()
        if dist.get_rank() != misses:
            try:
                client.save(state_of(1), os.path.join(root, "1.pt"), timeout_s=3.0)
            except client.RankFailed as error:
                said.append(str(error))
        dist.barrier()
        for _ in range(2):
            try:
                client.save(state_of(2), os.path.join(root, "2.pt"))
                break
            except client.RankFailed as error:  # It came to the one that it had missed.
                said.append(str(error))
        saver.save(state_of(3), os.path.join(root, "3.pt"))
    return said


@pytest.mark.parametrize("misses", [0, 1])
def test_who_missed_a_call_comes_to_the_next(forks: Worlds, tmp_path: Path, misses: int) -> None:
    found = forks.start(3, miss_one, str(tmp_path), misses).values()
    for rank, said in enumerate(found):
        assert len(said) <= 1 if rank == misses else len(said) == 1
        assert all(each.startswith(f"rank {misses}: did not call save within") for each in said)
    assert sorted(os.listdir(tmp_path)) == ["0.pt", "2.pt", "3.pt"]
    for step in (0, 2, 3):
        assert same(client.load(tmp_path / f"{step}.pt"), state_of(step))
