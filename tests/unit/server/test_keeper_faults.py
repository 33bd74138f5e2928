"""What a server dies of, and what keeps the next one from being started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


KEEPER = """
import os, signal, sys
from fpfs.daemon.mount.supervisor import Keeper

def serve(link, inherited):
    if inherited is None:
        held = os.open("/dev/null", os.O_RDONLY)
        link.hold(device="", fuse_fd=held, lock_fds=[])
        link.serving()
        print(os.getpid(), flush=True)
        signal.pause()
    print("next", flush=True)
    link.ending()
    return 0

def unexpected(*_):
    raise AssertionError

os.setresuid(54321, 54321, 54321)
keeper = Keeper(
    serve=serve,
    give_up=unexpected,
    clean_up=unexpected,
    started=lambda: None,
    renew=unexpected,
    state=None,
)
sys.exit(keeper.run())
"""


LIMIT = """
import os, resource, sys
os.setresuid(54321, 54321, 54321)
pid, processes = map(int, sys.argv[1:])
_, hard = resource.prlimit(pid, resource.RLIMIT_NPROC)
resource.prlimit(pid, resource.RLIMIT_NPROC, (processes, hard))
"""


def limit(pid: int, processes: int) -> None:
    """Let a process of KEEPER's user make no more while there are so many."""
    words = [sys.executable, "-c", LIMIT, str(pid), str(processes)]
    subprocess.run(words, check=True, timeout=60)


@pytest.mark.root
def test_the_next_server_is_started_when_there_is_room_for_a_process() -> None:
    """What has killed the last one, as a limit, may still be there."""
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as keeper:
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        try:
            first = int(keeper.stdout.readline())
            limit(keeper.pid, 1)
            os.kill(first, signal.SIGKILL)
            told = [keeper.stderr.readline(), keeper.stderr.readline()]
            assert "died (signal 9): starting another" in told[0]
            assert "no server can be started ([Errno 11] " in told[1]
            limit(keeper.pid, 10)
            assert keeper.stdout.readline() == "next\n"
            assert keeper.wait(60) == 0
            assert keeper.stderr.read() == ""
        finally:
            keeper.kill()
