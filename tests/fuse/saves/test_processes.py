"""What programs do with their processes while files are open: exec, namespaces, numbers used again.

How a writer ended decides whether what it wrote becomes current; asking for it holds nobody up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fpfs.testing.mounted import IN_MEMORY, Mount, mounted
from tests.support.failures.hostile import DEADLINE_S, suspended, wait_at_rest
from tests.support.failures.stopped_threads import traced
from tests.support.processes import KILLED, expect_line, python_child

FORKS = 400

OPENED = """
import os, signal, subprocess, sys, threading
path = sys.argv[1]
file = open(path, "wb", buffering=0)
file.write(b"whole")
"""

EXECS = {
    "system": "os.system('true')",
    "subprocess": "subprocess.run(['true'], check=True)",
    "subprocess that inherits": "subprocess.run(['true'], check=True, close_fds=False)",
    "posix_spawn": "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)",
    "fork and exec": "os.fork() or os.execlp('true', 'true')\nos.wait()",
    "itself": "os.execlp('true', 'true')",
    "itself, inherited": "os.set_inheritable(file.fileno(), True)\nos.execlp('true', 'true')",
    "itself, of many": "files = [open(f'{path}{n}', 'wb', buffering=0) for n in range(200)]\n"
    "for each in files: each.write(b'whole')\nos.execlp('true', 'true')",
    "another thread": "threading.Thread(target=os.execlp, args=('true', 'true')).start()\n"
    "signal.pause()",
    "multiprocessing": "import multiprocessing\n"
    "process = multiprocessing.get_context('spawn').Process(target=print)\n"
    "process.start()\nprocess.join()",
    "in a user namespace": "subprocess.run(['unshare', '-Ur', 'true'], check=True)",
}
"""Ways to exec while `file` is open, by the process itself or by one that it forks."""


@pytest.fixture(scope="module", params=["early", "close"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mount]:
    """One mount for all tests of this module, for each way in which a close is answered.

    Some close hundreds of files, which is durable with one of the ways.
    """
    options = ["receivers=2", f"ack={request.param}"]
    with mounted(options=options, parent=IN_MEMORY) as opened:
        opened.allow_log(KILLED)
        yield opened


def quarantined(mount: Mount) -> list[bytes]:
    """What killed writers left, when that is known."""
    mount.flush()
    return [path.read_bytes() for path in (mount.root / ".fpfs/partial").iterdir()]


def run_writer(code: str, path: Path, *, prefix: Sequence[str] = ()) -> int:
    """The exit status of a Python program that is given `path`."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code, path], timeout=DEADLINE_S, check=False
    )
    return done.returncode


@pytest.mark.parametrize("way", EXECS)
def test_an_exec_with_an_open_file(mount: Mount, folder: Path, way: str) -> None:
    path = folder / "step.pt"
    path.write_bytes(b"before")
    assert run_writer(OPENED + EXECS[way], path) == 0
    assert quarantined(mount) == []
    assert {each.read_bytes() for each in folder.iterdir()} == {b"whole"}
    wait_at_rest(mount)


@pytest.mark.parametrize(
    "way", [way for way in EXECS if "itself" not in way and "thread" not in way]
)
def test_an_exec_beside_a_file_that_nothing_was_written_to(
    mount: Mount, folder: Path, way: str
) -> None:
    """Python keeps a few bytes to itself until the file is closed, which is after the exec."""
    path = folder / "step.pt"
    path.write_bytes(b"before")
    assert run_writer(OPENED.replace(", buffering=0", "") + EXECS[way], path) == 0
    assert quarantined(mount) == []
    assert path.read_bytes() == b"whole"
    wait_at_rest(mount)


