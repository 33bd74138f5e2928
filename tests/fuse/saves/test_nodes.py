"""Nodes with a mount each save one checkpoint: whole or not at all, whoever is killed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fpfs import client
from fpfs.client.shares.gathering import verify
from fpfs.client.shares.reading import read_manifest
from fpfs.testing.mounted import Mount, mounted
from tests.support.failures.damage import blocks_of, flip
from tests.support.failures.faults import MEBIBYTE, faulty_mount
from tests.support.ranks import Worlds
from tests.support.seeds import IS_LONG, chosen_seed
from tests.support.servers import assert_read, kill, reads_of
from tests.support.states import only_value
from tests.support.waiting import wait_until

pytestmark = pytest.mark.clients

KILLS = 200 if IS_LONG else 6
DELAY_S = 0.3
RANKS = 4
KILLED = (range(RANKS), [0], [2, 3], [3], [0, 1])
"""Which ranks are killed: all, one of each node, those of a node."""
CUT_OFF = r"the writer of .*\.(share|manifest\.json) was cut off by SIGKILL: "


@pytest.fixture
def nodes() -> Iterator[list[Mount]]:
    """Two mounts, of which each has two ranks."""
    with mounted(devices=2) as first, mounted() as second:
        found = [first, second]
        for mount in found:
            mount.allow_log(CUT_OFF)
            mount.allow_log("died .signal 9.: starting another")
        yield found


def places_of(nodes: list[Mount]) -> list[str]:
    return [str(mount.root / "step") for mount in nodes]


def save_and_save(places: list[str], step: int, beside: bool) -> None:
    """As a rank: save over and over, of each step another state, until a rank dies."""
    state = {str(number): torch.zeros(500_001, dtype=torch.int32) for number in range(8)}
    own = places[dist.get_rank() * len(places) // dist.get_world_size()]
    with client.AsyncSaver() as saver:
        while True:
            for tensor in state.values():
                tensor.fill_(step)
            (saver.save_shares if beside else client.save_shares)(state, own)
            step += 1


def save_once(places: list[str], step: int, size: int = 500_001, copies: int = 1) -> None:
    """As a rank: save tensors of so many elements."""
    state = {str(number): torch.full((size,), step, dtype=torch.int32) for number in range(8)}
    own = places[dist.get_rank() * len(places) // dist.get_world_size()]
    client.save_shares(state, own, copies=copies)


def load_own(places: list[str]) -> int:
    """As a rank that sees one of the directories."""
    return step_of(client.load(places[dist.get_rank()]))


def step_of(state: dict[str, torch.Tensor]) -> int:
    """The step that a checkpoint is of, whose tensors are all there and of one step."""
    assert len(state) == 8
    return only_value(state.values())


def test_whoever_is_killed_there_is_a_whole_checkpoint(nodes: list[Mount], forks: Worlds) -> None:
    """All ranks, one, or a node's, at any moment; and servers, which is not noticed."""
    chance = random.Random(chosen_seed())
    places = places_of(nodes)
    last = 0
    for number in range(KILLS):
        first_step = 1000 * (number + 1)
        # All ways within six rounds, and with each other within thirty.
        beside, server, killed = number % 2 == 1, number % 3, KILLED[number % len(KILLED)]
        world = forks.start(RANKS, save_and_save, places, first_step, beside)
        wait_until(lambda last=last: number_in(places[0]) > last)
        time.sleep(chance.uniform(0, DELAY_S))
        if server < len(nodes):
            kill(nodes[server])
            time.sleep(chance.uniform(0, DELAY_S))
        for rank in killed:
            world.kill(rank)
        errors = [outcome.error for outcome in world.outcomes()]
        for rank, error in enumerate(errors):
            assert error == -signal.SIGKILL if rank in killed else "no more" in str(error), errors
        assert first_step <= step_of(client.load(places))
        last = max(map(number_in, places))
        assert [each.problem for each in verify(places, progress=lambda *_: None)[1]] == [None] * 2
    forks.start(RANKS, save_once, places, 7).values()
    assert forks.start(2, load_own, places).values() == [7, 7]
    for place in places:
        wait_until(lambda place=place: len(os.listdir(place)) == 2)


def number_in(place: str) -> int:
    """Of the complete checkpoint that a directory knows of."""
    manifest = read_manifest(place)
    return 0 if manifest is None else manifest.checkpoint.number


