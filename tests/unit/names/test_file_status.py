"""What is told of files, without a mount: how far each has come, and what is below a directory."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import hypothesis
import pytest
import trio
import trio.testing
from hypothesis import strategies as st

from fpfs.core.protocol.reports import FileRun, FileState, FileStatus, join_runs
from fpfs.daemon.catalog.rows.dirents import RenameMode
from fpfs.daemon.catalog.rows.queries import Asker, fetch_facts, list_runs
from tests.support.catalog.rig import LARGE, ROOT, Rig, rig

NEVER_S = 1e6
"""Nothing is made durable by itself."""


async def status(mount: Rig, path: str) -> FileStatus:
    """What is told of the inode at a path."""
    inode = await mount.resolve(path)
    found = await mount.namespace.statuses.describe_one(inode.ino)
    mount.namespace.forget(inode.ino, 1)
    return found


async def rename(mount: Rig, source: str, destination: str) -> None:
    """Rename a name in the root."""
    places = ((ROOT, os.fsencode(source)), (ROOT, os.fsencode(destination)))
    await mount.namespace.entries.rename(*places, RenameMode.REPLACE)


@trio.testing.trio_test
async def test_a_file_is_written_then_waits_and_then_is_durable(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        handle = await mount.create("file")
        mount.engine.write(handle, 0, b"x" * LARGE)
        found = await status(mount, "file")
        assert (found.state, found.durable, found.writers) == (FileState.WRITING, False, 1)
        assert (found.size_acknowledged, found.size_committed, found.version) == (LARGE, 0, 0)
        mount.namespace.files.release(handle)
        await mount.commit.wait_queued()
        found = await status(mount, "file")
        # The catalog has it, but its log is not flushed.
        assert (found.state, found.durable, found.size_durable) == (FileState.WAITING, False, 0)
        assert found.size_committed == LARGE
        await mount.catalog.make_durable()
        found = await status(mount, "file")
        assert (found.state, found.durable, found.size_durable) == (FileState.DURABLE, True, LARGE)
        assert (found.width, found.chunk_bytes, found.inline) == (2, 65536, False)


@trio.testing.trio_test
async def test_what_is_closed_and_not_drained_is_not_durable(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        await mount.write_file("file", b"old")
        await mount.commit.wait_queued()
        await mount.catalog.make_durable()
        mount.engine.hold_drains()
        await mount.write_file("file", b"new content")
        found = await status(mount, "file")
        assert (found.state, found.size_acknowledged, found.size_committed, found.size_durable) == (
            FileState.WAITING,
            11,
            3,
            0,
        )
        mount.engine.let_drains_go()
        await mount.flush()


@trio.testing.trio_test
async def test_the_committed_beginning_of_what_becomes_longer_is_durable(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        handle = await mount.create("log")
        mount.engine.write(handle, 0, b"x" * LARGE)
        inode = await mount.resolve("log")
        await mount.commit.make_durable(inode)
        found = await status(mount, "log")
        assert (found.state, found.durable, found.size_durable) == (FileState.WRITING, True, LARGE)
        mount.engine.write(handle, LARGE, b"y" * 10)
        found = await status(mount, "log")
        assert (found.durable, found.size_acknowledged, found.size_durable) == (
            False,
            LARGE + 10,
            LARGE,
        )
        mount.engine.write(handle, 0, b"z")
        assert (await status(mount, "log")).size_durable == 0
        mount.namespace.files.release(handle)
        mount.namespace.forget(inode.ino, 1)
        await mount.flush()


@trio.testing.trio_test
async def test_a_beginning_that_is_committed_and_not_flushed_is_not_durable(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        handle = await mount.create("log")
        mount.engine.write(handle, 0, b"x" * LARGE)
        inode = await mount.resolve("log")
        await mount.commit.make_current(inode)
        mount.engine.write(handle, LARGE, b"y")
        found = await status(mount, "log")
        assert (found.size_committed, found.size_durable) == (LARGE, 0)
        mount.namespace.files.release(handle)
        mount.namespace.forget(inode.ino, 1)
        await mount.flush()


@trio.testing.trio_test
async def test_what_comes_while_the_catalog_is_flushed_is_not_durable_by_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fdatasync
    began, end = threading.Event(), threading.Event()

    def held(descriptor: int) -> None:
        began.set()
        end.wait()
        flush(descriptor)

    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        await mount.make_directory("before")
        monkeypatch.setattr(os, "fdatasync", held)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.catalog.make_durable)
            await trio.to_thread.run_sync(began.wait)
            await mount.make_directory("meanwhile")
            end.set()
        assert (await status(mount, "before")).durable
        assert not (await status(mount, "meanwhile")).durable
        await mount.catalog.make_durable()
        assert (await status(mount, "meanwhile")).durable


@trio.testing.trio_test
async def test_each_version_has_a_larger_number_than_all_before_of_whatever_file(
    tmp_path: Path,
) -> None:
    seen = []
    async with rig(tmp_path) as mount:
        for name, content in (("a", b"1"), ("b", b"x" * LARGE), ("a", b"2"), ("b", b"3")):
            await mount.write_file(name, content)
            await mount.commit.wait_queued()
            seen.append((await status(mount, name)).version)
        assert seen == sorted(set(seen))
        assert 0 not in seen
        await mount.write_file("new", b"4")
        await rename(mount, "new", "a")
        seen.append((await status(mount, "a")).version)
        await mount.flush()
    async with rig(tmp_path) as mount:
        assert (await status(mount, "a")).version == seen[-1]
        await mount.write_file("c", b"5")
        await mount.commit.wait_queued()
        seen.append((await status(mount, "c")).version)
    assert seen == sorted(set(seen))


@trio.testing.trio_test
async def test_a_name_that_moves_or_whose_directory_does_is_not_durable_at_once(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        await mount.make_directory("run")
        await mount.make_directory("run/below")
        await mount.write_file("run/below/file", b"content")
        await mount.write_file("other", b"content")
        await mount.commit.wait_queued()
        await mount.catalog.make_durable()
        for path in ("run/below/file", "run", "run/below", "other"):
            assert (await status(mount, path)).durable, path
        await rename(mount, "run", "done")
        for path in ("done/below/file", "done", "done/below"):
            assert (await status(mount, path)).state is FileState.WAITING, path
        assert (await status(mount, "other")).durable
        await mount.catalog.make_durable()
        assert (await status(mount, "done/below/file")).durable
        await rename(mount, "other", "last")
        assert not (await status(mount, "last")).durable
        assert (await status(mount, "done/below/file")).durable


@trio.testing.trio_test
async def test_what_cannot_be_kept_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"old")
        await mount.commit.wait_queued()
        inode = await mount.resolve("file")
        mount.engine.fail_drains(inode.ino, errno.EIO)
        await mount.write_file("file", b"new!")
        await mount.commit.wait_queued()
        found = await status(mount, "file")
        assert (found.state, found.durable, found.size_committed) == (FileState.NOT_KEPT, False, 3)
        assert "keeps its previous version" in found.failure
        mount.engine.fail_drains(inode.ino, 0)
        mount.namespace.forget(inode.ino, 1)
        await mount.flush()
        assert (await status(mount, "file")).failure == ""


@trio.testing.trio_test
async def test_a_directory_is_waited_for_with_all_below_and_nothing_else(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        await mount.make_directory("run")
        await mount.make_directory("run/deep")
        open_elsewhere = await mount.create("elsewhere")
        mount.engine.write(open_elsewhere, 0, b"x")
        handle = await mount.create("run/deep/file")
        mount.engine.write(handle, 0, b"x" * LARGE)
        directory = await mount.resolve("run")
        failed: list[object] = []

        async def wait() -> None:
            failed.extend(await mount.commit.wait_durable_below(directory.ino))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not (await status(mount, "run/deep/file")).durable
            await mount.write_file("run/later", b"made after the question")
            mount.namespace.files.release(handle)
        assert failed == []
        assert (await status(mount, "run/deep/file")).durable
        assert (await status(mount, "elsewhere")).state is FileState.WRITING
        mount.namespace.files.release(open_elsewhere)
        mount.namespace.forget(directory.ino, 1)
        await mount.flush()


@trio.testing.trio_test
async def test_what_cannot_be_kept_below_a_directory_is_told_and_the_rest_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        await mount.make_directory("run")
        for name in ("run/bad", "run/good", "elsewhere"):
            await mount.write_file(name, b"x" * LARGE)
        bad = await mount.resolve("run/bad")
        elsewhere = await mount.resolve("elsewhere")
        for inode in (bad, elsewhere):
            mount.engine.fail_drains(inode.ino, errno.EIO)
        directory = await mount.resolve("run")
        failed = await mount.commit.wait_durable_below(directory.ino)
        assert [failure.ino for failure in failed] == [bad.ino]
        assert (await status(mount, "run/good")).durable
        for inode in (bad, elsewhere):
            mount.engine.fail_drains(inode.ino, 0)
            mount.namespace.forget(inode.ino, 1)
        mount.namespace.forget(directory.ino, 1)
        await mount.flush()


@trio.testing.trio_test
async def test_a_second_name_below_a_directory_counts(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=NEVER_S) as mount:
        await mount.make_directory("run")
        handle = await mount.create("file")
        mount.engine.write(handle, 0, b"x")
        inode, directory = await mount.resolve("file"), await mount.resolve("run")
        await mount.namespace.entries.link(inode.ino, directory.ino, b"second")
        with trio.move_on_after(0.2) as scope:
            await mount.commit.wait_durable_below(directory.ino)
        assert scope.cancelled_caught
        mount.namespace.files.release(handle)
        assert await mount.commit.wait_durable_below(directory.ino) == ()
        for each in (inode, inode, directory):
            mount.namespace.forget(each.ino, 1)
        await mount.flush()


@trio.testing.trio_test
async def test_the_map_is_told_page_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fpfs.daemon.catalog.rows.queries.SEGMENTS_PER_PAGE", 1)
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        segment_bytes = 64 * 1024 * 1024
        mount.engine.write(handle, 0, b"x" * LARGE)
        mount.engine.write(handle, segment_bytes, b"y" * LARGE)
        mount.namespace.files.release(handle)
        await mount.flush()
        inode = await mount.resolve("file")
        runs: list[FileRun] = []
        segment: int | None = 0
        while segment is not None:
            page = await mount.catalog.read(lambda t, s=segment: list_runs(t, inode.ino, s))
            join_runs(runs, page.runs)
            segment = page.next_segment
        covered = [
            (run.offset_bytes, run.size_bytes) for run in sorted(runs, key=lambda r: r.offset_bytes)
        ]
        assert sum(size for _, size in covered) == 2 * 5 * 65536
        assert all(run.checksums and run.written for run in runs)
        mount.namespace.forget(inode.ino, 1)


def test_runs_that_go_on_in_the_same_object_are_one() -> None:
    first = FileRun(offset_bytes=0, size_bytes=10, device=0, object="a", object_offset_bytes=5)
    on = FileRun(offset_bytes=10, size_bytes=4, device=0, object="a", object_offset_bytes=15)
    runs: list[FileRun] = []
    join_runs(runs, [first, on])
    joined = FileRun(offset_bytes=0, size_bytes=14, device=0, object="a", object_offset_bytes=5)
    assert runs == [joined]
    for different in (
        {"device": 1},
        {"object": "b"},
        {"checksums": False},
        {"offset_bytes": 20},
        {"object_offset_bytes": 30},
        {"written": False},
    ):
        values = {name: getattr(on, name) for name in FileRun.__struct_fields__} | different
        runs = []
        join_runs(runs, [first, FileRun(**values)])
        assert len(runs) == 2, different


MODES = st.integers(0, 0o777)
USERS = st.integers(10, 12)
OWNED = st.tuples(MODES, USERS, USERS)
"""Permission bits, user and group."""


@hypothesis.settings(
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    directories=st.lists(OWNED, min_size=1, max_size=4), uid=USERS, gids=st.sets(USERS)
)
def test_others_see_what_lies_in_directories_that_they_may_read_and_search(
    tmp_path_factory: pytest.TempPathFactory,
    directories: list[tuple[int, int, int]],
    uid: int,
    gids: set[int],
) -> None:
    asker = Asker(uid, frozenset(gids))

    def allows(owned: tuple[int, int, int], wanted: str) -> bool:
        """The permissions that a long listing shows, read as a person does."""
        mode, owner, group = owned
        shown = stat.filemode(mode)[1:]
        kind = 0 if owner == uid else 1 if group in gids else 2
        return set(wanted) <= set(shown[3 * kind : 3 * kind + 3])

    async def look() -> None:
        async with rig(tmp_path_factory.mktemp("rig")) as mount:
            path = "."
            made = []
            for number in range(len(directories)):
                path = os.path.join(path, f"d{number}")
                await mount.make_directory(path)
                await mount.write_file(f"{path}/file", b"x")
                directory, file = await mount.resolve(path), await mount.resolve(f"{path}/file")
                made.append((directory.ino, file.ino))
            for (ino, _file), owned in zip(made, directories, strict=True):
                mode, owner, group = owned
                await mount.catalog.write(
                    lambda t, values=(stat.S_IFDIR | mode, owner, group, ino): t.execute(
                        "UPDATE inodes SET mode = ?, uid = ?, gid = ? WHERE ino = ?", values
                    ).fetchone()
                )
            inos = [ino for pair in made for ino in pair]
            seen = await mount.catalog.read(lambda t: fetch_facts(t, inos, seen_by=asker))
            expected = {made[0][0]}  # the root is everybody's to read here
            for depth, (_ino, file) in enumerate(made):
                if not allows(directories[depth], "rx"):
                    searchable = allows(directories[depth], "x")
                else:
                    searchable = True
                    expected.add(file)
                    if depth + 1 < len(made):
                        expected.add(made[depth + 1][0])
                if not searchable:
                    break
            assert {facts.ino for facts in seen} == expected
            everything = await mount.catalog.read(lambda t: fetch_facts(t, inos, seen_by=None))
            assert {facts.ino for facts in everything} == set(inos)

    trio.run(look)
