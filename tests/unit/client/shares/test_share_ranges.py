"""Where bytes of a file are in shares, by looking at each byte."""

from __future__ import annotations

import contextlib
import zlib
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fpfs.client.shares import blocks, reading
from fpfs.client.shares.format import (
    Damaged,
    Header,
    Identity,
    Manifest,
    ShareFile,
    decode_header,
    decode_manifest,
    encode_header,
    encode_manifest,
    header_room,
    parse_name,
    share_name,
)
from fpfs.client.shares.reading import Index


@st.composite
def divided_files(draw: st.DrawFn) -> tuple[list[Any], int]:
    """Ranges of several shares, which have all bytes of a file; the file's bytes."""
    shares: list[list[list[int]]] = [[] for _ in range(draw(st.integers(1, 3)))]
    ends = [0] * len(shares)
    at = 0

    def add(offset: int, size: int, count: int, step: int) -> None:
        share = draw(st.integers(0, len(shares) - 1))
        gap = draw(st.sampled_from([0, 0, 3]))
        shares[share].append([offset, size, count, step, ends[share] + gap, 0])
        ends[share] += gap + size * count

    for _ in range(draw(st.integers(0, 6))):
        if draw(st.booleans()):
            size = draw(st.integers(1, 9))
            add(at, size, 1, 0)
            at += size
            continue
        # A matrix, of which each has some columns.
        widths = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
        rows = draw(st.integers(1, 5))
        begin = at
        for width in widths:
            add(begin, width, rows, sum(widths) if rows > 1 else 0)
            begin += width
        at += sum(widths) * rows
    return [np.array(each, dtype=np.int64).reshape(-1, 6) for each in shares], at


def bytes_of(shares: list[Any]) -> dict[int, tuple[int, int]]:
    """Where each byte of the file is: the share and the place there."""
    places = {}
    for share, ranges in enumerate(shares):
        for offset, size, count, step, at, _ in ranges.tolist():
            for run in range(count):
                for byte in range(size):
                    place = offset + run * step + byte
                    assert place not in places
                    places[place] = (share, at + run * size + byte)
    return places


@given(divided_files(), st.data())
def test_any_bytes_are_found(divided: tuple[list[Any], int], data: st.DataObject) -> None:
    shares, size = divided
    places = bytes_of(shares)
    assert sorted(places) == list(range(size))
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    found = []
    for share, at, start, count in Index(shares, size).find(begin, end - begin).tolist():
        assert start == len(found)
        found += [(share, at + byte) for byte in range(count)]
    assert found == [places[byte] for byte in range(begin, end)]


@given(divided_files(), st.data())
def test_what_no_share_has_is_not_found(
    divided: tuple[list[Any], int], data: st.DataObject
) -> None:
    shares, size = divided
    share = data.draw(st.integers(0, len(shares) - 1))
    if len(shares[share]) == 0:
        return
    lost = data.draw(st.integers(0, len(shares[share]) - 1))
    shares[share] = np.delete(shares[share], lost, axis=0)
    with pytest.raises(Damaged, match="the shares have not all of the file's bytes 0 to"):
        Index(shares, size).find(0, size)


@pytest.mark.parametrize("second", [[0, 4, 1, 0, 0, 0], [5, 4, 1, 0, 0, 0]])
def test_shares_that_are_not_the_whole(monkeypatch: pytest.MonkeyPatch, second: list[int]) -> None:
    """Though they have as many bytes."""
    monkeypatch.setattr(reading, "_CHECKED_BYTES", 3)
    ranges = np.array([[0, 4, 1, 0, 0, 0], [4, 4, 1, 0, 0, 0]], dtype=np.int64)
    _, manifest = a_share(ranges, 8)

    def shares(*of_each: Any) -> reading.Shares:
        opened: list[Any] = [[SimpleNamespace(ranges=each)] for each in of_each]
        return reading.Shares(manifest, opened)

    shares(ranges[:1], ranges[1:]).check_whole()
    with pytest.raises(Damaged, match="the shares have not all of the file's bytes"):
        shares(ranges[:1], np.array([second], dtype=np.int64)).check_whole()


@given(divided_files(), st.integers(1, 12), st.integers(1, 4))
def test_blocks_have_each_byte_once(
    divided: tuple[list[Any], int], block_bytes: int, runs_max: int
) -> None:
    shares, _ = divided
    places = bytes_of(shares)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "RUNS_MAX", runs_max)
        for share, ranges in enumerate(shares):
            for block in blocks.blocks_of(ranges, block_bytes):
                assert 0 < block.bytes <= block_bytes
                runs = blocks.runs_of_block(ranges, block)
                assert [run[2] for run in runs] == sorted(run[2] for run in runs)
                for begin, count, offset in runs:
                    for byte in range(count):
                        assert offset + byte not in found
                        found[offset + byte] = (share, block.at + begin + byte)
    assert found == places


