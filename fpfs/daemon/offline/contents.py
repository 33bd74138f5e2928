"""Checks of where contents lie: layout segments, contents in the catalog, objects, what is shared.

The runs of all segments are put into a table of the image, so that memory does not grow with the
filesystem.

Concurrency: one thread; the functions own the image that they look at.
"""

from __future__ import annotations

import stat
import time
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, Layout, ObjectId
from fpfs.core.errors import DamagedData
from fpfs.core.fsck import Finding, Kind
from fpfs.core.layout import UNWRITTEN, Run, Segment, bytes_held, decode_segment
from fpfs.core.limits import FILE_BYTES_MAX
from fpfs.core.paths import show_name
from fpfs.core.placement import encode_layout
from fpfs.core.policy import CHUNK_BYTES_DEFAULT
from fpfs.daemon.catalog.rows.extents import SEGMENTS_MAX
from fpfs.daemon.catalog.rows.shared_extents import Spans, merge, without
from fpfs.daemon.catalog.schema import NUMBER_FIRST, ROOT_INO, row_crc
from fpfs.daemon.offline.findings import Found, Paths, Statement

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterator

_OBJECT_ID_END = 2**63


class SegmentRow(NamedTuple):
    """A row of `segments`."""

    ino: int
    index: int  # type: ignore[assignment]
    blob: bytes
    crc: int

    def decode(self) -> Segment:
        """The segment; `DamagedData` when it is not sound."""
        if row_crc(self.ino, self.index, content=self.blob) != self.crc:
            raise DamagedData("the row fails its checksum")
        segment = decode_segment(self.blob)
        if segment.index != self.index or not 0 <= self.index < SEGMENTS_MAX:
            raise DamagedData(f"it says that it is number {segment.index}")
        if any(run.object >= _OBJECT_ID_END for run in segment.runs):
            raise DamagedData("it refers to an object with an impossible number")
        return segment


def segment_rows(connection: sqlite3.Connection) -> Iterator[SegmentRow]:
    """All segments, in the order of inodes."""
    for fields in connection.execute(
        "SELECT ino, segment, blob, crc FROM segments ORDER BY ino, segment"
    ):
        yield SegmentRow(*fields)


def has_content(table: str) -> str:
    """SQL: whether the inode that a row of a table names has a content, were it there or not."""
    return (
        f"({table}.ino >= {NUMBER_FIRST} AND"
        f" (EXISTS (SELECT 1 FROM inline content WHERE content.ino = {table}.ino)"
        f" OR EXISTS (SELECT 1 FROM segments content WHERE content.ino = {table}.ino)))"
    )


def check_contents(
    connection: sqlite3.Connection, paths: Paths, devices: Collection[int]
) -> Iterator[Found]:
    """Yield what is wrong with maps, contents in the catalog, objects' rows and shares."""
    yield from _check_inline(connection, paths)
    damaged = list(_collect_runs(connection, paths, devices))
    yield from damaged
    yield from _check_lost_inodes(connection, paths, devices)
    yield from _check_overlaps(connection, paths)
    yield from _check_owners(connection)
    yield from _check_shares(connection)
    yield from _check_removals(connection)
    if not damaged:  # else nobody knows what the objects hold
        yield from _check_held(connection)


def _layout(paths: Paths, ino: int, text: str, *statements: Statement) -> Found:
    path = show_name(paths.of(ino))
    finding = Finding(kind=Kind.LAYOUT, text=f"{paths.show(ino)}: {text}", ino=ino, path=path)
    return Found(finding, statements)


def _check_inline(connection: sqlite3.Connection, paths: Paths) -> Iterator[Found]:
    for ino, content, crc, size, has_map in connection.execute(
        "SELECT c.ino, c.content, c.crc, i.size,"
        " EXISTS (SELECT 1 FROM segments s WHERE s.ino = c.ino)"
        " FROM inline c JOIN inodes i ON i.ino = c.ino"
    ).fetchall():
        if row_crc(ino, content=content) != crc:
            yield _layout(paths, ino, "its content in the catalog fails its checksum")
        elif len(content) > size:
            yield _layout(paths, ino, f"of {size} bytes, has {len(content)} in the catalog")
        if has_map:
            yield _layout(paths, ino, "has a content in the catalog, and one on devices")


