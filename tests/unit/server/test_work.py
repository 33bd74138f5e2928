"""What is asked and done while much is under way takes no more work than there is to tell or do."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from fpfs.core.protocol.questions import PolicyChange
from fpfs.daemon.catalog.executor import Transaction
from fpfs.daemon.catalog.rows import group_undo
from fpfs.daemon.catalog.rows.objects import held_by_device
from fpfs.daemon.catalog.schema import open_database
from fpfs.daemon.telemetry.dirty_files import files_in_progress
from tests.support.catalog.rig import LARGE, ROOT, Rig, rig
from tests.support.work import lines_run, steps_of_sqlite

FEW = 20
MANY = 4 * FEW
MEASURED = 8


async def make_current(mount: Rig, count: int) -> None:
    """Make versions that are current and wait for the flush that makes them durable."""
    for number in range(count):
        await mount.write_file(f"current{number}", b"content")
    await mount.commit.wait_queued()


async def queue(mount: Rig, count: int) -> None:
    """Queue versions that the devices do not take."""
    mount.engine.hold_drains()
    for number in range(count):
        await mount.write_file(f"queued{number}", b"content")
    await trio.testing.wait_all_tasks_blocked()


async def work_of_telling(folder: Path, count: int) -> int:
    """Lines of telling `count` files on their way to the devices and as many to be flushed."""
    await trio.Path(folder).mkdir()
    async with rig(folder, durable_within_s=10_000) as mount:
        await make_current(mount, count)
        await queue(mount, count)
        assert mount.commit.durability.waiting == count
        with lines_run() as lines:
            told = files_in_progress(
                files=mount.namespace.files, commit=mount.commit, engine=mount.engine
            )
        assert len(told) == count
        return lines.count


@trio.testing.trio_test
async def test_telling_the_files_in_progress_grows_with_their_number(tmp_path: Path) -> None:
    few = await work_of_telling(tmp_path / "few", FEW)
    many = await work_of_telling(tmp_path / "many", MANY)
    assert many <= few * (MANY // FEW)


async def work_of_removing(folder: Path, count: int, *, content: bytes) -> int:
    """Lines of removing a name while `count` versions are queued and as many removals wait.

    The fewest of several times: other tasks may have something to do meanwhile.
    """
    await trio.Path(folder).mkdir()
    async with rig(folder, durable_within_s=10_000) as mount:
        for number in range(count + MEASURED):
            await mount.write_file(f"old{number}", content)
        await mount.commit.flush_all()
        await queue(mount, count)
        unlink = mount.namespace.entries.unlink
        for number in range(count):
            await unlink(ROOT, b"old%d" % number)
        await trio.testing.wait_all_tasks_blocked()
        counts = []
        for number in range(count, count + MEASURED):
            with lines_run() as lines:
                await unlink(ROOT, b"old%d" % number)
            counts.append(lines.count)
        return min(counts)


@pytest.mark.parametrize("content", [b"", b"content"])
@trio.testing.trio_test
async def test_removing_a_name_takes_no_more_while_much_is_queued(
    content: bytes, tmp_path: Path
) -> None:
    few = await work_of_removing(tmp_path / "few", FEW, content=content)
    many = await work_of_removing(tmp_path / "many", MANY, content=content)
    assert many <= few + FEW


async def work_of_telling_what_is_held(folder: Path, count: int) -> int:
    """Steps of telling what `count` contents take on the devices."""
    await trio.Path(folder).mkdir()
    async with rig(folder) as mount:
        for number in range(count):
            await mount.write_file(f"file{number}", bytes(LARGE))
        await mount.commit.flush_all()
        path = mount.catalog.path
    connection = open_database(path)
    with contextlib.closing(connection), steps_of_sqlite(connection) as steps:
        told = held_by_device(Transaction(connection))
    assert sum(told.values()) == count * -(-LARGE // 4096) * 4096
    return steps.count


@trio.testing.trio_test
async def test_telling_what_devices_hold_takes_no_more_on_a_full_filesystem(
    tmp_path: Path,
) -> None:
    few = await work_of_telling_what_is_held(tmp_path / "few", FEW)
    assert await work_of_telling_what_is_held(tmp_path / "many", MANY) == few


async def work_of_rolling_back(folder: Path, count: int) -> int:
    """Steps of rolling back a group of one file on a filesystem of `count` others."""
    await trio.Path(folder).mkdir()
    async with rig(folder) as mount:
        for number in range(count):
            await mount.write_file(f"other{number}", b"")
        await mount.policies.change(ROOT, PolicyChange(values={"commit": "group"}))
        await mount.make_directory("group")
        group = await mount.resolve("group")
        await mount.write_file("group/file", b"content")
        await mount.commit.flush_all()
        await mount.groups.commit(group.ino)
        await mount.write_file("group/file", b"changed")
        await mount.commit.flush_all()
        path = mount.catalog.path
    connection = open_database(path)
    with contextlib.closing(connection), steps_of_sqlite(connection) as steps:
        done = group_undo.roll_back(
            Transaction(connection), group=group.ino, changed=(), now_ns=time.time_ns()
        )
    assert done.displaced
    return steps.count


@trio.testing.trio_test
async def test_rolling_back_a_group_takes_no_more_on_a_large_filesystem(tmp_path: Path) -> None:
    few = await work_of_rolling_back(tmp_path / "few", FEW)
    many = await work_of_rolling_back(tmp_path / "many", MANY)
    assert many <= few + FEW
