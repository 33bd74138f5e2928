"""Quarantined saves: what a killed writer left does not replace the content that was there.

The content that it left becomes an inode of its own, under a name in `.fpfs/partial`, and the inode
that it wrote to keeps its committed content, its names and its attributes. A file that nobody ever
finished loses its names: it is no checkpoint.

Invariants:
  * The committed content of an inode stays. Preallocated blocks that the killed writer has filled
    are holes in it, which reads the same.
  * One content is kept for each path: a later one replaces an earlier one. All give way when space
    is short, before former versions do.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import ObjectId, Range
from fpfs.core.limits import NAME_BYTES_MAX
from fpfs.core.temporary_names import target_of
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.attributes import InodeRow, copy_inode, fetch_inode
from fpfs.daemon.catalog.rows.clone import leave_preallocated
from fpfs.daemon.catalog.rows.dirents import path_of, touch_directory
from fpfs.daemon.catalog.rows.extents import (
    Content,
    Version,
    fetch_content,
    record_removals,
    store_segment,
    store_snapshot,
)
from fpfs.daemon.catalog.rows.versions import as_many_as
from fpfs.daemon.catalog.schema import PARTIAL_INO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fpfs.daemon.catalog.executor import Transaction


class Replaced(NamedTuple):
    """A content that lost its `names` in `.fpfs/partial`; `nlink` are left. It was for `path`."""

    ino: int
    path: bytes
    names: Sequence[bytes]
    nlink: int


class Quarantined(NamedTuple):
    """What was quarantined, and what of it the tables in memory have to apply.

    `reverted` is the inode that was written to as it was committed, with its `content`, and `lost`
    the names (directory, name) that were removed.
    """

    path: bytes
    name: bytes
    killed_by: int
    size: int
    now_ns: int
    lost: Sequence[tuple[int, bytes]]
    reverted: InodeRow
    content: Content
    replaced: Sequence[Replaced]


class QuarantinedSave(NamedTuple):
    """A content that was quarantined. `path` is the one that it was for."""

    ino: int
    path: bytes
    name: bytes
    killed_by: int
    time_ns: int
    size: int


def quarantine(
    transaction: Transaction,
    version: Version,
    *,
    is_all_or_nothing: Callable[[Transaction, int, bytes], bool],
) -> tuple[Quarantined, int] | None:
    """Store a version that a killed writer left; returns what it quarantined, and the last removal.

    None, and nothing is stored: no name of the inode `is_all_or_nothing`.
    """
    ino, snapshot = version.ino, version.snapshot
    names = transaction.execute("SELECT parent, name FROM names WHERE ino = ?", (ino,)).fetchall()
    name = next((name for name in names if is_all_or_nothing(transaction, *name)), None)
    if name is None:
        return None
    # What fpfs.save writes under a temporary name is for the name that it would get.
    target = target_of(name[1]) or name[1]
    path = _path_of(transaction, name[0], target)
    earlier = transaction.execute("SELECT ino FROM partials WHERE path = ?", (path,)).fetchall()
    replaced = [_drop(transaction, ino, path) for (ino,) in earlier]
    now_ns = time.time_ns()
    made, removal = _split_off(transaction, version)
    committed = fetch_inode(transaction, ino)
    if committed.unfinished:
        _remove_names(transaction, ino, names, now_ns)
    quarantined = Quarantined(
        path=path,
        name=quarantine_name(target, made, now_ns),
        killed_by=version.killed_by,
        size=snapshot.size,
        now_ns=now_ns,
        lost=names if committed.unfinished else (),
        reverted=committed,
        content=fetch_content(transaction, ino),
        replaced=replaced,
    )
    transaction.execute(
        "INSERT INTO names VALUES (?, ?, ?, ?, ?)",
        (transaction.take_number(), PARTIAL_INO, quarantined.name, made, stat.S_IFREG >> 12),
    )
    touch_directory(transaction, PARTIAL_INO, now_ns)
    transaction.execute(
        "INSERT OR REPLACE INTO partials VALUES (?, ?, ?, ?, ?, ?)",
        (made, ino, path, version.killed_by, now_ns, snapshot.noted),
    )
    return quarantined, removal


def _remove_names(
    transaction: Transaction, ino: int, names: Sequence[tuple[int, bytes]], now_ns: int
) -> None:
    """Take an inode out of its directories."""
    transaction.execute("DELETE FROM names WHERE ino = ?", (ino,))
    transaction.execute("UPDATE inodes SET nlink = 0, ctime_ns = ? WHERE ino = ?", (now_ns, ino))
    for parent, _name in names:
        touch_directory(transaction, parent, now_ns)


def remove_unfinished(transaction: Transaction, *, kept: set[int]) -> list[bytes]:
    """Remove files that were never closed, but for those `kept`; returns a path of each."""
    now_ns = time.time_ns()
    removed = []
    for (ino,) in transaction.execute("SELECT ino FROM inodes WHERE unfinished = 1").fetchall():
        if ino in kept:
            continue
        names = transaction.execute(
            "SELECT parent, name FROM names WHERE ino = ?", (ino,)
        ).fetchall()
        removed += [_path_of(transaction, *names[0])] if names else []
        _remove_names(transaction, ino, names, now_ns)
    return removed


def _split_off(transaction: Transaction, version: Version) -> tuple[int, int]:
    """Make an inode of a version; what is committed stays. Returns it, and the last removal."""
    origin = version.ino
    ino = copy_inode(transaction, origin, nlink=1)
    for index, blob in fetch_content(transaction, origin).segments:
        store_segment(transaction, ino, index, blob)
    store_snapshot(transaction, version._replace(ino=ino))
    leave_preallocated(transaction, ino, to=origin)
    shares.share(transaction, ino)
    before = shares.references(transaction, origin)
    leave_preallocated(transaction, origin, to=ino)
    for place in before.keys() - shares.references(transaction, origin).keys():
        shares.give_up_object(transaction, origin, place, before)
    shares.recount(transaction, {*before, *shares.references(transaction, ino)})
    return ino, record_removals(transaction, _unreferenced(transaction, version, ino))


def _unreferenced(transaction: Transaction, version: Version, ino: int) -> list[Range]:
    """What the version had written and replaced, and neither content refers to."""
    snapshot = version.snapshot
    kept = shares.references(transaction, version.ino)
    taken = shares.references(transaction, ino)
    gone = [Range(*dead, 0, 0) for dead in snapshot.dead if shares.owner(transaction, dead) is None]
    for garbage in snapshot.garbage:
        place = ObjectId(garbage.device, garbage.object)
        spans = [(garbage.block, garbage.block + garbage.count)]
        left = shares.without(spans, kept.get(place, []), taken.get(place, []))
        gone += [Range(*place, begin, end - begin) for begin, end in left]
    return gone


def give_up_oldest(transaction: Transaction, *, size_bytes: int, count: int) -> list[Replaced]:
    """Give up what was quarantined first, as much as has `size_bytes` together; at most `count`.

    What has another name, or was moved, is somebody's.
    """
    rows = transaction.execute(
        "SELECT p.ino, i.allocated_bytes, p.path FROM partials p JOIN inodes i ON i.ino = p.ino"
        " WHERE i.nlink = 1 AND EXISTS (SELECT 1 FROM names n WHERE n.parent = ? AND n.ino = p.ino)"
        " ORDER BY p.time_ns, p.ino LIMIT ?",
        (PARTIAL_INO, count),
    ).fetchall()
    chosen = as_many_as([(ino, allocated_bytes) for ino, allocated_bytes, _ in rows], size_bytes)
    return [_drop(transaction, ino, path) for ino, _, path in rows[: len(chosen)]]


def _drop(transaction: Transaction, ino: int, path: bytes) -> Replaced:
    """Take the names of what was quarantined. One that has moved, or has another, is somebody's."""
    transaction.execute("DELETE FROM partials WHERE ino = ?", (ino,))
    names = transaction.execute(
        "DELETE FROM names WHERE ino = ? AND parent = ? RETURNING name", (ino, PARTIAL_INO)
    ).fetchall()
    (nlink,) = transaction.execute(
        "UPDATE inodes SET nlink = nlink - ? WHERE ino = ? RETURNING nlink", (len(names), ino)
    ).fetchone()
    return Replaced(ino, path, [name for (name,) in names], nlink)


