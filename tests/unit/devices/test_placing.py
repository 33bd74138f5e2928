"""Files follow the policies of their directories, over the memory engine."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import trio.testing

from fpfs.core.engine import Flow
from fpfs.core.layout import runs_of_file
from fpfs.core.placement import decode_layout
from fpfs.core.policy import Acknowledge, Policy
from fpfs.core.protocol.questions import PolicyChange
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.rows.extents import fetch_content
from tests.support.catalog.rig import LARGE, ROOT, Rig, rig
from tests.support.seeds import chosen_seed

BLOCK = 65536


async def set_policy(mount: Rig, path: str, **values: str) -> None:
    """Set what holds in a directory and below."""
    directory = await mount.resolve(path)
    await mount.policies.change(directory.ino, PolicyChange(values=values))
    mount.namespace.forget(directory.ino, 1)


async def devices_of(mount: Rig, path: str) -> list[int]:
    """The devices of a committed file's blocks, in order."""
    await mount.commit.wait_queued()
    inode = await mount.resolve(path)
    content = await mount.catalog.read(lambda t: fetch_content(t, inode.ino))
    mount.namespace.forget(inode.ino, 1)
    runs = runs_of_file(blob for _index, blob in content.segments)
    return [run.device for run in runs for _ in range(run.count)]


