"""Draining: moving what a device holds to others, a step at a time.

Who asks says where to go on and how much to move; nothing is kept between steps. Blocks are copied
while nobody is held up, compared with their checksums on the way, and flushed. One transaction
then lets everybody who refers to them refer to the new places, and gives the old ones back, which
happens once that is durable. What is being changed just then is left to a later step.

Invariants:
  * From before the transaction until the engine knows of it nobody drains an inode that refers to
    the blocks: a snapshot of before would name the old places again.
  * A block that cannot be read, or is not what was written there, stays where it is.

Concurrency: trio thread only. Several inodes' locks are never waited for, but taken or left.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import trio

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, CopiedRange, Move, ObjectId
from fpfs.core.errors import BusyFile, DamagedData, NoSpace, NoSuchEntry
from fpfs.core.layout import UNWRITTEN, Run
from fpfs.core.protocol.reports import DamagedContent, DrainCursor, Drained, DrainStage
from fpfs.core.threads import run_alone
from fpfs.daemon.catalog.rows.attributes import fetch_inode
from fpfs.daemon.catalog.rows.dirents import path_of
from fpfs.daemon.catalog.rows.relocation import (
    Planned,
    SegmentRow,
    fetch_objects_on,
    fetch_rows_on,
    referents,
    remove_unreferenced,
    store_moves,
    usage_of,
)
from fpfs.daemon.catalog.rows.shared_extents import without
from fpfs.daemon.devices.free_space import free_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.rows.relocation import Moved
    from fpfs.daemon.devices.members import DeviceRegistry
    from fpfs.daemon.inodes.table import Inode, InodeTable

ROWS_MAX = 64
"""Rows of the catalog that one step looks at."""

BYTES_MIN, BYTES_MAX = BLOCK_BYTES, 64 * 1024 * 1024
"""What a step may be asked to move."""


class _Source(NamedTuple):
    """A run of a file that is to be moved, its first block in the file, and its checksums."""

    block: int
    run: Run
    checksums: tuple[int, ...]


class _Work:
    """What one step moves, and what came of it."""

    def __init__(self, device: int, bytes_max: int) -> None:
        self.device = device
        self.blocks_left = bytes_max // BLOCK_BYTES
        self.sources: dict[int, list[_Source]] = {}
        self.held: dict[int, Counter[int]] = {}
        """Blocks that the segments of an inode have on each device."""
        self.moved: dict[ObjectId, list[tuple[int, int]]] = {}
        """What is elsewhere by now, also of inodes that are still to come: they shared it."""
        self.bytes_moved = 0
        self.bytes_busy = 0
        self.damage: list[DamagedContent] = []

    def take(self, row: SegmentRow, first: int) -> int | None:
        """Take a segment's runs on the device from a block on; returns where to go on in it."""
        try:
            segment = row.decode()
        except DamagedData as error:
            self.damage.append(DamagedContent(ino=row.ino, error=error.strerror or str(error)))
            return None
        checksums = dict(segment.verified())
        start = row.index * SEGMENT_BLOCKS
        held = self.held.setdefault(row.ino, Counter())
        for run in segment.runs:
            held[run.device] += run.count
        for run in segment.runs:
            skipped = max(0, first - run.block)
            if run.device != self.device or skipped >= run.count:
                continue
            if not self.blocks_left:
                return run.block + skipped
            count = min(run.count - skipped, self.blocks_left)
            part = run._replace(
                block=run.block + skipped, count=count, object_block=run.object_block + skipped
            )
            known = checksums.get(run, ())[skipped : skipped + count]
            self.sources.setdefault(row.ino, []).append(_Source(start + part.block, part, known))
            self.blocks_left -= count
            if skipped + count < run.count:
                return run.block + skipped + count
        return None

    def without_moved(self, source: _Source) -> Iterator[_Source]:
        """Yield the parts of a run that are where it says."""
        run = source.run
        spans = [(run.object_block, run.object_block + run.count)]
        moved = self.moved.get(ObjectId(run.device, run.object), [])
        for begin, end in without(spans, moved):
            offset, count = begin - run.object_block, end - begin
            part = run._replace(block=run.block + offset, count=count, object_block=begin)
            known = source.checksums[offset : offset + count]
            yield _Source(source.block + offset, part, known)


