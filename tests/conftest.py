"""What holds for all tests: hangs end with stacks, skips are counted with their reasons.

What is marked `root` is skipped for everybody else; while what is marked `alone` runs, no other
process runs a test. Warnings are errors by pyproject.toml. A test
that takes longer than HANG_S is a hang: the stacks of this process and of every mounted server are
printed, the mounts are aborted, and the run exits.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import fcntl
import gc
import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator

import hypothesis
import pytest

from fpfs.daemon.mount.fusermount import abort_connection
from fpfs.testing import mounted
from fpfs.testing.mounted import live_mounts
from fpfs.testing.warm import WarmCommands
from tests.support.ranks import forks
from tests.support.seeds import IS_LONG

__all__ = ["forks"]

HANG_S = float(os.environ.get("FPFS_TEST_HANG_S", "600"))
EXIT_HANG = 70

_terminal_fd = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep a way to the terminal that capturing does not hide, and let commands be interrupted.

    What a shell starts in the background ignores SIGINT, and so does everything it starts.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o022)  # A group may not write to device directories.
    # Torch's threads would wait for each other by looking, and the tests share few processors.
    os.environ["OMP_NUM_THREADS"] = "1"
    config.stash[_terminal_fd] = os.dup(2)
    mounted.warm = WarmCommands()
    # Examples are the same in every short run, as all random numbers are.
    # None has a deadline: a busy machine would miss it.
    hypothesis.settings.register_profile("short", derandomize=True, deadline=None)
    hypothesis.settings.register_profile("long", deadline=None)
    hypothesis.settings.load_profile("long" if IS_LONG else "short")


def pytest_collection_finish() -> None:
    """Have no later collection of garbage look at what all tests need, and no fork copy it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what forks commands."""
    if mounted.warm is not None:
        mounted.warm.close()
        mounted.warm = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The marker alone skips: no test has to say a second time that it needs root."""
    if item.get_closest_marker("root") is not None and os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch one test with its fixtures."""
    with _turn(alone=item.get_closest_marker("alone") is not None):
        watchdog = threading.Timer(
            HANG_S, _end_hang, [item.nodeid, item.config.stash[_terminal_fd]]
        )
        watchdog.daemon = True
        watchdog.start()
        try:
            return (yield)
        finally:
            watchdog.cancel()


@contextlib.contextmanager
def _turn(*, alone: bool) -> Iterator[None]:
    """Run beside the tests of other processes, or alone on this machine.

    Who waits to be alone keeps the door shut, so that nobody else begins. A child that outlives a
    test has nothing of this: the locks are a process's own.
    """
    door, room = 0, 1
    # Not in TMPDIR, which others may have set otherwise: the machine is one.
    with open(f"/tmp/fpfs-tests-{os.getuid()}.lock", "w+b") as locks:
        fcntl.lockf(locks, fcntl.LOCK_EX, 1, door)
        fcntl.lockf(locks, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, 1, room)
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, door)
        yield


def _end_hang(name: str, terminal_fd: int) -> None:
    """Print every stack, free what hangs on a mount, and exit."""
    with os.fdopen(terminal_fd, "w") as terminal:
        terminal.write(f"\n{name} hangs for {HANG_S:g} s\nrepeat: {_repeat(name)}\n")
        terminal.flush()
        faulthandler.dump_traceback(terminal, all_threads=True)
        for mount in list(live_mounts):
            terminal.write(f"server of {mount.root}:\n{mount.stacks()}\n")
            entry = mount.entry()
            if entry is not None:
                abort_connection(entry)
            mount.tear_down()
            mount.remove_arena()
        terminal.flush()
        if "PYTEST_XDIST_WORKER" in os.environ:
            os.kill(os.getppid(), signal.SIGINT)  # the others would wait for this one's tests
        os._exit(EXIT_HANG)


def _repeat(name: str, printed: str = "") -> str:
    """The command that runs a test again, at the same size and with the seed that it `printed`."""
    seed = re.search(r"FPFS_SEED=\d+", printed)
    words = [*(["FPFS_LONG=1"] if IS_LONG else []), *([seed.group()] if seed else [])]
    return " ".join([*words, sys.executable, "-m pytest -m ''", f"'{name}'"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell where the time went, count what was skipped, and say how to repeat what failed."""
    seconds: collections.Counter[str] = collections.Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[os.path.dirname(report.nodeid.partition("::")[0])] += report.duration
    for folder, duration in seconds.most_common():
        terminalreporter.write_line(f"{duration:6.0f} s in {folder}")
    reasons: collections.Counter[str] = collections.Counter()
    for report in terminalreporter.stats.get("skipped", []):
        longrepr = report.longrepr
        reasons[longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)] += 1
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason.removeprefix('Skipped: ')}")
    for kind in ("failed", "error"):
        for report in terminalreporter.stats.get(kind, []):
            repeat = _repeat(report.nodeid, report.capstdout)
            terminalreporter.write_line(f"repeat: {repeat}")
