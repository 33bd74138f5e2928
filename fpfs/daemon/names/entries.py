"""Entries: make, link, remove and rename names.

Invariants:
  * Attributes of directories in memory change when the catalog's transaction is delivered, in its
    order, together with the inode that was made, linked or removed.
  * A rename waits until everything that was closed before is current, and pending content of what
    moves, too: after a crash the new name never shows a content older than the one that was
    renamed, nor does a pointer name what is not there.

Concurrency: trio thread only. Checks and changes are one catalog transaction.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fpfs.core.engine import INLINE_BYTES_MAX
from fpfs.core.errors import EntryExists, NameTooLong, NoSpace, NoSuchEntry, ReadOnly
from fpfs.core.limits import NAME_BYTES_MAX, SYMLINK_BYTES_MAX
from fpfs.daemon.catalog.rows import deferred_unlink, dirents
from fpfs.daemon.catalog.rows.attributes import InodeRow
from fpfs.daemon.catalog.rows.dirents import NewInode, Removed, Renamed, RenameMode
from fpfs.daemon.catalog.rows.versions import is_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpfs.core.policy import Policy
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.dirents import Name
    from fpfs.daemon.catalog.rows.versions import Changed
    from fpfs.daemon.commit.groups import Groups
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.commit.versions import Versions
    from fpfs.daemon.devices.free_space import DeviceSpace
    from fpfs.daemon.inodes.layout_policy import Placing
    from fpfs.daemon.inodes.policies import Policies
    from fpfs.daemon.inodes.replay_log import Requests
    from fpfs.daemon.inodes.table import Inode, InodeTable
    from fpfs.daemon.names.open_files import Files, Opened


Result = TypeVar("Result")
Applied = TypeVar("Applied")


class Caller(NamedTuple):
    """Who asks: the filesystem user and group of the calling process, and the request's number."""

    uid: int
    gid: int
    request: int = 0


