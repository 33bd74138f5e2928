"""Errors, limits, policy and the layout codec."""

from __future__ import annotations

import builtins
import errno
import inspect
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpfs.core import errors
from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, crc32c
from fpfs.core.errors import DamagedData, FpfsError
from fpfs.core.layout import (
    UNVERIFIED,
    UNWRITTEN,
    Run,
    Segment,
    bytes_by_device,
    decode_segment,
    encode_segment,
    runs_of_file,
)

CLASSES = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, FpfsError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_are_what_their_tree_says(kind: type[FpfsError]) -> None:
    line = re.search(rf"{kind.__name__} +(E\w+)(?: +\((\w+Error)\))?", errors.__doc__ or "")
    assert line is not None
    assert kind.code == getattr(errno, line[1])
    assert kind("why").errno == kind.code
    if line[2]:
        assert issubclass(kind, getattr(builtins, line[2]))
        assert type(OSError(kind.code, "")) in kind.__mro__


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Make sound segments: runs in order, without overlap."""
    edges = sorted(draw(st.sets(st.integers(0, SEGMENT_BLOCKS), max_size=12)))
    runs = [
        Run(
            start,
            end - start,
            draw(st.integers(0, 2**32 - 1)),
            draw(st.integers(0, 2**16 - 2)),
            draw(st.integers(0, 2)),
            draw(st.integers(0, 2**64 - 1)),
        )
        for start, end in zip(edges[::2], edges[1::2], strict=False)
    ]
    verified = sum(run.count for run in runs if run.flags == 0)
    random = draw(st.randoms(use_true_random=False))
    checksums = tuple(random.getrandbits(32) for _ in range(verified))
    return Segment(draw(st.integers(0, 2**32 - 1)), tuple(runs), checksums)


@given(segments())
def test_segments_come_back(segment: Segment) -> None:
    assert decode_segment(encode_segment(segment)) == segment


@given(segments(), st.data())
def test_damaged_segments_are_refused(segment: Segment, data: st.DataObject) -> None:
    blob = bytearray(encode_segment(segment))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedData):
        decode_segment(bytes(blob))
    with pytest.raises(DamagedData):
        decode_segment(bytes(blob[:place]))


def test_the_stored_form_of_a_segment() -> None:
    runs = (Run(1, 2, 3, 4, 1, 5), Run(3, 1, 5, 4, 0, 5), Run(4, 9, 6, 4, 2, 5))
    segment = Segment(7, runs, (0xAABBCCDD,))
    body = bytes.fromhex(
        "46534547 0200 0000 07000000 03000000"
        "01000000 02000000 03000000 0400 0100 0500000000000000"
        "03000000 01000000 05000000 0400 0000 0500000000000000"
        "04000000 09000000 06000000 0400 0200 0500000000000000"
        "01000000 ddccbbaa"
    )
    assert encode_segment(segment) == body + crc32c(body).to_bytes(4, "little")
    assert list(segment.verified()) == [(runs[1], (0xAABBCCDD,))]


def test_a_segment_of_the_first_format_has_no_checksums() -> None:
    body = bytes.fromhex(
        "46534547 0100 0000 07000000 02000000"
        "01000000 02000000 03000000 0400 0000 0500000000000000"
        "03000000 01000000 05000000 0400 0100 0500000000000000"
        "00000000"
    )
    segment = decode_segment(body + crc32c(body).to_bytes(4, "little"))
    assert [run.flags for run in segment.runs] == [UNVERIFIED, UNWRITTEN]
    assert not list(segment.verified())


@pytest.mark.parametrize(
    "runs",
    [
        [Run(0, 0, 0, 0, 2, 1)],
        [Run(5, 2, 0, 0, 2, 1), Run(6, 1, 0, 0, 2, 1)],
        [Run(SEGMENT_BLOCKS - 1, 2, 0, 0, 2, 1)],
    ],
    ids=["empty", "overlapping", "too long"],
)
def test_runs_that_break_the_order_are_not_stored(runs: list[Run]) -> None:
    with pytest.raises(ValueError, match="out of order or range"):
        encode_segment(Segment(0, tuple(runs)))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_segment_has_a_checksum_for_each_block_or_is_not_stored(count: int) -> None:
    with pytest.raises(ValueError, match=f"has {count} checksums for 2 blocks"):
        encode_segment(Segment(0, (Run(0, 2, 0, 0, 0, 1),), (7,) * count))


def test_runs_with_unknown_flags_are_not_stored() -> None:
    with pytest.raises(ValueError, match="unknown flags 3"):
        encode_segment(Segment(0, (Run(0, 2, 0, 0, 3, 1),)))


def test_runs_of_a_file_count_from_its_start() -> None:
    blobs = [
        encode_segment(Segment(2, (Run(3, 4, 0, 1, 2, 9),))),
        encode_segment(Segment(0, (Run(0, 1, 0, 0, 2, 8), Run(1, 2, 5, 1, 1, 9)))),
    ]
    runs = runs_of_file(blobs)
    assert [run.block for run in runs] == [0, 1, 2 * SEGMENT_BLOCKS + 3]
    assert bytes_by_device(runs) == {0: BLOCK_BYTES, 1: 6 * BLOCK_BYTES}
