"""A copy of an inode's committed content: an inode of its own, which shares its blocks.

So what a content was outlives what takes its place, and no bytes move.

Invariants:
  * Blocks that are preallocated (fallocate) are one inode's: the first write to them goes to where
    they lie, whatever another inode would have there.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfs.core.engine import BLOCK_BYTES, ObjectId
from fpfs.core.layout import UNWRITTEN, Run, decode_segment, encode_segment
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.attributes import copy_inode
from fpfs.daemon.catalog.rows.extents import fetch_content, store_segment
from fpfs.daemon.catalog.schema import row_crc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpfs.daemon.catalog.executor import Transaction


def split_off(transaction: Transaction, ino: int, *, nlink: int) -> int:
    """Make an inode with the committed content and the attributes of another; returns it."""
    content = fetch_content(transaction, ino)
    made = copy_inode(transaction, ino, nlink=nlink)
    if content.inline is not None:
        transaction.execute(
            "INSERT INTO inline VALUES (?, ?, ?)",
            (made, content.inline, row_crc(made, content=content.inline)),
        )
    for index, blob in content.segments:
        store_segment(transaction, made, index, blob)
    leave_preallocated(transaction, made, to=ino)
    shares.share(transaction, made)
    return made


def leave_preallocated(transaction: Transaction, ino: int, *, to: int) -> None:
    """Make holes of the preallocated blocks of an inode that another refers to; both read zeros."""
    taken: dict[ObjectId, shares.Spans] | None = None
    left_blocks = 0
    for index, blob in fetch_content(transaction, ino).segments:
        segment = decode_segment(blob)
        if all(run.flags != UNWRITTEN for run in segment.runs):
            continue
        if taken is None:
            taken = shares.references(transaction, to)
        runs = tuple(part for run in segment.runs for part in _without(run, taken))
        left = encode_segment(segment._replace(runs=runs)) if runs else b""
        store_segment(transaction, ino, index, left)
        left_blocks += sum(run.count for run in segment.runs) - sum(run.count for run in runs)
    transaction.execute(
        "UPDATE inodes SET allocated_bytes = allocated_bytes - ? WHERE ino = ?",
        (left_blocks * BLOCK_BYTES, ino),
    )


def _without(run: Run, taken: dict[ObjectId, shares.Spans]) -> Iterator[Run]:
    """Yield what a run keeps: if it is preallocated, what is not in `taken`."""
    if run.flags != UNWRITTEN:
        yield run
        return
    whole = [(run.object_block, run.object_block + run.count)]
    for begin, end in shares.without(whole, taken.get(ObjectId(run.device, run.object), [])):
        yield run.part(begin, end)
