"""A server in a memory cgroup, as in a container or a batch job: staging must fit its limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import check_fpfs, run_fpfs
from fpfs.testing.throttle import MOUNTINFO, OWN_CGROUPS, controller_mount

LIMIT_BYTES = 192 * 1024**2


def memory_hierarchy() -> tuple[Path, str] | None:
    """The folder of this process's memory cgroup, and the name of a limit's file there."""
    groups = dict(line.split(":", 2)[1:] for line in OWN_CGROUPS.read_text().splitlines())
    mount = controller_mount(MOUNTINFO, filesystem="cgroup", option="memory")
    if mount is not None:
        return mount / groups["memory"].lstrip("/"), "memory.limit_in_bytes"
    mount = controller_mount(MOUNTINFO, filesystem="cgroup2", option=None)
    if mount is not None:
        return mount / groups[""].lstrip("/"), "memory.max"
    return None


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A memory cgroup of its own with a limit; skips where none can be made."""
    hierarchy = memory_hierarchy()
    if hierarchy is None:
        pytest.skip("there is no memory cgroup")
    parent, limit = hierarchy
    group = parent / f"fpfs-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("the memory controller is not enabled for groups below this one's")
        (group / limit).write_text(str(LIMIT_BYTES))
        yield group
    finally:
        group.rmdir()


def in_group(group: Path) -> tuple[str, ...]:
    """What runs a command in a cgroup."""
    return ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))


def test_staging_beyond_the_limit_of_the_memory_cgroup_is_refused(
    limited_group: Path, tmp_path: Path
) -> None:
    device, mountpoint = tmp_path / "device", tmp_path / "mount"
    device.mkdir()
    mountpoint.mkdir()
    arguments = ("mount", "-d", device, "--log", tmp_path / "log", "--staging")
    done = run_fpfs(*arguments, "256M", mountpoint, prefix=in_group(limited_group))
    assert done.returncode == 1
    assert re.search(
        r"the server failed \(staging arena /dev/shm/\S+: cannot allocate \d+ bytes: Cannot"
        r" allocate memory\); ask for less staging: it must be free memory, within the limit of"
        r" the memory cgroup\n$",
        done.stderr,
    ), done.stderr
    assert mount_at(str(mountpoint)) is None

    done = run_fpfs(*arguments, "32M", mountpoint, prefix=in_group(limited_group))
    assert done.returncode == 0, done.stderr
    check_fpfs("umount", mountpoint)
