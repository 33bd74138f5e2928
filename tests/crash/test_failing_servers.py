"""Servers that answer, and then die by themselves again and again: given up, and only these."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fpfs.daemon.mount.supervisor import FAULTS_MAX, FAULTS_S
from fpfs.testing.mounted import REPOSITORY
from tests.support.failures.poison import poisoned_mount
from tests.support.servers import wait_for_exit

GIVEN_UP = f"{FAULTS_MAX} servers within {FAULTS_S} s died of what they did"

KEEP = """if True:
    import logging, os, resource, signal, sys
    from fpfs.daemon.mount.supervisor import Keeper

    logging.basicConfig(format="%(message)s")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    {definitions}
    keeper = {kind}(
        serve=serve,
        give_up=lambda: print("given up"),
        clean_up=lambda: print("cleaned up"),
        started=lambda: None,
        renew=sys.exit,
        state=None,
    )
    sys.exit(keeper.run())
"""

FAILING = """
    hows, deaths = sys.argv[1].split(","), int(sys.argv[2])

    def serve(link, inherited):
        restarts = inherited.restarts if inherited else 0
        if inherited is None:
            link.hold(device="0:0", fuse_fd=os.open(os.devnull, os.O_RDONLY), lock_fds=[])
        link.serving()
        if restarts == deaths:
            link.ending()
            return 0
        how = hows[restarts % len(hows)]
        if how == "exit":
            return 70
        os.kill(os.getpid(), signal.Signals[how])
"""


SIGNALLED = """
    class Signalled(Keeper):
        def _count(self, status):
            os.kill(os.getpid(), signal.SIGTERM)
            return super()._count(status)

    def serve(link, inherited):
        if inherited is None:
            link.hold(device="0:0", fuse_fd=os.open(os.devnull, os.O_RDONLY), lock_fds=[])
            link.serving()
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        link.serving()
        print(signal.sigwait([signal.SIGTERM]).name, flush=True)
        link.ending()
        return 0
"""


def run_keeper(
    definitions: str, *arguments: str, kind: str = "Keeper"
) -> subprocess.CompletedProcess[str]:
    """Run a keeper in a process group of its own; `definitions` are of its servers."""
    return subprocess.run(
        [sys.executable, "-c", KEEP.format(definitions=definitions, kind=kind), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
        check=False,
    )


def keep(*hows: str, deaths: int) -> tuple[int, str, str]:
    """Run a keeper whose servers die in turn in these ways; its exit status and what it said."""
    done = run_keeper(FAILING, ",".join(hows), str(deaths))
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("how", ["exit", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"])
def test_servers_that_die_of_what_they_do_are_given_up(how: str) -> None:
    status, done, log = keep(how, deaths=2 * FAULTS_MAX)
    assert (status, done) == (1, "given up\n")
    assert log.count("starting another") == FAULTS_MAX
    assert log.count(GIVEN_UP) == 1
    assert GIVEN_UP in log.splitlines()[-1]


def test_servers_that_are_killed_are_never_given_up() -> None:
    assert keep("SIGKILL", "SIGTERM", deaths=3 * FAULTS_MAX)[:2] == (0, "")
    # Those that die of themselves count as well when others are killed in between.
    assert keep("SIGKILL", "exit", deaths=2 * FAULTS_MAX - 1)[:2] == (0, "")
    assert keep("SIGKILL", "exit", deaths=2 * FAULTS_MAX)[:2] == (1, "given up\n")


def test_a_signal_between_two_servers_is_for_the_next_one_alone() -> None:
    """Not for the keeper's whole process group, of which it is one."""
    done = run_keeper(SIGNALLED, kind="Signalled")
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n"), done.stderr


def test_a_mount_whose_servers_fail_again_and_again_is_given_up(tmp_path: Path) -> None:
    """What was acknowledged is there when it is mounted again."""
    content = os.urandom(5_000_001)
    deaths = 10
    with poisoned_mount(tmp_path, faults_max=deaths) as (mount, orders):
        mount.allow_log(r"fpfs.keeper: server \d+ died \(exit status 1\): starting another")
        mount.expect_log(f"{deaths} servers within {FAULTS_S} s died of what they did")
        (mount.root / "file").write_bytes(content)
        keeper_pid = mount.keeper_pid
        orders.give("at-serving", "exit")
        orders.give("first", "exit")
        asking = threading.Thread(target=ask, args=(mount.root / "file",))
        asking.start()
        wait_for_exit(keeper_pid)
        asking.join()
        assert mount.entry() is None
        mount.forget()
        orders.take_back("at-serving")
        mount.mount()
        assert (mount.root / "file").read_bytes() == content


def ask(path: Path) -> None:
    """Ask for an attribute, which the mount does not live to answer."""
    with pytest.raises(OSError, match=r"."):
        os.getxattr(path, "user.first")
