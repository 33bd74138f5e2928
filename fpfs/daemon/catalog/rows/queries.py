"""Catalog operations that tell of files: what was committed, where it lies, who may see it.

Concurrency: every function runs in the catalog's worker.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS
from fpfs.core.errors import DamagedData, NoSuchEntry
from fpfs.core.layout import UNVERIFIED, UNWRITTEN, decode_segment
from fpfs.core.protocol.reports import FileRun, RunsShown, join_runs
from fpfs.daemon.catalog.rows.policies import list_ancestors
from fpfs.daemon.catalog.schema import ROOT_INO, row_crc

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fpfs.daemon.catalog.executor import Transaction

SEGMENTS_PER_PAGE = 64
"""Segments that one answer tells of: 4 GiB of a file."""

Place: TypeAlias = "tuple[int, bytes]"
"""A directory and a name in it."""


class Facts(NamedTuple):
    """What the catalog holds of an inode. `above` are the directories over one of its names."""

    ino: int
    mode: int
    size: int
    layout: bytes | None
    unfinished: int
    version: int
    inline: int
    former: int
    above: Sequence[int]


class Asker(NamedTuple):
    """Who asks, as the kernel knows a process: its user, and all its groups."""

    uid: int
    gids: frozenset[int]


def fetch_facts(
    transaction: Transaction, inos: Sequence[int], *, seen_by: Asker | None
) -> list[Facts]:
    """Return what is known of those of some inodes that there are, and that somebody may see.

    None sees everything.
    """
    found = []
    for ino in inos:
        row = transaction.execute(
            "SELECT i.ino, i.mode, i.size, i.layout, i.unfinished, i.version,"
            " EXISTS (SELECT 1 FROM inline c WHERE c.ino = i.ino), i.parent"
            " FROM inodes i WHERE i.ino = ?",
            (ino,),
        ).fetchone()
        if row is None:
            continue
        *fields, parent = row
        place = _fetch_place(transaction, ino, parent)
        above = list_ancestors(transaction, place[0]) if place else []
        if seen_by is None or may_see(transaction, ino, above, seen_by):
            former = _count_former(transaction, place)
            found.append(Facts._make((*fields, former, above)))
    return found


def _fetch_place(transaction: Transaction, ino: int, parent: int) -> Place | None:
    """Return a name of an inode that has one; that of a directory is left out."""
    if parent:
        return None if ino == ROOT_INO else (parent, b"")
    place: Place | None = (
        transaction.execute(
            "SELECT parent, name FROM names WHERE ino = ? LIMIT 1", (ino,)
        ).fetchone()
        or transaction.execute("SELECT parent, x'' FROM former WHERE ino = ?", (ino,)).fetchone()
    )
    return place


def _count_former(transaction: Transaction, place: Place | None) -> int:
    if not place or not place[1]:
        return 0
    (count,) = transaction.execute(
        "SELECT count(*) FROM former WHERE parent = ? AND name = ?", place
    ).fetchone()
    return int(count)


def may_see(transaction: Transaction, ino: int, above: Sequence[int], asker: Asker) -> bool:
    """Whether somebody who is not root may learn that an inode is there, and what it is like.

    So it is with what lies in a directory that he may list and search, where he may search all
    directories above that.
    """
    if not above:
        return ino == ROOT_INO
    wanted = stat.S_IROTH | stat.S_IXOTH
    for directory in above:
        row = transaction.execute(
            "SELECT mode, uid, gid FROM inodes WHERE ino = ?", (directory,)
        ).fetchone()
        if row is None or not _allows(row, wanted, asker):
            return False
        wanted = stat.S_IXOTH
    return above[-1] == ROOT_INO


def may_list(transaction: Transaction, directory: int, asker: Asker) -> bool:
    """Whether somebody who is not root may learn what is in a directory."""
    above = list_ancestors(transaction, directory)
    return above[-1] == ROOT_INO and may_see(transaction, 0, above, asker)


def _allows(row: tuple[int, int, int], wanted: int, asker: Asker) -> bool:
    """Whether mode, user and group give somebody all that is `wanted`, in the bits for others."""
    mode, uid, gid = row
    if uid == asker.uid:
        mode >>= 6
    elif gid in asker.gids:
        mode >>= 3
    return mode & wanted == wanted


def list_below(transaction: Transaction, directory: int, inos: Collection[int]) -> set[int]:
    """Return those of some inodes that have a name in a directory, or anywhere below it."""
    found = set()
    is_inside: dict[int, bool] = {}
    for ino in inos:
        for (parent,) in transaction.execute(
            "SELECT parent FROM names WHERE ino = ?", (ino,)
        ).fetchall():
            if parent not in is_inside:
                is_inside[parent] = directory in list_ancestors(transaction, parent)
            if is_inside[parent]:
                found.add(ino)
    return found


def list_runs(transaction: Transaction, ino: int, segment: int) -> RunsShown:
    """Return where the committed content of a file lies, from a segment on.

    Raises `NoSuchEntry`, and `DamagedData` for a row that fails its checksum.
    """
    row = transaction.execute("SELECT version FROM inodes WHERE ino = ?", (ino,)).fetchone()
    if row is None:
        raise NoSuchEntry(f"inode {ino} does not exist")
    rows = transaction.execute(
        "SELECT segment, blob, crc FROM segments WHERE ino = ? AND segment >= ?"
        " ORDER BY segment LIMIT ?",
        (ino, segment, SEGMENTS_PER_PAGE),
    ).fetchall()
    runs: list[FileRun] = []
    for index, blob, crc in rows:
        if row_crc(ino, index, content=blob) != crc:
            raise DamagedData(f"layout segment {index} of inode {ino} fails its checksum")
        for run in decode_segment(blob).runs:
            shown = FileRun(
                offset_bytes=(index * SEGMENT_BLOCKS + run.block) * BLOCK_BYTES,
                size_bytes=run.count * BLOCK_BYTES,
                device=run.device,
                object=f"{run.object:016x}",
                object_offset_bytes=run.object_block * BLOCK_BYTES,
                written=run.flags != UNWRITTEN,
                checksums=run.flags not in (UNWRITTEN, UNVERIFIED),
            )
            join_runs(runs, [shown])
    is_last = len(rows) < SEGMENTS_PER_PAGE
    next_segment = None if is_last else rows[-1][0] + 1
    return RunsShown(version=row[0], runs=tuple(runs), next_segment=next_segment)
