"""What the installed program must be so that a mount goes on with it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fpfs.core.errors import InvalidOperation
from fpfs.core.options import MountOptions, ServerConfig
from fpfs.daemon.mount import launch, live_upgrade
from fpfs.daemon.mount.supervisor import KeeperState

OURS = live_upgrade.this_program()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program in the place of the interpreter."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def says(program: live_upgrade.Program) -> str:
    """A script that says that it is `program`."""
    return f"echo '{msgspec.json.encode(program).decode()}'"


def test_the_one_that_runs_can_take_over() -> None:
    assert live_upgrade.check_installed() == OURS


def test_none_is_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may write there, and this is root."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('theirs')\n")
    monkeypatch.chdir(tmp_path)
    assert live_upgrade.check_installed() == OURS


def test_nor_is_the_one_that_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _program, command: commands.append(command))
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_options: commands.append(command))
    config = ServerConfig(
        mountpoint="/ckpt",
        devices=(),
        options=MountOptions(),
        log="",
        runtime_folder="",
        ready_fd=-1,
        asked="",
    )
    state = KeeperState(device="", descriptors=(), restarts=0, started_unix_s=0, signals=())
    live_upgrade.execute(config, state)
    launch.start_process(io.BytesIO(), -1)
    assert [command[1:4] for command in commands] == [["-P", "-m", live_upgrade.MODULE]] * 2


def test_a_newer_one_with_the_same_formats_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = msgspec.structs.replace(OURS, version="99")
    install(tmp_path, monkeypatch, says(newer))
    assert live_upgrade.check_installed() == newer


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo ImportError: no such thing >&2; exit 1", "does not start .ImportError: no such"),
        ("exit 7", "does not start .exit status 7"),
        ("echo gibberish", "does not say what it is"),
        (
            says(msgspec.structs.replace(OURS, version="99", arena_format=OURS.arena_format + 1)),
            "fpfs 99 cannot take over .*unmount and mount again",
        ),
        (
            says(msgspec.structs.replace(OURS, state_format=OURS.state_format + 1)),
            "cannot take over",
        ),
    ],
)
def test_others_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    install(tmp_path, monkeypatch, script)
    with pytest.raises(InvalidOperation, match=reason):
        live_upgrade.check_installed()


def test_nor_can_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(InvalidOperation, match="does not start"):
        live_upgrade.check_installed()
