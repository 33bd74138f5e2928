"""A server in a memory cgroup, as in a container or a batch job: staging must fit its limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import check_fpfs, run_fpfs
from tests.support.memory_group import limited_memory

LIMIT_BYTES = 192 * 1024**2


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A memory cgroup with less than a server may be asked to take."""
    with limited_memory(LIMIT_BYTES) as group:
        yield group


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
