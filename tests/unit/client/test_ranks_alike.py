"""Ranks of a group have tensors in the same order, under the same keys, alike in memory."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from fpfs import client
from fpfs.client import planning
from fpfs.client.container import lay_out
from fpfs.client.plan import Plan
from fpfs.client.topology import Topology
from tests.support.ranks import Worlds
from tests.support.states import (
    FORMER,
    a_mesh,
    directories,
    own_directory,
    own_part,
    random_tensor,
    same,
)

A, B = torch.arange(12.0).reshape(3, 4), torch.arange(12.0, 24.0).reshape(3, 4)


class Kind(enum.Enum):
    """Keys that are no texts."""

    FIRST = 1
    SECOND = 2


class Holder:
    """An object of the caller's own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def of_one_storage(*, swapped: bool) -> dict[str, torch.Tensor]:
    """Two tensors that are views of one."""
    if swapped:
        second, first = torch.cat([B, A]).split(3)
    else:
        first, second = torch.cat([A, B]).split(3)
    return {"a": first, "b": second}


def of_other_storages(*, swapped: bool) -> dict[str, torch.Tensor]:
    """Two storages whose order an empty view decides."""
    first, second = A.clone(), B.clone()
    return {"none": (second if swapped else first)[:0], "a": first, "b": second}


def conjugate(*, resolved: bool) -> dict[str, torch.Tensor]:
    """Complex numbers, as bits or by a bit."""
    found = torch.complex(A, B).conj()
    return {"c": found.resolve_conj() if resolved else found}


def lazy_states(order: list[int]) -> dict[str, Any]:
    """An optimizer of which the states of parameters were made in that order."""
    parameters = [torch.nn.Parameter(torch.full((4,), float(number))) for number in range(3)]
    optimizer = torch.optim.AdamW(parameters)
    for number in order:
        optimizer.zero_grad()
        parameters[number].grad = torch.full((4,), 1.0 + number)
        optimizer.step()
    return {"o": optimizer.state_dict()}


def in_order(state: dict[Any, Any], *, reverse: bool) -> dict[Any, Any]:
    """Its items, or these from the last to the first."""
    return dict(reversed(state.items())) if reverse else state


def sharded_in_order(*, reverse: bool) -> dict[Any, Any]:
    """DTensors by numbers."""
    rows = [distribute_tensor(each, a_mesh(), [Shard(0)]) for each in (A, B)]
    return in_order({1: rows[0], 2: rows[1]}, reverse=reverse)


def cut(whole: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> torch.Tensor:
    """A DTensor of what each rank has a copy of."""
    return distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)


Make = Callable[[bool], Any]

LYING: dict[str, tuple[str, Make]] = {
    "strides": (
        "saves 'w torch.float32 (3, 4)', which lies in memory otherwise",
        lambda other: {"b": B, "w": A.t().contiguous().t() if other else A},
    ),
    "offsets": ("saves 'a torch.float32 (3, 4)', ", lambda other: of_one_storage(swapped=other)),
    "storages": (
        "saves 'a torch.float32 (3, 4)', which",
        lambda other: of_other_storages(swapped=other),
    ),
    "conj": ("saves 'c torch.complex64 (3, 4)', which", lambda other: conjugate(resolved=other)),
    "neg": (
        "saves 'n torch.float32 (3, 4)', which lies",
        lambda other: {"n": A.neg() if other else torch._neg_view(A)},
    ),
    "many": (
        "saves 2 tensors from 't6 torch.float32 (3, 4)' to 't7 torch.float32 (3, 4)', of which",
        lambda other: {
            f"t{number}": A.t().contiguous().t() if other and number == 7 else A.clone()
            for number in range(100)
        },
    ),
}
"""What rank 1 (True) has otherwise in memory than rank 0, and what is said of it."""

