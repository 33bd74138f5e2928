"""A server in a PID namespace of its own: callers outside have no number that it could look at.

Its /proc is that of the machine, where callers inside have other numbers than the kernel tells it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fpfs.core.mounts import mount_at
from fpfs.daemon.mount.fusermount import abort_connection, unmount
from fpfs.testing.mounted import check_fpfs
from tests.support.contents import assert_same
from tests.support.failures.frozen import (
    FILLER,
    STAGING,
    Freezer,
    devices_to_freeze,
    needs_lab,
    wait_until_full,
    wait_until_writes_wait,
)
from tests.support.processes import expect_line, python_child, tell

pytestmark = [pytest.mark.root, needs_lab]

INTERRUPT_LOOKS = 5
WRITER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
content = b"w" * 2**20
signals = []
signal.signal(signal.SIGALRM, lambda *_: signals.append(1))  # without SA_RESTART
fd = os.open(sys.argv[1], os.O_WRONLY)
print("open", flush=True)
sys.stdin.readline()
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)  # the first may come before the write
written = libc.write(fd, content, len(content))
signal.setitimer(signal.ITIMER_REAL, 0)
if written != len(content):
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
assert signals
os.close(fd)
print("closed", flush=True)
"""


class Confined(NamedTuple):
    """A mount whose processes see none but themselves."""

    root: Path
    keeper_pid: int
    """As it is seen outside, like the server's."""
    server_pid: int
    freezer: Freezer

    def wait_looked(self, writer: subprocess.Popen[str]) -> None:
        """Return when the server has looked several times at a writer that was interrupted."""
        before = self._relay_sleeps()
        while self._relay_sleeps() < before + INTERRUPT_LOOKS:
            assert writer.poll() is None, "it did not wait"

    def _relay_sleeps(self) -> int:
        """How often the thread has gone to sleep that comes again while an interrupt waits."""
        for task in Path(f"/proc/{self.server_pid}/task").iterdir():
            if (task / "comm").read_text() == "fpfs-relay\n":
                status = (task / "status").read_text()
                return int(status.partition("\nvoluntary_ctxt_switches:\t")[2].split("\n")[0])
        raise AssertionError("the server has no relay thread")


def _only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.fixture
def confined(tmp_path: Path) -> Iterator[Confined]:
    """A mount on two devices, of which the second can be frozen."""
    root = tmp_path / "mount"
    root.mkdir()
    with devices_to_freeze(tmp_path) as (folders, freezer):
        check_fpfs("format", *(word for folder in folders for word in ("-d", folder)))
        command = ["unshare", "--pid", "--fork", "--kill-child"]
        command += [sys.executable, "-m", "fpfs.cli.main", "mount", "--foreground"]
        command += [word for folder in folders for word in ("-d", str(folder))]
        command += ["-o", f"staging={STAGING}", str(root)]
        unshare = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert unshare.stderr is not None
        try:
            line = unshare.stderr.readline()
            assert "mounted at" in line, line
            keeper_pid = _only_child(unshare.pid)
            yield Confined(root, keeper_pid, _only_child(keeper_pid), freezer)
            freezer.thaw()
            check_fpfs("umount", root)
            log = unshare.communicate(timeout=60)[1]
            assert unshare.returncode == 0, log
            assert "WARNING" not in log, log
        finally:
            freezer.thaw()
            entry = mount_at(str(root))
            if entry is not None:
                abort_connection(entry)
                unmount(str(root), lazy=True)
            if unshare.poll() is None:
                unshare.kill()
            unshare.communicate()


def _inside(pid: int) -> list[str]:
    """What begins a command in the namespace of `pid`, with a number that nobody has outside."""
    # The kernel gives numbers out upwards: one below the last has its next turn after all others.
    # Those up to 300 it gives out once, when the machine starts.
    last = int(Path("/proc/loadavg").read_text().split()[-1])
    number = next(n for n in range(last, 301, -1) if not Path(f"/proc/{n}").exists())
    script = f'echo {number - 1} > /proc/sys/kernel/ns_last_pid; "$@"; exit $?'
    return ["nsenter", f"--pid=/proc/{pid}/ns/pid", "sh", "-euc", script, "sh"]


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_handled_signal_does_not_end_a_write_that_waits(confined: Confined, where: str) -> None:
    """Whether its caller was killed cannot be known: it waits, and its close counts."""
    path = confined.root / "step.pt"
    path.write_bytes(b"before")
    prefix = _inside(confined.keeper_pid) if where == "inside" else []
    with (
        python_child(FILLER, confined.root / "endless") as filler,
        python_child(WRITER, path, prefix=prefix) as writer,
    ):
        expect_line(filler, "open")
        expect_line(writer, "open")
        confined.freezer.freeze()
        try:
            tell(filler)
            wait_until_full(confined.root)
            tell(writer)
            confined.wait_looked(writer)
        finally:
            confined.freezer.thaw()
        expect_line(writer, "closed")
        filler.kill()
    assert_same(path.read_bytes(), b"w" * 2**20)


def test_a_writer_that_cannot_be_seen_dies_when_its_write_is_done(confined: Confined) -> None:
    path = confined.root / "step.pt"
    path.write_bytes(b"before")
    with (
        python_child(FILLER, confined.root / "endless") as filler,
        python_child(WRITER, path) as writer,
    ):
        expect_line(filler, "open")
        expect_line(writer, "open")
        confined.freezer.freeze()
        try:
            tell(filler)
            wait_until_full(confined.root)
            tell(writer)
            wait_until_writes_wait(confined.root, 2)
            writer.kill()
            confined.wait_looked(writer)
        finally:
            confined.freezer.thaw()
        assert writer.wait(timeout=60) == -signal.SIGKILL
        filler.kill()
    assert set(path.read_bytes()) == set(b"w")  # as if it had closed the file itself
