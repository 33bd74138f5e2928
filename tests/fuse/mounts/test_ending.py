"""How a server ends: by a signal, by a second one, by an unmount while its devices are slow."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.protocol import whereabouts
from fpfs.core.protocol.reports import FileStatus
from fpfs.daemon.devices.arena import arena_path
from fpfs.daemon.mount.fusermount import abort_connection
from fpfs.testing import lab
from fpfs.testing.mounted import Mount, mounted
from tests.support.failures.damage import unknown_objects
from tests.support.failures.hostile import wait_in
from tests.support.processes import expect_line, python_child
from tests.support.servers import stop
from tests.support.waiting import wait_until

EXIT_TIMEOUT_S = 60
FPFS = [sys.executable, "-m", "fpfs.cli.main"]
LAB_REASON = lab.unavailable_reason()


def wait_for_exit(pid_fd: int, *, timeout_s: float = EXIT_TIMEOUT_S) -> None:
    """Wait until the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pid_fd, select.POLLIN)
    assert poll.poll(timeout_s * 1000), f"the server runs on after {timeout_s} s"


def end(mount: Mount, *signals: signal.Signals) -> None:
    """Send signals to a server and wait until it has ended."""
    pid_fd = os.pidfd_open(mount.server_pid)
    try:
        signal.pidfd_send_signal(pid_fd, signals[0])
        for number in signals[1:]:
            with contextlib.suppress(ProcessLookupError):  # it has ended of the first one
                signal.pidfd_send_signal(pid_fd, number)
        wait_for_exit(pid_fd)
    finally:
        os.close(pid_fd)
    mount.forget()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_unmounts(number: signal.Signals) -> None:
    with mounted() as mount:
        content = os.urandom(150_000_001)
        (mount.root / "file").write_bytes(content)
        end(mount, number)
        assert mount.entry() is None
        assert f"{number.name}: draining and unmounting" in mount.log_text()
        assert "ended; all is durable" in mount.log_text()
        mount.mount()
        assert (mount.root / "file").read_bytes() == content


def test_repeated_sigterm_is_one(tmp_path: Path) -> None:
    with mounted() as mount:
        (mount.root / "file").write_bytes(b"content" * 1_000_000)
        end(mount, signal.SIGTERM, signal.SIGTERM, signal.SIGTERM)
        assert mount.log_text().count("draining and unmounting") == 1
        mount.mount()
        assert (mount.root / "file").read_bytes() == b"content" * 1_000_000


def test_a_signal_while_an_unmounted_server_closes_changes_nothing() -> None:
    """It comes when the arena is gone: some of what it would ask is closed then."""
    with mounted() as mount:
        arena = arena_path(mount.status().filesystem_id)
        for _ in range(5):
            (mount.root / "file").write_bytes(b"content" * 1_000_000)
            pid_fd = os.pidfd_open(mount.server_pid)
            try:
                with subprocess.Popen([*FPFS, "umount", str(mount.root)]) as unmounting:
                    while os.path.exists(arena):
                        pass
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pid_fd, signal.SIGTERM)
                assert unmounting.returncode == 0
                wait_for_exit(pid_fd)
            finally:
                os.close(pid_fd)
            mount.forget()
            mount.mount()
        assert (mount.root / "file").read_bytes() == b"content" * 1_000_000


def test_open_files_do_not_keep_a_server_from_ending() -> None:
    with mounted() as mount:
        mount.expect_log(r"files were open at the end")
        file_fd = os.open(mount.root / "file", os.O_RDWR | os.O_CREAT)
        try:
            os.write(file_fd, b"acknowledged")
            end(mount, signal.SIGTERM)
            assert mount.entry() is None
            with pytest.raises(OSError, match=r".") as failed:
                os.write(file_fd, b"too late")
            assert failed.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        finally:
            with pytest.raises(OSError, match=r"."):
                os.close(file_fd)
        mount.mount()
        assert (mount.root / "file").read_bytes() == b"acknowledged"


def test_a_file_without_a_name_that_is_open_at_the_end_leaves_nothing_on_the_devices() -> None:
    """No version of it was ever committed, and after a clean end nobody looks for its objects."""
    with mounted() as mount:
        mount.allow_log("files were open at the end")
        with (mount.root / "gone").open("wb", buffering=0) as file:
            (mount.root / "gone").unlink()
            file.write(os.urandom(20_000_000))
            end(mount, signal.SIGTERM)
            with contextlib.suppress(OSError):  # it was written to a mount that is gone
                file.close()
        assert not unknown_objects(mount)


def test_an_abort_is_not_logged_as_an_unmount() -> None:
    with mounted() as mount:
        mount.expect_log("serving ended by an error: taking the mount away")
        entry = mount.entry()
        assert entry is not None
        server_fd = os.pidfd_open(mount.server_pid)
        assert abort_connection(entry)
        wait_for_exit(server_fd)
        os.close(server_fd)
        mount.forget()
        assert " INFO fpfs.server: the connection was aborted\n" in mount.log_text()
        assert " INFO fpfs.server: unmounted\n" not in mount.log_text()
        mount.mount()


def test_stacks_are_dumped_on_request() -> None:
    with mounted() as mount:
        assert "most recent call first" in mount.stacks()
        (mount.root / "file").write_bytes(b"it serves on")


@pytest.fixture
def slow_lab(tmp_path: Path) -> Iterator[lab.Lab]:
    """One device that drains 4 MiB in a second."""
    with lab.lab(device_count=1, mib_per_s=4, size_bytes=512 * 2**20, parent=tmp_path) as made:
        yield made


@pytest.fixture
def slow_devices(slow_lab: lab.Lab) -> list[Path]:
    """The device directory to come on it."""
    return [path / "fpfs" for path in slow_lab.mountpoints]


