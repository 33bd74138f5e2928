"""``fpfs-ctl device``: the devices of a mount, and changes of them while it is in use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fpfs.core.device_names import TAGS_MAX
from fpfs.testing.mounted import Mount, check_fpfs, mounted, run_fpfs
from tests.support.servers import kill

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
    assert "'fast' names devices 0, 1: name one by its number" in refusal(
        "tag", mount.root, "fast", "+spare"
    )
    many = [f"+tag{number}" for number in range(TAGS_MAX)]
    assert f"would have {TAGS_MAX + 1} tags; {TAGS_MAX} are possible" in refusal(
        "tag", mount.root, "0", *many
    )
    assert tags(mount) == [["fast"], ["fast"]]
