"""Errors of fpfs: each class carries one errno and is also the builtin error a user would catch.

::

    OSError
    └── FpfsError                EIO           something failed that no class below names
        ├── NoSuchEntry          ENOENT        (FileNotFoundError)
        ├── EntryExists          EEXIST        (FileExistsError)
        ├── NotADirectory        ENOTDIR       (NotADirectoryError)
        ├── IsADirectory         EISDIR        (IsADirectoryError)
        ├── DirectoryNotEmpty    ENOTEMPTY
        ├── NameTooLong          ENAMETOOLONG
        ├── TooManyLinks         EMLINK
        ├── TooManySymlinks      ELOOP
        ├── CrossDevice          EXDEV
        ├── InvalidOperation     EINVAL
        ├── NotPermitted         EPERM         (PermissionError)
        ├── FileTooLarge         EFBIG
        ├── ValueTooLarge        E2BIG
        ├── NoAttribute          ENODATA
        ├── Unsupported          EOPNOTSUPP    (the same number as ENOTSUP)
        ├── StaleHandle          EBADF
        ├── StaleInode           ESTALE
        ├── NoSpace              ENOSPC
        ├── ReadOnly             EROFS
        ├── BusyFile             EBUSY
        ├── DamagedData          EIO
        └── CatalogError         EIO
            ├── CatalogMissing   ENOENT        (FileNotFoundError)
            ├── CatalogTooNew    EPROTONOSUPPORT
            └── CatalogBusy      EBUSY

ELOOP and EXDEV are found by the kernel on a mounted filesystem; the classes serve callers that do
not go through it. `Unsupported` refuses an attribute namespace and must not have ENOSYS, which
would make the kernel stop asking for extended attributes of every kind.
"""

from __future__ import annotations

import errno
import os
from typing import ClassVar


class FpfsError(OSError):
    """Base of all errors of fpfs; `code` is the errno that the caller of the filesystem sees.

    `remedy` says what to do, where that is known.
    """

    code: ClassVar[int] = errno.EIO

    def __init__(self, message: str = "", *, remedy: str = "") -> None:
        """Make the error with a message that says what is wrong, and with what to do."""
        super().__init__(self.code, message or os.strerror(self.code))
        self.remedy = remedy


class NoSuchEntry(FpfsError, FileNotFoundError):
    """A name or an inode that does not exist."""

    code = errno.ENOENT


class EntryExists(FpfsError, FileExistsError):
    """A name that exists already."""

    code = errno.EEXIST


class NotADirectory(FpfsError, NotADirectoryError):
    """A directory was needed."""

    code = errno.ENOTDIR


class IsADirectory(FpfsError, IsADirectoryError):
    """Anything but a directory was needed."""

    code = errno.EISDIR


class DirectoryNotEmpty(FpfsError):
    """A directory still has entries."""

    code = errno.ENOTEMPTY


class NameTooLong(FpfsError):
    """A name or symbolic link target exceeds its limit."""

    code = errno.ENAMETOOLONG


class TooManyLinks(FpfsError):
    """An inode has as many names as it can have."""

    code = errno.EMLINK


class TooManySymlinks(FpfsError):
    """A chain of symbolic links is too long."""

    code = errno.ELOOP


class CrossDevice(FpfsError):
    """A link or rename to another filesystem."""

    code = errno.EXDEV


class InvalidOperation(FpfsError):
    """An operation that makes no sense, such as moving a directory below itself."""

    code = errno.EINVAL


class NotPermitted(FpfsError, PermissionError):
    """An operation that this kind of inode or caller may not have."""

    code = errno.EPERM


class FileTooLarge(FpfsError):
    """A file size beyond the limit."""

    code = errno.EFBIG


class ValueTooLarge(FpfsError):
    """An extended attribute's value beyond the limit."""

    code = errno.E2BIG


class NoAttribute(FpfsError):
    """An extended attribute that does not exist."""

    code = errno.ENODATA


class Unsupported(FpfsError):
    """A feature that fpfs does not have."""

    code = errno.EOPNOTSUPP


class StaleHandle(FpfsError):
    """A handle that was never given out or was released."""

    code = errno.EBADF


class StaleInode(FpfsError):
    """An inode that is not behind the name any more by which the kernel came to it."""

    code = errno.ESTALE


class NoSpace(FpfsError):
    """The devices, or the catalog's device, are full."""

    code = errno.ENOSPC


class ReadOnly(FpfsError):
    """The catalog's device refuses writes, or what is to be changed is a former version."""

    code = errno.EROFS


class BusyFile(FpfsError):
    """A file that somebody is writing to."""

    code = errno.EBUSY


class DamagedData(FpfsError):
    """A record's checksum does not fit its content."""


class CatalogError(FpfsError):
    """The catalog failed; nothing that it did not acknowledge happened."""


class CatalogMissing(CatalogError, FileNotFoundError):
    """There is no catalog where one should be."""

    code = errno.ENOENT


class CatalogTooNew(CatalogError):
    """The catalog was written by a newer fpfs."""

    code = errno.EPROTONOSUPPORT


class CatalogBusy(CatalogError):
    """Another process has the catalog open."""

    code = errno.EBUSY
