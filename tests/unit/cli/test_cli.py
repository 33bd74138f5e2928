"""The commands in this process: what they answer before any mount is touched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.table import Table

from fpfs.cli import ctl, main, show
from fpfs.cli.commands import recovery
from fpfs.core.protocol.reports import RecoveryStatus
from fpfs.testing.mounted import REPOSITORY


def complaint(
    capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 1, tool: str = "fpfs"
) -> str:
    """The one line on stderr of a command that ends with `status`."""
    run = {"fpfs": main.main, "fpfs-ctl": ctl.main}[tool]
    assert run([str(word) for word in words]) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{tool}: ")
    assert said.err.count("\n") == 1
    return said.err


def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script whose variable is unset must not format the directory that it runs in."""
    (tmp_path / "working").mkdir()
    (tmp_path / "mount").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    device = "the device directory is an empty string; name a directory"
    # Twice, so that nothing would be mounted if both were taken.
    assert device in complaint(capsys, "mount", "-d", "", "-d", "", tmp_path / "mount")
    assert device in complaint(capsys, "format", "-d", "")
    mountpoint = "the mountpoint is an empty string; name a directory"
    assert mountpoint in complaint(capsys, "mount", "-d", ".", "")
    assert mountpoint in complaint(capsys, "umount", "")
    for verb in ("status", "wait", "flush"):
        assert "the path is an empty string; name a" in complaint(capsys, verb, "", tool="fpfs-ctl")
    assert os.listdir() == []


@pytest.mark.parametrize("verb", ["status", "wait", "flush"])
@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "1e300"])
def test_a_timeout_is_a_number_of_seconds(
    verb: str, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, verb, "--timeout", seconds, "/", tool="fpfs-ctl")
    asked = f"fpfs-ctl: --timeout {float(seconds):g}: "
    assert said.startswith(f"{asked}this is not a number of seconds above 0 and up to 1000000;")


def test_the_longest_timeout_is_one_for_a_socket() -> None:
    """A longer one than the system can count is an OverflowError there."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(show.TIMEOUT_S_MAX)


@pytest.mark.parametrize("verb", ["status", "wait", "flush"])
def test_a_path_that_does_not_exist(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path / "missing", file / "below"):
        assert f"{path} does not exist; findmnt" in complaint(capsys, verb, path, tool="fpfs-ctl")
    assert f"{file} is not on an fpfs mount" in complaint(capsys, verb, file, tool="fpfs-ctl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("format d1 d2", "format does not take 'd1 d2': every device directory is named with -d"),
        ("mount -d d m m2", "mount does not take 'm2': there is one mountpoint, and every device"),
        ("umount m m2", "umount does not take 'm2': there is one mountpoint"),
        ("unmount m m2", "unmount does not take 'm2': there is one mountpoint"),
        ("version now", "version does not take 'now': it takes no such words"),
        ("mount --bogus m", "Unknown option: --bogus"),
    ],
)
def test_words_that_are_one_too_many(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, *line.split(), status=2)
    assert said.startswith(f"fpfs: {message}")
    assert said.endswith("; see --help\n")


def test_the_tool_takes_one_path(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "wait", "a", "b", status=2, tool="fpfs-ctl")
    assert said == "fpfs-ctl: wait does not take 'b': there is one path; see --help\n"


@pytest.mark.parametrize("name", ["fpfs", "fpfs-ctl"])
def test_an_interrupt_while_the_command_is_imported(name: str, tmp_path: Path) -> None:
    """The module that stands in for cyclopts is where Ctrl-C arrives."""
    (tmp_path / "cyclopts.py").write_text("raise KeyboardInterrupt\n")
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts[name].split(":")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from {module} import {function} as f; sys.exit(f())"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{name}: interrupted\n")


def run_into(*words: str, stdout: int, tool: str = "main") -> tuple[int, str]:
    """Exit status and errors of a command whose output goes to a descriptor."""
    done = subprocess.run(
        [sys.executable, "-m", f"fpfs.cli.{tool}", *words],
        cwd=REPOSITORY,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [["version"], ["--help"], ["fsck", "--help"]], ids=" ".join)
def test_output_that_cannot_be_written(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        status, said = run_into(*words, stdout=full.fileno())
    assert (status, said) == (
        8 if words[0] == "fsck" else 1,
        "fpfs: the output cannot be written (No space left on device)\n",
    )


def test_a_reader_that_wants_no_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run_into("version", stdout=writer) == (1, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str) -> None:
    command = [sys.executable, "-m", "fpfs.cli.main", "version"]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets are no markup, colons no pictures, and long ones are not cut."""
    name = "run[bold] [/bold] :smile: " + "x" * 4000
    console = show.open_console()
    table = Table("name")
    table.add_row(name)
    console.print(table)
    console.print(name, soft_wrap=True)
    assert capsys.readouterr().out.count(name) == 2


def test_lost_changes_are_told() -> None:
    (line,) = recovery._lines(RecoveryStatus(files_lost=2))
    assert line.startswith("rolled back: 2 files whose changes were lost with damaged staging")


def test_an_export_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "export") == (
        "fpfs: export: nothing is named; name all device directories of a filesystem, and then an"
        " empty directory\n"
    )


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "bogus", status=2, tool="fpfs-ctl")
    assert said.startswith('fpfs-ctl: Unknown command "bogus". Available commands: policy, ')
    assert said.endswith(", ...; see --help\n")
