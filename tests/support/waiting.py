"""Waiting for what other processes and threads bring about."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 60.0


def wait_until(
    condition: Callable[[], bool], failure: str = "", timeout_s: float = TIMEOUT_S
) -> None:
    """Return when `condition` holds; fail with `failure` if it never does.

    For what nothing tells of: what a file says, where a thread of another process waits.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, failure or f"after {timeout_s:g} s it does not hold"
        time.sleep(0.001)


def inodes_used(path: Path) -> int:
    """Inodes of the filesystem at a path; what was removed counts until the server forgets it."""
    figures = os.statvfs(path)
    return figures.f_files - figures.f_ffree
