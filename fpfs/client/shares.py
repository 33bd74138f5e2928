"""How the bytes of one file are divided among ranks.

Of most tensors every rank has all bytes, of some (DTensors) each has a part, of which others may
have a replica. So bytes are sorted by who has them, and each set of ranks divides what only it has:
those of fewest ranks first, and then so that all ranks have written the same in the end. Shares are
cut at multiples of a block of the file; where all have all, they differ by one block at most.

A rank takes tensors' bytes from its own memory, unless they are cut along an inner dimension: then
parts are many short runs in the file, and ranks that can read each other's memory write ranges of
the whole (`gathered`). All else (pickle, headers, directory) is rank 0's and comes with the share,
to whoever writes the bytes before it.

What holds the CRC32 of a record that several ranks write parts of is in nobody's share: rank 0
writes it when all have told what their parts are of the CRC32s. That are the archive's directory
and the header behind each such record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec

from fpfs.client.container import Container, CrcPlace, Record, Text
from fpfs.client.sharding import Box, Sharded, is_one_run, is_tiling, runs_of
from fpfs.core.transfers import combine_crc32

TEXT = -1


class Piece(msgspec.Struct, array_like=True):
    """Bytes of the file that lie in one piece in memory, in `count` runs of `bytes` each."""

    offset: int
    """Of the first run in the file."""
    bytes: int
    part: int
    """Index in `Container.parts` of the record; TEXT: it is in the share's text."""
    start: int
    """Offset in the bytes of the record that the rank has, or in the text."""
    count: int = 1
    step: int = 0
    """From the begin of one run to the begin of the next, in the file."""

    @property
    def total_bytes(self) -> int:
        """Of all runs."""
        return self.count * self.bytes

    def runs(self) -> Iterator[tuple[int, int]]:
        """The runs' offsets, in the file and as `start`."""
        for number in range(self.count):
            yield self.offset + number * self.step, self.start + number * self.bytes


class Share(msgspec.Struct):
    """What one rank writes."""

    pieces: list[Piece]
    """By their offsets."""
    crc_places: list[tuple[int, int]]
    """Offsets in the file of CRC32s, each with the index of the piece that it is of."""
    text: bytearray
    records: dict[int, int]
    """Where the records of the pieces begin in the file, which another rank would lay out a bit
    differently if what is no tensor is longer there. By their indices in `Container.parts`."""

    @property
    def total_bytes(self) -> int:
        """How many bytes of the file the share has."""
        return sum(piece.total_bytes for piece in self.pieces)