ORDERED: dict[str, tuple[str, Make]] = {
    "optimizer": (
        "whose \"o['state'][1]['step'] torch.float32 ()\" it has not",
        lambda other: lazy_states([0, 2, 1] if other else [0, 1, 2]),
    ),
    "outer names": (
        "whose \"x['w'] torch.float32 (3, 4)\" it has not",
        lambda other: in_order({"x": {"w": A}, "y": {"w": B}}, reverse=other),
    ),
    "names with brackets": (
        "whose \"['x[0]'] torch.float32 (3, 4)\" it has not",
        lambda other: in_order({"x[0]": A, "x": {0: B}}, reverse=other),
    ),
    "numbers": ("whose '[1] torch", lambda other: in_order({1: A, 2: B}, reverse=other)),
    "types": ("whose '1 torch", lambda other: in_order({"1": A, 1: B}, reverse=other)),
    "tuples": (
        "whose \"[('x', 1)] torch",
        lambda other: in_order({("x", 1): A, ("x", None): B}, reverse=other),
    ),
    "enums": (
        "whose '[Kind.FIRST] torch",
        lambda other: in_order({Kind.FIRST: A, Kind.SECOND: B}, reverse=other),
    ),
    "lists": (
        "whose 'x[][0][] torch",
        lambda other: {"x": [in_order({0: [A], 1: [B]}, reverse=other)]},
    ),
    "objects": (
        "whose \"x['tensor'] torch",
        lambda other: in_order({"x": Holder(A), "y": Holder(B)}, reverse=other),
    ),
    "storages": (
        "whose 'x storage' it has not",
        lambda other: in_order(
            {"x": A.clone().untyped_storage(), "y": B.clone().untyped_storage()}, reverse=other
        ),
    ),
    "sharded": (
        "whose '[1] torch.float32 (3, 4) sharded' it has not",
        lambda other: sharded_in_order(reverse=other),
    ),
}
"""What rank 1 (True) has in another order than rank 0, and what is said of it."""

SHARDED: dict[str, tuple[str, Make]] = {
    "placements": (
        "'w' as Shard(1) on a mesh of shape (2,) with ranks 0, 1, and rank 0 has 'w' as Shard(0)",
        lambda other: {"w": cut(A, a_mesh(), int(other))},
    ),
    "meshes": (
        "with rank 1, and rank 0 has 'w' as Shard(0) on a mesh of shape (1,) with rank 0: all",
        lambda other: {"w": cut(A, DeviceMesh("cpu", [int(other)], _init_backend=False))},
    ),
    "a part": (
        "'w' as Shard(0) on a mesh of shape (2,) with ranks 0, 1, and rank 0 has none in this way",
        lambda other: {
            "v": cut(A, a_mesh(), 1),
            "w": cut(B, a_mesh(), 0 if other else 1),
        },
    ),
}
"""What rank 1 (True) has sharded otherwise than rank 0, and what is said of it."""

DIFFERENT = {f"lies: {name}": each for name, each in LYING.items()} | ORDERED | SHARDED


def save_unlike(root: str, what: str) -> list[str]:
    """As a rank: save in one file and in shares what rank 1 has otherwise."""
    make = DIFFERENT[what][1]
    said = []
    for save in (
        lambda state: client.save(state, os.path.join(root, "state.pt")),
        lambda state: client.save_shares(state, own_directory(root, 2)),
    ):
        with pytest.raises(client.RankFailed) as refused:
            save(make(dist.get_rank() == 1))
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_is_not_alike_is_refused(forks: Worlds, tmp_path: Path, what: str) -> None:
    path = tmp_path / "own" / "state.pt"
    path.parent.mkdir()
    client.save(FORMER, path)
    for said in forks.start(2, save_unlike, str(path.parent), what).values():
        for each in said:
            assert each.startswith(("rank 1: saves ", "rank 1: has "))
            assert DIFFERENT[what][0] in each
    assert same(client.load(path), FORMER)
    assert not any(
        name for _, _, files in os.walk(path.parent) for name in files if name != "state.pt"
    )


class Odd:
    """A key whose text is another one in each process."""

    def __repr__(self) -> str:
        return f"Odd of {os.getpid()}"


def alike(*, other: bool) -> dict[Any, Any]:
    """A state whose tensors are one file's, though rank 1 (`other`) has it otherwise."""
    column = torch.arange(3.0).reshape(3, 1)
    pair = [A, {"again": A}]
    return {
        "rank": int(other),
        "history": [*range(1 + 3 * other)],
        "list": [*["own"] * other, 1, B],
        "pair": (pair, pair),
        # Of one element, or none, no stride or offset is gone by.
        "column": column.t().contiguous().t() if other else column,
        "one": torch.tensor([5.0]).as_strided((1, 1), (7, 3) if other else (1, 1)),
        "none": torch.empty(0, 3)[:, 1:] if other else torch.empty(0, 2),
        "holder": Holder(B),
        Odd(): {"w": B.clone()},
        object(): B.clone(),
        "conj": torch.complex(A, B).conj(),
        "transposed": A.t(),
        "meta": torch.empty(3, 4, device="meta"),
    }