def _collect_runs(
    connection: sqlite3.Connection, paths: Paths, devices: Collection[int]
) -> Iterator[Found]:
    """Put the runs of sound segments into the table `runs`; yield those that are not sound."""
    connection.execute("DROP TABLE IF EXISTS temp.runs")
    connection.execute(
        "CREATE TEMP TABLE runs (device INTEGER, object INTEGER, object_block INTEGER,"
        " count INTEGER, ino INTEGER, block INTEGER, flags INTEGER)"
    )
    for row in segment_rows(connection):
        try:
            segment = row.decode()
        except DamagedData as error:
            text = f"layout segment {row.index} is damaged: {error.strerror}"
            yield _layout(paths, row.ino, text)
            continue
        start = row.index * SEGMENT_BLOCKS
        connection.executemany(
            "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)",
            [_values(row.ino, start, run) for run in segment.runs],
        )
        for device in sorted({run.device for run in segment.runs}.difference(devices)):
            text = f"layout segment {row.index} refers to device {device}, which there is not"
            yield _layout(paths, row.ino, text)
    connection.execute("CREATE INDEX temp.runs_by_object ON runs (device, object, ino)")


def _values(ino: int, start: int, run: Run) -> tuple[int, ...]:
    block = start + run.block
    return (run.device, run.object, run.object_block, run.count, ino, block, run.flags)


def _check_lost_inodes(
    connection: sqlite3.Connection, paths: Paths, devices: Collection[int]
) -> Iterator[Found]:
    """Contents whose inode is not there. One is made, and gets a name where there is none.

    How long the content was in its last block nobody knows: it ends with zeros.
    """
    rows = connection.execute(
        "SELECT t.ino, coalesce(max(length(c.content)), 0), coalesce(sum(r.count), 0),"
        " coalesce(max(CASE WHEN r.flags <> ? THEN r.block + r.count END), 0)"
        " FROM (SELECT ino FROM inline UNION SELECT ino FROM segments) t"
        " LEFT JOIN inline c ON c.ino = t.ino LEFT JOIN runs r ON r.ino = t.ino"
        " WHERE t.ino >= ? AND NOT EXISTS (SELECT 1 FROM inodes i WHERE i.ino = t.ino)"
        " GROUP BY t.ino",
        (UNWRITTEN, NUMBER_FIRST),
    ).fetchall()
    layout = encode_layout(Layout(chunk_bytes=CHUNK_BYTES_DEFAULT, devices=tuple(sorted(devices))))
    now = time.time_ns()
    for ino, inline_bytes, blocks, end in rows:
        size = min(max(inline_bytes, end * BLOCK_BYTES), FILE_BYTES_MAX)
        made: Statement = (
            (
                "INSERT INTO inodes (ino, mode, uid, gid, nlink, size, allocated_bytes,"
                " atime_ns, mtime_ns, ctime_ns, rdev, parent, layout)"
                " SELECT ?, ?, uid, gid, max(1, (SELECT count(*) FROM names n WHERE n.ino = ?)"
                " + (SELECT count(*) FROM former f WHERE f.ino = ?)), ?, ?, ?, ?, ?, 0, 0, ?"
                " FROM inodes WHERE ino = ?"
            ),
            (
                *(ino, stat.S_IFREG | 0o600, ino, ino, size, blocks * BLOCK_BYTES),
                *(now, now, now, layout, ROOT_INO),
            ),
        )
        text = f"{paths.show(ino)} has a content, and its inode is not there"
        path = show_name(paths.of(ino))
        yield Found(Finding(kind=Kind.INODE, text=text, ino=ino, path=path), (made,))


