"""Checks of the catalog against the objects on the devices, and of blocks against checksums.

Concurrency: one thread; the functions own the image that they look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, ObjectId
from fpfs.core.errors import DamagedData
from fpfs.core.fsck import Finding, Kind
from fpfs.core.layout import UNVERIFIED, UNWRITTEN
from fpfs.core.paths import show_name
from fpfs.daemon.offline.contents import SegmentRow, segment_rows
from fpfs.daemon.offline.findings import Found, Paths
from fpfs.daemon.offline.objects import Objects, Stray

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator, Mapping


def list_objects(connection: sqlite3.Connection, objects: Objects) -> list[Found]:
    """Put all objects that are there into the table `found`; returns what is no object."""
    connection.execute("DROP TABLE IF EXISTS temp.found")
    connection.execute(
        "CREATE TEMP TABLE found (device INTEGER, id INTEGER, size INTEGER,"
        " PRIMARY KEY (device, id)) WITHOUT ROWID"
    )
    strays = []
    for each in objects.list_all():
        if isinstance(each, Stray):
            text = f"{each.path} on device {each.device} {each.what}: it is left alone"
            strays.append(Found(Finding(kind=Kind.STRAY, text=text, device=each.device)))
        else:
            connection.execute("INSERT OR REPLACE INTO found VALUES (?, ?, ?)", each)
    return strays


def check_objects(
    connection: sqlite3.Connection, paths: Paths, missing: Mapping[int, str]
) -> Iterator[Found]:
    """Yield objects that files refer to and that are missing or too short.

    Devices that are `missing`, with their paths, stand for all that lies there. The tables `runs`
    (`check_contents`) and `found` (`list_objects`) are there.
    """
    for device, path in missing.items():
        (files,) = connection.execute(
            "SELECT count(DISTINCT ino) FROM runs WHERE device = ? AND flags <> ?",
            (device, UNWRITTEN),
        ).fetchone()
        text = f"device {device} ({path}) is missing: what {files} files have there is not checked"
        yield Found(Finding(kind=Kind.LOST, text=text, device=device))
    rows = connection.execute(
        "SELECT r.ino, r.device, r.object, sum(r.count), max(r.object_block + r.count - 1),"
        " f.size FROM runs r LEFT JOIN found f ON f.device = r.device AND f.id = r.object"
        " WHERE r.flags <> ? GROUP BY r.ino, r.device, r.object"
        " HAVING f.size IS NULL OR f.size <= max(r.object_block + r.count - 1) * ?",
        (UNWRITTEN, BLOCK_BYTES),
    ).fetchall()
    for ino, device, object_, count, last, size in rows:
        if device in missing:
            continue
        name = f"object {object_:016x} on device {device}"
        if size is None:
            text = f"{paths.show(ino)}: {count} blocks are lost: {name} is missing"
            # The parts of a content have one name on all devices: only what is no such part helps.
            other = connection.execute(
                "SELECT device FROM found f WHERE id = ? AND NOT EXISTS"
                " (SELECT 1 FROM runs r WHERE r.device = f.device AND r.object = f.id)",
                (object_,),
            )
            text += "".join(f" (device {elsewhere} has one of this name)" for (elsewhere,) in other)
        else:
            text = f"{paths.show(ino)}: {name} has {size} bytes, and block {last} lies behind them"
        path = show_name(paths.of(ino))
        yield Found(
            Finding(
                kind=Kind.LOST,
                text=text,
                ino=ino,
                path=path,
                device=device,
                object=f"{object_:016x}",
            )
        )


def check_unused(connection: sqlite3.Connection) -> Iterator[Found]:
    """Yield objects that nobody refers to, and rows of objects that are not there and not used."""
    for device, id_, size in connection.execute(
        "SELECT device, id, size FROM found f WHERE NOT EXISTS"
        " (SELECT 1 FROM objects o WHERE o.device = f.device AND o.id = f.id) AND NOT EXISTS"
        " (SELECT 1 FROM runs r WHERE r.device = f.device AND r.object = f.id) AND NOT EXISTS"
        " (SELECT 1 FROM removals m WHERE m.device = f.device AND m.object = f.id AND m.count = 0)"
    ).fetchall():
        text = f"object {id_:016x} on device {device} ({size} bytes) belongs to no file"
        finding = Finding(kind=Kind.ORPHAN, text=text, device=device, object=f"{id_:016x}")
        yield Found(finding, removals=(ObjectId(device, id_),), comes_of_repair=True)
    for device, id_, ino in connection.execute(
        "SELECT device, id, ino FROM objects o WHERE NOT EXISTS"
        " (SELECT 1 FROM found f WHERE f.device = o.device AND f.id = o.id) AND NOT EXISTS"
        " (SELECT 1 FROM runs r WHERE r.device = o.device AND r.object = o.id)"
    ).fetchall():
        text = f"object {id_:016x} on device {device} of inode {ino} is missing, and not needed"
        finding = Finding(
            kind=Kind.OBJECTS, text=text, ino=ino, device=device, object=f"{id_:016x}"
        )
        statement = ("DELETE FROM objects WHERE device = ? AND id = ?", (device, id_))
        yield Found(finding, (statement,))


class DamagedBlock(NamedTuple):
    """A block of a file that is not sound where it lies; `why` says in what way."""

    ino: int
    block: int
    place: ObjectId
    object_block: int
    checksum: int
    why: str


class DataCheck:
    """Reads all blocks that have checksums and are there, and compares them."""

    def __init__(self, connection: sqlite3.Connection, objects: Objects) -> None:
        """The tables `runs` and `found` are there."""
        self._connection = connection
        self._objects = objects
        self.bytes_checked = 0
        self.bytes_unverified = 0
        blocks = connection.execute("SELECT coalesce(sum(count), 0) FROM runs WHERE flags = 0")
        self.bytes_total = int(blocks.fetchone()[0]) * BLOCK_BYTES

    def run(self, progress: Callable[[int, int], None]) -> list[DamagedBlock]:
        """Return the damaged blocks. `progress` gets the bytes that were read and all of them."""
        damaged = []
        for row in segment_rows(self._connection):
            try:
                segment = row.decode()
            except DamagedData:  # it is a finding of its own
                continue
            unverified = sum(run.count for run in segment.runs if run.flags == UNVERIFIED)
            self.bytes_unverified += unverified * BLOCK_BYTES
            for run, checksums in segment.verified():
                place = ObjectId(run.device, run.object)
                start = row.index * SEGMENT_BLOCKS + run.block
                if self._is_there(place):
                    damaged += [
                        DamagedBlock(
                            row.ino, start + i, place, run.object_block + i, checksums[i], why
                        )
                        for i, why in self._objects.damaged_blocks(
                            place, run.object_block, checksums
                        )
                    ]
                    self.bytes_checked += run.count * BLOCK_BYTES
                progress(self.bytes_checked, self.bytes_total)
        return damaged

    def _is_there(self, place: ObjectId) -> bool:
        row = self._connection.execute(
            "SELECT 1 FROM found WHERE device = ? AND id = ?", place
        ).fetchone()
        return row is not None


def still_damaged(
    connection: sqlite3.Connection, damaged: list[DamagedBlock]
) -> list[DamagedBlock]:
    """Return those of the blocks that another image has at the same places."""
    kept = []
    for ino, index in sorted({(each.ino, each.block // SEGMENT_BLOCKS) for each in damaged}):
        row = connection.execute(
            "SELECT ino, segment, blob, crc FROM segments WHERE ino = ? AND segment = ?",
            (ino, index),
        ).fetchone()
        if row is None:
            continue
        try:
            segment = SegmentRow(*row).decode()
        except DamagedData:
            continue
        now = {
            (
                index * SEGMENT_BLOCKS + run.block + i,
                run.device,
                run.object,
                run.object_block + i,
                c,
            )
            for run, checksums in segment.verified()
            for i, c in enumerate(checksums)
        }
        kept += [
            each
            for each in damaged
            if each.ino == ino
            and (each.block, *each.place, each.object_block, each.checksum) in now
        ]
    return kept


def describe_damage(
    damaged: list[DamagedBlock], paths: Paths, device_paths: Mapping[int, str]
) -> Iterator[Found]:
    """Yield a finding for each range of damaged blocks."""
    first = 0
    for i, each in enumerate(damaged):
        following = damaged[i + 1] if i + 1 < len(damaged) else None
        if (
            following is not None
            and following._replace(
                block=each.block, object_block=each.object_block, checksum=each.checksum
            )
            == each
            and (
                following.block == each.block + 1
                and following.object_block == each.object_block + 1
            )
        ):
            continue
        begin = damaged[first]
        count = i + 1 - first
        first = i + 1
        offset = begin.block * BLOCK_BYTES
        device, id_ = each.place
        blocks = f"block {begin.object_block}" + (f" to {each.object_block}" if count > 1 else "")
        text = (
            f"{paths.show(each.ino)} bytes {offset} to {offset + count * BLOCK_BYTES - 1}: {blocks}"
            f" of object {id_:016x} on {device_paths.get(device, f'device {device}')}: {each.why}"
        )
        yield Found(
            Finding(
                kind=Kind.DAMAGED,
                text=text,
                ino=each.ino,
                path=show_name(paths.of(each.ino)),
                device=device,
                object=f"{id_:016x}",
            )
        )
