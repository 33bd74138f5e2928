"""Catalog operations on contents: load a version, make versions current, give dead space back.

Invariants:
  * A version becomes current in one transaction: size, times, map and objects together.
  * Whatever a transaction takes out of use is entered into `removals` by the same transaction.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import ObjectId, Range
from fpfs.core.errors import DamagedData
from fpfs.daemon.catalog.rows import group_pins, objects
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.attributes import drop_privileges
from fpfs.daemon.catalog.schema import row_crc

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fpfs.core.engine import Snapshot
    from fpfs.daemon.catalog.executor import Transaction

log = logging.getLogger(__name__)

SEGMENTS_MAX = 1 << 32
"""Segments that a file can have: more than the largest size needs."""

INODES_MAX = 10_000
"""Inodes in one query; SQLite takes 32,766 values at most."""

TABLES_BY_INODE = (
    "segments", "inline", "xattrs", "partials", "policies", "groups",
    "group_members", "inodes",
)  # fmt: skip
"""What an inode has rows in, in its column `ino`, beside `objects`."""


class Content(NamedTuple):
    """The committed content of a file: itself, when small, or the segments of its map."""

    inline: bytes | None
    segments: list[tuple[int, bytes]]


class Version(NamedTuple):
    """A drained version that is to become current, with attributes that go with it."""

    ino: int
    snapshot: Snapshot
    allocated_bytes: int
    mtime_ns: int
    ctime_ns: int
    privileges_dropped: bool
    replaces_whole: bool = True
    """Whether what it replaces was whole, and not synced in the middle of being written."""
    killed_by: int = 0
    """The signal that ended the writer whose close completed it, or 0."""


class Removal(NamedTuple):
    """A row of `removals`: a range of an object, or the object when `count` is 0."""

    id: int
    device: int
    object: int
    block: int
    count: int  # type: ignore[assignment]


def fetch_content(transaction: Transaction, ino: int) -> Content:
    """Return an inode's committed content; `DamagedData` when a row fails its checksum."""
    row = transaction.execute("SELECT content, crc FROM inline WHERE ino = ?", (ino,)).fetchone()
    if row is not None:
        content, crc = row
        if row_crc(ino, content=content) != crc:
            raise DamagedData(f"inline content of inode {ino} fails its checksum")
        return Content(content, [])
    segments = []
    rows = transaction.execute(
        "SELECT segment, blob, crc FROM segments WHERE ino = ? ORDER BY segment", (ino,)
    ).fetchall()
    for index, blob, crc in rows:
        if not 0 <= index < SEGMENTS_MAX or row_crc(ino, index, content=blob) != crc:
            raise DamagedData(f"layout segment {index} of inode {ino} fails its checksum")
        segments.append((index, blob))
    return Content(None, segments)


def make_one_current(transaction: Transaction, version: Version) -> int:
    """Make one version current; returns the largest removal made, or 0."""
    ino, snapshot = version.ino, version.snapshot
    sharing = (snapshot.dead or snapshot.garbage) and shares.are_there(transaction)
    before = shares.references(transaction, ino) if sharing else {}
    store_snapshot(transaction, version)
    if sharing:
        gone = [
            place
            for dead in snapshot.dead
            for place in shares.give_up_object(transaction, ino, dead, before)
        ]
        for garbage in snapshot.garbage:
            gone += shares.give_up_range(transaction, ino, garbage)
        ranges = {ObjectId(each.device, each.object) for each in snapshot.garbage}
        shares.recount(transaction, ranges.union(snapshot.dead))
        return record_removals(transaction, gone)
    if not snapshot.dead and not snapshot.garbage:
        return 0
    objects.forget(transaction, snapshot.dead)
    return max(
        record_removals(transaction, [Range(*dead, 0, 0) for dead in snapshot.dead]),
        record_removals(transaction, snapshot.garbage),
    )


def store_snapshot(transaction: Transaction, version: Version) -> None:
    """Store content, size, times and number of a version, and the objects that nobody owns yet."""
    ino, snapshot = version.ino, version.snapshot
    changed = _changed_segments(transaction, version)
    replaced = objects.load_segments(transaction, ino, changed)
    before = objects.held_in(transaction, ino, replaced)
    transaction.execute(
        "UPDATE inodes SET size = ?, allocated_bytes = ?, mtime_ns = ?, ctime_ns = ?,"
        " unfinished = 0, version = ? WHERE ino = ?",
        (
            snapshot.size,
            version.allocated_bytes,
            version.mtime_ns,
            version.ctime_ns,
            transaction.take_number(),
            ino,
        ),
    )
    transaction.touch(ino)
    if version.privileges_dropped:
        drop_privileges(transaction, ino)
    if snapshot.inline:
        transaction.execute(
            "INSERT OR REPLACE INTO inline VALUES (?, ?, ?)",
            (ino, snapshot.inline, row_crc(ino, content=snapshot.inline)),
        )
    else:
        transaction.execute("DELETE FROM inline WHERE ino = ?", (ino,))
    if snapshot.inline is not None and replaced:
        transaction.execute("DELETE FROM segments WHERE ino = ?", (ino,))
    for index, blob in snapshot.segments:
        store_segment(transaction, ino, index, blob)
    if snapshot.objects:
        objects.enter(transaction, ino, snapshot.objects)
    if replaced or snapshot.segments:
        objects.count_change(transaction, ino, before, objects.held_by(transaction, ino, changed))


