"""A file that takes a name's place whole, or leaves what was there.

It is written beside its name under a temporary one, which ends as the name does: the mount's policy
for the name is also the policy for what becomes it, so of a process that is killed while it writes
fpfs takes the temporary name away. What is left on other filesystems, or between the last byte and
the rename, the next save to the name removes.

Invariants:
  * The file is locked (flock) until it has its name: what is not locked was left by a process that
    is no more. Where there are no locks, nothing is removed.
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
import stat
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from fpfs.client.paths import is_on_fpfs, saved_already
from fpfs.core.temporary_names import is_temporary, make_temporary
from fpfs.core.transfers import reserve_file

TRIES = 100
LOCK_S = 60.0
"""Files get their names within a moment."""
POLL_S = 0.002


class Replacement:
    """A new file for `path`; as a context, it is removed unless `commit` was reached.

    `path` is absolute, links followed. Raises OSError as open(2) does, and of what is there
    already and is not a regular file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        directory, self._name = os.path.split(path)
        if not self._name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._on_fpfs = is_on_fpfs(directory)
        self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._temporary = ""
        self._lock_fd = -1
        self._fd = -1
        try:
            former = self._stat_former()
            _remove_left(self._directory_fd, _of(self._name))
            self._create(0o666 if former is None else former.st_mode & 0o777)
            if former is not None:
                self._take_attributes(former)
        except BaseException:
            self.discard()
            raise

    @property
    def temporary_path(self) -> str:
        """Where the file is until the commit."""
        return os.path.join(os.path.dirname(self.path), self._temporary)

    @property
    def fd(self) -> int:
        """Open for reading and writing until the commit."""
        return self._fd

    def reserve(self, size: int) -> None:
        """Make the file `size` bytes long. Raises OSError (ENOSPC) unless there is room for all."""
        reserve_file(self._fd, size)

    def commit(self, *, durable: bool) -> None:
        """Give the file its name; `durable` returns when both survive power loss."""
        self.complete(durable=durable)
        self.take_name()
        if durable:
            with saved_already():
                self.flush_name()

    def complete(self, *, durable: bool) -> None:
        """After the last byte: whoever has the name from now on has all bytes."""
        if durable or not self._on_fpfs:
            os.fsync(self._fd)
        if self._on_fpfs:
            # Whoever opens the name finds the file committed. Its close tells of what failed.
            self._close("_fd")

    def take_name(self) -> None:
        """Give the file, which is complete, its name."""
        os.rename(
            self._temporary,
            self._name,
            src_dir_fd=self._directory_fd,
            dst_dir_fd=self._directory_fd,
        )
        self._temporary = ""

    def flush_name(self) -> None:
        """After `take_name`: return when the name survives power loss."""
        os.fsync(self._directory_fd)

    def flush(self) -> None:
        """After a commit: return when the file and its name survive power loss."""
        # Of what was closed for writing, the descriptor that has the lock is left.
        os.fsync(self._lock_fd if self._fd < 0 else self._fd)
        self.flush_name()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the file, unless it has its name, and close what is open."""
        with contextlib.ExitStack() as closing:
            # The one that may write is closed behind the one that has the lock: fpfs commits what
            # somebody still has open.
            for name in ("_directory_fd", "_fd", "_lock_fd"):
                closing.callback(self._close, name)
            # Removed first: what is closed, and so not locked, might be found.
            name, self._temporary = self._temporary, ""
            if name:
                # Not there: it was not made. What fails otherwise, the next save to the name does.
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._directory_fd)

    def _close(self, name: str) -> None:
        # Forgotten first: what close(2) fails for is closed as well.
        fd = getattr(self, name)
        setattr(self, name, -1)
        if fd >= 0:
            _unlock_and_close(fd)

    def _stat_former(self) -> os.stat_result | None:
        try:
            former = os.stat(self._name, dir_fd=self._directory_fd)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(former.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if not stat.S_ISREG(former.st_mode):
            raise OSError(errno.EINVAL, "not a regular file: use torch.save", self.path)
        if not self._is_writable():
            # Another save may have removed or replaced it since.
            try:
                found = os.stat(self._name, dir_fd=self._directory_fd)
            except FileNotFoundError:
                return None
            if os.path.samestat(found, former) and not self._is_writable():
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.path)
            return self._stat_former()
        return former

    def _is_writable(self) -> bool:
        return os.access(self.path, os.W_OK, effective_ids=True)

    def _create(self, mode: int) -> None:
        for _ in range(TRIES):
            self._temporary = os.fsdecode(make_temporary(os.fsencode(self._name)))
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                self._fd = os.open(self._temporary, flags, mode, dir_fd=self._directory_fd)
            except OSError as error:
                error.filename = self.path
                raise
            if self._lock():
                return
            self._close("_lock_fd")
            self._close("_fd")
        raise OSError(errno.EAGAIN, "temporary files are removed by somebody", self.path)

    def _lock(self) -> bool:
        """Whether the file is still there, locked. Others may find it before it is."""
        lock_fd = self._fd
        if self._on_fpfs:
            # A file is committed when the last descriptor that may write is closed.
            own = f"/proc/self/fd/{self._fd}"
            lock_fd = self._lock_fd = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a filesystem without locks, where nothing is removed
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        return os.fstat(lock_fd).st_nlink > 0

    def _take_attributes(self, former: os.stat_result) -> None:
        """Owner and mode stay when a name's content is replaced, as torch.save leaves them."""
        mode = stat.S_IMODE(former.st_mode)
        own = os.fstat(self._fd)
        if (own.st_uid, own.st_gid) != (former.st_uid, former.st_gid):
            try:
                os.fchown(self._fd, former.st_uid, former.st_gid)
            except OSError:
                # Only root may: the file is the caller's own, and nobody is let in by it.
                mode &= 0o707 if own.st_gid != former.st_gid else 0o777
        with contextlib.suppress(OSError):  # of a filesystem that has no modes
            os.fchmod(self._fd, mode)


