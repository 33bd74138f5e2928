"""Blocks that are moved to another device: who is made to refer to the new places."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio.testing

from fpfs.core.engine import Move, ObjectId
from fpfs.core.errors import BusyFile, DamagedData
from fpfs.core.layout import UNVERIFIED, Run, Segment, decode_segment, encode_segment
from fpfs.daemon.catalog.database import Catalog, DeviceRecord, RootOwner, Transaction
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.devices import set_use
from fpfs.daemon.catalog.rows.extents import store_segment
from fpfs.daemon.catalog.rows.relocation import Planned, store_moves, usage_of
from fpfs.daemon.catalog.schema import DeviceUse, row_crc

OLD, NEW = ObjectId(0, 5), ObjectId(1, 9)
BIG, SHARER = 2, 3


def prepare(transaction: Transaction) -> None:
    """A file of three segments whose blocks lie in one object."""
    transaction.execute(
        "INSERT INTO objects (device, id, ino, crc) VALUES (?, ?, ?, ?)",
        (*OLD, BIG, row_crc(*OLD, BIG)),
    )
    for index in range(3):
        store(transaction, BIG, index, Run(0, 8, 8 * index, OLD.device, UNVERIFIED, OLD.id))


def store(transaction: Transaction, ino: int, index: int, run: Run) -> None:
    store_segment(transaction, ino, index, encode_segment(Segment(index, (run,))))


def runs(transaction: Transaction, ino: int) -> dict[int, list[tuple[int, int, int, int]]]:
    """By segment: device, object, block and number of blocks of each run."""
    return {
        index: [
            (run.device, run.object, run.object_block, run.count)
            for run in decode_segment(blob).runs
        ]
        for index, blob in transaction.execute(
            "SELECT segment, blob FROM segments WHERE ino = ? ORDER BY segment", (ino,)
        ).fetchall()
    }


def planned(segment: int, *, unwritten: bool = False) -> list[Planned]:
    """Blocks 8 to 15 of the old object go to the new one."""
    return [Planned(Move(*OLD, 8, 8, *NEW, 0), unwritten, segment)]


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """An empty catalog."""
    path = tmp_path / "catalog.db"
    Catalog.format(
        path,
        filesystem_id="test",
        devices=[
            DeviceRecord(number=number, device_id=name, path=f"/{name}")
            for number, name in enumerate("ab")
        ],
        root=RootOwner(uid=0, gid=0),
    )
    return path


@trio.testing.trio_test
async def test_of_a_file_alone_only_the_segments_of_the_moves_are_read(catalog: Path) -> None:
    opened = Catalog.open(catalog, filesystem_id="test")

    def work(transaction: Transaction) -> None:
        prepare(transaction)
        transaction.execute("UPDATE segments SET crc = crc + 1 WHERE segment = 2")
        moved = store_moves(transaction, BIG, planned(1), expected=frozenset({BIG}))
        assert moved.inos == (BIG,)
        assert moved.moves == tuple(each.move for each in planned(1))
        assert runs(transaction, BIG) == {
            0: [(*OLD, 0, 8)],
            1: [(*NEW, 0, 8)],
            2: [(*OLD, 16, 8)],
        }
        assert usage_of(transaction, 0) == (1, 0, 1)
        with pytest.raises(DamagedData):
            store_moves(transaction, BIG, planned(2), expected=frozenset({BIG}))

    try:
        await opened.write(work)
    finally:
        await opened.close()


@trio.testing.trio_test
async def test_who_shares_a_block_at_another_place_follows_it(catalog: Path) -> None:
    opened = Catalog.open(catalog, filesystem_id="test")

    def work(transaction: Transaction) -> None:
        prepare(transaction)
        store(transaction, SHARER, 7, Run(3, 4, 10, OLD.device, UNVERIFIED, OLD.id))
        shares.renew(transaction, SHARER, OLD)
        shares.renew(transaction, BIG, OLD)
        everybody = frozenset({BIG, SHARER})
        with pytest.raises(BusyFile):
            store_moves(transaction, BIG, planned(1), expected=frozenset({BIG}))
        moved = store_moves(transaction, BIG, planned(1), expected=everybody)
        assert moved.inos == (BIG, SHARER)
        assert runs(transaction, SHARER) == {7: [(*NEW, 2, 4)]}
        assert runs(transaction, BIG)[1] == [(*NEW, 0, 8)]
        assert shares.owner(transaction, NEW) == BIG

    try:
        await opened.write(work)
    finally:
        await opened.close()


@trio.testing.trio_test
async def test_what_was_written_to_meanwhile_is_not_moved(catalog: Path) -> None:
    opened = Catalog.open(catalog, filesystem_id="test")

    def work(transaction: Transaction) -> None:
        prepare(transaction)
        with pytest.raises(BusyFile, match="written to meanwhile"):
            store_moves(transaction, BIG, planned(1, unwritten=True), expected=frozenset({BIG}))
        # What nobody refers to any more stays where it is.
        store_segment(transaction, BIG, 1, b"")
        moved = store_moves(transaction, BIG, planned(1), expected=frozenset({BIG}))
        assert moved == ((), (), 0)

    try:
        await opened.write(work)
    finally:
        await opened.close()


@pytest.mark.parametrize("use", [DeviceUse.DRAINING, DeviceUse.REMOVED])
@trio.testing.trio_test
async def test_nothing_goes_to_a_device_that_is_to_go_by_now(catalog: Path, use: DeviceUse) -> None:
    opened = Catalog.open(catalog, filesystem_id="test")

    def work(transaction: Transaction) -> None:
        prepare(transaction)
        set_use(transaction, NEW.device, use)
        with pytest.raises(BusyFile, match="device 1 takes nothing any more"):
            store_moves(transaction, BIG, planned(1), expected=frozenset({BIG}))
        assert not any(usage_of(transaction, NEW.device))

    try:
        await opened.write(work)
    finally:
        await opened.close()
