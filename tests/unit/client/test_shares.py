"""A file is the same into how many shares it may be divided."""

from __future__ import annotations

import ctypes
import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfs.client.container import Container, Record, lay_out
from fpfs.client.sharding import Box, Sharded
from fpfs.client.shares import TEXT, Division, Share, crc32_parts
from tests.support.states import large_state, nested_states, odd_state, random_tensor

# torch's own, of types that it is not done with.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def write(
    share: Share, container: Container, file: bytearray, written: bytearray
) -> dict[int, int]:
    """Write a share as the native writer does, byte by byte; returns its parts of CRC32s."""
    contents = []
    for piece in share.pieces:
        if piece.part == TEXT:
            contents.append(bytearray(share.text[piece.start : piece.start + piece.bytes]))
        else:
            record = container.parts[piece.part]
            assert isinstance(record, Record)
            assert piece.start + piece.total_bytes <= record.storage.nbytes() - record.start
            memory = record.storage.data_ptr() + record.start + piece.start
            contents.append(bytearray(ctypes.string_at(memory, piece.total_bytes)))
    for offset, index in share.crc_places:
        (holder,) = (
            number
            for number, piece in enumerate(share.pieces)
            if piece.offset <= offset < piece.offset + piece.bytes
        )
        struct.pack_into(
            "<L",
            contents[holder],
            offset - share.pieces[holder].offset,
            zlib.crc32(contents[index]),
        )
    crcs: list[list[int]] = []
    for piece, content in zip(share.pieces, contents, strict=True):
        crcs.append([])
        for at, start in piece.runs():
            run = content[start - piece.start : start - piece.start + piece.bytes]
            assert not any(written[at : at + len(run)]), "no byte is written twice"
            written[at : at + len(run)] = b"x" * len(run)
            file[at : at + len(run)] = run
            crcs[-1].append(zlib.crc32(run))
    return crc32_parts(share, crcs, container)


def filled(
    containers: list[Container], *, block_bytes: int, boxes: Sequence[Sequence[Box]] = ()
) -> tuple[bytearray, list[int]]:
    """The file that ranks write, and how many bytes each of them has."""
    first = containers[0]
    file, written = bytearray(first.bytes), bytearray(first.bytes)
    division = Division(first, ranks=len(containers), block_bytes=block_bytes, boxes=boxes)
    crcs = [
        write(share, container, file, written)
        for share, container in zip(division.shares, containers, strict=True)
    ]
    write(division.finish(crcs), first, file, written)
    assert all(written)
    return file, [share.total_bytes for share in division.shares]


@settings(max_examples=80)
@given(
    state=nested_states(),
    ranks=st.integers(1, 9),
    block_bytes=st.sampled_from([1, 7, 64, 100, 512, 4096]),
)
def test_random_states(state: Any, ranks: int, block_bytes: int) -> None:
    check_one_file(state, ranks=ranks, block_bytes=block_bytes)


@pytest.mark.parametrize(("ranks", "block_bytes"), [(5, 64), (3, 4096), (400, 1)])
def test_all_kinds_of_tensors(ranks: int, block_bytes: int) -> None:
    check_one_file(odd_state(), ranks=ranks, block_bytes=block_bytes)


def check_one_file(state: Any, *, ranks: int, block_bytes: int) -> None:
    whole = io.BytesIO()
    torch.save(state, whole)
    found, _ = filled([lay_out(state)] * ranks, block_bytes=block_bytes)
    alone, _ = filled([lay_out(state)], block_bytes=block_bytes)
    assert found == alone
    assert len(found) == len(whole.getvalue())


