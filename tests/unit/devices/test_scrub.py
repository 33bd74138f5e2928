"""Scrub steps: everything is looked at once, damage is found, and what was replaced is none."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio.testing

from fpfs.cli.commands.scrub import Pace, _regular_files
from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, Damage, ObjectId, StoredRange
from fpfs.core.layout import UNVERIFIED, UNWRITTEN, Run, Segment, encode_segment
from fpfs.core.protocol.questions import ScrubStep
from fpfs.core.protocol.reports import DamagedContent, Scrubbed, ScrubCursor
from fpfs.daemon.catalog.executor import Transaction
from fpfs.daemon.catalog.schema import row_crc
from fpfs.daemon.maintenance.scrub import ROWS_MAX, Scrub
from fpfs.testing.memory_engine import MemoryEngine
from tests.support.catalog.rig import LARGE, Rig, rig

BLOCKS = -(-LARGE // BLOCK_BYTES)
Place = tuple[int, int, int]


def scrub_of(mount: Rig) -> Scrub:
    """The scrub of a rig."""
    return Scrub(
        catalog=mount.catalog,
        engine=mount.engine,
        device_paths=lambda: {0: "/nvme0", 1: "/nvme1"},
        missing=tuple,
    )


async def scrub_all(mount: Rig, *, ino: int = 0, bytes_max: int = 1 << 30) -> list[Scrubbed]:
    """All steps of a scrub."""
    scrub = scrub_of(mount)
    steps = []
    cursor: ScrubCursor | None = ScrubCursor()
    while cursor is not None:
        steps.append(await scrub.step(ScrubStep(cursor=cursor, bytes_max=bytes_max), ino=ino))
        cursor = steps[-1].cursor
    return steps


def damage_of(steps: Sequence[Scrubbed]) -> list[DamagedContent]:
    """What was found."""
    return [each for step in steps for each in step.damage]


def note_places(mount: Rig, patch: pytest.MonkeyPatch) -> list[Place]:
    """The places that are compared from now on."""
    places: list[Place] = []
    verify = mount.engine.verify

    async def verify_and_note(ranges: Sequence[StoredRange]) -> Sequence[Damage]:
        for device, object_, block, checksums in ranges:
            places.extend((device, object_, block + i) for i in range(len(checksums)))
        return await verify(ranges)

    patch.setattr(mount.engine, "verify", verify_and_note)
    return places


def store(transaction: Transaction, ino: int, segment: Segment) -> None:
    """Put a segment into the catalog."""
    blob = encode_segment(segment)
    transaction.execute(
        "INSERT INTO segments VALUES (?, ?, ?, ?)",
        (ino, segment.index, blob, row_crc(ino, segment.index, content=blob)),
    )


@pytest.mark.parametrize("blocks_max", [1, 2, 3, 7, 1024])
@trio.testing.trio_test
async def test_every_block_is_compared_once_however_much_a_step_reads(
    blocks_max: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as mount:
        for number in range(5):
            await mount.write_file(f"file{number}", bytes([number]) * LARGE)
            await mount.write_file(f"small{number}", b"small")
        far = await mount.create("far")
        mount.engine.write(far, SEGMENT_BLOCKS * BLOCK_BYTES - 5, b"over a segment's end")
        mount.namespace.files.release(far)
        await mount.commit.flush_all()
        places = note_places(mount, monkeypatch)
        steps = await scrub_all(mount, bytes_max=blocks_max * BLOCK_BYTES)
        assert len(places) == len(set(places)) == 5 * BLOCKS + 2
        assert not damage_of(steps)
        checked = sum(step.bytes_checked for step in steps)
        assert checked == len(places) * BLOCK_BYTES + 5 * len(b"small")
        assert all(step.bytes_checked <= blocks_max * BLOCK_BYTES for step in steps[1:])
        assert steps[0].bytes_total > 0
        assert not any(step.bytes_total for step in steps[1:])


@trio.testing.trio_test
async def test_more_rows_than_a_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(tmp_path) as mount:
        count = 2 * ROWS_MAX + 1
        sparse = [Segment(index, (Run(0, 1, index, 0, 0, 5),), (index,)) for index in range(count)]
        await mount.catalog.write(lambda t: [store(t, 77, each) for each in sparse])
        rows = [(1000 + i, b"inline", row_crc(1000 + i, content=b"inline")) for i in range(count)]
        await mount.catalog.write(
            lambda t: t.executemany("INSERT INTO inline VALUES (?, ?, ?)", rows).rowcount
        )
        places = note_places(mount, monkeypatch)
        steps = await scrub_all(mount)
        assert places == [(0, 5, index) for index in range(count)]
        assert len(steps) == 6
        assert len(damage_of(steps)) == count  # of an object that does not exist
        assert {each.errno for each in damage_of(steps)} == {errno.ENOENT}


@trio.testing.trio_test
async def test_of_one_inode_nothing_else_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as mount:
        for name in ("before", "file", "after"):
            await mount.write_file(name, bytes(LARGE))
            await mount.write_file(f"small {name}", b"small")
        await mount.commit.flush_all()
        places = note_places(mount, monkeypatch)
        inode = await mount.resolve("file")
        steps = await scrub_all(mount, ino=inode.ino, bytes_max=2 * BLOCK_BYTES)
        assert sum(step.bytes_checked for step in steps) == BLOCKS * BLOCK_BYTES
        assert len(places) == BLOCKS
        small = await mount.resolve("small file")
        assert sum(step.bytes_checked for step in await scrub_all(mount, ino=small.ino)) == 5


@trio.testing.trio_test
async def test_damaged_blocks_are_named_reported_and_nothing_else_is(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.make_directory("folder")
        await mount.write_file("folder/file", bytes(LARGE))
        await mount.write_file("other", b"o" * LARGE)
        await mount.commit.flush_all()
        inode = await mount.resolve("folder/file")
        ((object_, blocks),) = [
            (key, held)
            for key, held in mount.engine.devices.objects.items()
            if key.device == 1 and not any(held[0])
        ]
        blocks[1] = b"x" + blocks[1][1:]
        (found,) = damage_of(await scrub_all(mount, bytes_max=BLOCK_BYTES))
        block = found.offset_bytes // BLOCK_BYTES
        assert found == DamagedContent(
            ino=inode.ino,
            path="folder/file",
            offset_bytes=block * BLOCK_BYTES,
            size_bytes=BLOCK_BYTES,
            device=1,
            device_path="/nvme1",
            object=f"{object_.id:016x}",
            object_block=1,
            errno=errno.EIO,
            error="checksum differs",
        )
        reported = [call for call in mount.engine.calls if call[0] == "report_damage"]
        assert reported == [("report_damage", inode.ino, block, 1, object_.id, 1)]


@trio.testing.trio_test
async def test_an_object_that_is_gone_is_damage_of_all_its_blocks(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", bytes(LARGE))
        await mount.commit.flush_all()
        objects = mount.engine.devices.objects
        gone = next(key for key in objects if key.device == 0)
        count = len(objects.pop(gone))
        found = damage_of(await scrub_all(mount))
        assert sum(each.size_bytes for each in found) == count * BLOCK_BYTES
        assert {each.errno for each in found} == {errno.ENOENT}
        assert {each.error for each in found} == {"cannot be read: No such file or directory"}


Change = Callable[[Rig], None]


@pytest.mark.parametrize("what", ["rewrite", "removal", "nothing"])
@trio.testing.trio_test
async def test_what_is_replaced_while_it_is_read_is_no_damage(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"1" * LARGE)
        await mount.commit.flush_all()
        verify = MemoryEngine.verify

        async def verify_meanwhile(ranges: Sequence[StoredRange]) -> Sequence[Damage]:
            if what == "rewrite":
                await mount.write_file("file", b"2" * LARGE)
            elif what == "removal":
                await mount.namespace.entries.unlink(1, b"file")
            await mount.commit.flush_all()
            # What was to be read is not what it was, whoever it belongs to now.
            for device, object_, block, checksums in ranges:
                held = mount.engine.devices.objects.get(ObjectId(device, object_), {})
                held.update({block + i: b"gone" for i in range(len(checksums))})
            return await verify(mount.engine, ranges)

        monkeypatch.setattr(mount.engine, "verify", verify_meanwhile)
        found = damage_of(await scrub_all(mount))
        assert len(found) == (BLOCKS if what == "nothing" else 0)


@pytest.mark.parametrize(
    ("size", "damage", "error"),
    [
        (10, "UPDATE inline SET crc = crc + 1", "content in the catalog fails its checksum"),
        (LARGE, "UPDATE segments SET crc = crc + 1", "layout segment 0 of inode {} is damaged"),
        (LARGE, "UPDATE segments SET segment = 1", "layout segment 1 of inode {} is damaged"),
    ],
)
@trio.testing.trio_test
async def test_damaged_rows_of_the_catalog_are_found(
    size: int, damage: str, error: str, tmp_path: Path
) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"x" * size)
        await mount.commit.flush_all()
        inode = await mount.resolve("file")
        await mount.catalog.write(lambda t: t.execute(damage).rowcount)
        (found,) = damage_of(await scrub_all(mount))
        assert (found.ino, found.path, found.device) == (inode.ino, "file", -1)
        assert found.error == error.format(inode.ino)


@trio.testing.trio_test
async def test_blocks_without_checksums_are_counted_and_not_read(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        runs = (Run(0, 3, 0, 0, UNVERIFIED, 5), Run(3, 4, 3, 0, UNWRITTEN, 5))
        await mount.catalog.write(lambda t: store(t, 77, Segment(0, runs)))
        steps = await scrub_all(mount, bytes_max=BLOCK_BYTES)
        assert not damage_of(steps)
        assert sum(step.bytes_checked for step in steps) == 0
        assert sum(step.bytes_unverified for step in steps) == 3 * BLOCK_BYTES


def test_a_scrub_keeps_to_its_rate() -> None:
    now_s = 0.0
    sleeps: list[float] = []

    def sleep(duration_s: float) -> None:
        nonlocal now_s
        sleeps.append(duration_s)
        now_s += duration_s

    pace = Pace(8_000_000, clock=lambda: now_s, sleep=sleep)
    assert pace.step_bytes == 1_000_000
    now_s = 0.05  # the step took as long
    pace.done(1_000_000)
    assert sleeps == [pytest.approx(0.075)]
    now_s += 1  # the devices were slower
    pace.done(1_000_000)
    assert len(sleeps) == 1
    for _ in range(10):
        pace.done(1_000_000)
    assert now_s == pytest.approx(12 / 8)


def test_without_a_rate_a_scrub_never_waits() -> None:
    pace = Pace(None, clock=lambda: 0.0, sleep=pytest.fail)
    pace.done(1 << 40)
    assert Pace(1).step_bytes == 64 * 1024
    assert Pace(1 << 40).step_bytes == pace.step_bytes


def test_what_is_removed_while_a_tree_is_walked_is_left_out(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"file{i}").touch()
    walk = _regular_files(str(tmp_path))
    ino, _ = next(walk)
    (first,) = [path for path in tmp_path.rglob("file?") if path.stat().st_ino == ino]
    for path in tmp_path.iterdir():
        if path != first.parent:
            shutil.rmtree(path)
    for path in first.parent.iterdir():
        if path != first:
            path.unlink()
    assert list(walk) == []
    with pytest.raises(FileNotFoundError):
        list(_regular_files(str(tmp_path / "nothing")))
