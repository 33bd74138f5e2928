"""Commit and reclaim when something goes wrong, or comes in between."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from fpfs.core.engine import ObjectId
from fpfs.core.errors import CatalogError, StaleInode
from fpfs.core.protocol.questions import PolicyChange
from fpfs.daemon.catalog.rows.attributes import Changes
from fpfs.daemon.catalog.rows.dirents import RenameMode
from fpfs.daemon.catalog.schema import FIXED_DIRECTORIES, PARTIAL_INO
from fpfs.daemon.commit import pipeline, space_gc
from fpfs.daemon.inodes.table import Inode
from fpfs.testing.memory_engine import MemoryDevices
from tests.support.catalog.rig import LARGE, ROOT, SUPERUSER, Rig, rig
from tests.unit.commit.test_commit import committed_size

PATIENCE_S = 60
OVERWRITES_MAX = 50


async def execute(mount: Rig, statement: str) -> list[tuple[object, ...]]:
    """Run one statement in the catalog, and return its rows."""
    return await mount.catalog.write(lambda t: list(t.execute(statement)))


async def refuse(mount: Rig, change: str) -> None:
    """Let the catalog refuse a change, as a failing disk would."""
    await execute(
        mount,
        f"CREATE TRIGGER refuse BEFORE {change} BEGIN SELECT raise(ABORT, 'refused'); END",
    )


async def wait_until(condition: Callable[[], bool]) -> None:
    """Return when a condition holds; fail when it does not for long."""
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.testing.wait_all_tasks_blocked(0.01)


async def wait_drains(mount: Rig, count: int = 1) -> None:
    """Return when drains were asked for so often."""
    await wait_until(lambda: mount.call_names().count("drain") >= count)


@trio.testing.trio_test
async def test_fsync_reports_that_the_catalog_refused(tmp_path: Path) -> None:
    """The devices took the bytes, and yet nothing is durable."""
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        inode = await mount.resolve("file")
        mount.engine.write(handle, 0, b"content")
        await refuse(mount, "INSERT ON inline")
        with pytest.raises(OSError, match=r"."):
            await mount.namespace.files.sync(handle)
        mount.namespace.files.release(handle)
        with pytest.raises(OSError, match=r"."):
            await mount.commit.wait_durable(inode.ino)
        assert await committed_size(mount, "file") == 0
        await execute(mount, "DROP TRIGGER refuse")
        await mount.commit.wait_durable(inode.ino)
        assert await committed_size(mount, "file") == 7


@trio.testing.trio_test
async def test_a_synchronous_write_that_is_not_durable_is_answered_with_its_error(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as mount:
        handle = await mount.create("file", flags=os.O_WRONLY | os.O_SYNC)
        inode = await mount.resolve("file")
        mount.engine.fail_drains(inode.ino, errno.EIO)
        mount.engine.write(handle, 0, b"content")
        await wait_until(lambda: bool(mount.engine.answers))
        assert list(mount.engine.answers.values()) == [errno.EIO]


@trio.testing.trio_test
async def test_close_reports_the_error_that_the_background_met(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        inode = await mount.resolve("file")
        mount.engine.fail_drains(inode.ino, errno.EIO)
        mount.engine.write(handle, 0, b"content")
        assert len(await mount.commit.flush_all()) == 1
        with pytest.raises(OSError, match="Input/output error"):
            await mount.namespace.files.flush(handle)
        await mount.namespace.files.flush(handle)


@pytest.mark.parametrize("moved", [b"folder", b"folder/new"])
@trio.testing.trio_test
async def test_what_could_not_be_kept_replaces_nothing(moved: bytes, tmp_path: Path) -> None:
    """Also when nothing is on its way any more."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.make_directory("good")
        await mount.write_file("good/new", b"before")
        await mount.make_directory("folder")
        handle = await mount.create("folder/new")
        await mount.commit.flush_all()
        inode = await mount.resolve("folder/new")
        mount.engine.fail_drains(inode.ino, errno.EIO)
        mount.engine.write(handle, 0, b"after")
        mount.namespace.files.release(handle)
        await mount.commit.wait_queued()
        assert not mount.commit.all_current
        folder = await mount.resolve("folder")
        good = await mount.resolve("good")
        entries = mount.namespace.entries
        source, to = (ROOT, b"folder"), (ROOT, b"latest")
        if moved != b"folder":
            source, to = (folder.ino, b"new"), (good.ino, b"new")
        with pytest.raises(OSError, match="Input/output error"):
            await entries.rename(source, to, RenameMode.REPLACE)
        await entries.rename((ROOT, b"good"), (ROOT, b"other"), RenameMode.REPLACE)
        assert await mount.read_file("other/new") == b"before"
        mount.engine.fail_drains(inode.ino, 0)
        to = (good.ino, b"new") if moved != b"folder" else (ROOT, b"latest")
        await entries.rename(source, to, RenameMode.REPLACE)
        assert mount.commit.all_current
        path = "latest/new" if moved == b"folder" else "other/new"
        assert await committed_size(mount, path) == 5


