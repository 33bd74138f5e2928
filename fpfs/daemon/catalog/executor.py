"""The catalog's worker: runs operations in order, in its own thread or in that of the caller.

Handing an operation to a thread and its outcome back costs more than twice what SQLite takes for
it (400 us against 80 us for a new name, where this was measured). So an operation that finds the
catalog at rest is run where it is asked for; what comes while others run, or is said to be long,
is queued for the thread, which puts what it finds queued into one transaction. The thread alone
checkpoints: that waits for the device. Transactions only write to the page cache.

Invariants:
  * An operation sees the effects of all operations queued before it and of none behind it.
  * An operation's outcome is delivered after the transaction that holds it is in the -wal file.
  * Outcomes are delivered, and their `apply` functions called, in the order of the operations:
    tasks resume in any order, so what must agree with the catalog is changed by `apply`.
  * An operation that fails takes back its own changes only.

Concurrency: `run_now` and `submit` are called from the trio thread; everything prefixed with an
underscore runs in the worker's thread, except `_deliver`, which trio runs. Whoever holds `_running`
owns the connection.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import queue
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import outcome
import trio

from fpfs.core.errors import CatalogError, NoSpace, ReadOnly
from fpfs.daemon.catalog.replicas import FAILURES, Copies
from fpfs.daemon.catalog.schema import LOG_BYTES_KEPT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

BATCH_MAX = 256
"""Operations in one transaction at most: bounds how long the first of them waits."""

NUMBERS_RESERVED = 4096
"""Inode numbers and cookies taken from the counter's row at once."""

IDLE_S = 0.2
"""Quiet time after which the log is checkpointed."""

CHANGES_IDLE = 512
"""Changed rows below which an idle checkpoint is not worth its flushes."""

LOG_BYTES_MAX = 64 * 1024 * 1024
"""Size of the log at which a checkpoint no longer waits for a quiet moment."""


class Transaction:
    """What an operation gets: SQL, and fresh numbers.

    An operation fetches all rows it asks for before it may raise: a statement that is left in the
    middle, kept alive by the error's traceback, holds up checkpoints.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Start behind the numbers that the database says may be in use."""
        self.move(connection)
        row = self.execute("SELECT value FROM filesystem WHERE name = 'next_number'").fetchone()
        self._next = int(row[0])
        self._limit = self._next
        self._touched: dict[int, bool] = {}

    def move(self, connection: sqlite3.Connection) -> None:
        """Go on with another database of the same content."""
        self.execute = connection.execute
        self.executemany = connection.executemany

    def take_number(self) -> int:
        """Return a number that was never returned before in this filesystem."""
        if self._next == self._limit:
            self._limit += NUMBERS_RESERVED
            self.execute(
                "UPDATE filesystem SET value = ? WHERE name = 'next_number'", (self._limit,)
            )
        self._next += 1
        return self._next - 1

    def touch(self, ino: int, *, is_directory: bool = False) -> None:
        """Note that an inode's content or names change: they are not durable until the next flush.

        Said of what appears or moves, which is what somebody may look for after power loss.
        """
        self._touched[ino] = is_directory

    def take_touched(self) -> Mapping[int, bool]:
        """Return which inodes were touched since the last call, and whether each is a directory."""
        touched = self._touched
        if touched:
            self._touched = {}
        return touched

    @property
    def number_bound(self) -> int:
        """A number that all numbers taken so far are below, and all later ones are not."""
        return self._next

    def rolled_back(self) -> None:
        """Write the counter again before the next number: its last change may be undone."""
        self._limit = self._next


class RequestKind(enum.Enum):
    """What an operation does with the catalog.

    READ changes nothing. WRITE is refused while the reserve is in use. URGENT_WRITE makes room, or
    keeps what was acknowledged, and may use the reserve for it.
    """

    READ = 0
    WRITE = 1
    URGENT_WRITE = 2


class Request:
    """One queued operation, what takes its result over, and the task that waits for it."""

    __slots__ = ("apply", "kind", "operation", "outcome", "task", "touched")

    def __init__(
        self,
        operation: Callable[[Transaction], Any],
        apply: Callable[[Any], Any] | None,
        task: trio.lowlevel.Task,
        *,
        kind: RequestKind,
    ) -> None:
        """Keep what the worker needs."""
        self.operation = operation
        self.apply = apply
        self.task = task
        self.kind = kind
        self.outcome: outcome.Outcome[Any] | None = None
        self.touched: Mapping[int, bool] = {}


class _Move:
    """In the queue: the catalog is to be closed, and opened again as `reopen` does it."""

    def __init__(self, reopen: Callable[[], Copies], moved: Callable[[Exception | None], None]):
        self.reopen = reopen
        self.moved = moved


class _Look:
    """In the queue: the thread is to look whether a checkpoint is due."""


