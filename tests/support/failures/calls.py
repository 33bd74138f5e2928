"""What a test puts in the place of a function, for it to fail."""

from __future__ import annotations

import errno
import os
import signal
from typing import NoReturn


def full(*_: object, **__: object) -> NoReturn:
    """Fail as on a full device."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unreadable(*_: object, **__: object) -> NoReturn:
    """Fail as on a device that does not read."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def die(*_: object, **__: object) -> None:
    """End the process as by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
