"""What the queue of commits holds: one entry for each version on its way.

Concurrency: trio thread only; used by `pipeline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from fpfs.core.engine import Snapshot
    from fpfs.daemon.inodes.table import Inode


class Entry:
    """One version on its way; `done` is set when it is current or given up."""

    __slots__ = (
        "done",
        "drained",
        "error",
        "inode",
        "killed_by",
        "last",
        "number",
        "previous",
        "snapshot",
        "started",
    )

    def __init__(self, inode: Inode, number: int, *, last: bool, previous: Entry | None) -> None:
        self.inode = inode
        self.number = number
        self.last = last
        self.killed_by = inode.killed_by
        """The signal that ended the writer of this version; that of a later one may be another."""
        self.previous = previous
        """The entry of the same inode that is ahead in the queue, if any."""
        self.started = False
        self.drained = False
        self.snapshot: Snapshot | None = None
        self.error: OSError | None = None
        self.done = trio.Event()
