"""Kills a mount's server and mounts again, as after a crash of everything that belongs to fpfs."""

from __future__ import annotations

import contextlib
import os
import select
import signal

from fpfs.testing.mounted import Mount
from tests.support.system import errno_of


def crash(mount: Mount) -> None:
    """SIGKILL the server and wait until it is gone; then take the mount away."""
    pidfd = os.pidfd_open(mount.server_pid)
    try:
        os.kill(mount.server_pid, signal.SIGKILL)
        ended, _, _ = select.select([pidfd], [], [], 60)
        assert ended, f"server {mount.server_pid} does not die"
    finally:
        os.close(pidfd)
    mount.server_pid = 0
    with contextlib.suppress(ProcessLookupError):
        mount.tear_down()


def crash_and_mount(mount: Mount) -> None:
    """Crash, then mount the same devices at the same place; the new server says that it saw it."""
    mount.expect_log("the last server died")
    crash(mount)
    mount.mount()


def close_dead(fd: int) -> None:
    """Close a descriptor of a mount that crashed: its flush reaches nobody."""
    assert errno_of(os.close, fd) in ("OK", "ENOTCONN", "ECONNABORTED", "EIO")
