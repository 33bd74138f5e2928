"""Open directories: listing with offsets that stay right while entries come and go.

Invariants:
  * An entry's offset is its cookie, which it keeps under every name and in every directory, and
    which no other entry ever has: an entry that stays is listed once.
  * A listing ends where the directory ended when it began (or was rewound): one that makes an entry
    for every entry it reads comes to an end.

Concurrency: trio thread only. Entries of one batch are taken from one state of the catalog, and
their inodes are held until the front end has taken its references.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.errors import NotADirectory, StaleHandle
from fpfs.daemon.catalog.rows.dirents import Entry, list_entries
from fpfs.daemon.catalog.rows.versions import is_view, list_view
from fpfs.daemon.catalog.schema import NUMBER_FIRST, ROOT_INO
from fpfs.daemon.inodes.replay_log import RESENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.inodes.table import Inode, InodeTable

OFFSET_SELF = 1
OFFSET_PARENT = 2
BATCH_ENTRIES = 64

HANDLE_FIRST = 1 << 62
"""Handles of directories begin here, those of files below: the engine records both."""


class Listed(NamedTuple):
    """One entry of a listing; reading on continues behind `offset`."""

    offset: int
    name: bytes
    inode: Inode


class _Handle:
    """An open directory, and the cookie below which its listing stays."""

    __slots__ = ("inode", "listed_below")

    def __init__(self, inode: Inode) -> None:
        self.inode = inode
        self.listed_below = 0


class Directories:
    """All open directories."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        inodes: InodeTable,
        commit: Commit,
        handle_first: int,
    ) -> None:
        """Start without open directories; of `handle_first` holds what it does of files."""
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self._commit = commit
        self._handles: dict[int, _Handle] = {}
        self._numbers = itertools.count(HANDLE_FIRST + handle_first)
        self._unanswered: dict[int, int] = {}
        """Handles of a server that died, by the numbers of the requests that asked for them."""

    async def open(self, ino: int, *, request: int = 0) -> int:
        """Open a directory; returns its handle. Raises `NoSuchEntry`, `NotADirectory`."""
        if request & RESENT and (handle := self._unanswered.pop(request & ~RESENT, 0)):
            return handle
        inode = await self._inodes.get(ino)
        if not inode.is_directory:
            raise NotADirectory(f"inode {ino} is not a directory")
        handle = next(self._numbers)
        self._engine.record(handle, ino, flags=os.O_DIRECTORY, request=request)
        inode.users += 1
        inode.handles += 1
        self._handles[handle] = _Handle(inode)
        return handle

    def restore_handle(self, handle: int, inode: Inode, *, request: int) -> None:
        """Take over a handle that a server that died had given out.

        A listing that was under way ends where the directory ends when it goes on. The kernel may
        not know the handle yet: then it asks again, with the same request.
        """
        self._unanswered[request & ~RESENT] = handle
        inode.users += 1
        inode.handles += 1
        self._handles[handle] = _Handle(inode)

    async def read(self, handle: int, offset: int, emit: Callable[[Listed], bool]) -> None:
        """List entries behind `offset` (0: from the start) until `emit` returns False.

        The kernel takes a reference of every entry that `emit` takes, but "." and "..".
        """
        opened = self._opened(handle)
        directory = opened.inode
        if offset == 0 or not opened.listed_below:
            opened.listed_below = await self._catalog.read(lambda t: t.number_bound)
        if offset < OFFSET_SELF and not emit(Listed(OFFSET_SELF, b".", directory)):
            return
        if offset < OFFSET_PARENT:
            parent = await self._inodes.get(directory.parent)
            self._inodes.refresh(parent)
            if not emit(Listed(OFFSET_PARENT, b"..", parent)):
                return
        # The root does not show .fpfs, which is there for those who know it.
        hidden = NUMBER_FIRST - 1 if directory.ino == ROOT_INO else OFFSET_PARENT
        wants_more = True
        while wants_more:
            # An empty batch ends the loop: there is nothing behind the offset.
            offset, wants_more = await self._read_batch(opened, max(offset, hidden), emit)

    async def _read_batch(
        self, opened: _Handle, offset: int, emit: Callable[[Listed], bool]
    ) -> tuple[int, bool]:
        """List one batch; returns the offset reached and whether to go on."""
        listed = await self._catalog.read(
            lambda t: (list_view if is_view(opened.inode.ino) else list_entries)(
                t,
                opened.inode.ino,
                after_cookie=offset,
                below_cookie=opened.listed_below,
                count=BATCH_ENTRIES,
            ),
            apply=self._hold,
        )
        wants_more = len(listed) == BATCH_ENTRIES
        try:
            for entry in listed:
                self._inodes.refresh(entry.inode)
                if not emit(entry):
                    return offset, False
                entry.inode.lookups += 1
                offset = entry.offset
        finally:
            for entry in listed:
                self._inodes.release(entry.inode)
        return offset, wants_more

    def _hold(self, entries: list[Entry]) -> list[Listed]:
        """Bring a batch's inodes into the table, used by the listing."""
        listed = [Listed(e.cookie, e.name, self._inodes.get_or_insert(e.row)) for e in entries]
        for entry in listed:
            entry.inode.users += 1
        return listed

    async def sync(self, handle: int) -> None:
        """Make all names, and every version queued so far, durable, as fsync(2) of a directory."""
        self._opened(handle)
        await self._commit.make_names_durable()

    def release(self, handle: int) -> None:
        """Forget a handle."""
        inode = self._opened(handle).inode
        del self._handles[handle]
        self._engine.forget(handle)
        inode.handles -= 1
        self._inodes.release(inode)

    def given_up(self, handle: int) -> None:
        """Forget a handle that a server which died had made, and the kernel was never told of."""
        if handle in self._handles:
            self.release(handle)

    def close(self) -> None:
        """Release every handle: the kernel is gone."""
        for handle in list(self._handles):
            self.release(handle)

    def _opened(self, handle: int) -> _Handle:
        opened = self._handles.get(handle)
        if opened is None:
            raise StaleHandle(f"directory handle {handle} is not open")
        return opened
