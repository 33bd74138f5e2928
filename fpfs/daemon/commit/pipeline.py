"""Commit: the one module that orders durability.

A version is made safe in five steps, always in this order: (1) the engine drains the inode: all
chunks written, (2) and flushed on their devices; (3) one transaction makes the version current,
together with its neighbours in the queue; (4) the catalog's log is flushed, at once when somebody
waits for it, else within `durable_within_s`; (5) only then the space of what was replaced is given
back (`space_gc`).

Invariants:
  * Versions become current in the order in which they were queued (close, rename, fsync), over
    the whole mount; drains run side by side.
  * A version is queued by the release of its last writable handle, by an fsync or synchronous
    write, by a rename of pending content, by a truncation without a handle, or, every 30 s, while
    its file is open and only becomes longer. Never by a FLUSH, unless that waits for durability
    (ack=close, ack=durable), as an fsync does.
  * One drain of an inode at a time: its lock is taken by the drain and released after step 3.
  * A version holds nothing of a writer that came after its close: an open for writing waits until
    the drain of what was closed before has begun (`wait_turn`).
  * A version whose writer was killed does not become current under an all-or-nothing name: it is
    quarantined (`rows.quarantine`), and the one before stays. Who opens the file meanwhile waits
    until that is done (`wait_quarantined`). While it cannot be kept, `Inode.killed_by` says whose
    it is, until it is emptied or tried again by who writes next.
  * A failed drain leaves the previous version current and the bytes in the engine, which tells the
    next write, fsync or close; the failure stays in `statistics` until the inode is committed.
    Names that were removed after it come back after power loss until then.

Concurrency: trio thread only. `run` holds all tasks: one that gathers queued entries, DRAINERS that
drain them in order, a sequencer that commits drained entries from the head of the queue, and one
that flushes the catalog, and one that commits what stays open.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from fpfs.daemon.catalog.rows.extents import Version, list_names, list_orphans
from fpfs.daemon.catalog.rows.group_contents import make_one_current
from fpfs.daemon.catalog.rows.group_pins import is_held, list_held
from fpfs.daemon.catalog.rows.quarantine import quarantine
from fpfs.daemon.catalog.rows.queries import list_below
from fpfs.daemon.commit.deferred_unlink import DeferredUnlinks
from fpfs.daemon.commit.entry import Entry
from fpfs.daemon.commit.lag import CommitSteps, Durability, StepKind
from fpfs.daemon.commit.quarantine import Quarantine
from fpfs.daemon.commit.space_gc import Reclaim

if TYPE_CHECKING:
    from collections.abc import KeysView, Sequence

    from fpfs.core.engine import Engine, SyncWrite
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.quarantine import Quarantined
    from fpfs.daemon.catalog.rows.versions import Changed
    from fpfs.daemon.commit.versions import Versions
    from fpfs.daemon.inodes.policies import Policies
    from fpfs.daemon.inodes.table import Inode, InodeTable

log = logging.getLogger(__name__)

DRAINERS = 32
"""Inodes drained side by side."""

VERSIONS_MAX = 256
"""Versions made current in one transaction."""

OPEN_COMMIT_S = 30.0
"""How often files that stay open, and only become longer, are committed."""

GATHER_S = 0.03
"""How long versions that nobody waits for are gathered before they are drained, so that thousands
of small files share wake-ups and transactions. Their bytes are on the way to the devices anyway."""


class CommitFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose last version could not be kept; its previous version stays."""

    ino: int
    errno: int
    message: str


class CommitStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What is under way and what was done since the mount."""

    pending: int
    committed: int
    transactions: int
    removals_pending: bool
    failures: tuple[CommitFailure, ...]


class Commit:
    """The queue of versions and the tasks that make them current and durable."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        inodes: InodeTable,
        versions: Versions,
        policies: Policies,
        durable_within_s: float = 1.0,
    ) -> None:
        """Start empty; nothing happens before `run`."""
        self._policies = policies
        self._versions = versions
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self._reclaim = Reclaim(catalog=catalog, engine=engine, inodes=inodes)
        self._quarantine = Quarantine(catalog=catalog, engine=engine, inodes=inodes)
        self._deferred_unlinks = DeferredUnlinks(catalog=catalog, inodes=inodes)
        self.steps = CommitSteps()
        self.durability = Durability(catalog, self.steps)
        self._numbers = itertools.count(1)
        self._flush_delay_s = durable_within_s / 2
        self._queue: deque[Entry] = deque()
        self._gathered: list[Entry] = []
        self._gathered_event = trio.Event()
        self._to_drain: deque[Entry] = deque()
        self._drainers_idle = trio.lowlevel.ParkingLot()
        self._progress = trio.Event()
        self._awaited = trio.Event()
        """Set when somebody waits for a queued version."""
        self._changed = trio.lowlevel.ParkingLot()
        self._nursery: trio.Nursery | None = None
        self._last_entries: dict[int, Entry] = {}
        self._failures: dict[int, CommitFailure] = {}
        self._not_kept: dict[int, int] = {}
        """The first version of each inode that could not be kept since one was current."""
        self._passed = 0
        """The last version that is current or given up."""
        self._committed = 0
        self._transactions = 0
        inodes.on_removable(self._delete)

    async def recover(self, *, keep: frozenset[int] = frozenset(), took_over: bool = False) -> int:
        """Delete what had no name when the last mount ended, and find removals it left undone.

        `keep` are inodes that the kernel still refers to. `took_over`: everything that was
        acknowledged is here; otherwise power was lost, or nothing was. Returns how many were
        deleted.
        """
        await self._quarantine.load()
        if took_over:
            mark = self._queue[-1].number if self._queue else 0
            keep |= await self._deferred_unlinks.take_over(mark=mark)
        else:
            await self._deferred_unlinks.put_back()
        held = await self._catalog.read(list_held)
        self._inodes.count -= len(held)
        keep |= held
        orphans = [ino for ino in await self._catalog.read(list_orphans) if ino not in keep]
        if orphans:
            log.info("deleting %d inodes that were open without a name", len(orphans))
        await self._reclaim.recover(orphans)
        return len(orphans)

    async def put_names_back(self) -> None:
        """Put back names whose removal was not to survive the power that was lost."""
        await self._deferred_unlinks.put_back()

    async def run(self) -> None:
        """Run all tasks until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._gather)
            for _ in range(DRAINERS):
                nursery.start_soon(self._drain_entries)
            nursery.start_soon(self._commit_in_order)
            nursery.start_soon(self._flush_in_time)
            nursery.start_soon(self._commit_open_in_time)
            nursery.start_soon(self._reclaim.run_deletions)
            nursery.start_soon(self._reclaim.run_removals)

    # What the namespace asks for.

    def closed(self, inode: Inode, *, killed_by: int = 0) -> None:
        """Queue the version of an inode whose last writable handle was released.

        `killed_by` is the signal that ended its writer, or 0.
        """
        inode.killed_by = killed_by
        self._enqueue(inode, last=True)

    async def closed_before(self, inode: Inode) -> None:
        """Queue a version that was closed before others wrote on, and return when it is drained.

        For who takes over, before `run`: what they wrote is not staged again until then.
        """
        inode.killed_by = 0
        await self._drain(self._append(inode, last=True))

    def truncated(self, inode: Inode) -> None:
        """Queue an inode that was changed without a writable handle."""
        inode.killed_by = 0
        self._enqueue(inode, last=True)

    async def make_current(self, inode: Inode) -> None:
        """Commit what was written so far; everything queued before is committed first.

        Raises the OSError that the drain or the catalog met.
        """
        entry = None
        if self._inodes.refresh(inode) or inode.unfinished:
            entry = self._enqueue(inode, last=inode.writers == 0)
        elif inode.pending:
            entry = self._last_entries[inode.ino]
        if entry is not None:
            await self._wait_done(entry)
            if entry.error is not None:
                raise entry.error

    async def make_current_below(self, directory: int) -> None:
        """Commit what could not be kept of a directory and what is below it: try that again.

        Raises the OSError of one that cannot be kept.
        """
        inside = await self._catalog.read(
            partial(list_below, directory=directory, inos=tuple(self._failures))
        )
        for ino in sorted(inside):
            inode = self._inodes.cached(ino)
            if inode is not None:
                await self.make_current(inode)

    async def make_durable(self, inode: Inode) -> None:
        """Commit what was written so far and make it survive power loss, as fsync(2).

        So it is with all that was closed before, also where the inode itself has nothing new.
        """
        closed = self._queue[-1] if self._queue else None
        await self.make_current(inode)
        if closed is not None:
            await self._wait_done(closed)
        await self._catalog.make_durable()

    async def wait_queued(self) -> None:
        """Return when every version queued so far is current, or given up."""
        if self._queue:
            await self._wait_done(self._queue[-1])

    async def make_names_durable(self) -> None:
        """Make all names, and every version queued so far, survive power loss, as fsync(dir)."""
        await self.wait_queued()
        await self._catalog.make_durable()

    async def wait_quarantined(self, inode: Inode) -> bool:
        """Return when what a killed writer left is current or quarantined; False: nothing was."""
        has_waited = False
        while inode.pending and inode.killed_by:
            await self._wait_done(self._last_entries[inode.ino])
            has_waited = True
        return has_waited

    async def wait_turn(self, inode: Inode, *, is_emptied: bool) -> bool:
        """Return when somebody may begin to write to an inode, or to empty it.

        Tells, as `wait_quarantined`, whether a killed writer had left anything. What of that could
        not be kept is tried again, unless it is given up now; raises the OSError of that.
        """
        has_waited = False
        while True:
            has_waited |= await self.wait_quarantined(inode)
            if inode.killed_by and not is_emptied:
                await self.make_current(inode)
                has_waited = True
            await self.wait_drain_begun(inode)
            # The writer before may have been killed meanwhile, and its version be quarantined yet.
            if not inode.killed_by or (is_emptied and not inode.pending):
                return has_waited

    async def wait_drain_begun(self, inode: Inode) -> None:
        """Return when the drains of all queued versions of an inode have begun.

        What is written from then on is behind their barriers and belongs to a later version.
        """
        while inode.pending and not self._last_entries[inode.ino].started:
            self._awaited.set()
            await self._changed.park()

    @property
    def gives_way(self) -> bool:
        """Whether there may be more for `make_room` than what was removed."""
        return self._quarantine.gives_way or self._versions.count > 0

    async def make_room(self) -> bool:
        """Give up what was replaced, and return when its space is free; False: there is nothing.

        First what is removed already, then what killed writers left, then former versions, then
        what was removed after contents that could not be kept.
        """
        if not self._reclaim.idle:
            await self._reclaim.wait_given_back()
            return True
        given_up = await self._quarantine.give_up_oldest() or await self._versions.give_up_oldest()
        for inode in given_up:
            await self.give_back(inode)
        if given_up or not (self._not_kept and self._deferred_unlinks.waiting):
            return bool(given_up)
        self._not_kept.clear()
        await self._deferred_unlinks.pass_by(self._passed)
        await self._reclaim.wait_given_back()
        return True

    async def give_up_replaced(self, inode: Inode) -> None:
        """Commit a truncation at once, and return when the space it took out of use is free."""
        await self.make_current(inode)
        await self._reclaim.wait_given_back()

    async def give_back(self, inode: Inode) -> None:
        """Delete an inode without a name now, and return when its space is free again.

        A version that is on its way to the devices gets there first, or is given up. What has the
        inode open by a path alone (O_PATH) cannot open it any more.
        """
        if inode.pending:
            await self._wait_done(self._last_entries[inode.ino])
        if inode.deferred_unlinks:
            await self.wait_queued()
        # What a group keeps gives no space back: it goes when the kernel has forgotten it.
        is_kept = await self._catalog.read(lambda t: is_held(t, inode.ino))
        if not is_kept and not inode.users:
            self._delete(inode)
        await self._reclaim.wait_given_back()

    def removal_mark(self, inode: Inode, *, committed_bytes: int) -> int:
        """Return the number of the version that a removal of an inode's name has to wait for.

        0: what was closed before is current, or the inode was not there before it.
        """
        if not committed_bytes and inode.is_regular:
            # It never was without what was closed before its own content.
            youngest = itertools.islice(reversed(self._queue), inode.pending)
            if not self._queue or all(entry.inode is inode for entry in youngest):
                return 0
        elif inode.pending == len(self._queue):
            others = (number for ino, number in self._not_kept.items() if ino != inode.ino)
            return max(others, default=0)
        return self._queue[-1].number

    def name_removed(self, inode: Inode, *, mark: int) -> None:
        """Keep an inode whose name was removed until versions up to `mark` have been kept.

        Called when the transaction is delivered; `release_deferred_unlinks` comes after it.
        """
        self._deferred_unlinks.hold(inode, mark=mark)

    async def release_deferred_unlinks(self) -> None:
        """Release what became current while its name was being removed."""
        await self._deferred_unlinks.catch_up()

    def _delete(self, inode: Inode) -> None:
        """Delete an inode that nothing refers to; what it could not keep matters no more."""
        self._failures.pop(inode.ino, None)
        if self._not_kept.pop(inode.ino, 0):
            self._progress.set()
        self._reclaim.delete(inode)

    def queued(self) -> KeysView[int]:
        """Return the numbers of inodes that a version is on its way of: a view that follows."""
        return self._last_entries.keys()

    @property
    def all_current(self) -> bool:
        """Whether no version is on its way, and none could not be kept."""
        return not self._queue and not self._failures

    def sync_write(self, event: SyncWrite) -> None:
        """Make a write on an O_SYNC handle durable and answer it."""
        assert self._nursery is not None, "run() is running while requests are served"
        self._nursery.start_soon(self._answer_sync_write, event)

    async def _answer_sync_write(self, event: SyncWrite) -> None:
        inode = self._inodes.cached(event.ino)
        assert inode is not None, f"inode {event.ino} has an open handle, so it is in the table"
        try:
            await self.make_durable(inode)
        except OSError as error:
            self._engine.complete_write(event.ticket, error.errno or errno.EIO)
        else:
            self._engine.complete_write(event.ticket, 0)

    # What the tools ask for.

    async def flush_all(self, *, written_to: bool = True) -> tuple[CommitFailure, ...]:
        """Commit everything, make it durable, give dead space back.

        With `written_to` also what somebody is writing, as fsync does, but for all-or-nothing
        names. Returns the files whose last version could not be kept.
        """
        being_written = []
        for inode in self._inodes:
            is_changed = self._inodes.refresh(inode) or inode.unfinished
            if not is_changed or not (inode.nlink or inode.handles):
                continue
            if inode.writers:
                being_written.append(inode)
            else:
                self._enqueue(inode, last=True)
        if written_to:
            await self._enqueue_written(being_written)
        await self.make_names_durable()
        await self._reclaim.wait_given_back()
        return tuple(self._failures.values())

    def removals_recorded(self, removal: int) -> None:
        """Give back, when it is durable, what a transaction recorded up to this removal."""
        self._reclaim.removals_recorded(removal)

    async def ask_again(self, device: int) -> OSError | None:
        """Let a device give space back, also if it has refused; returns why it does not."""
        return await self._reclaim.ask_again(device)

    async def wait_durable(self, ino: int) -> None:
        """Return when an inode has no writer and its content and names survive power loss.

        Raises the OSError of a version that could not be kept, after another try.
        """
        await self._wait_current(ino)
        await self._catalog.make_durable()

    async def wait_durable_below(self, directory: int) -> tuple[CommitFailure, ...]:
        """Wait as `wait_durable` for a directory and what is in it and below by now.

        Returns what could not be kept, after another try.
        """
        changing = [
            inode.ino
            for inode in self._inodes
            if inode.is_regular
            and (inode.writers or inode.pending or self._inodes.refresh(inode) or inode.unfinished)
        ]
        inside = await self._catalog.read_many(
            partial(list_below, directory=directory, inos=changing)
        )
        for ino in sorted(inside):
            with contextlib.suppress(OSError):  # it is among the failures
                await self._wait_current(ino)
        await self._catalog.make_durable()
        return tuple(failure for failure in self._failures.values() if failure.ino in inside)

    async def _wait_current(self, ino: int) -> None:
        """Return when an inode has no writer and its content is current."""
        inode = self._inodes.cached(ino)
        while inode is not None and inode.writers:
            await self._changed.park()
        if inode is not None:
            await self.make_current(inode)

    def failure_of(self, ino: int) -> str:
        """Why the last version of an inode could not be kept; empty where it was."""
        failure = self._failures.get(ino)
        return failure.message if failure else ""

    def released(self) -> None:
        """Wake those who wait for writers: a handle was released."""
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        if self._changed:
            self._changed.unpark_all()

    def statistics(self) -> CommitStatistics:
        """Return what is under way and what was done."""
        return CommitStatistics(
            pending=len(self._queue),
            committed=self._committed,
            transactions=self._transactions,
            removals_pending=not self._reclaim.idle,
            failures=tuple(self._failures.values()),
        )

    # The queue.

    def _enqueue(self, inode: Inode, *, last: bool) -> Entry:
        """Queue an inode behind everything closed before it."""
        tail = self._queue[-1] if self._queue else None
        if tail is not None and tail.inode is inode and not tail.started:
            # Nothing was queued in between, so committing both at once keeps the order.
            tail.last = last
            tail.killed_by = inode.killed_by
            return tail
        entry = self._append(inode, last=last)
        self._gathered.append(entry)
        self._gathered_event.set()
        return entry

    def _append(self, inode: Inode, *, last: bool) -> Entry:
        number = next(self._numbers)
        entry = Entry(inode, number, last=last, previous=self._last_entries.get(inode.ino))
        self._last_entries[inode.ino] = entry
        inode.users += 1
        inode.pending += 1
        self._queue.append(entry)
        return entry

    async def _wait_done(self, entry: Entry) -> None:
        self._awaited.set()
        await entry.done.wait()

    async def _gather(self) -> None:
        """Hand entries to the drainers, many at once unless somebody waits."""
        while True:
            if not self._gathered:
                self._gathered_event = trio.Event()
                await self._gathered_event.wait()
            with trio.move_on_after(GATHER_S):
                await self._awaited.wait()
            self._to_drain.extend(self._gathered)
            self._drainers_idle.unpark(count=len(self._gathered))
            self._gathered.clear()

    async def _drain_entries(self) -> None:
        """Drain queued entries, one after the other, with as few switches of tasks as can be."""
        while True:
            if not self._to_drain:
                await self._drainers_idle.park()
                continue
            entry = self._to_drain.popleft()
            if entry.previous is not None:
                # Both wait for the lock otherwise, and the wrong one may get it first: it would
                # wait for its turn in the queue while it keeps the one ahead from draining.
                await entry.previous.done.wait()
                entry.previous = None
            await self._drain(entry)

    async def _drain(self, entry: Entry) -> None:
        """Drain one entry; its inode's lock is kept until it is committed."""
        inode = entry.inode
        try:
            inode.lock.acquire_nowait()
        except trio.WouldBlock:
            await inode.lock.acquire()
        entry.started = True
        self._wake_waiting()
        # An inode without name and handle is about to be deleted: its bytes go nowhere. One
        # that is clean was drained for an entry ahead of this one.
        is_deferred = inode.deferred_unlinks and not entry.killed_by
        is_kept = inode.nlink or inode.handles or is_deferred
        if is_kept and (self._inodes.refresh(inode) or inode.unfinished):
            began_ns = time.monotonic_ns()
            try:
                entry.snapshot = await self._engine.drain(
                    inode.ino, last=entry.last and inode.writers == 0
                )
            except OSError as error:
                self._fail(entry, error)
            self.steps.add(StepKind.DRAIN, inode.ino, began_ns)
        entry.drained = True
        if self._queue[0] is entry:
            self._progress.set()

    async def _commit_in_order(self) -> None:
        """Commit drained entries from the head of the queue, many at once."""
        while True:
            batch: list[Entry] = []
            for entry in self._queue:
                if not entry.drained or len(batch) == VERSIONS_MAX:
                    break
                batch.append(entry)
            if not batch:
                self._progress = trio.Event()
                await self._deferred_unlinks.pass_by(self._final(self._passed))
                await self._progress.wait()
                continue
            await self._commit_batch([entry for entry in batch if entry.snapshot is not None])
            for entry in batch:
                if entry.error is None:
                    self._not_kept.pop(entry.inode.ino, None)
            self._passed = batch[-1].number
            await self._deferred_unlinks.pass_by(self._final(self._passed))
            for entry in batch:
                self._queue.popleft()
                self._finish(entry)
            if not self._queue:
                self._awaited = trio.Event()
            self._wake_waiting()

    async def _commit_batch(self, batch: list[Entry]) -> None:
        """Make a batch of drained versions current, one by one if they fail together."""
        if not batch:
            return
        try:
            if len(batch) > 1 and any(entry.killed_by for entry in batch):
                await self._commit_each(batch)
            elif batch[0].killed_by:
                await self._store_quarantined(batch[0])
            else:
                await self._store(batch)
        except OSError as error:
            if len(batch) > 1:
                await self._commit_each(batch)
            else:
                self._fail(batch[0], error)

    def _fail(self, entry: Entry, error: OSError) -> None:
        entry.error = error
        self._not_kept.setdefault(entry.inode.ino, entry.number)

    def _final(self, number: int) -> int:
        """Up to which version removals are final: all that was closed before has been kept."""
        return min([number, *(failed - 1 for failed in self._not_kept.values())])

    async def _commit_each(self, batch: list[Entry]) -> None:
        for entry in batch:
            await self._commit_batch([entry])

    async def _store(self, batch: list[Entry]) -> None:
        """Run the transaction of a batch and tell the engine."""
        changed: list[Changed] = []
        final = self._final(batch[-1].number)

        def store(transaction: Transaction) -> int:
            changed.clear()
            removal = 0
            for version in versions:
                removal = max(removal, self._make_current(transaction, version, changed))
            self._deferred_unlinks.finalize(transaction, final)
            return removal

        def stored(removal: int) -> int:
            self._deferred_unlinks.finalized(final)
            return removal

        began_ns = time.monotonic_ns()
        with contextlib.ExitStack() as storing:
            versions = [self._version(entry, storing) for entry in batch]
            removal = await self._catalog.write_many(store, apply=stored)
        self._transactions += 1
        self._reclaim.removals_recorded(removal)
        for entry, version in zip(batch, versions, strict=True):
            entry.inode.synced = not entry.last
            self._now_current(version, began_ns)
        await self._apply_versions(changed)

    async def _apply_versions(self, changed: Sequence[Changed]) -> None:
        """Drop what the versions that are current now have replaced; they stay current."""
        try:
            await self._versions.apply(changed)
        except OSError as error:
            log.error("former versions cannot be given up before the next mount: %s", error)

    def _make_current(
        self, transaction: Transaction, version: Version, changed: list[Changed]
    ) -> int:
        """Make a version current, after what a policy keeps of the one before was kept."""
        if version.replaces_whole:
            changed.extend(self._versions.of_version(transaction, version.ino))
        return make_one_current(transaction, version)

    def _now_current(self, version: Version, began_ns: int) -> None:
        """Tell the engine of a version that the catalog has, by a transaction begun at a time."""
        self._committed += 1
        self._engine.committed(version.ino, version.snapshot.sequence)
        self.steps.add(StepKind.TRANSACTION, version.ino, began_ns)
        self.durability.current(version.ino, version.snapshot.acknowledged_ns)
        inode = self._inodes.cached(version.ino)
        assert inode is not None, "an inode is in the table while a version of it is queued"
        inode.unfinished = False

    async def _store_quarantined(self, entry: Entry) -> None:
        """Run the transaction of a version that a killed writer left."""
        changed: list[Changed] = []

        def store(transaction: Transaction) -> tuple[Quarantined | None, int]:
            changed.clear()
            stored = quarantine(
                transaction, version, is_all_or_nothing=self._policies.is_all_or_nothing
            )
            return stored or (None, self._make_current(transaction, version, changed))

        began_ns = time.monotonic_ns()
        with contextlib.ExitStack() as storing:
            version = self._version(entry, storing)
            quarantined, removal = await self._catalog.write_many(
                store, apply=self._quarantine.apply
            )
        self._transactions += 1
        self._reclaim.removals_recorded(removal)
        if quarantined is None:
            entry.inode.synced = False
            self._now_current(version, began_ns)
            await self._apply_versions(changed)
        else:
            self.steps.add(StepKind.QUARANTINED, entry.inode.ino, began_ns)
            await self._quarantine.finish(quarantined)

    def _version(self, entry: Entry, storing: contextlib.ExitStack) -> Version:
        """Return what the catalog stores of a drained entry, with its privileges while `storing`.

        Times are those of this moment and not of the drain, so that a utimens() which the catalog
        has already is not undone.
        """
        assert entry.snapshot is not None, "only drained entries are stored"
        attributes = self._engine.attributes(entry.inode.ino)
        return Version(
            ino=entry.inode.ino,
            snapshot=entry.snapshot,
            allocated_bytes=attributes.allocated_bytes,
            mtime_ns=attributes.mtime_ns,
            ctime_ns=attributes.ctime_ns,
            privileges_dropped=storing.enter_context(self._inodes.storing_privileges(entry.inode)),
            replaces_whole=not entry.inode.synced,
            killed_by=entry.killed_by,
        )

    def _finish(self, entry: Entry) -> None:
        """Let go of an entry that is committed or given up."""
        inode = entry.inode
        if entry.error is not None:
            self._record_failure(inode, entry.error)
        else:
            self._failures.pop(inode.ino, None)
            if inode.pending == 1:
                inode.killed_by = 0
            if entry.snapshot is None and entry.last and not entry.killed_by:
                inode.synced = False  # It was closed, and nothing was written since the sync.
        inode.lock.release()
        inode.pending -= 1
        if inode.pending == 0:
            del self._last_entries[inode.ino]
        entry.done.set()
        self._inodes.release(inode)

    def _record_failure(self, inode: Inode, error: OSError) -> None:
        reason = error.strerror or str(error)
        message = f"inode {inode.ino} keeps its previous version, the new one failed: {reason}"
        known = self._failures.get(inode.ino)
        if known is None or known.message != message:
            log.error("%s", message)
        self._failures[inode.ino] = CommitFailure(
            ino=inode.ino, errno=error.errno or errno.EIO, message=message
        )

    async def _commit_open_in_time(self) -> None:
        """Commit from time to time what stays open and only becomes longer, such as logs.

        Not what is rewritten, which is whole when it is closed, nor all-or-nothing names.
        """
        while True:
            await trio.sleep(OPEN_COMMIT_S)
            longer = [
                inode
                for inode in self._inodes
                if inode.writers and inode.nlink and not inode.pending and self._is_longer(inode)
            ]
            try:
                await self._enqueue_written(longer)
            except OSError as error:
                log.error("files that stay open are not committed this time: %s", error)

    async def _enqueue_written(self, inodes: Sequence[Inode]) -> None:
        """Queue what somebody is writing, but for all-or-nothing names."""
        if not inodes:
            return
        inos = [inode.ino for inode in inodes]

        def find_all_or_nothing(transaction: Transaction) -> set[int]:
            return {
                ino
                for ino, names in list_names(transaction, inos).items()
                if any(self._policies.is_all_or_nothing(transaction, *name) for name in names)
            }

        all_or_nothing = await self._catalog.read_many(find_all_or_nothing)
        for inode in inodes:
            # One that was closed meanwhile has been queued by that.
            if inode.writers and inode.ino not in all_or_nothing:
                self._enqueue(inode, last=False)

    def _is_longer(self, inode: Inode) -> bool:
        return (
            inode.is_regular
            and self._engine.loaded(inode.ino)
            and self._engine.attributes(inode.ino).only_longer
        )

    async def _flush_in_time(self) -> None:
        """Flush the catalog's log soon after anything was written to it."""
        while True:
            await self._catalog.wait_written()
            await trio.sleep(self._flush_delay_s)
            try:
                await self._catalog.make_durable()
            except OSError as error:
                log.critical("names and versions are no longer made durable: %s", error)
                return
