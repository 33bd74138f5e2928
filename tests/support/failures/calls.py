"""What a test puts in the place of a function, for it to fail, or to be slow."""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import Any, NoReturn

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
