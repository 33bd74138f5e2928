"""``fpfs-ctl top`` in a terminal of 80 by 24, and the same figures once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount, check_fpfs, mounted, run_fpfs
from tests.support.nobody import AS_NOBODY, need_nobody
from tests.support.processes import REPOSITORY
from tests.support.servers import kill

COLUMNS, LINES = 80, 24
DEADLINE_S = 60
SIZE = 3_000_000
needs_tmux = pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")


class Terminal:
    """A terminal of its own in a tmux server of its own."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words],
            check=True,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return done.stdout

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def wait_for(self, is_shown: Callable[[str], bool]) -> str:
        """What stands there when it is what is waited for."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_shown(text := self.screen()):
            assert time.monotonic() < deadline_s, text
            time.sleep(0.05)
        return text


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path / "tmux")
    size = ("-x", str(COLUMNS), "-y", str(LINES))
    made.tmux("-f", "/dev/null", "new-session", "-d", *size, "env PS1='ready> ' sh")
    try:
        yield made
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            made.tmux("kill-server")


def start(terminal: Terminal, mount: Mount) -> None:
    """Run the command in the terminal; what was there before comes back after it."""
    words = f"{sys.executable} -m fpfs.cli.ctl top {mount.root} --interval 0.2; echo ended $?"
    terminal.tmux("send-keys", f"PYTHONPATH={REPOSITORY} {words}", "Enter")


@needs_tmux
@pytest.mark.parametrize("key", ["q", pytest.param("C-c", marks=pytest.mark.long)])
def test_the_live_view(terminal: Terminal, key: str) -> None:
    with mounted() as mount:
        start(terminal, mount)
        idle = terminal.wait_for(lambda text: "no file is being written" in text)
        assert "ended" not in idle
        with open(mount.root / "model.pt", "wb", buffering=0) as stream:
            stream.write(os.urandom(SIZE))
            # It is shown as soon as it is open, of no bytes then.
            busy = terminal.wait_for(lambda text: "model.pt" in text and "2.86 MiB" in text)
            lines = busy.splitlines()
            assert len(lines) <= LINES
            assert all(len(line) <= COLUMNS for line in lines)
            assert str(mount.root) in lines[0]
            assert "0 restarts" in lines[0]
            (file,) = [line for line in lines if line.startswith("model.pt")]
            assert "2.86 MiB" in file
            head = lines.index(next(line for line in lines if line.startswith("dev ")))
            devices = lines[head + 1 : head + 3]
            assert [line.split()[0] for line in devices] == ["0", "1"]
            assert all(" ok " in line for line in devices)
        terminal.wait_for(lambda text: "all is durable" in text)
        terminal.tmux("send-keys", key)
        left = terminal.wait_for(lambda text: "ended 0" in text)
        assert "staging" not in left  # the screen is as it was
        terminal.tmux("send-keys", "echo typed", "Enter")
        terminal.wait_for(lambda text: text.count("typed") == 2)  # and so is the keyboard


@needs_tmux
@pytest.mark.long
def test_the_view_goes_on_with_the_next_server_and_ends_with_the_mount(terminal: Terminal) -> None:
    with mounted() as mount:
        mount.expect_log(r"server \d+ died \(signal 9\)")
        start(terminal, mount)
        terminal.wait_for(lambda text: "0 restarts" in text)
        kill(mount)
        terminal.wait_for(lambda text: "1 restart" in text and "1 restarts" not in text)
        mount.unmount()
        left = terminal.wait_for(lambda text: "ended 1" in text)
        assert "fpfs-ctl: top of " in left
        mount.mount()


def test_what_is_no_terminal_is_refused() -> None:
    with mounted() as mount:
        done = run_fpfs("top", mount.root, module="fpfs.cli.ctl")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"fpfs-ctl: top of {mount.root}: standard output is no terminal;"
            f" fpfs-ctl status {mount.root} shows it once\n"
        )
        done = run_fpfs("top", mount.root, "--interval", "0", module="fpfs.cli.ctl")
        assert "is not between 0.1 and 3600 seconds" in done.stderr


def test_status_shows_the_same_once() -> None:
    with mounted() as mount, open(mount.root / "model.pt", "wb", buffering=0) as stream:
        stream.write(os.urandom(SIZE))
        text = check_fpfs("status", mount.root, module="fpfs.cli.ctl")
        lines = text.splitlines()
        assert any(line.startswith("pending  2.86 MiB in no version yet") for line in lines)
        assert any(line.startswith("writes   0 kB/s, answered in -") for line in lines)
        (file,) = [line for line in lines if line.startswith("model.pt")]
        assert file.split()[1:4] == ["1", "0", "kB/s"]
        found = json.loads(check_fpfs("status", "--json", mount.root, module="fpfs.cli.ctl"))
        activity = found["activity"]
        assert activity["interval_s"] > 0
        assert (activity["bytes_pending"], activity["files_count"]) == (SIZE, 1)
        (told,) = activity["files"]
        assert (told["path"], told["writers"], told["bytes_pending"]) == ("model.pt", 1, SIZE)
        assert told["bytes_acknowledged_per_s"] == 0
        assert [each["number"] for each in activity["devices"]] == [0, 1]
        assert [each["state"] for each in activity["devices"]] == ["ok", "ok"]


@pytest.mark.root
def test_others_see_no_files() -> None:
    need_nobody()
    with mounted() as mount, open(mount.root / "secret.pt", "wb", buffering=0) as stream:
        stream.write(b"content")
        done = run_fpfs("status", mount.root, module="fpfs.cli.ctl", prefix=AS_NOBODY)
        assert done.returncode == 0, done.stderr
        assert "7 B in no version yet" in done.stdout
        assert "secret" not in done.stdout
        done = run_fpfs("status", mount.root, "--json", module="fpfs.cli.ctl", prefix=AS_NOBODY)
        activity = json.loads(done.stdout)["activity"]
        assert (activity["bytes_pending"], activity["files_written"]) == (7, 1)
        assert activity["files"] is activity["files_count"] is None
        assert "secret" not in done.stdout
