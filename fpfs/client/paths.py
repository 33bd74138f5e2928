"""What saving and loading have in common: paths, and how many threads move bytes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

from fpfs.core.mounts import mount_containing

logger = logging.getLogger(__name__)

THREADS_MAX = 8
TIMEOUT_MAX_S = 365 * 86_400

DCP_METADATA = ".metadata"
"""Lies in a checkpoint of torch.distributed.checkpoint."""

MAY_BE_LOST = "saved, but may not survive power loss"
"""Of a file that has its name, when what was to make both durable has failed."""

_said_elsewhere: set[str] = set()
"""Mountpoints."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a filesystem says that exchanges no names."""


Path: TypeAlias = str | bytes | os.PathLike[Any]

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class NotLocal(ValueError):
    """An address was given, as s3://bucket/file, where fpfs takes a path."""


def resolve_all(path: Path | Sequence[Path]) -> list[str]:
    """Return what `resolve` returns of each path of a list, or of one. ValueError: it is empty."""
    several = path if isinstance(path, list | tuple) else [cast("Path", path)]
    if not several:
        raise ValueError("path is an empty list: name the directories that have the shares")
    return [resolve(each) for each in several]


def resolve(path: Path) -> str:
    """Return the absolute path, links followed.

    Raises TypeError of what is no path, FileNotFoundError of an empty one, NotLocal of an address.
    """
    try:
        name = os.fsdecode(os.fspath(path))
    except TypeError:
        is_open = hasattr(path, "read") or hasattr(path, "write")
        raise TypeError(
            f"fpfs takes a path, not {type(path).__name__}: "
            + ("use torch.save and torch.load for files that are open" if is_open else "give a str")
        ) from None
    if not name:
        raise FileNotFoundError("the path is an empty string: is a variable unset?")
    refuse_address(name)
    return os.path.realpath(name)


def refuse_address(name: str) -> None:
    """Raise NotLocal of an address. A directory may be named `s3:`, and s3:/file is in it."""
    found = _ADDRESS.match(name)
    if found is None:
        return
    if found[1].lower() == "file":
        raise NotLocal(f"{name} is an address: give the path alone, {name[found.end() :]}")
    raise NotLocal(
        f"{name} is not on a filesystem of this machine, where fpfs saves and loads: give a path"
    )


def resolve_file(path: Path) -> str:
    """Return what `resolve` returns, of a file to write. IsADirectoryError: it ends in a /."""
    found, name = resolve(path), os.fsdecode(path)
    if name.endswith(os.sep):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    return found


def is_on_fpfs(path: str) -> bool:
    """Whether `path` is on a mount of fpfs; the log says where else, once for each filesystem."""
    entry = mount_containing(path)
    if not entry.is_fpfs and entry.mountpoint not in _said_elsewhere:
        _said_elsewhere.add(entry.mountpoint)
        logger.warning(
            "%s is on %s (%s), not on a mount of fpfs: checkpoints are saved and loaded there at"
            " that filesystem's speed",
            path,
            entry.mountpoint,
            entry.filesystem_type,
        )
    return entry.is_fpfs


def check_threads(threads: int | None) -> None:
    """Raise ValueError of what is no number of threads."""
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is {threads!r}: give a number from 1, or None")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError of what is neither True nor False: a text like "no" would mean True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give True or False")


def check_timeout(timeout_s: float) -> None:
    """Raise ValueError of what is no time to wait."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= TIMEOUT_MAX_S:
        raise ValueError(
            f"timeout_s is {timeout_s!r}: give seconds, more than 0 and at most {TIMEOUT_MAX_S}"
        )


def ranks_here() -> int:
    """By how many ranks this machine is shared, as far as a rank can tell."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # torchrun's, DeepSpeed's
        found = os.environ.get(name, "")
        if found.isdigit():
            return max(1, int(found))
    # Commands, too, use this module, and do without torch.
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def make_directories(path: str | os.PathLike[str], *, made: list[str] | None = None) -> list[str]:
    """Make a directory and those above it that are missing; return those that have new names.

    What was made survives power loss when these are flushed. made: takes what this makes, from
    outer to inner, also if it fails. Raises OSError as os.makedirs does with `exist_ok`.
    """
    path = at = os.fspath(path)
    parents = list[str]()
    # Not even what is always there can be looked at on a mount that nobody serves any more.
    while at not in (os.curdir, os.sep) and not os.path.exists(at):
        at = os.path.dirname(at) or os.curdir
        parents.append(at)
    for each in [*reversed(parents[:-1]), path]:
        try:
            os.mkdir(each)
        except OSError:  # of some filesystems EROFS or EACCES, though it is there
            if not os.path.isdir(each):
                raise
        else:
            if made is not None:
                made.append(each)
    # They may be flushed when the process has gone to another directory.
    return [os.path.realpath(each) for each in parents]


def flush(*paths: str | os.PathLike[str]) -> None:
    """Return when files, and the names in directories, survive power loss."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove(path: str) -> None:
    """Remove a file, a link itself, or a directory with what is in it; unless it is not there."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)


def exchange(one: str, other: str) -> bool:
    """Exchange two names at once, so that none is missing; False: the filesystem exchanges none.

    fpfs, ext4 and XFS do, and NFS does not. Raises OSError as renameat2(2) does.
    """
    library = ctypes.CDLL(None, use_errno=True)
    places = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if library.renameat2(*places, _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), one, None, other)


def name_file(error: BaseException | None, path: str) -> None:
    """Have an OSError name the file that it is of: what fails for a descriptor does not know it."""
    # TimeoutError is one, too, and has no errno where it is not the system's.
    if isinstance(error, OSError) and error.errno and error.filename is None and path:
        error.filename = path


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Let an OSError name the file, as `name_file` does."""
    try:
        yield
    except OSError as error:
        name_file(error, path)
        raise


@contextlib.contextmanager
def saved_already() -> Iterator[None]:
    """Let an OSError say that the file has its name."""
    try:
        yield
    except OSError as error:
        error.strerror = f"{MAY_BE_LOST}: {error.strerror}"
        raise


def default_threads(ranks: int = 1) -> int:
    """Return how many threads move bytes: as many as there are processors, from 2 to 8.

    ranks: of this machine, which have so many together, and each at least one.
    """
    together = min(THREADS_MAX, max(2, len(os.sched_getaffinity(0))))
    return max(1, together // ranks)
