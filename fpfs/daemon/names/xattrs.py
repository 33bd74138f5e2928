"""Extended attributes: `user.*`, `trusted.*` and `security.*` are kept, all others are refused.

The kernel has checked who may see and set which namespace, and on which types of inode. `system.*`
holds POSIX access control lists, which fpfs does not evaluate: keeping what is not obeyed would
promise a protection that is not there. A change of content or owner that ends privileges removes
`security.capability` with them.

What begins with `user.fpfs.` is what `fpfs-ctl stat` shows (`FileStatus`), made up when it is asked
for. It is not listed, as such attributes of other filesystems are not, so that who copies all
attributes of a file does not try to set these at the copy; nobody can set or remove one.

Concurrency: trio thread only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fpfs.core.errors import (
    InvalidOperation,
    NameTooLong,
    NoAttribute,
    NotPermitted,
    Unsupported,
    ValueTooLarge,
)
from fpfs.core.limits import XATTR_NAME_BYTES_MAX, XATTR_VALUE_BYTES_MAX
from fpfs.daemon.catalog.rows.attributes import (
    CAPABILITIES,
    drop_privileges,
    fetch_xattr,
    list_xattrs,
    remove_xattr,
    store_xattr,
)
from fpfs.daemon.catalog.rows.versions import is_view

if TYPE_CHECKING:
    from fpfs.core.protocol.reports import FileStatus
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.inodes.replay_log import Requests
    from fpfs.daemon.inodes.table import InodeTable
    from fpfs.daemon.names.file_status import FileStatuses

STATUS_PREFIX = b"user.fpfs."
"""Attributes that are made up."""

KEPT_NAMESPACES = frozenset({b"user", b"trusted", b"security"})


class ExtendedAttributes:
    """Extended attributes of inodes."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        inodes: InodeTable,
        requests: Requests,
        statuses: FileStatuses,
    ) -> None:
        """Keep what is needed."""
        self._statuses = statuses
        self._catalog = catalog
        self._requests = requests
        self._inodes = inodes

    async def get(self, ino: int, name: bytes, *, request: int = 0) -> bytes:
        """Return a value. Raises `NoAttribute`, `Unsupported`."""
        _check_name(name)
        if name.startswith(STATUS_PREFIX):
            return await self._status(ino, name)
        if self._requests.outcome(request) is not None:
            # pyfuse3 asks before it sets what must not exist: it did not, when that was done.
            raise NoAttribute(f"inode {ino} had no attribute {name!r}")
        inode = self._inodes.cached(ino) or await self._inodes.get(ino)
        if not inode.has_xattrs:
            # Asked by the kernel before writes (security.capability): without the catalog.
            raise NoAttribute(f"inode {ino} has no attribute {name!r}")
        if name == CAPABILITIES and self._inodes.privileges_dropped(inode):
            raise NoAttribute(f"inode {ino} has lost its capabilities")
        return await self._catalog.read(lambda t: fetch_xattr(t, ino, name))

    async def _status(self, ino: int, name: bytes) -> bytes:
        """Return what is known of a file. `NoAttribute` for what is not."""
        if is_view(ino):
            raise NoAttribute(f"inode {ino} is a view, of which nothing is known")
        status = await self._statuses.describe_one(ino)
        value = status_attributes(status).get(name.removeprefix(STATUS_PREFIX).decode("latin-1"))
        if value is None:
            raise NoAttribute(f"inode {ino} has no attribute {name!r}")
        return value.encode()

    async def names(self, ino: int) -> list[bytes]:
        """Return the names of an inode's attributes, without those that are made up."""
        inode = await self._inodes.get(ino)
        if not inode.has_xattrs:
            return []
        stored = await self._catalog.read(lambda t: list_xattrs(t, ino))
        if self._inodes.privileges_dropped(inode):
            stored = [name for name in stored if name != CAPABILITIES]
        # An fpfs before these were made up may have stored one.
        return [name for name in stored if not name.startswith(STATUS_PREFIX)]

    async def set(self, ino: int, name: bytes, value: bytes, *, request: int = 0) -> None:
        """Set a value. Raises `Unsupported`, `NotPermitted`, `ValueTooLarge`, `NoSpace`."""
        _check_name(name)
        _refuse_status(name)
        if len(value) > XATTR_VALUE_BYTES_MAX:
            raise ValueTooLarge(
                f"attribute value of {len(value)} bytes, at most {XATTR_VALUE_BYTES_MAX}"
            )
        inode = await self._inodes.get(ino)
        inode.refuse_change()
        now_ns = time.time_ns()

        def stored(_done: None) -> None:
            inode.has_xattrs = True

        def store_it(transaction: Transaction) -> None:
            if were_dropped:
                drop_privileges(transaction, ino)
            store_xattr(transaction, ino, name, value, ctime_ns=now_ns)

        store = self._requests.recording(request, store_it)
        with (
            self._inodes.changing(inode, ctime_ns=now_ns),
            self._inodes.storing_privileges(inode) as were_dropped,
        ):
            await self._catalog.write(store, apply=stored)

    async def remove(self, ino: int, name: bytes, *, request: int = 0) -> None:
        """Remove an attribute. Raises `NoAttribute`, `Unsupported`, `NotPermitted`."""
        _check_name(name)
        _refuse_status(name)
        if self._requests.outcome(request) is not None:
            return
        inode = await self._inodes.get(ino)
        inode.refuse_change()
        now_ns = time.time_ns()
        remove = self._requests.recording(
            request, lambda t: remove_xattr(t, ino, name, ctime_ns=now_ns)
        )
        with self._inodes.changing(inode, ctime_ns=now_ns):
            await self._catalog.write(remove)


def _check_name(name: bytes) -> None:
    """Refuse namespaces and names that are not kept."""
    namespace, _, rest = name.partition(b".")
    if namespace not in KEPT_NAMESPACES:
        raise Unsupported(f"attribute {name!r}: its namespace is not kept")
    if not rest:
        raise InvalidOperation(f"attribute {name!r} has no name behind its namespace")
    if len(name) > XATTR_NAME_BYTES_MAX:
        raise NameTooLong(f"attribute name of {len(name)} bytes, at most {XATTR_NAME_BYTES_MAX}")


def _refuse_status(name: bytes) -> None:
    if name.startswith(STATUS_PREFIX):
        raise NotPermitted(f"attribute {name!r} is fpfs's own")


def status_attributes(status: FileStatus) -> dict[str, str]:
    """Return what the attributes behind `STATUS_PREFIX` say of a file."""
    told = {
        "durable": str(int(status.durable)),
        "state": status.state.value,
        "version": str(status.version),
        "acknowledged": str(status.size_acknowledged),
        "size_committed": str(status.size_committed),
        "size_durable": str(status.size_durable),
        "writers": str(status.writers),
    }
    if status.is_regular:
        told |= {
            "width": str(status.width),
            "chunk_bytes": str(status.chunk_bytes),
            "devices": ",".join(map(str, status.devices)),
            "inline": str(int(status.inline)),
            "former_versions": str(status.former_versions),
        }
    return told
