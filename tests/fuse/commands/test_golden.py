"""Tables and JSON of fpfs-ctl, as they are kept in tests/golden, without what differs each time.

Every command that prints JSON is run on a real mount, and what it prints is validated against the
schema in docs/json.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from fpfs.cli import schemas
from fpfs.client import save_shares
from fpfs.testing.mounted import Mount, mounted, run_fpfs
from tests.support import golden
from tests.support.processes import REPOSITORY
from tests.support.terminal import running

FIXED = {
    "bytes_free", "bytes_total", "bytes_used", "bytes_read", "bytes_written", "server_pid",
    "server_pid_before", "keeper_pid", "started_unix_s", "time_unix_s", "replaced_unix_s",
    "filesystem_id", "log", "transactions", "committed", "pending", "version", "version_before",
    "requests_in_flight", "backend", "direct", "pinned", "object", "ino", "bytes_per_s",
    "restarts", "objects_removed", "mode", "uid", "gid", "bytes_checked", "objects", "inodes",
    "sample_bytes", "samples", "proposed", "object_offset_bytes", "interval_s", "write_s",
    "read_s", "flush_s", "bytes_written_per_s", "bytes_read_per_s", "bytes_acknowledged_per_s",
    "writes_per_s", "write_to_ack_s", "ack_to_durable_s", "requests_queued", "staging_bytes_used",
    "staging_bytes_total",
}  # fmt: skip
"""Fields whose values differ from run to run or from machine to machine."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "policy set": ("policy", "set", "run", "versions=2", "chunk=256K"),
    "policy get": ("policy", "get", "run"),
    "policy list": ("policy", "list", "."),
    "policy explain": ("policy", "explain", "run/a.pt"),
    "policy profiles": ("policy", "profiles"),
    "policy unset": ("policy", "unset", "run", "chunk"),
    "policy apply": ("policy", "apply", ".", "policies.toml", "--yes"),
    "device tag": ("device", "tag", ".", "1", "+fast"),
    "device list": ("device", "list", "."),
    "wait": ("wait", "run"),
    "flush": ("flush", "."),
    "stat": ("stat", "run/a.pt", "run/small"),
    "ls": ("ls", "run"),
    "plan": ("plan", "--simulate", "64M", "--ranks", "4", "--per-node", "2", "--devices", "2"),
    "gather": ("gather", "shares", "-o", "groups/gathered.pt"),
    "verify": ("verify", "shares"),
    "versions": ("versions", "run/small"),
    "restore": ("restore", "run/small@1"),
    "commit": ("commit", "groups/step1"),
    "status": ("status", "."),
    "recovery": ("recovery", "."),
    "scrub": ("scrub", "run"),
    "fsck": ("fsck", "."),
    "tune": ("tune", "--bytes", "256M", "--time", "60", "tuned"),
    "restart": ("restart", "."),
    "device add": ("device", "add", ".", "NEW"),
    "device drain": ("device", "drain", ".", "0"),
    "device remove": ("device", "remove", ".", "0"),
}
"""By command: words, of which those that are paths are below the mountpoint."""

PATHS = re.compile(r"^(\.|(run|groups|shares|tuned|policies)\b.*)$")


UNTABLED = {"tune", "restart", "policy apply", "restore"}
"""Their lines are figures, or say what cannot be done twice."""


@contextlib.contextmanager
def prepared() -> Iterator[Mount]:
    """A mount of two devices with a few files."""
    with mounted(devices=2) as made:
        for name in ("run", "groups", "tuned"):
            (made.root / name).mkdir()
        (made.root / "policies.toml").write_text('["groups"]\nversions = 3\ncommit = "group"\n')
        ctl(made, "policy", "set", "groups", "commit=group")
        ctl(made, "policy", "set", "run", "versions=2")
        (made.root / "groups" / "step1").mkdir()
        (made.root / "run" / "a.pt").write_bytes(b"x" * 3_000_000)
        for content in (b"old", b"new and longer"):
            (made.root / "run" / "small").write_bytes(content)
            ctl(made, "wait", "run/small")
        save_shares({"step": 1}, made.root / "shares")
        yield made


@pytest.fixture(scope="module")
def documents() -> dict[str, tuple[str, str]]:
    """What each command prints with --json, one after the other, as it is and without paths."""
    with prepared() as mount:
        printed = {}
        for command, words in COMMANDS.items():
            text = ctl(mount, *words, "--json")
            shown = json.dumps(stable(json.loads(text)), indent=2, ensure_ascii=False) + "\n"
            printed[command] = (text, without_paths(mount, shown))
        return printed


@pytest.fixture(scope="module")
def tables() -> dict[str, str]:
    """What each command prints for people."""
    with prepared() as mount:
        return {
            command: plain(mount, ctl(mount, *words))
            for command, words in COMMANDS.items()
            if command not in UNTABLED
        }


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    """A mount for the rest."""
    with prepared() as made:
        yield made