class Draining:
    """What steps of all drains of a mount use."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        inodes: InodeTable,
        registry: DeviceRegistry,
        removals_recorded: Callable[[int], None],
        ask_again: Callable[[int], Awaitable[OSError | None]],
    ) -> None:
        """Join the parts; `removals_recorded` is told of what is to be given back, and `ask_again`
        lets a device give it back, or tells why it does not."""
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self._registry = registry
        self._removals_recorded = removals_recorded
        self._ask_again = ask_again

    async def step(self, number: int, cursor: DrainCursor, bytes_max: int) -> Drained:
        """Move some of what a draining device holds, from a cursor on. OSError."""
        if cursor.stage is DrainStage.OBJECTS:
            return await self._sweep(number, cursor)
        work = _Work(number, min(max(bytes_max, BYTES_MIN), BYTES_MAX))
        after = (cursor.ino, cursor.segment)
        rows = await self._catalog.read_many(
            lambda t: fetch_rows_on(t, number, after=after, count=ROWS_MAX)
        )
        following = _take_rows(work, rows, cursor)
        for ino, sources in work.sources.items():
            left = [part for source in sources for part in work.without_moved(source)]
            if left:
                await self._move(work, ino, left)
        return Drained(
            bytes_moved=work.bytes_moved,
            bytes_busy=work.bytes_busy,
            damage=tuple(await self._named(work.damage)),
            cursor=following,
        )

    async def _move(self, work: _Work, ino: int, sources: Sequence[_Source]) -> None:
        """Move runs of one inode, with all others that refer to them."""
        to = await self.choose(work.device, work.held[ino])
        ranges = [
            CopiedRange(
                run.device, run.object, run.object_block, run.count, run.flags == UNWRITTEN, known
            )
            for _block, run, known in sources
        ]
        id_, damage = await self._engine.copy(to, ranges)
        target = ObjectId(to, id_)
        bad: dict[int, dict[int, int]] = {}
        for each in damage:
            for offset in range(each.first, each.first + each.count):
                bad.setdefault(each.range, {})[offset] = each.errno
        planned = _planned(sources, bad, target)
        moved = None
        if planned:
            try:
                moved = await self._switch(work.device, ino, planned)
            except DamagedData as error:
                work.damage.append(DamagedContent(ino=ino, error=error.strerror or str(error)))
                planned = []
            except BaseException:
                # Whether a catalog that fails has stored the moves is not known: what was copied
                # stays, and the next mount looks whether it is of a version.
                self._catalog.ended_cleanly = False
                raise
        if moved is None or not moved.inos:
            await self._give_up(target)
        if planned and moved is None:
            work.bytes_busy += sum(each.move.count for each in planned) * BLOCK_BYTES
        elif moved is not None:
            for move in moved.moves:
                work.bytes_moved += move.count * BLOCK_BYTES
                spans = work.moved.setdefault(ObjectId(move.device, move.object), [])
                spans.append((move.block, move.block + move.count))
            self._removals_recorded(moved.removal)
        for index, offsets in bad.items():
            work.damage += [
                self._describe(ino, sources[index], offset, code)
                for offset, code in offsets.items()
            ]

    async def _give_up(self, target: ObjectId) -> None:
        """Remove what was copied for nothing, unless its device was removed meanwhile."""
        try:
            await self._engine.remove_objects([target])
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    async def _switch(self, device: int, ino: int, planned: Sequence[Planned]) -> Moved | None:
        """Let everybody refer to copied blocks; None where that cannot be now."""
        places = sorted({ObjectId(each.move.device, each.move.object) for each in planned})
        members = await self._catalog.read(lambda t: referents(t, places))
        held: list[Inode] = []
        begun: list[int] = []

        def made(moved: Moved) -> Moved:
            for member in begun:
                self._engine.end_move(member, moved.moves)
            begun.clear()
            return moved

        try:
            for member in sorted(members):
                inode = await self._hold(member)
                if inode is not None:
                    held.append(inode)
            locked = [inode for inode in held if _try_lock(inode)]
            try:
                if len(locked) < len(held):
                    return None
                for inode in held:
                    if not self._engine.begin_move(inode.ino, device):
                        return None
                    begun.append(inode.ino)
                return await self._catalog.write_many(
                    lambda t: store_moves(t, ino, planned, expected=members), apply=made
                )
            except BusyFile:
                return None
            finally:
                for member in begun:
                    self._engine.end_move(member, ())
                for inode in locked:
                    inode.lock.release()
        finally:
            for inode in held:
                self._inodes.release(inode)

    async def _hold(self, ino: int) -> Inode | None:
        """Load an inode and keep it so; None for one that nobody can open, or that is no more."""
        inode = self._inodes.cached(ino)
        if inode is None:
            try:
                row = await self._catalog.read(lambda t: fetch_inode(t, ino))
                if row.nlink == 0:
                    return None
                inode = await self._inodes.get(ino)
            except NoSuchEntry:  # It was removed since it was found to refer to the blocks.
                return None
        inode.users += 1
        try:
            await self._inodes.load(inode)
        except BaseException:
            self._inodes.release(inode)
            raise
        return inode

    async def choose(self, device: int, held: Counter[int]) -> int:
        """The device that has least of a file's neighbourhood, and of these the emptiest."""
        figures = self._engine.statistics().devices
        others = {
            member.number: member.path
            for member in self._registry.members
            if member.number != device and not (member.is_missing or member.is_draining)
        }
        usable = {number: path for number, path in others.items() if not figures[number].failed}
        free = await run_alone(free_bytes, usable, self._engine.statistics().kept_bytes)
        if not free:
            raise NoSpace("no other device takes what this one holds")
        return min(free, key=lambda number: (held[number], -free[number]))

    async def _sweep(self, number: int, cursor: DrainCursor) -> Drained:
        """Give back objects that nothing is in any more; says how many things are left."""
        in_memory = {place.id for place in self._engine.held_objects() if place.device == number}
        objects = await self._catalog.read(
            lambda t: fetch_objects_on(t, number, after=cursor.object, count=ROWS_MAX)
        )
        idle = [held for held in objects if held.id not in in_memory]
        if idle:
            removal = await self._catalog.write_many(lambda t: remove_unreferenced(t, number, idle))
            self._removals_recorded(removal)
        following = None
        if len(objects) == ROWS_MAX:
            following = DrainCursor(stage=DrainStage.OBJECTS, object=objects[-1].id)
        usage = await self._catalog.read(lambda t: usage_of(t, number))
        left = sum(usage) + len(in_memory)
        refusal = await self._ask_again(number) if left and left == usage.removals else None
        return Drained(
            cursor=following,
            left=left,
            refused="" if refusal is None else refusal.strerror or str(refusal),
        )

    def _describe(self, ino: int, source: _Source, offset: int, code: int) -> DamagedContent:
        run = source.run
        return DamagedContent(
            ino=ino,
            device=run.device,
            device_path=self._registry.paths.get(run.device, ""),
            object=f"{run.object:016x}",
            object_block=run.object_block + offset,
            offset_bytes=(source.block + offset) * BLOCK_BYTES,
            size_bytes=BLOCK_BYTES,
            errno=code or errno.EIO,
            error=f"cannot be read: {os.strerror(code)}" if code else "checksum differs",
        )

    async def _named(self, damage: Sequence[DamagedContent]) -> list[DamagedContent]:
        """Add the paths of the files that are damaged."""
        if not damage:
            return []
        inos = sorted({each.ino for each in damage})
        paths = await self._catalog.read(lambda t: {ino: path_of(t, ino) for ino in inos})
        return [each.at(paths[each.ino].decode(errors="backslashreplace")) for each in damage]


