"""Requests as pyfuse3 hands them over, without a mount: what each finds done before it.

Invariants:
  * The channel answers RELEASE and tells nobody: the requests that come later look.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyfuse3
import pytest
import trio.testing

from fpfs.daemon.inodes.table import KERNEL_CACHE_S
from fpfs.daemon.names.fuse_ops import Operations
from tests.support.catalog.rig import LARGE, Rig, rig

HANDLERS = sorted(
    name
    for name, method in vars(Operations).items()
    if inspect.iscoroutinefunction(method) and name != "forget"
)

CONTEXT = cast("pyfuse3.RequestContext", SimpleNamespace(uid=0, gid=0, pid=1))
"""Root's, as far as handlers look."""


async def close_in_the_channel(mount: Rig, path: str, content: bytes) -> None:
    """Write a file and close it as the kernel does."""
    handle = await mount.create(path)
    mount.engine.write(handle, 0, content)
    mount.engine.kernel_releases(handle)


def test_the_handlers_are_known() -> None:
    assert {"lookup", "create", "rename", "fsyncdir", "statfs"} <= set(HANDLERS)
    assert "release" not in HANDLERS


@pytest.mark.parametrize("name", HANDLERS)
@trio.testing.trio_test
async def test_every_request_comes_after_the_closes_before_it(name: str, tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        operations = Operations(mount.namespace)
        await close_in_the_channel(mount, "file", bytes(LARGE))
        assert mount.namespace.files.open_count == 1
        method = getattr(operations, name)
        # Arguments that make no sense: what was closed is followed before anybody looks at them.
        with contextlib.suppress(pyfuse3.FUSEError):
            await method(*[None] * len(inspect.signature(method).parameters))
        assert mount.namespace.files.open_count == 0


@trio.testing.trio_test
async def test_closes_keep_their_order(tmp_path: Path) -> None:
    names = [f"file{number}" for number in range(5)]
    async with rig(tmp_path) as mount:
        inodes = {}
        for name in reversed(names):
            await mount.write_file(name, b"")
            inodes[(await mount.resolve(name)).ino] = name
        await mount.commit.make_names_durable()
        handles = {name: await mount.open(name) for name in reversed(names)}
        for name in names:
            mount.engine.write(handles[name], 0, bytes(LARGE))
            mount.engine.kernel_releases(handles[name])
        mount.namespace.catch_up()
        await mount.commit.make_names_durable()
        committed = [call[1] for call in mount.engine.calls if call[0] == "committed"]
        assert [inodes[ino] for ino in committed][-5:] == names


@trio.testing.trio_test
async def test_the_kernel_keeps_nothing_of_what_a_killed_writer_left(tmp_path: Path) -> None:
    """It may learn of it after it was told to forget it: whoever asked may take the answer late."""

    async def told() -> tuple[int, set[float]]:
        operations = Operations(mount.namespace)
        found = await operations.lookup(pyfuse3.ROOT_INODE, b"step.pt", CONTEXT)
        again = await operations.getattr(found.st_ino, CONTEXT)
        assert found.st_size == again.st_size
        return found.st_size, {found.entry_timeout, found.attr_timeout, again.attr_timeout}

    async with rig(tmp_path) as mount:
        await mount.write_file("step.pt", b"a" * LARGE)
        await mount.commit.flush_all()
        assert await told() == (LARGE, {KERNEL_CACHE_S})
        writer = await mount.open("step.pt", flags=os.O_WRONLY | os.O_TRUNC)
        mount.engine.write(writer, 0, b"torn")
        mount.engine.hold_drains()
        mount.engine.kernel_releases(writer, killed_by=signal.SIGKILL)
        assert await told() == (len(b"torn"), {0.0})
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        assert await told() == (LARGE, {KERNEL_CACHE_S})


@trio.testing.trio_test
async def test_the_end_comes_after_what_the_kernel_closed(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        left_open = await mount.create("left open")
        mount.engine.write(left_open, 0, bytes(LARGE))
        await close_in_the_channel(mount, "closed", bytes(LARGE))
        await mount.flush()
        assert mount.namespace.files.open_count == 0
        committed = [call[1] for call in mount.engine.calls if call[0] == "committed"]
        expected = [(await mount.resolve(name)).ino for name in ("closed", "left open")]
        assert committed == expected
