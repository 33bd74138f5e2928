"""``fpfs-ctl trace`` of real saves."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fpfs import client
from fpfs.cli.commands.trace import BEGUN, WAITING
from fpfs.testing.mounted import Mount, mounted, run_fpfs
from tests.support.chrome_traces import check_format, spans_of
from tests.support.nobody import AS_NOBODY, need_nobody
from tests.support.processes import REPOSITORY
from tests.support.servers import kill

SIZE = 5_000_000
CHUNK_BYTES = 2**20
DEADLINE_S = 60
BUSY = "somebody traces a file of this mount already"


def command(file: Path, output: Path, *words: str) -> list[str]:
    return ["trace", str(file), "-o", str(output), *words]


@contextlib.contextmanager
def tracing(file: Path, output: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, waiting for a save."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fpfs.cli.ctl", *command(file, output)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == f"{WAITING} {file}\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def document(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output.read_bytes())
    check_format(found)
    return found


@pytest.fixture(scope="module")
def shared() -> Iterator[Mount]:
    with mounted() as mount:
        yield mount


def test_a_save_on_a_timeline(shared: Mount, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    file = shared.root / "step.pt"
    with tracing(file, output) as process:
        (shared.root / "other").write_bytes(bytes(SIZE))
        file.write_bytes(os.urandom(SIZE))
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stderr) == (0, f"{BEGUN} {file}\n")
    assert f"{output}: {file}, durable after " in stdout
    assert " 5 chunks, 2 devices; " in stdout
    assert os.listdir(tmp_path) == ["trace.json"]
    found = document(output)
    assert found["otherData"] == {"file": str(file), "state": "durable", "events_lost": 0}

    requests = spans_of(found, "request")
    writes = [span for span in requests if span.name == "WRITE"]
    assert sum(span.about["length"] for span in writes) == SIZE
    assert [span.about["offset"] for span in writes] == sorted(s.about["offset"] for s in writes)
    assert {"FLUSH", "RELEASE"} <= {span.name for span in requests}

    chunks = spans_of(found, "chunk")
    assert {span.about["offset"] for span in chunks} == {n * CHUNK_BYTES for n in range(5)}
    transfers = spans_of(found, "transfer")
    written = [span for span in transfers if span.name == "write"]
    assert {span.about["offset"] for span in written} == {n * CHUNK_BYTES for n in range(5)}
    assert {span.about["device"] for span in written} == {0, 1}
    flushes = [span for span in transfers if span.name == "flush"]
    assert {span.about["device"] for span in flushes} == {0, 1}

    steps = spans_of(found, "commit")
    assert [span.name for span in steps] == ["drain", "transaction", "log flush"]
    drain, transaction, log_flush = steps
    (whole,) = spans_of(found, "save")
    assert whole.began_us == 0
    assert all(span.ended_us <= drain.ended_us for span in transfers)
    assert all(span.began_us >= drain.began_us for span in flushes)
    assert all(flush.began_us >= write.ended_us for flush in flushes for write in written
               if flush.pid == write.pid)  # fmt: skip
    assert drain.ended_us <= transaction.began_us
    assert transaction.ended_us <= log_flush.began_us
    assert log_flush.ended_us <= whole.ended_us


def test_a_save_under_another_name_that_is_renamed(shared: Mount, tmp_path: Path) -> None:
    """The name that is opened is what counts, as the help says."""
    written, file = shared.root / "last.pt.tmp", shared.root / "last.pt"
    with tracing(written, tmp_path / "trace.json") as process:
        written.write_bytes(bytes(SIZE))
        written.rename(file)
        stdout, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "durable after " in stdout
    writes = [
        s for s in spans_of(document(tmp_path / "trace.json"), "request") if s.name == "WRITE"
    ]
    assert sum(span.about["length"] for span in writes) == SIZE


def test_a_save_by_the_client(shared: Mount, tmp_path: Path) -> None:
    """It writes a temporary name of its own, which nobody could tell beforehand."""
    file, output = shared.root / "client.pt", tmp_path / "trace.json"
    for _ in range(2):  # the second one replaces the first
        with tracing(file, output) as process:
            client.save({"other": 1}, shared.root / "other client.pt")
            client.save({"weight": torch.zeros(SIZE, dtype=torch.uint8)}, file)
            stdout, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert f"{output}: {file}, durable after " in stdout
        writes = [span for span in spans_of(document(output), "request") if span.name == "WRITE"]
        assert sum(span.about["length"] for span in writes) == file.stat().st_size


def test_nothing_is_written_where_nobody_saves(shared: Mount, tmp_path: Path) -> None:
    done = run_fpfs(
        *command(shared.root / "file", tmp_path / "trace.json", "--timeout", "0.2"),
        module="fpfs.cli.ctl",
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"{WAITING} {shared.root / 'file'}\n"
        f"fpfs-ctl: trace of {shared.root / 'file'}: nobody opened it for writing in time;"
        " wait longer with --timeout\n"
    )
    assert os.listdir(tmp_path) == []


def test_an_interrupted_wait_leaves_nothing(shared: Mount, tmp_path: Path) -> None:
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        with tracing(shared.root / "file", tmp_path / "trace.json") as process:
            process.send_signal(number)
            process.communicate(timeout=DEADLINE_S)
            assert process.returncode == status
        assert os.listdir(tmp_path) == []
    # The mount waits for no save any more: this one may begin at once.
    test_nothing_is_written_where_nobody_saves(shared, tmp_path)


def test_an_interrupted_save_is_written_as_far_as_it_was_seen(
    shared: Mount, tmp_path: Path
) -> None:
    output = tmp_path / "trace.json"
    file = shared.root / "log"
    with tracing(file, output) as process, open(file, "wb", buffering=0) as stream:
        stream.write(bytes(SIZE))
        assert process.stderr is not None
        assert process.stderr.readline() == f"{BEGUN} {file}\n"
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "interrupted after " in stdout
    found = document(output)
    assert found["otherData"]["state"] == "open"
    assert spans_of(found, "request")


def test_a_command_that_is_killed_costs_nothing_for_long(tmp_path: Path) -> None:
    """The next one says who is in the way; the lease is tested without a mount."""
    with mounted() as mount, tracing(mount.root / "file", tmp_path / "trace.json") as process:
        process.kill()
        process.wait()
        done = run_fpfs(*command(mount.root / "file", tmp_path / "b.json"), module="fpfs.cli.ctl")
        assert BUSY in done.stderr


def test_a_server_that_dies_ends_the_trace(tmp_path: Path) -> None:
    with mounted() as mount:
        mount.expect_log(r"server \d+ died \(signal 9\)")
        with tracing(mount.root / "file", tmp_path / "trace.json") as process:
            kill(mount)
            _, stderr = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 1
            assert "ended without an answer" in stderr
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("file", "output", "wrong"),
    [
        ("", "t", "the path is an empty string"),
        ("{root}", "t", "this is a directory"),
        ("{root}/", "t", "this is a directory"),
        ("{root}/missing/file", "t", "No such file or directory; name a file on the mount"),
        ("{tmp}/file", "t", "is not on an fpfs mount"),
        ("{root}/file", "{tmp}/missing/t", "cannot be written (No such file or directory)"),
        ("{root}/file", "{tmp}", "cannot be written (it is a directory)"),
    ],
)
def test_refusals(shared: Mount, tmp_path: Path, file: str, output: str, wrong: str) -> None:
    places = {"root": shared.root, "tmp": tmp_path}
    words = ["trace", file.format(**places), "-o", output.format(**places), "--timeout", "5"]
    done = run_fpfs(*words, module="fpfs.cli.ctl")
    assert done.returncode == 1
    assert wrong in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.root
def test_only_the_owner_may(shared: Mount, tmp_path: Path) -> None:
    need_nobody()
    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        done = run_fpfs(
            *command(shared.root / "file", Path(folder) / "trace.json"),
            module="fpfs.cli.ctl",
            prefix=AS_NOBODY,
        )
    assert done.returncode == 1, done.stderr
    assert "only root and the mount's owner may ask for 'trace'" in done.stderr
