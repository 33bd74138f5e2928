"""Ranks load a checkpoint whose shares other ranks see."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fpfs import client
from fpfs.client.peers import Ranks
from fpfs.client.shares import copying, loading, network, reading, serving
from fpfs.client.shares.copying import holders
from fpfs.client.shares.gathering import verify
from fpfs.client.shares.loading import load_shares
from fpfs.client.shares.reading import OpenShare
from fpfs.client.shares.saving import save_shares
from tests.support.failures.calls import die, unreadable
from tests.support.ranks import Worlds, be_on_a_machine
from tests.support.states import (
    PLACEMENTS,
    directories,
    fitting,
    large_state,
    numbered,
    own_directory,
    own_part,
    same,
    save_state,
    sharded,
)
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def save_large(root: str, nodes: int) -> None:
    """As a rank: save several MiB."""
    save_shares(large_state(seed=1), own_directory(root, nodes))


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("fpfs")]


def load_own(root: str, nodes: int, answer_bytes: int) -> list[Any]:
    """As a rank: load what nodes have of which each rank sees its own alone."""
    serving.ANSWER_BYTES = answer_bytes
    read: dict[str, int] = {}
    start = reading.OpenShare.start

    def count(share: Any, pieces: Any, owners: object) -> Any:
        read[share.path] = read.get(share.path, 0) + sum(piece[1] for piece in pieces)
        return start(share, pieces, owners)

    reading.OpenShare.start = count  # type: ignore[method-assign]
    place = own_directory(root, nodes)
    loaded = load_shares(place)
    assert same(loaded, large_state(seed=1))
    empty = {name: torch.zeros_like(tensor) for name, tensor in loaded.items()}
    for name, value in load_shares(place, into=empty).items():
        assert value is empty[name]
        assert same(value, loaded[name])
    # Each rank may want something else.
    if dist.get_rank() == 0:
        part = {"layer1": torch.zeros_like(loaded["layer1"])}
        load_shares(place, into=part)
        assert same(part["layer1"], loaded["layer1"])
    else:
        assert same(load_shares(place, map_location="cpu"), loaded)
    assert threads() == []
    return sorted(os.path.dirname(path) for path in read)


@pytest.mark.parametrize(
    ("size", "nodes", "answer_bytes"), [(2, 2, 1 << 24), (4, 2, 1 << 20), (4, 4, 100_003)]
)
def test_each_node_sees_its_own(
    forks: Worlds, tmp_path: Path, size: int, nodes: int, answer_bytes: int
) -> None:
    forks.start(size, save_large, str(tmp_path), nodes).values()
    found = forks.start(size, load_own, str(tmp_path), nodes, answer_bytes).values()
    places = directories(tmp_path, nodes)
    assert found == [[places[rank * nodes // size]] for rank in range(size)]


def save_copies(root: str, copies: int) -> None:
    """As a rank of a node of its own: save several MiB."""
    save_shares(large_state(seed=1), own_directory(root, 2), copies=copies)


def load_counted(root: str, names: list[str], in_place: bool) -> int:
    """As a rank that sees its own node's: load some tensors; returns how much is sent to it."""
    received = []
    memory_at = serving._memory_at

    def count(address: int, size: int) -> memoryview:
        received.append(size)
        return memory_at(address, size)

    serving._memory_at = count
    expected = {name: value for name, value in large_state(seed=1).items() if name in names}
    into = {name: torch.zeros_like(value) for name, value in expected.items()}
    loaded = load_shares(own_directory(root, 2), into=into if in_place else None)
    assert same({name: loaded[name] for name in names}, expected)
    return sum(received)


def test_only_what_is_wanted_is_sent(forks: Worlds, tmp_path: Path) -> None:
    """Beside what a rank needs to know where all is. Of six tensors the first half is node 0's."""
    forks.start(2, save_copies, str(tmp_path), 1).values()
    state, most = large_state(seed=1), 1 << 16
    for name, receiver in (("layer1", 1), ("layer4", 0)):
        found = forks.start(2, load_counted, str(tmp_path), [name], True).values()
        assert found[1 - receiver] < most
        assert state[name].nbytes <= found[receiver] < state[name].nbytes + most
    found = forks.start(2, load_counted, str(tmp_path), list(state), False).values()
    # Of the file, that is, which each rank loads whole.
    assert sum(found) < sum(tensor.nbytes for tensor in state.values()) + most


