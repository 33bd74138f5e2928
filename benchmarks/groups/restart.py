"""Restart: how long a mount does not answer after its server was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.places import Bench, FpfsMount

OPEN_FILES = 64
STAGED_BYTES = 3 * 1024 * 1024 + 1000
"""Written to each open file right before the kill: whole chunks on their way, and a part of one."""


@contextlib.contextmanager
def _open_files(folder: Path) -> Iterator[None]:
    """Files that are open, with bytes that nobody has asked to keep."""
    content = os.urandom(STAGED_BYTES)
    with contextlib.ExitStack() as stack:
        for number in range(OPEN_FILES):
            stream = stack.enter_context((folder / f"open{number}").open("wb", buffering=0))
            stream.write(content)
        yield


def _kill(mount: FpfsMount) -> float:
    """Kill the server; the time until a request that reaches Python is answered, in s."""
    folder = mount.path / "restart"
    folder.mkdir(exist_ok=True)
    server_pid = mount.status()["server_pid"]
    with _open_files(folder):
        started_s = time.monotonic()
        os.kill(server_pid, signal.SIGKILL)
        # A name that was never asked for: neither the kernel nor the channel knows of it.
        if (folder / f"never{started_s}").exists():
            raise RuntimeError("a file that nobody made is there")
        elapsed_s = time.monotonic() - started_s
        if mount.status()["server_pid"] == server_pid:
            raise RuntimeError("the server was not killed")
    return elapsed_s


@contextlib.contextmanager
def _open(bench: Bench) -> Iterator[Sequence[Entry]]:
    with bench.fpfs() as mount:
        yield [Contender(name="fpfs", play=lambda: _kill(mount), quiesce=mount.flush)]


GROUPS = (
    Group(
        name="restart",
        title=f"kill -9 of the server with {OPEN_FILES} open files, until the next answer",
        unit="s",
        open=_open,
        bounds=(Bound(contender="fpfs", figure=1, sense=Sense.AT_MOST),),
    ),
)
