"""How the bytes of one file are divided among ranks, each of which has all tensors of the state.

The file is cut at multiples of a block into as many ranges as there are ranks, which differ by one
block at most, whatever the tensors' sizes. A rank takes tensors' bytes from its own memory; all
else (pickle, headers, directory) is rank 0's and comes with the share.

What holds the CRC32 of a record that several ranks write parts of is in nobody's share: rank 0
writes it when all have told the CRC32s of their parts. That are the archive's directory and a
header for each cut.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator

import msgspec

from fpfs.client.container import Container, CrcPlace, Record, Text
from fpfs.core.transfers import combine_crc32

TEXT = -1
CRC_BYTES = 4


class Piece(msgspec.Struct, array_like=True):
    """Bytes of the file that lie in one piece in memory."""

    offset: int
    bytes: int
    part: int
    """Index in `Container.parts` of the record; TEXT: it is in the share's text."""
    start: int
    """Offset in the storage, or in the text."""


class Share(msgspec.Struct):
    """What one rank writes."""

    pieces: list[Piece]
    """In order."""
    crc_places: list[tuple[int, int]]
    """Offsets in the file of CRC32s, each with the index of the piece that it is of."""
    text: bytearray

    @property
    def total_bytes(self) -> int:
        """How many bytes of the file the share has."""
        return sum(piece.bytes for piece in self.pieces)


class Division:
    """A file's shares, one for each rank, and what waits for their CRC32s.

    `block_bytes`: where the file may be cut. `container` is the division's from now on.
    """

    def __init__(self, container: Container, *, ranks: int, block_bytes: int) -> None:
        self._container = container
        self._ends = _ends(container.bytes, ranks=ranks, block_bytes=block_bytes)
        self._places = list(_texts_of_places(container))
        self._waiting: dict[int, Text] = {}
        """The parts in nobody's share, by their indices."""
        for place, index in self._places:
            holder = container.parts[index]
            if isinstance(holder, Text) and not self._is_of_one(place):
                self._waiting[index] = holder
        self.shares = [Share([], [], bytearray()) for _ in range(ranks)]
        pieces = {}
        for index, part in enumerate(container.parts):
            if index not in self._waiting:
                for rank, begin, end in self._cut(part):
                    pieces[index] = self._give(rank, index, begin, end)
        for place, text in self._places:
            if text not in self._waiting:
                share = self.shares[self._rank_at(place.offset)]
                share.crc_places.append((place.offset, pieces[place.part]))

    def finish(self, crcs: list[list[int]]) -> Share:
        """Return what is left to write, given the CRC32s of each share's pieces."""
        container, whole = self._container, dict.fromkeys(range(len(self._container.parts)), 0)
        for share, found in zip(self.shares, crcs, strict=True):
            for piece, crc in zip(share.pieces, found, strict=True):
                if piece.part != TEXT:
                    whole[piece.part] = combine_crc32(whole[piece.part], crc, piece.bytes)
        for place, index in self._places:
            if index in self._waiting:
                text = self._waiting[index]
                at = text.start + (place.offset - text.offset)
                struct.pack_into("<L", container.text, at, whole[place.part])
        texts = [self._waiting[index] for index in sorted(self._waiting)]
        pieces = [Piece(text.offset, text.bytes, TEXT, text.start) for text in texts]
        return Share(pieces, [], container.text)

    def _rank_at(self, offset: int) -> int:
        return bisect.bisect_right(self._ends, offset)

    def _is_of_one(self, place: CrcPlace) -> bool:
        """Whether one rank has the CRC32's place and all of what it is of."""
        begin = self._container.parts[place.part].offset
        return self._rank_at(begin) == self._rank_at(place.offset + CRC_BYTES - 1)

    def _cut(self, part: Text | Record) -> Iterator[tuple[int, int, int]]:
        """The ranges of a part that ranks have: rank, begin and end in the file."""
        begin, end = part.offset, part.offset + part.bytes
        while begin < end:
            rank = self._rank_at(begin)
            cut = min(end, self._ends[rank])
            yield rank, begin, cut
            begin = cut

    def _give(self, rank: int, index: int, begin: int, end: int) -> int:
        """Give a rank a range of a part; returns the index of the piece."""
        share, part = self.shares[rank], self._container.parts[index]
        start = begin - part.offset
        if isinstance(part, Text):
            source = part.start + start
            start = len(share.text)
            share.text += self._container.text[source : source + (end - begin)]
            index = TEXT
        share.pieces.append(Piece(begin, end - begin, index, start))
        return len(share.pieces) - 1


def _ends(size: int, *, ranks: int, block_bytes: int) -> list[int]:
    """Where each rank's range ends. What is no whole block is the last one's, who has fewest."""
    blocks = max(1, size // block_bytes)
    ends = [-(-blocks * (rank + 1) // ranks) * block_bytes for rank in range(ranks - 1)]
    return [*(min(size, end) for end in ends), size]


def _texts_of_places(container: Container) -> Iterator[tuple[CrcPlace, int]]:
    """The places of CRC32s, each with the index of the part that it lies in."""
    last = len(container.parts) - 1
    half = len(container.crc_places) // 2
    for number, place in enumerate(container.crc_places):
        yield place, place.part + 1 if number < half else last


__all__ = ["TEXT", "Division", "Piece", "Share"]
