"""Memory cgroups of tests: what a program may take before it is refused more, or killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.testing.throttle import MOUNTINFO, OWN_CGROUPS, controller_mount
from tests.support.waiting import wait_until


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


@contextlib.contextmanager
def limited_memory(limit_bytes: int) -> Iterator[Path]:
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
        (group / limit).write_text(str(limit_bytes))
        yield group
    finally:
        # A keeper ends a moment after its server, which an unmount waits for.
        wait_until(lambda: not (group / "cgroup.procs").read_text(), f"somebody is left in {group}")
        group.rmdir()