def _changed_segments(transaction: Transaction, version: Version) -> set[int] | None:
    """Return the segments of which objects hold something else with a version; None: all.

    The last ones are among them: of a file's last block only what its bytes need is stored.
    """
    snapshot = version.snapshot
    if snapshot.inline is not None:
        return None
    row = transaction.execute("SELECT size FROM inodes WHERE ino = ?", (version.ino,)).fetchone()
    sizes = [snapshot.size] if row is None else [snapshot.size, row[0]]
    return {index for index, _blob in snapshot.segments}.union(
        size // objects.SEGMENT_BYTES for size in sizes
    )


def store_segment(transaction: Transaction, ino: int, index: int, blob: bytes) -> None:
    """Store one segment, or remove it when it describes nothing any more."""
    if not blob:
        transaction.execute("DELETE FROM segments WHERE ino = ? AND segment = ?", (ino, index))
        return
    transaction.execute(
        "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?)",
        (ino, index, blob, row_crc(ino, index, content=blob)),
    )


def record_removals(transaction: Transaction, ranges: Iterable[Range]) -> int:
    """Enter ranges (count 0: whole objects) to give back; returns the last row's number or 0."""
    last = 0
    for place in ranges:
        last = transaction.take_number()
        transaction.execute(
            "INSERT INTO removals VALUES (?, ?, ?, ?, ?, ?)", (last, *place, row_crc(last, *place))
        )
    return last


def delete_inodes(
    transaction: Transaction, inodes: Sequence[tuple[int, Sequence[ObjectId]]]
) -> int:
    """Delete inodes that have no name, with all they hold; returns the largest removal or 0.

    Those that a group refers to stay.

    Each comes with the objects that the engine still held for it, committed or not.
    """
    removal = 0
    sharing = shares.are_there(transaction)
    holding = group_pins.are_there(transaction)
    for ino, held in inodes:
        mine = {ObjectId(*identity) for identity in held}
        if holding and group_pins.is_held(transaction, ino):
            # A crash would bring it back as it was committed; what it has besides goes.
            unknown = [place for place in mine if shares.owner(transaction, place) is None]
            gone = [Range(*place, 0, 0) for place in sorted(unknown)]
            removal = max(removal, record_removals(transaction, gone))
            continue
        for device, id_, crc in transaction.execute(
            "SELECT device, id, crc FROM objects WHERE ino = ?", (ino,)
        ):
            if row_crc(device, id_, ino) == crc:
                mine.add(ObjectId(device, id_))
            else:
                # Following a damaged row could delete another file's object.
                log.error("object row (%d, %#x) of inode %d is damaged: left", device, id_, ino)
        places = [Range(*identity, 0, 0) for identity in sorted(mine)]
        if sharing:
            places = shares.give_up_all(transaction, ino, mine)
        objects.forget_all_of(transaction, ino)
        for table in TABLES_BY_INODE:
            transaction.execute(f"DELETE FROM {table} WHERE ino = ?", (ino,))
        removal = max(removal, record_removals(transaction, places))
    return removal


def list_names(transaction: Transaction, inos: Sequence[int]) -> dict[int, list[tuple[int, bytes]]]:
    """Return the names of inodes, each with its directory."""
    found: dict[int, list[tuple[int, bytes]]] = {ino: [] for ino in inos}
    for first in range(0, len(inos), INODES_MAX):
        some = tuple(inos[first : first + INODES_MAX])
        marks = ", ".join("?" * len(some))
        for ino, parent, name in transaction.execute(
            f"SELECT ino, parent, name FROM names WHERE ino IN ({marks})", some
        ).fetchall():
            found[ino].append((parent, name))
    return found


def list_known_objects(transaction: Transaction, device: int, ids: Sequence[int]) -> set[int]:
    """Return which of these objects belong to an inode."""
    marks = ", ".join("?" * len(ids))
    rows = transaction.execute(
        f"SELECT id FROM objects WHERE device = ? AND id IN ({marks})",
        (device, *ids),
    )
    return {id_ for (id_,) in rows}


def list_orphans(transaction: Transaction) -> list[int]:
    """Return inodes without a name: what was open, or about to be deleted, when a mount ended."""
    return [ino for (ino,) in transaction.execute("SELECT ino FROM inodes WHERE nlink = 0")]


class Removals(NamedTuple):
    """Some rows of what may go; `last` is the largest number looked at (0: nothing is left).

    `damaged` are numbers of rows that must not be followed, and are only to be forgotten.
    """

    sound: list[Removal]
    damaged: list[int]
    last: int


def list_removals(transaction: Transaction, *, after: int, up_to: int, count: int) -> Removals:
    """Return up to `count` rows of what may go, numbered `after` < number <= `up_to`, in order."""
    sound = []
    damaged = []
    last = 0
    for *fields, crc in transaction.execute(
        "SELECT id, device, object, block, count, crc FROM removals WHERE id > ? AND id <= ? "
        "ORDER BY id LIMIT ?",
        (after, up_to, count),
    ):
        last = fields[0]
        if row_crc(*fields) == crc:
            sound.append(Removal._make(fields))
        else:
            # Following it could delete a live object; not following it loses some space.
            log.error("removal %d fails its checksum: it is not followed", last)
            damaged.append(last)
    return Removals(sound, damaged, last)


def last_removal(transaction: Transaction) -> int:
    """Return the largest number of a row in `removals`, or 0."""
    (last,) = transaction.execute("SELECT coalesce(max(id), 0) FROM removals").fetchone()
    return int(last)


def forget_removals(transaction: Transaction, *, removals: Sequence[int]) -> None:
    """Drop rows, by number, of what is gone."""
    transaction.executemany("DELETE FROM removals WHERE id = ?", [(number,) for number in removals])
