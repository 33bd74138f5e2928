"""Layout segments: where the blocks of 64 MiB of a file lie, as stored in the catalog.

A segment is little-endian::

    u32 magic "FSEG"   u16 format (2)   u16 zero   u32 segment index   u32 run count
    run count times 24 bytes:
        u32 block (in the segment)  u32 count  u32 object block  u16 device  u16 flags  u64 object
    u32 checksum count   that many u32: CRC32C of each block of each run without flags, in order
    u32 CRC32C of everything before

Blocks that no run covers are holes. Flag 1 marks preallocated blocks, which read as zeros, flag 2
blocks whose checksums are not known. Format 1 has no checksums; it is read as if all its runs had
flag 2.

Invariants: runs are in order of `block`, do not overlap, end within the segment, and have one flag
at most; there are as many checksums as blocks that have one.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, crc32c
from fpfs.core.errors import DamagedData

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAGIC = 0x47455346
FORMAT = 2
FORMAT_WITHOUT_CHECKSUMS = 1
STORED_UNIT = 4096
"""A file's last block ends at a multiple of so many bytes."""
UNWRITTEN = 1
"""Run flag: preallocated, reads as zeros."""
UNVERIFIED = 2
"""Run flag: its blocks have no checksums."""

_HEADER = struct.Struct("<IHHII")
_RUN = struct.Struct("<IIIHHQ")
_WORD = struct.Struct("<I")


class Run(NamedTuple):
    """`count` blocks of a segment that lie behind each other in one object of one device."""

    block: int
    count: int  # type: ignore[assignment]
    object_block: int
    device: int
    flags: int
    object: int

    def part(self, begin: int, end: int) -> Run:
        """Return what of it lies in the blocks from `begin` to `end` of the object."""
        offset = begin - self.object_block
        return self._replace(block=self.block + offset, count=end - begin, object_block=begin)


class Segment(NamedTuple):
    """A decoded segment: its number in the file, its runs, and the checksums of their blocks."""

    index: int  # type: ignore[assignment]
    runs: tuple[Run, ...]
    checksums: tuple[int, ...] = ()

    def verified(self) -> Iterator[tuple[Run, tuple[int, ...]]]:
        """Yield each run whose blocks have checksums, with these."""
        start = 0
        for run in self.runs:
            if run.flags == 0:
                yield run, self.checksums[start : start + run.count]
                start += run.count


def encode_segment(segment: Segment) -> bytes:
    """Return the stored form of a segment.

    Raises ValueError when runs or checksums break what every reader relies on.
    """
    fault = _fault_of(segment)
    if fault:
        raise ValueError(fault)
    parts = [_HEADER.pack(MAGIC, FORMAT, 0, segment.index, len(segment.runs))]
    parts += [_RUN.pack(*run) for run in segment.runs]
    parts.append(_WORD.pack(len(segment.checksums)))
    parts += [_WORD.pack(checksum) for checksum in segment.checksums]
    body = b"".join(parts)
    return body + _WORD.pack(crc32c(body))


def decode_segment(blob: bytes) -> Segment:
    """Return the segment that `blob` holds; raise `DamagedData` when it is not a sound one."""
    if len(blob) < _HEADER.size + 2 * _WORD.size:
        raise DamagedData(f"layout segment of {len(blob)} bytes is too short")
    (stored,) = _WORD.unpack_from(blob, len(blob) - _WORD.size)
    if crc32c(blob[: -_WORD.size]) != stored:
        raise DamagedData("layout segment does not match its checksum")
    magic, format_version, _zero, index, run_count = _HEADER.unpack_from(blob)
    if magic != MAGIC or format_version not in (FORMAT, FORMAT_WITHOUT_CHECKSUMS):
        raise DamagedData(f"layout segment of unknown kind {magic:#x} format {format_version}")
    runs_end = _HEADER.size + run_count * _RUN.size
    if runs_end + 2 * _WORD.size > len(blob):
        raise DamagedData(f"layout segment is too short for {run_count} runs")
    (checksum_count,) = _WORD.unpack_from(blob, runs_end)
    if runs_end + (2 + checksum_count) * _WORD.size != len(blob):
        raise DamagedData(f"layout segment has a wrong length for {checksum_count} checksums")
    runs = tuple(Run._make(fields) for fields in _RUN.iter_unpack(blob[_HEADER.size : runs_end]))
    if format_version == FORMAT_WITHOUT_CHECKSUMS:
        runs = tuple(run._replace(flags=run.flags or UNVERIFIED) for run in runs)
    checksums = struct.unpack_from(f"<{checksum_count}I", blob, runs_end + _WORD.size)
    segment = Segment(index, runs, checksums)
    fault = _fault_of(segment)
    if fault:
        raise DamagedData(fault)
    return segment


def _fault_of(segment: Segment) -> str:
    """Return what breaks the invariants of a segment, or an empty string."""
    end = 0
    for run in segment.runs:
        if run.flags > UNVERIFIED:
            return f"layout run of blocks {run.block}+{run.count} has unknown flags {run.flags}"
        if run.count == 0 or run.block < end or run.block + run.count > SEGMENT_BLOCKS:
            return f"layout run of blocks {run.block}+{run.count} is out of order or range"
        end = run.block + run.count
    wanted = sum(run.count for run in segment.runs if run.flags == 0)
    if wanted != len(segment.checksums):
        return f"layout segment has {len(segment.checksums)} checksums for {wanted} blocks"
    return ""


def runs_of_file(blobs: Iterable[bytes]) -> list[Run]:
    """Return the runs of all segments of a file with `block` counted from the file's start."""
    runs: list[Run] = []
    for blob in blobs:
        segment = decode_segment(blob)
        start = segment.index * SEGMENT_BLOCKS
        runs += [run._replace(block=start + run.block) for run in segment.runs]
    return sorted(runs)


def bytes_held(run: Run, size: int) -> int:
    """Return how many bytes of its object a run takes in a file of a size.

    `run.block` and `size` count from the same place in the file. Of the file's last block only what
    its bytes need is stored.
    """
    unused = 0
    if run.flags != UNWRITTEN:
        unused = (run.block + run.count) * BLOCK_BYTES - -(-size // STORED_UNIT) * STORED_UNIT
    return run.count * BLOCK_BYTES - (unused if 0 < unused < BLOCK_BYTES else 0)


def bytes_by_device(runs: Sequence[Run]) -> dict[int, int]:
    """Return how many bytes of devices a file's runs hold, by device number."""
    held: Counter[int] = Counter()
    for run in runs:
        held[run.device] += run.count * BLOCK_BYTES
    return dict(held)
