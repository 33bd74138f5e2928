"""What a test puts in the place of a function, for it to fail, to be slow, or to be told of."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fpfs.core.temporary_names import target_of
from fpfs.core.transfers import Transfer, count_moved


def full(*_: object, **__: object) -> NoReturn:
    """Fail as on a full device."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unreadable(*_: object, **__: object) -> NoReturn:
    """Fail as on a device that does not read."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def die(*_: object, **__: object) -> None:
    """End the process as by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


class Slow:
    """A transfer that has not ended for a time, and moves a byte every so often until then."""

    def __init__(self, transfer: Transfer, seconds: float) -> None:
        self._transfer = transfer
        self._end_s = time.monotonic() + seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def wait(self, seconds: float, /) -> bool:
        """Move one."""
        if time.monotonic() < self._end_s:
            time.sleep(seconds)
            count_moved(1)
            return False
        return self._transfer.wait(seconds)


def tell_steps(log: Path, patch: pytest.MonkeyPatch) -> None:
    """Have this process add lines to a file: what it flushes, what gets a name, what it removes.

    Several processes may tell one file. A flush is told when it has ended, the rest before it
    begins: so whatever follows a flush there has begun after it. Temporary names are told as those
    that they are for.
    """
    fsync, rename, unlink = os.fsync, os.rename, os.unlink

    def tell(step: str, name: Any, directory_fd: int | None = None) -> None:
        base = os.getcwd() if directory_fd is None else os.readlink(f"/proc/self/fd/{directory_fd}")
        folder, own = os.path.split(os.path.join(base, os.fsdecode(name)))
        own = os.fsdecode(target_of(os.fsencode(own)) or own)
        with log.open("a") as file:
            file.write(f"{step} {os.path.join(folder, own)}\n")

    def fsync_and_tell(fd: int) -> None:
        fsync(fd)
        tell("flush", os.readlink(f"/proc/self/fd/{fd}"))

    def tell_and_rename(source: Any, name: Any, **options: Any) -> None:
        tell("name", name, options.get("dst_dir_fd"))
        rename(source, name, **options)

    def tell_and_unlink(name: Any, *, dir_fd: int | None = None) -> None:
        tell("remove", name, dir_fd)
        unlink(name, dir_fd=dir_fd)

    patch.setattr(os, "fsync", fsync_and_tell)
    patch.setattr(os, "rename", tell_and_rename)
    patch.setattr(os, "unlink", tell_and_unlink)


def told_steps(log: Path, root: Path) -> list[str]:
    """Return what `tell_steps` has written of `root`, links followed; paths begin there."""
    steps = [line.split(" ", 1) for line in log.read_text().splitlines()]
    return [
        f"{step} {Path(path).relative_to(root)}"
        for step, path in steps
        if Path(path).is_relative_to(root)
    ]
