"""What is taken over after a content was quarantined, when the arena was not told any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import trio.testing

from fpfs.core.engine import Left, LeftChanges, Part
from fpfs.core.protocol.questions import PolicyChange
from fpfs.daemon.catalog.rows.quarantine import list_noted, list_quarantined
from fpfs.daemon.commit.pipeline import Commit
from fpfs.daemon.commit.quarantine import ABANDONED
from fpfs.daemon.inodes.table import Inode
from fpfs.testing.memory_engine import MemoryDevices, MemoryEngine
from tests.support.catalog.rig import LARGE, ROOT, Rig, rig

NOTED = 77
"""What the memory engine, which has no arena, is made to have noted."""

GOOD, TORN = b"good" * LARGE, b"torn" * LARGE


async def quarantine(mount: Rig) -> int:
    """Let a writer be killed in the middle; returns the inode that it wrote to."""
    await mount.write_file("step.pt", GOOD)
    await mount.commit.flush_all()
    handle = await mount.open("step.pt", flags=os.O_WRONLY | os.O_TRUNC)
    mount.engine.write(handle, 0, TORN)
    mount.engine.kernel_releases(handle, killed_by=signal.SIGKILL)
    mount.namespace.catch_up()
    await mount.commit.flush_all()
    assert await mount.read_file("step.pt") == GOOD
    return (await mount.resolve("step.pt")).ino


class Arena(MemoryEngine):
    """An engine that finds changes of an inode, and says what becomes of them."""

    changed: Sequence[LeftChanges] = ()
    suspects: frozenset[int] = frozenset()
    all_suspect = False

    def left(self) -> Left:
        """What the arena still has."""
        handles = list(self.devices.handles.values())
        return Left(handles, self.changed, self.suspects, self.all_suspect)

    def spoil(self, ino: int) -> None:
        """Note it."""
        self.calls.append(("spoil", ino))

    async def recover(self, ino: int, *, trim: bool) -> None:
        """Note it."""
        self.calls.append(("recover", ino, trim))

    def abandon(self, ino: int) -> None:
        """Note it."""
        self.calls.append(("abandon", ino))


@pytest.mark.parametrize(
    ("sequence", "what"), [(NOTED - 1, "abandon"), (NOTED, "abandon"), (NOTED + 1, "recover")]
)
@pytest.mark.parametrize("is_successor", [False, True])
@trio.testing.trio_test
async def test_what_was_quarantined_is_not_taken_over_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sequence: int,
    what: str,
    is_successor: bool,
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        ino = await quarantine(mount)
        await mount.catalog.write(lambda t: t.execute("UPDATE partials SET noted = ?", (NOTED,)))
    monkeypatch.setattr("tests.support.catalog.rig.MemoryEngine", Arena)
    monkeypatch.setattr(Arena, "changed", [LeftChanges(ino, sequence, signal.SIGKILL)])
    async with rig(tmp_path, devices=devices, is_successor=is_successor) as mount:
        assert [call[:2] for call in mount.engine.calls if call[0] in ("abandon", "recover")] == [
            (what, ino)
        ]
        assert await mount.catalog.read(list_noted) == {}
        (save,) = await mount.catalog.read(list_quarantined)
        assert (save.path, save.size) == (b"step.pt", len(TORN))
        assert await mount.read_file("step.pt") == GOOD


@pytest.mark.parametrize("is_certain", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@trio.testing.trio_test
async def test_changes_that_may_not_be_whole_are_given_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_certain: bool,
    is_open: bool,
) -> None:
    """Those of other inodes are taken over where it is certain whose record was damaged."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        for name in ("step", "other"):
            await mount.write_file(name, GOOD)
        await mount.commit.flush_all()
        ino, other = [(await mount.resolve(name)).ino for name in ("step", "other")]
        if is_open:
            await mount.open("step", flags=os.O_WRONLY)
    monkeypatch.setattr("tests.support.catalog.rig.MemoryEngine", Arena)
    monkeypatch.setattr(Arena, "changed", [LeftChanges(ino, 5, 0), LeftChanges(other, 6, 0)])
    monkeypatch.setattr(Arena, "suspects", frozenset({ino}))
    monkeypatch.setattr(Arena, "all_suspect", not is_certain)
    async with rig(tmp_path, devices=devices, is_successor=True) as mount:
        done = [call[:2] for call in mount.engine.calls]
        assert ("abandon", ino) in done
        assert (("recover", other) in done) == is_certain
        assert (("spoil", ino) in done) == is_open
        assert (f"inode {ino} (step): what was written and not committed is lost") in caplog.text
        assert (f"inode {other} (other): " in caplog.text) != is_certain
        assert await mount.read_file("step") == GOOD