@trio.testing.trio_test
async def test_a_new_version_follows_the_policy_and_the_one_before_stays(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.make_directory("run")
        await mount.write_file("run/file", bytes(LARGE))
        before = await devices_of(mount, "run/file")
        assert sorted(set(before)) == [0, 1]
        await set_policy(mount, "run", devices="slow")
        assert await devices_of(mount, "run/file") == before
        await mount.write_file("run/file", b"x" * LARGE)
        assert await devices_of(mount, "run/file") == [1] * 5
        assert await mount.read_file("run/file") == b"x" * LARGE
        await mount.write_file("run/other", bytes(LARGE))
        assert await devices_of(mount, "run/other") == [1] * 5
        await mount.write_file("elsewhere", bytes(LARGE))
        assert sorted(set(await devices_of(mount, "elsewhere"))) == [0, 1]


@trio.testing.trio_test
async def test_what_is_added_to_a_file_follows_the_policy_too(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("log", b"a" * 4 * BLOCK)
        before = await devices_of(mount, "log")
        await set_policy(mount, ".", devices="fast", chunk="128K")
        handle = await mount.open("log", flags=os.O_WRONLY | os.O_APPEND)
        mount.engine.write(handle, 4 * BLOCK, b"b" * 4 * BLOCK)
        mount.namespace.files.release(handle)
        assert await devices_of(mount, "log") == [*before, 0, 0, 0, 0]
        assert await mount.read_file("log") == b"a" * 4 * BLOCK + b"b" * 4 * BLOCK


@trio.testing.trio_test
async def test_a_second_writer_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        first = await mount.create("file")
        mount.engine.write(first, 0, bytes(2 * BLOCK))
        await set_policy(mount, ".", devices="fast")
        second = await mount.open("file", flags=os.O_RDWR)
        assert "place" not in mount.call_names()
        for handle in (first, second):
            mount.namespace.files.release(handle)
        assert sorted(await devices_of(mount, "file")) == [0, 1]


@trio.testing.trio_test
async def test_the_catalog_has_a_layout_before_anybody_can_write_by_it(tmp_path: Path) -> None:
    """Who takes over reads staged chunks by the layout in the catalog."""
    async with rig(tmp_path) as mount:
        await mount.write_file("file", bytes(LARGE))
        await set_policy(mount, ".", devices="slow", chunk="256K")
        await mount.open("file", flags=os.O_RDWR | os.O_TRUNC)
    async with rig(tmp_path) as mount:
        inode = await mount.resolve("file")
        layout = decode_layout(inode.layout)
        assert (layout.devices, layout.chunk_bytes) == ((1,), 4 * BLOCK)


@trio.testing.trio_test
async def test_a_catalog_without_room_leaves_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with rig(tmp_path) as mount:
        await mount.write_file("file", bytes(LARGE))
        before = await devices_of(mount, "file")
        await set_policy(mount, ".", devices="slow")
        monkeypatch.setattr("fpfs.daemon.inodes.layout_policy.store_layout", refuse)
        await mount.write_file("file", bytes(LARGE))
        assert await devices_of(mount, "file") == before


@trio.testing.trio_test
async def test_how_a_file_is_written_and_read_is_told_to_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await set_policy(
            mount, ".", ack="close", depth="3", buffers="2", reads="direct", readahead="2M"
        )
        handle = await mount.create("file")
        inode = await mount.resolve("file")
        assert mount.engine.flow(inode.ino) == Flow("close", 3, 2, False, 2 * 1024 * 1024)
        assert inode.ack is Acknowledge.CLOSE
        mount.namespace.files.release(handle)
        await mount.policies.change(
            ROOT, PolicyChange(unset=("ack", "depth", "buffers", "reads", "readahead"))
        )
        await mount.open("file", flags=os.O_RDONLY)
        assert mount.engine.flow(inode.ino) == Flow()
        assert inode.ack is Acknowledge.EARLY


@trio.testing.trio_test
async def test_all_or_nothing_names_differ_by_directory(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.make_directory("run")
        await set_policy(mount, "run", whole="*.mine")
        for path, unfinished in (
            ("run/a.mine", True),
            ("run/a.pt", False),
            ("a.mine", False),
            ("a.pt", True),
        ):
            await mount.create(path)
            assert (await mount.resolve(path)).unfinished is unfinished, path


@trio.testing.trio_test
async def test_what_does_not_fit_below_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.make_directory("run")
        await set_policy(mount, "run", width="2")
        with pytest.raises(Refused, match="/run is below, and there width cannot be 2"):
            await set_policy(mount, ".", devices="fast", versions="1")
        policy = await mount.policies.of_directory(ROOT)
        assert policy == mount.policies.defaults
        with pytest.raises(Refused, match="devices cannot be 'none'"):
            await set_policy(mount, "run", devices="none")
        with pytest.raises(Refused, match="there is no setting 'colour'"):
            await set_policy(mount, "run", colour="red")
        await set_policy(mount, "run", width="1")
        await set_policy(mount, ".", devices="fast")


@trio.testing.trio_test
async def test_settings_that_a_damaged_catalog_has_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path) as mount:
        await set_policy(mount, ".", versions="3")
        await mount.catalog.write(
            lambda t: t.execute("INSERT INTO policies VALUES (1, 'width', 'huge')")
        )
    async with rig(tmp_path) as mount:
        assert (await mount.policies.of_directory(ROOT)).versions == 3
        assert "width cannot be 'huge'" in caplog.text


SETTINGS = {
    "width": ["all", "1", "2"],
    "versions": ["0", "1", "7"],
    "ack": ["early", "close", "durable"],
    "chunk": ["128K", "1M", "4M"],
    "replace": ["whole", "inplace"],
}


def model_of(path: str, settings: dict[str, dict[str, str]], defaults: Policy) -> Policy:
    """What holds at a path: for each key the setting of the nearest directory above."""
    values = {}
    for key in SETTINGS:
        for above in (Path(path), *Path(path).parents):
            if key in settings.get(str(above), {}):
                values[key] = settings[str(above)][key]
                break
    return defaults.with_settings([values])


@trio.testing.trio_test
async def test_random_trees_have_the_policies_of_a_model(tmp_path: Path) -> None:
    seed = chosen_seed()
    chance = random.Random(seed)
    async with rig(tmp_path) as mount:
        folders = ["."]
        settings: dict[str, dict[str, str]] = {}
        for step in range(300):
            path = chance.choice(folders)
            directory = await mount.resolve(path)
            match chance.randrange(5):
                case 0 if len(folders) < 40:
                    made = str(Path(path) / f"d{step}")
                    await mount.make_directory(made)
                    folders.append(made)
                case 1:
                    gone = tuple(chance.sample(list(SETTINGS), 2))
                    await mount.policies.change(directory.ino, PolicyChange(unset=gone))
                    for key in gone:
                        settings.get(path, {}).pop(key, None)
                case 2:
                    await mount.create(str(Path(path) / f"f{step}"))
                    inode = await mount.resolve(str(Path(path) / f"f{step}"))
                    wanted = model_of(path, settings, mount.policies.defaults)
                    assert (await mount.policies.of_file(inode.ino)).policy == wanted, f"{seed}"
                    layout = decode_layout(inode.layout)
                    assert layout.chunk_bytes == wanted.chunk_bytes, f"seed {seed}"
                    assert len(layout.devices) == (wanted.width or 2), f"seed {seed}"
                    assert inode.ack is wanted.ack, f"seed {seed}"
                case _:
                    values = {
                        key: chance.choice(SETTINGS[key])
                        for key in chance.sample(list(SETTINGS), 2)
                    }
                    await mount.policies.change(directory.ino, PolicyChange(values=values))
                    settings.setdefault(path, {}).update(values)
            mount.namespace.forget(directory.ino, 1)
        for path in folders:
            directory = await mount.resolve(path)
            found = await mount.policies.of_directory(directory.ino)
            assert found == model_of(path, settings, mount.policies.defaults), f"seed {seed}"