def test_a_file_that_outlives_an_exec_is_its_writer_s(mount: Mount, folder: Path) -> None:
    path = folder / "step.pt"
    path.write_bytes(b"before")
    code = OPENED + "os.set_inheritable(file.fileno(), True)\nos.execlp('cat', 'cat')"
    with python_child(code, path) as child:
        assert child.stdin is not None
        child.stdin.write("ready\n")
        child.stdin.flush()
        expect_line(child, "ready")  # cat says it
        child.kill()
        assert child.wait(timeout=DEADLINE_S) == -signal.SIGKILL
    assert quarantined(mount) == [b"whole"]
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize("stopped", [suspended, traced])
def test_a_writer_that_is_killed_while_it_is_stopped(
    mount: Mount, folder: Path, stopped: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = folder / "step.pt"
    path.write_bytes(b"before")
    with python_child(OPENED + "print('ready', flush=True)\nsignal.pause()", path) as child:
        expect_line(child, "ready")
        with stopped(child.pid):
            child.kill()
        assert child.wait(timeout=DEADLINE_S) == -signal.SIGKILL
    assert quarantined(mount) == [b"whole"]
    assert path.read_bytes() == b"before"


@pytest.mark.root
def test_writers_in_a_pid_namespace(mount: Mount, folder: Path) -> None:
    """They have other numbers in it than the server sees; the first is the namespace's init."""
    prefix = ["unshare", "--pid", "--fork", "--kill-child"]
    killed, ended = folder / "killed.pt", folder / "ended.pt"
    for path in (killed, ended):
        path.write_bytes(b"before")
    assert run_writer(OPENED + "assert os.getpid() == 1\nos._exit(3)", ended, prefix=prefix) == 3
    # Init itself cannot be killed from inside: a child of it is.
    dies = f"import os\nif os.fork() == 0:\n{textwrap.indent(OPENED, '    ')}\n"
    dies += "    os.kill(os.getpid(), signal.SIGKILL)\nos.wait()\n"
    assert run_writer(dies, killed, prefix=prefix) == 0
    assert quarantined(mount) == [b"whole"]
    assert killed.read_bytes() == b"before"
    assert ended.read_bytes() == b"whole"


# With one thread: a thread that held a lock of the interpreter or of malloc(3) at the fork would be
# missing in the child.
TURNS = """if True:
    import ctypes, os, pathlib, signal, sys

    CLONE3 = 435

    class Arguments(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in (
            "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size",
            "tls", "set_tid", "set_tid_size", "cgroup")]

    def fork_as(pid):
        # A child with a number of our choice, or with any when it is 0; 0 in the child.
        wanted = (ctypes.c_int * 1)(pid)
        arguments = Arguments(exit_signal=signal.SIGCHLD)
        if pid:
            arguments.set_tid, arguments.set_tid_size = ctypes.addressof(wanted), 1
        libc = ctypes.CDLL(None, use_errno=True)
        found = libc.syscall(CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return found

    pid = used_again = 0
    for turn in range(20):
        path = pathlib.Path(sys.argv[1], f"{turn}.pt")
        path.write_bytes(b"before")
        try:
            forked = fork_as(pid)
        except FileExistsError:  # another program got it
            forked = fork_as(0)
        if forked == 0:
            try:
                file = os.open(path, os.O_WRONLY | os.O_TRUNC)
                os.write(file, b"whole")
                if turn % 2:
                    os.close(file)
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.waitpid(forked, 0)[1] == signal.SIGKILL
        used_again += forked == pid
        pid = forked
    print(used_again)
"""


@pytest.mark.root
def test_a_number_that_another_process_gets(mount: Mount, folder: Path) -> None:
    """The one that had it before was killed, the next closes what it wrote, and so on by turns."""
    done = subprocess.run(
        [sys.executable, "-c", TURNS, folder],
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=True,
    )
    assert int(done.stdout) > 0, "no number was used again"
    assert quarantined(mount) == [b"whole"] * 10
    found = [(folder / f"{turn}.pt").read_bytes() for turn in range(20)]
    assert found == [b"before", b"whole"] * 10


def test_many_writers_that_live_for_a_moment(mount: Mount, folder: Path) -> None:
    """Each ends as it likes; nothing of them is left in the server, and each end is told right."""
    descriptors = Path(f"/proc/{mount.server_pid}/fd")
    before = len(os.listdir(descriptors))
    ends = {"closes": True, "ends": True, "execs": True, "killed": False, "aborts": False}
    code = f"""
import os, resource, signal, sys
folder = sys.argv[1]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for turn in range({FORKS}):
    end = {list(ends)}[turn % {len(ends)}]
    if os.fork() == 0:
        file = os.open(f"{{folder}}/{{turn}}.{{end}}.pt", os.O_CREAT | os.O_WRONLY)
        os.write(file, b"whole")
        if end == "closes":
            os.close(file)
        if end == "execs":
            os.execv("/bin/true", ["true"])
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "aborts":
            os.abort()
        os._exit(0)
    if turn % 8 == 7:
        for _ in range(8):
            os.wait()
"""
    assert run_writer(code, folder) == 0
    killed = [end for end, whole in ends.items() if not whole]
    assert quarantined(mount) == [b"whole"] * (FORKS // len(ends) * len(killed))
    expected = {f"{turn}.{list(ends)[turn % len(ends)]}.pt" for turn in range(FORKS)}
    expected = {name for name in expected if name.split(".")[1] not in killed}
    assert set(os.listdir(folder)) == expected
    wait_at_rest(mount)
    assert len(os.listdir(descriptors)) <= before + 8  # of objects that are kept open