def test_the_near_copy_is_read(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_copies, str(tmp_path), 2).values()
    assert forks.start(2, load_counted, str(tmp_path), ["layer1"], True).values() == [0, 0]


def load_anywhere(root: str, saved_nodes: int) -> None:
    """As a rank: the first ranks see a node's directory each, others none; others see it twice."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = directories(Path(root), saved_nodes)
    own = places[rank::size] or [os.path.join(root, "new", "step7")]
    assert same(load_shares(own), numbered(1))
    assert same(load_shares(places if rank == 0 else own), numbered(1))
    assert same(load_shares(places), numbered(1))
    assert same(client.load(places, group=client.ALONE), numbered(1))


@pytest.mark.parametrize(("saved", "size"), [(4, 1), (4, 2), (2, 4), (1, 3), (3, 2)])
def test_in_a_world_that_has_changed(forks: Worlds, tmp_path: Path, saved: int, size: int) -> None:
    forks.start(saved, save_state, str(tmp_path), saved, 1).values()
    forks.start(size, load_anywhere, str(tmp_path), saved).values()


def save_and_load_sharded(root: str, save: bool) -> None:
    """As a rank: save a checkpoint for each placement, or load it into such tensors."""
    for name in fitting(dist.get_world_size()):
        state = sharded(PLACEMENTS[name])
        if save:
            save_shares(state, own_directory(os.path.join(root, name), 2))
            continue
        empty = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
            for key, value in state.items()
        }
        nodes = dist.get_world_size()
        place = own_directory(os.path.join(root, name), nodes)
        loaded = load_shares(place, into=empty)
        assert loaded.pop("step") == 7
        for key, value in loaded.items():
            assert value is empty[key]
            assert same(own_part(value), own_part(state[key]))


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_tensors(forks: Worlds, tmp_path: Path, size: int) -> None:
    """Saved by four ranks of two nodes, loaded by as many of four or two."""
    forks.start(4, save_and_load_sharded, str(tmp_path), True).values()
    forks.start(size, save_and_load_sharded, str(tmp_path), False).values()


def load_badly(root: str, what: str, rank: int) -> None:
    """As a rank: load, which goes wrong on one rank."""
    if dist.get_rank() == rank:
        if what == "killed at once":
            network.Listener = die  # type: ignore[assignment,misc]
        if what == "killed":
            reading.OpenShare.start = die  # type: ignore[assignment,method-assign]
        if what == "unreadable":
            reading.OpenShare.start = unreadable  # type: ignore[assignment,method-assign]
        if what == "another state":
            load_shares(own_directory(root, 2), into={"other": torch.zeros(1)}, timeout_s=900)
    load_shares(own_directory(root, 2), timeout_s=900)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["killed", "killed at once", "unreadable", "another state"])
def test_a_rank_that_fails(forks: Worlds, tmp_path: Path, what: str, rank: int) -> None:
    forks.start(2, save_large, str(tmp_path), 2).values()
    outcomes = forks.start(2, load_badly, str(tmp_path), what, rank).outcomes()
    errors = [str(outcome.error) for outcome in outcomes]
    if what.startswith("killed"):
        assert errors[rank] == str(-signal.SIGKILL)
        assert errors[1 - rank].startswith(f"RankFailed: rank {rank}: its process is no more")
    elif what == "unreadable":
        # Who asked for it fails first, or the rank that reads it for itself.
        assert all("Errno 5" in error for error in errors), errors
    else:
        assert errors[rank] == "ValueError: the file has no other"
        assert errors[1 - rank] == f"RankFailed: rank {rank}: ValueError: the file has no other"


def fail_while_others_read(root: str) -> None:
    """As a rank: 1 fails while 0 reads from it, and is not done with that until 0 has ended."""
    store = dist.distributed_c10d._get_default_store()
    read, close = serving.Serving._read, serving.Serving.close
    asked, closing = threading.Event(), threading.Event()

    def begin_reading(*arguments: Any) -> Any:
        asked.set()
        closing.wait()
        return read(*arguments)

    def fail_when_asked(*_: object, **__: object) -> Any:
        asked.wait()
        unreadable()

    def close_slowly(self: serving.Serving) -> None:
        closing.set()
        close(self)
        store.wait(["0 has ended"])

    if dist.get_rank() == 1:
        serving.Serving._read = begin_reading  # type: ignore[method-assign]
        serving.Serving.close = close_slowly  # type: ignore[method-assign]
        loading.restore = fail_when_asked
    try:
        load_shares(own_directory(root, 2), timeout_s=900)
    finally:
        store.set(f"{dist.get_rank()} has ended", "")


def test_who_fails_says_so_before_its_connections_end(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_large, str(tmp_path), 2).values()
    outcomes = forks.start(2, fail_while_others_read, str(tmp_path)).outcomes()
    cause = "OSError: [Errno 5] Input/output error"
    assert str(outcomes[1].error).startswith(cause)
    assert str(outcomes[0].error).startswith(f"RankFailed: rank 1: {cause}")


def fail_to_answer(root: str, how: str) -> None:
    """As a rank: load; 1 does not answer 0, which it would read for."""
    store = dist.distributed_c10d._get_default_store()
    start, is_asked = reading.OpenShare.start, network.Listener._is_asked

    def fail(*arguments: Any) -> Any:
        if threading.current_thread().name != "fpfs-answer":
            return start(*arguments)
        if how == "hangs":
            store.wait(["0 has ended"])
        raise ZeroDivisionError("division by zero")

    def wait(*arguments: Any) -> bool:
        store.wait(["0 has ended"])
        return is_asked(*arguments)

    if dist.get_rank() == 1:
        reading.OpenShare.start = fail  # type: ignore[method-assign]
        if how == "does not answer":
            network.Listener._is_asked = wait  # type: ignore[method-assign]
        if how == "tells no address":
            serving.Serving.__enter__ = lambda self: self  # type: ignore[method-assign]
    waits = dist.get_rank() == 0 and how != "fails"
    dist.barrier()
    try:
        load_shares(own_directory(root, 2), timeout_s=3 if waits else 900)
    finally:
        store.set(f"{dist.get_rank()} has ended", "")


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("fails", "ZeroDivisionError: division by zero (as rank 1 reads it)"),
        ("hangs", "rank 1: has not sent what it was asked for within 3 s"),
        ("does not answer", "rank 1: has not answered at "),
        ("tells no address", "rank 1: has not told its address within 3 s"),
    ],
)
def test_who_does_not_answer(forks: Worlds, tmp_path: Path, how: str, error: str) -> None:
    forks.start(2, save_large, str(tmp_path), 2).values()
    outcomes = forks.start(2, fail_to_answer, str(tmp_path), how).outcomes()
    assert error in str(outcomes[0].error)
    told = str(outcomes[1].error)
    assert told.startswith("RankFailed: rank 0: " if how == "fails" else "RankFailed: rank 1: ")
    assert error in told


def is_interrupted(root: str) -> None:
    """As a rank: load; 0 is interrupted when it has connected to 1, which does not answer."""
    store = dist.distributed_c10d._get_default_store()
    is_asked = network.Listener._is_asked

    def wait(*arguments: Any) -> bool:
        store.set("asked", "")
        wait_until(lambda: store.check(["0 has ended"]))
        return is_asked(*arguments)

    def interrupt() -> None:
        wait_until(lambda: store.check(["asked"]))
        os.kill(os.getpid(), signal.SIGINT)

    if dist.get_rank() == 1:
        network.Listener._is_asked = wait  # type: ignore[method-assign]
        load_shares(own_directory(root, 2), timeout_s=900)
        return
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        load_shares(own_directory(root, 2), timeout_s=900)
    finally:
        store.set("0 has ended", "")
        thread.join()


def test_who_waits_for_an_answer_is_interrupted(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_large, str(tmp_path), 2).values()
    errors = [each.error for each in forks.start(2, is_interrupted, str(tmp_path)).outcomes()]
    assert errors == ["KeyboardInterrupt: ", "RankFailed: rank 0: KeyboardInterrupt: "]


def is_interrupted_again() -> list[str]:
    """As a rank: serve; the second interrupt comes while the others are told of the first."""

    def interrupt(error: BaseException) -> None:
        raise KeyboardInterrupt from error

    peers = Ranks(dist.group.WORLD, timeout_s=60, call="load_shares")
    peers.tell = interrupt  # type: ignore[method-assign]
    shares = {0: cast("OpenShare", None)}
    with (
        contextlib.suppress(KeyboardInterrupt),
        peers,
        serving.Serving(peers, shares, timeout_s=60),
    ):
        raise KeyboardInterrupt
    return threads()


def test_a_second_interrupt_leaves_no_thread(forks: Worlds) -> None:
    assert forks.start(2, is_interrupted_again).values() == [[], []]


def is_held_up(root: str) -> None:
    """As a rank: load; 1 answers only when 0 has tried in vain."""
    store = dist.distributed_c10d._get_default_store()
    connect, is_asked = network._connect, network.Listener._is_asked
    network.CONNECT_S, network.LOOK_S = 0.05, 0.01

    def count(*arguments: Any) -> Any:
        store.add("tries", 1)
        return connect(*arguments)

    def wait(*arguments: Any) -> bool:
        wait_until(lambda: store.add("tries", 0) > 5, timeout_s=900)
        network.CONNECT_S = 900.0
        return is_asked(*arguments)

    if dist.get_rank() == 0:
        network._connect = count
    else:
        network.Listener._is_asked = wait  # type: ignore[method-assign]
    load_shares(own_directory(root, 2), timeout_s=900)


def test_who_is_held_up_is_waited_for(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_large, str(tmp_path), 2).values()
    forks.start(2, is_held_up, str(tmp_path)).values()


def fail_again_and_again(root: str) -> None:
    """As a rank: load as often as one rank fails while others read; nothing is left of it."""
    place = own_directory(root, 2)
    load_shares(place)
    start = reading.OpenShare.start
    before = None
    for _ in range(5):
        if dist.get_rank() == 1:
            reading.OpenShare.start = unreadable  # type: ignore[assignment,method-assign]
        with pytest.raises((OSError, client.RankFailed), match="Errno 5"):
            load_shares(place)
        reading.OpenShare.start = start  # type: ignore[method-assign]
        wait_until(lambda: threads() == [])
        left = [len(os.listdir("/proc/self/fd")), threading.active_count()]
        assert before in (None, left)
        before = left
        dist.barrier()
    assert threads() == []
    assert same(load_shares(place), large_state(seed=1))


def test_nothing_is_left_of_loads_that_failed(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_large, str(tmp_path), 2).values()
    forks.start(2, fail_again_and_again, str(tmp_path)).values()


def load_nothing(root: str) -> str:
    load_shares(os.path.join(root, f"none{dist.get_rank()}"))
    return ""


def test_there_is_no_checkpoint(forks: Worlds, tmp_path: Path) -> None:
    first, *others = forks.start(3, load_nothing, str(tmp_path)).outcomes()
    wrong = f"there is no complete checkpoint in {tmp_path}/none0: a save writes manifest.json"
    assert str(first.error).startswith(f"Missing: {wrong}")
    for other in others:
        assert str(other.error).startswith(f"RankFailed: rank 0: Missing: {wrong}")


def load_of(places: list[str]) -> str:
    load_shares(places[dist.get_rank()])
    return ""


def test_a_node_that_is_lost_is_named(forks: Worlds, tmp_path: Path) -> None:
    forks.start(3, save_state, str(tmp_path), 3, 1).values()
    places = directories(tmp_path, 3)
    lost = next(Path(places[1]).glob("*.share"))
    lost.unlink()
    first, other = forks.start(2, load_of, [places[0], places[2]]).outcomes()
    assert str(first.error).startswith(
        f"Missing: share 1 of node '{os.uname().nodename}' ({lost.name}"
    )
    assert str(other.error).startswith("RankFailed: rank 0: Missing: share 1 of node")


def load_within(folder: str, places: list[str]) -> str:
    os.chdir(folder)
    return load_of(places)


def test_what_lies_in_the_working_directory_is_not_looked_for(
    forks: Worlds, tmp_path: Path
) -> None:
    forks.start(2, save_state, str(tmp_path), 2, 1).values()
    places = directories(tmp_path, 2)
    share = next(Path(places[1]).glob("*.share"))
    share.rename(tmp_path / share.name)
    first, _ = forks.start(2, load_within, str(tmp_path), places).outcomes()
    assert str(first.error).startswith("Missing: share 1 of node")


@pytest.mark.parametrize(
    ("nodes", "copies", "expected"),
    [
        (2, 2, [[0, 1], [1, 0]]),
        (3, 2, [[0, 1], [1, 2], [2, 0]]),
        (4, 2, [[0, 1], [1, 0], [2, 3], [3, 2]]),
        (5, 2, [[0, 1], [1, 0], [2, 3], [3, 4], [4, 2]]),
        (3, 3, [[0, 1, 2], [1, 2, 0], [2, 0, 1]]),
        (3, 1, [[0], [1], [2]]),
    ],
)
def test_where_copies_are(nodes: int, copies: int, expected: list[list[int]]) -> None:
    assert [holders(share, nodes, copies) for share in range(nodes)] == expected


@pytest.mark.parametrize(
    ("size", "nodes", "copies"),
    [(2, 2, 2), (4, 2, 2), pytest.param(3, 3, 3, marks=pytest.mark.long), (4, 4, 2)],
)
def test_a_node_may_be_lost(
    forks: Worlds, tmp_path: Path, size: int, nodes: int, copies: int
) -> None:
    for step in (1, 2):
        forks.start(size, save_state, str(tmp_path), nodes, step, copies).values()
    places = directories(tmp_path, nodes)
    for node, place in enumerate(places):
        kept = [share for share in range(nodes) if node in holders(share, nodes, copies)]
        names = sorted(os.listdir(place))
        assert names.pop() == "manifest.json"
        assert [name.partition("-of-")[0] for name in names] == [f"{share:05d}" for share in kept]
    manifest, found = verify(places, progress=lambda *_: None)
    assert manifest.copies == copies
    assert [(each.share, each.problem) for each in found] == [
        (share, None) for share in range(nodes) for _ in range(copies)
    ]
    for lost in range(nodes):
        left = [place for node, place in enumerate(places) if node != lost]
        assert same(client.load(left, group=client.ALONE), numbered(2))
    # Another node takes its place, and has nothing.
    places[1] = str(tmp_path / "new")
    forks.start(nodes, load_numbered, places, 2).values()
    assert threads() == []


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, 5000),
    "no file": lambda path: (path.unlink(), path.mkdir()),
    "another header": lambda path: path.write_bytes(b"7" * 4096 + path.read_bytes()[4096:]),
}


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("share", [0, 1])
def test_a_share_that_is_unsound_is_read_by_another_node(
    forks: Worlds, tmp_path: Path, what: str, share: int
) -> None:
    """Its own node's, or the copy; and if both are, the error names file and node."""
    forks.start(2, save_state, str(tmp_path), 2, 1, 2).values()
    places = directories(tmp_path, 2)
    found = [sorted(Path(place).glob("*.share"))[share] for place in places]
    DAMAGES[what](found[0])
    Path(places[0], "manifest.json").write_text("")
    forks.start(2, load_numbered, places, 1).values()
    forks.start(2, load_numbered, places[::-1], 1).values()
    os.truncate(found[1], 100)
    errors = [str(each.error) for each in forks.start(2, load_of, places).outcomes()]
    failed = next(rank for rank, error in enumerate(errors) if "RankFailed" not in error)
    assert found[failed].name in errors[failed]
    assert places[failed] in errors[failed]
    assert errors[1 - failed] == f"RankFailed: rank {failed}: {errors[failed]}"


