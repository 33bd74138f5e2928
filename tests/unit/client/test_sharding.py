"""Where parts of tensors lie in the whole, and what stands for a whole."""

from __future__ import annotations

import itertools
import math
import resource

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from fpfs.client.boxes import Box, Mesh, Sharding, box_of, order_of_cuts, runs_of
from fpfs.client.sharding import StandIns, sharded_of


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """A shape, and a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    return shape, Box(offsets, sizes)


@given(case=boxes(), itemsize=st.integers(1, 16))
def test_runs(case: tuple[tuple[int, ...], Box], itemsize: int) -> None:
    shape, box = case
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    cells = zip(box.offsets, box.shape, strict=True)
    part = whole[tuple(slice(at, at + size) for at, size in cells)].flatten().tolist()
    found: list[int] = []
    runs = runs_of(box, shape, itemsize)
    for run in runs:
        assert run.start == len(found) * itemsize
        assert run.offset % itemsize == run.bytes % itemsize == run.step % itemsize == 0
        for number in range(run.count):
            at = (run.offset + number * run.step) // itemsize
            found += range(at, at + run.bytes // itemsize)
    assert found == part
    if box.shape == shape:
        assert len(runs) == runs[0].count == 1


MESHES = {
    "rows": ((3,), [Shard(0)]),
    "columns": ((3,), [Shard(1)]),
    "replicas of rows": ((2, 3), [Replicate(), Shard(0)]),
    "rows and columns": ((2, 3), [Shard(1), Shard(0)]),
    "rows of rows": ((2, 3), [Shard(0), Shard(0)]),
    "FSDP2 of tensor parallel rows": ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
    "HSDP of tensor parallel rows": (
        (2, 2, 3),
        [Replicate(), _StridedShard(0, split_factor=3), Shard(0)],
    ),
    "rows, and FSDP2 of tensor parallel columns": (
        (2, 2, 2),
        [_StridedShard(1, split_factor=2), Shard(0), Shard(1)],
    ),
}


@pytest.mark.parametrize("name", MESHES)
@given(shape=st.tuples(st.integers(0, 13), st.integers(1, 13)))
def test_parts_are_torchs(name: str, shape: tuple[int, int]) -> None:
    mesh_shape, placements = MESHES[name]
    ranks = list(range(10, 10 + math.prod(mesh_shape)))
    mesh = Mesh(mesh_shape, ranks)
    cuts = order_of_cuts(placements, mesh_shape)
    assert cuts == order_of_cuts(placements, (*mesh_shape, 2))  # with replicas
    sharding = Sharding(shape, 4, mesh, cuts)
    coordinates = itertools.product(*map(range, mesh_shape))
    parts: dict[Box, set[int]] = {}
    for rank, coordinate in zip(ranks, coordinates, strict=True):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(coordinate), placements
        )
        box = box_of(sharding, rank)
        assert box.shape == tuple(sizes)
        if box.elements:
            assert box.offsets == tuple(offsets)
            parts.setdefault(box, set()).add(rank)
        if sharding.is_one_run and box.elements:
            assert [run.count for run in runs_of(box, shape, 4)] == [1]
    for number, holders in enumerate(sharding.holders.tolist()):
        box = sharding.box(number)
        assert box.elements == 0 or parts[box] == set(holders)
    assert sum(box.elements for box in parts) == math.prod(shape)


def test_who_has_no_part() -> None:
    sharding = Sharding((4, 4), 1, Mesh((2,), (3, 5)), ((0, 0),))
    assert box_of(sharding, 4).elements == 0
    assert box_of(sharding, 5) == Box((2, 0), (2, 4))


@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_slices_of_a_mesh_are_replicas(data: st.DataObject, shape: list[int]) -> None:
    numbers = data.draw(st.permutations(range(math.prod(shape))))
    root = np.array(numbers).reshape(shape)
    dims = data.draw(st.permutations(range(len(shape))))
    kept = dims[: data.draw(st.integers(1, len(shape)))]
    # Each row is a slice, as a DeviceMesh cuts it.
    rows = root.transpose(*dims[len(kept) :], *kept).reshape(-1, *(shape[dim] for dim in kept))
    whole = Mesh(root.shape, root.flatten().tolist())
    made = {Mesh(row.shape, row.flatten().tolist()).with_replicas(whole) for row in rows}
    assert len(made) == 1
    mesh = made.pop()
    sharding = Sharding((24,), 1, mesh, tuple((dim, 0) for dim in range(len(kept))))
    assert [set(part) for part in sharding.holders] == [
        set(part) for part in rows.reshape(len(rows), -1).T
    ]


@pytest.mark.parametrize("ranks", [(1, 2), (0, 1, 2), (0, 3), (2, 3, 0)])
def test_what_is_no_slice_has_no_replicas(ranks: tuple[int, ...]) -> None:
    mesh = Mesh((len(ranks),), ranks)
    assert mesh.with_replicas(Mesh((2, 2), range(4))) is mesh
    assert mesh.with_replicas(mesh) is mesh


@pytest.mark.parametrize(
    ("placements", "mesh"),
    [
        ([_StridedShard(0, split_factor=3)], (2,)),
        ([_StridedShard(0, split_factor=2), Shard(0)], (2, 3)),
        ([_StridedShard(0, split_factor=3), Shard(1)], (2, 3)),
    ],
)
def test_parts_of_several_pieces(placements: list[Placement], mesh: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="it lies in several pieces"):
        order_of_cuts(placements, mesh)


@pytest.mark.parametrize(
    ("shape", "cuts", "one_run"),
    [
        ((9, 4, 5), ((0, 0),), True),
        ((1, 9), ((0, 1),), True),
        ((7, 9), ((0, 1),), False),
        ((7, 9), ((0, 0), (1, 1)), False),
        ((7, 1), ((0, 1),), True),
        # A dimension of the mesh of one rank cuts nothing.
        ((7, 9), ((2, 1),), True),
        ((), (), True),
    ],
)
def test_one_run(shape: tuple[int, ...], cuts: tuple[tuple[int, int], ...], one_run: bool) -> None:
    assert Sharding(shape, 1, Mesh((2, 2, 1), range(4)), cuts).is_one_run == one_run


def test_stand_ins_have_no_memory() -> None:
    stand_ins = StandIns()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = [stand_ins.make((1 << 20, 1 << 18), torch.bfloat16) for _ in range(5)]
    made += [stand_ins.make((3, size), torch.int64) for size in range(2000)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    assert made[0].untyped_storage().nbytes() == 1 << 39
    assert made[0].is_contiguous()
    addresses = {tensor.data_ptr() for tensor in made if tensor.numel() > 0}
    assert len(addresses) == len(made) - 1


def test_stand_ins_are_in_the_processors_memory() -> None:
    with torch.device("meta"):
        made = [StandIns().make(shape, torch.float32) for shape in ((3, 4), (0, 4))]
    assert [tensor.device.type for tensor in made] == ["cpu", "cpu"]


def test_ordinary_tensors_are_whole() -> None:
    assert sharded_of(torch.ones(3), "weight") is None
