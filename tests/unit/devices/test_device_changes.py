"""Devices that come and go: whatever ends it in the middle, a mount has them, or has not."""

from __future__ import annotations

import os
import shutil
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from fpfs.core.device_names import TagChange
from fpfs.core.engine import EngineConfig, ObjectId, Range
from fpfs.core.errors import BusyFile, InvalidOperation, NoSpace, NoSuchEntry
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.database import Catalog
from fpfs.daemon.catalog.executor import Transaction
from fpfs.daemon.catalog.rows.devices import fetch_devices
from fpfs.daemon.catalog.rows.extents import record_removals
from fpfs.daemon.catalog.rows.relocation import usage_of
from fpfs.daemon.devices import attach, opened_set
from fpfs.daemon.devices.directory import open_devices
from fpfs.daemon.devices.label import read_stamp
from fpfs.daemon.devices.opened_set import DeviceSet
from fpfs.daemon.maintenance.membership import DeviceChanges
from fpfs.daemon.mount import server
from fpfs.daemon.mount.startup import check_identity, open_catalog
from fpfs.testing.memory_engine import MemoryDevices, MemoryEngine

MOUNTPOINT = "/nonexistent/mount"


class Link:
    """A keeper that holds locks."""

    keeper_pid = 1

    def __init__(self, devices: DeviceSet) -> None:
        self.held = [device.lock_path for device in devices.devices]

    def hold_lock(self, lock_fd: int) -> None:
        """Note the file."""
        self.held.append(os.readlink(f"/proc/self/fd/{lock_fd}"))

    def release_lock(self, lock: str) -> None:
        """Forget the file."""
        self.held.remove(lock)


class Crash(BaseException):
    """The process ends here."""


class Opened:
    """What a server has, as far as it matters to its devices."""

    def __init__(self, devices: DeviceSet, catalog: Catalog) -> None:
        config = EngineConfig(devices=(), arena_path="", filesystem_id="", staging_bytes=0)
        self.devices = devices
        self.catalog = catalog
        self.engine = MemoryEngine(config, devices=MemoryDevices())
        self.link = Link(devices)
        self.changes = DeviceChanges(
            MOUNTPOINT,
            devices,
            catalog=catalog,
            engine=self.engine,
            link=self.link,  # type: ignore[arg-type]
        )

    @property
    def numbers(self) -> list[int]:
        """The devices that new files use."""
        return list(self.changes.registry.usable)