_Queued: TypeAlias = Request | _Look | _Move | Exception | None
"""Operations, and what the thread is to do beside them: end with an error, or at None in order."""


class Worker:
    """Owner of the connection and its thread."""

    def __init__(self, copies: Copies, *, delivered: Callable[[Sequence[Request]], None]) -> None:
        """Take over open copies. `delivered` is called in trio's thread, in order."""
        self._copies = copies
        self._transaction = Transaction(copies.connection)
        self._queue: queue.SimpleQueue[_Queued] = queue.SimpleQueue()
        self._move: _Move | None = None  # The thread only.
        self._delivered = delivered
        self._unanswered = 0  # Requests queued and not delivered. Trio thread only.
        self._running = threading.Lock()
        self._ran_s = 0.0
        self._follower_is_due = False  # Its log is to be copied. The thread only.
        self._is_watching = False  # The thread will look for a quiet moment. Under `_running`.
        self._trio_token: trio.lowlevel.TrioToken | None = None
        self._changes_checkpointed = copies.connection.total_changes
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)
        self.checkpoints = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def run_now(self, request: Request) -> bool:
        """Run an operation here if the catalog is at rest; returns whether it was run.

        What is in trouble (a full device, an error of SQLite's) is left to the thread, which may
        wait for the device: the operation is run again there. After any other error the thread
        ends, and the server with it.
        """
        if self._unanswered:
            return False
        try:
            if not self._run_at_rest(request):
                return False
            self._apply([request])
        except Exception as error:  # noqa: BLE001 (memory that is short, or a bug)
            # The catalog may have what memory does not: another server begins with what it has.
            self._queue.put(error)
            return False
        return True

    def _run_at_rest(self, request: Request) -> bool:
        """Run an operation in trio's thread; returns whether it was run."""
        if not self._running.acquire(blocking=False):
            return False
        try:
            if self._copies.leader_error is not None:
                return False
            if request.kind is RequestKind.READ:
                self._run_read(request)
            elif self._copies.reserve.held and not self._log_is_long():
                # (A checkpoint that is due would wait for a moment without operations here.)
                self._run_together([request])
                self._watch()
            else:
                return False
        except (sqlite3.Error, OSError) as error:
            log.debug("the catalog's thread is to run an operation again: %s", error)
            self._transaction.rolled_back()
            return False
        finally:
            self._running.release()
        return True

    def submit(self, request: Request) -> None:
        """Queue an operation. Never blocks."""
        if self._trio_token is None:
            self._trio_token = trio.lowlevel.current_trio_token()
        self._unanswered += 1
        self._queue.put(request)

    @property
    def copies(self) -> Copies:
        """The copies in use."""
        return self._copies

    def move(self, reopen: Callable[[], Copies], moved: Callable[[Exception | None], None]) -> None:
        """Close the catalog behind what is queued, and open it again as `reopen` does it.

        Never blocks. `moved` is called in trio's thread: None, or why it stays where it was.
        """
        if self._trio_token is None:
            self._trio_token = trio.lowlevel.current_trio_token()
        self._unanswered += 1
        self._queue.put(_Move(reopen, moved))

    def stop(self) -> None:
        """Run what is queued, checkpoint, close the connection, end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Serve until `stop`."""
        stopping = False
        while not stopping:
            batch, stopping = self._collect()
            with self._running:
                if batch:
                    self._run_or_refuse(batch)
                    self._ran_s = time.monotonic()
                    self._hand_over(batch)
                if self._move is not None:
                    self._reopen(self._move)
                    self._move = None
                if stopping:
                    self._close()
                elif self._log_is_long():
                    self._checkpoint("PASSIVE")

    def _reopen(self, move: _Move) -> None:
        """Close the catalog and open it again, with other copies perhaps."""
        error: Exception | None = None
        try:
            if not self._checkpoint("TRUNCATE"):
                raise CatalogError("the catalog's log cannot be copied into its database now")
            self._copies.connection.close()
            self._copies.close()
            self._copies = move.reopen()
            self._transaction.move(self._copies.connection)
            self._transaction.rolled_back()
            self._changes_checkpointed = self._copies.connection.total_changes
        except (sqlite3.Error, OSError) as failure:
            error = failure
        assert self._trio_token is not None, "move() stores the token before it queues"
        with contextlib.suppress(trio.RunFinishedError):
            self._trio_token.run_sync_soon(self._moved, move, error)

    def _moved(self, move: _Move, error: Exception | None) -> None:
        self._unanswered -= 1
        move.moved(error)

    def _close(self) -> None:
        """Copy the logs into the databases and close them.

        Closing copies the log, so where the sums of its pages cannot be kept it stays open.
        """
        if self._checkpoint("TRUNCATE"):
            try:
                self._copies.connection.close()
            except sqlite3.Error as error:
                log.error("the catalog's database could not be closed: %s", error)
        self._copies.close()

    def _watch(self) -> None:
        """Have the thread look for the moment of a checkpoint, after an operation run elsewhere."""
        self._ran_s = time.monotonic()
        is_idle_soon = not self._is_watching and self._changes_since_checkpoint() > CHANGES_IDLE
        if is_idle_soon or self._log_is_long() or self._copies.is_follower_behind:
            self._is_watching = True
            self._queue.put(_Look())

    def _run_or_refuse(self, batch: list[Request]) -> None:
        """Fill in the outcome of every request, whatever the devices do: they are waited for."""
        try:
            try:
                self._run_with_leader(batch)
            except (sqlite3.Error, OSError) as error:
                if not self._is_failure(error):
                    raise
                self._copies.leader_error = error
                self._run_with_leader(batch)
        except (sqlite3.Error, OSError) as error:
            log.error("the catalog's device fails: %s", error)
            # One of ours says so itself.
            told = error.strerror if isinstance(error, CatalogError) else None
            wrong = told or f"the catalog's device fails: {error}"
            for request in batch:
                if request.kind is not RequestKind.READ or request.outcome is None:
                    request.outcome = outcome.Error(CatalogError(wrong))

    def _run_with_leader(self, batch: list[Request]) -> None:
        """Run a batch, with another leader if this one must not be used any more."""
        if self._copies.leader_error is not None:
            self._copies.fail_over()
            self._transaction.move(self._copies.connection)
            self._transaction.rolled_back()
            self._changes_checkpointed = self._copies.connection.total_changes
        self._run_batch(batch)

    def _is_failure(self, error: BaseException) -> bool:
        """Whether the leader cannot be used, and another copy can."""
        if not self._copies.has_follower:
            return False
        if isinstance(error, sqlite3.Error):
            return _error_code(error) in FAILURES
        return error is self._copies.leader_error

    def _collect(self) -> tuple[list[Request], bool]:
        """Wait for operations; checkpoint when none come for a while."""
        first = self._wait()
        batch: list[Request] = []
        while first is not None:
            if isinstance(first, _Move):
                self._move = first
                return batch, False
            if isinstance(first, Exception):
                raise first
            if isinstance(first, Request):
                batch.append(first)
            if len(batch) == BATCH_MAX:
                return batch, False
            try:
                first = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _wait(self) -> _Queued:
        """Return what is queued next. Meanwhile, checkpoint in a quiet moment."""
        while True:
            with self._running:
                self._is_watching = self._changes_since_checkpoint() > CHANGES_IDLE
                quiet_s = time.monotonic() - self._ran_s
                if self._is_watching and quiet_s >= IDLE_S:
                    self._checkpoint("PASSIVE")
                    self._copies.reserve.restore()
                    self._is_watching = False
                timeout_s = IDLE_S - quiet_s if self._is_watching else None
            self._tend_follower()
            try:
                return self._queue.get(timeout=timeout_s)
            except queue.Empty:
                continue

    def _run_batch(self, batch: list[Request]) -> None:
        """Fill in the outcome of every request."""
        if all(request.kind is RequestKind.READ for request in batch):
            for request in batch:
                self._run_read(request)
            return
        if self._copies.connection.in_transaction:
            self._roll_back()  # what `run_now` left behind
        try:
            self._run_together(batch)
        except sqlite3.Error as error:
            if self._is_failure(error):
                raise
            # The transaction as a whole failed (a full disk, say). Each operation is given its own
            # chance, so that those that free space, or change nothing, are not lost with others.
            log.warning("catalog transaction of %d operations failed: %s", len(batch), error)
            self._roll_back()
            if _error_code(error) == sqlite3.SQLITE_FULL:
                # The log may start over in the place it has.
                self._checkpoint("PASSIVE")
            for request in batch:
                self._run_alone(request)

    def _run_together(self, batch: list[Request]) -> None:
        """Run a batch in one transaction; sqlite3.Error when that did not become one."""
        execute = self._copies.connection.execute
        is_full = not self._copies.reserve.restore()
        execute("BEGIN IMMEDIATE")
        for request in batch:
            if request.kind is RequestKind.READ:
                self._run_read(request)
                continue
            if is_full and request.kind is RequestKind.WRITE:
                request.outcome = outcome.Error(
                    NoSpace("the catalog's device is full, and its reserve is for removals")
                )
                continue
            execute("SAVEPOINT operation")
            request.outcome = outcome.capture(request.operation, self._transaction)
            request.touched = self._transaction.take_touched()
            if isinstance(request.outcome, outcome.Error):
                self._take_back(request)
            execute("RELEASE operation")
        self._copies.commit()

    def _take_back(self, request: Request) -> None:
        """Undo a failed operation's changes, or raise when SQLite already undid more than that."""
        if isinstance(request.outcome, outcome.Error):
            error = request.outcome.error
            if self._is_failure(error):
                raise error
            if not self._copies.connection.in_transaction:
                raise error if isinstance(error, sqlite3.Error) else sqlite3.Error(str(error))
            self._copies.connection.execute("ROLLBACK TO operation")
            self._transaction.rolled_back()
            request.outcome = outcome.Error(_translated(error))

    def _run_alone(self, request: Request) -> None:
        """Run one request in its own transaction, with the reserve if it has a right to it."""
        if request.kind is RequestKind.READ:
            self._run_read(request)
            return
        try:
            self._run_together([request])
        except sqlite3.Error as error:
            if self._is_failure(error):
                raise
            self._roll_back()
            request.outcome = outcome.Error(_translated(error))
            is_full = _error_code(error) == sqlite3.SQLITE_FULL
            urgent = request.kind is RequestKind.URGENT_WRITE
            if is_full and urgent and self._copies.reserve.give_up():
                self._checkpoint("PASSIVE")
                self._run_alone(request)

    def _run_read(self, request: Request) -> None:
        """Run an operation that changes nothing."""
        found = outcome.capture(request.operation, self._transaction)
        if isinstance(found, outcome.Error):
            if self._is_failure(found.error):
                raise found.error
            found = outcome.Error(_translated(found.error))
        request.outcome = found

    def _roll_back(self) -> None:
        """End a transaction that failed, if SQLite has not done so itself."""
        if self._copies.connection.in_transaction:
            self._copies.connection.execute("ROLLBACK")
        self._transaction.rolled_back()

    def _changes_since_checkpoint(self) -> int:
        return self._copies.connection.total_changes - self._changes_checkpointed

    def _log_is_long(self) -> bool:
        """Whether a checkpoint is due. The log shrinks with the first commit after it.

        On a nearly full device the log stays small enough for its copy to find room.
        """
        changes = self._changes_since_checkpoint()
        try:
            log_bytes = os.fstat(self._copies.log_descriptor).st_size
            if changes == 0 or log_bytes <= LOG_BYTES_KEPT:
                return False
            if log_bytes > LOG_BYTES_MAX and changes > CHANGES_IDLE:
                return True
            device = os.fstatvfs(self._copies.log_descriptor)
        except OSError as error:
            log.debug("the catalog's log cannot be looked at: %s", error)
            return False
        return log_bytes > device.f_bavail * device.f_frsize // 2

    def _checkpoint(self, mode: str) -> bool:
        """Copy the logs into the databases; returns whether the leader's log could be.

        A failure costs nothing but a longer log.
        """
        connection = self._copies.connection
        copied = False
        try:
            self._copies.prepare_checkpoint()
            connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
            copied = True
        except (sqlite3.Error, OSError) as error:
            log.warning("catalog checkpoint failed, the log grows on: %s", error)
        self._changes_checkpointed = connection.total_changes
        self.checkpoints += 1
        self._follower_is_due = True
        return copied

    def _tend_follower(self) -> None:
        """Write what has gathered for the follower; operations may run meanwhile."""
        if self._follower_is_due:
            self._follower_is_due = False
            self._copies.checkpoint_follower()
        elif self._copies.is_follower_behind:
            self._copies.write_follower()

    def _hand_over(self, batch: list[Request]) -> None:
        """Let trio resume the waiting tasks."""
        assert self._trio_token is not None, "submit() stores the token before it queues"
        try:
            self._trio_token.run_sync_soon(self._deliver, batch)
        except trio.RunFinishedError:
            log.debug("trio ended before %d catalog operations were answered", len(batch))

    def _deliver(self, batch: list[Request]) -> None:
        """Resume the tasks of a batch (in trio's thread)."""
        self._unanswered -= len(batch)
        self._apply(batch)
        for request in batch:
            assert request.outcome is not None, "a delivered request was run"
            trio.lowlevel.reschedule(request.task, request.outcome)

    def _apply(self, batch: Sequence[Request]) -> None:
        """Let memory follow the catalog, in order (in trio's thread)."""
        self._delivered(batch)
        for request in batch:
            if request.apply is not None and isinstance(request.outcome, outcome.Value):
                request.outcome = outcome.capture(request.apply, request.outcome.value)


def _error_code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _translated(error: BaseException) -> BaseException:
    """Return the error of fpfs for what SQLite reports; other errors are returned as they are."""
    if not isinstance(error, sqlite3.Error):
        return error
    code = _error_code(error)
    kind: type[NoSpace | ReadOnly | CatalogError]
    if code == sqlite3.SQLITE_FULL:
        kind = NoSpace
    elif code == sqlite3.SQLITE_READONLY:
        kind = ReadOnly
    else:
        kind = CatalogError
    translated = kind(f"the catalog answered: {error}")
    translated.__cause__ = error
    return translated
