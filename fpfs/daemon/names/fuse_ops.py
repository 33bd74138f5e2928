"""Operations: FUSE requests, as pyfuse3 hands them over, turned into calls of the namespace.

Nothing is decided here. READ, WRITE, RELEASE, FALLOCATE, LSEEK and COPY_FILE_RANGE are answered by
the native channel and never arrive; ACCESS is the kernel's own under default_permissions.

Invariants:
  * An error becomes a FUSEError here and nowhere else. One that the world explains (a name that
    does not exist) is the caller's business; anything else is logged once, with the operation, the
    inode and the cause, and answered with EIO.
  * A request finds done what the kernel asked for before it, also what the channel has answered:
    `handler` lets the namespace catch up first.
  * All changes go through this mount, so the kernel may keep names and attributes, also of names
    that do not exist, until it is told otherwise. LOOKUP and GETATTR arrive only when the channel
    does not know the answer (see `inodes.table`).

Concurrency: coroutines on the trio thread; requests overlap.
"""

# pyfuse3 fixes the parameters of its handlers, also of those that some do not need.
# ruff: noqa: ARG002

from __future__ import annotations

import errno
import functools
import logging
import os
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError

from fpfs.core.engine import BLOCK_BYTES
from fpfs.core.errors import FpfsError
from fpfs.daemon.catalog.rows.attributes import Changes
from fpfs.daemon.catalog.rows.dirents import RenameMode
from fpfs.daemon.catalog.rows.versions import is_view
from fpfs.daemon.inodes.table import KERNEL_CACHE_S
from fpfs.daemon.names.entries import Caller
from fpfs.daemon.names.open_files import ContentError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fpfs.daemon.inodes.table import Inode
    from fpfs.daemon.names.namespace import Namespace
    from fpfs.daemon.names.open_dirs import Listed
    from fpfs.daemon.names.open_files import Opened

log = logging.getLogger(__name__)

EXPECTED = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINVAL, errno.EBADF, errno.EROFS}
)
"""Errors besides those of names that need no line in the log: the caller has them."""

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")


def handler(
    function: Callable[Concatenate[Operations, Parameters], Awaitable[Answer]],
) -> Callable[Concatenate[Operations, Parameters], Awaitable[Answer]]:
    """Run a request handler in its turn, and make FUSE errors of its errors."""
    name = function.__name__

    @functools.wraps(function)
    async def guarded(
        self: Operations, /, *arguments: Parameters.args, **keywords: Parameters.kwargs
    ) -> Answer:
        try:
            self.catch_up()
            return await function(self, *arguments, **keywords)
        except FUSEError:
            raise
        except Exception as error:  # noqa: BLE001 - every request gets an answer
            raise FUSEError(_answer_to(error, name, arguments[0] if arguments else 0)) from None

    return guarded


def _answer_to(error: Exception, operation: str, subject: object) -> int:
    """Return the errno for an error, after logging it if somebody should look at it."""
    code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    if isinstance(error, FpfsError) and code != errno.EIO:
        return code
    if code in EXPECTED or isinstance(error, ContentError):
        return code
    # Only what is no OSError is a bug, which needs its stack.
    trace = None if isinstance(error, OSError) else error
    log.error("%s of inode or handle %s failed: %s", operation, subject, error, exc_info=trace)
    return code


def _caller(context: pyfuse3.RequestContext) -> Caller:
    return Caller(context.uid, context.gid, _request(context))


def _request(context: pyfuse3.RequestContext) -> int:
    """The request's number, which the channel has put where the caller's pid was."""
    number: int = context.pid
    return number


def _attributes_of(inode: Inode) -> EntryAttributes:
    """Return what the kernel learns of an inode."""
    entry = EntryAttributes()
    entry.st_ino = inode.ino
    entry.st_mode = inode.mode
    entry.st_nlink = inode.nlink
    entry.st_uid = inode.uid
    entry.st_gid = inode.gid
    entry.st_rdev = inode.rdev
    entry.st_size = inode.size
    entry.st_blksize = BLOCK_BYTES
    entry.st_blocks = (inode.allocated_bytes + 511) // 512
    entry.st_atime_ns = inode.atime_ns
    entry.st_mtime_ns = inode.mtime_ns
    entry.st_ctime_ns = inode.ctime_ns
    # A former version goes, and another comes, without the kernel's doing. So does what a killed
    # writer left; who looks that up may take the answer into the kernel's memory after the kernel
    # was told to forget it.
    may_be_kept = not inode.kept and not inode.killed_by
    entry.entry_timeout = entry.attr_timeout = float(KERNEL_CACHE_S) if may_be_kept else 0.0
    return entry


def _no_entry(parent: int) -> EntryAttributes:
    """Return what tells the kernel to remember that a name does not exist."""
    entry = EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = 0.0 if is_view(parent) else float(KERNEL_CACHE_S)
    return entry


def _file_info(opened: Opened) -> FileInfo:
    return FileInfo(fh=opened.handle, keep_cache=opened.keep_cache)


def _changes(entry: EntryAttributes, fields: pyfuse3.SetattrFields) -> tuple[Changes, int | None]:
    """Return the attributes that a SETATTR sets, and the size it sets."""
    changes = Changes(
        permissions=entry.st_mode & 0o7777 if fields.update_mode else None,
        uid=entry.st_uid if fields.update_uid else None,
        gid=entry.st_gid if fields.update_gid else None,
        atime_ns=entry.st_atime_ns if fields.update_atime else None,
        mtime_ns=entry.st_mtime_ns if fields.update_mtime else None,
    )
    return changes, entry.st_size if fields.update_size else None


