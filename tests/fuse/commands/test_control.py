"""The control protocol as a stranger speaks it: every bad line is answered, none hurts."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.protocol.control import (
    PROTOCOL_VERSION,
    ControlClient,
    ServerEnded,
    runtime_folders,
    socket_path,
)
from fpfs.core.protocol.questions import AskStatus
from fpfs.core.protocol.reports import Status
from fpfs.core.refusal import Refused
from fpfs.testing.mounted import Mount, mounted, run_fpfs
from tests.support.failures.crash import crash
from tests.support.processes import run
from tests.support.servers import stop


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    """One mount for all tests of this module."""
    with mounted() as made:
        yield made


def control_socket(mount: Mount, device: str) -> str:
    """Where the server of a mount of this user listens."""
    (folder, *_) = [path for path in runtime_folders(os.geteuid()) if os.path.isdir(path)]
    return socket_path(device, folder=folder, pid=mount.keeper_pid)


def connect(mount: Mount) -> socket.socket:
    """A raw connection to the server's control socket."""
    entry = mount.entry()
    assert entry is not None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(30)
    connection.connect(control_socket(mount, entry.device))
    return connection


def ask_line(mount: Mount, line: bytes) -> dict[str, object]:
    """Send a line as it is and return the decoded answer."""
    with connect(mount) as connection, connection.makefile("rb") as answers:
        connection.sendall(line)
        answer: dict[str, object] = json.loads(answers.readline())
        return answer


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"\n", "the request cannot be read"),
        (b"hello\n", "the request cannot be read"),
        (b"\xff\xfe\n", "the request cannot be read"),
        (b"[]\n", "the request cannot be read"),
        (b'{"verb": "format"}\n', "the request cannot be read"),
        (b'{"verb": "wait", "ino": "one"}\n', "the request cannot be read"),
        (
            b'{"verb": "status", "version": 99}\n',
            f"the server speaks version {PROTOCOL_VERSION}, not 99",
        ),
        (b"x" * 100_000, "the request is too long"),
    ],
)
def test_bad_lines_are_answered(mount: Mount, line: bytes, error: str) -> None:
    answer = ask_line(mount, line)
    assert answer["version"] == PROTOCOL_VERSION
    assert answer["error"]
    assert error in str(answer["error"])


def test_one_connection_carries_many_requests_until_a_bad_one(mount: Mount) -> None:
    with connect(mount) as connection, connection.makefile("rb") as answers:
        connection.sendall(b'{"verb": "status"}\n{"verb": "flush"}\nnonsense\n{"verb": "flush"}\n')
        status, flushed, refusal = (json.loads(answers.readline()) for _ in range(3))
        assert answers.read() == b"", "it is let go"
    assert status["result"]["server_pid"] == mount.server_pid
    assert (flushed["error"], flushed["result"]) == ("", {"failures": []})
    assert refusal["error"].startswith("the request cannot be read")


def test_a_request_in_pieces(mount: Mount) -> None:
    with connect(mount) as connection, connection.makefile("rb") as answers:
        for piece in (b'{"verb":', b' "fl', b'ush"}', b"\n"):
            connection.sendall(piece)
        assert json.loads(answers.readline())["error"] == ""


def test_a_client_that_leaves_early_hurts_nobody(mount: Mount) -> None:
    for line in (b'{"verb": "status"}\n', b'{"verb": "end"}\n', b'{"ver', b""):
        connection = connect(mount)
        connection.sendall(line)
        connection.close()
    assert mount.status().server_pid == mount.server_pid


