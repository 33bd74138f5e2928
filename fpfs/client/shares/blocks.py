"""A share's bytes in blocks, each of which has parts of some ranges, and the ranges' CRC32s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fpfs.client.boxes import Ints
from fpfs.core.transfers import combine_crc32

RUNS_MAX = 100_000
"""Of a block."""


def in_order(ranges: Ints) -> Ints:
    """Return a share's ranges by where they are in it."""
    return ranges[np.argsort(ranges[:, 4], kind="stable")]


class Block(NamedTuple):
    """Bytes of a share that lie behind each other."""

    at: int
    bytes: int
    first: int
    """The first range of which it has bytes."""
    end: int
    """Behind the last one."""


def blocks_of(ranges: Ints, block_bytes: int) -> Iterator[Block]:
    """Cut a share's ranges, which are in order, into blocks of at most so many bytes."""
    sizes = ranges[:, 1] * ranges[:, 2]
    begins, ends = ranges[:, 4], ranges[:, 4] + sizes
    first = 0
    at = int(begins[0]) if len(ranges) else 0
    while first < len(ranges):
        at = max(at, int(begins[first]))
        # As far as there are no gaps, and not too many runs.
        room = min(block_bytes, RUNS_MAX * max(1, int(ranges[first, 1])))
        last, runs = first, 0
        end = at
        while last < len(ranges) and begins[last] <= end and runs < RUNS_MAX:
            runs += int(ranges[last, 2])
            end = min(int(ends[last]), at + room)
            if end < ends[last]:
                break
            last += 1
        stop = last + 1 if last < len(ranges) and end > begins[last] else last
        yield Block(at, end - at, first, stop)
        at, first = end, last


def runs_of_block(ranges: Ints, block: Block) -> list[tuple[int, int, int]]:
    """The runs of a block: begin in it, bytes, and offset in the torch.save file, by the latter."""
    found = []
    end = block.at + block.bytes
    for offset, size, count, step, at, _ in ranges[block.first : block.end].tolist():
        low = max(0, (block.at - at) // size)
        high = min(count, -((at - end) // size))
        for run in range(low, high):
            begin = max(block.at, at + run * size)
            stop = min(end, at + (run + 1) * size)
            within = begin - (at + run * size)
            found.append((begin - block.at, stop - begin, offset + run * step + within))
    return sorted(found, key=lambda run: run[2])


def parts_of_block(ranges: Ints, block: Block) -> list[tuple[int, int, int]]:
    """The ranges that a block has bytes of: number, begin and end of these bytes in the block."""
    chosen = ranges[block.first : block.end]
    begins = np.maximum(chosen[:, 4] - block.at, 0)
    ends = np.minimum(chosen[:, 4] + chosen[:, 1] * chosen[:, 2] - block.at, block.bytes)
    numbers = range(block.first, block.end)
    return list(zip(numbers, begins.tolist(), ends.tolist(), strict=True))


class PartCrc32(NamedTuple):
    """The CRC32 of a part of a range."""

    number: int
    """Of the range, in order."""
    crc32: int
    bytes: int


class RangeCrc32s:
    """The CRC32s of a share's ranges, whose parts are added in order."""

    def __init__(self, ranges: Ints) -> None:
        self._ranges = ranges
        self._found = [0] * len(ranges)

    def add(self, parts: Iterable[PartCrc32]) -> None:
        """Add what comes next of some ranges."""
        for number, crc, count in parts:
            self._found[number] = combine_crc32(self._found[number], crc, count)

    def problem(self, begin: int) -> str | None:
        """Which ranges are not what they were; None: all are. `begin`: of them in the share."""
        bad = np.flatnonzero(np.array(self._found, dtype=np.int64) != self._ranges[:, 5])
        if len(bad) == 0:
            return None
        damaged = int((self._ranges[bad, 1] * self._ranges[bad, 2]).sum())
        at = begin + int(self._ranges[bad[0], 4])
        return f"{len(bad)} ranges, of {damaged} bytes, are damaged, the first from byte {at} on"


__all__ = [
    "Block",
    "PartCrc32",
    "RangeCrc32s",
    "blocks_of",
    "in_order",
    "parts_of_block",
    "runs_of_block",
]
