"""Rows of objects: whose each is, and how many bytes of contents it holds.

What all objects of a device hold is kept in the device's row, so that nobody has to add it up.

Invariants:
  * An object holds what its owner stores there, the last block of a file only as far as it is
    stored, and whole blocks that others share and its owner does not refer to
    (`rows.shared_extents`).
  * A device holds what its objects hold; both change in the transaction that changes a map.

Concurrency: every function runs in the catalog's worker, inside its transaction; `count_all`
before there is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, ObjectId
from fpfs.core.errors import DamagedData
from fpfs.core.layout import bytes_held, decode_segment
from fpfs.daemon.catalog.schema import row_crc

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from fpfs.daemon.catalog.executor import Transaction

SEGMENT_BYTES = SEGMENT_BLOCKS * BLOCK_BYTES

SEGMENTS_COUNTED = 1_000
"""Segments that are in memory at once while all are counted."""


def enter(transaction: Transaction, ino: int, places: Iterable[ObjectId]) -> None:
    """Let objects that nobody owns yet be an inode's. They hold nothing until that is counted."""
    transaction.executemany(
        "INSERT OR IGNORE INTO objects (device, id, ino, crc) VALUES (?, ?, ?, ?)",
        [(*place, ino, row_crc(*place, ino)) for place in places],
    )


def forget(transaction: Transaction, places: Iterable[ObjectId]) -> None:
    """Drop the rows of objects."""
    for place in places:
        set_held(transaction, place, 0)
        transaction.execute("DELETE FROM objects WHERE device = ? AND id = ?", place)


def forget_all_of(transaction: Transaction, ino: int) -> None:
    """Drop the rows of an inode's objects."""
    for device, held in transaction.execute(
        "SELECT device, sum(bytes) FROM objects WHERE ino = ? GROUP BY device", (ino,)
    ).fetchall():
        _add_to_device(transaction, device, -held)
    transaction.execute("DELETE FROM objects WHERE ino = ?", (ino,))


def load_segments(
    transaction: Transaction | sqlite3.Connection, ino: int, numbers: Collection[int] | None = None
) -> list[tuple[int, bytes]]:
    """Return segments of an inode's map with their numbers: some, or all."""
    query = "SELECT segment, blob FROM segments WHERE ino = ?"
    if numbers is None:
        return transaction.execute(query, (ino,)).fetchall()
    query += " AND segment = ?"
    return [
        row for number in numbers for row in transaction.execute(query, (ino, number)).fetchall()
    ]


def held_in(
    transaction: Transaction | sqlite3.Connection, ino: int, segments: Sequence[tuple[int, bytes]]
) -> Counter[ObjectId]:
    """Return how many bytes of an inode's content objects hold in segments."""
    held: Counter[ObjectId] = Counter()
    if segments:
        row = transaction.execute("SELECT size FROM inodes WHERE ino = ?", (ino,)).fetchone()
        size = 0 if row is None else row[0]
        for number, blob in segments:
            _count(held, number, blob, size)
    return held


def held_by(
    transaction: Transaction | sqlite3.Connection, ino: int, numbers: Collection[int] | None = None
) -> Counter[ObjectId]:
    """Return how many bytes of an inode's content objects hold, in some segments or in all."""
    return held_in(transaction, ino, load_segments(transaction, ino, numbers))


def _count(held: Counter[ObjectId], index: int, blob: bytes, size: int) -> None:
    """Add what objects hold of a segment of a file; one that is damaged says nothing."""
    try:
        runs = decode_segment(blob).runs
    except DamagedData:
        return
    for run in runs:
        held[ObjectId(run.device, run.object)] += bytes_held(run, size - index * SEGMENT_BYTES)


def count_change(
    transaction: Transaction, ino: int, before: Counter[ObjectId], after: Counter[ObjectId]
) -> None:
    """Note that an inode's objects hold something else now. What others own is not touched."""
    of_devices: Counter[int] = Counter()
    for place in before.keys() | after.keys():
        change = after[place] - before[place]
        if change:
            changed = transaction.execute(
                "UPDATE objects SET bytes = bytes + ? WHERE device = ? AND id = ? AND ino = ?",
                (change, *place, ino),
            ).rowcount
            of_devices[place.device] += change * changed
    for device, change in of_devices.items():
        _add_to_device(transaction, device, change)


def set_held(transaction: Transaction | sqlite3.Connection, place: ObjectId, held: int) -> None:
    """Note how many bytes an object holds, if it has a row."""
    row = transaction.execute(
        "SELECT bytes FROM objects WHERE device = ? AND id = ?", place
    ).fetchone()
    if row is None or row[0] == held:
        return
    transaction.execute("UPDATE objects SET bytes = ? WHERE device = ? AND id = ?", (held, *place))
    _add_to_device(transaction, place.device, held - row[0])


def _add_to_device(transaction: Transaction | sqlite3.Connection, device: int, change: int) -> None:
    if change:
        transaction.execute(
            "UPDATE devices SET bytes = bytes + ? WHERE number = ?", (change, device)
        )


def held_by_device(transaction: Transaction) -> Mapping[int, int]:
    """Return how many bytes of committed contents each device holds, by its number."""
    return dict(transaction.execute("SELECT number, bytes FROM devices").fetchall())


def count_all(transaction: Transaction | sqlite3.Connection) -> None:
    """Count what all objects and devices hold, from all maps; what is shared comes after that."""
    transaction.execute("UPDATE objects SET bytes = 0")
    rows = transaction.execute(
        "SELECT s.ino, s.segment, s.blob, i.size FROM segments s JOIN inodes i ON i.ino = s.ino"
    )
    while some := rows.fetchmany(SEGMENTS_COUNTED):
        held: dict[int, Counter[ObjectId]] = defaultdict(Counter)
        for ino, index, blob, size in some:
            _count(held[ino], index, blob, size)
        transaction.executemany(
            "UPDATE objects SET bytes = bytes + ? WHERE device = ? AND id = ? AND ino = ?",
            [
                (count, *place, ino)
                for ino, counts in held.items()
                for place, count in counts.items()
            ],
        )
    transaction.execute(
        "UPDATE devices SET bytes ="
        " (SELECT coalesce(sum(o.bytes), 0) FROM objects o WHERE o.device = number)"
    )