@given(divided_files(), st.integers(1, 40), st.data())
def test_what_is_damaged_in_a_share(
    divided: tuple[list[Any], int], block_bytes: int, data: st.DataObject
) -> None:
    ranges = blocks.in_order(max(divided[0], key=len))
    assume(len(ranges) > 0)
    ends = (ranges[:, 4] + ranges[:, 1] * ranges[:, 2]).tolist()
    content = bytearray(data.draw(st.binary(min_size=max(ends), max_size=max(ends))))
    spans = list(zip(ranges[:, 4].tolist(), ends, strict=True))
    ranges[:, 5] = [zlib.crc32(content[begin:end]) for begin, end in spans]

    def problem() -> str | None:
        crcs = blocks.RangeCrc32s(ranges)
        for block in blocks.blocks_of(ranges, block_bytes):
            part = memoryview(content)[block.at : block.at + block.bytes]
            crcs.add(
                blocks.PartCrc32(number, zlib.crc32(part[begin:end]), end - begin)
                for number, begin, end in blocks.parts_of_block(ranges, block)
            )
        return crcs.problem(4096)

    assert problem() is None
    ranges = blocks.in_order(np.array(data.draw(st.permutations(ranges.tolist()))))
    assert problem() is None
    at = data.draw(st.integers(0, max(ends) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = [(begin, end) for begin, end in spans if begin <= at < end]
    if not damaged:  # it is between two
        assert problem() is None
        return
    ((begin, end),) = damaged
    assert problem() == (
        f"1 ranges, of {end - begin} bytes, are damaged, the first from byte {4096 + begin} on"
    )


IDENTITY = Identity(7, "0123456789abcdef")


def test_names() -> None:
    name = share_name(3, 16384, IDENTITY)
    assert name == "00003-of-16384.7-0123456789abcdef.share"
    assert parse_name(name) == (3, 16384, IDENTITY)
    for other in ("manifest.json", f".{name}", f"{name}.tmp", name.replace("7", "-7")):
        assert parse_name(other) is None


def a_share(ranges: Any, size: int) -> tuple[bytes, Manifest]:
    """A share's begin, and the manifest that names it alone."""
    header = Header(1, IDENTITY, 0, 1, size, (0, 0), [])
    room = header_room(ranges, header)
    content = encode_header(ranges, header, room)
    stored = int((ranges[:, 4] + ranges[:, 1] * ranges[:, 2]).max(initial=0))
    crc = zlib.crc32(content)
    file = ShareFile(share_name(0, 1, IDENTITY), "host", room + stored, room, crc)
    return content, Manifest(1, IDENTITY, size, 4, 1, (file,))


@given(divided_files())
def test_a_header_is_what_was_written(divided: tuple[list[Any], int]) -> None:
    (ranges, *_), size = divided
    content, manifest = a_share(ranges, size)
    assert len(content) % 4096 == 0
    found, _ = decode_header(content, manifest, 0, "path")
    assert np.array_equal(found, ranges)
    assert decode_manifest(encode_manifest(manifest), "path") == manifest


@pytest.mark.parametrize(
    "row",
    [
        [0, 5, 1, 0, 0, 0],
        [1, 2, 2, 3, 0, 0],
        [0, 2, 2, 1, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 1 << 55, 1 << 55, 1 << 55, 0, 0],
    ],
    ids=["behind the end", "runs behind the end", "runs in each other", "empty", "no run", "huge"],
)
def test_ranges_that_cannot_be(row: list[int]) -> None:
    content, manifest = a_share(np.array([row], dtype=np.int64), 4)
    with pytest.raises(Damaged, match="path is another share than the manifest says"):
        decode_header(content, manifest, 0, "path")


ONE = np.array([[0, 4, 1, 0, 0, 0]], dtype=np.int64)


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (b'"version":1', b'"version":2'),
        (b'"number":', b'"other":0,"number":'),
        (b'"bytes":', b'"other":0,"bytes":'),
    ],
    ids=["version", "field of the checkpoint", "field"],
)
def test_what_a_later_fpfs_may_write_is_refused(said: bytes, instead: bytes) -> None:
    content, manifest = a_share(ONE, 4)
    header = content[8:].replace(said, instead)
    begin = 8 + len(header)
    changed = len(header).to_bytes(8, "little") + header
    file = msgspec.structs.replace(
        manifest.shares[0], header_bytes=begin, header_crc32=zlib.crc32(changed)
    )
    manifest = msgspec.structs.replace(manifest, shares=(file,))
    with pytest.raises(Damaged, match="path is no share of a checkpoint: "):
        decode_header(changed, manifest, 0, "path")
    spaced = [each.replace(b":", b": ") for each in (said, instead)]
    wrong = encode_manifest(manifest).replace(*spaced)
    with pytest.raises(Damaged, match="path is (no manifest of a checkpoint: |of version 2)"):
        decode_manifest(wrong, "path")


@given(st.data())
def test_a_changed_byte_is_noticed(data: st.DataObject) -> None:
    content, manifest = a_share(ONE, 4)
    changed = bytearray(content)
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Damaged):
        decode_header(bytes(changed), manifest, 0, "path")


@given(st.data())
def test_a_manifest_is_one_or_damaged(data: st.DataObject) -> None:
    changed = bytearray(encode_manifest(a_share(ONE, 4)[1]))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(Damaged):
        assert len(decode_manifest(bytes(changed), "path").shares) == 1
