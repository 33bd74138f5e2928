"""Names that were removed after something was closed that is not current yet."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from fpfs.daemon.catalog.executor import Transaction
from fpfs.daemon.commit.deferred_unlink import DeferredUnlinks
from fpfs.testing.memory_engine import MemoryDevices
from tests.support.catalog.rig import LARGE, ROOT, SUPERUSER, Rig, rig

BACK = "was removed after something was saved that is lost: it is back"


async def saved(mount: Rig, *paths: str) -> None:
    """Make files that are current and durable, with their names as content."""
    for path in paths:
        await mount.write_file(path, path.encode() * (LARGE // len(path)))
    await mount.commit.flush_all()


async def unlink(mount: Rig, path: str) -> None:
    parent = await mount.resolve(str(Path(path).parent))
    await mount.namespace.entries.unlink(parent.ino, Path(path).name.encode())
    mount.namespace.forget(parent.ino, 1)


async def rows(mount: Rig) -> int:
    """How many unlinks are deferred in the catalog."""
    (count,) = await mount.catalog.read(
        lambda t: t.execute("SELECT count(*) FROM withheld").fetchone()
    )
    return int(count)


@trio.testing.trio_test
async def test_power_loss_brings_back_what_was_removed_too_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await saved(mount, "old")
        mount.engine.hold_drains()
        await mount.write_file("new", b"n" * LARGE)
        await unlink(mount, "old")
        assert await mount.names("") == {".", "..", "new"}
        assert await mount.namespace.look_up(ROOT, b"old") is None
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.read_file("old") == (b"old" * LARGE)[: LARGE // 3 * 3]
        assert await mount.read_file("new") == b""
        assert await rows(mount) == 0
        assert (await mount.resolve("old")).nlink == 1
    assert [record.message for record in caplog.records if BACK in record.message] == [
        f"old {BACK}"
    ]


async def save_badly(mount: Rig, path: str) -> int:
    """Close a file whose content no device takes; returns its inode."""
    handle = await mount.create(path)
    inode = await mount.resolve(path)
    mount.engine.fail_drains(inode.ino, errno.EIO)
    mount.engine.write(handle, 0, b"b" * LARGE)
    mount.namespace.files.release(handle)
    mount.namespace.forget(inode.ino, 1)
    return inode.ino


@pytest.mark.parametrize("fails_first", [True, False])
@trio.testing.trio_test
async def test_what_could_not_be_kept_takes_nothing_along(
    fails_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether that is known when the old one is removed or not, and whatever is saved besides."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await saved(mount, "old", "older")
        if not fails_first:
            mount.engine.hold_drains()
        await save_badly(mount, "new")
        if fails_first:
            await mount.commit.wait_queued()
        await unlink(mount, "old")
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        await mount.write_file("other", b"o" * LARGE)
        await mount.commit.make_names_durable()
        await unlink(mount, "older")
        assert await mount.names("") == {".", "..", "new", "other"}
        assert await rows(mount) == 2
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.read_file("old") == (b"old" * LARGE)[: LARGE // 3 * 3]
        assert await mount.names("") == {".", "..", "new", "other", "old", "older"}
        assert await mount.read_file("other") == b"o" * LARGE
        assert await rows(mount) == 0
    assert sum(BACK in record.message for record in caplog.records) == 2


@pytest.mark.parametrize("how", ["it is kept", "it is removed", "its space is needed"])
@trio.testing.trio_test
async def test_what_could_not_be_kept_is_waited_for_until(how: str, tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await saved(mount, "old")
        before = set(devices.objects)
        ino = await save_badly(mount, "new")
        await mount.commit.wait_queued()
        await unlink(mount, "old")
        await mount.write_file("other", b"o" * LARGE)
        await mount.commit.flush_all()
        assert before <= set(devices.objects)
        assert await rows(mount) == 1
        if how == "it is kept":
            mount.engine.fail_drains(ino, 0)
            assert await mount.commit.flush_all() == ()
        elif how == "it is removed":
            await unlink(mount, "new")
            await trio.testing.wait_all_tasks_blocked(0.1)
        else:
            assert await mount.commit.make_room()
            assert not await mount.commit.make_room()
        await mount.commit.flush_all()
        assert await rows(mount) == 0
        assert not before & set(devices.objects)
        mount.engine.fail_drains(ino, 0)
        await mount.commit.flush_all()
        # Nothing is waited for any more.
        await unlink(mount, "other")
        assert await rows(mount) == 0


@trio.testing.trio_test
async def test_what_is_current_takes_the_removed_along(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await saved(mount, "old")
        before = set(devices.objects)
        mount.engine.hold_drains()
        await mount.write_file("new", b"n" * LARGE)
        await unlink(mount, "old")
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert before <= set(devices.objects), "what may come back is not deleted"
        assert await rows(mount) == 1
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        await mount.commit.flush_all()
        assert await rows(mount) == 0
        assert not before & set(devices.objects)
        assert mount.inodes.count == 2
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.names("") == {".", "..", "new"}
        assert await mount.read_file("new") == b"n" * LARGE


@trio.testing.trio_test
async def test_a_tree_comes_back_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.make_directory("run")
        await mount.make_directory("run/step")
        await saved(mount, "run/step/a", "run/step/b")
        mount.engine.hold_drains()
        await mount.write_file("new", b"n" * LARGE)
        for path in ("run/step/a", "run/step/b"):
            await unlink(mount, path)
        run = await mount.resolve("run")
        await mount.namespace.entries.remove_directory(run.ino, b"step")
        await mount.namespace.entries.remove_directory(ROOT, b"run")
        assert await mount.names("") == {".", "..", "new"}
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.names("run/step") == {".", "..", "a", "b"}
        assert (await mount.read_file("run/step/b")).startswith(b"run/step/b")
        for path, nlink in (("", 3), ("run", 3), ("run/step", 2), ("run/step/a", 1)):
            assert (await mount.resolve(path)).nlink == nlink, path
        assert mount.inodes.count == 6
    assert sum(BACK in record.message for record in caplog.records) == 4


@trio.testing.trio_test
async def test_a_later_file_of_that_name_stays_unless_it_is_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await saved(mount, "one", "two")
        mount.engine.hold_drains()
        await mount.write_file("new", b"n" * LARGE)
        await unlink(mount, "one")
        await unlink(mount, "two")
        await mount.write_file("one", b"later")
        await mount.make_directory("two")
    async with rig(tmp_path, devices=devices) as mount:
        assert (await mount.read_file("one")).startswith(b"one")
        assert (await mount.resolve("two")).is_directory
        assert mount.inodes.count == 4
    assert sum(BACK in record.message for record in caplog.records) == 1


@trio.testing.trio_test
async def test_what_was_made_after_it_waits_for_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        mount.engine.hold_drains()
        await mount.write_file("new", b"n" * LARGE)
        await mount.write_file("temporary", b"t" * LARGE)
        await unlink(mount, "temporary")
        assert await rows(mount) == 0
        await mount.write_file("first", b"f" * LARGE)
        await mount.write_file("second", b"s" * LARGE)
        await unlink(mount, "first")
        assert await rows(mount) == 1, "both would be lost"
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        assert await rows(mount) == 0
    # Its own contents that are on their way are no reason to keep it.
    async with rig(tmp_path) as mount:
        await saved(mount, "alone")
        mount.engine.hold_drains()
        await mount.write_file("alone", b"a" * LARGE)
        await unlink(mount, "alone")
        assert await rows(mount) == 0
        mount.engine.let_drains_go()


@trio.testing.trio_test
async def test_content_that_was_closed_comes_back_in_its_last_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await saved(mount, "old", "new")
        old, new = (await mount.resolve("old")).ino, (await mount.resolve("new")).ino
        mount.engine.hold_drains(of=(old, new))
        await mount.write_file("old", b"second" * LARGE)
        await mount.write_file("between", b"b" * LARGE)
        await mount.write_file("new", b"n" * LARGE)
        await unlink(mount, "old")
        before = len(mount.engine.calls)
        mount.engine.hold_drains(of=(new,))
        committed: list[int] = []
        with trio.fail_after(30):
            while len(committed) < 2:
                await trio.sleep(0.01)
                calls = mount.engine.calls[before:]
                committed = [call[1] for call in calls if call[0] == "committed"]
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert committed == [old, (await mount.resolve("between")).ino]
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.read_file("between") == b"b" * LARGE
        assert await mount.read_file("old") == b"second" * LARGE
        assert (await mount.read_file("new")).startswith(b"new")
    assert any(re.match(f"old {BACK}", record.message) for record in caplog.records)


@trio.testing.trio_test
async def test_a_server_that_takes_over_keeps_waiting(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await saved(mount, "old")
        mount.engine.hold_drains()
        await mount.write_file("new", b"n" * LARGE)
        await unlink(mount, "old")
    async with rig(tmp_path, devices=devices, is_successor=True) as mount:
        # Whatever it finds of "new", nothing that programs have removed is back.
        assert "old" not in await mount.names("")
        await mount.commit.flush_all()
        assert await rows(mount) == 0
    async with rig(tmp_path, devices=devices) as mount:
        assert "old" not in await mount.names("")


@trio.testing.trio_test
async def test_a_removal_is_final_in_the_transaction_of_what_it_waited_for(tmp_path: Path) -> None:
    """Otherwise a later version could be there after power loss, and the removal not."""
    async with rig(tmp_path) as mount:
        await saved(mount, "old")
        mount.engine.hold_drains()
        await mount.write_file("new", b"n" * (LARGE + 1))
        await unlink(mount, "old")
        await mount.write_file("later", b"l" * (LARGE + 1))
        seen = []

        def look(transaction: Transaction) -> None:
            names = transaction.execute("SELECT count(*) FROM withheld").fetchone()
            sizes = transaction.execute(
                "SELECT count(*) FROM inodes WHERE size = ?", (LARGE + 1,)
            ).fetchone()
            seen.append((*sizes, *names))

        count_transactions = mount.catalog.write_many

        async def watched(operation: Any, **keywords: Any) -> Any:
            def both(transaction: Transaction) -> Any:
                result = operation(transaction)
                look(transaction)
                return result

            return await count_transactions(both, **keywords)

        mount.catalog.write_many = watched  # type: ignore[method-assign]
        mount.engine.let_drains_go()
        await mount.commit.make_names_durable()
        # Both become current together, or "later" does after "new": as their drains end.
        first = next(each for each in seen if each[0] > 0)
        assert first[1] == 0, "the removal is final with what it waited for"
        assert seen[-1] == (2, 0)


@pytest.mark.parametrize("is_late", [False, True])
@trio.testing.trio_test
async def test_a_row_that_came_after_the_transaction_it_waited_for_goes(
    is_late: bool, tmp_path: Path
) -> None:
    """The removal found a version in the queue whose transaction was just being carried out."""
    async with rig(tmp_path) as mount:
        await saved(mount, "old")
        inode = await mount.resolve("old")
        deferred = DeferredUnlinks(catalog=mount.catalog, inodes=mount.inodes)
        insert = "INSERT INTO withheld VALUES (99, 1, x'61', 77, 8, 5)"
        steps: list[Callable[[Transaction], object]] = [
            lambda t: t.execute(insert),
            lambda t: deferred.finalize(t, 5),
        ]
        applied: list[Callable[[], None]] = [
            lambda: deferred.hold(inode, mark=5),
            lambda: deferred.finalized(5),
        ]
        for index in (1, 0) if is_late else (0, 1):
            await mount.catalog.write(steps[index])
            applied[index]()
        assert await rows(mount) == int(is_late)
        await deferred.pass_by(5)
        assert await rows(mount) == 0
        assert inode.deferred_unlinks == 0


@trio.testing.trio_test
async def test_what_was_in_a_directory_comes_back_where_its_name_leads_to(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        for path in ("run", "run/sub", "other"):
            await mount.make_directory(path)
        await saved(mount, "run/a", "run/b", "run/sub/c", "other/d")
        mount.engine.hold_drains()
        await mount.write_file("new", b"n" * LARGE)
        for path in ("run/a", "run/b", "run/sub/c", "other/d"):
            await unlink(mount, path)
        run = await mount.resolve("run")
        await mount.namespace.entries.remove_directory(run.ino, b"sub")
        mount.namespace.forget(run.ino, 1)
        for name in (b"run", b"other"):
            await mount.namespace.entries.remove_directory(ROOT, name)
        await mount.make_directory("run")
        await mount.write_file("run/a", b"the next")
        await mount.make_directory("run/b")
        link = await mount.namespace.entries.make_symlink(
            ROOT, b"other", target=b"run", caller=SUPERUSER
        )
        mount.namespace.forget(link.ino, 1)
    async with rig(tmp_path, devices=devices) as mount:
        assert await mount.names("run") == {".", "..", "a", "b", "sub"}
        assert (await mount.read_file("run/a")).startswith(b"run/a")
        assert (await mount.read_file("run/sub/c")).startswith(b"run/sub/c")
        for path, nlink in (("", 3), ("run", 4), ("run/b", 2), ("run/sub", 2), ("run/a", 1)):
            assert (await mount.resolve(path)).nlink == nlink, path
        # The root, run, a, b, sub, c, the link, and "new".
        assert mount.inodes.count == 8
