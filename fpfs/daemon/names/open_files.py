"""Open files: handles, truncation, and the points at which contents are committed.

Invariants:
  * The engine knows an inode's content and the handle before the kernel learns of the handle.
  * `Inode.writers` counts writable handles; the release that brings it to 0 queues the version.
  * The engine answers the kernel's RELEASE. What it has released is taken (`take_released`) before
    any request is handled that came later, so that the order is the kernel's.

Concurrency: trio thread only. An inode's `users` is raised before the first await of an operation
that needs it loaded.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.errors import FileTooLarge, StaleHandle, StaleInode
from fpfs.core.limits import FILE_BYTES_MAX
from fpfs.core.policy import Acknowledge
from fpfs.daemon.commit.quarantine import ABANDONED
from fpfs.daemon.inodes.replay_log import RESENT
from fpfs.daemon.inodes.table import Pages

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fpfs.core.engine import Engine
    from fpfs.core.policy import Policy
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.commit.versions import Versions
    from fpfs.daemon.inodes.layout_policy import Placing
    from fpfs.daemon.inodes.table import Inode, InodeTable


class ContentError(OSError):
    """Bytes that could not be kept: the engine and the commit have said in the log which and why.

    The operation that hears of it, and hears again at each try, has nothing to add.
    """


class Opened(NamedTuple):
    """An open file: its handle, and whether the kernel's page cache of it is still right."""

    handle: int
    keep_cache: bool


class _Handle(NamedTuple):
    inode: Inode
    writable: bool


