"""Real mounts for tests: made by the command in fresh folders, and always taken down.

`mounted` formats device directories, runs ``fpfs mount``, and yields a `Mount`. At the end it runs
``fpfs umount``; a mount that hangs has its stacks printed and its connection aborted.

Invariants:
  * Whatever happened, when the context ends nothing is mounted, the server is gone, and the folder
    is removed.
  * A line of WARNING or above in the server's log fails the test, unless it was expected.

Concurrency: one thread; `live_mounts` is read by a watchdog thread as well.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fpfs.core.mounts import MountEntry, mount_at
from fpfs.core.protocol.control import ControlClient
from fpfs.core.protocol.questions import AskStatus, FlushAll
from fpfs.core.protocol.reports import Flushed, Status
from fpfs.core.refusal import Refused
from fpfs.daemon.devices.arena import arena_path
from fpfs.daemon.devices.label import read_stamp
from fpfs.daemon.mount.fusermount import abort_connection, unmount
from fpfs.testing.warm import WarmCommands

REPOSITORY = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 120
KILL_TIMEOUT_S = 60
STAGING_DEFAULT = "32M"
IN_MEMORY = Path("/dev/shm")
"""A parent of mounts whose flushes wait for no disk: for tests of many of them."""

_PROBLEM = re.compile(r"^\S+Z (WARNING|ERROR|CRITICAL) ", re.MULTILINE)
_UNCAUGHT = re.compile(r"^(Traceback|Fatal Python error|.*Sanitizer)", re.MULTILINE)

live_mounts: list[Mount] = []
"""Mounts of this process that are not taken down yet."""

warm: WarmCommands | None = None
"""Forks the commands that need no other environment or start, where a run of tests has set it."""


class CommandFailed(AssertionError):
    """A command ended with another exit status than 0; the message has what it wrote."""


def run_fpfs(
    *arguments: str | Path,
    module: str = "fpfs.cli.main",
    timeout_s: float = COMMAND_TIMEOUT_S,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    address_space_max: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``fpfs`` (or another command's module) with this interpreter, whatever comes of it.

    Its address space may be limited to a number of bytes.
    """
    words = [str(argument) for argument in arguments]
    added = {"PYTHONPATH": str(REPOSITORY), **(environment or {})}
    # What the loader and the interpreter read when they start.
    is_read_at_start = any(name.startswith(("LD_", "PYTHON")) for name in environment or {})
    if warm is not None and not prefix and not is_read_at_start:
        return warm.run(
            module,
            words,
            environment={**os.environ, **added},
            timeout_s=timeout_s,
            address_space_max=address_space_max,
        )
    limit = [] if address_space_max is None else ["prlimit", f"--as={address_space_max}"]
    return subprocess.run(
        [*prefix, *limit, sys.executable, "-m", module, *words],
        env={**os.environ, **added},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def check_fpfs(
    *arguments: str | Path,
    module: str = "fpfs.cli.main",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run ``fpfs`` and return what it printed; `CommandFailed` unless it succeeds."""
    done = run_fpfs(*arguments, module=module, environment=environment)
    if done.returncode != 0:
        words = " ".join(str(argument) for argument in arguments)
        raise CommandFailed(f"{module} {words}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Mount:
    """One mounted filesystem in a folder of its own. `root` stays the same over a remount."""

    is_fpfs = True

    def __init__(
        self,
        folder: Path,
        *,
        devices: Sequence[Path],
        options: Sequence[str],
        staging: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Name the places; nothing is mounted yet. The servers get `environment` added to ours."""
        self.folder = folder
        self.root = folder / "mount"
        self.devices = tuple(devices)
        self.log = folder / "server.log"
        self.server_pid = 0
        self.keeper_pid = 0
        self._options = (f"staging={staging}", *options)
        self._environment = environment
        self._expected: list[re.Pattern[str]] = []
        self._allowed: list[re.Pattern[str]] = []
        if os.geteuid() != 0:
            # A user's limit on locked memory is small on most systems.
            self.allow_log("staging memory is not pinned|registering buffers")

    def mount(self, *added: str) -> None:
        """Mount, with options `added` for this time; returns when the mount answers."""
        devices = [word for device in self.devices for word in ("-d", str(device))]
        options = ",".join((*self._options, *added))
        words = ["mount", *devices, "-o", options, "--log", str(self.log), str(self.root)]
        check_fpfs(*words, environment=self._environment)
        live_mounts.append(self)
        self.note_processes()

    def note_processes(self) -> None:
        """Ask which processes serve the mount now."""
        status = self.status()
        self.server_pid = status.server_pid
        self.keeper_pid = status.keeper_pid

    def unmount(self) -> None:
        """Unmount; returns when everything is durable and the server has ended."""
        check_fpfs("umount", self.root)
        self.forget()

    def forget(self) -> None:
        """The test itself unmounted: nothing is left to do at the end."""
        live_mounts.remove(self)

    def remount(self, *options: str) -> None:
        """Unmount and mount again, with other options if any are given: nothing may be lost."""
        self.unmount()
        if options:
            self._options = options
        self.mount()

    def status(self) -> Status:
        """The server's figures."""
        with self._client("status") as client:
            return client.ask(AskStatus(), timeout_s=COMMAND_TIMEOUT_S)

    def stored_bytes(self) -> int:
        """Bytes that objects take on all devices."""
        return sum(map(stored_bytes, self.devices))

    def flush(self) -> Flushed:
        """Make everything durable."""
        with self._client("flush") as client:
            return client.ask(FlushAll(), timeout_s=COMMAND_TIMEOUT_S)

    def expect_log(self, pattern: str) -> None:
        """Allow log lines that match `pattern`, which must occur before the mount ends."""
        self._expected.append(re.compile(pattern))

    def allow_log(self, pattern: str) -> None:
        """Allow log lines that match `pattern`, whether one occurs or not."""
        self._allowed.append(re.compile(pattern))

    def entry(self) -> MountEntry | None:
        """What is mounted at `root` now."""
        return mount_at(str(self.root))

    def _client(self, asked: str) -> ControlClient:
        entry = self.entry()
        assert entry is not None, f"{self.root} is not mounted"
        return ControlClient(entry, asked=asked)

    def log_text(self) -> str:
        """The server's log so far."""
        return self.log.read_text() if self.log.exists() else ""

    def check_log(self) -> None:
        """Fail on lines of WARNING or above that nobody expected, and on expected ones missing.

        An exception that nobody caught is never expected.
        """
        lines = self.log_text().splitlines()
        excused = (*self._expected, *self._allowed)
        problems = [
            line
            for line in lines
            if (_UNCAUGHT.match(line) or _PROBLEM.match(line))
            and not any(pattern.search(line) for pattern in excused)
        ]
        missing = [
            pattern.pattern
            for pattern in self._expected
            if not any(pattern.search(line) for line in lines)
        ]
        if problems or missing:
            raise AssertionError(
                f"unexpected in the server's log: {problems}, missing in it: {missing}\n"
                + self.log_text()[-20_000:]
            )

    def stacks(self) -> str:
        """Python and kernel stacks of the server, for a report of a hang."""
        if self.server_pid:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                self._dump_stacks()
        return f"{self.log_text()[-20_000:]}\n{kernel_stacks(self.server_pid)}"

    def _dump_stacks(self) -> None:
        """Let the server write its Python stacks to its log; a process that is stopped does not."""
        begun = "most recent call first"
        before = self.log_text().count(begun)
        blocking = _blocking(self.server_pid, signal.SIGUSR1)
        threads = [thread for thread, is_blocked in blocking.items() if not is_blocked]
        os.kill(self.server_pid, signal.SIGUSR1)
        deadline_s = time.monotonic() + KILL_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.log_text().count(begun) > before:
                # The signal is blocked in the thread that handles it, until all is written.
                blocking = _blocking(self.server_pid, signal.SIGUSR1)
                if not any(map(blocking.get, threads)):
                    return
            time.sleep(0.001)

    def tear_down(self) -> None:
        """Take the mount away by force; what hung on it gets errors."""
        entry = self.entry()
        if entry is not None and entry.is_fpfs:
            abort_connection(entry)
            # A server that lives takes its own mount away when its connection ends.
            with contextlib.suppress(Refused):
                unmount(entry.mountpoint, lazy=True)
            assert self.entry() is None, f"{self.root} cannot be unmounted"
        # The keeper first: it would start another server.
        self.kill(self.keeper_pid, self.server_pid)
        if self in live_mounts:
            live_mounts.remove(self)

    def kill(self, *pids: int) -> None:
        """Kill processes of the mount at once, if they run, and wait until they are gone."""
        process_fds = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                process_fds += [os.pidfd_open(pid)] if pid else []
        for process_fd in process_fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process_fd, signal.SIGSTOP)
        for process_fd in process_fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process_fd, signal.SIGKILL)
        for process_fd in process_fds:
            poll = select.poll()
            poll.register(process_fd, select.POLLIN)
            poll.poll(KILL_TIMEOUT_S * 1000)
            os.close(process_fd)

    def remove_arena(self) -> None:
        """Remove the arena that a killed server left, as the end of the machine's power does."""
        for device in self.devices:
            stamp = read_stamp(str(device), asked="tear down") if device.exists() else None
            if stamp is not None:
                Path(arena_path(stamp.filesystem_id)).unlink(missing_ok=True)