_RENAME_MODES = {
    0: RenameMode.REPLACE,
    pyfuse3.RENAME_NOREPLACE: RenameMode.NO_REPLACE,
    pyfuse3.RENAME_EXCHANGE: RenameMode.EXCHANGE,
}


class Operations(pyfuse3.Operations):  # type: ignore[misc]
    """Handlers of requests; each is one call of the namespace."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    # Access control lists are not kept (see `namespace`), so the kernel must not look for them.
    enable_acl = False

    def __init__(self, namespace: Namespace) -> None:
        """Serve a namespace."""
        super().__init__()
        self._namespace = namespace
        self.catch_up = namespace.catch_up

    @handler
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        """Find a name; one that does not exist is remembered by the kernel too."""
        inode = await self._namespace.look_up(parent_inode, name)
        if inode is None:
            return _no_entry(parent_inode)
        self._namespace.refresh(inode)
        return _attributes_of(inode)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Take kernel references back. There is nobody to tell of an error."""
        for ino, lookups in inode_list:
            self._namespace.forget(ino, lookups)

    @handler
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        """Return attributes."""
        return _attributes_of(await self._namespace.get_attributes(inode))

    @handler
    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> EntryAttributes:
        """Change attributes, the size among them."""
        changes, size = _changes(attr, fields)
        changed = await self._namespace.set_attributes(
            inode, changes, size=size, caller=_caller(ctx)
        )
        return _attributes_of(changed)

    @handler
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        """Return a symbolic link's target."""
        return await self._namespace.read_link(inode)

    @handler
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        """Make a file, fifo, socket or device node."""
        made = await self._namespace.entries.make_node(
            parent_inode, name, mode=mode, rdev=rdev, caller=_caller(ctx)
        )
        return _attributes_of(made)

    @handler
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        """Make a directory."""
        made = await self._namespace.entries.make_directory(
            parent_inode, name, mode=mode, caller=_caller(ctx)
        )
        return _attributes_of(made)

    @handler
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        """Make a symbolic link."""
        made = await self._namespace.entries.make_symlink(
            parent_inode, name, target=target, caller=_caller(ctx)
        )
        return _attributes_of(made)

    @handler
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> EntryAttributes:
        """Give an inode another name."""
        linked = await self._namespace.entries.link(
            inode, new_parent_inode, new_name, request=_request(ctx)
        )
        self._namespace.refresh(linked)
        return _attributes_of(linked)

    @handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove a name."""
        await self._namespace.entries.unlink(parent_inode, name, request=_request(ctx))

    @handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an empty directory."""
        await self._namespace.entries.remove_directory(parent_inode, name, request=_request(ctx))

    @handler
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        """Move a name."""
        mode = _RENAME_MODES.get(flags)
        if mode is None:
            raise FUSEError(errno.EINVAL)
        await self._namespace.entries.rename(
            (parent_inode_old, name_old),
            (parent_inode_new, name_new),
            mode,
            request=_request(ctx),
        )

    @handler
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        """Make and open a regular file."""
        made, opened = await self._namespace.entries.create(
            parent_inode,
            name,
            mode=mode,
            flags=flags,
            exclusive=bool(flags & os.O_EXCL),
            caller=_caller(ctx),
        )
        self._namespace.refresh(made)
        return _file_info(opened), _attributes_of(made)

    @handler
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> FileInfo:
        """Open a regular file; O_TRUNC comes along (FUSE_ATOMIC_O_TRUNC)."""
        opened = await self._namespace.open_file(inode, flags=flags, caller=_caller(ctx))
        return _file_info(opened)

    @handler
    async def flush(self, fh: int) -> None:
        """Answer a close(2)."""
        await self._namespace.files.flush(fh)

    @handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Make a file durable; its data cannot be found without its attributes, so both."""
        await self._namespace.files.sync(fh)

    @handler
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        """Open a directory."""
        return await self._namespace.directories.open(inode, request=_request(ctx))

    @handler
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """List a directory, as much as the reply can hold."""

        def emit(entry: Listed) -> bool:
            attributes = _attributes_of(entry.inode)
            reply: bool = pyfuse3.readdir_reply(token, entry.name, attributes, entry.offset)
            return reply

        await self._namespace.directories.read(fh, start_id, emit)

    @handler
    async def releasedir(self, fh: int) -> None:
        """Forget a directory handle."""
        self._namespace.directories.release(fh)

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Make a directory durable."""
        await self._namespace.directories.sync(fh)

    @handler
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Return size and free space."""
        space = await self._namespace.measure_space()
        figures = pyfuse3.StatvfsData()
        figures.f_bsize = figures.f_frsize = space.block_bytes
        figures.f_blocks = space.blocks
        figures.f_bfree = space.blocks_free
        figures.f_bavail = space.blocks_available
        figures.f_files = space.inodes
        figures.f_ffree = figures.f_favail = space.inodes_free
        figures.f_namemax = space.name_bytes_max
        return figures

    @handler
    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        """Set an extended attribute; pyfuse3 looks after XATTR_CREATE and XATTR_REPLACE."""
        await self._namespace.xattrs.set(inode, name, value, request=_request(ctx))

    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        """Return an extended attribute."""
        return await self._namespace.xattrs.get(inode, name, request=_request(ctx))

    @handler
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        """Return the names of extended attributes."""
        return await self._namespace.xattrs.names(inode)

    @handler
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        """Remove an extended attribute."""
        await self._namespace.xattrs.remove(inode, name, request=_request(ctx))