class Files:
    """All open files."""

    def __init__(
        self,
        *,
        engine: Engine,
        inodes: InodeTable,
        commit: Commit,
        versions: Versions,
        placing: Placing,
        handle_first: int,
    ) -> None:
        """Start without open files; `handle_first` is the number of the next one that is opened.

        No server of the same connection may have given it out or a larger one, released or not:
        the kernel sends a RELEASE again that a server which died had carried out.
        """
        self._engine = engine
        self._inodes = inodes
        self._commit = commit
        self._versions = versions
        self._placing = placing
        self._handles: dict[int, _Handle] = {}
        self._numbers = itertools.count(handle_first)
        self._unanswered: dict[int, int] = {}
        """Handles of a server that died, by the numbers of the requests that asked for them."""
        self._tell_writer: Callable[[Inode], Awaitable[None]] | None = None
        self.writers = 0
        """Writable handles of all inodes."""

    def on_writer(self, tell: Callable[[Inode], Awaitable[None]]) -> None:
        """Call `tell` of each file that is opened for writing, before anything is written."""
        self._tell_writer = tell

    def written(self) -> set[Inode]:
        """Inodes with writable handles."""
        return {opened.inode for opened in self._handles.values() if opened.writable}

    @property
    def open_count(self) -> int:
        """How many handles are open."""
        return len(self._handles)

    async def open(
        self, inode: Inode, *, flags: int, request: int = 0, policy: Policy | None = None
    ) -> Opened:
        """Open a regular file that the kernel refers to, truncating it if the flags say so.

        It was just made by the `policy`, if one is given. Raises `DamagedData` when its map cannot
        be trusted, `NoSpace`, and `StaleInode`, upon which the kernel looks its name up again.
        """
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        if writable or flags & os.O_TRUNC:
            inode.refuse_change()
        handle = self._unanswered.pop(request & ~RESENT, 0) if request & RESENT else 0
        if not handle:
            handle = await self._open(inode, flags=flags, writable=writable, request=request)
        try:
            await self._begin(inode, flags=flags, writable=writable)
            await self._apply_policy(inode, flags=flags, writable=writable, policy=policy)
        except BaseException:
            self.release(handle)
            raise
        return Opened(handle, self._keep_cache(inode, flags=flags))

    async def _begin(self, inode: Inode, *, flags: int, writable: bool) -> None:
        """Let a version begin, and empty the file if the flags say so.

        A writer by now: a close of another while this waits for its turn queues nothing.
        """
        if writable and inode.unfinished:
            self._engine.begin(inode.ino)
        if writable and self._tell_writer is not None:
            await self._tell_writer(inode)
        if flags & os.O_TRUNC:
            await self._truncate_locked(inode, 0)
            if inode.writers == 0:
                self._commit.truncated(inode)

    async def _apply_policy(
        self, inode: Inode, *, flags: int, writable: bool, policy: Policy | None
    ) -> None:
        """Let the version that begins now, if one does, go where the policy says."""
        if policy is not None:
            self._placing.flow(inode, policy)
            return
        is_first = writable and inode.writers == 1
        await self._placing.apply_policy(
            inode, begins=is_first, is_emptied=bool(flags & os.O_TRUNC)
        )

    async def _open(self, inode: Inode, *, flags: int, writable: bool, request: int) -> int:
        inode.users += 1
        handle = next(self._numbers)
        try:
            await self._inodes.load(inode)
            # What a killed writer left is not what one who comes after it is to see.
            if writable or flags & os.O_TRUNC:
                # What was closed is a version: nothing of this writer may get into it.
                was_quarantined = await self._commit.wait_turn(
                    inode, is_emptied=bool(flags & os.O_TRUNC)
                )
            else:
                was_quarantined = await self._commit.wait_quarantined(inode)
            if was_quarantined and flags & os.O_APPEND:
                # The kernel appends at the end that it knows, and learns the size with the name.
                raise StaleInode(f"inode {inode.ino} has another size than it had")
            _refuse_stale(inode)
            self._engine.open(handle, inode.ino, flags=flags, request=request)
        except BaseException:
            self._inodes.release(inode)
            raise
        self._handles[handle] = _Handle(inode, writable)
        inode.handles += 1
        if writable:
            inode.writers += 1
            self.writers += 1
        return handle

    async def restore_handle(self, handle: int, inode: Inode, *, flags: int, request: int) -> None:
        """Take over a handle that a server that died had given out; the inode is loaded.

        The kernel may not know it yet: then it asks again, with the same request.
        """
        self._unanswered[request & ~RESENT] = handle
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        self._engine.restore_handle(handle, inode.ino, flags=flags)
        await self._placing.apply_policy(inode, begins=False, is_emptied=False)
        if writable and inode.unfinished:  # the server may have died before it came to that
            self._engine.begin(inode.ino)
        self._handles[handle] = _Handle(inode, writable)
        inode.users += 1
        inode.handles += 1
        if writable:
            inode.writers += 1
            self.writers += 1

    def _keep_cache(self, inode: Inode, *, flags: int) -> bool:
        """Whether the kernel is to keep the pages that it has, for this open.

        It drops them when the answer has reached who opens: of two that open at once one could drop
        what the other has read already. So a reader has it drop them only if it must.
        """
        if flags & os.O_ACCMODE != os.O_RDONLY:
            # Who reads may map the file, and who stops to be direct writes through pages.
            has_none = flags & (os.O_ACCMODE | os.O_DIRECT) == os.O_WRONLY
            is_alone = inode.handles == 1 and has_none
            inode.pages = Pages.NONE if is_alone else Pages.FORMER
            return False
        if inode.writers:
            inode.pages = Pages.FORMER  # it may map the file
            return False
        keep = inode.pages is not Pages.FORMER
        inode.pages = Pages.CURRENT
        return keep

    async def truncate(self, inode: Inode, size: int) -> None:
        """Set a file's size; without a writable handle this is a version of its own.

        Raises `FileTooLarge`, `NoSpace`, `DamagedData`.
        """
        if size > FILE_BYTES_MAX:
            raise FileTooLarge(f"size {size}, at most {FILE_BYTES_MAX} bytes are possible")
        inode.users += 1
        try:
            await self._inodes.load(inode)
            if inode.writers == 0:  # as who opens it to write
                await self._commit.wait_turn(inode, is_emptied=size == 0)
            await self._truncate_locked(inode, size)
            if inode.writers == 0:
                self._commit.truncated(inode)
        finally:
            self._inodes.release(inode)

    async def _truncate_locked(self, inode: Inode, size: int) -> None:
        """Truncate between drains and not during one, which may have quarantined the content."""
        async with inode.lock:
            _refuse_stale(inode)
            await self._engine.truncate(inode.ino, size)
            if size == 0:
                inode.killed_by = 0  # nothing is left of what a killed writer could not keep
            if inode.pages is Pages.CURRENT:
                inode.pages = Pages.FORMER
        if size == 0 and await self._versions.gives_up_at_once(inode):
            await self._commit.give_up_replaced(inode)

    async def flush(self, handle: int) -> None:
        """Answer a close(2): report an error not reported yet; wait if the policy says so.

        Nothing is committed by it when writes are acknowledged early: a FLUSH comes for every
        descriptor that is closed, also for duplicates in the middle of a save. When the policy
        promises durability at close, what the owner wrote so far is committed like by fsync.
        """
        opened = self._opened(handle)
        if opened.inode.ack is not Acknowledge.EARLY and opened.writable:
            await self.sync(handle)
        else:
            self._raise_error(handle)

    async def sync(self, handle: int) -> None:
        """Make a file's content and attributes durable, as fsync(2), whatever handle is used."""
        inode = self._opened(handle).inode
        try:
            await self._commit.make_durable(inode)
        except OSError as error:
            # The engine would report the same again: once is enough.
            raise _io_error(self._engine.take_error(handle) or error.errno) from error
        self._raise_error(handle)

    def _raise_error(self, handle: int) -> None:
        """Raise an I/O error that was found since the last report."""
        code = self._engine.take_error(handle)
        if code:
            raise _io_error(code)

    def take_released(self) -> list[int]:
        """Follow what the engine has released since the last call; returns handles of no files."""
        others = []
        for handle, killed_by in self._engine.take_released():
            if handle in self._handles:
                self._released(handle, killed_by)
            else:
                others.append(handle)
        return others

    def release(self, handle: int, *, killed_by: int = 0) -> None:
        """Release a handle that the kernel will not release."""
        self._opened(handle)
        if self._engine.release(handle):
            self._released(handle, killed_by)

    def _released(self, handle: int, killed_by: int = 0) -> None:
        """Forget a handle; the last writable one of a changed file queues its version.

        `killed_by` is the signal that ended the one who wrote through it.
        """
        inode, writable = self._handles.pop(handle)
        inode.handles -= 1
        if writable:
            inode.writers -= 1
            self.writers -= 1
            # What has neither name nor handle is about to be deleted.
            is_kept = inode.nlink or inode.handles
            if inode.writers == 0 and is_kept:
                is_changed = self._inodes.refresh(inode)
                if is_changed or inode.unfinished:
                    self._commit.closed(inode, killed_by=killed_by)
                else:
                    inode.synced = False
            self._commit.released()
        self._inodes.release(inode)

    def close(self) -> None:
        """Release every handle: the kernel is gone, and who has a file open cannot finish it."""
        self.take_released()
        for handle in list(self._handles):
            self.release(handle, killed_by=ABANDONED)

    def _opened(self, handle: int) -> _Handle:
        opened = self._handles.get(handle)
        if opened is None:
            raise StaleHandle(f"handle {handle} is not open")
        return opened


def _refuse_stale(inode: Inode) -> None:
    """Raise `StaleInode` for one whose name is gone: the kernel looks the name up again."""
    if inode.stale:
        raise StaleInode(f"inode {inode.ino} is not behind the name any more")


def _io_error(code: int | None) -> ContentError:
    """Return the error for an errno."""
    return ContentError(code, os.strerror(code or 0))