@trio.testing.trio_test
async def test_flush_all_covers_what_is_open(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        mount.engine.write(handle, 0, bytes(LARGE))
        assert await mount.commit.flush_all() == ()
        assert mount.catalog.all_durable
        assert await committed_size(mount, "file") == LARGE


@trio.testing.trio_test
async def test_what_is_written_during_a_drain_is_a_version_of_its_own(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        mount.engine.hold_drains()
        await mount.write_file("file", b"first")
        await wait_drains(mount)
        handle = await mount.open("file")
        mount.engine.write(handle, 5, b" and second")
        mount.namespace.files.release(handle)
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "file") == 16


@trio.testing.trio_test
async def test_a_closed_file_is_drained_before_it_is_opened_again(tmp_path: Path) -> None:
    """What is given to the drain of a close holds nothing of the next writer."""
    async with rig(tmp_path) as mount:
        await mount.write_file("file", bytes(LARGE))
        mount.engine.calls.clear()
        handle = await mount.open("file")
        names = mount.call_names()
        assert names.index("drain") < names.index("open")
        mount.engine.write(handle, 0, b"more")
        mount.namespace.files.release(handle)
        await mount.commit.make_names_durable()
        assert mount.call_names().count("drain") == 2


@trio.testing.trio_test
async def test_a_truncation_waits_for_the_drain(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        mount.engine.hold_drains()
        await mount.write_file("file", bytes(LARGE))
        inode = await mount.resolve("file")
        await wait_drains(mount)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.namespace.files.truncate, inode, 10)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert "truncate" not in mount.call_names()
            mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "file") == 10


@trio.testing.trio_test
async def test_a_truncation_alone_is_committed(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", bytes(LARGE))
        await mount.commit.make_names_durable()
        inode = await mount.resolve("file")
        await mount.namespace.set_attributes(inode.ino, Changes(), size=70_000, caller=SUPERUSER)
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "file") == 70_000
        mount.namespace.files.release(await mount.open("file", flags=os.O_RDONLY | os.O_TRUNC))
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "file") == 0


@trio.testing.trio_test
async def test_an_exchange_commits_both_files_first(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        for name, size in (("a", LARGE), ("b", 10)):
            handle = await mount.create(name)
            mount.engine.write(handle, 0, bytes(size))
        await mount.namespace.entries.rename((ROOT, b"a"), (ROOT, b"b"), RenameMode.EXCHANGE)
        assert await committed_size(mount, "a") == 10
        assert await committed_size(mount, "b") == LARGE


@trio.testing.trio_test
async def test_waiting_for_a_writer_that_writes_nothing_ends_with_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        inode = await mount.resolve("file")
        await mount.commit.make_names_durable()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.commit.wait_durable, inode.ino)
            await trio.testing.wait_all_tasks_blocked(0.05)
            with trio.fail_after(PATIENCE_S):
                mount.namespace.files.release(handle)
                while nursery.child_tasks:
                    await trio.testing.wait_all_tasks_blocked(0.01)


