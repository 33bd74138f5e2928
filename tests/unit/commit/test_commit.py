"""Commit: what makes a version current, in which order, and what must be durable before what."""

from __future__ import annotations

import copy
import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import trio
import trio.testing

from fpfs.core.engine import ObjectId, Range
from fpfs.core.policy import Acknowledge
from fpfs.core.protocol.questions import PolicyChange
from fpfs.core.protocol.reports import FormerVersion
from fpfs.daemon.catalog.rows.attributes import Changes
from fpfs.daemon.catalog.rows.dirents import RenameMode
from fpfs.daemon.commit import pipeline
from fpfs.testing.memory_engine import MemoryDevices
from tests.support.catalog.rig import LARGE, ROOT, SUPERUSER, Rig, rig
from tests.unit.catalog.test_catalog import cut_power

PATIENCE_S = 60


async def committed_size(mount: Rig, path: str) -> int:
    """Return the size that the catalog has for a file."""
    inode = await mount.resolve(path)
    (size,) = await mount.catalog.read(
        lambda t: t.execute("SELECT size FROM inodes WHERE ino = ?", (inode.ino,)).fetchone()
    )
    mount.namespace.forget(inode.ino, 1)
    return int(size)


@pytest.mark.parametrize("size", [10, LARGE])
@trio.testing.trio_test
async def test_a_flush_never_commits_and_the_last_release_does(size: int, tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        first = await mount.create("file")
        second = await mount.open("file")
        mount.engine.write(first, 0, bytes(size))
        await mount.namespace.files.flush(first)
        await mount.namespace.files.flush(first)
        mount.namespace.files.release(first)
        await mount.commit.make_names_durable()
        assert "drain" not in mount.call_names()
        assert await committed_size(mount, "file") == 0
        mount.namespace.files.release(second)
        await mount.commit.make_names_durable()
        assert mount.call_names()[-4:] == ["release", "drain", "committed", "unload"]
        assert await committed_size(mount, "file") == size


@pytest.mark.parametrize("size", [10, LARGE])
@trio.testing.trio_test
async def test_what_was_closed_holds_nothing_of_the_next_writer(size: int, tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"a" * size)
        again = await mount.open("file", flags=os.O_WRONLY | os.O_TRUNC)
        mount.engine.write(again, 0, b"b")
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "file") == size
        mount.namespace.files.release(again)
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "file") == 1


@trio.testing.trio_test
async def test_what_is_closed_while_another_truncates_waits_for_it(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount, trio.open_nursery() as nursery:
        first = await mount.create("file")
        mount.engine.write(first, 0, b"synced")
        mount.engine.hold_drains()
        nursery.start_soon(mount.namespace.files.sync, first)
        await trio.testing.wait_all_tasks_blocked()
        second: list[int] = []

        async def overwrite() -> None:
            second.append(await mount.open("file", flags=os.O_WRONLY | os.O_TRUNC))

        nursery.start_soon(overwrite)
        await trio.testing.wait_all_tasks_blocked()
        mount.engine.write(first, 0, b"closed")
        mount.namespace.files.release(first)
        mount.engine.let_drains_go()
        await trio.testing.wait_all_tasks_blocked()
        await mount.commit.make_names_durable()
        # Neither is whole now: what was synced stays until the second writer closes.
        assert await committed_size(mount, "file") == len(b"synced")
        mount.engine.write(second[0], 0, b"b")
        mount.namespace.files.release(second[0])
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "file") == 1


@trio.testing.trio_test
async def test_a_reader_does_not_hold_up_the_commit(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        writer = await mount.create("file")
        reader = await mount.open("file", flags=os.O_RDONLY)
        mount.engine.write(writer, 0, b"content")
        mount.namespace.files.release(writer)
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "file") == 7
        assert mount.engine.read(reader, 0, 9) == b"content"


@trio.testing.trio_test
async def test_files_that_were_not_changed_are_not_committed(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"content")
        await mount.commit.flush_all()
        before = mount.commit.statistics().committed
        mount.namespace.files.release(await mount.open("file"))
        await mount.create("empty")
        await mount.commit.flush_all()
        assert mount.commit.statistics().committed == before


