"""``fpfs-ctl device``: the devices of a mount, and changes of them while it is in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fpfs.core.device_names import TAGS_MAX
from fpfs.testing.mounted import CommandFailed, Mount, check_fpfs, mounted, run_fpfs
from tests.support.contents import random_bytes
from tests.support.failures.poison import Orders, poisoned_mount
from tests.support.servers import kill, wait_for_exit

CTL = "fpfs.cli.ctl"


def devices(mount: Mount) -> list[dict[str, Any]]:
    """What ``fpfs-ctl device list`` tells, by position."""
    found: list[dict[str, Any]] = json.loads(
        check_fpfs("device", "list", mount.root, "--json", module=CTL)
    )
    return found


def device(*words: str | Path) -> str:
    """Run ``fpfs-ctl device``, and return what it prints."""
    return check_fpfs("device", *words, module=CTL)


def refusal(*words: str | Path) -> str:
    """Run ``fpfs-ctl device``, which refuses; return what it says, one line."""
    done = run_fpfs("device", *words, module=CTL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def tags(mount: Mount) -> list[list[str]]:
    """The tags of each device."""
    return [each["tags"] for each in devices(mount)]


def test_the_list_says_what_there_is() -> None:
    with mounted(devices=3) as mount:
        found = devices(mount)
        assert [each["number"] for each in found] == [0, 1, 2]
        assert [each["path"] for each in found] == [str(path) for path in mount.devices]
        assert [each["state"] for each in found] == ["ok"] * 3
        assert [each["has_catalog"] for each in found] == [True, True, False]
        assert all(each["bytes_free"] > 0 for each in found)
        device("tag", mount.root, "2", "+spare")
        lines = device("list", mount.root).splitlines()
        (line,) = [line for line in lines if str(mount.devices[2]) in line]
        assert "spare" in line
        assert "ok" in line
        assert "catalog" not in line
        assert sum("contents, catalog" in line for line in lines) == 2


def test_tags_are_given_and_taken_and_last(mount: Mount) -> None:
    mount.expect_log("server .* died")
    assert "device 0 (" in device("tag", mount.root, "0", "+fast", "+old")
    device("tag", mount.root, mount.devices[1], "+fast")
    assert tags(mount) == [["fast", "old"], ["fast"]]
    kill(mount)
    assert tags(mount) == [["fast", "old"], ["fast"]]
    assert "fast" in device("tag", mount.root, "old", "-old", "-never")
    mount.remount()
    assert tags(mount) == [["fast"], ["fast"]]
    assert "no tags" in device("tag", mount.root, "1", "-fast")
    assert tags(mount) == [["fast"], []]


def test_what_names_no_device_is_refused(mount: Mount) -> None:
    device("tag", mount.root, "0", "+fast")
    device("tag", mount.root, "1", "+fast")
    for name in ("2", "slow", "/elsewhere", "0x1"):
        said = refusal("tag", mount.root, name, "+spare")
        assert f"no device is called '{name}'; there are devices 0, 1 and tags fast" in said
    assert "'fast' names devices 0, 1; name one by its number" in refusal(
        "tag", mount.root, "fast", "+spare"
    )
    many = [f"+tag{number}" for number in range(TAGS_MAX)]
    assert f"would have {TAGS_MAX + 1} tags; {TAGS_MAX} are possible" in refusal(
        "tag", mount.root, "0", *many
    )
    assert tags(mount) == [["fast"], ["fast"]]


def add(mount: Mount, name: str = "added") -> Path:
    """Add a fresh directory as a device."""
    folder = mount.folder / name
    folder.mkdir()
    device("add", mount.root, folder)
    mount.devices = (*mount.devices, folder)
    return folder


def content_bytes(folder: Path) -> int:
    """Bytes of the objects on a device, those that are kept ready left out."""
    return sum(path.stat().st_size for path in (folder / "objects").rglob("*") if path.is_file())


def check_sound(mount: Mount) -> None:
    """Check an unmounted filesystem, with all contents."""
    report = json.loads(check_fpfs("fsck", "--data", "--json", *mount.devices))
    assert report["findings"] == []


def test_new_files_use_an_added_device_at_once() -> None:
    with mounted(devices=1) as mount:
        before = random_bytes(2_000_000, seed=1)
        (mount.root / "before").write_bytes(before)
        free = os.statvfs(mount.root).f_blocks
        folder = add(mount)
        after = random_bytes(5_000_000, seed=2)
        (mount.root / "after").write_bytes(after)
        mount.flush()
        assert content_bytes(folder) >= 2_000_000
        assert [each["has_catalog"] for each in devices(mount)] == [True, True]
        assert os.statvfs(mount.root).f_blocks == free  # both lie on one filesystem
        for _ in range(2):
            assert (mount.root / "before").read_bytes() == before
            assert (mount.root / "after").read_bytes() == after
            assert mount.status().catalog.copies_in_service == 2
            mount.remount()
        mount.unmount()
        check_sound(mount)


def test_a_mount_without_the_added_device_is_refused() -> None:
    with mounted(devices=2) as mount:
        mount.allow_log("mount at .* is missing")
        folder = add(mount)
        mount.unmount()
        mount.devices = mount.devices[:2]
        with pytest.raises(CommandFailed, match=rf"device 2 \(last at {folder}\) is missing"):
            mount.mount()
        mount.devices = (*mount.devices, folder)
        mount.mount()
        assert len(devices(mount)) == 3


def test_what_cannot_be_added_is_refused(mount: Mount, tmp_path: Path) -> None:
    for path, said in {
        mount.devices[1]: "is device 1 already",
        mount.root: "lies under the mountpoint",
        mount.root.parent: "lie within each other",
        tmp_path / "none": "does not exist",
    }.items():
        assert said in refusal("add", mount.root, path)
    assert len(devices(mount)) == 2


def test_servers_that_take_over_know_an_added_device() -> None:
    with mounted(devices=1) as mount:
        mount.expect_log("server .* died")
        folder = add(mount)
        content = random_bytes(3_000_000, seed=3)
        (mount.root / "a").write_bytes(content)
        kill(mount)
        assert [each["state"] for each in devices(mount)] == ["ok", "ok"]
        assert (mount.root / "a").read_bytes() == content
        (mount.root / "b").write_bytes(content)
        check_fpfs("restart", mount.root, module=CTL)
        mount.note_processes()
        add(mount, "another")
        kill(mount)
        assert [each["number"] for each in devices(mount)] == [0, 1, 2]
        assert (mount.root / "b").read_bytes() == content
        with pytest.raises(CommandFailed, match="is in use"):
            check_fpfs("fsck", folder)
        mount.unmount()
        check_sound(mount)


DEATHS: tuple[str | float, ...] = ("taken", "joined", 0.004, 0.010, 0.016)
"""Points at which a server dies that adds a device, and moments after it has locked it, in s."""


def die_adding(mount: Mount, orders: Orders, folder: Path, death: str | float) -> None:
    """Add a directory as a device; returns when its server has died of `DEATHS` and another is."""
    if isinstance(death, str):
        orders.give(f"at-{death}", "once SIGKILL")
    adding = subprocess.Popen(
        [sys.executable, "-m", CTL, "device", "add", mount.root, folder],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    if isinstance(death, str):
        orders.wait_met(f"at-{death}")
        wait_for_exit(mount.server_pid)
        mount.note_processes()
    else:
        while not (folder / "lock").exists():
            has_ended = adding.poll() is not None
            assert not has_ended or (folder / "lock").exists(), "it is not added"
        time.sleep(death)  # no condition tells of the moments in between
        kill(mount)
    adding.wait(timeout=60)


def test_a_server_that_dies_while_it_adds_one_leaves_it_out_or_in(tmp_path: Path) -> None:
    """Before the catalog knows it, afterwards, and in between, under a running save."""
    with poisoned_mount(tmp_path, devices=1) as (mount, orders):
        mount.allow_log("server .* died|is left out")
        added = {}
        content = random_bytes(20_000_000, seed=4)
        for death in DEATHS:
            folder = mount.folder / f"added-{death}"
            folder.mkdir()
            before = len(devices(mount))
            with (mount.root / f"file-{death}").open("wb", buffering=0) as file:
                file.write(content[:10_000_000])
                die_adding(mount, orders, folder, death)
                file.write(content[10_000_000:])
            added[death] = len(devices(mount)) - before
            if not added[death]:
                device("add", mount.root, folder)
            mount.devices = (*mount.devices, folder)
            assert len(devices(mount)) == before + 1
        files = [mount.root / f"file-{death}" for death in DEATHS]
        assert [path.read_bytes() == content for path in files] == [True] * len(DEATHS)
        mount.remount()
        assert [path.read_bytes() == content for path in files] == [True] * len(DEATHS)
        mount.unmount()
        check_sound(mount)
        assert (added["taken"], added["joined"]) == (0, 1)