def _blocking(pid: int, number: signal.Signals) -> dict[str, bool]:
    """The threads of a process, and whether a signal is blocked in each."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            blocked = (task / "status").read_text().partition("\nSigBlk:\t")[2].split("\n")[0]
            found[task.name] = bool(int(blocked, 16) >> (number - 1) & 1)
    return found


def stored_bytes(device: Path) -> int:
    """Bytes that objects take on a device; those made ahead of need, or removed, take none."""
    total = 0
    for path in (device / "objects").glob("??/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def kernel_stacks(pid: int) -> str:
    """What each thread of a process waits for in the kernel (root sees the stacks)."""
    parts = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text().strip()
            parts.append(f"{task.name} {name} in {(task / 'wchan').read_text()}")
            parts.append((task / "stack").read_text())
    return "\n".join(parts)


@contextlib.contextmanager
def mounted(
    *,
    devices: int | Sequence[Path] = 2,
    options: Sequence[str] = (),
    staging: str = STAGING_DEFAULT,
    parent: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Mount]:
    """A fresh filesystem over `devices` fresh directories (or the given ones), mounted.

    `options` are words for ``-o``. The folder lies in `parent`, or where temporary files do.
    `environment` is added to that of the servers.
    """
    folder = Path(tempfile.mkdtemp(prefix="fpfs-test-", dir=parent))
    folder.chmod(0o755)
    mount = Mount(
        folder,
        devices=_device_folders(folder, devices),
        options=options,
        staging=staging,
        environment=environment,
    )
    mount.root.mkdir()
    try:
        mount.mount()
        yield mount
        _unmount_or_report(mount)
        mount.check_log()
    except BaseException:
        sys.stderr.write(f"log of the server of {mount.root}:\n{mount.log_text()[-20_000:]}\n")
        raise
    finally:
        mount.tear_down()
        mount.remove_arena()
        shutil.rmtree(folder)


def _device_folders(folder: Path, devices: int | Sequence[Path]) -> Sequence[Path]:
    if not isinstance(devices, int):
        return devices
    made = [folder / f"device{number}" for number in range(devices)]
    for path in made:
        path.mkdir()
    return made


def _unmount_or_report(mount: Mount) -> None:
    """Unmount unless the test did; a hang becomes an error with the server's stacks."""
    if mount not in live_mounts:
        return
    try:
        mount.unmount()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the unmount hung\n{mount.stacks()}") from None