@st.composite
def tilings(draw: st.DrawFn, *, ranks: int) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor's shape, and what each rank has of it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    cells = [()]
    for size in shape:
        room = max(1, ranks // len(cells))
        wanted = draw(st.integers(1, min(size, room)))
        cuts = sorted(draw(st.permutations(range(1, size)))[: wanted - 1])
        starts = list(zip([0, *cuts], [*cuts, size], strict=True))
        cells = [(*cell, start) for cell in cells for start in starts]
    boxes = [
        Box(
            tuple(start for start, _ in cell),
            tuple(end - start for start, end in cell),
        )
        for cell in cells
    ]
    nothing = Box((), (0,))
    others = st.sampled_from([*boxes, nothing])
    return shape, draw(
        st.permutations([*boxes, *(draw(others) for _ in range(ranks - len(boxes)))])
    )


def as_rank(state: Any, boxes: dict[str, Box]) -> Container:
    """What a rank has of a state: of some tensors only boxes."""
    container = lay_out(state)
    names = iter(state)
    for index, part in enumerate(container.parts):
        if isinstance(part, Record):
            name = next(names)
            if name in boxes:
                box, tensor = boxes[name], state[name]
                cells = zip(box.offsets, box.shape, strict=False)
                local = tensor[tuple(slice(at, at + size) for at, size in cells)]
                # Not at the begin of its storage.
                local = torch.cat([torch.zeros(3, dtype=tensor.dtype), local.flatten()])[3:]
                container.parts[index] = part._replace(
                    storage=local.untyped_storage(),
                    start=3 * tensor.element_size(),
                    sharded=Sharded(name, tuple(tensor.shape), tensor.element_size(), box, local),
                )
    return container


@settings(max_examples=80)
@given(
    data=st.data(),
    ranks=st.integers(1, 7),
    block_bytes=st.sampled_from([1, 7, 64, 512, 4096]),
)
def test_sharded_tensors(data: st.DataObject, ranks: int, block_bytes: int) -> None:
    state: dict[str, torch.Tensor] = {}
    boxes: list[dict[str, Box]] = [{} for _ in range(ranks)]
    for number in range(data.draw(st.integers(1, 4))):
        name = f"tensor{number}"
        shape, of_ranks = data.draw(tilings(ranks=ranks))
        dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
        state[name] = random_tensor(dtype, shape, seed=number)
        if data.draw(st.booleans()):
            for own, box in zip(boxes, of_ranks, strict=True):
                own[name] = box
    found, _ = filled(
        [as_rank(state, own) for own in boxes],
        block_bytes=block_bytes,
        boxes=[list(own.values()) for own in boxes],
    )
    alone, _ = filled([lay_out(state)], block_bytes=4096)
    assert found == alone


def test_replicas_and_sharded_tensors_make_equal_shares() -> None:
    """Two halves with two replicas each, a part of one rank, and what all have."""
    state = {
        "halves": random_tensor(torch.uint8, (80, 1000), seed=1),
        "third": random_tensor(torch.uint8, (30_000,), seed=2),
        "all": random_tensor(torch.uint8, (90_000,), seed=3),
    }
    upper, lower = Box((0, 0), (40, 1000)), Box((40, 0), (40, 1000))
    whole, nothing = Box((0,), (30_000,)), Box((0,), (0,))
    boxes = [
        {"halves": upper, "third": nothing},
        {"halves": lower, "third": nothing},
        {"halves": upper, "third": whole},
        {"halves": lower, "third": nothing},
    ]
    file, shares = filled(
        [as_rank(state, own) for own in boxes],
        block_bytes=512,
        boxes=[list(own.values()) for own in boxes],
    )
    waiting = len(file) - sum(shares)
    assert 0 < waiting < 2000
    assert max(shares) - min(shares) <= 2 * 512 + waiting


def test_columns_are_gathered_by_ranks_that_write_equal_shares() -> None:
    """Of columns everybody writes rows, and rows are still written by those who have them."""
    state = {name: random_tensor(torch.uint8, (300, 400), seed=1) for name in ("columns", "rows")}
    widths, boxes = [(0, 100), (100, 50), (150, 250)], []
    for rank, (at, width) in enumerate(widths):
        boxes.append(
            {"columns": Box((0, at), (300, width)), "rows": Box((100 * rank, 0), (100, 400))}
        )
    division = Division(
        as_rank(state, boxes[0]),
        ranks=3,
        block_bytes=1000,
        boxes=[list(own.values()) for own in boxes],
        gathers=True,
    )
    assert division.gathered == {1: 0}
    for share in division.shares:
        pieces = [piece for piece in share.pieces if piece.part != TEXT]
        assert [piece.count for piece in pieces] == [1, 1]
        assert pieces[0].bytes == pytest.approx(40_000, abs=1000)
        assert pieces[1].bytes == 40_000


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (2, 4)), Box((3, 0), (1, 4))],
        [Box((0, 0), (3, 4)), Box((2, 0), (2, 4))],
        [Box((0, 0), (4, 3)), Box((0, 3), (2, 1))],
        [Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((2, 0), (2, 2))],
        [Box((0, 0), (4, 3)), Box((), (0,))],
        [Box((), (0,)), Box((), (0,))],
    ],
    ids=["a gap", "twice", "a corner", "a quarter", "the end", "nothing"],
)
def test_parts_that_are_not_the_whole(boxes: list[Box]) -> None:
    state = {"weight": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match=r"what the group's ranks have of 'weight' \(.*the whole"):
        Division(
            as_rank(state, {"weight": boxes[0]}),
            ranks=len(boxes),
            block_bytes=64,
            boxes=[[box] for box in boxes],
        )


def test_shares_differ_by_a_block_and_a_few_bytes() -> None:
    """What waits for CRC32s is in no share: some headers, and the directory."""
    container = lay_out(large_state(seed=1))
    for ranks in (2, 3, 4, 7):
        file, shares = filled([container] * ranks, block_bytes=4096)
        waiting = len(file) - sum(shares)
        assert 0 < waiting < 2000
        assert max(shares) - min(shares) <= 4096 + waiting


def test_a_file_of_one_block_is_rank_0s() -> None:
    container = lay_out({"small": torch.arange(10)})
    file, shares = filled([container] * 4, block_bytes=1024**2)
    assert shares == [len(file), 0, 0, 0]


def test_tensors_are_not_copied() -> None:
    container = lay_out(large_state(seed=2))
    division = Division(container, ranks=3, block_bytes=1024**2)
    assert sum(len(share.text) for share in division.shares) < 10_000