def load_numbered(places: list[str], step: int) -> None:
    """As a rank that sees one of the directories."""
    assert same(load_shares(places[dist.get_rank()]), numbered(step))


def save_copies_badly(root: str, what: str) -> None:
    """As a rank: save copies, of which the last node's fails, or is killed."""
    if dist.get_rank() == 2:
        copying.write_memory = die if what == "killed" else unreadable
    save_state(root, 3, 2, copies=2)


@pytest.mark.parametrize("what", ["killed", "fails"])
def test_a_copy_that_fails(forks: Worlds, tmp_path: Path, what: str) -> None:
    forks.start(3, save_state, str(tmp_path), 3, 1).values()
    outcomes = forks.start(3, save_copies_badly, str(tmp_path), what).outcomes()
    cause = "its process is no more" if what == "killed" else "OSError: [Errno 5]"
    for outcome in outcomes[:2]:
        assert str(outcome.error).startswith(f"RankFailed: rank 2: {cause}")
    places = directories(tmp_path, 3)
    assert [len(os.listdir(place)) for place in places[:2]] == [2, 2]
    assert same(client.load(places), numbered(1))
    forks.start(3, save_state, str(tmp_path), 3, 3, 2).values()
    assert [len(os.listdir(place)) for place in places] == [3, 3, 3]
    assert same(client.load(places[:2]), numbered(3))


