"""Shared objects: blocks that an inode refers to in objects that belong to another.

An object belongs to one inode, and nearly all inodes refer to their own objects only. When a
content is put beside the one that it was made from (`rows.quarantine`), both may refer to blocks of
one object. The inode that the object does not belong to has a row for each range then.

Invariants:
  * What an inode refers to and does not own is in its rows of `shares`, exactly.
  * A range or object is given back when nobody refers to it any more, neither its owner nor a row.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias

from fpfs.core.engine import BLOCK_BYTES, ObjectId, Range
from fpfs.core.errors import DamagedData
from fpfs.core.layout import runs_of_file
from fpfs.daemon.catalog.rows import objects
from fpfs.daemon.catalog.schema import row_crc

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from fpfs.daemon.catalog.executor import Transaction

Spans: TypeAlias = list[tuple[int, int]]
"""Ranges of blocks of one object, as (begin, end), in order and apart."""


def are_there(transaction: Transaction) -> bool:
    """Whether any inode shares objects of another."""
    return transaction.execute("SELECT 1 FROM shares LIMIT 1").fetchone() is not None


def sharers(transaction: Transaction) -> frozenset[int]:
    """Return the inodes that have an object in common with another: its owner, and who shares."""
    rows = transaction.execute(
        "SELECT o.ino FROM shares s JOIN objects o ON o.device = s.device AND o.id = s.object"
        " UNION SELECT ino FROM shares"
    ).fetchall()
    return frozenset(ino for (ino,) in rows)


def references(transaction: Transaction | sqlite3.Connection, ino: int) -> dict[ObjectId, Spans]:
    """Return what the committed content of an inode refers to."""
    blobs = transaction.execute("SELECT blob FROM segments WHERE ino = ?", (ino,)).fetchall()
    found: dict[ObjectId, Spans] = defaultdict(list)
    for run in runs_of_file(blob for (blob,) in blobs):
        place = ObjectId(run.device, run.object)
        found[place].append((run.object_block, run.object_block + run.count))
    return {place: merge(spans) for place, spans in found.items()}


def merge(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return ranges in order and apart."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def without(spans: Spans, *others: Spans) -> Spans:
    """Return what of `spans` is in none of the others."""
    left = spans
    for gone_begin, gone_end in merge(span for other in others for span in other):
        next_left: Spans = []
        for begin, end in left:
            if begin < min(end, gone_begin):
                next_left.append((begin, min(end, gone_begin)))
            if max(begin, gone_end) < end:
                next_left.append((max(begin, gone_end), end))
        left = next_left
    return left


def owner(transaction: Transaction | sqlite3.Connection, place: ObjectId) -> int | None:
    """Return the inode that an object belongs to; None when the catalog does not know it."""
    row = transaction.execute(
        "SELECT ino FROM objects WHERE device = ? AND id = ?", place
    ).fetchone()
    return None if row is None else int(row[0])


def share(transaction: Transaction, ino: int) -> None:
    """Enter what an inode refers to and does not own."""
    for place, spans in references(transaction, ino).items():
        if owner(transaction, place) != ino:
            _enter(transaction, ino, place, spans)


def renew(transaction: Transaction, ino: int, place: ObjectId) -> None:
    """Enter anew what an inode refers to of an object, when its map has changed."""
    _forget(transaction, ino, place)
    if owner(transaction, place) != ino:
        _enter(transaction, ino, place, references(transaction, ino).get(place, []))


def give_up_object(
    transaction: Transaction, ino: int, place: ObjectId, before: dict[ObjectId, Spans]
) -> list[Range]:
    """Note that an inode refers to an object no more; returns what nobody refers to any more.

    `before` is what it referred to until now. An object that others share goes to one of them.
    """
    holder = owner(transaction, place)
    if holder is None:
        return [Range(*place, 0, 0)]
    if holder != ino:
        spans = _shared_by(transaction, ino, place)
        _forget(transaction, ino, place)
        kept = references(transaction, holder).get(place, [])
        return _ranges(place, without(spans, kept, _shared(transaction, place)))
    heir = transaction.execute(
        "SELECT min(ino) FROM shares WHERE device = ? AND object = ?", place
    ).fetchone()[0]
    if heir is None:
        objects.forget(transaction, [place])
        return [Range(*place, 0, 0)]
    kept = _shared(transaction, place)
    _forget(transaction, heir, place)
    transaction.execute(
        "UPDATE objects SET ino = ?, crc = ? WHERE device = ? AND id = ?",
        (heir, row_crc(*place, heir), *place),
    )
    return _ranges(place, without(before.get(place, []), kept))


def give_up_all(transaction: Transaction, ino: int, held: Iterable[ObjectId]) -> list[Range]:
    """Note that an inode goes; returns what nobody refers to any more.

    `held` are objects that it had or referred to, beside those that the catalog knows of.
    """
    before = references(transaction, ino)
    places = sorted(set(held).union(before))
    ranges = [gone for place in places for gone in give_up_object(transaction, ino, place, before)]
    recount(transaction, places)
    return ranges


def recount(transaction: Transaction | sqlite3.Connection, places: Iterable[ObjectId]) -> None:
    """Count anew what objects hold that have a row, and whose users' maps are sound."""
    owned: dict[int, list[ObjectId]] = defaultdict(list)
    for place in places:
        holder = owner(transaction, place)
        if holder is not None:
            owned[holder].append(place)
    for ino, mine in owned.items():
        held = objects.held_by(transaction, ino)
        try:
            spans = references(transaction, ino)
            others = {
                place: without(_shared(transaction, place), spans.get(place, [])) for place in mine
            }
        except DamagedData:
            continue  # fsck and scrub name it; what it hides cannot be counted
        for place in mine:
            blocks = sum(end - begin for begin, end in others[place])
            objects.set_held(transaction, place, held[place] + blocks * BLOCK_BYTES)