@trio.testing.trio_test
async def test_versions_become_current_in_the_order_of_closes(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        mount.engine.hold_drains()
        inodes = []
        for number in range(40):
            await mount.write_file(f"f{number}", bytes([number]) * (LARGE if number % 2 else 10))
            inode = await mount.resolve(f"f{number}")
            inodes.append(inode.ino)
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert "committed" not in mount.call_names()
        mount.engine.let_drains_go()
        await mount.commit.flush_all()
        order = [call[1] for call in mount.engine.calls if call[0] == "committed"]
        assert order == inodes


@trio.testing.trio_test
@pytest.mark.parametrize("how", ["truncate", "open"])
async def test_a_truncation_overtakes_nothing_that_was_closed_before(
    tmp_path: Path, how: str
) -> None:
    """It is a version of its own, and no part of the one that was closed and is on its way."""
    async with rig(tmp_path) as mount:
        await mount.write_file("first", bytes(LARGE))
        await mount.write_file("second", bytes(LARGE))
        first, second = await mount.resolve("first"), await mount.resolve("second")
        if how == "truncate":
            await mount.namespace.files.truncate(first, 10)
        else:
            handle = await mount.open("first", flags=os.O_RDONLY | os.O_TRUNC)
            mount.namespace.files.release(handle)
        await mount.commit.flush_all()
        order = [call[1] for call in mount.engine.calls if call[0] == "committed"]
        assert order == [first.ino, second.ino, first.ino]
        assert await committed_size(mount, "first") == (10 if how == "truncate" else 0)


@trio.testing.trio_test
async def test_fsync_makes_everything_closed_before_durable(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("first", bytes(LARGE))
        handle = await mount.create("second")
        mount.engine.write(handle, 0, b"x")
        await mount.namespace.files.sync(handle)
        assert mount.catalog.all_durable
        assert await committed_size(mount, "first") == LARGE
        assert await committed_size(mount, "second") == 1


@trio.testing.trio_test
async def test_fsync_of_a_reader_covers_the_writer(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        writer = await mount.create("file")
        reader = await mount.open("file", flags=os.O_RDONLY)
        mount.engine.write(writer, 0, b"content")
        await mount.namespace.files.sync(reader)
        assert mount.catalog.all_durable
        assert await committed_size(mount, "file") == 7


@trio.testing.trio_test
async def test_syncs_of_one_file_at_once_do_not_wait_for_each_other_for_ever(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        for round_ in range(20):
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    for number in range(5):
                        mount.engine.write(handle, LARGE * number, bytes([round_]) * 10)
                        nursery.start_soon(mount.namespace.files.sync, handle)
                        await trio.lowlevel.checkpoint()
        assert not mount.inodes.refresh(await mount.resolve("file"))


class PowerCut(NamedTuple):
    """What a power cut just before a removal left, and what the next mount must make of it."""

    folder: Path
    devices: MemoryDevices
    expected: bytes | None
    objects: int


@trio.testing.trio_test
async def test_space_is_given_back_after_the_commit_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts: list[PowerCut] = []
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"a" * LARGE)
        await mount.commit.flush_all()
        expect = cut_power_at_removals(mount, monkeypatch, cuts)
        expect(b"a" * 65536 + b"b" * 65536 + b"a" * (LARGE - 2 * 65536), 3)
        handle = await mount.open("file")
        mount.engine.write(handle, 65536, b"b" * 65536)
        mount.namespace.files.release(handle)
        await mount.commit.flush_all()
        expect(b"c" * LARGE, 2)
        await mount.write_file("file", b"c" * LARGE)
        await mount.commit.flush_all()
        expect(None, 0)
        inode = await mount.resolve("file")
        await mount.namespace.entries.unlink(ROOT, b"file")
        mount.namespace.forget(inode.ino, 1)
        await mount.commit.flush_all()
        assert mount.engine.devices.objects == {}
    assert len(cuts) == 3
    for cut in cuts:
        async with rig(cut.folder, devices=cut.devices) as after:
            assert await after.names("") == {".", ".."} | ({"file"} if cut.expected else set())
            if cut.expected:
                assert await after.read_file("file") == cut.expected
            await after.commit.flush_all()
            # What the power cut left undone was done now: nothing leaks.
            assert len(cut.devices.objects) == cut.objects


def cut_power_at_removals(
    mount: Rig, monkeypatch: pytest.MonkeyPatch, cuts: list[PowerCut]
) -> Callable[[bytes | None, int], None]:
    """Cut the power before each removal, which must find its transaction durable.

    Returns what tells the content and the count of objects that the following cuts must leave.
    """
    remove, discard = mount.engine.remove_objects, mount.engine.discard
    expected: list[tuple[bytes | None, int]] = []

    def cut() -> None:
        assert mount.catalog.all_durable, "space is given back before the catalog is durable"
        folder = mount.folder / f"cut{len(cuts)}"
        cut_power(mount.folder, folder)
        devices = copy.deepcopy(mount.engine.devices)
        cuts.append(PowerCut(folder, devices, *expected[-1]))

    async def watched_remove(objects: Sequence[ObjectId]) -> None:
        cut()
        await remove(objects)

    async def watched_discard(ranges: Sequence[Range]) -> None:
        cut()
        await discard(ranges)

    monkeypatch.setattr(mount.engine, "remove_objects", watched_remove)
    monkeypatch.setattr(mount.engine, "discard", watched_discard)
    return lambda content, objects: expected.append((content, objects))


@trio.testing.trio_test
async def test_removals_that_a_crash_left_undone_are_done_by_the_next_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.write_file("file", b"a" * LARGE)
        await mount.commit.flush_all()

        async def die(_objects: Sequence[ObjectId]) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(mount.engine, "remove_objects", die)
        await mount.write_file("file", b"b" * LARGE)
        await mount.commit.make_names_durable()
        assert len(devices.objects) == 4
    async with rig(tmp_path, devices=devices) as mount:
        await mount.commit.flush_all()
        assert len(devices.objects) == 2
        assert await mount.read_file("file") == b"b" * LARGE


@trio.testing.trio_test
async def test_a_device_that_refuses_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        remove = mount.engine.remove_objects

        async def refuse(objects: Sequence[ObjectId]) -> None:
            if any(identity.device == 1 for identity in objects):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            await remove(objects)

        monkeypatch.setattr(mount.engine, "remove_objects", refuse)
        for content in (b"a", b"b", b"c"):
            await mount.write_file("file", content * LARGE)
            await mount.commit.flush_all()
        assert sorted(identity.device for identity in devices.objects) == [0, 1, 1, 1]
        assert caplog.text.count("space on device 1 cannot be given back") == 1
    async with rig(tmp_path, devices=devices) as mount:
        await mount.commit.flush_all()
        assert sorted(identity.device for identity in devices.objects) == [0, 1]
        assert await mount.read_file("file") == b"c" * LARGE


@trio.testing.trio_test
async def test_files_deleted_while_open_go_at_the_next_mount(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.write_file("file", bytes(LARGE))
        await mount.commit.flush_all()
        await mount.open("file")
        await mount.namespace.entries.unlink(ROOT, b"file")
        assert len(devices.objects) == 2
    async with rig(tmp_path, devices=devices) as mount:
        await mount.commit.flush_all()
        assert devices.objects == {}
        assert mount.inodes.count == 1


@pytest.mark.parametrize("size", [10, LARGE])
@trio.testing.trio_test
async def test_a_crash_before_the_commit_leaves_the_previous_version(
    size: int, tmp_path: Path
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.write_file("file", b"a" * size)
        await mount.commit.flush_all()
        handle = await mount.open("file", flags=os.O_WRONLY | os.O_TRUNC)
        mount.engine.write(handle, 0, b"b" * size)
        assert await mount.read_file("file") == b"b" * size
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.read_file("file") == b"a" * size


async def wait_durable(mount: Rig) -> None:
    """Return when everything is durable, which nobody asks for."""
    with trio.fail_after(PATIENCE_S):
        while not mount.catalog.all_durable:
            await trio.testing.wait_all_tasks_blocked(0.01)


@trio.testing.trio_test
async def test_closed_content_becomes_durable_by_itself(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"content")
        with trio.fail_after(PATIENCE_S):
            while await committed_size(mount, "file") != 7:
                await trio.testing.wait_all_tasks_blocked(0.01)
        await wait_durable(mount)


@trio.testing.trio_test
async def test_names_become_durable_by_themselves(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        entries = mount.namespace.entries
        await mount.write_file("file", b"content")
        await mount.commit.flush_all()
        for change in (
            mount.make_directory("folder"),
            entries.rename((ROOT, b"file"), (ROOT, b"new"), RenameMode.REPLACE),
            entries.unlink(ROOT, b"new"),
        ):
            before = mount.catalog.written
            await change
            assert mount.catalog.written > before
            await wait_durable(mount)


@trio.testing.trio_test
async def test_a_rename_of_pending_content_commits_it_first(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("good", b"previous")
        await mount.commit.flush_all()
        await mount.write_file("new", bytes(LARGE))
        await mount.namespace.entries.rename((ROOT, b"new"), (ROOT, b"good"), RenameMode.REPLACE)
        assert await committed_size(mount, "good") == LARGE
        handle = await mount.create("open")
        mount.engine.write(handle, 0, b"written and not closed")
        await mount.namespace.entries.rename((ROOT, b"open"), (ROOT, b"good"), RenameMode.REPLACE)
        assert await committed_size(mount, "good") == 22


@pytest.mark.parametrize("moved", ["pointer", "folder", "symlink"])
@trio.testing.trio_test
async def test_a_rename_comes_after_everything_that_was_closed(moved: str, tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("pointer", b"names the checkpoint")
        await mount.make_directory("folder")
        entries = mount.namespace.entries
        await entries.make_symlink(ROOT, b"symlink", target=b"checkpoint", caller=SUPERUSER)
        await mount.commit.flush_all()
        await mount.write_file("folder/checkpoint", bytes(LARGE))
        await entries.rename((ROOT, moved.encode()), (ROOT, b"latest"), RenameMode.REPLACE)
        path = "latest/checkpoint" if moved == "folder" else "folder/checkpoint"
        assert await committed_size(mount, path) == LARGE


@trio.testing.trio_test
async def test_fsync_of_what_is_clean_makes_durable_what_was_closed_before(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=3600) as mount:
        clean = await mount.create("clean")
        await mount.write_file("closed", bytes(LARGE))
        await mount.namespace.files.sync(clean)
        assert await committed_size(mount, "closed") == LARGE
        assert mount.catalog.all_durable


@trio.testing.trio_test
async def test_a_truncation_without_handle_is_a_version(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.write_file("file", b"a" * LARGE)
        inode = await mount.resolve("file")
        await mount.namespace.set_attributes(inode.ino, Changes(), size=70_000, caller=SUPERUSER)
        await mount.commit.flush_all()
        handle = await mount.open("file", flags=os.O_RDONLY)
        mount.namespace.files.release(handle)
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.read_file("file") == b"a" * 70_000
        opened = await mount.open("file", flags=os.O_RDONLY | os.O_TRUNC)
        await mount.commit.flush_all()
        mount.namespace.files.release(opened)
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.read_file("file") == b""


@pytest.mark.parametrize("ack", [Acknowledge.CLOSE, Acknowledge.DURABLE])
@trio.testing.trio_test
async def test_close_waits_where_the_policy_says_so(ack: Acknowledge, tmp_path: Path) -> None:
    async with rig(tmp_path, ack=ack, durable_within_s=3600) as mount:
        handle = await mount.create("file")
        mount.engine.write(handle, 0, bytes(LARGE))
        await mount.namespace.files.flush(handle)
        assert mount.catalog.all_durable
        assert await committed_size(mount, "file") == LARGE


@trio.testing.trio_test
async def test_a_synchronous_write_is_answered_when_durable(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=3600) as mount:
        handle = await mount.create("file", flags=os.O_WRONLY | os.O_SYNC)
        for number in range(3):
            mount.engine.write(handle, number * 10, b"x" * 10)
        with trio.fail_after(30):
            while len(mount.engine.answers) < 3:
                await trio.testing.wait_all_tasks_blocked(0.01)
        assert set(mount.engine.answers.values()) == {0}
        assert mount.catalog.all_durable
        assert await committed_size(mount, "file") == 30


@pytest.mark.parametrize("size", [10, LARGE])
@trio.testing.trio_test
async def test_a_failed_drain_keeps_the_version_and_reaches_the_writer(
    size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.write_file("file", b"a" * size)
        await mount.commit.flush_all()
        inode = await mount.resolve("file")
        mount.engine.fail_drains(inode.ino, errno.EIO)
        handle = await mount.open("file")
        mount.engine.write(handle, 0, b"b" * size)
        with pytest.raises(OSError, match="Input/output error"):
            await mount.namespace.files.sync(handle)
        await mount.namespace.files.flush(handle)  # It was reported: once is enough.
        await mount.write_file("other", b"fine")
        await mount.commit.make_names_durable()
        assert await committed_size(mount, "other") == 4
        mount.namespace.files.release(handle)
        failures = await mount.commit.flush_all()
        assert [(failure.ino, failure.errno) for failure in failures] == [(inode.ino, errno.EIO)]
        assert re.search(rf"inode {inode.ino} keeps its previous version", caplog.text)
        assert await mount.read_file("file") == b"b" * size
        mount.engine.fail_drains(inode.ino, 0)
        assert await mount.commit.flush_all() == ()
        mount.namespace.forget(inode.ino, 1)
        await check_deleted_failures_are_forgotten(mount)
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.read_file("file") == b"b" * size


async def check_deleted_failures_are_forgotten(mount: Rig) -> None:
    handle = await mount.create("doomed")
    inode = await mount.resolve("doomed")
    mount.engine.fail_drains(inode.ino, errno.ENOSPC)
    mount.engine.write(handle, 0, b"x")
    mount.namespace.files.release(handle)
    assert len(await mount.commit.flush_all()) == 1
    await mount.namespace.entries.unlink(ROOT, b"doomed")
    mount.namespace.forget(inode.ino, 1)
    assert await mount.commit.flush_all() == ()


@trio.testing.trio_test
async def test_a_version_that_the_catalog_refuses_does_not_take_others_along(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as mount:
        await mount.catalog.write(
            lambda t: (
                t.execute(
                    "CREATE TRIGGER refuse BEFORE INSERT ON inline WHEN NEW.content = x'626164' "
                    "BEGIN SELECT raise(ABORT, 'refused'); END"
                ).rowcount
            )
        )
        for name in ("a", "bad", "c"):
            await mount.write_file(name, name.encode())
        failures = await mount.commit.flush_all()
        bad = await mount.resolve("bad")
        assert [failure.ino for failure in failures] == [bad.ino]
        assert [await committed_size(mount, name) for name in ("a", "bad", "c")] == [1, 0, 1]


@trio.testing.trio_test
async def test_wait_durable_waits_for_the_writer(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=3600) as mount:
        handle = await mount.create("file")
        mount.engine.write(handle, 0, b"content")
        inode = await mount.resolve("file")
        done = trio.Event()

        async def wait() -> None:
            await mount.commit.wait_durable(inode.ino)
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not done.is_set()
            mount.namespace.files.release(handle)
            with trio.fail_after(30):
                await done.wait()
        assert mount.catalog.all_durable
        assert await committed_size(mount, "file") == 7


@trio.testing.trio_test
async def test_many_small_files_share_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first of them is flushed, others wait for the next transactions."""
    all_written = threading.Event()
    fdatasync = os.fdatasync

    def wait_and_flush(descriptor: int) -> None:
        assert all_written.wait(60)
        fdatasync(descriptor)

    async with rig(tmp_path) as mount:
        monkeypatch.setattr(os, "fdatasync", wait_and_flush)
        for number in range(200):
            await mount.write_file(f"f{number}", b"x" * 4096)
        all_written.set()
        await mount.commit.flush_all()
        statistics = mount.commit.statistics()
        assert statistics.committed == 200
        assert statistics.transactions < 100
        assert statistics.pending == 0


@trio.testing.trio_test
async def test_what_stays_open_and_becomes_longer_is_committed_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is made, and one that is appended to; not a checkpoint, nor what is rewritten."""
    monkeypatch.setattr(pipeline, "OPEN_COMMIT_S", 0.05)
    good = b"good" * 10_000
    async with rig(tmp_path) as mount:
        for name in ("appended.log", "rewritten.log", "cut.log", "rewritten.pt"):
            await mount.write_file(name, good)
        await mount.commit.flush_all()
        handles = {name: await mount.create(name) for name in ("made.log", "made.pt")}
        for name in ("appended.log", "rewritten.log"):
            handles[name] = await mount.open(name, flags=os.O_WRONLY)
        for name in ("cut.log", "rewritten.pt"):
            handles[name] = await mount.open(name, flags=os.O_WRONLY | os.O_TRUNC)
        sizes = dict.fromkeys(handles, len(good)) | {"made.log": 0, "made.pt": 0}

        async def wait_committed(count: int) -> None:
            """Wait until `count` versions are committed, which is counted after they are there."""
            with trio.fail_after(PATIENCE_S):
                while mount.commit.statistics().committed < count:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            assert mount.commit.statistics().committed == count
            assert {name: await committed_size(mount, name) for name in handles} == sizes

        for name, handle in handles.items():
            mount.engine.write(handle, len(good) if name == "appended.log" else 0, b"more")
        sizes["made.log"] += 4
        sizes["appended.log"] += 4
        await wait_committed(4 + 2)
        for turn, name in enumerate(("made.log", "appended.log")):  # in turn: a time each
            mount.engine.write(handles[name], sizes[name], b"again")
            sizes[name] += 5
            await wait_committed(4 + 2 + turn + 1)


@trio.testing.trio_test
async def test_a_flush_leaves_a_checkpoint_that_is_being_written_to_its_close(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("step.pt", b"good")
        await mount.commit.flush_all()
        handles = [
            await mount.open(name, flags=os.O_WRONLY | os.O_TRUNC)
            if name == "step.pt"
            else await mount.create(name)
            for name in ("step.pt", "train.log")
        ]
        for handle in handles:
            mount.engine.write(handle, 0, b"half of it")
        await mount.commit.flush_all()
        assert await committed_size(mount, "step.pt") == 4
        assert await committed_size(mount, "train.log") == 10
        await mount.namespace.files.sync(handles[0])
        assert await committed_size(mount, "step.pt") == 10


@trio.testing.trio_test
async def test_what_was_closed_becomes_current_although_the_next_writer_is_killed(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("step.pt", b"a" * LARGE)
        await mount.commit.flush_all()
        mount.engine.hold_drains()
        await mount.write_file("step.pt", b"b" * LARGE)
        again = await mount.open("step.pt")
        mount.engine.write(again, 0, b"torn")
        mount.engine.kernel_releases(again, killed_by=signal.SIGKILL)
        mount.namespace.catch_up()
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        assert await mount.read_file("step.pt") == b"b" * LARGE
        (quarantined,) = await mount.names(".fpfs/partial") - {".", ".."}
        assert await mount.read_file(f".fpfs/partial/{quarantined}") == b"torn" + b"b" * (LARGE - 4)
        assert mount.commit.statistics().failures == ()


@trio.testing.trio_test
async def test_a_sync_that_a_close_overtakes_makes_no_version(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount, trio.open_nursery() as nursery:
        await mount.policies.change(ROOT, PolicyChange(values={"versions": "1"}))
        await mount.write_file("model", b"before")
        await mount.commit.flush_all()
        reader = await mount.open("model", flags=os.O_RDONLY)
        writer = await mount.create("model", flags=os.O_WRONLY | os.O_TRUNC)
        mount.engine.write(writer, 0, b"one")
        mount.engine.hold_drains()
        nursery.start_soon(mount.namespace.files.sync, reader)
        await trio.testing.wait_all_tasks_blocked()
        mount.engine.write(writer, 3, b"two")
        mount.namespace.files.release(writer)
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        assert [each.size for each in await former(mount, b"model")] == [len(b"before")]
        # What was closed is whole, also where its last bytes were synced before.
        mount.engine.hold_drains()
        writer = await mount.create("model", flags=os.O_WRONLY | os.O_TRUNC)
        mount.engine.write(writer, 0, b"synced")
        nursery.start_soon(mount.namespace.files.sync, reader)
        await trio.testing.wait_all_tasks_blocked()
        mount.namespace.files.release(writer)
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        await mount.write_file("model", b"the last")
        await mount.commit.make_names_durable()
        assert [each.size for each in await former(mount, b"model")] == [len(b"synced")]
        mount.namespace.files.release(reader)


async def former(mount: Rig, name: bytes) -> Sequence[FormerVersion]:
    """The former versions of a name in the root."""
    return (await mount.versions.show(ROOT, name)).versions
