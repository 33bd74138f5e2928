"""Ends a mount as a failure of power does, as far as processes and memory are concerned.

What the kernel had not written to the devices is lost only on devices that lose it
(`tests.support.failures.faults`).
"""

from __future__ import annotations

import os

from fpfs.testing.mounted import Mount
from tests.support.system import errno_of


def crash(mount: Mount) -> None:
    """Kill keeper and server at once, take the mount away, and lose what was staged in memory."""
    mount.kill(mount.keeper_pid, mount.server_pid)
    mount.tear_down()
    mount.remove_arena()


def crash_and_mount(mount: Mount) -> None:
    """Crash, then mount the same devices at the same place."""
    crash(mount)
    mount.mount()


def close_dead(fd: int) -> None:
    """Close a descriptor of a mount that crashed: its flush reaches nobody."""
    assert errno_of(os.close, fd) in ("OK", "ENOTCONN", "ECONNABORTED", "EIO")