@contextlib.contextmanager
def locked_directory(path: str) -> Iterator[None]:
    """Let nobody else be within this, for this directory. TimeoutError after LOCK_S."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"another process has had {path} locked for {LOCK_S:.0f} s"
                    ) from None
            except OSError:  # a filesystem without locks
                break
            time.sleep(POLL_S)
        yield
    finally:
        _unlock_and_close(fd)


def remove_left(path: str, *, of: Callable[[bytes], bool] | None = None) -> None:
    """Remove what was left of `path`, absolute with links followed, by processes that are no more.

    of: which names are to go, unless they are locked; None: temporary ones for `path`.

    Raises OSError of a directory that cannot be read.
    """
    directory, name = os.path.split(path)
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove_left(directory_fd, of or _of(name))
    finally:
        os.close(directory_fd)


def _of(name: str) -> Callable[[bytes], bool]:
    return lambda found: is_temporary(found, os.fsencode(name))


def _remove_left(directory_fd: int, of: Callable[[bytes], bool]) -> None:
    for found in os.listdir(directory_fd):
        if of(os.fsencode(found)):
            # What is gone meanwhile, another user's, being written, or no file is left alone.
            with contextlib.suppress(OSError):
                _remove_unlocked(directory_fd, found)


def is_unlocked(path: str) -> bool:
    """Whether a file is there that nobody writes any more: no process has it locked."""
    try:
        with _lock_shared(path):
            return True
    except OSError:  # of a filesystem without locks, too
        return False


def _remove_unlocked(directory_fd: int, name: str) -> None:
    with _lock_shared(name, directory_fd=directory_fd):
        os.unlink(name, dir_fd=directory_fd)


@contextlib.contextmanager
def _lock_shared(path: str, *, directory_fd: int | None = None) -> Iterator[None]:
    """Lock a file. Raises OSError if it is locked, or no file, or there are no locks."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, dir_fd=directory_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        # Shared, which suffices, and which NFS gives to who may only read.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        _unlock_and_close(fd)


def _unlock_and_close(fd: int) -> None:
    # A child that was forked meanwhile has the descriptor, too, and would keep the lock. Children
    # do not close it when they begin: of NFS, close(2) would wait until all was written.
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
