"""A file that takes a name's place whole, or leaves what was there.

It is written beside its name under a temporary one, which ends as the name does: the mount's policy
for the name is also the policy for what becomes it, so of a process that is killed while it writes
fpfs takes the temporary name away. What is left on other filesystems, or between the last byte and
the rename, the next save to the name removes.

Invariants:
  * A lock (flock) is held on the file until it has its name: what is not locked was left by a
    process that is no more.
  * On a filesystem that may put the rename before the bytes at a power loss, the bytes are flushed
    first. fpfs never does.

Concurrency: used by one thread. Several processes may replace one name at once: the last to commit
wins, whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from types import TracebackType

from fpfs.core.transfers import reserve_file

PREFIX = ".fpfs-save-"
TOKEN_DIGITS = 16
NAME_BYTES_MAX = 255
TRIES = 100


class Replacement:
    """A new file for `path`; as a context, it is removed unless `commit` was reached.

    `path` is what `resolve` returned. Raises OSError as open(2) does, and of what is there
    already and is not a regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        directory, self._name = os.path.split(path)
        self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._temporary = ""
        self._lock_fd = -1
        self.fd = -1
        """Open for reading and writing until the commit."""
        try:
            former = self._stat_former()
            self._remove_left()
            self._create()
            if former is not None:
                self._take_attributes(former)
        except BaseException:
            self.discard()
            raise

    @property
    def temporary_path(self) -> str:
        """Where it lies until the commit."""
        return os.path.join(os.path.dirname(self.path), self._temporary)

    def reserve(self, size: int) -> None:
        """Make the file `size` bytes long. Raises OSError (ENOSPC) unless there is room for all."""
        reserve_file(self.fd, size)

    def commit(self, *, durable: bool, flush_first: bool) -> None:
        """Give the file its name; `durable` returns when both survive power loss."""
        if durable or flush_first:
            os.fsync(self.fd)
        os.close(self.fd)
        self.fd = -1
        os.rename(
            self._temporary,
            self._name,
            src_dir_fd=self._directory_fd,
            dst_dir_fd=self._directory_fd,
        )
        self._temporary = ""
        if durable:
            os.fsync(self._directory_fd)
        self.discard()

    def discard(self) -> None:
        """Remove the file, unless it has its name, and close what is open."""
        if self._temporary:
            # Removed first: what is closed unlocked might be found.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=self._directory_fd)
            self._temporary = ""
        for name in ("fd", "_lock_fd", "_directory_fd"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def _stat_former(self) -> os.stat_result | None:
        try:
            former = os.stat(self._name, dir_fd=self._directory_fd)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(former.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if not stat.S_ISREG(former.st_mode):
            raise OSError(errno.EINVAL, "not a regular file: use torch.save", self.path)
        return former

    @property
    def _tail(self) -> str:
        """How the temporary name ends: as the name does, if need be without its begin."""
        bytes_max = NAME_BYTES_MAX - len(PREFIX) - TOKEN_DIGITS - 1
        return "." + os.fsdecode(os.fsencode(self._name)[-bytes_max:])

    def _create(self) -> None:
        for _ in range(TRIES):
            name = PREFIX + secrets.token_hex(TOKEN_DIGITS // 2) + self._tail
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self.fd = os.open(name, flags, 0o666, dir_fd=self._directory_fd)
            self._temporary = name
            # Another descriptor: a file is committed when the last that may write is closed.
            self._lock_fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory_fd)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            if os.fstat(self._lock_fd).st_nlink > 0:
                return
            # Found in the moment before it was locked.
            os.close(self.fd)
            os.close(self._lock_fd)
        raise OSError(errno.EAGAIN, "temporary files are removed by somebody", self.path)

    def _remove_left(self) -> None:
        """Remove what was left of this name by processes that are no more."""
        for name in os.listdir(self._directory_fd):
            if not name.startswith(PREFIX) or name[len(PREFIX) + TOKEN_DIGITS :] != self._tail:
                continue
            try:
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory_fd)
            except (FileNotFoundError, PermissionError):
                continue  # gone meanwhile, or another user's
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=self._directory_fd)
            except (BlockingIOError, FileNotFoundError, PermissionError):
                pass  # being written, gone meanwhile, or in a directory with the sticky bit
            finally:
                os.close(fd)

    def _take_attributes(self, former: os.stat_result) -> None:
        """Owner and mode stay when a name's content is replaced, as torch.save leaves them."""
        own = os.fstat(self.fd)
        if (own.st_uid, own.st_gid) != (former.st_uid, former.st_gid):
            # Only root may; for others the file becomes the caller's own.
            with contextlib.suppress(PermissionError):
                os.fchown(self.fd, former.st_uid, former.st_gid)
        os.fchmod(self.fd, stat.S_IMODE(former.st_mode))
