"""The namespace: what the filesystem's names and attributes mean, for a front end to serve.

This module has lookup, attributes and space; the parts of a `Namespace` have the rest: `entries`
(make, link, remove, rename), `files` (open files), `directories` (listing), `xattrs`, `statuses`.

The front end is the kernel, with default_permissions: it has checked permission bits, ownership
rules of chmod, chown and utimens, sticky directories, loops and mount boundaries, applied the umask
and removed set-gid where it must, before a request comes here. What depends on stored state is done
here: set-gid inheritance, losing set-uid and set-gid, link counts, times, and every error that
concerns names.

Times have nanoseconds. An access time is set when an inode is made and by utimens(); reading does
not change it, as on a filesystem mounted noatime: reads never reach this module.

POSIX access control lists are not kept; their attributes (`system.*`) are refused as unsupported,
as on a filesystem mounted without them. `user.*`, `trusted.*` and `security.*` attributes are.

Concurrency: trio thread only. Operations on one directory or inode may overlap
as far as the kernel lets them; each is one transaction of the catalog.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from fpfs.core.errors import InvalidOperation, NameTooLong
from fpfs.core.limits import NAME_BYTES_MAX
from fpfs.daemon.catalog.rows.attributes import (
    Changes,
    drop_privileges,
    fetch_target,
    store_attributes,
)
from fpfs.daemon.catalog.rows.dirents import list_names, look_up
from fpfs.daemon.catalog.rows.versions import is_view, look_up_in_view
from fpfs.daemon.devices.free_space import DeviceSpace, Space
from fpfs.daemon.inodes.layout_policy import Placing
from fpfs.daemon.inodes.table import NAMES_LISTED_MAX
from fpfs.daemon.names.entries import Entries
from fpfs.daemon.names.file_status import FileStatuses
from fpfs.daemon.names.open_dirs import Directories
from fpfs.daemon.names.open_files import Files
from fpfs.daemon.names.xattrs import ExtendedAttributes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.attributes import InodeRow
    from fpfs.daemon.commit.groups import Groups
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.commit.versions import Versions
    from fpfs.daemon.inodes.policies import Policies
    from fpfs.daemon.inodes.replay_log import Requests
    from fpfs.daemon.inodes.table import Inode, InodeTable
    from fpfs.daemon.names.entries import Caller
    from fpfs.daemon.names.open_files import Opened


HANDLE_BITS = 32
"""Bits that one server's handles differ in."""


