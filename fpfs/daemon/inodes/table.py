"""Inodes in memory: attributes of what the kernel knows, and who uses them.

Invariants:
  * What the channel says of a directory is what is in memory: whoever changes a directory's
    attributes calls `changed`, `names_changed` or `tell_channel` before the next await.
  * An inode is in the table while the kernel holds references to it (`lookups`) or anything here
    uses it (`users`: open handles, queued commits, operations under way). The root always is.
  * What the catalog holds is applied to the table in the catalog's order (`apply` functions), so
    the two agree. Size and times of a loaded inode are the engine's; `refresh` copies them.
  * `unload` and deletion happen when `users` is 0 only; `lock` is held from the start of a drain
    until its version is committed or given up, and around every truncation.

Concurrency: trio thread only. Methods that are not coroutines are atomic for other tasks.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import stat
from typing import TYPE_CHECKING

import trio

from fpfs.core.engine import KnownDirectories
from fpfs.core.errors import DamagedData, ReadOnly
from fpfs.core.placement import decode_layout
from fpfs.core.policy import Acknowledge
from fpfs.daemon.catalog.rows.attributes import InodeRow, fetch_inode
from fpfs.daemon.catalog.rows.extents import Content, fetch_content
from fpfs.daemon.catalog.rows.versions import fetch_view
from fpfs.daemon.catalog.schema import ROOT_INO, VIEW_BASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog

KERNEL_CACHE_S = 86_400
"""How long the kernel may keep names and attributes: all changes go through this mount."""

NAMES_MAX = 100_000
"""Names in all sets of known names, about 10 MiB."""

NAMES_LISTED_MAX = 1024
"""Names of a directory that are worth reading to answer the lookups that follow."""

MODE_END = 1 << 16
"""Modes are smaller."""

LOOKUPS_UNKNOWN = 1 << 62
"""References that the kernel may hold since before this process served it."""

EMPTY = Content(b"", [])
"""The content of a file without size and without preallocated space: not worth a query."""

log = logging.getLogger(__name__)


class Pages(enum.Enum):
    """What the kernel's page cache may have of a file."""

    NONE = "none"
    CURRENT = "current"
    """Pages that show the content as it is."""
    FORMER = "former"
    """Pages that may show what the content was."""