@asynccontextmanager
async def opened(
    folders: Sequence[Path], *, adopt: bool = False, degraded: bool = False
) -> AsyncIterator[Opened]:
    """Open device directories as a mount does. Raises `Refused`."""
    paths = [str(folder) for folder in folders]
    with open_devices(
        paths, mountpoint="", asked="mount", adopt=adopt, degraded=degraded
    ) as devices:
        catalog = await trio.to_thread.run_sync(open_catalog, devices)
        try:
            link: Any = Link(devices)
            await server.reconcile_devices(
                devices, catalog, link, is_degraded=degraded, asked="mount"
            )
            check_identity(catalog, devices)
            made = Opened(devices, catalog)
            await made.changes.ensure_copies()
            yield made
        finally:
            await catalog.close()


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Four empty directories."""
    made = [tmp_path / "now" / name for name in "abcd"]
    for folder in made:
        folder.mkdir(parents=True)
    return made


def empty(folders: Sequence[Path]) -> None:
    """Begin again with empty directories."""
    for folder in folders:
        shutil.rmtree(folder)
        folder.mkdir()


def holds_catalog(folder: Path) -> bool:
    """Whether its stamp says that there is a copy of the catalog."""
    stamp = read_stamp(str(folder), asked="test")
    assert stamp is not None
    return stamp.device_number in stamp.catalog_devices


@trio.testing.trio_test
async def test_a_device_is_added_and_known_to_the_next_mount(folders: list[Path]) -> None:
    async with opened(folders[:1]) as now:
        for number, folder in enumerate(folders[1:3], start=1):
            added = await now.changes.add(str(folder))
            assert (added.number, added.path) == (number, str(folder))
            assert now.numbers == list(range(number + 1))
            assert now.link.held[-1] == str(folder / "lock")
        assert now.engine.calls == [
            ("set_draining", 0, False),
            ("add_device", 1, True),
            ("set_draining", 1, False),
            ("add_device", 2, True),
            ("set_draining", 2, False),
        ]
        assert [copy.trouble for copy in now.catalog.copies()] == ["", ""]
    assert [holds_catalog(folder) for folder in folders[:3]] == [True, True, False]
    async with opened(folders[:3]) as now:
        assert now.numbers == [0, 1, 2]
    with pytest.raises(Refused, match=r"of 3 devices, device 2 \(last at .*/c\) is missing"):
        async with opened(folders[:2]):
            pass


@trio.testing.trio_test
async def test_what_cannot_become_a_device(folders: list[Path], tmp_path: Path) -> None:
    async with opened(folders[2:3]):
        pass
    (folders[1] / "thesis").touch()
    async with opened(folders[:1]) as now:
        for path, said in {
            folders[0]: "is device 0 already; name an empty",
            folders[0] / "objects": "lie within each other",
            folders[1]: r"is not empty \(thesis is in it\)",
            folders[2]: "belongs to filesystem ",
            tmp_path / "none": "does not exist",
            Path("/"): "lie within each other",
        }.items():
            with pytest.raises(InvalidOperation, match=said):
                await now.changes.add(str(path))
        assert now.link.held == [str(folders[0] / "lock")]
        assert now.numbers == [0]
        assert sorted(os.listdir(folders[1])) == ["thesis"]
        with (
            open_devices([str(folders[3])], mountpoint="", asked="mount"),
            pytest.raises(InvalidOperation, match="belongs to filesystem "),
        ):
            await now.changes.add(str(folders[3]))


@trio.testing.trio_test
async def test_a_directory_that_could_not_be_added_is_empty_again(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(folders[:1]) as now:

        async def refuse(*_: object, **__: object) -> None:
            raise NoSpace("the catalog's device is full")

        with monkeypatch.context() as patched:
            patched.setattr(Catalog, "write", refuse)
            with pytest.raises(NoSpace):
                await now.changes.add(str(folders[1]))
        assert os.listdir(folders[1]) == ["lock"]
        assert now.link.held == [str(folders[0] / "lock")]
        assert now.engine.calls[-1] == ("remove_device", 1)
        assert (await now.changes.add(str(folders[1]))).number == 1
    async with opened(folders[:2]) as now:
        assert now.numbers == [0, 1]


class Steps:
    """Ends the process before, or after, one of the steps that leave something behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, end_at: int, after: bool) -> None:
        self.seen = 0
        self._end_at = end_at
        self._after = after
        self.ended = Crash
        for owner, name in (
            (attach, "write_stamp"),
            (opened_set, "write_stamp"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        # For what the module removes alone: the catalog's thread removes files, too.
        own_os = types.SimpleNamespace(**vars(os))
        own_os.unlink, own_os.rmdir = self._counted(os.unlink), self._counted(os.rmdir)
        monkeypatch.setattr(attach, "os", own_os)
        for owner, name in (
            (MemoryEngine, "add_device"),
            (MemoryEngine, "remove_device"),
            (Catalog, "write"),
            (Catalog, "make_durable"),
            (Catalog, "move_copies"),
        ):
            monkeypatch.setattr(owner, name, self._counted_async(getattr(owner, name)))

    def _step(self) -> bool:
        self.seen += 1
        return self.seen - 1 == self._end_at

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            is_last = self._step()
            if is_last and not self._after:
                raise Crash
            result = function(*arguments, **named)
            if is_last:
                raise Crash
            return result

        return call

    def _counted_async(
        self, function: Callable[..., Awaitable[Any]]
    ) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            is_last = self._step()
            if is_last and not self._after:
                raise Crash
            result = await function(*arguments, **named)
            if is_last:
                raise Crash
            return result

        return call


async def end_in_the_middle(
    folders: Sequence[Path], monkeypatch: pytest.MonkeyPatch, *, end_at: int, after: bool
) -> tuple[list[Path], bool]:
    """Add the last folder, and end at a step; returns what is left then, and whether it ended."""
    left = [folder.parent.parent / f"left{end_at}{after}" / folder.name for folder in folders]
    ended = False
    async with opened(folders[:-1]) as now:
        with monkeypatch.context() as patched:
            Steps(patched, end_at=end_at, after=after)
            try:
                await now.changes.add(str(folders[-1]))
            except Crash:
                ended = True
        for folder, copy in zip(folders, left, strict=True):
            shutil.copytree(folder, copy)
    return left, ended


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("after", [False, True])
@trio.testing.trio_test
async def test_whatever_ends_it_the_next_mount_has_it_or_has_it_not(
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    after: bool,
) -> None:
    outcomes = []
    ended = True
    while ended:
        empty(folders)
        left, ended = await end_in_the_middle(
            folders[: count + 1], monkeypatch, end_at=len(outcomes), after=after
        )
        is_stamped = (left[-1] / "fpfs.json").exists()
        async with opened(left if is_stamped else left[:-1], adopt=True) as now:
            has_it = now.numbers == list(range(count + 1))
            outcomes.append(has_it)
            if not has_it:
                assert now.numbers == list(range(count))
                assert not is_stamped or "was not added" in now.devices.notes[-1]
                assert (await now.changes.add(str(left[-1]))).number == count
            assert len(await now.catalog.read(fetch_devices)) == count + 1
            assert len(now.catalog.copies()) == 2
        async with opened(left) as now:
            assert now.numbers == list(range(count + 1))
        assert [holds_catalog(folder) for folder in left[:2]] == [True, True]
    # Once it has come so far that the next mount has it, each later end leaves it so.
    assert outcomes == sorted(outcomes)
    assert len(outcomes) > 6


@trio.testing.trio_test
async def test_without_the_directory_the_mount_works_as_long_as_it_was_not_added(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    ended = True
    while ended:
        empty(folders)
        left, ended = await end_in_the_middle(
            folders[:3], monkeypatch, end_at=len(said), after=True
        )
        try:
            async with opened(left[:2], adopt=True) as now:
                assert now.numbers == [0, 1]
                said.append("")
        except Refused as refused:
            said.append(str(refused))
    missing = [text for text in said if text]
    assert said == ["" for _ in range(len(said) - len(missing))] + missing
    assert 0 < len(missing) < len(said)
    assert all("device 2 (last at " in text and "is missing" in text for text in missing)


def devices_of(opened: Opened) -> list[int]:
    """All devices, those that drain, too."""
    return [member.number for member in opened.changes.registry.members]


@trio.testing.trio_test
async def test_a_device_is_removed_with_its_copy_of_the_catalog(folders: list[Path]) -> None:
    async with opened(folders[:3]) as now:
        with pytest.raises(InvalidOperation, match=r"device 0 \(.*/a\) is in use"):
            await now.changes.remove("0")
        await now.changes.registry.tag(0, TagChange(("old",), ()))
        await now.changes.drain("0")
        removed = await now.changes.remove(str(folders[0]))
        assert now.changes.registry.records[0].tags == frozenset()
        assert (removed.number, removed.path, removed.is_empty) == (0, str(folders[0]), True)
        assert os.listdir(folders[0]) == ["lock"]
        assert now.link.held == [str(folder / "lock") for folder in folders[1:3]]
        assert devices_of(now) == [1, 2]
        assert now.engine.calls[-1] == ("remove_device", 0)
        assert [copy.trouble for copy in now.catalog.copies()] == ["", ""]
        with pytest.raises(NoSuchEntry, match="device 0 was removed"):
            await now.changes.remove("0")
        # Nobody keeps others off it any more, and it is a device with another number then.
        assert (await now.changes.add(str(folders[0]))).number == 3
        assert now.numbers == [1, 2, 3]
    async with opened([*folders[1:3], folders[0]]) as now:
        assert now.numbers == [1, 2, 3]


@trio.testing.trio_test
async def test_a_drain_is_taken_back(folders: list[Path]) -> None:
    async with opened(folders[:2]) as now:
        await now.changes.drain("0")
        assert now.numbers == [1]
        assert [holds_catalog(folder) for folder in folders[:2]] == [False, True]
        for _ in range(2):
            assert (await now.changes.keep("0")).number == 0
            assert now.numbers == [0, 1]
            assert [holds_catalog(folder) for folder in folders[:2]] == [True, True]
        assert now.engine.calls[-1] == ("set_draining", 0, False)
    async with opened(folders[:2]) as now:
        assert now.numbers == [0, 1]


@trio.testing.trio_test
async def test_what_is_used_is_not_removed(folders: list[Path]) -> None:
    place = ObjectId(0, 77)
    async with opened(folders[:2]) as now:
        await now.changes.drain("0")

        def use(transaction: Transaction) -> None:
            transaction.execute(
                "INSERT INTO objects (device, id, ino, crc) VALUES (?, ?, ?, 0)", (*place, 5)
            )

        def give_back(transaction: Transaction) -> None:
            transaction.execute("DELETE FROM objects")
            record_removals(transaction, [Range(*place, 0, 0)])

        await now.catalog.write(use)
        with pytest.raises(BusyFile, match="holds contents of files"):
            await now.changes.remove("0")
        await now.catalog.write(give_back)
        with pytest.raises(BusyFile, match="still being given back"):
            await now.changes.remove("0")
        assert devices_of(now) == [0, 1]
        assert (folders[0] / "fpfs.json").exists()
    shutil.rmtree(folders[0])
    async with opened(folders[1:2], degraded=True) as now:
        # What was removed on a device that is lost nobody can give back.
        assert not (await now.changes.remove("0")).is_empty
        assert ("remove_device", 0) not in now.engine.calls
        assert now.devices.numbers == (1,)
    async with opened(folders[1:2]) as now:
        assert (now.numbers, devices_of(now)) == ([1], [1])
        assert not any(await now.catalog.read(lambda t: usage_of(t, 0)))


@trio.testing.trio_test
async def test_what_has_content_is_not_emptied_away(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(folders[:2]) as now:
        await now.changes.drain("1")
        folder = folders[1] / "objects" / "00"
        folder.mkdir()
        (folder / "0000000000000000").touch()
        (folder / "0000000000000001").write_text("thesis")
        assert not (await now.changes.remove("1")).is_empty
        assert (folder / "0000000000000001").read_text() == "thesis"
    assert "0000000000000001 is not empty" in caplog.text
    async with opened(folders[:2], adopt=True) as now:
        assert devices_of(now) == [0]
        assert "it was removed, and can be emptied" in now.devices.notes[-1]
    async with opened(folders[:1]) as now:
        assert devices_of(now) == [0]


async def end_removal_in_the_middle(
    folders: Sequence[Path], monkeypatch: pytest.MonkeyPatch, *, end_at: int, after: bool
) -> tuple[list[Path], bool]:
    """Remove the first folder, and end at a step; returns what is left, and whether it ended."""
    left = [folder.parent.parent / f"left{end_at}{after}" / folder.name for folder in folders]
    ended = False
    async with opened(folders) as now:
        with monkeypatch.context() as patched:
            # From before it is drained: the catalog leaves it in steps, too.
            Steps(patched, end_at=end_at, after=after)
            try:
                await now.changes.drain("0")
                await now.changes.remove("0")
            except Crash:
                ended = True
        for folder, copy in zip(folders, left, strict=True):
            shutil.copytree(folder, copy)
    return left, ended


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("after", [False, True])
@trio.testing.trio_test
async def test_whatever_ends_a_removal_the_next_mount_has_it_or_has_it_not(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, count: int, after: bool
) -> None:
    outcomes = []
    ended = True
    while ended:
        empty(folders)
        left, ended = await end_removal_in_the_middle(
            folders[:count], monkeypatch, end_at=len(outcomes), after=after
        )
        twin = [folder.parent / f"twin-{folder.name}" for folder in left]
        for folder, copy in zip(left, twin, strict=True):
            shutil.copytree(folder, copy)
        is_stamped = (left[0] / "fpfs.json").exists()
        async with opened(left if is_stamped else left[1:], adopt=True) as now:
            has_it = devices_of(now) != list(range(1, count))
            outcomes.append(has_it)
            if has_it:
                assert devices_of(now) == list(range(count))
                await now.changes.drain("0")
                assert (await now.changes.remove("0")).is_empty
            else:
                assert not is_stamped or "it was removed" in now.devices.notes[-1]
            assert len(await now.catalog.read(fetch_devices)) == count
            assert len(now.catalog.copies()) == min(2, count - 1)
        async with opened(left[1:]) as now:
            assert now.numbers == list(range(1, count))
            assert now.devices.next_number == count
        # Without its directory, as if it was gone: at worst it has to be said that it may be.
        async with opened(twin[1:], adopt=True, degraded=True) as now:
            assert devices_of(now) == list(range(count)) if has_it else list(range(1, count))
            if has_it:
                await now.changes.remove("0")
        async with opened(twin[1:]) as now:
            assert now.numbers == list(range(1, count))
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[0]
    assert not outcomes[-1]
    assert len(outcomes) > 8