def test_a_full_device_of_one_node_is_found_before_the_first_byte(
    tmp_path: Path, forks: Worlds
) -> None:
    with mounted() as first, faulty_mount(tmp_path) as (second, devices):
        places = places_of([first, second])
        forks.start(2, save_once, places, 1).values()
        first.flush()
        second.flush()
        for number in range(2):
            devices.fill(number, leave_bytes=4 * MEBIBYTE)
        begun = first.status().devices[0].bytes_written
        outcomes = forks.start(2, save_once, places, 2).outcomes()
        error = str(outcomes[1].error)
        assert re.fullmatch(
            rf"OSError: \[Errno 28\] reserve \d+ bytes: No space left on device: '{places[1]}'",
            error,
        )
        assert outcomes[0].error == f"RankFailed: rank 1: {error}"
        assert first.status().devices[0].bytes_written == begun
        assert [len(os.listdir(place)) for place in places] == [2, 2]
        assert step_of(client.load(places)) == 1
        for number in range(2):
            devices.empty(number)


def load_damaged(seen: Sequence[str | list[str]]) -> str:
    """As a rank that sees one of the directories, or some."""
    with pytest.raises((OSError, client.RankFailed)) as refused:
        client.load_shares(seen[dist.get_rank()])
    return f"{type(refused.value).__name__} {refused.value}"


def test_damaged_bytes_are_not_loaded(nodes: list[Mount], forks: Worlds) -> None:
    places = places_of(nodes)
    forks.start(2, save_once, places, 1).values()
    share = next(Path(places[1]).glob("*.share"))
    damaged = blocks_of(nodes[1], share)[20]
    nodes[1].expect_log(damaged.log_pattern())
    nodes[1].unmount()
    flip(damaged.path, damaged.offset + 77)
    nodes[1].mount()
    for said in forks.start(2, load_damaged, places).values():
        assert "Errno 5" in said
        assert share.name in said
    with pytest.raises(OSError, match="Input/output error") as refused:
        client.load(places)
    assert (refused.value.errno, refused.value.filename) == (errno.EIO, str(share))
    (found,) = [each for each in verify(places, progress=lambda *_: None)[1] if each.problem]
    assert (found.share, found.problem) == (1, f"[Errno 5] Input/output error: '{share}'")
    flip(damaged.path, damaged.offset + 77)
    nodes[1].remount()
    assert forks.start(2, load_own, places).values() == [1, 1]


@pytest.mark.parametrize(
    ("seen", "block"),
    [([[0], [1]], 20), ([[0, 1], [0, 1]], 20), ([[1], [], [0]], -1)],
    ids=["each its own", "both", "one nothing"],
)
def test_what_cannot_be_read_is_read_of_the_copy(
    nodes: list[Mount], tmp_path: Path, forks: Worlds, seen: list[list[int]], block: int
) -> None:
    """By ranks that see one, or both, or none, for which what is read bit by bit is damaged, too.

    An error names the share if both are damaged.
    """
    places = places_of(nodes)
    forks.start(2, save_once, places, 1, 500_001, 2).values()
    own = [[places[number] for number in each] or [str(tmp_path)] for each in seen]
    shares = sorted(file.name for file in Path(places[0]).glob("*.share"))
    damage_file(nodes[0], Path(places[0], shares[0]), block)
    damage_file(nodes[1], Path(places[1], shares[1]), 20)
    assert forks.start(len(seen), load_there, own).values() == [1] * len(seen)
    assert step_of(client.load(places)) == 1
    damage_file(nodes[0], Path(places[0], shares[1]), 20)
    for said in forks.start(len(seen), load_damaged, own).values():
        assert "Errno 5" in said
        assert shares[1] in said


def damage_file(mount: Mount, path: Path, block: int) -> None:
    """Change a bit of a block of a file that a mount has."""
    damaged = blocks_of(mount, path)[block]
    mount.expect_log(damaged.log_pattern())
    mount.unmount()
    flip(damaged.path, damaged.offset + 77)
    mount.mount()


def load_there(seen: list[list[str]]) -> int:
    """As a rank that sees some directories."""
    return step_of(client.load_shares(seen[dist.get_rank()]))


@pytest.mark.parametrize(
    "seen", [[[3], [1], [2], [0]], [[2], [0, 3], [1]], [[], [0], [1], [], [2], [3]]]
)
def test_each_byte_is_read_from_a_device_once(
    tmp_path: Path, forks: Worlds, seen: list[list[int]]
) -> None:
    """By as many nodes in another order, by fewer, and by more, of which some see nothing."""
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(mounted()) for _ in range(4)]
        places = places_of(nodes)
        # Large: blocks are read as a whole, and requests of which only a part was read ahead.
        forks.start(4, save_once, places, 5, 2_000_001).values()
        for mount in nodes:
            mount.remount()
        before = list(map(reads_of, nodes))
        own = [[places[number] for number in each] or [str(tmp_path)] for each in seen]
        assert forks.start(len(seen), load_there, own).values() == [5] * len(seen)
        for mount, place, already in zip(nodes, places, before, strict=True):
            total = sum(path.stat().st_size for path in Path(place).iterdir())
            assert_read(mount, already, total)
