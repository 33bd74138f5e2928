"""Scrub: reading committed contents from the devices, past every cache, a step at a time.

Who asks says where to go on and how much to read; nothing is kept between steps. What a step finds
damaged is looked up again afterwards: places are never reused, so when the catalog still names a
place after it was read, it named it meanwhile too, and the damage is real. What was replaced since
may have been given back while it was read, and is no damage.

Concurrency: trio thread only. Steps of several scrubs may run side by side.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, StoredRange
from fpfs.core.errors import DamagedData
from fpfs.core.layout import UNVERIFIED, Segment, decode_segment
from fpfs.core.protocol.reports import DamagedContent, Scrubbed, ScrubCursor, ScrubStage
from fpfs.daemon.catalog.rows.dirents import path_of
from fpfs.daemon.catalog.schema import row_crc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from fpfs.core.engine import Engine
    from fpfs.core.protocol.questions import ScrubStep
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction

ROWS_MAX = 64
"""Rows of the catalog that one step looks at; it runs while others wait for the catalog."""

BYTES_MIN, BYTES_MAX = BLOCK_BYTES, 64 * 1024 * 1024
"""What a step may be asked to read."""

INO_LAST = 2**63 - 1


class _Row(NamedTuple):
    """A row of `segments` as it is stored."""

    ino: int
    index: int  # type: ignore[assignment]
    blob: bytes
    crc: int

    def decode(self) -> Segment:
        """Return the segment; `DamagedData` when it is not sound."""
        if row_crc(self.ino, self.index, content=self.blob) != self.crc:
            raise DamagedData(f"layout segment {self.index} of inode {self.ino} is damaged")
        segment = decode_segment(self.blob)
        if segment.index != self.index:
            raise DamagedData(f"layout segment {self.index} of inode {self.ino} is another one")
        return segment


class _Block(NamedTuple):
    """A block of a file, and where it was to be found."""

    ino: int
    block: int
    device: int
    object: int
    object_block: int
    checksum: int


class _Work:
    """What one step reads, and what it found."""

    def __init__(self, bytes_max: int) -> None:
        self.blocks_left = bytes_max // BLOCK_BYTES
        self.bytes_checked = 0
        self.bytes_unverified = 0
        self.ranges: list[tuple[int, int, StoredRange]] = []
        """Of an inode, from one of its blocks on."""
        self.damage: list[DamagedContent] = []
        self.cursor: ScrubCursor | None = None

    def take(self, row: _Row, first: int) -> int | None:
        """Take a segment from its block `first` on; returns where to go on in it, if it is long."""
        try:
            segment = row.decode()
        except DamagedData as error:
            self.damage.append(DamagedContent(ino=row.ino, error=error.strerror or str(error)))
            return None
        if first == 0:
            unverified = sum(run.count for run in segment.runs if run.flags == UNVERIFIED)
            self.bytes_unverified += unverified * BLOCK_BYTES
        start = row.index * SEGMENT_BLOCKS
        for run, checksums in segment.verified():
            skipped = max(0, first - run.block)
            wanted = checksums[skipped : skipped + self.blocks_left]
            if wanted:
                place = StoredRange(run.device, run.object, run.object_block + skipped, wanted)
                self.ranges.append((row.ino, start + run.block + skipped, place))
                self.blocks_left -= len(wanted)
                self.bytes_checked += len(wanted) * BLOCK_BYTES
            if skipped + len(wanted) < run.count and not self.blocks_left:
                return run.block + skipped + len(wanted)
        return None


class Scrub:
    """What steps of all scrubs of a mount use."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        device_paths: Callable[[], Mapping[int, str]],
        missing: Callable[[], Collection[int]],
    ) -> None:
        """Join the parts; nothing is read yet. The mount does without `missing` devices."""
        self._missing = missing
        self._catalog = catalog
        self._engine = engine
        self._device_paths = device_paths

    async def step(self, step: ScrubStep, *, ino: int) -> Scrubbed:
        """Look at some of an inode, or of all (0), from a cursor on."""
        work = _Work(min(max(step.bytes_max, BYTES_MIN), BYTES_MAX))
        if step.cursor.stage is ScrubStage.INLINE:
            await self._catalog.read(lambda t: _check_inline(t, work, step.cursor, ino))
        else:
            rows = await self._catalog.read(lambda t: _fetch_rows(t, step.cursor, ino))
            _take_rows(work, rows, step.cursor)
            await self._verify(work)
        total = 0
        if step.cursor == ScrubCursor() and ino == 0:
            total = await self._catalog.read(_total_bytes)
        return Scrubbed(
            bytes_checked=work.bytes_checked,
            bytes_unverified=work.bytes_unverified,
            bytes_total=total,
            damage=tuple(await self._named(work.damage)),
            cursor=work.cursor,
        )

    async def _verify(self, work: _Work) -> None:
        """Read what a step has taken; what is damaged, and still committed, is found."""
        found: dict[_Block, int] = {}
        for damage in await self._engine.verify([place for _, _, place in work.ranges]):
            ino, first, place = work.ranges[damage.range]
            for i in range(damage.first, damage.first + damage.count):
                checksum = place.checksums[i]
                where = (place.device, place.object, place.block + i)
                found[_Block(ino, first + i, *where, checksum)] = damage.errno
        blocks = await self._catalog.read(lambda t: _still_committed(t, sorted(found)))
        for block in blocks:
            if found[block] == 0:
                self._engine.report_damage(
                    block.ino,
                    block.block,
                    device=block.device,
                    object_=block.object,
                    object_block=block.object_block,
                )
        for block, count in _ranges(blocks, found):
            work.damage.append(self._describe(block, count, found[block]))

    def _describe(self, block: _Block, count: int, code: int) -> DamagedContent:
        error = f"cannot be read: {os.strerror(code)}" if code else "checksum differs"
        if block.device in self._missing():
            error = "the device is missing"
        return DamagedContent(
            ino=block.ino,
            device=block.device,
            device_path=self._device_paths().get(block.device, ""),
            object=f"{block.object:016x}",
            object_block=block.object_block,
            offset_bytes=block.block * BLOCK_BYTES,
            size_bytes=count * BLOCK_BYTES,
            errno=code or errno.EIO,
            error=error,
        )

    async def _named(self, damage: list[DamagedContent]) -> list[DamagedContent]:
        """Add the paths of the files that are damaged."""
        if not damage:
            return []
        inos = sorted({each.ino for each in damage})
        paths = await self._catalog.read(lambda t: {ino: path_of(t, ino) for ino in inos})
        return [
            msgspec.structs.replace(each, path=paths[each.ino].decode(errors="backslashreplace"))
            for each in damage
        ]


