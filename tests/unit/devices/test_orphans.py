"""Orphans: only what nobody refers to is removed, and only where a server died."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio.testing

from fpfs.core.engine import DeviceConfig, EngineConfig, ObjectId
from fpfs.core.native_engine import NativeEngine
from fpfs.daemon.catalog.database import Catalog
from fpfs.daemon.catalog.schema import flush_directory, row_crc
from fpfs.daemon.devices.opened_set import DeviceDirectory
from fpfs.daemon.maintenance.orphan_objects import collect
from tests.support.catalog.rig import LARGE, rig

OLD = 3 << 32
"""Ids of a server before this one."""


def make_object(device: DeviceDirectory, id_: int) -> Path:
    """An object's file."""
    path = Path(device.objects_path, f"{id_ & 0xFF:02x}", f"{id_:016x}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def make_objects_and_others(device: DeviceDirectory) -> None:
    """Objects of a server before, of this one and a later one, and files that are none."""
    for id_ in (OLD + 1, OLD + 2, OLD + 3, 4 << 32, 5 << 32):
        make_object(device, id_)
    make_object(device, OLD + 2).with_name("notes.txt").touch()
    make_object(device, OLD + 2).with_name("5").touch()  # a number, but no object's name
    Path(device.objects_path, "file").touch()


@trio.testing.trio_test
async def test_objects_that_nobody_refers_to_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceDirectory(0, str(tmp_path), "a")
    async with rig(tmp_path) as mount:

        def flush_and_note(path: Path) -> None:
            flush_directory(path)
            mount.engine.calls.append(("flush", path.name))

        monkeypatch.setattr(
            "fpfs.daemon.maintenance.orphan_objects.flush_directory", flush_and_note
        )
        mount.catalog.object_base = 4
        await mount.catalog.write(
            lambda t: t.execute(
                "INSERT INTO objects (device, id, ino, crc) VALUES (0, ?, 7, ?)",
                (OLD + 1, row_crc(0, OLD + 1, 7)),
            )
        )
        await mount.write_file("file", bytes(LARGE))
        make_objects_and_others(device)
        count = await collect(catalog=mount.catalog, engine=mount.engine, devices=[device])
        assert count == 2
        removed = [call for call in mount.engine.calls if call[0] == "remove_objects"]
        assert removed == [("remove_objects", (ObjectId(0, OLD + 2), ObjectId(0, OLD + 3)))]
        since = mount.engine.calls[mount.engine.calls.index(removed[0]) :]
        flushed = {call[1] for call in since if call[0] == "flush"}
        folders = {f"{id_ & 0xFF:02x}" for id_ in (OLD, OLD + 1, OLD + 2, OLD + 3)}
        assert flushed == folders, "they may come back"


@trio.testing.trio_test
async def test_what_an_open_file_holds_stays(tmp_path: Path) -> None:
    device = DeviceDirectory(0, str(tmp_path), "a")
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        mount.engine.write(handle, 0, bytes(LARGE))
        inode = await mount.resolve("file")
        await mount.engine.drain(inode.ino, last=False)
        held = [key for key in mount.engine.held_objects() if key.device == 0]
        assert held
        for key in held:
            make_object(device, key.id)
        mount.catalog.object_base += 1
        assert await collect(catalog=mount.catalog, engine=mount.engine, devices=[device]) == 0


@trio.testing.trio_test
async def test_an_end_waits_for_the_objects_that_are_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DeviceDirectory(0, str(tmp_path), "a")
    monkeypatch.setattr("fpfs.daemon.maintenance.orphan_objects.BATCH", 2)
    async with rig(tmp_path) as mount:
        mount.catalog.object_base = 4
        for id_ in range(OLD, OLD + 4):
            make_object(device, id_)
        remove_objects = mount.engine.remove_objects
        with trio.CancelScope() as end:

            async def end_and_remove(objects: Sequence[ObjectId]) -> None:
                end.cancel()
                await remove_objects(objects)

            monkeypatch.setattr(mount.engine, "remove_objects", end_and_remove)
            await collect(catalog=mount.catalog, engine=mount.engine, devices=[device])
        assert end.cancelled_caught
        removed = [call for call in mount.engine.calls if call[0] == "remove_objects"]
        assert removed == [("remove_objects", (ObjectId(0, OLD), ObjectId(0, OLD + 1)))]


@trio.testing.trio_test
async def test_a_device_that_fails_keeps_none_of_the_others_from_being_collected(
    tmp_path: Path,
) -> None:
    devices = [DeviceDirectory(n, str(tmp_path / str(n)), str(n)) for n in range(2)]
    async with rig(tmp_path) as mount:
        mount.catalog.object_base = 4
        make_object(devices[1], OLD)
        with pytest.raises(FileNotFoundError, match=devices[0].objects_path):
            await collect(catalog=mount.catalog, engine=mount.engine, devices=devices)
        removed = [call for call in mount.engine.calls if call[0] == "remove_objects"]
        assert removed == [("remove_objects", (ObjectId(1, OLD),))]


@trio.testing.trio_test
async def test_an_engine_closes_while_it_removes_what_nobody_waits_for(tmp_path: Path) -> None:
    device = DeviceDirectory(0, str(tmp_path), "a")
    paths = [make_object(device, id_) for id_ in range(OLD, OLD + 2000)]
    config = EngineConfig(
        devices=(DeviceConfig(number=0, path=device.objects_path),),
        arena_path=str(tmp_path / "arena"),
        filesystem_id="test",
        staging_bytes=16 * 1024 * 1024,
        object_base=4,
    )
    async with trio.open_nursery() as nursery:
        engine = NativeEngine(config)
        nursery.start_soon(engine.run)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as waiting:
                ids = [ObjectId(0, id_) for id_ in range(OLD, OLD + 2000)]
                waiting.start_soon(engine.remove_objects, ids)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        await trio.to_thread.run_sync(engine.close)
    assert not any(path.exists() for path in paths)


def test_only_a_clean_end_is_noted_as_one(tmp_path: Path) -> None:
    seen = []

    async def open_and_end(*, cleanly: bool, collected: bool = False) -> None:
        catalog = Catalog.open(tmp_path / "catalog.db")
        seen.append(catalog.ended_cleanly)
        if collected:
            catalog.ended_cleanly = True
        if cleanly:
            await catalog.close()
        else:
            # A process that dies leaves its transactions in the log and nothing else.
            catalog._worker.stop()

    async def run() -> None:
        async with rig(tmp_path):
            pass
        for cleanly in (True, False, False, True):
            await open_and_end(cleanly=cleanly)
        # The last one ended before it had collected what the dead ones left.
        await open_and_end(cleanly=True, collected=True)
        await open_and_end(cleanly=True)

    trio.run(run)
    assert seen == [True, True, False, False, False, True]
