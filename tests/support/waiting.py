"""Waiting for what other processes and threads bring about."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Wait until no other process of this machine does what has this name, and keep it so.

    For one test and not for several: who waits for it keeps those waiting that are to run `alone`.
    """
    with open(f"{tempfile.gettempdir()}/fpfs-tests-{what}.lock", "wb") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def inodes_used(path: Path) -> int:
    """Inodes of the filesystem at a path; what was removed counts until the server forgets it."""
    figures = os.statvfs(path)
    return figures.f_files - figures.f_ffree
