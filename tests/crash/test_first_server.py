"""Deaths while a mount is made: none is left that nobody serves, and none that is served goes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_at
from fpfs.core.protocol.control import runtime_folders, socket_path
from fpfs.daemon.mount.fusermount import is_dead
from fpfs.testing.mounted import REPOSITORY, Mount, check_fpfs, mounted, run_fpfs
from tests.crash.kill import child_of
from tests.support.failures.poison import HOOK, Orders
from tests.support.refusals import refusal
from tests.support.servers import EXIT_TIMEOUT_S, stop, wait_for_exit
from tests.support.waiting import wait_until


class Making:
    """A mount that is being made, whose servers do what they are told."""

    def __init__(self, folder: Path) -> None:
        """Make the places."""
        self.root, self.device = folder / "mount", folder / "device"
        self.log = folder / "server.log"
        self.orders = Orders(folder / "orders")
        for path in (self.root, self.device, self.orders.folder):
            path.mkdir()
        self.words = ("-d", str(self.device), "--log", str(self.log), "-o", "staging=16M")
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(HOOK), str(REPOSITORY))),
            "FPFS_TEST_POISON": str(self.orders.folder),
        }

    def start(self, *added: str) -> subprocess.Popen[str]:
        """Start ``fpfs mount``."""
        return subprocess.Popen(
            [sys.executable, "-m", "fpfs.cli.main", "mount", *added, *self.words, str(self.root)],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def keeper_of(self, mount: subprocess.Popen[str]) -> int:
        """The keeper that a background mount has started."""
        (child,) = Path(f"/proc/{mount.pid}/task/{mount.pid}/children").read_text().split()
        return int(child)

    def is_mounted(self) -> bool:
        """Whether anything is mounted, dead or alive."""
        return mount_at(str(self.root)) is not None

    def holds_device(self) -> bool:
        """Whether some server has the device."""
        with (self.device / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def check_works(self) -> None:
        """Mount, use and unmount."""
        done = run_fpfs("mount", *self.words, self.root)
        assert done.returncode == 0, done.stderr
        (self.root / "file").write_bytes(b"content")
        check_fpfs("umount", self.root)


@pytest.fixture
def making(tmp_path: Path) -> Iterator[Making]:
    """What a mount is to be made of; nothing is mounted at the end, whatever happened."""
    made = Making(tmp_path)
    yield made
    if made.is_mounted():
        run_fpfs("umount", made.root)
    assert not made.is_mounted()


def kill(*pids: int) -> None:
    """Kill processes and wait until they are gone."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        wait_for_exit(pid)


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_a_server_that_dies_when_it_has_mounted_leaves_no_mount(making: Making, how: str) -> None:
    making.orders.give("at-mounted", f"once {how}")
    with making.start() as mount:
        _, said = mount.communicate(timeout=EXIT_TIMEOUT_S)
    assert "the server ended before it was ready" in said
    assert mount.returncode == 1
    assert not making.is_mounted()
    making.check_works()


def kill_server(making: Making, mount: subprocess.Popen[str]) -> None:
    """Kill the server alone."""
    kill(child_of(making.keeper_of(mount)))


def kill_keeper(making: Making, mount: subprocess.Popen[str]) -> None:
    """Kill the keeper alone."""
    kill(making.keeper_of(mount))


def kill_both(making: Making, mount: subprocess.Popen[str]) -> None:
    """Kill keeper and server."""
    kill(making.keeper_of(mount), child_of(making.keeper_of(mount)))


def kill_all(making: Making, mount: subprocess.Popen[str]) -> None:
    """Kill keeper, server, and who started them."""
    stop(mount.pid)
    kill_both(making, mount)
    mount.kill()


@pytest.mark.parametrize("die", [kill_server, kill_keeper, kill_both, kill_all])
@pytest.mark.parametrize("point", ["at-mounted", "at-held"])
def test_who_survives_a_beginning_takes_the_mount_away(
    making: Making, die: Callable[[Making, subprocess.Popen[str]], None], point: str
) -> None:
    """At the latest the next mount does."""
    making.orders.give(point, "block")
    with making.start() as mount:
        making.orders.wait_met(point)
        assert making.is_mounted()
        die(making, mount)
        making.orders.take_back(point)
        mount.communicate(timeout=EXIT_TIMEOUT_S)
    if die is not kill_all:
        wait_until_gone(making)
    making.check_works()


