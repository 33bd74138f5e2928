"""The catalog: names, attributes and layouts in SQLite, used by trio tasks and made durable here.

What is stored is in `catalog.schema`; the operations on it are functions in `rows.dirents`,
`rows.attributes` and `rows.extents`, given to `read` or `write`.

Invariants:
  * When `write` returns, the operation's transaction is in the -wal file: it survives this process.
  * When `make_durable` returns, everything that was written before the call survives power loss.
    Frames are in the -wal file, flushed here, until a checkpoint, which flushes the log before it
    copies and the database before the log may start over; so at any moment what was durable is
    found either in the database or in the flushed log.
  * After a failed flush nothing more is written: the kernel may have dropped pages that it could
    not write, and a later flush would wrongly succeed.

Concurrency: all coroutines are for the trio thread. `catalog.executor` says where operations run: a
single one on a catalog at rest in the trio thread itself, without letting other tasks run. Flushes
run in trio's own threads, on a descriptor of their own, and do not hold up operations.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, overload

import msgspec
import trio

from fpfs.core.errors import CatalogError
from fpfs.core.threads import run_alone
from fpfs.daemon.catalog.executor import Request, RequestKind, Transaction, Worker
from fpfs.daemon.catalog.open_replicas import open_copies
from fpfs.daemon.catalog.replicas import Copies, CopyStatus, look_at
from fpfs.daemon.catalog.rows.devices import fetch_devices
from fpfs.daemon.catalog.schema import (
    NUMBER_FIRST,
    ROOT_INO,
    DeviceRecord,
    RootOwner,
    create_database,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

__all__ = ["Catalog", "CatalogStatistics", "DeviceRecord", "RootOwner", "Transaction"]

ENDED_CLEANLY = "ended_cleanly"

Result = TypeVar("Result")
Applied = TypeVar("Applied")
Operation: TypeAlias = "Callable[[Transaction], Result]"


class CatalogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the catalog was opened. Transactions without changes are not counted."""

    transactions: int
    operations: int
    flushes: int
    checkpoints: int


