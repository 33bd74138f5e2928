"""Which cgroup gets the limits: the choice is a function of what the machine mounts.

The trees are plain directories laid out as the kernel does it, since one machine has one layout;
limits that the kernel really applies are tested in test_lab.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fpfs.testing.throttle import CgroupVersion, ThrottleError, find_throttle

V1_FILES = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device")


def machine(tmp_path: Path, *, kind: str, options: str, own: str) -> tuple[Path, Path, Path]:
    """A cgroup mount and the two files of /proc that describe it."""
    root = tmp_path / "cgroup"
    root.mkdir()
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"30 23 0:26 / {root} rw,relatime - {kind} {kind} {options}\n")
    cgroups = tmp_path / "own"
    cgroups.write_text(own)
    return root, mountinfo, cgroups


def test_version_1_limits_the_root_and_the_callers_group(tmp_path: Path) -> None:
    root, mountinfo, own = machine(
        tmp_path, kind="cgroup", options="rw,blkio", own="7:blkio:/job\n4:memory:/other\n"
    )
    (root / "job").mkdir()
    for name in V1_FILES:
        (root / name).write_text("")
        (root / "job" / name).write_text("")
    throttle = find_throttle(mountinfo=mountinfo, own_cgroups=own)
    assert throttle.version is CgroupVersion.V1
    assert throttle.groups == (str(root), str(root / "job"))
    throttle.limit("7:3", bytes_per_s=1024)
    assert (root / V1_FILES[1]).read_text() == "7:3 1024"
    assert throttle.limited() == {"7:3"}
    throttle.clear("7:3")
    assert (root / "job" / V1_FILES[1]).read_text() == "7:3 0"


def test_version_2_limits_the_outermost_group_of_the_caller(tmp_path: Path) -> None:
    root, mountinfo, own = machine(
        tmp_path, kind="cgroup2", options="rw", own="0::/user.slice/session\n"
    )
    (root / "cgroup.controllers").write_text("cpu io memory\n")
    (root / "user.slice").mkdir()
    (root / "user.slice" / "io.max").write_text("")
    throttle = find_throttle(mountinfo=mountinfo, own_cgroups=own)
    assert throttle.groups == (str(root / "user.slice"),)
    assert throttle.join_group is None
    throttle.limit("7:3", bytes_per_s=1024)
    assert (root / "user.slice" / "io.max").read_text() == "7:3 rbps=1024 wbps=1024"
    throttle.clear("7:3")
    assert (root / "user.slice" / "io.max").read_text() == "7:3 rbps=max wbps=max"


def test_version_2_in_the_true_root_needs_joining_a_group(tmp_path: Path) -> None:
    root, mountinfo, own = machine(tmp_path, kind="cgroup2", options="rw", own="0::/\n")
    (root / "cgroup.controllers").write_text("io\n")
    (root / "fpfs-lab").mkdir()
    (root / "fpfs-lab" / "io.max").write_text("")
    throttle = find_throttle(mountinfo=mountinfo, own_cgroups=own)
    assert throttle.groups == (str(root / "fpfs-lab"),)
    assert throttle.join_group == str(root / "fpfs-lab")


def test_without_a_block_controller_the_message_says_what_to_do(tmp_path: Path) -> None:
    root, mountinfo, own = machine(tmp_path, kind="cgroup2", options="rw", own="0::/\n")
    (root / "cgroup.controllers").write_text("hugetlb\n")
    with pytest.raises(ThrottleError, match="mount one, or run without a bandwidth limit"):
        find_throttle(mountinfo=mountinfo, own_cgroups=own)
