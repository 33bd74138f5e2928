"""What was answered is kept, whoever dies next: cells of the table in docs/semantics.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount, check_fpfs, mounted
from tests.support.contents import assert_same, random_bytes
from tests.support.processes import expect_line, python_child
from tests.support.servers import wait_for_exit

CONTENT = random_bytes(3_000_001, seed=61)
ANSWERED = ("close", "fsync", "rename", "group commit")
WRITER = """if True:
    import os, sys
    from fpfs.core.group import commit_group

    how, source, place = sys.argv[1:]
    content = open(source, "rb").read()
    folder = os.path.join(place, "step")
    os.mkdir(folder)
    path = os.path.join(folder, "state.pt")
    with open(path + ".tmp" if how == "rename" else path, "wb") as stream:
        stream.write(content)
        if how == "fsync":
            stream.flush()
            os.fsync(stream.fileno())
            print("answered", flush=True)
            sys.stdin.readline()
    if how == "rename":
        os.rename(path + ".tmp", path)
    if how == "group commit":
        commit_group(folder)
    print("answered", flush=True)
    sys.stdin.readline()
"""


def kill_nobody(mount: Mount) -> None:
    """Only the writer."""
    assert mount.entry() is not None


def kill_server(mount: Mount) -> None:
    """The keeper starts another."""
    mount.kill(mount.server_pid)
    mount.note_processes()


def kill_keeper(mount: Mount) -> None:
    """The server drains, and ends the mount."""
    mount.kill(mount.keeper_pid)
    wait_for_exit(mount.server_pid)
    mount.tear_down()
    mount.mount()


def kill_both(mount: Mount) -> None:
    """What was staged stays in memory for the next mount."""
    mount.kill(mount.keeper_pid, mount.server_pid)
    mount.tear_down()
    mount.mount()


@pytest.mark.parametrize("death", [kill_nobody, kill_server, kill_keeper, kill_both])
def test_what_was_answered_is_kept(death: Callable[[Mount], None], tmp_path: Path) -> None:
    """The writers are killed, too: none of them comes to an orderly end."""
    source = tmp_path / "content"
    source.write_bytes(CONTENT)
    with mounted(devices=2) as mount:
        mount.allow_log(r"server \d+ died|the keeper died|files were open at the end")
        with contextlib.ExitStack() as writers:
            for answered in ANSWERED:
                place = mount.root / answered
                place.mkdir()
                if answered == "group commit":
                    check_fpfs("policy", "set", place, "commit=group", module="fpfs.cli.ctl")
                writer = writers.enter_context(python_child(WRITER, answered, source, place))
                expect_line(writer, "answered")
            death(mount)
        check_all(mount)
        mount.remount()
        check_all(mount)


def check_all(mount: Mount) -> None:
    """Every file has its content, and there is no other."""
    for answered in ANSWERED:
        path = mount.root / answered / "step" / "state.pt"
        assert_same(path.read_bytes(), CONTENT)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