def ctl(mount: Mount, *words: str) -> str:
    """Run ``fpfs-ctl``, with paths below the mountpoint."""
    places = [str(mount.root / word) if PATHS.match(word) else word for word in words]
    if "NEW" in places:
        new = mount.root.parent / "device2"
        new.mkdir()
        places[places.index("NEW")] = str(new)
    places = [place.removesuffix("/.") for place in places]
    done = run_fpfs(*places, module="fpfs.cli.ctl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def stable(value: Any, key: str = "") -> Any:
    """A document without what differs from run to run."""
    if key in FIXED:
        return f"<{key}>"
    if key == "node" and isinstance(value, str):
        return f"<{key}>"
    if key == "channel":
        return dict.fromkeys(sorted(value), f"<{key}>")
    if isinstance(value, dict):
        return {name: stable(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [stable(inner) for inner in value]
    return value


def without_paths(mount: Mount, text: str) -> str:
    """Text without paths of this run."""
    text = re.sub(r"\b[0-9a-f]{16}\b", "ID", text)
    return text.replace(str(mount.root), "/ckpt").replace(str(mount.root.parent), "/tmp")


def plain(mount: Mount, text: str) -> str:
    """Text without paths, widths, figures and times of this run."""
    text = without_paths(mount, text)
    text = re.sub(r"(io_uring|threads), (direct|buffered)", "HOW", text)
    text = re.sub(r"\d+ pending, \d+ done", "N pending, N done", text)
    text = text.replace(" (not pinned)", "")
    text = re.sub(r"[━─]{2,}", "──", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d", "TIME", text)
    text = re.sub(r"(server|keeper|by|version|inode) \d+", r"\1 N", text)
    text = re.sub(r"\d+(\.\d+)? (B|[KMGTP]iB|[kMG]B/s)\b", "SIZE", text)
    text = re.sub(r"\.\.\.\w?/device", ".../device", text)  # cut to the columns that there are
    text = re.sub(r" +(?=(SIZE|used|free|written|read)\b)", "  ", text)  # as wide as figures are
    return re.sub(r" +$", "", re.sub(r" {2,}", "  ", text), flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_as_it_is_kept_and_fits_its_schema(
    documents: dict[str, tuple[str, str]], command: str
) -> None:
    text, shown = documents[command]
    document = json.loads(text)
    schema = json.loads((REPOSITORY / "docs" / "json" / schemas.file_of(command)).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)
    again = msgspec.json.encode(msgspec.json.decode(text, type=schemas.PRINTED[command]))
    assert json.loads(again) == document, "the schema names each field"
    golden.check(f"json/{command.replace(' ', '-')}.json", shown)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - UNTABLED))
def test_tables_are_as_they_are_kept(tables: dict[str, str], command: str) -> None:
    text = tables[command]
    if command == "ls":
        text = re.sub(r"\b(\d+)( +)(?=\S+$)", "N ", text, flags=re.MULTILINE)
        text = re.sub(r"^(\S+ 1) \S+ \S+ ", r"\1 WHO WHOSE ", text, flags=re.MULTILINE)
    if command == "verify":
        text = text.replace(f" {os.uname().nodename} ", " HOST ")
    golden.check(f"tables/{command.replace(' ', '-')}.txt", text)


def test_every_command_that_prints_json_is_here() -> None:
    assert set(COMMANDS) == set(schemas.PRINTED)


def test_nothing_is_kept_of_what_is_gone() -> None:
    for folder, commands in (("json", set(COMMANDS)), ("tables", set(COMMANDS) - UNTABLED)):
        kept = {path.stem for path in (golden.FOLDER / folder).iterdir()}
        assert kept == {command.replace(" ", "-") for command in commands}


def test_an_error_is_a_line_and_a_status_with_json_too(mount: Mount) -> None:
    for words in (
        ("stat", mount.root / "missing"),
        ("ls", "/proc"),
        ("wait", mount.root / "missing"),
        ("policy", "get", mount.root / "run" / "a.pt"),
    ):
        done = run_fpfs(*words, "--json", module="fpfs.cli.ctl")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("fpfs-ctl: ")
        assert done.stderr.count("\n") == 1


def test_a_command_that_takes_long_says_so_on_a_terminal_only(mount: Mount) -> None:
    stream = (mount.root / "run" / "open").open("wb")
    with stream:
        stream.write(b"x")
        stream.flush()
        words = ["wait", str(mount.root / "run"), "--timeout", "1.5"]
        quiet = run_fpfs(*words, module="fpfs.cli.ctl")
        assert quiet.stderr.count("\n") == 1
        assert "waiting until" not in quiet.stderr
        assert "no answer within 1.5 s" in quiet.stderr
        with running("wait", str(mount.root / "run")) as waiting:
            waiting.read_until("waiting until")
            stream.close()
            waiting.read_all()
    os.unlink(mount.root / "run" / "open")


def test_paths_of_golden_files_are_no_paths_of_this_machine() -> None:
    for path in [*golden.FOLDER.rglob("*.txt"), *golden.FOLDER.rglob("*.json")]:
        text = Path(path).read_text()
        assert "fpfs-test-" not in text, path
        assert f"{REPOSITORY}/" not in text, path
