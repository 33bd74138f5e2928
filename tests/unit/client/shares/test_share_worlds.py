"""Random states that one world saves, of which shares are lost, and another world loads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from fpfs.client import load_shares, planning, save_shares
from fpfs.client.shares.gathering import verify
from tests.support.ranks import Worlds
from tests.support.seeds import IS_LONG, chosen_seed
from tests.support.states import DTYPES, own_directory, own_part, random_tensor, same

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SIZES = (1, 2, 3, 4, 3, 2, 1)
"""Of the worlds that save; the next one loads."""
TIMES = 12 if IS_LONG else 1


def a_state(seed: int) -> dict[str, Any]:
    """Ordinary tensors, in dictionaries and lists, and plain values."""
    chance = random.Random(seed)

    def tensor() -> torch.Tensor:
        shape = tuple(chance.choice((0, 1, 2, 5, 33, 200)) for _ in range(chance.randrange(4)))
        return random_tensor(chance.choice(DTYPES), shape, seed=chance.getrandbits(31))

    state: dict[str, Any] = {"seed": seed, "large": random_tensor(torch.int8, (90_001,), seed=seed)}
    for number in range(chance.randrange(12)):
        state[f"layer{number}"] = chance.choice(
            [tensor(), {"deep": tensor(), "plain": chance.random()}, [tensor(), None, tensor()]]
        )
    return state


def in_this_world(value: Any, chance: random.Random, *, empty: bool) -> Any:
    """As a rank: the state with some of its tensors cut; `empty`: they have other bits."""
    if isinstance(value, dict):
        return {key: in_this_world(each, chance, empty=empty) for key, each in value.items()}
    if isinstance(value, list):
        return [in_this_world(each, chance, empty=empty) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if empty:
        value = random_tensor(value.dtype, tuple(value.shape), seed=0)
    placements: list[Placement] = [Replicate(), *map(Shard, range(value.ndim))]
    chosen = chance.choice([None, *placements])
    # torch cannot cut tensors of all types.
    is_cut = not str(value.dtype).startswith(("torch.bits", "torch.float4"))
    if chosen is None or not is_cut or dist.get_world_size() == 1:
        return value
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # Each rank has the whole: gloo could not send all types.
    return distribute_tensor(value, mesh, [chosen], src_data_rank=None)


def parts(value: Any) -> Any:
    """As a rank: what this rank has of a state."""
    if isinstance(value, dict):
        return {key: parts(each) for key, each in value.items()}
    if isinstance(value, list):
        return [parts(each) for each in value]
    return own_part(value) if isinstance(value, torch.Tensor) else value


def save_random(root: str, nodes: int, seed: int, copies: int) -> None:
    """As a rank: save a state, cut by chance."""
    planning.CHUNK_BYTES_DEFAULT = 1 << 12  # type: ignore[attr-defined]
    state = in_this_world(a_state(seed), random.Random(seed), empty=False)
    save_shares(state, own_directory(root, nodes), copies=copies)


def load_random(places: list[list[str]], seed: int) -> None:
    """As a rank: load it whole, and into a state that is cut in another way."""
    own = places[dist.get_rank()]
    state = a_state(seed)
    assert same(load_shares(own), state)
    cut = random.Random(seed + 1)
    expected = in_this_world(state, cut, empty=False)
    cut = random.Random(seed + 1)
    loaded = load_shares(own, into=in_this_world(state, cut, empty=True))
    assert same(parts(loaded), parts(expected))


def lose(places: list[str], chance: random.Random, *, how: int) -> set[int]:
    """Remove nothing, some files, or all of one share; return the shares that nobody has then."""
    paths = sorted(path for place in places for path in Path(place).glob("*.share"))
    number_of = {path: int(path.name.partition("-")[0]) for path in paths}
    one = chance.choice(list(number_of.values()))
    removed = (
        [],
        chance.sample(paths, len(paths) // 2),
        [path for path in paths if number_of[path] == one],
    )
    for path in removed[how]:
        path.unlink()
    return set(number_of.values()) - {number_of[path] for path in paths if path.exists()}


def test_worlds_that_change(forks: Worlds, tmp_path: Path) -> None:
    chance = random.Random(chosen_seed())
    for number in range(TIMES * len(SIZES)):
        size, next_size = (SIZES[(number + later) % len(SIZES)] for later in (0, 1))
        nodes = chance.randint(1, size)
        copies = chance.randint(1, nodes)
        seed = chance.getrandbits(31)
        root = tmp_path / str(number)
        forks.start(size, save_random, str(root), nodes, seed, copies).values()
        places = [str(root / f"node{node}" / "step7") for node in range(nodes)]
        lost = lose(places, chance, how=number % 3)
        # Each directory is seen by one rank, or several.
        seen: list[list[str]] = [[] for _ in range(next_size)]
        for place in places:
            for rank in chance.sample(range(next_size), chance.randint(1, next_size)):
                seen[rank].append(place)
        for rank, own in enumerate(seen):
            own.append(str(root / f"new{rank}"))
        case = f"{number}: {size} ranks of {nodes} nodes, {copies} copies, {lost} lost: {seen}"
        found = forks.start(next_size, load_random, seen, seed).outcomes()
        if not lost:
            assert [each.error for each in found] == [None] * next_size, case
        else:
            first, *others = (str(each.error) for each in found)
            assert first.startswith("Missing: share "), case
            assert all(each == f"RankFailed: rank 0: {first}" for each in others), case
        manifest, checked = verify(places, progress=lambda *_: None)
        assert {each.share for each in checked if each.path is None} == lost, case
        assert manifest.ranks == size