def save_what_is_damaged(root: str, answer: int) -> None:
    """As a rank: save copies, of which a byte that 2 sends is another; `answer`: in which one."""
    send, answers = network.send, itertools.count()

    def flip(connection: Any, view: memoryview, **more: Any) -> None:
        if not more and next(answers) == answer:
            view[-1] ^= 1
        send(connection, view, **more)

    if dist.get_rank() == 2:
        network.send = flip
    save_shares(large_state(seed=2), own_directory(root, 3), copies=2)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (0, " has another header than the manifest says: it is damaged"),
        (1, ": 1 ranges, of "),
    ],
)
def test_a_copy_is_what_was_saved(forks: Worlds, tmp_path: Path, answer: int, error: str) -> None:
    forks.start(3, save_state, str(tmp_path), 3, 1).values()
    outcomes = forks.start(3, save_what_is_damaged, str(tmp_path), answer).outcomes()
    errors = [str(outcome.error) for outcome in outcomes]
    assert errors[0].startswith("Damaged: 00002-of-00003.")
    assert f", which rank 2 reads{error}" in errors[0]
    for other in errors[1:]:
        assert other.startswith(f"RankFailed: rank 0: {errors[0]}")
    places = directories(tmp_path, 3)
    assert [len(os.listdir(place)) for place in places] == [2, 2, 2]
    assert same(client.load(places), numbered(1))