def _path_of(transaction: Transaction, parent: int, name: bytes) -> bytes:
    """Return the path of a name, from the root of the filesystem."""
    above = path_of(transaction, parent)
    return above + b"/" + name if above else name


def quarantine_name(name: bytes, ino: int, now_ns: int) -> bytes:
    """Return a free name for what is quarantined, which no pattern of checkpoints matches."""
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_ns // 1_000_000_000))
    suffix = f".{when}.{ino}".encode()
    return name[: NAME_BYTES_MAX - len(suffix)] + suffix


def list_quarantined(transaction: Transaction) -> list[QuarantinedSave]:
    """Return what is quarantined, the newest last."""
    rows = transaction.execute(
        "SELECT p.ino, p.path, n.name, p.killed_by, p.time_ns, i.size FROM partials p"
        " JOIN inodes i ON i.ino = p.ino JOIN names n ON n.parent = ? AND n.ino = p.ino"
        " ORDER BY p.time_ns",
        (PARTIAL_INO,),
    ).fetchall()
    return [QuarantinedSave._make(row) for row in rows]


def list_noted(transaction: Transaction) -> dict[int, int]:
    """Return inodes that a content was split off, and the last change in the arena that it covers.

    For a server that takes over from one that died before it could tell the arena.
    """
    return dict(
        transaction.execute("SELECT origin, max(noted) FROM partials WHERE noted > 0 GROUP BY 1")
    )


def forget_noted(transaction: Transaction) -> None:
    """Forget changes of an arena that is taken over, or gone."""
    transaction.execute("UPDATE partials SET noted = 0 WHERE noted > 0")
