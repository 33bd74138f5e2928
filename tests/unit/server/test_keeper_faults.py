"""Of what a server died: a fault of its own, for which a request may be to blame, or not."""

from __future__ import annotations

import signal

import pytest

from fpfs.daemon.mount.server import EXIT_DIED
from fpfs.daemon.mount.supervisor import died_of_fault


@pytest.mark.parametrize(
    "status", [1, EXIT_DIED, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL]
)
def test_faults(status: int) -> None:
    assert died_of_fault(status)


@pytest.mark.parametrize(
    "status", [0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGALRM, -signal.SIGXCPU]
)
def test_ends_that_are_none(status: int) -> None:
    assert not died_of_fault(status)