def limit(made: lab.Lab, *, bytes_per_s: int | None) -> None:
    """Set what each of a lab's devices writes in a second; None is as fast as it can."""
    assert made.throttle is not None
    for device in made.devices():
        assert device.device_number is not None
        if bytes_per_s is None:
            made.throttle.clear(device.device_number)
        else:
            made.throttle.limit(device.device_number, bytes_per_s=bytes_per_s)


def writers(path: Path) -> int:
    """How many handles of a file are open for writing, as far as the server knows."""
    found = whereabouts.status(path)
    assert isinstance(found, FileStatus)
    return found.writers


@pytest.mark.root
@pytest.mark.skipif(LAB_REASON is not None, reason=str(LAB_REASON))
@pytest.mark.parametrize("before", [[], ["SIGTERM"]], ids=["alone", "after SIGTERM"])
def test_a_second_sigint_says_what_may_be_lost_and_stops(
    slow_lab: lab.Lab, slow_devices: list[Path], before: list[str]
) -> None:
    for path in slow_devices:
        path.mkdir()
    with mounted(devices=slow_devices, staging="128M") as mount:
        (mount.root / "kept").write_bytes(b"durable")
        mount.flush()
        limit(slow_lab, bytes_per_s=2**20)  # the drain goes on at the second SIGINT
        left = os.urandom(100 * 2**20)
        (mount.root / "left").write_bytes(left)
        # The kernel tells of a close after close(2) has returned: a drain that begins before does
        # not wait for the file, and the mount is gone at the second SIGINT.
        wait_until(lambda: writers(mount.root / "left") == 0)
        mount.expect_log(r"ERROR .*stopped by a second SIGINT: \d.* in staging and \d+ uncommitted")
        mount.expect_log(
            r"took over 0 open handles and 1 files with changes, of which 1 were closed"
        )
        # By the keeper, when the server has ended.
        mount.expect_log("WARNING .*the server died where nobody else held the mount")
        pid_fd, keeper_fd = map(os.pidfd_open, (mount.server_pid, mount.keeper_pid))
        for name in [*before, "SIGINT"]:
            signal.pidfd_send_signal(pid_fd, signal.Signals[name])
            wait_for_log(mount, f"{name}: draining")
        signal.pidfd_send_signal(pid_fd, signal.SIGINT)
        limit(slow_lab, bytes_per_s=None)  # what the dead server has in flight has to end, too
        wait_for_exit(keeper_fd)
        os.close(keeper_fd)
        os.close(pid_fd)
        assert mount.entry() is None
        mount.forget()
        mount.mount()
        assert (mount.root / "kept").read_bytes() == b"durable"
        assert (mount.root / "left").read_bytes() == left


@pytest.mark.root
@pytest.mark.skipif(LAB_REASON is not None, reason=str(LAB_REASON))
def test_umount_waits_for_a_slow_drain(slow_devices: list[Path]) -> None:
    for path in slow_devices:
        path.mkdir()
    with mounted(devices=slow_devices, staging="64M") as mount:
        (mount.root / "file").write_bytes(os.urandom(16 * 2**20))
        server_fd = os.pidfd_open(mount.server_pid)
        try:
            mount.unmount()
            wait_for_exit(server_fd, timeout_s=0)
        finally:
            os.close(server_fd)
        assert "ended; all is durable" in mount.log_text()


def test_umount_waits_for_the_keeper_which_holds_files_on_the_devices() -> None:
    """Otherwise what the devices lie on would be busy for a moment."""
    with mounted() as mount:
        keeper_fd, server_fd = map(os.pidfd_open, (mount.keeper_pid, mount.server_pid))
        stop(mount.keeper_pid)
        try:
            command = subprocess.Popen([*FPFS, "umount", str(mount.root)])
            wait_for_exit(server_fd)
            wait_in(command.pid, "poll")
            assert command.poll() is None
        finally:
            signal.pidfd_send_signal(keeper_fd, signal.SIGCONT)
        assert command.wait() == 0
        wait_for_exit(keeper_fd, timeout_s=0)
        os.close(keeper_fd)
        os.close(server_fd)
        mount.forget()


def wait_for_log(mount: Mount, words: str) -> None:
    """Wait until the server's log has `words`: a signal is handled some time after it was sent."""
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while words not in mount.log_text():
        assert time.monotonic() < deadline_s, f"no {words!r} in the log"
        os.sched_yield()


def test_who_writes_when_the_mount_ends_has_not_finished(tmp_path: Path) -> None:
    """Its checkpoint stays what it was; other files have what was written so far."""
    good, torn = os.urandom(3_000_001), b"torn" * 1_000_000
    code = """if True:
        import sys
        streams = [open(f"{sys.argv[1]}/{name}", "wb", buffering=0) for name in sys.argv[2:]]
        for stream in streams:
            stream.write(b"torn" * 1_000_000)
        print("written", flush=True)
        sys.stdin.readline()
    """
    with mounted() as mount:
        mount.allow_log(r"the writer of .*\.pt was cut off by the end of the mount")
        mount.allow_log("files were open at the end")
        (mount.root / "step.pt").write_bytes(good)
        with python_child(code, mount.root, "step.pt", "new.pt", "train.log") as child:
            expect_line(child, "written")
            end(mount, signal.SIGTERM)
            child.kill()
        mount.mount()
        assert sorted(os.listdir(mount.root)) == ["step.pt", "train.log"]
        assert (mount.root / "step.pt").read_bytes() == good
        assert (mount.root / "train.log").read_bytes() == torn
        quarantine = mount.root / ".fpfs/partial"
        assert [(quarantine / name).read_bytes() for name in os.listdir(quarantine)] == [torn, torn]
