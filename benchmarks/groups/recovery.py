"""Recovery: how long a mount takes after keeper and server were killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.places import Bench, FpfsMount
from fpfs.daemon.mount.fusermount import unmount

FILES_A_SMALL_FILE = 5
"""Files that are there, for each of those that `small-files` makes: 100,000 at full scale."""

FILE_BYTES = 4096
FOLDER_FILES = 1000
STAGED_FILES = 64
STAGED_BYTES = 1024 * 1024 + 1000


class _Filesystem:
    """Two device directories with many files, mounted again and again."""

    def __init__(self, bench: Bench, devices: Sequence[Path], mountpoint: Path) -> None:
        self._devices = devices
        self._mountpoint = mountpoint
        self._log = mountpoint.with_suffix(".log")
        self._mount = self._start()
        self._fill(bench.scale.small_files * FILES_A_SMALL_FILE)
        self._mount.flush()

    def _start(self) -> FpfsMount:
        return FpfsMount(self._devices, self._mountpoint, log=self._log, options=())

    def _fill(self, count: int) -> None:
        content = os.urandom(FILE_BYTES)
        for number in range(count):
            folder = self._mountpoint / f"folder{number // FOLDER_FILES}"
            if number % FOLDER_FILES == 0:
                folder.mkdir()
            (folder / f"file{number}").write_bytes(content)

    def mount(self) -> float:
        """Mount; the time until a request that reaches Python is answered, in s."""
        started_s = time.monotonic()
        self._mount = self._start()
        if (self._mountpoint / f"never{started_s}").exists():
            raise RuntimeError("a file that nobody made is there")
        return time.monotonic() - started_s

    def after_clean_end(self) -> float:
        """Unmount and mount."""
        self._mount.unmount()
        return self.mount()

    def after_kill(self) -> float:
        """Write, kill keeper and server, and mount: what was acknowledged is taken over."""
        content = os.urandom(STAGED_BYTES)
        for number in range(STAGED_FILES):
            (self._mountpoint / f"staged{number}").write_bytes(content)
        status = self._mount.status()
        pids = [os.pidfd_open(status[name]) for name in ("keeper_pid", "server_pid")]
        for kind in (signal.SIGSTOP, signal.SIGKILL):
            for process_fd in pids:
                signal.pidfd_send_signal(process_fd, kind)
        for process_fd in pids:
            poll = select.poll()
            poll.register(process_fd, select.POLLIN)
            poll.poll()
            os.close(process_fd)
        unmount(str(self._mountpoint), lazy=True)
        elapsed_s = self.mount()
        if (self._mountpoint / "staged0").read_bytes() != content:
            raise RuntimeError("what was acknowledged is not there")
        return elapsed_s

    def quiesce(self) -> None:
        """Wait until everything is durable, and what the kill left is collected."""
        self._mount.flush()
        while self._mount.status()["recovery"]["objects_removed"] is None:
            time.sleep(0.1)

    def close(self) -> None:
        """Unmount."""
        self._mount.unmount()


@contextlib.contextmanager
def _open(bench: Bench) -> Iterator[Sequence[Entry]]:
    with bench.plain("device") as one, bench.plain("device") as two, bench.plain("mount") as place:
        filesystem = _Filesystem(bench, [one, two], place)
        try:
            yield [
                Contender(
                    name="after kill -9", play=filesystem.after_kill, quiesce=filesystem.quiesce
                ),
                Contender(name="after a clean end", play=filesystem.after_clean_end),
            ]
        finally:
            filesystem.close()


GROUPS = (
    Group(
        name="recovery",
        title="fpfs mount of 100,000 files after kill -9 of keeper and server, until an answer",
        unit="s",
        open=_open,
        bounds=(Bound(contender="after kill -9", figure=2, sense=Sense.AT_MOST),),
    ),
)
