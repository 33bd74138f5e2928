"""Deletes inodes that nothing refers to, and gives their space, and replaced space, back.

Invariants:
  * A range or object is given back only after the transaction that took it out of use is durable.
  * What is to be given back is in the catalog's `removals` first, so that a crash loses no space;
    giving something back twice is harmless, since places are never used again.

Concurrency: trio thread only; used by `pipeline`, which runs the two tasks.
"""

from __future__ import annotations

import errno
import logging
import math
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import trio

from fpfs.core.engine import ObjectId, Range
from fpfs.daemon.catalog.rows.extents import (
    Removal,
    delete_inodes,
    forget_removals,
    last_removal,
    list_removals,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.inodes.table import Inode, InodeTable

log = logging.getLogger(__name__)

DELETIONS_MAX = 256
"""Inodes deleted in one transaction."""

GATHER_S = 0.03
"""How long deletions are gathered, to share a transaction, while nobody waits for them."""

REMOVALS_MAX = 1024
"""Ranges given back between two transactions."""


PAUSE_S = 1.0
PAUSE_S_MAX = 300.0
"""A device that refuses again is left alone for so long: at first, and after many times."""


class _GivenBack(NamedTuple):
    """Numbers of the rows that are dealt with, how many wait for their device, and who refused."""

    gone: list[int]
    waiting: int = 0
    refused: Mapping[int, OSError] = MappingProxyType({})


class _Refusal(NamedTuple):
    """A device that does not take space back: when it is asked again, and how long after that."""

    error: OSError
    again_s: float
    pause_s: float


class Reclaim:
    """Inodes to delete and space to give back."""

    def __init__(self, *, catalog: Catalog, engine: Engine, inodes: InodeTable) -> None:
        """Start empty; nothing happens before the tasks run."""
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self._deletions: list[Inode] = []
        self._deletions_asked = 0
        self._deletions_ended = 0
        self._deletions_event = trio.Event()
        self._awaited = trio.Event()
        self._removal_recorded = 0
        self._removal_done = 0
        self._removal_passed = 0
        """What is recorded up to here is all of devices that are missing."""
        self._refusals: dict[int, _Refusal] = {}
        self._removals_event = trio.Event()
        self._progress = trio.lowlevel.ParkingLot()

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to delete or give back."""
        return self._deletions_ended == self._deletions_asked and self._nothing_to_remove

    @property
    def _nothing_to_remove(self) -> bool:
        return self._removal_done >= self._removal_recorded

    async def ask_again(self, device: int) -> OSError | None:
        """Let a device give back what is recorded, also if it refused; returns why it does not."""
        if device in self._refusals:
            self._refusals[device] = self._refusals[device]._replace(again_s=-math.inf)
            self._removal_done = min(self._removal_done, self._removal_recorded - 1)
            self._removals_event.set()
        await self.wait_given_back()
        refusal = self._refusals.get(device)
        return None if refusal is None else refusal.error

    async def wait_given_back(self) -> None:
        """Return when everything known so far is deleted and given back, or has failed.

        What comes meanwhile is not waited for: somebody who overwrites all the time would keep it
        from ever returning.
        """
        deletions = self._deletions_asked
        while self._deletions_ended < deletions:
            self._awaited.set()
            await self._progress.park()
        removal = self._removal_recorded
        while self._removal_done < removal:
            await self._progress.park()

    async def recover(self, orphans: Sequence[int]) -> None:
        """Delete inodes that an earlier mount left without a name, and take up its removals."""
        for start in range(0, len(orphans), DELETIONS_MAX):
            batch = [(ino, ()) for ino in orphans[start : start + DELETIONS_MAX]]
            await self._catalog.write_many(partial(delete_inodes, inodes=batch))
        self._inodes.count -= len(orphans)
        self.removals_recorded(await self._catalog.read(last_removal))

    def delete(self, inode: Inode) -> None:
        """Delete an inode without name, user and kernel reference, soon."""
        inode.users += 1  # Keeps it from being deleted twice.
        self._deletions.append(inode)
        self._deletions_asked += 1
        self._deletions_event.set()

    def removals_recorded(self, removal: int) -> None:
        """Note that a transaction entered removals up to this number (0: none)."""
        if removal > self._removal_recorded:
            self._removal_recorded = removal
            self._removals_event.set()

    async def run_deletions(self) -> None:
        """Delete inodes, many in one transaction."""
        while True:
            if not self._deletions:
                self._awaited = trio.Event()
                self._deletions_event = trio.Event()
                await self._deletions_event.wait()
                with trio.move_on_after(GATHER_S):
                    await self._awaited.wait()
            batch = self._deletions[:DELETIONS_MAX]
            del self._deletions[:DELETIONS_MAX]
            try:
                await self._delete(batch)
            except OSError as error:
                # They have no name any more: the next mount deletes them.
                log.error("%d inodes without a name cannot be deleted now: %s", len(batch), error)
            self._deletions_ended += len(batch)
            self._progress.unpark_all()

    async def _delete(self, batch: Sequence[Inode]) -> None:
        deletions: list[tuple[int, Sequence[ObjectId]]] = []
        for inode in batch:
            held: Sequence[ObjectId] = ()
            if inode.is_regular and self._engine.loaded(inode.ino):
                held = await self._engine.drop(inode.ino)
            deletions.append((inode.ino, held))

        def gone(removal: int) -> int:
            # In the catalog's order: one that a group kept may be released right behind this.
            for inode in batch:
                self._inodes.removed(inode)
            return removal

        removal = await self._catalog.write_many(lambda t: delete_inodes(t, deletions), apply=gone)
        self.removals_recorded(removal)

    async def run_removals(self) -> None:
        """Give back what is recorded, after it is durable."""
        while True:
            if self._nothing_to_remove:
                self._removals_event = trio.Event()
                await self._removals_event.wait()
            target = self._removal_recorded
            try:
                await self._catalog.make_durable()
                await self._remove(target)
            except OSError as error:
                # The rows stay: the next removal, or the next mount, tries again.
                log.error("space cannot be given back now: %s", error)
            self._removal_done = target
            self._progress.unpark_all()

    async def _remove(self, up_to: int) -> None:
        """Give back removals with numbers up to `up_to`, oldest first."""
        after = self._removal_passed
        waits = True
        while True:
            rows, gone, after = await self._catalog.read(
                partial(list_removals, after=after, up_to=up_to, count=REMOVALS_MAX)
            )
            if not after:
                return
            given_back = await self._give_back([row for row in rows if self._is_asked(row.device)])
            waits = waits and len(given_back.gone) + given_back.waiting == len(rows)
            self._note_refusals({row.device for row in rows}, given_back.refused)
            gone += given_back.gone
            if gone:
                await self._catalog.write_many(partial(forget_removals, removals=gone))
            if waits:
                self._removal_passed = after

    def _is_asked(self, device: int) -> bool:
        refusal = self._refusals.get(device)
        return refusal is None or trio.current_time() >= refusal.again_s

    def _note_refusals(self, asked: set[int], refused: Mapping[int, OSError]) -> None:
        """Ask a device that refused at the next removal again, and then less and less often."""
        for device in filter(self._is_asked, asked):
            if device not in refused:
                self._refusals.pop(device, None)
                continue
            last, error = self._refusals.get(device), refused[device]
            if last is None:
                log.error("space on device %d cannot be given back yet: %s", device, error)
            pause_s = 0.0 if last is None else min(max(2 * last.pause_s, PAUSE_S), PAUSE_S_MAX)
            self._refusals[device] = _Refusal(error, trio.current_time() + pause_s, pause_s)

    async def _give_back(self, rows: Sequence[Removal]) -> _GivenBack:
        """Give back what rows name, in smaller groups if it fails together.

        What fails, on a device that refuses, stays recorded and is tried again. What is on a device
        that is missing waits for the mount that has it.
        """
        if not rows:
            return _GivenBack([])
        try:
            await self._give_back_together(rows)
        except OSError as error:
            devices = sorted({row.device for row in rows})
            if len(devices) > 1:
                parts = [[row for row in rows if row.device == device] for device in devices]
            elif error.errno == errno.ENODEV:
                return _GivenBack([], waiting=len(rows))
            elif len(rows) > 1:
                parts = [[row] for row in rows]
            else:
                return _GivenBack([], refused={devices[0]: error})
            done = [await self._give_back(part) for part in parts]
            return _GivenBack(
                [number for each in done for number in each.gone],
                sum(each.waiting for each in done),
                dict(item for each in done for item in each.refused.items()),
            )
        return _GivenBack([row.id for row in rows])

    async def _give_back_together(self, rows: Sequence[Removal]) -> None:
        ranges = [Range(row.device, row.object, row.block, row.count) for row in rows if row.count]
        objects = [ObjectId(row.device, row.object) for row in rows if row.count == 0]
        if ranges:
            await self._engine.discard(ranges)
        if objects:
            await self._engine.remove_objects(objects)
