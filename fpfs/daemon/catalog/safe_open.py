"""Opening the files of a device directory: regular files only, and never through symbolic links.

A device directory may come from anywhere. What stands in a file's place must not lead out of the
directory (a link), hold whoever opens it (a pipe), or do something by being opened (a device).

Concurrency: plain blocking functions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat


def open_regular(path: str | os.PathLike[str], flags: int, *, folder_fd: int | None = None) -> int:
    """Open a regular file, made anew only with O_CREAT in `flags`; returns a descriptor.

    `path` is relative to `folder_fd` where one is given. Raises OSError: ELOOP for a symbolic link,
    EINVAL for anything else that is no regular file, and what open(2) raises.
    """
    with contextlib.suppress(FileNotFoundError):
        _check(os.stat(path, dir_fd=folder_fd, follow_symlinks=False), path)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600, dir_fd=folder_fd)
    try:
        _check(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def make_regular(path: str | os.PathLike[str]) -> int:
    """Make an empty file in place of whatever has the name; returns a descriptor for writing."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def read_small(path: str | os.PathLike[str], *, bytes_max: int) -> bytes:
    """Return the content of a regular file of at most `bytes_max`; EFBIG for a longer one."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it is longer than {bytes_max} bytes", os.fspath(path))
    return content


def open_folder(path: str | os.PathLike[str], *, folder_fd: int | None = None) -> int:
    """Open a directory that is no symbolic link; returns a descriptor."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, dir_fd=folder_fd)
