"""Policies of directories: set, shown, inherited, refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount, check_fpfs, run_fpfs

pytestmark = pytest.mark.usefixtures("mount")  # only fpfs has policies

CTL = "fpfs.cli.ctl"


def policy(*words: str | Path) -> dict[str, tuple[str, str]]:
    """Run ``fpfs-ctl policy``; return (value, where it was set) by setting."""
    shown = json.loads(check_fpfs("policy", *words, "--json", module=CTL))
    return {each["key"]: (each["value"], each["set_at"]) for each in shown["settings"]}


def refusal(*words: str | Path) -> str:
    """Run ``fpfs-ctl policy``, which refuses; return what it says, one line."""
    done = run_fpfs("policy", *words, module=CTL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_policy_is_inherited_and_lasts(mount: Mount) -> None:
    below = mount.root / "run" / "step"
    os.makedirs(below)
    assert policy("get", below)["versions"] == ("0", "")
    assert policy("set", mount.root, "versions=3", "replace=inplace")["versions"] == ("3", "/")
    assert policy("set", mount.root / "run", "versions=5")["versions"] == ("5", "/run")
    for _ in range(2):
        shown = policy("get", below)
        assert shown["versions"] == ("5", "/run")
        assert shown["replace"] == ("inplace", "/")
        assert shown["commit"] == ("close", "")
        mount.remount()
    os.rename(mount.root / "run", mount.root / "moved")
    assert policy("get", mount.root / "moved" / "step")["versions"] == ("5", "/moved")
    assert policy("unset", mount.root / "moved", "versions")["versions"] == ("3", "/")
    assert policy("unset", mount.root, "versions", "replace")["versions"] == ("0", "")


def test_the_table_says_where_a_setting_comes_from(directory: Path) -> None:
    check_fpfs("policy", "set", directory, "versions=2", module=CTL)
    lines = check_fpfs("policy", "get", directory, module=CTL).splitlines()
    assert any("versions" in line and "2" in line and "/" in line for line in lines)
    assert any("replace" in line and "whole" in line and "default" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("versions=x",), "versions cannot be 'x'; take a number from 0 to 1000"),
        (("versions=-1",), "versions cannot be '-1'; take a number from 0 to 1000"),
        (("versions=" + "9" * 5000,), "9'; take a number from 0 to 1000"),
        (("commit_marker=\udcff",), "commit_marker cannot be '\\udcff'; take the name of a file"),
        (("replace=never",), "replace cannot be 'never'; take whole or inplace"),
        (("commit=x",), "commit cannot be 'x'; take close or group"),
        (("commit_marker=a/b",), "commit_marker cannot be 'a/b'; take the name of a file"),
        (("colour=red",), "there is no setting 'colour'; known are width, devices, chunk"),
        (("versions",), "'versions' has no value; write key=value"),
        (("versions=1", "versions=2"), "versions is set twice; leave one out"),
        ((), "nothing to set; write KEY=VALUE"),
    ],
)
def test_what_cannot_be_set_is_refused(directory: Path, words: tuple[str, ...], said: str) -> None:
    assert said in refusal("set", directory, *words)
    assert policy("get", directory)["versions"] == ("0", "")


def test_only_directories_have_policies(mount: Mount) -> None:
    (mount.root / "file").write_bytes(b"x")
    assert "this is not a directory" in refusal("set", mount.root / "file", "versions=1")
    assert "what is in .fpfs has no policy" in refusal(
        "set", mount.root / ".fpfs" / "partial", "versions=1"
    )
    assert "No such file" in refusal("set", mount.root / "none", "versions=1")
    assert "there is no setting 'x'" in refusal("unset", mount.root, "x")


def test_a_removed_directory_takes_its_policy_along(directory: Path) -> None:
    run = directory / "run"
    run.mkdir()
    policy("set", run, "versions=4")
    run.rmdir()
    run.mkdir()
    assert policy("get", run)["versions"] == ("0", "")


def test_a_directory_whose_name_is_no_text(mount: Mount, directory: Path) -> None:
    """It is shown with escapes."""
    odd = directory / os.fsdecode(b"\xff\x1b[bold]")
    odd.mkdir()
    assert policy("set", odd, "versions=2")["versions"][1].endswith("/\\xff\x1b[bold]")
    assert "/\\xff\\x1b[bold] " in check_fpfs("policy", "get", odd, module=CTL)
    assert mount.status().server_pid == mount.server_pid
