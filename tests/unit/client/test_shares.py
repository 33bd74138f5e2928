"""A file is the same into how many shares it may be divided."""

from __future__ import annotations

import ctypes
import io
import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfs.client.container import Container, Record, lay_out
from fpfs.client.shares import TEXT, Division, Share
from tests.support.states import large_state, nested_states, odd_state

# torch's own, of types that it is not done with.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def write(share: Share, container: Container, file: bytearray, written: bytearray) -> list[int]:
    """Write a share as the native writer does, byte by byte; returns its pieces' CRC32s."""
    contents = []
    for piece in share.pieces:
        if piece.part == TEXT:
            contents.append(bytearray(share.text[piece.start : piece.start + piece.bytes]))
        else:
            record = container.parts[piece.part]
            assert isinstance(record, Record)
            memory = ctypes.string_at(record.storage.data_ptr(), record.bytes)
            contents.append(bytearray(memory[piece.start : piece.start + piece.bytes]))
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
    for piece, content in zip(share.pieces, contents, strict=True):
        at = slice(piece.offset, piece.offset + piece.bytes)
        assert not any(written[at]), "no byte is written twice"
        written[at] = b"x" * piece.bytes
        file[at] = content
    return [zlib.crc32(content) for content in contents]


def filled(container: Container, *, ranks: int, block_bytes: int) -> tuple[bytearray, list[int]]:
    """The file that ranks write, and how many bytes each of them has."""
    file, written = bytearray(container.bytes), bytearray(container.bytes)
    division = Division(container, ranks=ranks, block_bytes=block_bytes)
    crcs = [write(share, container, file, written) for share in division.shares]
    write(division.finish(crcs), container, file, written)
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
    found, _ = filled(lay_out(state), ranks=ranks, block_bytes=block_bytes)
    alone, _ = filled(lay_out(state), ranks=1, block_bytes=block_bytes)
    assert found == alone
    assert len(found) == len(whole.getvalue())


def test_shares_differ_by_a_block_and_a_few_bytes() -> None:
    """What waits for CRC32s is in no share: some headers, and the directory."""
    container = lay_out(large_state(seed=1))
    for ranks in (2, 3, 4, 7):
        file, shares = filled(container, ranks=ranks, block_bytes=4096)
        waiting = len(file) - sum(shares)
        assert 0 < waiting < 2000
        assert max(shares) - min(shares) <= 4096 + waiting


def test_a_file_of_one_block_is_rank_0s() -> None:
    container = lay_out({"small": torch.arange(10)})
    file, shares = filled(container, ranks=4, block_bytes=1024**2)
    assert shares == [len(file), 0, 0, 0]


def test_tensors_are_not_copied() -> None:
    container = lay_out(large_state(seed=2))
    division = Division(container, ranks=3, block_bytes=1024**2)
    assert sum(len(share.text) for share in division.shares) < 10_000
