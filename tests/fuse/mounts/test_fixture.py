"""The test of the tests: the mount fixture fails what it should fail, and cleans up after it."""

from __future__ import annotations

import logging
import os
import signal

import pytest

from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import Mount, live_mounts, mounted


def add_to_log(mount: Mount, level: int) -> None:
    """Write a line into a server's log as the server would."""
    with mount.log.open("a") as log:
        log.write(f"2026-01-01T00:00:00.000Z {logging.getLevelName(level)} fpfs.test: a line\n")


def test_information_in_the_log_is_no_failure() -> None:
    with mounted() as mount:
        add_to_log(mount, logging.INFO)


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR, logging.CRITICAL])
def test_unexpected_problems_in_the_log_fail(level: int) -> None:
    unexpected = pytest.raises(AssertionError, match=r"unexpected in the server's log: .*a line")
    with unexpected, mounted() as mount:
        add_to_log(mount, level)


def test_expected_problems_must_occur() -> None:
    with mounted() as mount:
        add_to_log(mount, logging.WARNING)
        mount.expect_log("a line")
    missing = pytest.raises(AssertionError, match=r"missing in it: .*never said")
    with missing, mounted() as mount:
        mount.expect_log("never said")


def test_allowed_problems_may_occur_and_excuse_no_other() -> None:
    with mounted() as mount:
        mount.allow_log("never said")
    unexpected = pytest.raises(AssertionError, match=r"unexpected in the server's log: .*a line")
    with unexpected, mounted() as mount:
        mount.allow_log("never said")
        add_to_log(mount, logging.WARNING)
    with mounted() as mount:
        add_to_log(mount, logging.WARNING)
        mount.allow_log("a line")


def test_a_failing_test_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), mounted() as mount:
        file_fd = os.open(mount.root / "file", os.O_WRONLY | os.O_CREAT)
        raise ZeroDivisionError
    with pytest.raises(OSError, match=r"."):
        os.close(file_fd)
    assert mount_at(str(mount.root)) is None
    assert not mount.folder.exists()
    assert mount not in live_mounts


def test_a_stopped_server_is_killed_in_the_end() -> None:
    with pytest.raises(ZeroDivisionError), mounted() as mount:
        os.kill(mount.server_pid, signal.SIGSTOP)
        raise ZeroDivisionError
    assert mount_at(str(mount.root)) is None
    assert not mount.folder.exists()