@trio.testing.trio_test
async def test_privileges_dropped_by_a_write_can_be_given_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        inode = await mount.resolve("file")
        for _ in range(2):
            await mount.namespace.set_attributes(
                inode.ino, Changes(permissions=0o6755), size=None, caller=SUPERUSER
            )
            assert inode.mode & 0o7777 == 0o6755
            mount.engine.write(handle, 0, b"mine")
            await mount.namespace.files.sync(handle)
            assert inode.mode & 0o7777 == 0o6755
            mount.engine.write_by_others(inode.ino)
            await mount.namespace.files.sync(handle)
            assert inode.mode & 0o7777 == 0o755


@pytest.mark.parametrize("killed_by", [0, signal.SIGKILL])
@trio.testing.trio_test
async def test_privileges_that_are_given_while_a_version_drops_them_stay(
    killed_by: int, tmp_path: Path
) -> None:
    """The catalog and memory have the changes in one order, also if they come at once."""
    may_go_on = threading.Event()
    async with rig(tmp_path) as mount:
        await mount.write_file("step.pt", b"whole")
        await mount.commit.wait_queued()
        inode = await mount.resolve("step.pt")
        change = partial(mount.namespace.set_attributes, size=None, caller=SUPERUSER)
        await change(inode.ino, Changes(permissions=0o4755))
        handle = await mount.open("step.pt", flags=os.O_WRONLY)
        mount.engine.write(handle, 0, b"others")
        mount.engine.write_by_others(inode.ino)
        mount.engine.kernel_releases(handle, killed_by=killed_by)
        mount.namespace.catch_up()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.catalog.read_many, lambda _transaction: may_go_on.wait())
            await wait_drains(mount, 2)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(change, inode.ino, Changes(permissions=0o4711))
            await trio.testing.wait_all_tasks_blocked()
            may_go_on.set()
        await mount.commit.wait_queued()
        stored = await execute(mount, f"SELECT mode & 4095 FROM inodes WHERE ino = {inode.ino}")
        assert (stored, inode.mode & 0o7777) == ([(0o4711,)], 0o4711)