class Inode:
    """One inode: stored attributes, and counts of who refers to it."""

    __slots__ = (
        "_lock",
        "ack",
        "allocated_bytes",
        "atime_ns",
        "ctime_ns",
        "deferred_unlinks",
        "gid",
        "handles",
        "has_xattrs",
        "ino",
        "kept",
        "killed_by",
        "layout",
        "lookups",
        "mode",
        "mtime_ns",
        "nlink",
        "pages",
        "parent",
        "pending",
        "rdev",
        "size",
        "stale",
        "synced",
        "uid",
        "unfinished",
        "users",
        "writers",
    )

    def __init__(self, row: InodeRow) -> None:
        """Take the attributes of a stored inode."""
        self.ino = row.ino
        self.mode = row.mode
        self.uid = row.uid
        self.gid = row.gid
        self.nlink = row.nlink
        self.size = row.size
        self.allocated_bytes = row.allocated_bytes
        self.atime_ns = row.atime_ns
        self.mtime_ns = row.mtime_ns
        self.ctime_ns = row.ctime_ns
        self.rdev = row.rdev
        self.parent = row.parent
        self.layout = row.layout
        self.has_xattrs = bool(row.has_xattrs)
        self.kept = bool(row.kept)
        """Whether it is a former version, which does not change any more."""
        self.unfinished = bool(row.unfinished)
        """Whether it was made under an all-or-nothing name, and never closed."""
        self.ack = Acknowledge.EARLY
        """When who writes to it is answered; as its policy had it when it was last opened."""
        self.deferred_unlinks = 0
        """Names that were removed and would come back after power loss."""
        self.lookups = 0
        self.handles = 0
        self.writers = 0
        self.users = 0
        self.pending = 0
        """Commits of this inode that are queued or under way."""
        self.pages = Pages.FORMER
        """What the kernel may have of it."""
        self.killed_by = 0
        """The signal that ended the writer of the last content that is not committed, or 0."""
        self.stale = False
        """Whether its names were removed behind the kernel's back, which may still ask by them."""
        self.synced = False
        """Whether its committed content was synced in the middle of being written."""
        self._lock: trio.Semaphore | None = None

    @property
    def lock(self) -> trio.Semaphore:
        """What drains and truncations of the content take turns with."""
        if self._lock is None:
            self._lock = trio.Semaphore(1, max_value=1)
        return self._lock

    def drop_lock(self) -> None:
        """Forget the lock, which is larger than the rest, of an inode that nobody uses."""
        assert self._lock is None or self._lock.value == 1, "nobody holds or awaits the lock"
        self._lock = None

    def refuse_change(self) -> None:
        """Raise `ReadOnly` for a former version, and for a view of some."""
        if self.kept:
            raise ReadOnly(f"inode {self.ino} is a former version, which does not change")

    @property
    def is_directory(self) -> bool:
        """Whether this is a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_regular(self) -> bool:
        """Whether this is a regular file, which alone has content in the engine."""
        return stat.S_ISREG(self.mode)

    @property
    def has_privileges(self) -> bool:
        """Whether `drop_privileges` has anything to clear."""
        is_setgid = bool(self.mode & stat.S_ISGID and self.mode & stat.S_IXGRP)
        return is_setgid or bool(self.mode & stat.S_ISUID)

    def drop_privileges(self) -> None:
        """Clear set-uid, and set-gid where the group may execute, as the catalog does it."""
        self.mode &= ~stat.S_ISUID
        if self.mode & stat.S_IXGRP:
            self.mode &= ~stat.S_ISGID


class InodeTable:
    """All inodes in memory."""

    def __init__(self, *, catalog: Catalog, engine: Engine) -> None:
        """Start empty."""
        self._catalog = catalog
        self._engine = engine
        self._inodes: dict[int, Inode] = {}
        self._on_removable: Callable[[Inode], None] | None = None
        self.directories = KnownDirectories(
            names_max=NAMES_MAX, listed_max=NAMES_LISTED_MAX, valid_s=KERNEL_CACHE_S
        )
        """Names and attributes that the channel answers for. A directory's set of names, when there
        is one, is complete as of the last transaction that was delivered."""
        self.lookups_known = True
        """Whether this process has counted the kernel's references from the start."""
        self.count = catalog.inode_count_at_open
        """Inodes of the filesystem, in memory or not."""

    def on_removable(self, remove: Callable[[Inode], None]) -> None:
        """Register what deletes an inode that has no name, no user and no reference left."""
        self._on_removable = remove

    def __len__(self) -> int:
        """Return how many inodes are in memory."""
        return len(self._inodes)

    def __iter__(self) -> Iterator[Inode]:
        """Iterate over a copy: the table may change meanwhile."""
        return iter(list(self._inodes.values()))

    def cached(self, ino: int) -> Inode | None:
        """Return an inode if it is in memory."""
        return self._inodes.get(ino)

    def get_or_insert(self, row: InodeRow) -> Inode:
        """Return the inode of a row just read or written; one in memory knows as much or more.

        Raises `DamagedData` for a mode that cannot be.
        """
        inode = self._inodes.get(row.ino)
        if inode is None:
            if not 0 <= row.mode < MODE_END:
                raise DamagedData(f"inode {row.ino} has the mode {row.mode}: run fpfs fsck")
            inode = self._inodes[row.ino] = Inode(row)
            if self.lookups_known:
                # It has pages only of an inode that it refers to.
                inode.pages = Pages.NONE
        return inode

    async def get(self, ino: int) -> Inode:
        """Return an inode, from the catalog if need be; `NoSuchEntry` when there is none.

        The caller holds a reference of the kernel or takes `users` before its next await.
        """
        inode = self._inodes.get(ino)
        if inode is not None:
            return inode
        fetch = fetch_view if ino >= VIEW_BASE else fetch_inode
        return await self._catalog.read(lambda t: fetch(t, ino), apply=self.get_or_insert)

    def refresh(self, inode: Inode) -> bool:
        """Copy size and times of a loaded inode from the engine; returns whether it is dirty."""
        if not inode.is_regular or not self._engine.loaded(inode.ino):
            return False
        attributes = self._engine.attributes(inode.ino)
        inode.size = attributes.size
        inode.allocated_bytes = attributes.allocated_bytes
        inode.mtime_ns = attributes.mtime_ns
        inode.ctime_ns = attributes.ctime_ns
        if attributes.privileges_dropped:
            inode.drop_privileges()
        return attributes.dirty

    def changed(self, inode: Inode, *, ctime_ns: int, mtime_ns: int | None = None) -> None:
        """Set times after a change of the inode, in the engine too if it is loaded."""
        inode.ctime_ns = ctime_ns
        if mtime_ns is not None:
            inode.mtime_ns = mtime_ns
        if inode.is_regular and self._engine.loaded(inode.ino):
            self._engine.set_times(inode.ino, mtime_ns=mtime_ns, ctime_ns=ctime_ns)
        self.tell_channel(inode)

    @contextlib.contextmanager
    def changing(
        self, inode: Inode, *, ctime_ns: int, mtime_ns: int | None = None
    ) -> Iterator[None]:
        """Set times around the transaction that stores them; one that fails puts them back.

        They are set before it, in the same step as its queueing: a commit that is queued behind
        takes its times from the engine.
        """
        self.refresh(inode)
        before = inode.ctime_ns, inode.mtime_ns
        self.changed(inode, ctime_ns=ctime_ns, mtime_ns=mtime_ns)
        try:
            yield
        except BaseException:
            self.refresh(inode)
            if inode.ctime_ns == ctime_ns:  # a write that came meanwhile has set its own
                self.changed(inode, ctime_ns=before[0], mtime_ns=before[1])
            raise

    def privileges_dropped(self, inode: Inode) -> bool:
        """Whether a write ended privileges, capabilities among them, that the catalog has yet."""
        loaded = inode.is_regular and self._engine.loaded(inode.ino)
        return loaded and self._engine.attributes(inode.ino).privileges_dropped

    @contextlib.contextmanager
    def storing_privileges(self, inode: Inode) -> Iterator[bool]:
        """Tell whether a write dropped privileges that the catalog has, which is to store it.

        The engine forgets it around the transaction, so that a commit behind it does not drop what
        is set now; if the transaction fails, the engine knows it again.
        """
        were_dropped = self.privileges_dropped(inode)
        if were_dropped:
            inode.drop_privileges()
            self._engine.privileges_restored(inode.ino)
        try:
            yield were_dropped
        except BaseException:
            if were_dropped and self._engine.loaded(inode.ino):
                self._engine.drop_privileges(inode.ino)
            raise

    def names_changed(self, directory: Inode, now_ns: int, *, nlink_change: int = 0) -> None:
        """Change a directory as a transaction on its names did."""
        directory.nlink += nlink_change
        self.changed(directory, ctime_ns=now_ns, mtime_ns=now_ns)

    def answer_for(self, inode: Inode) -> None:
        """Let the channel answer for a directory's attributes from now on."""
        if inode.is_directory and not inode.kept:
            self.directories.set_attributes(
                ino=inode.ino,
                mode=inode.mode,
                nlink=inode.nlink,
                uid=inode.uid,
                gid=inode.gid,
                atime_ns=inode.atime_ns,
                mtime_ns=inode.mtime_ns,
                ctime_ns=inode.ctime_ns,
            )

    def tell_channel(self, inode: Inode) -> None:
        """Keep what the channel answers true after attributes of an inode changed."""
        if inode.is_directory and self.directories.has_attributes(inode.ino):
            self.answer_for(inode)

    async def load(self, inode: Inode) -> None:
        """Make a regular file's committed content known to the engine.

        The caller counts among `users`. `DamagedData` when it cannot be trusted.
        """
        if self._engine.loaded(inode.ino):
            return
        if inode.size or inode.allocated_bytes:
            # In the catalog's order: who moves blocks tells it to what is loaded by then.
            await self._catalog.read(
                lambda t: fetch_content(t, inode.ino),
                apply=lambda content: self._load_content(inode, content),
            )
        else:
            self._load_content(inode, EMPTY)

    def _load_content(self, inode: Inode, content: Content) -> None:
        if self._engine.loaded(inode.ino):
            return
        self._engine.load(
            inode.ino,
            size=inode.size,
            mtime_ns=inode.mtime_ns,
            ctime_ns=inode.ctime_ns,
            inline=content.inline,
            segments=content.segments,
            layout=decode_layout(inode.layout),
        )

    def release(self, inode: Inode) -> None:
        """Give up one use; the last one drops the inode where nothing else keeps it."""
        inode.users -= 1
        if inode.users == 0:
            inode.drop_lock()
            self.drop_if_unused(inode)

    def forget(self, ino: int, lookups: int) -> None:
        """Take references of the kernel back."""
        inode = self._inodes.get(ino)
        if inode is None:
            return
        if inode.lookups == LOOKUPS_UNKNOWN:
            lookups = inode.lookups  # the kernel forgets all that it ever took
        elif lookups > inode.lookups and self.lookups_known:
            # The kernel's count is the one that holds; the filesystem must not end for it.
            log.error("inode %d forgotten %d times, known %d times", ino, lookups, inode.lookups)
        inode.lookups = max(inode.lookups - lookups, 0)
        if inode.lookups == 0:
            self.drop_if_unused(inode)

    def drop_if_unused(self, inode: Inode) -> None:
        """Unload, delete or drop an inode, as far as nothing keeps it."""
        if inode.users:
            return
        if inode.nlink == 0:
            if inode.lookups == 0 and self._on_removable is not None:
                self._on_removable(inode)
            return
        if inode.is_regular and self._engine.loaded(inode.ino):
            if self.refresh(inode):
                return
            self._engine.unload(inode.ino)
        if inode.lookups == 0 and inode.ino != ROOT_INO:
            self._drop(inode)

    def reverted(self, inode: Inode) -> None:
        """Follow an engine that went back to the committed content."""
        # The kernel has been told, and may not have heard yet.
        inode.pages = Pages.FORMER
        self.refresh(inode)

    def removed(self, inode: Inode) -> None:
        """Drop an inode that was deleted from the catalog."""
        self._drop(inode)
        self.count -= 1

    def _drop(self, inode: Inode) -> None:
        self._inodes.pop(inode.ino, None)
        if inode.is_directory:
            self.directories.forget(inode.ino)