def test_more_copies_than_nodes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 copies are to be kept, and there is 1 node: "):
        save_shares({}, tmp_path / "new", copies=2)
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(ValueError, match="copies is .*: give how many nodes keep each share"):
            save_shares({}, tmp_path / "new", copies=wrong)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def save_apart(place: str, step: int, copies: int) -> None:
    """As a rank on a machine of its own: save to a directory that all see."""
    be_on_a_machine(f"machine {dist.get_rank()}")
    save_shares(numbered(step), place, copies=copies)


def test_copies_in_one_directory_are_none(forks: Worlds, tmp_path: Path) -> None:
    """Machines may see one directory: then there is no other place for a copy."""
    place = str(tmp_path)
    for step in (1, 2):
        forks.start(2, save_apart, place, step, 1).values()
        assert same(client.load(place), numbered(step))
        assert len(os.listdir(place)) == 3
    errors = [str(each.error) for each in forks.start(2, save_apart, place, 3, 2).outcomes()]
    wrong = rf"2 copies are to be kept, and nodes \d and \d both save to {place}: give each node "
    assert all(re.search(wrong, error) for error in errors), errors
    assert same(client.load(place), numbered(2))
    assert len(os.listdir(place)) == 3


def replace_meanwhile(places: list[str]) -> None:
    """As a rank: load, while another group replaces the checkpoint between two of the steps."""
    rank = dist.get_rank()
    open_share = loading.open_share

    def replace(*arguments: Any) -> Any:
        loading.open_share = open_share
        dist.barrier()
        if rank == 0:
            save_shares(numbered(2), places[0], group=client.ALONE)
        dist.barrier()
        return open_share(*arguments)

    loading.open_share = replace  # type: ignore[assignment]
    assert same(load_shares(places[rank]), numbered(2))


def test_a_checkpoint_that_is_replaced_meanwhile(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_state, str(tmp_path), 2, 1).values()
    forks.start(2, replace_meanwhile, directories(tmp_path, 2)).values()


def test_a_link_that_leads_nowhere_is_no_share(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_state, str(tmp_path), 2, 1).values()
    places = directories(tmp_path, 2)
    share = next(Path(places[1]).glob("*.share"))
    share.rename(tmp_path / "elsewhere")
    share.symlink_to(tmp_path / "gone")
    first, other = forks.start(2, load_of, places).outcomes()
    assert str(first.error).startswith("Missing: share 1 of node")
    assert str(other.error).startswith("RankFailed: rank 0: Missing: share 1 of node")
