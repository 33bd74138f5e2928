"""Commands as a user who owns nothing: where the checkout lies in a private folder, he has none."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

from tests.support.processes import REPOSITORY

AS_NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
"""What goes before a command that nobody is to run. Only root may."""


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