class Namespace:
    """Names and attributes of one mounted filesystem."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        inodes: InodeTable,
        commit: Commit,
        policies: Policies,
        requests: Requests,
        versions: Versions,
        groups: Groups,
        device_paths: Callable[[], Mapping[int, str]],
    ) -> None:
        """Build the parts. `device_paths` tells the device directories of now, by number."""
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self._space = DeviceSpace(device_paths, lambda: engine.statistics().kept_bytes)
        placing = Placing(catalog=catalog, engine=engine, policies=policies, space=self._space)
        # The catalog counts servers, so each has handles of its own.
        handle_first = catalog.object_base << HANDLE_BITS
        self.files = Files(
            engine=engine,
            inodes=inodes,
            commit=commit,
            versions=versions,
            placing=placing,
            handle_first=handle_first,
        )
        self.entries = Entries(
            catalog=catalog,
            inodes=inodes,
            commit=commit,
            files=self.files,
            policies=policies,
            placing=placing,
            requests=requests,
            groups=groups,
            space=self._space,
            versions=versions,
        )
        self.directories = Directories(
            catalog=catalog,
            engine=engine,
            inodes=inodes,
            commit=commit,
            handle_first=handle_first,
        )
        self.statuses = FileStatuses(catalog=catalog, engine=engine, inodes=inodes, commit=commit)
        self.xattrs = ExtendedAttributes(
            catalog=catalog, inodes=inodes, requests=requests, statuses=self.statuses
        )

    def catch_up(self) -> None:
        """Follow what the engine has answered by itself; comes before whatever happened later."""
        for handle in self.files.take_released():
            self.directories.given_up(handle)

    async def catch_up_with_kernel(self) -> None:
        """Follow also what programs did before this call and nobody has received yet.

        For what does not come through the kernel, which knows no order with what does.
        """
        await self._engine.receive_all()
        self.catch_up()

    async def look_up(self, parent: int, name: bytes) -> Inode | None:
        """Return the inode behind a name, with one more kernel reference, or None.

        Raises `NameTooLong`.
        """
        if len(name) > NAME_BYTES_MAX and not is_view(parent):
            raise NameTooLong(f"name of {len(name)} bytes, at most {NAME_BYTES_MAX} are possible")
        if name in (b".", b".."):
            inode = await self._inodes.get(parent)
            if name == b"..":
                inode = await self._inodes.get(inode.parent)
            inode.lookups += 1
            return inode
        if is_view(parent):
            return await self._catalog.read(
                lambda t: look_up_in_view(t, parent, name), apply=self._looked_up
            )
        found = await self._catalog.read(lambda t: look_up(t, parent, name), apply=self._looked_up)
        if found is None and self._inodes.directories.wants(parent):
            await self._catalog.read(
                lambda t: list_names(t, parent, count=NAMES_LISTED_MAX + 1),
                apply=lambda names: self._inodes.directories.listed(parent, names),
            )
        return found

    def _looked_up(self, row: InodeRow | None) -> Inode | None:
        if row is None:
            return None
        inode = self._inodes.get_or_insert(row)
        inode.lookups += 1
        return inode

    def forget(self, ino: int, lookups: int) -> None:
        """Take references of the kernel back."""
        self._inodes.forget(ino, lookups)

    def refresh(self, inode: Inode) -> None:
        """Bring size and times of an open inode up to date."""
        self._inodes.refresh(inode)

    async def get_attributes(self, ino: int) -> Inode:
        """Return an inode with current attributes; `NoSuchEntry` when it is gone."""
        inode = self._inodes.cached(ino) or await self._inodes.get(ino)
        self._inodes.refresh(inode)
        self._inodes.answer_for(inode)
        return inode

    async def set_attributes(
        self, ino: int, changes: Changes, *, size: int | None, caller: Caller
    ) -> Inode:
        """Change attributes, as chmod, chown, utimens and truncate do; returns the inode.

        Times that cannot be stored become the nearest that can, as on the kernel's filesystems.
        Raises `FileTooLarge`, `NoSpace`, `InvalidOperation` (a size for what has none).
        """
        inode = await self._inodes.get(ino)
        inode.refuse_change()
        if size is not None:
            await self._truncate(inode, size, caller)
        if size is None or any(change is not None for change in changes):
            await self._store(inode, changes.truncated())
        self._inodes.refresh(inode)
        return inode

    async def _truncate(self, inode: Inode, size: int, caller: Caller) -> None:
        if not inode.is_regular:
            raise InvalidOperation(f"inode {inode.ino} is no regular file and has no size")
        # First, so that no failure in between leaves what others made with these privileges.
        await self._lose_privileges(inode, caller)
        await self.files.truncate(inode, size)

    async def _lose_privileges(self, inode: Inode, caller: Caller) -> None:
        """Clear set-uid and set-gid before somebody without CAP_FSETID empties or cuts a file."""
        if caller.uid != 0 and inode.has_privileges:
            await self._catalog.write(
                lambda t: drop_privileges(t, inode.ino),
                apply=lambda _dropped: inode.drop_privileges(),
            )

    async def open_file(self, ino: int, *, flags: int, caller: Caller) -> Opened:
        """Open a regular file, truncated if the flags say so. Raises as `Files.open`."""
        inode = self._inodes.cached(ino) or await self._inodes.get(ino)
        if flags & os.O_TRUNC:
            inode.refuse_change()
            await self._lose_privileges(inode, caller)
        return await self.files.open(inode, flags=flags, request=caller.request)

    async def _store(self, inode: Inode, changes: Changes) -> None:
        """Store changed attributes, and what follows from them."""
        ino = inode.ino
        now_ns = time.time_ns()
        owner_changes = changes.uid is not None or changes.gid is not None

        def store(transaction: Transaction) -> None:
            if drops:
                drop_privileges(transaction, ino)
            store_attributes(transaction, ino, changes, ctime_ns=now_ns)

        def apply(_stored: None) -> None:
            if drops:
                inode.drop_privileges()
            _apply_changes(inode, changes)
            self._inodes.tell_channel(inode)

        with (
            self._inodes.changing(inode, ctime_ns=now_ns, mtime_ns=changes.mtime_ns),
            self._inodes.storing_privileges(inode) as were_dropped,
        ):
            drops = were_dropped or (owner_changes and not inode.is_directory)
            await self._catalog.write(store, apply=apply)

    async def read_link(self, ino: int) -> bytes:
        """Return a symbolic link's target; `NoSuchEntry` when there is no such link."""
        return await self._catalog.read(lambda t: fetch_target(t, ino))

    async def measure_space(self) -> Space:
        """Return size and free space, for statfs."""
        return await self._space.measure(inode_count=self._inodes.count)

    def close(self) -> None:
        """Release what the kernel, which is gone, still held; `Commit.flush_all` comes after."""
        self.files.close()
        self.directories.close()
        for inode in self._inodes:
            self._inodes.forget(inode.ino, inode.lookups)


def _apply_changes(inode: Inode, changes: Changes) -> None:
    """Change an inode in memory as `store_attributes` did in the catalog."""
    if changes.permissions is not None:
        inode.mode = inode.mode & ~0o7777 | changes.permissions
    if changes.uid is not None:
        inode.uid = changes.uid
    if changes.gid is not None:
        inode.gid = changes.gid
    if changes.atime_ns is not None:
        inode.atime_ns = changes.atime_ns