class Division:
    """A file's shares, one for each rank, and what waits for their CRC32s.

    block_bytes: at whose multiples in the file shares are cut.
    boxes: what each rank has of each of the container's sharded tensors.
    gathers: whether ranks can read each other's memory.

    `container` is the division's from now on. Raises ValueError if some bytes are no rank's.
    """

    def __init__(
        self,
        container: Container,
        *,
        ranks: int,
        block_bytes: int,
        boxes: Sequence[Sequence[Box]] = (),
        gathers: bool = False,
    ) -> None:
        self._container = container
        self._places = list(_texts_of_places(container))
        given: list[list[Piece]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        self.gathered: dict[int, int] = {}
        """The records of which all may write, by their parts' indices; which sharded tensors."""
        streams = self._streams(ranks, boxes, gathers=gathers)
        for holders in sorted(streams, key=len):
            for rank, piece in _dealt(streams[holders], loads, holders, block_bytes):
                given[rank].append(piece)
                loads[rank] += piece.total_bytes
        writers = _writers(container, given)
        self._waiting: dict[int, Text] = {}
        """The parts in nobody's share, by their indices."""
        for place, index in self._places:
            text = container.parts[index]
            if isinstance(text, Text) and len(writers[index] | writers[place.part]) > 1:
                self._waiting[index] = text
        self.shares = [self._share(pieces) for pieces in given]

    def finish(self, crcs: Sequence[dict[int, int]]) -> Share:
        """Return what is left to write, given what `crc32_parts` returned of each rank."""
        container, whole = self._container, dict.fromkeys(range(len(self._container.parts)), 0)
        for found in crcs:
            for part, crc in found.items():
                whole[part] ^= crc
        for place, index in self._places:
            if index in self._waiting:
                text = self._waiting[index]
                at = text.start + (place.offset - text.offset)
                struct.pack_into("<L", container.text, at, whole[place.part])
        texts = [self._waiting[index] for index in sorted(self._waiting)]
        pieces = [Piece(text.offset, text.bytes, TEXT, text.start) for text in texts]
        return Share(pieces, [], container.text, {})

    def _streams(
        self, ranks: int, boxes: Sequence[Sequence[Box]], *, gathers: bool
    ) -> dict[tuple[int, ...], list[Piece]]:
        """The file's bytes by the ranks that have them, in the file's order.

        A text goes with what is before it.
        """
        everybody = tuple(range(ranks))
        streams: dict[tuple[int, ...], list[Piece]] = {}
        stream: list[Piece] = []
        first, sharded = stream, 0
        for index, part in enumerate(self._container.parts):
            if isinstance(part, Text):
                stream.append(Piece(part.offset, part.bytes, index, 0))
                continue
            pieces = {everybody: [Piece(part.offset, part.bytes, index, 0)]}
            if part.sharded is not None:
                found = _holders(part.sharded, [each[sharded] for each in boxes])
                if gathers and not all(is_one_run(box, part.sharded.shape) for box in found):
                    self.gathered[index] = sharded
                else:
                    pieces = _pieces(part, index, part.sharded, found)
                sharded += 1
            for holders, of_holders in pieces.items():
                stream = streams.setdefault(holders, [])
                stream += of_holders
            if first:
                stream[:0], first = first, []
        return streams or {everybody: stream}

    def _share(self, given: list[Piece]) -> Share:
        container, share, indices = (
            self._container,
            Share([], [], bytearray(), {}),
            dict[int, int](),
        )
        for piece in sorted(given, key=lambda piece: piece.offset):
            if piece.part not in self._waiting:
                indices[piece.part] = len(share.pieces)
                share.pieces.append(_with_text(piece, container, share.text))
                part = container.parts[piece.part]
                if isinstance(part, Record):
                    share.records[piece.part] = part.offset
        share.crc_places = [
            (place.offset, indices[place.part]) for place, text in self._places if text in indices
        ]
        return share


def _with_text(piece: Piece, container: Container, text: bytearray) -> Piece:
    """The piece as it is in a share, to whose text the piece's is added."""
    part = container.parts[piece.part]
    if not isinstance(part, Text):
        return piece
    source, start = part.start + piece.start, len(text)
    text += container.text[source : source + piece.bytes]
    return Piece(piece.offset, piece.bytes, TEXT, start)


def crc32_parts(
    share: Share, crcs: Sequence[Sequence[int]], container: Container
) -> dict[int, int]:
    """What the share's bytes of each record are of its CRC32, by the record's index.

    crcs: the CRC32 of each run of each piece. A CRC32 is the sum (exclusive or) of what it would be
    of each part, were there only zeros beside it.
    """
    found: dict[int, int] = {}
    for piece, of_runs in zip(share.pieces, crcs, strict=True):
        if piece.part == TEXT:
            continue
        end = share.records[piece.part] + container.parts[piece.part].bytes
        for (offset, _), crc in zip(piece.runs(), of_runs, strict=True):
            shifted = combine_crc32(crc, 0, end - offset - piece.bytes)
            found[piece.part] = found.get(piece.part, 0) ^ shifted
    return found


def _holders(sharded: Sharded, boxes: Sequence[Box]) -> dict[Box, tuple[int, ...]]:
    """The boxes of a tensor and the ranks that have them. All elements are in one of them."""
    found: dict[Box, tuple[int, ...]] = {}
    for rank, box in enumerate(boxes):
        if box.elements > 0:
            found[box] = (*found.get(box, ()), rank)
    if not is_tiling(set(found), sharded.shape):
        shown = ", ".join(f"{box.shape} at {box.offsets}" for box in list(found)[:4])
        raise ValueError(
            f"what the group's ranks have of {sharded.name!r} ({shown}) is not the whole of"
            f" {sharded.shape}: the group must have all ranks of the tensor's mesh"
        )
    return found


def _pieces(
    record: Record, index: int, sharded: Sharded, boxes: dict[Box, tuple[int, ...]]
) -> dict[tuple[int, ...], list[Piece]]:
    """The bytes of a sharded tensor by the ranks that have them."""
    pieces: dict[tuple[int, ...], list[Piece]] = {}
    for box, holders in boxes.items():
        pieces.setdefault(holders, []).extend(
            Piece(record.offset + runs.offset, runs.bytes, index, runs.start, runs.count, runs.step)
            for runs in runs_of(box, sharded.shape, sharded.itemsize)
        )
    return pieces


def _dealt(
    stream: list[Piece], loads: list[int], holders: tuple[int, ...], block_bytes: int
) -> Iterator[tuple[int, Piece]]:
    """Each rank's part of a stream, so that their loads become the same."""
    total = sum(piece.total_bytes for piece in stream)
    blocks = max(1, total // block_bytes)
    # Where each rank's part ends. What is no whole block is the last one's, who has fewest.
    ends = [
        -(-end // block_bytes) * block_bytes
        for end in _levelled(blocks * block_bytes, [loads[rank] for rank in holders])
    ]
    ends[-1] = total
    at, number = 0, 0
    for whole in stream:
        rest: Piece | None = whole
        while rest is not None:
            while number < len(holders) - 1 and at >= ends[number]:
                number += 1
            piece, rest = _cut(rest, ends[number] - at, block_bytes)
            at += piece.total_bytes
            yield holders[number], piece


def _levelled(total: int, loads: list[int]) -> list[int]:
    """Where the parts of `total` end that make all loads the same, as far as they can."""
    level, rest = 0.0, total
    for count, load in enumerate(sorted(loads), 1):
        # Were only those with the lowest `count` loads to have a part:
        rest += load
        if count == len(loads) or rest / count <= sorted(loads)[count]:
            level = rest / count
            break
    ends, end = [], 0.0
    for load in loads:
        end += max(0.0, level - load)
        ends.append(int(end))
    return ends


def _cut(piece: Piece, room: int, block_bytes: int) -> tuple[Piece, Piece | None]:
    """Cut off what has `room` bytes, or up to a block more, and return it and the rest."""
    if room >= piece.total_bytes:
        return piece, None
    if piece.count > 1:
        count = -(-room // piece.bytes)
        if count >= piece.count:
            return piece, None
        at, start = piece.offset + count * piece.step, piece.start + count * piece.bytes
        rest = Piece(at, piece.bytes, piece.part, start, piece.count - count, piece.step)
        return msgspec.structs.replace(piece, count=count), rest
    at = -(-(piece.offset + room) // block_bytes) * block_bytes
    taken = at - piece.offset
    if taken >= piece.bytes:
        return piece, None
    rest = Piece(at, piece.bytes - taken, piece.part, piece.start + taken)
    return msgspec.structs.replace(piece, bytes=taken), rest


def _writers(container: Container, given: list[list[Piece]]) -> list[set[int]]:
    """The ranks that write of each part."""
    writers: list[set[int]] = [set() for _ in container.parts]
    for rank, pieces in enumerate(given):
        for piece in pieces:
            writers[piece.part].add(rank)
    return writers


def _texts_of_places(container: Container) -> Iterator[tuple[CrcPlace, int]]:
    """The places of CRC32s, each with the index of the part that it lies in."""
    last = len(container.parts) - 1
    half = len(container.crc_places) // 2
    for number, place in enumerate(container.crc_places):
        yield place, place.part + 1 if number < half else last


__all__ = ["TEXT", "Division", "Piece", "Share", "crc32_parts"]
