"""Where parts of tensors lie in the whole, and what stands for a whole."""

from __future__ import annotations

import resource

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fpfs.client.sharding import Box, StandIns, is_one_run, is_tiling, runs_of, sharded_of


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
    if is_one_run(box, shape):
        assert [run.count for run in runs] == [1]
    if is_tiling({box}, shape):
        assert found == whole.flatten().tolist()


@pytest.mark.parametrize(
    ("box", "shape", "one_run"),
    [
        (Box((2, 0, 0), (3, 4, 5)), (9, 4, 5), True),
        (Box((0, 1), (1, 2)), (1, 9), True),
        (Box((0, 1), (7, 2)), (7, 9), False),
        # Other ranks have more rows of it.
        (Box((6, 1), (1, 2)), (7, 9), False),
        (Box((), (0,)), (7, 9), True),
        (Box((), ()), (), True),
    ],
)
def test_one_run(box: Box, shape: tuple[int, ...], one_run: bool) -> None:
    assert is_one_run(box, shape) == one_run


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


def test_ordinary_tensors_are_whole() -> None:
    assert sharded_of(torch.ones(3), "weight") is None