def _check_overlaps(connection: sqlite3.Connection, paths: Paths) -> Iterator[Found]:
    """No file refers to a block of an object twice."""
    found: set[int] = set()
    last = (-1, -1, -1)
    end = 0
    for device, object_, ino, block, count in connection.execute(
        "SELECT device, object, ino, object_block, count FROM runs"
        " ORDER BY device, object, ino, object_block"
    ):
        if (device, object_, ino) != last:
            last, end = (device, object_, ino), 0
        if block < end:
            found.add(ino)
        end = max(end, block + count)
    for ino in sorted(found):
        yield _layout(paths, ino, "two of its blocks are at one place")


def _objects(text: str, place: ObjectId, ino: int, *statements: Statement) -> Found:
    finding = Finding(
        kind=Kind.OBJECTS, text=text, ino=ino, device=place.device, object=f"{place.id:016x}"
    )
    return Found(finding, statements, comes_of_repair=True)


def _check_owners(connection: sqlite3.Connection) -> Iterator[Found]:
    """Each object that a map refers to has a row, of an inode that refers to it."""
    delete = "DELETE FROM objects WHERE device = ? AND id = ?"
    store = "INSERT OR REPLACE INTO objects (device, id, ino, crc) VALUES (?, ?, ?, ?)"
    users = "(SELECT min(r.ino) FROM runs r WHERE r.device = o.device AND r.object = o.id)"
    for device, id_, ino, crc, user, is_there, is_used in connection.execute(
        f"SELECT o.device, o.id, o.ino, o.crc, {users},"
        " EXISTS (SELECT 1 FROM inodes i WHERE i.ino = o.ino),"
        " EXISTS (SELECT 1 FROM runs r WHERE r.device = o.device AND r.object = o.id"
        "  AND r.ino = o.ino) FROM objects o"
    ).fetchall():
        place = ObjectId(device, id_)
        is_sound = row_crc(device, id_, ino) == crc
        if is_sound and is_there and (is_used or user is None):
            continue
        name = f"object {id_:016x} on device {device}"
        if not is_sound:
            text = f"the row of {name} fails its checksum"
        elif not is_there:
            text = f"{name} belongs to inode {ino}, which is not there"
        else:
            text = f"{name} belongs to inode {ino}, which does not refer to it"
        if user is None:
            yield _objects(text, place, ino, (delete, place))
        else:
            row = (*place, user, row_crc(*place, user))
            yield _objects(text, place, user, (store, row))
    for device, id_, user in connection.execute(
        "SELECT r.device, r.object, min(r.ino) FROM runs r WHERE NOT EXISTS"
        " (SELECT 1 FROM objects o WHERE o.device = r.device AND o.id = r.object)"
        " GROUP BY r.device, r.object"
    ).fetchall():
        place = ObjectId(device, id_)
        text = f"inode {user} refers to object {id_:016x} on device {device}, which has no row"
        row = (*place, user, row_crc(*place, user))
        yield _objects(text, place, user, (store, row))


def _check_shares(connection: sqlite3.Connection) -> Iterator[Found]:
    """What inodes refer to and do not own is in `shares`, exactly."""
    wanted = _spans(
        connection,
        "SELECT r.device, r.object, r.ino, r.object_block, r.count FROM runs r"
        " JOIN objects o ON o.device = r.device AND o.id = r.object AND o.ino <> r.ino",
    )
    there = _spans(connection, "SELECT device, object, ino, block, count FROM shares")
    damaged = {
        (device, object_, ino)
        for device, object_, ino, block, count, crc in connection.execute(
            "SELECT device, object, ino, block, count, crc FROM shares"
        )
        if row_crc(device, object_, ino, block, count) != crc
    }
    for key in sorted(wanted.keys() | there.keys() | damaged):
        if wanted.get(key) == there.get(key) and key not in damaged:
            continue
        device, object_, ino = key
        text = (
            f"what inode {ino} shares of object {object_:016x} on device {device} is not what its"
            " map refers to"
        )
        rows: list[Statement] = [
            (
                "INSERT OR REPLACE INTO shares VALUES (?, ?, ?, ?, ?, ?)",
                (*key, begin, end - begin, row_crc(*key, begin, end - begin)),
            )
            for begin, end in wanted.get(key, [])
        ]
        delete: Statement = ("DELETE FROM shares WHERE device = ? AND object = ? AND ino = ?", key)
        finding = Finding(
            kind=Kind.SHARES, text=text, ino=ino, device=device, object=f"{object_:016x}"
        )
        yield Found(finding, (delete, *rows), comes_of_repair=True)