@trio.testing.trio_test
async def test_objects_of_a_version_that_was_never_committed_are_removed_with_the_file(
    tmp_path: Path,
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await refuse(mount, "INSERT ON segments")
        await mount.write_file("file", bytes(LARGE))
        assert len(await mount.commit.flush_all()) == 1
        assert len(devices.objects) == 2
        await execute(mount, "DROP TRIGGER refuse")
        await mount.namespace.entries.unlink(ROOT, b"file")
        await mount.commit.flush_all()
        assert devices.objects == {}


@trio.testing.trio_test
async def test_a_deletion_that_fails_is_done_by_the_next_mount(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.write_file("file", bytes(LARGE))
        await mount.commit.flush_all()
        await refuse(mount, "DELETE ON inodes")
        await mount.namespace.entries.unlink(ROOT, b"file")
        await mount.commit.flush_all()
        assert "cannot be deleted now" in caplog.text
        await mount.write_file("other", b"fine")
        assert await mount.commit.flush_all() == ()
        await execute(mount, "DROP TRIGGER refuse")
        assert len(devices.objects) == 2
    async with rig(tmp_path, devices=devices) as mount:
        await mount.commit.flush_all()
        assert devices.objects == {}


@trio.testing.trio_test
async def test_a_flush_does_not_wait_for_those_who_overwrite_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as mount:
        remove = mount.engine.remove_objects
        overwritten = 0

        async def overwrite_and_remove(objects: Sequence[ObjectId]) -> None:
            nonlocal overwritten
            overwritten += 1
            if overwritten < OVERWRITES_MAX:
                await mount.write_file("file", bytes(LARGE))
                await mount.write_file("gone", bytes(LARGE))
                await mount.commit.make_names_durable()
                await mount.namespace.entries.unlink(ROOT, b"gone")
            await remove(objects)

        await mount.write_file("file", bytes(LARGE))
        await mount.commit.flush_all()
        monkeypatch.setattr(mount.engine, "remove_objects", overwrite_and_remove)
        await mount.write_file("file", bytes(LARGE))
        await mount.commit.flush_all()
        assert 1 <= overwritten < OVERWRITES_MAX


@trio.testing.trio_test
async def test_more_nameless_files_than_fit_one_transaction_go_at_the_next_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        for number in range(5):
            await mount.write_file(f"f{number}", bytes(LARGE))
            await mount.open(f"f{number}")
        await mount.commit.flush_all()
        for number in range(5):
            await mount.namespace.entries.unlink(ROOT, f"f{number}".encode())
    monkeypatch.setattr(space_gc, "DELETIONS_MAX", 2)
    async with rig(tmp_path, devices=devices) as mount:
        await mount.commit.flush_all()
        assert devices.objects == {}
        assert await execute(mount, "SELECT count(*) FROM inodes") == [
            (1 + len(FIXED_DIRECTORIES),)
        ]


@trio.testing.trio_test
async def test_a_damaged_removal_is_forgotten_and_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.write_file("file", bytes(LARGE))
        await mount.commit.flush_all()
        device, object_ = next(iter(devices.objects))
        await execute(
            mount, f"INSERT INTO removals VALUES (900000, {device}, {object_}, 0, 0, 12345)"
        )
    with caplog.at_level(logging.ERROR):
        async with rig(tmp_path, devices=devices) as mount:
            await mount.commit.flush_all()
            assert len(devices.objects) == 2
            assert await execute(mount, "SELECT count(*) FROM removals") == [(0,)]
            assert await mount.read_file("file") == bytes(LARGE)
    assert "removal 900000 fails its checksum" in caplog.text


@pytest.mark.parametrize("fail", ["load", "open", "truncate"])
@trio.testing.trio_test
async def test_an_open_that_fails_leaves_nothing_open(
    fail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"content")
        await mount.commit.flush_all()
        inode = await mount.resolve("file")

        def refuse_now(*_arguments: object, **_options: object) -> Awaitable[None]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(mount.engine, fail, refuse_now)
            with pytest.raises(OSError, match="No space left on device"):
                await mount.namespace.files.open(inode, flags=os.O_RDWR | os.O_TRUNC)
        assert mount.namespace.files.open_count == 0
        assert inode.users == 0
        names = mount.call_names()
        assert names.count("open") == names.count("release")
        assert await mount.read_file("file") == b"content"


@pytest.mark.parametrize("names", [("one",), ("one", "two")])
@trio.testing.trio_test
async def test_what_fails_after_the_transaction_is_no_failure_to_commit(
    names: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(_ino: int) -> Inode:
        raise CatalogError("the device of the catalog fails")

    async with rig(tmp_path) as mount:
        await mount.policies.change(ROOT, PolicyChange(values={"versions": "1"}))
        for content in (b"first", b"second"):
            for name in names:
                await mount.write_file(name, content)
            await mount.commit.wait_queued()
        before = mount.commit.statistics()
        handles = [await mount.open(name, flags=os.O_WRONLY | os.O_TRUNC) for name in names]
        with monkeypatch.context() as failing:
            failing.setattr(mount.inodes, "get", fail)
            for handle in handles:
                mount.engine.write(handle, 0, b"third")
                mount.namespace.files.release(handle)
            await mount.commit.wait_queued()
        after = mount.commit.statistics()
        assert after.failures == ()
        assert after.committed - before.committed == len(names)
        assert after.transactions - before.transactions == 1
        for name in names:
            assert await mount.read_file(name) == b"third"
    assert "former versions cannot be given up before the next mount" in caplog.text


@trio.testing.trio_test
async def test_a_writer_whose_open_fails_is_not_counted(tmp_path: Path) -> None:
    async def fail(_inode: Inode) -> None:
        raise CatalogError("the trace cannot begin")

    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"content")
        inode = await mount.resolve("file")
        await mount.commit.wait_queued()
        users = inode.users
        mount.namespace.files.on_writer(fail)
        with pytest.raises(CatalogError):
            await mount.open("file", flags=os.O_RDWR)
        files = mount.namespace.files
        assert (files.open_count, files.writers) == (0, 0)
        assert (inode.handles, inode.writers, inode.users) == (0, 0, users)


async def leave_torn(mount: Rig) -> Inode:
    """Let a writer be killed whose version no device takes; returns the inode."""
    await mount.write_file("step.pt", b"whole" * LARGE)
    await mount.commit.flush_all()
    writer = await mount.open("step.pt", flags=os.O_WRONLY)
    mount.engine.write(writer, 0, b"torn")
    inode = await mount.resolve("step.pt")
    mount.engine.fail_drains(inode.ino, errno.ENOSPC)
    mount.engine.kernel_releases(writer, killed_by=signal.SIGKILL)
    mount.namespace.catch_up()
    await mount.commit.wait_queued()
    assert len(mount.commit.statistics().failures) == 1
    return inode


async def quarantined(mount: Rig) -> set[str]:
    """The names of what was quarantined."""
    return await mount.names(".fpfs/partial") - {".", ".."}


@trio.testing.trio_test
async def test_a_save_over_what_a_killed_writer_could_not_keep_is_its_own(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        inode = await leave_torn(mount)
        writer = await mount.open("step.pt", flags=os.O_WRONLY | os.O_TRUNC)
        mount.engine.fail_drains(inode.ino, 0)
        mount.engine.write(writer, 0, b"saved" * LARGE)
        await mount.namespace.files.sync(writer)
        mount.engine.kernel_releases(writer)
        mount.namespace.catch_up()
        await mount.commit.flush_all()
        assert await mount.read_file("step.pt") == b"saved" * LARGE
        assert await quarantined(mount) == set()


@pytest.mark.parametrize("way", ["open", "truncate"])
@trio.testing.trio_test
async def test_what_a_killed_writer_could_not_keep_is_quarantined_before_others_write(
    way: str, tmp_path: Path
) -> None:
    async with rig(tmp_path) as mount:
        inode = await leave_torn(mount)
        files = mount.namespace.files
        with pytest.raises(OSError, match="No space left on device"):
            await (mount.open("step.pt") if way == "open" else files.truncate(inode, LARGE))
        assert (files.open_count, inode.users) == (0, 0)
        mount.engine.fail_drains(inode.ino, 0)
        if way == "open":
            writer = await mount.open("step.pt")
            mount.engine.write(writer, 0, b"saved")
            await files.sync(writer)
            files.release(writer)
        else:
            await files.truncate(inode, LARGE)
        await mount.commit.flush_all()
        after = b"saved" + b"whole" * (LARGE - 1) if way == "open" else (b"whole" * LARGE)[:LARGE]
        assert await mount.read_file("step.pt") == after
        (name,) = await quarantined(mount)
        assert (await mount.read_file(f".fpfs/partial/{name}")).startswith(b"torn")


async def open_while_the_writer_is_killed(mount: Rig, writer: int, flags: int) -> None:
    """Let a writer that opens wait for the drain of an fsync whose caller is killed meanwhile."""
    inode = await mount.resolve("step.pt")

    async def write() -> None:
        handle = await mount.open("step.pt", flags=flags)
        mount.engine.write(handle, 4, b"saved")
        await mount.namespace.files.sync(handle)
        mount.namespace.files.release(handle)

    async with trio.open_nursery() as nursery:
        await inode.lock.acquire()
        nursery.start_soon(mount.namespace.files.sync, writer)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        mount.engine.kernel_releases(writer, killed_by=signal.SIGKILL)
        mount.namespace.catch_up()
        inode.lock.release()
    await mount.commit.flush_all()


@trio.testing.trio_test
async def test_who_waits_to_write_when_the_writer_before_is_killed_writes_to_what_was_before(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("step.pt", b"whole" * LARGE)
        await mount.commit.flush_all()
        writer = await mount.open("step.pt", flags=os.O_WRONLY)
        mount.engine.write(writer, 0, b"torn")
        await open_while_the_writer_is_killed(mount, writer, os.O_WRONLY)
        assert (await mount.read_file("step.pt"))[:14] == b"wholsavedewhol"
        (name,) = await quarantined(mount)
        assert (await mount.read_file(f".fpfs/partial/{name}"))[:10] == b"tornewhole"


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
@trio.testing.trio_test
async def test_who_waits_to_write_to_a_file_that_its_killed_writer_never_finished_is_told(
    flags: int, tmp_path: Path
) -> None:
    """Its name is gone, and the kernel looks it up again. Before, the save had none."""
    async with rig(tmp_path) as mount:
        writer = await mount.create("step.pt", flags=os.O_WRONLY)
        mount.engine.write(writer, 0, b"torn" * LARGE)
        with pytest.RaisesGroup(StaleInode):
            await open_while_the_writer_is_killed(mount, writer, flags)
        assert mount.namespace.files.open_count == 0
        await mount.commit.flush_all()
        assert "step.pt" not in await mount.names(".")
        assert len(await quarantined(mount)) == 1


@trio.testing.trio_test
async def test_a_truncation_that_waits_while_the_name_goes_is_told(tmp_path: Path) -> None:
    """What the killed writer could not keep is tried again after the file was opened."""
    async with rig(tmp_path) as mount:
        writer = await mount.create("step.pt", flags=os.O_WRONLY)
        mount.engine.write(writer, 0, b"torn" * LARGE)
        inode = await mount.resolve("step.pt")
        mount.engine.fail_drains(inode.ino, errno.ENOSPC)
        mount.engine.kernel_releases(writer, killed_by=signal.SIGKILL)
        mount.namespace.catch_up()
        await mount.commit.wait_queued()
        mount.engine.fail_drains(inode.ino, 0)
        mount.engine.hold_drains()
        with pytest.RaisesGroup(StaleInode):
            async with trio.open_nursery() as nursery:

                async def try_again(inode: Inode) -> None:
                    nursery.start_soon(mount.commit.make_current, inode)
                    await wait_drains(mount, 2)

                mount.namespace.files.on_writer(try_again)
                nursery.start_soon(partial(mount.open, "step.pt", flags=os.O_WRONLY | os.O_TRUNC))
                await wait_until(lambda: inode.lock.statistics().tasks_waiting == 1)
                mount.engine.let_drains_go()
        assert mount.namespace.files.open_count == 0


@trio.testing.trio_test
async def test_an_engine_that_cannot_go_back_to_what_was_before_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog has: memory that says something else must not go on."""

    def refuse_now(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with pytest.RaisesGroup(
        pytest.RaisesExc(RuntimeError, match="go back"), flatten_subgroups=True
    ):
        async with rig(tmp_path) as mount:
            await mount.write_file("step.pt", b"whole" * LARGE)
            await mount.commit.flush_all()
            monkeypatch.setattr(mount.engine, "revert", refuse_now)
            writer = await mount.open("step.pt", flags=os.O_WRONLY)
            mount.engine.write(writer, 0, b"torn")
            mount.engine.kernel_releases(writer, killed_by=signal.SIGKILL)
            mount.namespace.catch_up()
            await mount.commit.wait_queued()


async def kill_save(mount: Rig, content: bytes) -> str:
    """Let the writer of a whole new content be killed; returns the name of what it left."""
    before = await quarantined(mount)
    writer = await mount.open("step.pt", flags=os.O_WRONLY | os.O_TRUNC)
    mount.engine.write(writer, 0, content)
    mount.engine.kernel_releases(writer, killed_by=signal.SIGKILL)
    mount.namespace.catch_up()
    await mount.commit.flush_all()
    (name,) = await quarantined(mount) - before
    return name


@trio.testing.trio_test
async def test_the_kernel_forgets_what_another_quarantined_save_replaces(tmp_path: Path) -> None:
    """Until then its space is not free."""
    async with rig(tmp_path) as mount:
        await mount.write_file("step.pt", bytes(LARGE))
        name = await kill_save(mount, b"1" * LARGE)
        seen = await mount.resolve(f".fpfs/partial/{name}")
        objects = set(mount.engine.devices.objects)
        mount.engine.calls.clear()
        await kill_save(mount, b"2" * LARGE)
        assert ("invalidate_name", PARTIAL_INO, name.encode()) in mount.engine.calls
        assert name not in await quarantined(mount)
        mount.namespace.forget(seen.ino, seen.lookups)
        await mount.commit.flush_all()
        assert len(mount.engine.devices.objects) == len(objects)


@trio.testing.trio_test
async def test_a_replaced_quarantined_save_with_another_name_stays(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("step.pt", bytes(LARGE))
        seen = await mount.resolve(f".fpfs/partial/{await kill_save(mount, b'1' * LARGE)}")
        await mount.namespace.entries.link(seen.ino, ROOT, b"mine")
        await kill_save(mount, b"2" * LARGE)
        assert seen.nlink == 1
        assert await mount.read_file("mine") == b"1" * LARGE


@trio.testing.trio_test
async def test_a_replaced_quarantined_save_that_cannot_be_removed_is_no_failure_to_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_ino: int) -> Inode:
        raise CatalogError("the device of the catalog fails")

    async with rig(tmp_path) as mount:
        await mount.write_file("step.pt", bytes(LARGE))
        await kill_save(mount, b"1" * LARGE)
        writer = await mount.open("step.pt", flags=os.O_WRONLY | os.O_TRUNC)
        mount.engine.write(writer, 0, b"2" * LARGE)
        with monkeypatch.context() as failing:
            failing.setattr(mount.inodes, "get", fail)
            mount.engine.kernel_releases(writer, killed_by=signal.SIGKILL)
            mount.namespace.catch_up()
            await mount.commit.wait_queued()
        assert mount.commit.statistics().failures == ()
        assert await mount.read_file("step.pt") == bytes(LARGE)
    assert "an earlier content cannot be removed before the next mount" in caplog.text


@trio.testing.trio_test
async def test_a_catalog_that_cannot_be_read_ends_nothing_that_works_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Logs are committed the next time, and a write that finds no space is told so all the same."""

    async def fail(_operation: object) -> None:
        raise CatalogError("the devices of the catalog fail")

    monkeypatch.setattr(pipeline, "OPEN_COMMIT_S", 0.05)
    async with rig(tmp_path) as mount:
        handle = await mount.create("train.log")
        inode = await mount.resolve("train.log")
        with monkeypatch.context() as failing:
            failing.setattr(mount.catalog, "read_many", fail)
            mount.engine.write(handle, 0, b"step 1")
            await wait_until(lambda: "are not committed this time" in caplog.text)
            await mount.versions.say_refused(inode.ino)
        assert f"no space for inode {inode.ino}, of which the catalog tells nothing" in caplog.text
        await wait_drains(mount)
        await mount.commit.wait_queued()
        assert await committed_size(mount, "train.log") == 6


@pytest.mark.parametrize("other_name", [False, True])
@trio.testing.trio_test
async def test_who_opens_a_file_while_a_former_version_is_restored_looks_it_up_again(
    other_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a save was under no name then, although its fsync had succeeded."""
    is_held, may_go_on = trio.Event(), threading.Event()
    async with rig(tmp_path) as mount:
        await mount.policies.change(ROOT, PolicyChange(values={"versions": "2"}))
        for content in (b"first", b"second"):
            await mount.write_file("step.pt", content)
            await mount.commit.flush_all()
        inode = await mount.resolve("step.pt")
        await mount.open("step.pt", flags=os.O_RDONLY)  # so that nobody has to load it
        if other_name:
            await mount.namespace.entries.link(inode.ino, ROOT, b"other.pt")
        async with trio.open_nursery() as nursery:
            find = mount.versions.find_present

            async def find_and_hold_the_catalog(directory: int, name: bytes, number: int) -> int:
                found = await find(directory, name, number)
                nursery.start_soon(mount.catalog.read_many, lambda _transaction: may_go_on.wait())
                await trio.testing.wait_all_tasks_blocked()
                is_held.set()
                return found

            async def open_to_write() -> None:
                with pytest.raises(StaleInode):
                    await mount.namespace.files.open(inode, flags=os.O_WRONLY | os.O_TRUNC)

            monkeypatch.setattr(mount.versions, "find_present", find_and_hold_the_catalog)
            restore = partial(mount.versions.restore, ROOT, b"step.pt", 1, groups=mount.groups)
            nursery.start_soon(restore)
            await is_held.wait()
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(open_to_write)
            await trio.testing.wait_all_tasks_blocked()
            may_go_on.set()
        assert inode.stale is not other_name
        await mount.write_file("step.pt", b"third")
        await mount.commit.flush_all()
        assert await mount.read_file("step.pt") == b"third"
        if other_name:
            await mount.write_file("other.pt", b"fourth")
            assert await mount.read_file("other.pt") == b"fourth"
