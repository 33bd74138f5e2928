"""Some threads of another process stopped, while its others go on: ptrace(2)."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import wait_until

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
WAIT_ALL = 0x40000000  # __WALL: threads, too


class _Ask(enum.IntEnum):
    DETACH = 17
    SEIZE = 0x4206
    INTERRUPT = 0x4207


def _ptrace(ask: _Ask, thread: int) -> None:
    if _libc.ptrace(ask, thread, None, None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace {ask.name} of {thread}: {os.strerror(code)}")


def _wait_idle(task: Path) -> None:
    """Return when a thread waits in epoll: stopped anywhere else it might hold a lock."""
    wait_until(
        lambda: "poll" in (task / "wchan").read_text(),
        f"{task} does not wait for a request",
    )


@contextlib.contextmanager
def traced(pid: int) -> Iterator[None]:
    """Stop a child as a debugger does, wherever it is. It may be killed meanwhile."""
    _ptrace(_Ask.SEIZE, pid)
    try:
        _ptrace(_Ask.INTERRUPT, pid)
        os.waitpid(pid, WAIT_ALL)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_Ask.DETACH, pid)


@contextlib.contextmanager
def stopped_threads(pid: int, name: str) -> Iterator[None]:
    """Stop the threads of a process whose names begin with `name`, of which there is one or more.

    They are stopped when they wait for something to come; nothing must keep them busy.

    Raises PermissionError where the system does not let users trace their processes.
    """
    tasks = [Path(task) for task in os.scandir(f"/proc/{pid}/task")]
    threads = [task for task in tasks if (task / "comm").read_text().startswith(name)]
    assert threads, f"process {pid} has no thread {name}"
    with contextlib.ExitStack() as stopped:
        for task in threads:
            thread = int(task.name)
            _ptrace(_Ask.SEIZE, thread)
            stopped.callback(_ptrace, _Ask.DETACH, thread)
            _wait_idle(task)
            _ptrace(_Ask.INTERRUPT, thread)
            os.waitpid(thread, WAIT_ALL)
        yield
