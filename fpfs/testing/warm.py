"""Commands without the start of an interpreter: forked from a process that has imported them.

The tests run some thousands of commands, and importing one takes longer than most of them work.
`WarmCommands.run` does what subprocess.run would do: a process of its own with its own descriptors,
environment and folder calls the command's `main`. A server that it starts is forked likewise. What
this leaves out, the interpreter's start and its end, is left to the tests of the entry points.

Invariants:
  * The process that forks has one thread, and runs nothing of what it imported.
  * It ends with the process that started it.

Concurrency: any thread may call `run`.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import io
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NoReturn, cast

import msgspec

from fpfs.daemon.mount import launch

MODULES = ("fpfs.cli.main", "fpfs.cli.ctl", "fpfs.daemon.mount.main")
REQUEST_BYTES_MAX = 1 << 20
_STREAMS = 3


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A command to run. What may be no text is bytes, as the kernel has it."""

    module: str
    arguments: tuple[bytes, ...]
    environment: dict[str, bytes]
    folder: bytes
    umask: int
    address_space_max: int | None


class WarmCommands:
    """A process that forks commands, started with the first one."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._starting = threading.Lock()
        self._started: tuple[socket.socket, subprocess.Popen[bytes]] | None = None

    def close(self) -> None:
        """End the process; what it has forked goes on."""
        if self._started is not None:
            connection, process = self._started
            connection.close()
            process.wait()
            self._started = None

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_s: float,
        address_space_max: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Raises subprocess.TimeoutExpired."""
        umask = os.umask(0)
        os.umask(umask)
        request = Request(
            module=module,
            arguments=tuple(os.fsencode(each) for each in arguments),
            environment={name: os.fsencode(value) for name, value in environment.items()},
            folder=os.fsencode(os.getcwd()),
            umask=umask,
            address_space_max=address_space_max,
        )
        with contextlib.ExitStack() as stack:
            output, errors = (
                stack.enter_context(os.fdopen(os.memfd_create(name), "r+b"))
                for name in ("stdout", "stderr")
            )
            told, teller = os.pipe2(os.O_CLOEXEC)
            reader = stack.enter_context(os.fdopen(told, "rb", buffering=0))
            try:
                self._send(request, [output.fileno(), errors.fileno(), teller])
            finally:
                os.close(teller)
            words = [module, *arguments]
            status = _wait(reader, words, timeout_s)
            return subprocess.CompletedProcess(words, status, _text(output), _text(errors))

    def _send(self, request: Request, descriptors: Sequence[int]) -> None:
        with self._starting:
            if self._started is None:
                self._started = _start()
        rights = array.array("i", descriptors)
        self._started[0].sendmsg(
            [msgspec.msgpack.encode(request)],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)],
        )


def _start() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES_MAX)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "fpfs.testing.warm", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is for who waits
        )
    return ours, process


def _wait(reader: io.FileIO, words: Sequence[str], timeout_s: float) -> int:
    """Wait for a command's pid and its exit status, which it tells in two lines."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    told = b""
    while told.count(b"\n") < 2:
        if not poll.poll(timeout_s * 1000):
            if told:
                os.kill(int(told.split()[0]), signal.SIGKILL)
            raise subprocess.TimeoutExpired(list(words), timeout_s)
        more = reader.read(100)
        if not more:
            return -signal.SIGKILL
        told += more
    return int(told.split()[1])


def _text(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read().decode()


# --- in the process that forks ---


class _Forked:
    """What the starter of a server uses of a subprocess.Popen."""

    def __init__(self, pid: int, stdin: BinaryIO) -> None:
        self.pid = pid
        self.stdin = stdin

    def wait(self) -> int:
        """Its exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _fork_server(log_file: BinaryIO, ready_fd: int) -> subprocess.Popen[bytes]:
    """As `fpfs.daemon.mount.launch.start_process`."""
    read, write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir("/")
        _become(
            "fpfs.daemon.mount.main", (), (read, log_file.fileno(), log_file.fileno()), ready_fd
        )
    os.close(read)
    return cast("subprocess.Popen[bytes]", _Forked(pid, os.fdopen(write, "wb")))


def _become(
    module: str, arguments: Sequence[str], streams: Sequence[int], kept: int, *, tells: bool = False
) -> NoReturn:
    """Be this command in a process that was forked for it; of its descriptors `kept` stays."""
    status = 1
    try:
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(_STREAMS, kept)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        sys.argv = [module, *arguments]
        status = importlib.import_module(module).main()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 (as the interpreter does at its end)
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        if tells:
            os.write(kept, b"%d\n" % status)
        os._exit(status)


def _serve(connection: socket.socket) -> None:
    size = array.array("i").itemsize
    while True:
        message, ancillary, _flags, _address = connection.recvmsg(
            REQUEST_BYTES_MAX, socket.CMSG_SPACE(_STREAMS * size)
        )
        if not message:
            return
        descriptors = array.array("i", ancillary[0][2])
        if os.fork() == 0:
            _run(msgspec.msgpack.decode(message, type=Request), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(request: Request, descriptors: Sequence[int]) -> NoReturn:
    output, errors, teller = descriptors
    os.write(teller, b"%d\n" % os.getpid())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(request.umask)
    if request.address_space_max is not None:
        resource.setrlimit(resource.RLIMIT_AS, (request.address_space_max,) * 2)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update({name: os.fsdecode(value) for name, value in request.environment.items()})
    arguments = [os.fsdecode(each) for each in request.arguments]
    _become(request.module, arguments, (0, output, errors), teller, tells=True)


def main() -> None:
    """Import the commands, and fork one for each request until the starter is gone."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in MODULES:
        importlib.import_module(module)
    launch.start_process = _fork_server
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to wait for what ends
    gc.collect()
    gc.freeze()  # what is forked does not go through, and copy, what was imported here
    _serve(connection)


if __name__ == "__main__":
    main()