@trio.testing.trio_test
async def test_who_shares_an_object_of_another_trims_it_no_more_than_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind the last block that one of them refers to may be the other's."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await mount.policies.change(ROOT, PolicyChange(values={"versions": "2"}))
        for content in (GOOD, TORN):
            await mount.write_file("step", content)
            await mount.commit.flush_all()
        await mount.versions.restore(ROOT, b"step", 1, groups=mount.groups)
        await mount.commit.flush_all()
        (ino,) = await mount.catalog.read(
            lambda t: t.execute("SELECT ino FROM names WHERE name = x'73746570'").fetchone()
        )
        (owned,) = await mount.catalog.read(
            lambda t: t.execute("SELECT count(*) FROM objects WHERE ino = ?", (ino,)).fetchone()
        )
        assert owned == 0
    monkeypatch.setattr("tests.support.catalog.rig.MemoryEngine", Arena)
    monkeypatch.setattr(Arena, "changed", [LeftChanges(ino, 5, 0)])
    async with rig(tmp_path, devices=devices, is_successor=True) as mount:
        assert [call for call in mount.engine.calls if call[0] == "recover"] == [
            ("recover", ino, False)
        ]


class Changed(Arena):
    """An engine that finds changes which make a version."""

    handles_damaged = False

    def left(self) -> Left:
        """Whose handles may be missing."""
        return super().left()._replace(handles_damaged=self.handles_damaged)

    async def recover(self, ino: int, *, trim: bool) -> None:
        """Let the inode be changed."""
        await super().recover(ino, trim=trim)
        await self.truncate(ino, 1)

    async def recover_later(self, ino: int, *, trim: bool) -> None:
        """Change it again."""
        self.calls.append(("recover_later", ino, trim))
        await self.truncate(ino, 2)


class Told(Commit):
    """What is queued, and as whose end."""

    told: ClassVar[list[tuple[int, int]]] = []

    def closed(self, inode: Inode, *, killed_by: int = 0) -> None:
        """Note it."""
        self.told.append((inode.ino, killed_by))
        super().closed(inode, killed_by=killed_by)

    async def closed_before(self, inode: Inode) -> None:
        """Note it, and that what comes later is not there before it was drained."""
        self.told.append((inode.ino, -inode.size))
        await super().closed_before(inode)
        assert self._queue[-1].snapshot is not None


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("is_successor", [False, True])
@trio.testing.trio_test
async def test_versions_are_queued_in_the_order_of_their_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool, is_successor: bool
) -> None:
    """Where handles may be missing, each may be of a writer who had not finished."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        for name in ("first", "second", "third"):
            await mount.write_file(name, GOOD)
        await mount.commit.flush_all()
        inos = [(await mount.resolve(name)).ino for name in ("second", "third", "first")]
    monkeypatch.setattr("tests.support.catalog.rig.MemoryEngine", Changed)
    monkeypatch.setattr("tests.support.catalog.rig.Commit", Told)
    monkeypatch.setattr(Told, "told", [])
    monkeypatch.setattr(Changed, "handles_damaged", is_damaged)
    changed = [LeftChanges(ino, 5 + number, 0) for number, ino in enumerate(inos)]
    monkeypatch.setattr(Changed, "changed", changed)
    async with rig(tmp_path, devices=devices, is_successor=is_successor):
        assert Told.told == [(ino, ABANDONED if is_damaged else 0) for ino in inos]


@pytest.mark.parametrize("is_successor", [False, True])
@trio.testing.trio_test
async def test_what_was_closed_before_somebody_wrote_on_is_drained_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_successor: bool
) -> None:
    """And keeps its place in the order of closes, as does what was closed later."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        for name in ("first", "second"):
            await mount.write_file(name, GOOD)
        await mount.commit.flush_all()
        first, second = [(await mount.resolve(name)).ino for name in ("first", "second")]
    monkeypatch.setattr("tests.support.catalog.rig.MemoryEngine", Changed)
    monkeypatch.setattr("tests.support.catalog.rig.Commit", Told)
    monkeypatch.setattr(Told, "told", [])
    changed = [
        LeftChanges(first, 5, 0, Part.CLOSED),
        LeftChanges(second, 6, 0),
        LeftChanges(first, 7, signal.SIGKILL, Part.LATER),
    ]
    monkeypatch.setattr(Changed, "changed", changed)
    async with rig(tmp_path, devices=devices, is_successor=is_successor) as mount:
        assert Told.told == [(first, -1), (second, 0), (first, signal.SIGKILL)]
