"""Commands as a user who owns nothing: where the checkout lies in a private folder, he has none."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.processes import REPOSITORY

AS_NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
"""What goes before a command that nobody is to run. Only root may."""
NOBODY = 65534
"""The user."""


@functools.cache
def _runs_fpfs() -> bool:
    done = subprocess.run(
        [*AS_NOBODY, sys.executable, "-c", "import fpfs.core.protocol.control"],
        env={"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def need_nobody() -> None:
    """Skip the test where nobody cannot run fpfs."""
    if not _runs_fpfs():
        pytest.skip("nobody can execute no Python that has fpfs")


@contextlib.contextmanager
def being_nobody() -> Iterator[None]:
    """Have this process, of root, act as nobody, in root's groups."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