def _try_lock(inode: Inode) -> bool:
    try:
        inode.lock.acquire_nowait()
    except trio.WouldBlock:
        return False
    return True


def _take_rows(work: _Work, rows: Sequence[SegmentRow], cursor: DrainCursor) -> DrainCursor:
    """Take as much of the rows as may be moved; returns where to go on."""
    for position, row in enumerate(rows):
        at_cursor = (row.ino, row.index) == (cursor.ino, cursor.segment)
        block = work.take(row, cursor.block if at_cursor else 0)
        if block is not None:
            return DrainCursor(ino=row.ino, segment=row.index, block=block)
        if not work.blocks_left and position + 1 < len(rows):
            following = rows[position + 1]
            return DrainCursor(ino=following.ino, segment=following.index)
    if len(rows) == ROWS_MAX:
        return DrainCursor(ino=rows[-1].ino, segment=rows[-1].index + 1)
    return DrainCursor(stage=DrainStage.OBJECTS)


def _planned(
    sources: Sequence[_Source], bad: dict[int, dict[int, int]], target: ObjectId
) -> list[Planned]:
    """Return the moves of copied runs, without the blocks that could not be copied."""
    moves = []
    to_block = 0
    for index, (block, run, _known) in enumerate(sources):
        gone = bad.get(index, {})
        start = 0
        for offset in [*sorted(gone), run.count]:
            if offset > start:
                move = Move(
                    run.device,
                    run.object,
                    run.object_block + start,
                    offset - start,
                    target.device,
                    target.id,
                    to_block + start,
                )
                is_unwritten = run.flags == UNWRITTEN
                moves.append(Planned(move, is_unwritten, block // SEGMENT_BLOCKS))
            start = offset + 1
        to_block += run.count
    return moves