def wait_until_gone(making: Making) -> None:
    """Wait until nothing is mounted: a server without keeper ends its mount when it is made.

    It holds its device for a moment longer, until it has ended.
    """
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while making.is_mounted() or making.holds_device():
        assert time.monotonic() < deadline_s, "it is still mounted, or holds its device"
    with making.log.open() as log:
        assert "Traceback" not in log.read()


def test_a_server_that_dies_while_fusermount_mounts_leaves_no_mount(
    making: Making, tmp_path: Path
) -> None:
    """fusermount3 goes on without it, and may have mounted by then or not."""
    real, met, go = shutil.which("fusermount3"), tmp_path / "met", tmp_path / "go"
    script = tmp_path / "fusermount3"
    script.write_text(
        f'#!/bin/sh\ntouch {met}\nwhile test ! -e {go}; do sleep 0.01; done\nexec {real} "$@"\n'
    )
    script.chmod(0o755)
    making.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    for has_mounted in (False, True):
        with making.start() as mount:
            wait_until(met.exists)
            server_pid = child_of(making.keeper_of(mount))
            if has_mounted:
                stop(server_pid)
                go.touch()
                wait_until(making.is_mounted)
                kill(server_pid)
            else:
                kill(server_pid)
                go.touch()
            mount.communicate(timeout=EXIT_TIMEOUT_S)
        assert mount.returncode == 1
        assert not making.is_mounted()
        met.unlink()
        go.unlink()
    making.check_works()


def test_a_dead_mount_is_taken_away_by_the_next_one() -> None:
    with mounted() as mount:
        (mount.root / "file").write_bytes(b"acknowledged")
        entry = mount.entry()
        assert entry is not None
        assert not is_dead(entry)
        mount.kill(mount.keeper_pid, mount.server_pid)
        assert is_dead(entry)
        mount.forget()
        mount.mount()
        assert (mount.root / "file").read_bytes() == b"acknowledged"
        mount.remount()  # nothing is left below
        mount.unmount()
        assert mount.entry() is None
        mount.mount()


@contextlib.contextmanager
def as_of_its_number(former: Mount, mount: Mount) -> Iterator[None]:
    """Let the server of one mount listen also where those of a mount's number do.

    The kernel gives the number of a mount to the next one while a server still ends the first.
    """
    theirs, ours = former.entry(), mount.entry()
    assert theirs is not None
    assert ours is not None
    (folder, *_) = [path for path in runtime_folders(os.geteuid()) if os.path.isdir(path)]
    link = Path(socket_path(ours.device, folder=folder, pid=former.keeper_pid))
    link.symlink_to(socket_path(theirs.device, folder=folder, pid=former.keeper_pid))
    try:
        yield
    finally:
        link.unlink()


def test_a_mount_is_known_from_one_that_had_its_number() -> None:
    with mounted() as former, mounted() as mount, as_of_its_number(former, mount):
        former.expect_log(r"fpfs.keeper: server \d+ died \(signal 9\)")
        assert mount.status().server_pid == mount.server_pid
        former.kill(former.server_pid)
        former.note_processes()
        assert mount.status().server_pid == mount.server_pid
        entry = mount.entry()
        assert entry is not None
        mount.kill(mount.keeper_pid, mount.server_pid)
        assert is_dead(entry)
        done = run_fpfs("umount", mount.root)
        assert (done.returncode, "its server was gone" in done.stderr) == (1, True), done.stderr
        assert mount.entry() is None
        assert former.entry() is not None
        mount.forget()
        mount.mount()


@pytest.mark.parametrize("keeper_too", [False, True], ids=["server", "server and keeper"])
def test_a_mount_that_hangs_is_left_alone(keeper_too: bool) -> None:
    with mounted() as mount:
        entry = mount.entry()
        assert entry is not None
        stop(mount.server_pid)
        if keeper_too:
            stop(mount.keeper_pid)
        message = refusal("mount", "-d", mount.devices[0], mount.root)
        assert f"fpfs is mounted at {mount.root} already" in message
        assert mount.entry() == entry
        for pid in (mount.keeper_pid, mount.server_pid):
            os.kill(pid, signal.SIGCONT)
