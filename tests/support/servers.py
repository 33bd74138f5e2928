"""Servers: ending them, waiting until they are gone, and what they have read."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from fpfs.core.engine import BLOCK_BYTES
from fpfs.daemon.devices import label
from fpfs.daemon.devices.label import LOCK_NAME, LockHolder
from fpfs.testing.mounted import Mount
from tests.support.processes import expect_line, python_child, tell

EXIT_TIMEOUT_S = 60

_HOLDING = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


def kill(mount: Mount, number: signal.Signals = signal.SIGKILL) -> None:
    """End the server with a signal and wait until it is gone."""
    process_fd = os.pidfd_open(mount.server_pid)
    try:
        signal.pidfd_send_signal(process_fd, number)
        ended, _, _ = select.select([process_fd], [], [], EXIT_TIMEOUT_S)
        assert ended, f"server {mount.server_pid} does not die"
    finally:
        os.close(process_fd)
    os.listdir(mount.root)  # waits for the next one
    mount.note_processes()


def wait_collected(mount: Mount) -> None:
    """Return when nobody looks for objects that no version refers to any more.

    A server looks in the background; one that ends meanwhile leaves the rest to the next.
    """
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while mount.status().recovery.objects_removed is None:
        assert time.monotonic() < deadline_s, "objects are looked for without end"


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: kill(2) returns before."""
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while not all(map(_has_stopped, Path(f"/proc/{pid}/task").iterdir())):
        assert time.monotonic() < deadline_s, f"process {pid} does not stop"


def _has_stopped(task: Path) -> bool:
    """Whether a thread has stopped, or ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for_exit(pid: int) -> None:
    """Wait until a process is gone."""
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([process_fd], [], [], EXIT_TIMEOUT_S)
        assert ended, f"process {pid} does not end"
    finally:
        os.close(process_fd)


class Reads(NamedTuple):
    """What a server has read until now."""

    requests: int
    asked_bytes: int
    """By the kernel."""
    device_bytes: int


def reads_of(mount: Mount) -> Reads:
    """Return what a mount's server has read."""
    status = mount.status()
    from_devices = sum(device.bytes_read for device in status.devices)
    return Reads(status.channel["reads"], status.channel["read_bytes"], from_devices)


def assert_read(mount: Mount, before: Reads, size: int, *, times: int = 1) -> None:
    """Since `before` the kernel has asked for `size` bytes so many times, and has no more read.

    A block within which one request ends and the next begins is read for both. How many requests
    there are is the kernel's: threads that read one place at once may share its pages among them.
    """
    now = reads_of(mount)
    asked = now.asked_bytes - before.asked_bytes
    assert asked / size == pytest.approx(times, rel=0.05)
    again = BLOCK_BYTES * (now.requests - before.requests)
    assert now.device_bytes - before.device_bytes <= asked + again


@contextlib.contextmanager
def draining(
    folder: Path, patched: pytest.MonkeyPatch, *, last: Callable[[], None] = lambda: None
) -> Iterator[list[bool]]:
    """A server that was unmounted holds a directory, does `last` when that is found, and ends.

    Yields what came of the tries to lock any.
    """
    lock = folder / LOCK_NAME
    lock.touch()
    tries: list[bool] = []
    with python_child(_HOLDING, lock) as server:
        expect_line(server, "held")
        lock.write_bytes(msgspec.json.encode(LockHolder(server.pid, str(folder / "not mounted"))))
        try_lock = label._try_lock

        def tried(fd: int) -> bool:
            tries.append(try_lock(fd))
            if not tries[-1]:
                last()
                tell(server)
            return tries[-1]

        patched.setattr(label, "_try_lock", tried)
        yield tries
