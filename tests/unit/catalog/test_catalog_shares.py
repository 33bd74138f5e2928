"""Objects that several inodes refer to: who owns them, and when what is in them may go.

The catalog's rows against a plain model: for each inode the set of blocks that it refers to.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio.testing

from fpfs.core.engine import BLOCK_BYTES, ObjectId, Range
from fpfs.core.errors import DamagedData
from fpfs.core.layout import UNVERIFIED, Run, Segment, encode_segment
from fpfs.daemon.catalog.database import Catalog, DeviceRecord, RootOwner, Transaction
from fpfs.daemon.catalog.rows import objects
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.extents import store_segment
from tests.support.catalog.catalogs import check_held
from tests.support.seeds import chosen_seed

BLOCKS = 12
OBJECTS = [ObjectId(device, number) for device in (0, 1) for number in (5, 6)]

Block = tuple[ObjectId, int]


def formatted(folder: Path) -> Path:
    path = folder / "catalog.db"
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


def store(transaction: Transaction, ino: int, blocks: set[Block]) -> None:
    """Let an inode's content refer to these blocks, one file block each."""
    runs = tuple(
        Run(at, 1, number, place.device, UNVERIFIED, place.id)
        for at, (place, number) in enumerate(sorted(blocks))
    )
    store_segment(transaction, ino, 0, encode_segment(Segment(0, runs)) if runs else b"")


def own(transaction: Transaction, ino: int, place: ObjectId) -> None:
    objects.enter(transaction, ino, [place])


def expand(ranges: list[Range]) -> set[Block]:
    """The blocks of ranges; those of a whole object are all that it has."""
    return {
        (ObjectId(gone.device, gone.object), block)
        for gone in ranges
        for block in (range(gone.block, gone.block + gone.count) if gone.count else range(BLOCKS))
    }


def test_spans() -> None:
    assert shares.merge([(5, 7), (1, 2), (2, 3), (6, 9)]) == [(1, 3), (5, 9)]
    assert shares.without([(0, 10)], [(2, 4)], [(3, 5), (9, 20)]) == [(0, 2), (5, 9)]
    assert shares.without([(3, 5)], [(0, 9)]) == []
    assert shares.without([(3, 5), (7, 8)]) == [(3, 5), (7, 8)]


class Model:
    """What each inode refers to, what it owns, and what was given back."""

    def __init__(self, transaction: Transaction) -> None:
        self.transaction = transaction
        self.refers: dict[int, set[Block]] = {}
        self.owner = dict.fromkeys(OBJECTS, 1)
        self.given_back: set[Block] = set()
        self.refers[1] = {(place, block) for place in OBJECTS for block in range(BLOCKS)}
        store(transaction, 1, self.refers[1])
        for place in OBJECTS:
            own(transaction, 1, place)

    def split(self, ino: int, made: int, keep: set[Block]) -> None:
        """Let another inode refer to some blocks of this one."""
        self.refers[made] = keep
        store(self.transaction, made, keep)
        shares.share(self.transaction, made)

    def rewrite(self, ino: int, kept: set[Block]) -> None:
        """Let an inode refer to fewer blocks, as a commit does."""
        before = shares.references(self.transaction, ino)
        gone = self.refers[ino] - kept
        dead = {place for place, _block in gone} - {place for place, _block in kept}
        self.refers[ino] = kept
        store(self.transaction, ino, kept)
        back: list[Range] = []
        for place in sorted(dead):
            back += shares.give_up_object(self.transaction, ino, place, before)
        for place, block in sorted(gone):
            if place not in dead:
                back += shares.give_up_range(self.transaction, ino, Range(*place, block, 1))
        self.take_back(back)

    def delete(self, ino: int) -> None:
        """Delete an inode."""
        self.take_back(shares.give_up_all(self.transaction, ino, []))
        del self.refers[ino]
        store(self.transaction, ino, set())
        objects.forget_all_of(self.transaction, ino)

    def take_back(self, ranges: list[Range]) -> None:
        """Note what is given back, which nobody may refer to."""
        self.given_back |= expand(ranges)

    def check(self) -> None:
        """Nothing that is referred to is given back, and everything else is; all of it counts."""
        shares.recount(self.transaction, OBJECTS)
        check_held(self.transaction)
        referred = {block for blocks in self.refers.values() for block in blocks}
        assert dict(self.transaction.execute("SELECT number, bytes FROM devices").fetchall()) == {
            number: BLOCK_BYTES * sum(place.device == number for place, _block in referred)
            for number in (0, 1)
        }
        everything = {(place, block) for place in OBJECTS for block in range(BLOCKS)}
        assert self.given_back == everything - referred
        for ino, blocks in self.refers.items():
            for place in {place for place, _block in blocks}:
                owner = shares.owner(self.transaction, place)
                assert owner in self.refers, f"{place} belongs to nobody"
                rows = self.transaction.execute(
                    "SELECT block, count FROM shares WHERE device = ? AND object = ? AND ino = ?",
                    (*place, ino),
                ).fetchall()
                there = {at for block, count in rows for at in range(block, block + count)}
                mine = {block for each, block in blocks if each == place}
                assert there == (set() if owner == ino else mine)


def run(transaction: Transaction, chance: random.Random) -> None:
    model = Model(transaction)
    for made in range(2, 2 + chance.randrange(1, 4)):
        ino = chance.choice(list(model.refers))
        keep = {block for block in model.refers[ino] if chance.random() < 0.5}
        model.split(ino, made, keep)
        model.check()
    assert shares.sharers(transaction) <= set(model.refers)
    while model.refers:
        ino = chance.choice(list(model.refers))
        if chance.random() < 0.6:
            model.rewrite(ino, {block for block in model.refers[ino] if chance.random() < 0.7})
        else:
            model.delete(ino)
        model.check()
    assert not shares.are_there(transaction)
    assert transaction.execute("SELECT count(*) FROM objects").fetchone() == (0,)


@trio.testing.trio_test
async def test_what_nobody_refers_to_is_given_back_and_nothing_else(tmp_path: Path) -> None:
    chance = random.Random(chosen_seed())
    catalog = Catalog.open(formatted(tmp_path))
    for _ in range(60):
        await catalog.write(lambda t: run(t, chance))
    await catalog.close()


@trio.testing.trio_test
async def test_a_damaged_row_gives_nothing_back(tmp_path: Path) -> None:
    catalog = Catalog.open(formatted(tmp_path))

    def share_and_damage(transaction: Transaction) -> None:
        model = Model(transaction)
        model.split(1, 2, {(OBJECTS[0], 3)})
        transaction.execute("UPDATE shares SET block = 4")
        shares.give_up_range(transaction, 1, Range(*OBJECTS[0], 3, 1))

    with pytest.raises(DamagedData, match="what inode 2 shares fails its checksum"):
        await catalog.write(share_and_damage)
    await catalog.close()