class Catalog:
    """An open catalog. Made by `open`; `filesystem_id` and `object_base` are fixed.

    `devices` is what it says of them when it is opened; `registry` has that of now.
    """

    def __init__(self, copies: Copies) -> None:
        """Take over what `open_copies` made; use `Catalog.open` instead."""
        connection = copies.connection
        values = dict(connection.execute("SELECT name, value FROM filesystem").fetchall())
        self.filesystem_id = str(values["filesystem_id"])
        self.object_base = int(values["object_base"]) + 1
        """A number that no earlier mount had, from which object names are made."""
        self.ended_cleanly = bool(values.get(ENDED_CLEANLY, 1))
        """Whether nothing is left of a server that died, which did not close the catalog. Who has
        seen to what it left sets this; `close` tells it to the next server."""
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            "UPDATE filesystem SET value = ? WHERE name = 'object_base'", (self.object_base,)
        )
        connection.execute("INSERT OR REPLACE INTO filesystem VALUES (?, 0)", (ENDED_CLEANLY,))
        copies.commit()
        self.devices = fetch_devices(connection)
        (self.inode_count_at_open,) = connection.execute(
            f"SELECT count(*) FROM inodes WHERE ino = {ROOT_INO} OR ino >= {NUMBER_FIRST}"
        ).fetchone()
        copies.begin()
        self._worker = Worker(copies, delivered=self._batch_delivered)
        self._worker.start()
        self._written = 0
        self._durable = 0
        self._touched: dict[int, int] = {}
        self._touched_directories: dict[int, int] = {}
        self._operations = 0
        self._flushes = 0
        self._flush_lock = trio.Lock()
        self._flush_error: OSError | None = None
        self._written_event = trio.Event()
        self._flushed: Callable[[int, int], None] | None = None
        self._closed = False

    @property
    def _copies(self) -> Copies:
        return self._worker.copies

    @property
    def path(self) -> Path:
        """The copy that SQLite writes."""
        return self._copies.path

    @property
    def recovered(self) -> tuple[str, ...]:
        """What had to be done about the copies when they were opened, in words."""
        return self._copies.recovered

    def copies(self) -> tuple[CopyStatus, ...]:
        """Return every copy that the filesystem has or should have, and what is wrong with it."""
        return self._copies.statuses()

    @staticmethod
    def format(
        path: Path, *, filesystem_id: str, devices: Sequence[DeviceRecord], root: RootOwner
    ) -> None:
        """Make an empty catalog at `path`, durable on return. Blocks.

        Raises FileExistsError when there is one, `NoSpace` or `CatalogError` when none can be made.
        """
        create_database(path, filesystem_id=filesystem_id, devices=devices, root=root)

    @classmethod
    def open(
        cls,
        *paths: Path,
        filesystem_id: str = "",
        is_new: bool = False,
        absent: Sequence[Path] = (),
    ) -> Self:
        """Open a catalog for this process alone and start its thread. Blocks.

        `paths` are its copies, one or two, on different devices; one that is missing or damaged is
        made anew, which is said in the log unless the catalog `is_new`. `filesystem_id` is what
        they must belong to, or "" for any. `absent` are copies on devices that are missing:
        they are left alone, and known as older from now on. Takes a fresh `object_base`, durably.
        Raises `CatalogMissing`, `CatalogTooNew`, `CatalogBusy`, `CatalogError`.
        """
        copies = open_copies(
            [Path(path) for path in paths],
            filesystem_id=filesystem_id,
            is_new=is_new,
            absent=absent,
        )
        return cls(copies)

    @overload
    async def read(self, operation: Operation[Result]) -> Result:
        """Without `apply`: the result is the operation's."""

    @overload
    async def read(
        self, operation: Operation[Result], *, apply: Callable[[Result], Applied]
    ) -> Applied:
        """With `apply`: the result is what that returns."""

    async def read(
        self, operation: Operation[Any], *, apply: Callable[[Any], Any] | None = None
    ) -> Any:
        """Run an operation that changes nothing; returns or raises what it does.

        `apply` is called with the result in trio's thread, in the order of operations, and returns
        the result for the caller: for memory that must agree with the catalog.
        """
        return await self._submit(operation, apply, RequestKind.READ)

    @overload
    async def write(self, operation: Operation[Result]) -> Result:
        """Without `apply`: the result is the operation's."""

    @overload
    async def write(
        self, operation: Operation[Result], *, apply: Callable[[Result], Applied]
    ) -> Applied:
        """With `apply`: the result is what that returns."""

    async def write(
        self, operation: Operation[Any], *, apply: Callable[[Any], Any] | None = None
    ) -> Any:
        """Run an operation; returns or raises what it does, once it is in the -wal file.

        The operation must only touch the transaction: it may run twice when the disk is full.
        Cancellation is not delivered meanwhile, since the operation happens anyway.
        """
        return await self._submit(operation, apply, RequestKind.WRITE)

    @overload
    async def write_urgently(self, operation: Operation[Result]) -> Result:
        """Without `apply`: the result is the operation's."""

    @overload
    async def write_urgently(
        self, operation: Operation[Result], *, apply: Callable[[Result], Applied]
    ) -> Applied:
        """With `apply`: the result is what that returns."""

    async def write_urgently(
        self, operation: Operation[Any], *, apply: Callable[[Any], Any] | None = None
    ) -> Any:
        """Run an operation like `write`, with the reserve if the device is full.

        For what makes room, and for what keeps contents that were acknowledged.
        """
        return await self._submit(operation, apply, RequestKind.URGENT_WRITE)

    @overload
    async def read_many(self, operation: Operation[Result]) -> Result:
        """Without `apply`: the result is the operation's."""

    @overload
    async def read_many(
        self, operation: Operation[Result], *, apply: Callable[[Result], Applied]
    ) -> Applied:
        """With `apply`: the result is what that returns."""

    async def read_many(
        self, operation: Operation[Any], *, apply: Callable[[Any], Any] | None = None
    ) -> Any:
        """Run an operation like `read` that may touch many rows: always in the thread."""
        return await self._submit(operation, apply, RequestKind.READ, is_long=True)

    async def write_many(
        self, operation: Operation[Result], *, apply: Callable[[Result], Result] | None = None
    ) -> Result:
        """Run an operation like `write_urgently` that may touch many rows: always in the thread."""
        kind = RequestKind.URGENT_WRITE
        result: Result = await self._submit(operation, apply, kind, is_long=True)
        return result

    async def _submit(
        self,
        operation: Operation[Any],
        apply: Callable[[Any], Any] | None,
        kind: RequestKind,
        *,
        is_long: bool = False,
    ) -> Any:
        if self._closed:
            raise CatalogError("the catalog is closed")
        if self._flush_error is not None and kind is not RequestKind.READ:
            raise CatalogError(f"the catalog was stopped by a failed flush: {self._flush_error}")
        request = Request(operation, apply, trio.lowlevel.current_task(), kind=kind)
        if not is_long and self._worker.run_now(request):
            assert request.outcome is not None, "it was run"
            return request.outcome.unwrap()
        self._worker.submit(request)
        return await trio.lowlevel.wait_task_rescheduled(_refuse_cancellation)

    def _batch_delivered(self, batch: Sequence[Request]) -> None:
        """Count a batch before its tasks run (called in trio's thread)."""
        self._operations += len(batch)
        if any(request.kind is not RequestKind.READ for request in batch):
            self._written += 1
            self._written_event.set()
            for request in batch:
                for ino, is_directory in request.touched.items():
                    self._touched[ino] = self._written
                    if is_directory:
                        self._touched_directories[ino] = self._written

    @property
    def all_durable(self) -> bool:
        """Whether everything that was answered so far would survive power loss."""
        return self._durable == self._written

    @property
    def written(self) -> int:
        """Number of the last transaction that was answered."""
        return self._written

    def on_flushed(self, tell: Callable[[int, int], None]) -> None:
        """Call `tell` after each flush: how far it goes, as `written` counts, and its begin.

        That is by ``time.monotonic_ns()``.
        """
        self._flushed = tell

    def is_durable(self, ino: int) -> bool:
        """Whether an inode's committed content and its names, as they are, survive power loss.

        Those of the directories above it are another question: see `directories_not_durable`.
        """
        return ino not in self._touched

    @property
    def directories_not_durable(self) -> Collection[int]:
        """Directories whose names would not survive power loss as they are."""
        return self._touched_directories.keys()

    def _forget_durable(self) -> None:
        """Forget which inodes were touched before what is durable by now."""
        for touched in (self._touched, self._touched_directories):
            for ino in [ino for ino, written in touched.items() if written <= self._durable]:
                del touched[ino]

    async def wait_written(self) -> None:
        """Return when there is something that is not durable yet."""
        while self.all_durable:
            self._written_event = trio.Event()
            await self._written_event.wait()

    async def make_durable(self) -> None:
        """Make everything that was answered before this call survive power loss.

        Callers that come while a flush runs share the next one. Raises `CatalogError`.
        """
        target = self._written
        async with self._flush_lock:
            if self._flush_error is not None:
                raise CatalogError(f"the catalog cannot be flushed: {self._flush_error}")
            if self._durable >= target:
                return
            covered = self._written
            began_ns = time.monotonic_ns()
            try:
                await self._flush_copies()
            except OSError as error:
                self._flush_error = error
                raise CatalogError(f"the catalog cannot be flushed: {error}") from error
            self._flushes += 1
            self._durable = covered
            if self._flushed is not None:
                self._flushed(covered, began_ns)
            self._forget_durable()

    async def _flush_copies(self) -> None:
        """Flush the logs of all copies in service, side by side. OSError when none could be.

        One that fails is put out of service: the kernel may have dropped what it could not write.
        """
        error: OSError | None = None
        is_flushed = False
        async with trio.open_nursery() as nursery:
            if self._copies.has_follower:
                nursery.start_soon(run_alone, self._copies.flush_follower)
            try:
                is_flushed = await run_alone(self._copies.flush_leader)
            except OSError as failure:
                error = failure
        if error is not None:
            raise error
        if not is_flushed:
            # The thread changes the leader, which makes all that was gathered durable.
            await self.write_many(lambda _transaction: None)

    async def move_copies(self, *paths: Path) -> None:
        """Have copies at `paths`, where one of them is, and go on with them.

        What is not there yet is made. Operations wait meanwhile. Copies that are elsewhere are not
        written any more, and left. Raises `CatalogError`, and goes on as before.
        """
        event = trio.Event()
        failures: list[Exception] = []

        def moved(error: Exception | None) -> None:
            failures.extend([error] if error else [])
            event.set()

        def reopen() -> Copies:
            before = [Path(copy.path) for copy in look_at(self.copies()) if not copy.trouble]
            try:
                copies = open_copies(paths, filesystem_id=self.filesystem_id, is_new=True)
            except OSError as error:
                failures.append(error)
                copies = open_copies(before, filesystem_id=self.filesystem_id, is_new=True)
            copies.begin()
            return copies

        async with self._flush_lock:
            with trio.CancelScope(shield=True):
                self._worker.move(reopen, moved)
                await event.wait()
        if failures:
            raise CatalogError(f"the catalog cannot be moved: {failures[0]}") from failures[0]

    def statistics(self) -> CatalogStatistics:
        """Return the counters."""
        return CatalogStatistics(
            transactions=self._written,
            operations=self._operations,
            flushes=self._flushes,
            checkpoints=self._worker.checkpoints,
        )

    async def close(self) -> None:
        """Finish what is queued, copy the log into the database, stop the thread."""
        if self._closed:
            return
        if self._flush_error is None and self.ended_cleanly:
            with contextlib.suppress(OSError):  # it is opened as after a crash then
                await self.write_urgently(_note_clean_end)
        self._closed = True
        with trio.CancelScope(shield=True):
            await run_alone(self._worker.stop)


def _note_clean_end(transaction: Transaction) -> None:
    transaction.execute("UPDATE filesystem SET value = 1 WHERE name = ?", (ENDED_CLEANLY,))


def _refuse_cancellation(_raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED
