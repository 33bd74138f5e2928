"""Policies of directories: set, shown, inherited, refused."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fpfs.testing.mounted import Mount, check_fpfs, mounted, run_fpfs
from tests.support.failures.crash import crash_and_mount
from tests.support.servers import kill

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


def test_a_policy_survives_servers_and_crashes() -> None:
    with mounted() as fresh:
        fresh.expect_log("died .signal 9.: starting another")
        (fresh.root / "run").mkdir()
        for number, happens in enumerate((kill, crash_and_mount)):
            expected = (str(number), "/run")
            assert policy("set", fresh.root / "run", f"versions={number}")["versions"] == expected
            happens(fresh)
            assert policy("get", fresh.root / "run")["versions"] == expected


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
    assert "/\\xff\\x1b[bold]\n" in check_fpfs("policy", "get", odd, module=CTL)
    assert mount.status().server_pid == mount.server_pid


KIB = 1024
MIB = 1024 * KIB


@pytest.fixture(scope="module")
def striped() -> Iterator[Mount]:
    """A mount over three devices."""
    with mounted(devices=3) as made:
        yield made


def lies_on(path: Path) -> dict[str, Any]:
    """Where the committed content of a file is, as ``fpfs-ctl policy explain`` tells."""
    check_fpfs("wait", path, module=CTL)
    found = json.loads(check_fpfs("policy", "explain", path, "--json", module=CTL))
    return dict(found["present"])


def test_a_version_goes_where_the_policy_says_and_committed_ones_stay(striped: Mount) -> None:
    run = striped.root / "run"
    run.mkdir()
    path = run / "step.pt"
    path.write_bytes(os.urandom(6 * MIB))
    assert lies_on(path)["bytes_by_device"] == {str(n): 2 * MIB for n in range(3)}
    policy("set", run, "width=1", "devices=1,2", "chunk=4M")
    assert lies_on(path)["bytes_by_device"] == {str(n): 2 * MIB for n in range(3)}
    assert lies_on(path)["follows_policy"] is False
    found = []
    for _ in range(4):
        path.write_bytes(content := os.urandom(6 * MIB))
        present = lies_on(path)
        assert present["chunk_bytes"] == 4 * MIB
        assert present["follows_policy"] is True
        assert path.read_bytes() == content
        found.append(present["bytes_by_device"])
    assert found in (
        [{"1": 6 * MIB}, {"2": 6 * MIB}] * 2,
        [{"2": 6 * MIB}, {"1": 6 * MIB}] * 2,
    )
    policy("set", run, "width=2")
    path.write_bytes(content := os.urandom(6 * MIB))
    assert sorted(lies_on(path)["bytes_by_device"].values()) == [2 * MIB, 4 * MIB]
    striped.remount()
    assert path.read_bytes() == content


@pytest.mark.root
def test_what_is_staged_by_a_new_layout_survives_the_server(striped: Mount) -> None:
    """Chunks of 8 MiB, staged in slots of 1 MiB, of a file that had chunks of 1 MiB."""
    striped.expect_log(r"server \d+ died \(signal 9\)")
    striped.allow_log("lacked the last changes")
    directory = striped.root / "taken over"
    directory.mkdir()
    path = directory / "file"
    path.write_bytes(os.urandom(5 * MIB))
    policy("set", directory, "chunk=8M", "width=2", "depth=1", "buffers=2")
    content = os.urandom(20 * MIB + 77)
    with path.open("r+b", buffering=0) as file:
        for start in range(0, len(content), 3 * MIB):
            file.write(content[start : start + 3 * MIB])
            if start == 9 * MIB:
                striped.kill(striped.server_pid)
        assert path.read_bytes() == content
    striped.note_processes()
    assert lies_on(path)["chunk_bytes"] == 8 * MIB
    striped.remount()
    assert path.read_bytes() == content


def commits_at(path: Path) -> tuple[int, int]:
    """How often something was committed when write() and close() had returned."""
    with path.open("wb", buffering=0) as file:
        file.write(bytes(100 * KIB))
        written = durable_size(path)
    return written, durable_size(path)


def durable_size(path: Path) -> int:
    found = json.loads(check_fpfs("policy", "explain", path, "--json", module=CTL))
    return int(found["present"]["size"])


def test_writers_are_answered_as_the_directory_says(striped: Mount) -> None:
    for ack, expected in (("durable", (102400, 102400)), ("close", (0, 102400))):
        directory = striped.root / f"ack {ack}"
        directory.mkdir()
        policy("set", directory, f"ack={ack}")
        assert commits_at(directory / "file") == expected


def test_reads_go_past_the_page_cache_where_the_directory_says(striped: Mount) -> None:
    directory = striped.root / "direct"
    directory.mkdir()
    path = directory / "file"
    path.write_bytes(content := os.urandom(3 * MIB))
    check_fpfs("wait", path, module=CTL)
    for reads, most in (("cached", 1), ("direct", 3)):
        policy("set", directory, f"reads={reads}")
        before = sum(device.bytes_read for device in striped.status().devices)
        for _ in range(3):
            assert path.read_bytes() == content
        read = sum(device.bytes_read for device in striped.status().devices) - before
        assert (most - 1) * len(content) < read <= most * len(content) + MIB


def test_all_or_nothing_names_are_the_directorys(striped: Mount) -> None:
    directory = striped.root / "whole"
    directory.mkdir()
    policy("set", directory, "whole=*.state")
    explained = json.loads(
        check_fpfs("policy", "explain", directory / "a.state", "--json", module=CTL)
    )
    assert explained["is_all_or_nothing"] is True
    assert explained["present"] is None


def test_explain_says_it_in_words(striped: Mount) -> None:
    directory = striped.root / "words"
    directory.mkdir()
    policy("set", directory, "first=rank", "width=1")
    path = directory / "rank4.pt"
    said = check_fpfs("policy", "explain", path, module=CTL)
    assert (
        "its next version goes to 1 of the devices 0, 1, 2, from the one that its rank 4 counts to"
        in said
    )
    assert "its name never shows what a killed writer left" in said
    assert "there is no such file yet" in said
    path.write_bytes(bytes(200 * KIB))
    check_fpfs("wait", path, module=CTL)
    said = check_fpfs("policy", "explain", path, module=CTL)
    assert "now it has 200 KiB: 256 KiB on device 1 in chunks of 1M" in said
    assert "this is a directory" in refusal("explain", directory)


def test_what_does_not_fit_the_mount_is_refused(striped: Mount) -> None:
    for word, said in (
        ("width=4", "width cannot be 4: devices=all are 3; take a number from 1 to 3, or all"),
        ("devices=7", "no device has the number or tag '7'; take of 0, 1, 2"),
        ("chunk=1600K", "chunk cannot be 1600K: staging buffers hold 1M; take a multiple of 64K"),
        ("depth=99", "depth cannot be 99: this mount's devices take 16; take a number from 1 to"),
        ("chunk=64K", "chunk cannot be '64K'; take a size from 128K to 1G, a multiple of 64K"),
    ):
        assert said in refusal("set", striped.root, word)
    assert policy("get", striped.root)["width"] == ("all", "")


def test_profiles_are_set_by_name(directory: Path) -> None:
    shown = policy("set", directory, "--profile", "safe", "versions=5")
    assert (shown["ack"][0], shown["versions"][0]) == ("close", "5")
    assert "there is no profile 'fast'; known are throughput, safe" in refusal(
        "set", directory, "--profile", "fast"
    )
    assert json.loads(check_fpfs("policy", "profiles", "--json", module=CTL))["small-files"]


def test_policies_go_to_a_file_and_come_back(mount: Mount, directory: Path, tmp_path: Path) -> None:
    for name in ("a", "a/b c", '"', ".d"):
        (directory / name).mkdir()
    policy("set", directory, "versions=2")
    policy("set", directory / "a" / "b c", "chunk=4M", "whole=*.pt:*.x")
    policy("set", directory / '"', "first=rank")
    policy("set", directory / ".d", "versions=9")
    file = tmp_path / "policy.toml"
    check_fpfs("policy", "export", directory, "-o", file, module=CTL)
    assert tomllib.loads(file.read_text()) == {
        ".": {"versions": "2"},
        '"': {"first": "rank"},
        ".d": {"versions": "9"},
        "a/b c": {"chunk": "4M", "whole": "*.pt:*.x"},
    }
    assert check_fpfs("policy", "apply", directory, file, module=CTL) == "nothing differs\n"
    policy("set", directory, "versions=3", "ack=close")
    policy("unset", directory / '"', "first")
    done = run_fpfs("policy", "apply", directory, file, module=CTL)
    assert done.returncode == 1  # nobody is there to confirm it
    assert done.stdout.splitlines() == [
        '+ ": first=rank',
        "- .: ack=close",
        "~ .: versions=3 becomes 2",
        "nothing was changed; --yes applies it",
    ]
    assert policy("get", directory)["versions"][0] == "3"
    check_fpfs("policy", "apply", directory, file, "--yes", module=CTL)
    mount.remount()
    assert policy("get", directory)["versions"][0] == "2"
    assert policy("get", directory)["ack"][0] == "early"
    assert policy("get", directory / '"')["first"][0] == "rank"
    lines = check_fpfs("policy", "list", directory, module=CTL)
    assert "/a/b c" in lines
    assert "chunk" in lines


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "has 'x' outside of a directory's table"),
        ("[", "is no TOML"),
        ("\xff", "is no TOML"),
        ('["../up"]\nwidth = 1', "has the path '../up', which is not below the directory"),
        ('["/etc"]\nwidth = 1', "has the path '/etc', which is not below the directory"),
        ('["."]\nwidth = true', "width is neither text nor a number"),
        ('["."]\nwidth = "x"', "width cannot be 'x'; take a number from 1 to 65535, or all"),
        ('["."]\ncolour = "x"', "there is no setting 'colour'"),
        ('["none"]\nversions = 1', "No such file or directory"),
        ('["."]\nversions = 1\n["sub"]\nwidth = 3', "width cannot be 3: devices=all are 2"),
    ],
)
def test_a_file_that_cannot_be_applied_changes_nothing(
    directory: Path, tmp_path: Path, text: str, said: str
) -> None:
    (directory / "sub").mkdir()
    file = tmp_path / "policy.toml"
    file.write_text(text, encoding="latin-1")
    done = run_fpfs("policy", "apply", directory, file, "--yes", module=CTL)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert policy("get", directory)["versions"] == ("0", "")


def test_devices_are_named_by_tags(striped: Mount) -> None:
    directory = striped.root / "tags"
    directory.mkdir()
    check_fpfs("device", "tag", striped.root, "1", "+quick", module=CTL)
    check_fpfs("device", "tag", striped.root, "2", "+quick", module=CTL)
    policy("set", directory, "devices=quick")
    (directory / "a").write_bytes(bytes(2 * MIB))
    assert set(lies_on(directory / "a")["bytes_by_device"]) == {"1", "2"}
    check_fpfs("device", "tag", striped.root, "1", "-quick", module=CTL)
    (directory / "a").write_bytes(bytes(2 * MIB))
    assert set(lies_on(directory / "a")["bytes_by_device"]) == {"2"}


def test_a_sequential_reader_is_read_ahead_of(striped: Mount) -> None:
    directory = striped.root / "ahead"
    directory.mkdir()
    policy("set", directory, "reads=direct", "readahead=4M")
    path = directory / "file"
    path.write_bytes(content := os.urandom(12 * MIB + 77))
    check_fpfs("wait", path, module=CTL)
    before = striped.status().channel["reads_ahead"]
    with path.open("rb", buffering=0) as file:
        parts = []
        while part := file.read(MIB // 2):
            parts.append(part)
    assert b"".join(parts) == content
    assert striped.status().channel["reads_ahead"] - before >= 20
    with path.open("rb", buffering=0) as reader, path.open("r+b", buffering=0) as writer:
        for start in range(0, 6 * MIB, MIB):
            assert reader.read(MIB) == content[start : start + MIB]
        writer.seek(0)
        writer.write(later := os.urandom(len(content)))
        assert reader.read(MIB) == later[6 * MIB : 7 * MIB]
