"""A copy of an inode's committed content: an inode of its own, which shares its blocks.

So what a content was outlives what takes its place, and no bytes move.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.attributes import copy_inode
from fpfs.daemon.catalog.rows.extents import fetch_content, store_segment
from fpfs.daemon.catalog.schema import row_crc

if TYPE_CHECKING:
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
    shares.share(transaction, made)
    return made
