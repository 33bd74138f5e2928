"""Extended attributes: `user.*`, `trusted.*` and `security.*` are kept, all others are refused.

The kernel has checked who may see and set which namespace, and on which types of inode. `system.*`
holds POSIX access control lists, which fpfs does not evaluate: keeping what is not obeyed would
promise a protection that is not there. A change of content or owner that ends privileges removes
`security.capability` with them.

Concurrency: trio thread only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fpfs.core.errors import (
    InvalidOperation,
    NameTooLong,
    NoAttribute,
    Unsupported,
    ValueTooLarge,
)
from fpfs.core.limits import XATTR_NAME_BYTES_MAX, XATTR_VALUE_BYTES_MAX
from fpfs.daemon.catalog_attributes import fetch_xattr, list_xattrs, remove_xattr, store_xattr

if TYPE_CHECKING:
    from fpfs.daemon.catalog import Catalog
    from fpfs.daemon.inodes import InodeTable
    from fpfs.daemon.requests import Requests

KEPT_NAMESPACES = frozenset({b"user", b"trusted", b"security"})


class ExtendedAttributes:
    """Extended attributes of inodes."""

    def __init__(self, *, catalog: Catalog, inodes: InodeTable, requests: Requests) -> None:
        """Keep what is needed."""
        self._catalog = catalog
        self._requests = requests
        self._inodes = inodes

    async def get(self, ino: int, name: bytes, *, request: int = 0) -> bytes:
        """Return a value. Raises `NoAttribute`, `Unsupported`."""
        _check_name(name)
        if self._requests.outcome(request) is not None:
            # pyfuse3 asks before it sets what must not exist: it did not, when that was done.
            raise NoAttribute(f"inode {ino} had no attribute {name!r}")
        inode = self._inodes.cached(ino) or await self._inodes.get(ino)
        if not inode.has_xattrs:
            # Asked by the kernel before writes (security.capability): without the catalog.
            raise NoAttribute(f"inode {ino} has no attribute {name!r}")
        return await self._catalog.read(lambda t: fetch_xattr(t, ino, name))

    async def names(self, ino: int) -> list[bytes]:
        """Return the names of an inode's attributes."""
        inode = await self._inodes.get(ino)
        if not inode.has_xattrs:
            return []
        return await self._catalog.read(lambda t: list_xattrs(t, ino))

    async def set(self, ino: int, name: bytes, value: bytes, *, request: int = 0) -> None:
        """Set a value. Raises `Unsupported`, `ValueTooLarge`, `NoSpace`."""
        _check_name(name)
        if len(value) > XATTR_VALUE_BYTES_MAX:
            raise ValueTooLarge(
                f"attribute value of {len(value)} bytes, at most {XATTR_VALUE_BYTES_MAX}"
            )
        inode = await self._inodes.get(ino)
        inode.refuse_change()
        now_ns = time.time_ns()
        # Before the write, so that a reader beside it does not miss it.
        inode.has_xattrs = True
        self._inodes.changed(inode, ctime_ns=now_ns)
        store = self._requests.recording(
            request, lambda t: store_xattr(t, ino, name, value, ctime_ns=now_ns)
        )
        await self._catalog.write(store)

    async def remove(self, ino: int, name: bytes, *, request: int = 0) -> None:
        """Remove an attribute. Raises `NoAttribute`, `Unsupported`."""
        _check_name(name)
        if self._requests.outcome(request) is not None:
            return
        inode = await self._inodes.get(ino)
        inode.refuse_change()
        now_ns = time.time_ns()
        remove = self._requests.recording(
            request, lambda t: remove_xattr(t, ino, name, ctime_ns=now_ns)
        )
        await self._catalog.write(
            remove,
            apply=lambda _removed: self._inodes.changed(inode, ctime_ns=now_ns),
        )


def _check_name(name: bytes) -> None:
    """Refuse namespaces and names that are not kept."""
    namespace, _, rest = name.partition(b".")
    if namespace not in KEPT_NAMESPACES:
        raise Unsupported(f"attribute {name!r}: its namespace is not kept")
    if not rest:
        raise InvalidOperation(f"attribute {name!r} has no name behind its namespace")
    if len(name) > XATTR_NAME_BYTES_MAX:
        raise NameTooLong(f"attribute name of {len(name)} bytes, at most {XATTR_NAME_BYTES_MAX}")