def save_alike(path: str) -> None:
    """As a rank: save what may be otherwise."""
    client.save(alike(other=dist.get_rank() == 1), path)


def test_what_is_promised_to_work(forks: Worlds, path: Path) -> None:
    forks.start(2, save_alike, path).values()
    found, expected = torch.load(path, weights_only=False), alike(other=False)
    for name in expected:
        if type(name) is str and name != "holder":
            assert same(found[name], expected[name])


PLACED: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "same": Replicate()}


def whole_of_slices() -> dict[str, torch.Tensor]:
    """What the tensors on slices are parts of."""
    names = [f"{dims} {how}" for dims in ("dp", "tp", "dp cp") for how in PLACED]
    return {
        name: random_tensor(torch.float32, (37, 24), seed=seed) for seed, name in enumerate(names)
    }


def on_slices(mesh: DeviceMesh, wholes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a rank: DTensors on slices of a mesh, of which each rank knows its own."""
    found = {}
    for name, whole in wholes.items():
        *dims, how = name.split()
        placements = [PLACED[how], *[Replicate()] * (len(dims) - 1)]
        found[name] = distribute_tensor(whole, mesh[tuple(dims)], placements, src_data_rank=None)
    return found


def save_slices(root: str) -> list[Any]:
    """As a rank: save in each way what lies on slices of a mesh, and load it into the like."""
    planning.CHUNK_BYTES_DEFAULT = 512  # type: ignore[attr-defined]
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "cp"))
    state, own = on_slices(mesh, whole_of_slices()), own_directory(root, 2)
    path = os.path.join(root, "state.pt")
    plan = Plan.build(state, Topology.of())
    saved = client.save(state, path)
    client.save(state, f"{path}.planned", plan=plan)
    with client.AsyncSaver() as saver:
        saver.save(state, f"{path}.beside")
        saver.wait()
    client.save_safetensors(state, f"{path}.safetensors")
    # Each slice by itself has all.
    rows = {name: tensor for name, tensor in state.items() if name.startswith("dp")}
    client.save(rows, f"{path}.{mesh['tp'].get_local_rank()}", group=mesh["dp"].get_group())
    client.save_shares(state, own)
    for load in (client.load, client.load_shares):
        empty = on_slices(mesh, {name: torch.zeros(37, 24) for name in state})
        load(path if load is client.load else own, into=empty)
        assert all(same(own_part(empty[name]), own_part(state[name])) for name in state)
    return [saved.bytes, [part.bytes for part in saved.written]]


def test_slices_of_one_mesh_are_replicas(forks: Worlds, tmp_path: Path) -> None:
    first, *others = forks.start(4, save_slices, str(tmp_path)).values()
    assert others == [first] * 3
    size, written = first
    assert len(written) == 4
    assert sum(written) == size
    assert max(written) < 1.1 * size / 4
    expected = whole_of_slices()
    path = tmp_path / "state.pt"
    for other in ("", ".planned", ".beside"):
        assert same(torch.load(f"{path}{other}"), expected)
    rows = {name: whole for name, whole in expected.items() if name.startswith("dp")}
    for number in range(2):
        assert same(torch.load(f"{path}.{number}"), rows)
    assert same(client.load(path), expected)
    loaded = load_file(f"{path}.safetensors")
    assert same({name: loaded.pop(name) for name in expected} | loaded, expected)
    assert same(client.load_shares(directories(tmp_path, 2), group=client.ALONE), expected)


@pytest.mark.parametrize("what", ["strides", "offsets", "storages", "conj", "many"])
def test_what_is_made_as_the_error_says_lies_alike(what: str) -> None:
    made = [
        {
            name: each.resolve_conj().clone(memory_format=torch.contiguous_format)
            for name, each in LYING[what][1](is_other).items()
        }
        for is_other in (False, True)
    ]
    assert lay_out(made[0]).lies == lay_out(made[1]).lies
