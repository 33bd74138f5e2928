"""Clients that stand still in the middle of a request, and what must go on beside them.

A program here ends its preparation with the line "ready" and stands still after it. It is started
in a process of its own (`python_child`) with the paths that it is about.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fpfs.daemon.mount.fusermount import abort_connection
from fpfs.testing.mounted import Mount, kernel_stacks
from tests.support.waiting import wait_until

DEADLINE_S = 60
"""For what takes milliseconds: so long a machine may be busy with something else."""

MEMORY = """
import ctypes, fcntl, mmap, os, signal, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int,
                      ctypes.c_long]
SIZE = 1 << 20

def ready():
    os.write(1, b"ready\\n")

def checked(result):
    if result in (-1, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def paged_out():
    '''Memory that nobody ever fills in: userfaultfd(2), which nobody reads.'''
    global fault_fd
    fault_fd = checked(libc.syscall(323, os.O_CLOEXEC))
    fcntl.ioctl(fault_fd, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
    address = checked(libc.mmap(None, SIZE, 3, 0x22, -1, 0))
    fcntl.ioctl(fault_fd, 0xC020AA00, bytearray(struct.pack("QQQQ", address, SIZE, 1, 0)))

    def fill():
        '''It comes after all when somebody says so.'''
        assert sys.stdin.readline() == "go\\n"
        fcntl.ioctl(fault_fd, 0xC020AA04, bytearray(struct.pack("QQQq", address, SIZE, 0, 0)))

    threading.Thread(target=fill, daemon=True).start()
    return ctypes.c_void_p(address)

def mapped(path):
    '''Memory of a file whose filesystem does not answer.'''
    file = os.open(path, os.O_RDWR)
    return ctypes.c_void_p(checked(libc.mmap(None, SIZE, 3, 1, file, 0)))
"""
"""What programs begin with. Numbers of system calls are x86-64's."""

USES_OF_MEMORY = {
    "write": "file = os.open(path, os.O_WRONLY); ready(); libc.write(file, memory, SIZE)",
    "direct write": "file = os.open(path, os.O_WRONLY | os.O_DIRECT); ready(); "
    "libc.write(file, memory, SIZE)",
    "append": "file = os.open(path, os.O_WRONLY | os.O_APPEND); ready(); "
    "libc.write(file, memory, SIZE)",
    "read": "file = os.open(path, os.O_RDONLY); ready(); libc.read(file, memory, SIZE)",
    "direct read": "file = os.open(path, os.O_RDONLY | os.O_DIRECT); ready(); "
    "libc.read(file, memory, SIZE)",
    "read while written": "file = os.open(path, os.O_RDWR); ready(); libc.read(file, memory, SIZE)",
    "list": "file = os.open(os.path.dirname(path), os.O_RDONLY); ready(); "
    "libc.syscall(217, file, memory, SIZE)",
}
"""What a program asks of the mount with that `memory`: each waits for it in the kernel."""

CONTENT = bytes(range(256)) * 8192

OTHERS = f"""
import os, sys
folder = sys.argv[1]
content = bytes(range(256)) * {len(CONTENT) // 256}
for turn in range(3):
    path = f"{{folder}}/file{{turn}}.pt"
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    with open(path, "rb") as reader, open(path, "r+b", buffering=0) as writer:
        assert reader.read() == content
        writer.write(b"changed")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    os.close(fd)
    assert open(path, "rb").read() == b"changed" + content[7:]
    os.rename(path, path + "x")
    os.setxattr(path + "x", "user.turn", b"1")
    assert os.listdir(folder) == [f"file{{turn}}.ptx"]
    os.statvfs(folder)
    os.truncate(path + "x", 100)
    os.unlink(path + "x")
print("done")
"""
"""What everybody else does meanwhile."""

_AT_REST = re.compile("poll|cqring|futex")
"""Where the kernel says that a thread waits for work, or for a lock of our own."""


@contextlib.contextmanager
def never_hanging(mount: Mount) -> Iterator[None]:
    """Abort the mount's connection when this takes too long: what hangs on it gets errors then."""

    def abort() -> None:
        sys.stderr.write(f"the mount hangs:\n{kernel_stacks(mount.server_pid)}\n")
        entry = mount.entry()
        if entry is not None:
            abort_connection(entry)

    timer = threading.Timer(2 * DEADLINE_S, abort)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def others_go_on(folder: Path) -> None:
    """Let another process make, write, read, change and remove files in a folder of its own."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, folder],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    folder.rmdir()


def wait_at_rest(mount: Mount, *, held: str = "") -> None:
    """Return when every native thread of the server waits for work, except the one that is `held`.

    Raises AssertionError with all stacks when one does not in time: it waits for a client.
    """
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        native = _native_threads(mount.server_pid)
        assert any(name.startswith("fpfs-channel") for name in native)
        assert any(name.endswith("-ring") for name in native)
        busy = {
            name: where
            for name, where in native.items()
            if not _AT_REST.search(where) and name != held
        }
        if not busy:
            return
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{busy}\n{kernel_stacks(mount.server_pid)}")
        time.sleep(0.01)  # nothing tells of it


def _native_threads(pid: int) -> dict[str, str]:
    """Where the kernel says that each native thread is; those of Python come and go."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = (task / "comm").read_text().strip()
            if name.startswith(("fpfs-", "dev")):
                found[name] = (task / "wchan").read_text()
    return found


@contextlib.contextmanager
def silent(mount: Mount) -> Iterator[None]:
    """Let the processes of a mount stand still: nothing on it is answered until the end."""
    pids = (mount.keeper_pid, mount.server_pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Stop a process as job control does, until the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: "\nState:\tT" in _told(pid, "status"), f"process {pid} does not stop")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_in(pid: int, function: str) -> None:
    """Return when a process waits in a function of the kernel whose name this is a pattern of."""
    pattern = re.compile(function)
    wait_until(
        lambda: pattern.search(_told(pid, "wchan")) is not None,
        f"process {pid} does not come to wait in {function}",
    )


def wait_in_exec(pid: int) -> None:
    """Return when a process has its next program's memory, which has nothing in it yet.

    Its stat and its wchan cannot be read then.
    """
    wait_until(lambda: int(_told(pid, "statm").split()[0]) < 100, f"process {pid} does not exec")


def _told(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def wait_ended(process_fd: int) -> None:
    """Return when the process of a pidfd has ended."""
    ended = select.poll()
    ended.register(process_fd, select.POLLIN)
    assert ended.poll(DEADLINE_S * 1000), "the process does not end"