class Entries:
    """Changes of names."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        inodes: InodeTable,
        commit: Commit,
        files: Files,
        policies: Policies,
        placing: Placing,
        requests: Requests,
        groups: Groups,
        space: DeviceSpace,
        versions: Versions,
    ) -> None:
        """Place new files by their policies; give space back at once when `space` is tight."""
        self._catalog = catalog
        self._inodes = inodes
        self._commit = commit
        self._files = files
        self._requests = requests
        self._groups = groups
        self._space = space
        self._versions = versions
        self._policies = policies
        self._placing = placing

    async def make_node(
        self, parent: int, name: bytes, *, mode: int, rdev: int, caller: Caller
    ) -> Inode:
        """Make a file, fifo, socket or device node; returns it with one kernel reference.

        Raises `EntryExists`, `NameTooLong`, `NoSuchEntry` (the directory was removed), `NoSpace`.
        """
        layout = None
        if stat.S_ISREG(mode):
            layout = await self._placing.of_new_file(
                await self._policies.of_directory(parent), name
            )
        return await self._make(parent, name, caller, mode=mode, rdev=rdev, layout=layout)

    async def _make_file(
        self, parent: int, name: bytes, policy: Policy, *, mode: int, caller: Caller
    ) -> Inode:
        """Make a regular file that is about to be written."""
        unfinished = policy.is_all_or_nothing(name)
        layout = await self._placing.of_new_file(policy, name)
        return await self._make(
            parent, name, caller, mode=mode, layout=layout, unfinished=unfinished
        )

    async def make_directory(self, parent: int, name: bytes, *, mode: int, caller: Caller) -> Inode:
        """Make a directory; returns it with one kernel reference. Raises as `make_node`."""
        return await self._make(parent, name, caller, mode=mode)

    async def make_symlink(
        self, parent: int, name: bytes, *, target: bytes, caller: Caller
    ) -> Inode:
        """Make a symbolic link; returns it with one kernel reference. Raises as `make_node`."""
        if len(target) > SYMLINK_BYTES_MAX:
            raise NameTooLong(
                f"link target of {len(target)} bytes, at most {SYMLINK_BYTES_MAX} are possible"
            )
        return await self._make(parent, name, caller, mode=stat.S_IFLNK | 0o777, target=target)

    async def create(
        self, parent: int, name: bytes, *, mode: int, flags: int, exclusive: bool, caller: Caller
    ) -> tuple[Inode, Opened]:
        """Make a regular file and open it; opens the one that exists unless `exclusive`.

        Raises as `make_node` and `Files.open`.
        """
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        policy: Policy | None = await self._policies.of_directory(parent)
        assert policy is not None
        try:
            inode = await self._make_file(parent, name, policy, mode=mode, caller=caller)
            flags &= ~os.O_TRUNC
        except EntryExists:
            if exclusive:
                raise
            inode, policy = await self._find(parent, name), None
        try:
            return inode, await self._files.open(
                inode, flags=flags, request=caller.request, policy=policy
            )
        except BaseException:
            # The kernel learns of an error and not of the inode.
            self._inodes.forget(inode.ino, 1)
            raise

    async def _find(self, parent: int, name: bytes) -> Inode:
        def found(row: InodeRow | None) -> Inode:
            if row is None:
                raise NoSuchEntry(f"{name!r} was removed from directory {parent} meanwhile")
            inode = self._inodes.get_or_insert(row)
            inode.lookups += 1
            return inode

        return await self._catalog.read(lambda t: dirents.look_up(t, parent, name), apply=found)

    async def _make(
        self,
        parent: int,
        name: bytes,
        caller: Caller,
        *,
        mode: int,
        rdev: int = 0,
        target: bytes | None = None,
        layout: bytes | None = None,
        unfinished: bool = False,
    ) -> Inode:
        _check_place(parent, name)
        if (ino := self._requests.outcome(caller.request)) is not None:
            return await self._again(ino)
        directory = self._inodes.cached(parent) or await self._inodes.get(parent)
        gid = caller.gid
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        new = NewInode(mode, caller.uid, gid, rdev, time.time_ns(), target, layout, unfinished)

        def made(ino: int) -> Inode:
            inode = self._inodes.get_or_insert(_row_of(ino, parent, new))
            inode.lookups += 1
            self._inodes.count += 1
            self._inodes.names_changed(directory, new.now_ns, nlink_change=int(inode.is_directory))
            self._inodes.directories.added(parent, name)
            if inode.is_directory:
                self._inodes.directories.listed(ino, [])
            return inode

        make = self._groups.making(
            parent,
            name,
            lambda t: dirents.make(t, parent, name, new),
            is_directory=stat.S_ISDIR(mode),
        )
        recording = self._requests.recording(caller.request, make)
        return await self._write(recording, apply=made)

    async def _write(
        self, operation: Callable[[Transaction], Result], *, apply: Callable[[Result], Applied]
    ) -> Applied:
        """Run a transaction that needs space; former versions give way to it."""
        while True:
            try:
                return await self._catalog.write(operation, apply=apply)
            except NoSpace:
                if not await self._commit.make_room():
                    raise

    async def _again(self, ino: int) -> Inode:
        """The inode that a request came to whose answer the kernel did not get."""
        inode = await self._inodes.get(ino)
        inode.lookups += 1
        return inode

    async def link(self, ino: int, parent: int, name: bytes, *, request: int = 0) -> Inode:
        """Give an inode another name; returns it with one more kernel reference.

        Raises `EntryExists`, `NotPermitted`, `TooManyLinks`, `NoSuchEntry`, `NameTooLong`.
        """
        _check_place(parent, name)
        if self._requests.outcome(request) is not None:
            return await self._again(ino)
        inode = await self._inodes.get(ino)
        inode.refuse_change()
        directory = await self._inodes.get(parent)
        now_ns = time.time_ns()

        def linked(_done: None) -> Inode:
            inode.nlink += 1
            inode.lookups += 1
            self._inodes.changed(inode, ctime_ns=now_ns)
            self._inodes.directories.added(parent, name)
            self._inodes.names_changed(directory, now_ns)
            return inode

        link = self._groups.making(
            parent, name, lambda t: dirents.link(t, ino, parent, name, now_ns=now_ns)
        )
        return await self._write(self._requests.recording(request, link), apply=linked)

    async def unlink(self, parent: int, name: bytes, *, request: int = 0) -> None:
        """Remove a name of anything but a directory.

        Raises `NoSuchEntry`, `IsADirectory`, `NameTooLong`. The inode goes when nothing uses it.
        """
        _check_place(parent, name)
        if self._requests.outcome(request) is not None:
            return
        await self._remove(parent, name, dirents.unlink, directory_nlink_change=0, request=request)

    async def remove_directory(self, parent: int, name: bytes, *, request: int = 0) -> None:
        """Remove an empty directory.

        Raises `NoSuchEntry`, `NotADirectory`, `DirectoryNotEmpty`, `NameTooLong`.
        """
        _check_place(parent, name)
        if self._requests.outcome(request) is not None:
            return
        is_final = await self._groups.wait_removable(parent, name)
        await self._remove(
            parent,
            name,
            dirents.remove_directory,
            directory_nlink_change=-1,
            request=request,
            is_final=is_final,
        )

    async def _remove(
        self,
        parent: int,
        name: bytes,
        remove: Callable[..., Removed],
        *,
        directory_nlink_change: int,
        request: int,
        is_final: bool = False,
    ) -> None:
        """Remove a name by a function of `rows.dirents`; the inode goes when nothing uses it.

        `is_final`: power loss is not to bring it back, whatever was closed before.
        """
        directory = await self._inodes.get(parent)
        now_ns = time.time_ns()

        def removed_name(removed: Removed) -> Removed:
            self._inodes.names_changed(directory, now_ns, nlink_change=directory_nlink_change)
            self._inodes.directories.removed(parent, name)
            self._lost_name(removed, now_ns)
            if inode is not None and inode.ino == removed.ino:
                self._commit.name_removed(inode, mark=mark)
            return removed

        inode, mark = (None, 0) if is_final else await self._removal_mark(parent, name)
        changed: list[Changed] = []

        def on_removed(transaction: Transaction, entry: Name) -> None:
            changed[:] = [self._versions.of_removed(transaction, parent, name)]
            if mark:
                deferred_unlink.defer(transaction, parent, name, entry, mark=mark)

        recording = self._requests.recording(
            request,
            self._groups.removing(
                parent,
                name,
                lambda t: remove(t, parent, name, now_ns=now_ns, on_removed=on_removed),
            ),
        )
        try:
            removed = await self._catalog.write_urgently(recording, apply=removed_name)
            if mark:
                await self._commit.release_deferred_unlinks()
        finally:
            if inode is not None:
                self._inodes.release(inode)
        await self._versions.apply(changed)
        await self._delete_if_unused(removed)

    async def _removal_mark(self, parent: int, name: bytes) -> tuple[Inode | None, int]:
        """The version that the removal of a name has to wait for, if any, and the inode, in use."""
        if self._commit.all_current:
            return None, 0
        row = await self._catalog.read(lambda t: dirents.look_up(t, parent, name))
        if row is None:
            return None, 0
        inode = self._inodes.get_or_insert(row)
        mark = self._commit.removal_mark(inode, committed_bytes=row.size)
        if not mark:
            self._inodes.drop_if_unused(inode)
            return None, 0
        inode.users += 1
        return inode, mark

    async def rename(
        self,
        source: tuple[int, bytes],
        destination: tuple[int, bytes],
        mode: RenameMode,
        *,
        request: int = 0,
    ) -> None:
        """Move a name; each place is (directory, name). Meanings and errors as renameat2(2).

        Waits until what was closed before, and pending content of what moves, is on the devices
        and current.
        """
        _check_place(*source)
        _check_place(*destination)
        if self._requests.outcome(request) is not None:
            return
        await self._commit_pending(*source)
        if mode is RenameMode.EXCHANGE:
            await self._commit_pending(*destination)
        from_directory = await self._inodes.get(source[0])
        to_directory = await self._inodes.get(destination[0])
        now_ns = time.time_ns()

        def renamed(done: Renamed) -> Renamed:
            if done.unchanged:
                return done
            self._renamed(done, from_directory, to_directory, now_ns)
            self._inodes.directories.added(*destination)
            if mode is not RenameMode.EXCHANGE:
                self._inodes.directories.removed(*source)
            return done

        changed: list[Changed] = []

        def replaces(transaction: Transaction, entry: Name) -> None:
            # What the name brings along was replaced before.
            changed.append(self._versions.of_moved(transaction, source, destination))
            changed.append(self._versions.of_replaced(transaction, *destination, entry))

        def rename(transaction: Transaction) -> Renamed:
            changed.clear()
            done = dirents.rename(
                transaction,
                source,
                destination,
                mode=mode,
                now_ns=now_ns,
                on_removed=replaces,
            )
            if mode is not RenameMode.EXCHANGE and not done.unchanged:
                changed.append(self._versions.of_moved(transaction, source, destination))
            return done

        renaming = self._groups.renaming(source, destination, rename)
        recording = self._requests.recording(request, renaming)
        done = await self._write(recording, apply=renamed)
        await self._groups.delete_freed(done.freed)
        await self._versions.apply(changed)
        if done.replaced is not None:
            await self._delete_if_unused(done.replaced)

    async def _commit_pending(self, parent: int, name: bytes) -> None:
        """Make content current that is renamed before it is committed.

        Raises the OSError of content that cannot be kept: what it would replace stays.
        """
        if self._commit.all_current and not self._files.writers:
            return
        row = await self._catalog.read(lambda t: dirents.look_up(t, parent, name))
        inode = None if row is None else self._inodes.cached(row.ino)
        if inode is not None and inode.is_regular:
            await self._commit.make_current(inode)
        elif row is not None:
            await self._commit.make_current_below(row.ino)
        # Whatever moves, a pointer or a folder, is not seen without what was closed before.
        await self._commit.wait_queued()

    def _renamed(
        self, done: Renamed, from_directory: Inode, to_directory: Inode, now_ns: int
    ) -> None:
        """Change the inodes in memory as the catalog's rename did."""
        self._moved(done.moved, done.moved_is_directory, from_directory, to_directory, now_ns)
        if done.exchanged is not None:
            self._moved(
                done.exchanged, done.other_is_directory, to_directory, from_directory, now_ns
            )
        if done.replaced is not None:
            if done.other_is_directory:
                to_directory.nlink -= 1
            self._lost_name(done.replaced, now_ns)
        self._inodes.names_changed(from_directory, now_ns)
        self._inodes.names_changed(to_directory, now_ns)

    def _moved(
        self, ino: int, is_directory: bool, origin: Inode, directory: Inode, now_ns: int
    ) -> None:
        """Account for one inode that went from one directory to another."""
        if is_directory and origin is not directory:
            origin.nlink -= 1
            directory.nlink += 1
        inode = self._inodes.cached(ino)
        if inode is not None:
            self._inodes.changed(inode, ctime_ns=now_ns)
            if is_directory:
                inode.parent = directory.ino

    def _lost_name(self, removed: Removed, now_ns: int) -> None:
        """Account for a removed name."""
        inode = self._inodes.cached(removed.ino)
        if inode is not None:
            inode.nlink = removed.nlink
            self._inodes.changed(inode, ctime_ns=now_ns)

    async def _delete_if_unused(self, removed: Removed) -> None:
        """Delete an inode without a name if nothing uses it nor the kernel knows it.

        The kernel forgets it after the answer, and its space comes back a moment later. On a device
        without room for as much again, that moment would let a write fail right after the removal
        that made room for it: there the answer waits until the space is back.
        """
        await self._groups.delete_freed(removed.freed)
        if removed.nlink:
            return
        inode = await self._inodes.get(removed.ino)
        self._inodes.drop_if_unused(inode)
        holds_space = inode.is_regular and inode.allocated_bytes > INLINE_BYTES_MAX
        if not holds_space or inode.handles:
            return
        if await self._space.is_tight(wanted_bytes=inode.allocated_bytes):
            await self._commit.give_back(inode)


def _check_place(parent: int, name: bytes) -> None:
    """Refuse names that cannot be stored. The kernel refuses "", "." and ".."."""
    if is_view(parent):
        raise ReadOnly("names in .fpfs/versions are not to be changed")
    if len(name) > NAME_BYTES_MAX:
        raise NameTooLong(f"name of {len(name)} bytes, at most {NAME_BYTES_MAX} are possible")


def _row_of(ino: int, parent: int, new: NewInode) -> InodeRow:
    """Return the row that `rows.dirents.make` wrote."""
    is_directory = stat.S_ISDIR(new.mode)
    return InodeRow(
        ino=ino,
        mode=new.mode,
        uid=new.uid,
        gid=new.gid,
        nlink=2 if is_directory else 1,
        size=len(new.target or b""),
        allocated_bytes=0,
        atime_ns=new.now_ns,
        mtime_ns=new.now_ns,
        ctime_ns=new.now_ns,
        rdev=new.rdev,
        parent=parent if is_directory else 0,
        layout=new.layout,
        unfinished=new.unfinished,
        kept=0,
        has_xattrs=False,
    )