def _spans(connection: sqlite3.Connection, query: str) -> dict[tuple[int, int, int], Spans]:
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for device, object_, ino, block, count in connection.execute(query):
        found.setdefault((device, object_, ino), []).append((block, block + count))
    return {key: merge(spans) for key, spans in found.items()}


def _check_removals(connection: sqlite3.Connection) -> Iterator[Found]:
    """Nothing that is still referred to waits to be given back."""
    for id_, device, object_, block, count, crc in connection.execute(
        "SELECT id, device, object, block, count, crc FROM removals"
    ).fetchall():
        delete: Statement = ("DELETE FROM removals WHERE id = ?", (id_,))
        if row_crc(id_, device, object_, block, count) != crc:
            text = f"removal {id_} fails its checksum"
            yield Found(Finding(kind=Kind.OBJECTS, text=text), (delete,))
            continue
        used = merge(
            (begin, begin + length)
            for begin, length in connection.execute(
                "SELECT object_block, count FROM runs WHERE device = ? AND object = ?",
                (device, object_),
            )
        )
        gone = [(block, block + count)] if count else used
        if used and without(gone, used) != gone:
            text = (
                f"removal {id_} would give back blocks of object {object_:016x} on device"
                f" {device} that a file refers to"
            )
            place = ObjectId(device, object_)
            yield _objects(text, place, 0, delete)


def _check_held(connection: sqlite3.Connection) -> Iterator[Found]:
    """What objects and devices hold is what the maps of all files say."""
    totals = dict.fromkeys((n for (n,) in connection.execute("SELECT number FROM devices")), 0)
    rows = connection.execute(
        "SELECT o.device, o.id, o.ino, o.bytes, i.size, r.ino, r.block, r.count, r.object_block,"
        " r.flags FROM objects o LEFT JOIN inodes i ON i.ino = o.ino"
        " LEFT JOIN runs r ON r.device = o.device AND r.object = o.id ORDER BY o.device, o.id"
    )
    wrong = []
    for (device, id_, owner, known, size), of_object in groupby(rows, lambda row: row[:5]):
        held = 0
        mine: Spans = []
        others: Spans = []
        for ino, block, count, object_block, flags in (row[5:] for row in of_object):
            if ino == owner:
                held += bytes_held(Run(block, count, object_block, device, flags, id_), size or 0)
            if ino is not None:
                (mine if ino == owner else others).append((object_block, object_block + count))
        shared = without(merge(others), mine)
        held += sum(end - begin for begin, end in shared) * BLOCK_BYTES
        totals[device] = totals.get(device, 0) + held
        if held != known:
            wrong.append((ObjectId(device, id_), owner, known, held))
    for place, owner, known, held in wrong:
        text = (
            f"object {place.id:016x} on device {place.device} holds {held} bytes of contents, and"
            f" the catalog says {known}"
        )
        correct = "UPDATE objects SET bytes = ? WHERE device = ? AND id = ?"
        yield _objects(text, place, owner, (correct, (held, *place)))
    for device, known in connection.execute("SELECT number, bytes FROM devices").fetchall():
        held = totals[device]
        if held != known:
            text = f"device {device} holds {held} bytes of contents, and the catalog says {known}"
            finding = Finding(kind=Kind.OBJECTS, text=text, device=device)
            correction = ("UPDATE devices SET bytes = ? WHERE number = ?", (held, device))
            yield Found(finding, (correction,), comes_of_repair=True)
