"""Catalog operations on blocks that are moved to another device, and on what is left there.

Blocks are never overwritten, so those that were copied from a place are right for whoever refers to
that place, whenever he began to. Only preallocated ones may have been written to meanwhile.

Invariants:
  * All inodes that refer to a block are changed in one transaction, and it is given back by it.
  * What several inodes share they still share afterwards.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import Move, ObjectId, Range
from fpfs.core.errors import BusyFile, DamagedData
from fpfs.core.layout import UNWRITTEN, Run, Segment, decode_segment, encode_segment
from fpfs.daemon.catalog.rows import objects
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.extents import record_removals, store_segment
from fpfs.daemon.catalog.schema import DeviceUse, row_crc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fpfs.daemon.catalog.executor import Transaction


class SegmentRow(NamedTuple):
    """A row of `segments` as it is stored."""

    ino: int
    index: int  # type: ignore[assignment]
    blob: bytes
    crc: int

    def decode(self) -> Segment:
        """Return the segment; `DamagedData` when it is not sound."""
        if row_crc(self.ino, self.index, content=self.blob) != self.crc:
            raise DamagedData(f"layout segment {self.index} of inode {self.ino} is damaged")
        return decode_segment(self.blob)


class Planned(NamedTuple):
    """A move, whether its blocks are preallocated only, and which segment refers to them."""

    move: Move
    is_unwritten: bool
    segment: int


class Moved(NamedTuple):
    """What came of a transaction: inodes that refer to what was moved, moves that are made."""

    inos: tuple[int, ...]
    moves: tuple[Move, ...]
    removal: int


def fetch_rows_on(
    transaction: Transaction, device: int, *, after: tuple[int, int], count: int
) -> list[SegmentRow]:
    """Return segments from (inode, segment) `after` on of inodes with objects on a device."""
    rows = transaction.execute(
        "SELECT ino, segment, blob, crc FROM segments s WHERE (ino, segment) >= (?, ?)"
        " AND (EXISTS (SELECT 1 FROM objects o WHERE o.ino = s.ino AND o.device = ?)"
        " OR EXISTS (SELECT 1 FROM shares h WHERE h.ino = s.ino AND h.device = ?))"
        " ORDER BY ino, segment LIMIT ?",
        (*after, device, device, count),
    )
    return [SegmentRow(*fields) for fields in rows.fetchall()]


def referents(transaction: Transaction, places: Sequence[ObjectId]) -> frozenset[int]:
    """Return the inodes that may refer to objects: their owners, and who shares them."""
    found: set[int] = set()
    for place in places:
        for query in (
            "SELECT ino FROM objects WHERE device = ? AND id = ?",
            "SELECT ino FROM shares WHERE device = ? AND object = ?",
        ):
            found.update(ino for (ino,) in transaction.execute(query, place).fetchall())
    return frozenset(found)


def store_moves(
    transaction: Transaction, owner: int, planned: Sequence[Planned], *, expected: frozenset[int]
) -> Moved:
    """Let everybody refer to the new places, in an object that is the inode `owner`'s from now on.

    An inode refers to a block once, so of a file that shares nothing only those segments are read
    that the moves name: a large one has thousands.

    Raises `BusyFile` when others than `expected` refer to the blocks, or preallocated ones were
    written to, or the device that they were copied to is to go itself by now.
    """
    places = sorted({ObjectId(each.move.device, each.move.object) for each in planned})
    target = ObjectId(planned[0].move.to_device, planned[0].move.to_object)
    if _use_of(transaction, target.device) != DeviceUse.IN_USE:
        raise BusyFile(f"device {target.device} takes nothing any more")
    members = referents(transaction, places)
    if not members <= expected:
        raise BusyFile("others refer to the blocks by now")
    made: set[Move] = set()
    users = []
    is_alone = members == {owner}
    indices = sorted({each.segment for each in planned}) if is_alone else None
    before = objects.held_by(transaction, owner, indices) if is_alone else None
    for ino in sorted(members):
        used = _rewrite(transaction, ino, planned, indices)
        if used:
            users.append(ino)
            made |= used
    if not users:
        return Moved((), (), 0)
    new_owner = owner if owner in users else users[0]
    objects.enter(transaction, new_owner, [target])
    if len(members) > 1 or shares.owner(transaction, places[0]) != users[0]:
        for ino in users:
            for place in (*places, target):
                shares.renew(transaction, ino, place)
    if before is None:
        shares.recount(transaction, (*places, target))
    else:
        after = objects.held_by(transaction, owner, indices)
        objects.count_change(transaction, owner, before, after)
    old = [Range(each.device, each.object, each.block, each.count) for each in sorted(made)]
    unused = _unused(planned, made)
    return Moved(tuple(users), tuple(sorted(made)), record_removals(transaction, [*old, *unused]))


def _use_of(transaction: Transaction, device: int) -> int:
    query = "SELECT state FROM devices WHERE number = ?"
    return int(transaction.execute(query, (device,)).fetchone()[0])


def _unused(planned: Sequence[Planned], made: set[Move]) -> list[Range]:
    """Return what was copied and nobody refers to any more: its old places were given back."""
    gone: list[Range] = []
    for each in planned:
        move = each.move
        first = move.to_block
        used = [
            (other.to_block, other.to_block + other.count)
            for other in made
            if first <= other.to_block < first + move.count
        ]
        for begin, end in shares.without([(first, first + move.count)], used):
            gone.append(Range(move.to_device, move.to_object, begin, end - begin))
    return gone


def _rewrite(
    transaction: Transaction, ino: int, planned: Sequence[Planned], indices: Sequence[int] | None
) -> set[Move]:
    """Change segments of one inode, None for all; returns the parts of the moves that it has."""
    used: set[Move] = set()
    wanted = {(each.move.device, each.move.object) for each in planned}
    for row in _segments_of(transaction, ino, indices):
        segment = row.decode()
        if not any((run.device, run.object) in wanted for run in segment.runs):
            continue
        runs = [part for run in segment.runs for part in _parts(run, planned, used)]
        if tuple(runs) != segment.runs:
            blob = encode_segment(Segment(segment.index, tuple(runs), segment.checksums))
            store_segment(transaction, ino, segment.index, blob)
    return used


def _segments_of(
    transaction: Transaction, ino: int, indices: Sequence[int] | None
) -> list[SegmentRow]:
    query = "SELECT ino, segment, blob, crc FROM segments WHERE ino = ?"
    if indices is None:
        found = transaction.execute(query, (ino,)).fetchall()
    else:
        found = [
            fields
            for index in indices
            for fields in transaction.execute(f"{query} AND segment = ?", (ino, index)).fetchall()
        ]
    return [SegmentRow(*fields) for fields in found]


def _parts(run: Run, planned: Sequence[Planned], used: set[Move]) -> Iterator[Run]:
    """Yield a run in parts, each of which was moved as a whole or not at all."""
    cuts: list[tuple[int, int, Move]] = []
    for each in planned:
        move = each.move
        begin = max(run.object_block, move.block)
        end = min(run.object_block + run.count, move.block + move.count)
        if (run.device, run.object) != (move.device, move.object) or begin >= end:
            continue
        if (run.flags == UNWRITTEN) != each.is_unwritten:
            raise BusyFile("preallocated blocks were written to meanwhile")
        cuts.append((begin, end, move))
    at = run.object_block
    for begin, end, move in sorted(cuts):
        if at < begin:
            yield run.part(at, begin)
        to_block = move.to_block + begin - move.block
        used.add(move._replace(block=begin, count=end - begin, to_block=to_block))
        yield run.part(begin, end)._replace(
            device=move.to_device, object=move.to_object, object_block=to_block
        )
        at = end
    if at < run.object_block + run.count:
        yield run.part(at, run.object_block + run.count)


class HeldObject(NamedTuple):
    """An object on a device, and the inode that it belongs to."""

    id: int
    ino: int


def fetch_objects_on(
    transaction: Transaction, device: int, *, after: int, count: int
) -> list[HeldObject]:
    """Return objects on a device with ids behind `after`, in order."""
    rows = transaction.execute(
        "SELECT id, ino FROM objects WHERE device = ? AND id > ? ORDER BY id LIMIT ?",
        (device, after, count),
    )
    return [HeldObject(*fields) for fields in rows.fetchall()]


def remove_unreferenced(
    transaction: Transaction, device: int, candidates: Sequence[HeldObject]
) -> int:
    """Give back objects that no map refers to; returns the largest removal made, or 0.

    None on a device that does not drain any more, where some may just have been made.
    """
    if _use_of(transaction, device) != DeviceUse.DRAINING:
        return 0
    gone = []
    for held in candidates:
        place = ObjectId(device, held.id)
        members = referents(transaction, [place])
        if any(place in shares.references(transaction, ino) for ino in members):
            continue
        objects.forget(transaction, [place])
        transaction.execute("DELETE FROM shares WHERE device = ? AND object = ?", place)
        gone.append(Range(*place, 0, 0))
    return record_removals(transaction, gone)


class DeviceUsage(NamedTuple):
    """What the catalog has on a device: objects, what inodes share there, removals under way."""

    objects: int
    shared: int
    removals: int


def usage_of(transaction: Transaction, device: int) -> DeviceUsage:
    """Return what is on a device."""
    counts = [
        transaction.execute(f"SELECT count(*) FROM {table} WHERE device = ?", (device,)).fetchone()
        for table in ("objects", "shares", "removals")
    ]
    return DeviceUsage(*(int(count) for (count,) in counts))


def forget_removals_on(transaction: Transaction, device: int) -> None:
    """Give nothing back on a device that is gone for good."""
    transaction.execute("DELETE FROM removals WHERE device = ?", (device,))