def shared_objects(transaction: Transaction | sqlite3.Connection) -> list[ObjectId]:
    """Return the objects that inodes refer to and do not own."""
    rows = transaction.execute("SELECT DISTINCT device, object FROM shares").fetchall()
    return [ObjectId(*row) for row in rows]


def give_up_range(transaction: Transaction, ino: int, gone: Range) -> list[Range]:
    """Note that an inode refers to a range no more; returns what nobody refers to any more."""
    place = ObjectId(gone.device, gone.object)
    spans = [(gone.block, gone.block + gone.count)]
    holder = owner(transaction, place)
    if holder is None or holder == ino:
        return _ranges(place, without(spans, _shared(transaction, place)))
    mine = _shared_by(transaction, ino, place)
    _forget(transaction, ino, place)
    left = without(mine, spans)
    _enter(transaction, ino, place, left)
    kept = references(transaction, holder).get(place, [])
    return _ranges(place, without(without(mine, left), kept, _shared(transaction, place)))


def _ranges(place: ObjectId, spans: Spans) -> list[Range]:
    return [Range(*place, begin, end - begin) for begin, end in spans]


def _enter(transaction: Transaction, ino: int, place: ObjectId, spans: Spans) -> None:
    transaction.executemany(
        "INSERT OR REPLACE INTO shares VALUES (?, ?, ?, ?, ?, ?)",
        [
            (*place, ino, begin, end - begin, row_crc(*place, ino, begin, end - begin))
            for begin, end in spans
        ],
    )


def _forget(transaction: Transaction, ino: int, place: ObjectId) -> None:
    transaction.execute(
        "DELETE FROM shares WHERE device = ? AND object = ? AND ino = ?", (*place, ino)
    )


def _shared(transaction: Transaction | sqlite3.Connection, place: ObjectId) -> Spans:
    """Return what all who do not own an object refer to of it."""
    return merge(span for _ino, span in _rows(transaction, place))


def _shared_by(transaction: Transaction, ino: int, place: ObjectId) -> Spans:
    return merge(span for sharer, span in _rows(transaction, place) if sharer == ino)


def _rows(
    transaction: Transaction | sqlite3.Connection, place: ObjectId
) -> list[tuple[int, tuple[int, int]]]:
    found = []
    for ino, block, count, crc in transaction.execute(
        "SELECT ino, block, count, crc FROM shares WHERE device = ? AND object = ?", place
    ).fetchall():
        if row_crc(*place, ino, block, count) != crc:
            # Without it blocks could be given back that an inode refers to.
            raise DamagedData(f"a row of what inode {ino} shares fails its checksum")
        found.append((ino, (block, block + count)))
    return found