def _check_inline(
    transaction: Transaction, work: _Work, cursor: ScrubCursor, only_ino: int
) -> None:
    """Compare contents in the catalog with their checksums, in the order of inodes."""
    last_ino = only_ino or INO_LAST
    rows = transaction.execute(
        "SELECT ino, content, crc FROM inline WHERE ino >= ? AND ino <= ? ORDER BY ino LIMIT ?",
        (max(cursor.ino, only_ino), last_ino, ROWS_MAX),
    ).fetchall()
    for ino, content, crc in rows:
        work.bytes_checked += len(content)
        if row_crc(ino, content=content) != crc:
            error = "content in the catalog fails its checksum"
            work.damage.append(DamagedContent(ino=ino, size_bytes=len(content), error=error))
    if len(rows) == ROWS_MAX:
        work.cursor = ScrubCursor(stage=ScrubStage.INLINE, ino=rows[-1][0] + 1)
    else:
        work.cursor = ScrubCursor(stage=ScrubStage.SEGMENTS)


def _fetch_rows(transaction: Transaction, cursor: ScrubCursor, only_ino: int) -> list[_Row]:
    """Return segments from a cursor on; `ROWS_MAX` when there may be more."""
    first = (max(cursor.ino, only_ino), cursor.segment if cursor.ino >= only_ino else 0)
    rows = transaction.execute(
        "SELECT ino, segment, blob, crc FROM segments WHERE (ino, segment) >= (?, ?) AND ino <= ? "
        "ORDER BY ino, segment LIMIT ?",
        (*first, only_ino or INO_LAST, ROWS_MAX),
    )
    return [_Row(*fields) for fields in rows]


def _take_rows(work: _Work, rows: list[_Row], cursor: ScrubCursor) -> None:
    """Take as much of the rows as may be read; leaves in `work` where to go on."""
    for number, row in enumerate(rows):
        at_cursor = (row.ino, row.index) == (cursor.ino, cursor.segment)
        next_block = work.take(row, cursor.block if at_cursor else 0)
        if next_block is not None:
            work.cursor = _cursor_at(row.ino, row.index, next_block)
            return
        if not work.blocks_left and number + 1 < len(rows):
            work.cursor = _cursor_at(rows[number + 1].ino, rows[number + 1].index, 0)
            return
    if len(rows) == ROWS_MAX:
        work.cursor = _cursor_at(rows[-1].ino, rows[-1].index + 1, 0)


def _cursor_at(ino: int, segment: int, block: int) -> ScrubCursor:
    return ScrubCursor(stage=ScrubStage.SEGMENTS, ino=ino, segment=segment, block=block)


def _still_committed(transaction: Transaction, blocks: list[_Block]) -> list[_Block]:
    """Return those of the blocks that lie where they lay, and should be what they should."""
    now: set[_Block] = set()
    for ino, index in sorted({(block.ino, block.block // SEGMENT_BLOCKS) for block in blocks}):
        rows = transaction.execute(
            "SELECT ino, segment, blob, crc FROM segments WHERE ino = ? AND segment = ?",
            (ino, index),
        )
        for fields in rows:
            now.update(_blocks_of(_Row(*fields)))
    return [block for block in blocks if block in now]


def _ranges(blocks: Sequence[_Block], codes: Mapping[_Block, int]) -> Iterator[tuple[_Block, int]]:
    """Yield blocks that follow one another and cannot be read, as the first and their number.

    Those that can be read, and are not what was written there, stand alone.
    """
    first = 0
    for i, block in enumerate(blocks):
        following = blocks[i + 1] if i + 1 < len(blocks) else None
        is_last = following is None or not _goes_on(block, following)
        if is_last or codes[block] == 0 or codes[block] != codes[blocks[i + 1]]:
            yield blocks[first], i + 1 - first
            first = i + 1


def _goes_on(block: _Block, following: _Block) -> bool:
    step = block._replace(block=block.block + 1, object_block=block.object_block + 1)
    return step == following._replace(checksum=block.checksum)


def _blocks_of(row: _Row) -> Iterator[_Block]:
    for run, checksums in row.decode().verified():
        start = row.index * SEGMENT_BLOCKS + run.block
        for i, checksum in enumerate(checksums):
            where = (run.device, run.object, run.object_block + i)
            yield _Block(row.ino, start + i, *where, checksum)


def _total_bytes(transaction: Transaction) -> int:
    query = "SELECT coalesce(sum(allocated_bytes), 0) FROM inodes"
    (total,) = transaction.execute(query).fetchone()
    return int(total)
