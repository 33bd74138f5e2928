"""Runs a program of a suite in namespaces of its own, and disks on which filesystems can be made.

Invariants:
  * When `run_alone` returns nothing that the program started is left: neither processes, servers of
    filesystems among them, nor mounts.
  * The machine's own /etc and /sbin stay as they are: what a suite needs there it sees in its
    mount namespace only.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.failures.faults import make_ext4
from tests.support.processes import run

END_S = 60
"""So long killed programs and their mounts may take to be gone."""


@contextlib.contextmanager
def loop_device(image: Path, *, size_bytes: int) -> Iterator[str]:
    """A block device over a new file."""
    with image.open("xb") as file:
        file.truncate(size_bytes)
    device = run("losetup", "--find", "--show", image).strip()
    try:
        yield device
    finally:
        run("losetup", "--detach", device)
        image.unlink()


@contextlib.contextmanager
def ext4_mounted(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """A directory of an ext4 of its own."""
    folder.mkdir()
    with loop_device(folder.with_suffix(".image"), size_bytes=size_bytes) as device:
        make_ext4(device)
        run("mount", device, folder)
        try:
            yield folder
        finally:
            run("umount", folder)


# A mount namespace begins with copies of all mounts. What others take down meanwhile would stay in
# use by them: devices cannot be detached then, nor do servers end.
_DETACH = r"""
awk '$1 ~ "^/dev/loop" || $3 ~ /^fuse/ {print $2}' /proc/self/mounts | tac | while read -r at; do
  at=$(printf %b "$at")
  case "$at/" in "$keep"/*) continue ;; esac
  case "$PWD/" in "$at"/*) continue ;; esac
  umount -l "$at"
done
"""


def run_alone(
    command: Sequence[str | Path],
    *,
    output: Path,
    cwd: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    keep: Path,
    prepare: str = "",
    abort: Callable[[], None] = lambda: None,
) -> int | None:
    """Run a command in namespaces of processes and mounts; None when it had to be killed.

    The shell commands `prepare` are run there before it. What both say goes to the file `output`.
    Of loop devices and FUSE only what is below `keep` is mounted there, and what `cwd` is on.
    `abort` frees what hangs in a filesystem that was mounted outside.
    """
    shell = f'set -e\nkeep={shlex.quote(str(keep))}\n{_DETACH}\n{prepare}\nset +e\n"$@"\nexit $?'
    with output.open("wb") as file:
        process = subprocess.Popen(
            [
                *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"),
                *("sh", "-c", shell, "sh", *(str(word) for word in command)),
            ],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_first(process.pid)
            abort()
            process.wait(timeout=END_S)
            return None
        finally:
            if process.poll() is None:
                process.kill()


def _kill_first(pid: int) -> None:
    """Kill the first process of the namespace, which takes all others along; `pid` waits for it."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
