"""How a program ends whose mount was taken away: told apart from one that saw something wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path

EXIT_GONE = 3
_ERRORS = (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV)


def is_gone(error: BaseException, root: Path) -> bool:
    """Whether an error says that nobody serves the mount at `root` any more: a look confirms it.

    torch has errors of its own for what a write or a read came to.
    """
    if not isinstance(error, (OSError, RuntimeError)):
        return False
    try:
        os.listdir(root)
    except OSError as found:
        return found.errno in _ERRORS
    return False
