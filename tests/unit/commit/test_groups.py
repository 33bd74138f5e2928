"""Groups over the memory engine: what a commit point does about contents that could not be kept."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from fpfs.core.errors import FpfsError
from fpfs.core.protocol.questions import PolicyChange
from fpfs.daemon.catalog.rows.dirents import RenameMode
from fpfs.daemon.catalog.rows.extents import list_orphans
from fpfs.daemon.commit.space_gc import GATHER_S
from fpfs.testing.memory_engine import MemoryDevices
from tests.support.catalog.rig import LARGE, ROOT, Rig, rig

TURNS = 24
"""Of these half have the deletion and what lets it go in one transaction, in any order."""


async def make_group(mount: Rig, name: str) -> int:
    """Make a group in the root; returns its inode."""
    await mount.policies.change(ROOT, PolicyChange(values={"commit": "group"}))
    await mount.make_directory(name)
    group = await mount.resolve(name)
    mount.namespace.forget(group.ino, 1)
    return group.ino


@trio.testing.trio_test
async def test_a_group_with_a_content_that_could_not_be_kept_is_not_committed(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as mount:
        group = await make_group(mount, "group")
        await mount.write_file("group/good", bytes(LARGE))
        await mount.write_file("group/bad", b"")
        await mount.commit.wait_queued()
        bad = await mount.resolve("group/bad")
        mount.engine.fail_drains(bad.ino, errno.EIO)
        await mount.write_file("group/bad", bytes(LARGE))
        await mount.write_file("group/tmp", b"marker")
        rename = mount.namespace.entries.rename
        with pytest.raises(FpfsError, match="the content of inode .* could not be kept"):
            await rename((group, b"tmp"), (group, b".metadata"), RenameMode.REPLACE)
        assert await mount.names("group") == {".", "..", "good", "bad", "tmp"}
        with pytest.raises(OSError, match="Input/output error"):
            await rename((ROOT, b"group"), (ROOT, b"moved"), RenameMode.REPLACE)
        with pytest.raises(FpfsError, match="could not be kept"):
            await mount.groups.commit(group)
        assert [found.path for found in await mount.groups.uncommitted()] == [b"group"]
        # Another group is not concerned, nor is this one when the content is there.
        other = await make_group(mount, "other")
        await mount.groups.commit(other)
        mount.engine.fail_drains(bad.ino, 0)
        await mount.write_file("group/bad", bytes(LARGE))
        await rename((group, b"tmp"), (group, b".metadata"), RenameMode.REPLACE)
        assert await mount.groups.uncommitted() == []
        mount.namespace.forget(bad.ino, 1)


@trio.testing.trio_test
async def test_what_a_group_kept_is_deleted_whenever_that_is_released(tmp_path: Path) -> None:
    """Before, after, and in one transaction with the deletion that was held up by the group."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        group = await make_group(mount, "group")
        await mount.groups.commit(group)
        before = mount.inodes.count
        for turn in range(TURNS):
            await mount.write_file("group/file", bytes(LARGE))
            await mount.groups.commit(group)
            if turn % 4 == 0:
                await mount.namespace.entries.unlink(group, b"file")
                await mount.groups.commit(group)
                continue
            rest = threading.Event()
            async with trio.open_nursery() as nursery:
                await mount.namespace.entries.unlink(group, b"file")
                if turn % 4 > 1:
                    nursery.start_soon(mount.catalog.read_many, lambda _t, rest=rest: rest.wait())
                await trio.testing.wait_all_tasks_blocked(2 * GATHER_S)
                nursery.start_soon(mount.groups.commit, group)
                await trio.testing.wait_all_tasks_blocked(GATHER_S)
                rest.set()
        await mount.commit.flush_all()
        assert mount.inodes.count == before
        assert await mount.catalog.read(list_orphans) == []
        assert devices.objects == {}


@trio.testing.trio_test
async def test_a_group_that_was_removed_does_not_come_back_empty(tmp_path: Path) -> None:
    """Its removal waits for what was closed before, and for nothing that came meanwhile."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount, trio.open_nursery() as nursery:
        group = await make_group(mount, "group")
        for name in ("before", "meanwhile", "group/file"):
            await mount.write_file(name, b"")
        await mount.groups.commit(group)
        before, meanwhile = [(await mount.resolve(name)).ino for name in ("before", "meanwhile")]
        mount.engine.hold_drains(of=(before, meanwhile))
        await mount.namespace.entries.unlink(group, b"file")
        await mount.write_file("before", bytes(LARGE))
        nursery.start_soon(mount.namespace.entries.remove_directory, ROOT, b"group")
        await trio.testing.wait_all_tasks_blocked()
        await mount.write_file("meanwhile", bytes(LARGE))
        await trio.testing.wait_all_tasks_blocked(2 * GATHER_S)
        assert "group" in await mount.names("")
        mount.engine.hold_drains(of=(meanwhile,))
        await trio.testing.wait_all_tasks_blocked(2 * GATHER_S)
        assert "group" not in await mount.names("")
        assert not mount.commit.all_current
    async with rig(tmp_path, devices=devices) as mount:
        assert "group" not in await mount.names("")


@trio.testing.trio_test
async def test_a_group_is_durable_when_its_commit_is_answered(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=3600) as mount:
        group = await make_group(mount, "group")
        await mount.write_file("group/file", bytes(LARGE))
        assert not mount.catalog.all_durable
        await mount.groups.commit(group)
        assert mount.catalog.all_durable
        assert await mount.groups.uncommitted() == []


@trio.testing.trio_test
async def test_the_kernel_may_know_what_a_group_keeps_after_a_removal_on_a_full_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal there gives space back before its answer, and so before the kernel forgets."""
    monkeypatch.setattr("fpfs.daemon.devices.free_space.TIGHT_BYTES", 1 << 62)
    async with rig(tmp_path) as mount:
        group = await make_group(mount, "group")
        await mount.write_file("group/file", bytes(LARGE))
        await mount.groups.commit(group)
        before = mount.inodes.count
        for _ in range(2):
            file = await mount.resolve("group/file")
        await mount.namespace.entries.unlink(group, b"file")
        assert await mount.catalog.read(list_orphans) == [file.ino]
        assert (await mount.namespace.get_attributes(file.ino)).lookups == 2
        await mount.groups.commit(group)  # nobody keeps it any more, but the kernel
        mount.namespace.forget(file.ino, 2)
        await mount.commit.flush_all()
        assert await mount.catalog.read(list_orphans) == []
        assert mount.inodes.count == before - 1