def test_many_clients_at_once(mount: Mount) -> None:
    path = mount.root / "file"
    path.write_bytes(b"content" * 100_000)
    request = json.dumps({"verb": "wait", "ino": path.stat().st_ino}).encode() + b"\n"
    errors: list[object] = []

    def ask() -> None:
        errors.append(ask_line(mount, request)["error"])

    threads = [threading.Thread(target=ask) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [""] * 50


@pytest.mark.parametrize("verb", ["status", "flush"])
def test_a_server_that_hangs_is_not_waited_for_forever(mount: Mount, verb: str) -> None:
    stop(mount.server_pid)
    try:
        done = run_fpfs(verb, "--timeout", "0.2", mount.root, module="fpfs.cli.ctl")
    finally:
        os.kill(mount.server_pid, signal.SIGCONT)
    assert done.returncode == 1
    assert f"{verb} of {mount.root}: no answer within 0.2 s; wait longer" in done.stderr
    assert mount.status().server_pid == mount.server_pid


def test_the_socket_goes_with_the_mount() -> None:
    with mounted() as made:
        entry = made.entry()
        assert entry is not None
        path = Path(control_socket(made, entry.device))
        assert path.is_socket()
        made.unmount()
        assert not path.exists()


@pytest.mark.root
def test_a_mount_that_is_not_open_to_others_answers_none_of_them() -> None:
    """The socket's mode keeps them out; who passes it all the same is told so."""
    as_another = "setpriv --reuid=nobody --clear-groups"
    passing = " --inh-caps=+dac_override --ambient-caps=+dac_override"
    with mounted(options=("noallow_other",)) as made:
        entry = made.entry()
        assert entry is not None
        path = control_socket(made, entry.device)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert answer_to(path, as_another) == "Permission denied"
        assert "this mount belongs to another user" in answer_to(path, as_another + passing)
        assert '"server_pid"' in answer_to(path, "setpriv --clear-groups")


@pytest.mark.root
def test_whoever_is_not_answered_may_leave_at_once() -> None:
    with mounted(options=("noallow_other",)) as made:
        entry = made.entry()
        assert entry is not None
        path = control_socket(made, entry.device)
        code = "import socket, sys\nfor _ in range(300):\n"
        code += "    with socket.socket(socket.AF_UNIX) as one: one.connect(sys.argv[1])"
        prefix = "setpriv --reuid=nobody --clear-groups --inh-caps=+dac_override"
        prefix += " --ambient-caps=+dac_override"
        run(*prefix.split(), "python3", "-c", code, path)
        assert made.status().server_pid == made.server_pid


def answer_to(path: str, prefix: str) -> str:
    """What a process with other credentials gets when it asks for the status."""
    code = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(sys.argv[1])
except OSError as error:
    sys.exit(error.strerror)
try:
    connection.sendall(b'{"verb": "status"}\\n')
except BrokenPipeError:
    pass  # refused already
print(connection.makefile().readline())
"""
    done = subprocess.run(
        [*prefix.split(), "python3", "-c", code, path],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return (done.stdout + done.stderr).strip()


def test_a_server_that_ends_instead_of_answering() -> None:
    with mounted() as made:
        entry = made.entry()
        assert entry is not None
        stop(made.server_pid)  # so that it does not answer before it ends
        with ControlClient(entry, asked="test") as client:
            client.send(AskStatus())
            crash(made)
            with pytest.raises(Refused) as refused:
                client.receive(Status)
        assert str(refused.value) == (
            f"test: the server of {made.root} ended without an answer; its log says why"
        )
        made.mount()


def test_another_mount_of_the_same_number_is_not_asked() -> None:
    """The kernel gives the number of a mount that has ended to the next one."""
    folder = next(path for path in runtime_folders(os.geteuid()) if os.path.isdir(path))
    with mounted() as made, mounted() as other:
        entry, theirs = made.entry(), other.entry()
        assert entry is not None
        assert theirs is not None
        link = Path(socket_path(entry.device, folder=folder, pid=other.keeper_pid))
        stop(made.server_pid)
        with ControlClient(entry, asked="test") as client:
            client.send(AskStatus())
            crash(made)
            link.symlink_to(socket_path(theirs.device, folder=folder, pid=other.keeper_pid))
            try:
                with pytest.raises(ServerEnded):
                    client.receive(Status)
            finally:
                link.unlink()
        made.mount()
