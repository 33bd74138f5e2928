"""The copies of the catalog in use: the one that SQLite writes, and the one that follows it.

SQLite writes the *leader*. What a transaction wrote to its log is read from there before the
operation is answered, and gathered in memory for the *follower*, whose log gets the latest content
of each page, as one transaction, whenever something is to be durable. See
`native/src/catalog/catalog_mirror.h`; `catalog.open_replicas` decides at mount which copy leads.

Invariants:
  * The follower, with what is gathered for it, holds every transaction that was answered: when the
    leader fails, the follower takes its place and nothing that was answered is lost.
  * Every transaction has a number, so that copies can be compared. After a change of the leader one
    number is left out: a copy that failed may hold a transaction that was never answered. Numbers
    of a copy that went on without the other say nothing: a note beside it tells that it is newer.
  * The sums of pages are flushed before SQLite may copy the log into the database.
  * A copy that failed is not written again before the next mount, which makes it anew.

Concurrency: whoever owns the connection (`catalog.executor`) calls everything but `flush_follower`,
which runs in a thread of its own beside it.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fpfs.core.engine import CatalogFiles, CatalogLeader, CatalogMirror
from fpfs.core.errors import CatalogError
from fpfs.daemon.catalog.reserve import RESERVE_NAME, Reserve
from fpfs.daemon.catalog.safe_open import make_regular
from fpfs.daemon.catalog.schema import SEQUENCE, flush_directory, open_database

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

log = logging.getLogger(__name__)

FAILURES = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
    }
)
"""SQLite's result codes that say that a copy cannot be used. A full device is no such thing."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

PENDING_PAGES_MAX = 8192
"""Pages that are gathered in memory for the follower (32 MiB) before it is written unasked."""


ALONE_NAME = "catalog.alone"
"""A file beside a copy that went on without the other, which is older from then on."""


def note_alone(copy: Path) -> None:
    """Leave a note that other copies lack changes that this one has. Blocks.

    Without it, this copy's loss would silently bring back an older state.
    """
    try:
        os.close(make_regular(copy.with_name(ALONE_NAME)))
        flush_directory(copy.parent)
    except OSError as error:
        log.warning("it cannot be noted that catalog %s goes on alone: %s", copy, error)


def check_one_went_on(copies: Sequence[Path]) -> None:
    """Refuse two copies of which each went on without the other: both have what the other lacks.

    Raises `CatalogError`. Blocks.
    """
    alone = [path for path in copies if path.with_name(ALONE_NAME).exists()]
    if len(alone) > 1:
        raise CatalogError(
            f"catalogs {alone[0]} and {alone[1]} were each changed without the other",
            remedy=f"choose one state: remove catalog.db and {ALONE_NAME} beside the other copy",
        )


def forget_alone(copy: Path) -> None:
    """Take that note back, durably: the other copies have all that this one has. Blocks."""
    note = copy.with_name(ALONE_NAME)
    if note.exists():
        note.unlink()
        flush_directory(copy.parent)


def leading(copies: Mapping[Path, int]) -> Path:
    """Return the newest of sound copies, given the number of the last transaction of each.

    One that went on without the others is newer than they, whatever its number is: a leader that
    was lost before its last transactions were durable in its follower has the larger one.
    """
    alone = [copy for copy in copies if copy.with_name(ALONE_NAME).exists()]
    return alone[0] if len(alone) == 1 else max(copies, key=copies.__getitem__)


def _open_log(path: Path) -> int:
    return os.open(f"{path}-wal", os.O_RDONLY | os.O_CLOEXEC)


class CopyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of the catalog: where it is, and why it is out of service, if it is."""

    path: str
    trouble: str = ""


def look_at(copies: Sequence[CopyStatus]) -> tuple[CopyStatus, ...]:
    """Add what is wrong with copies whose files somebody removed while they are in use. Blocks."""
    return tuple(
        msgspec.structs.replace(copy, trouble=copy.trouble or _removed(Path(copy.path)))
        for copy in copies
    )


def _removed(path: Path) -> str:
    try:
        return "" if path.exists() else "it was removed; the next mount makes it anew"
    except OSError:
        return ""  # its device has failed, which is told of as such


class Copies:
    """The copies in service. Made by `catalog.open_replicas`; `connection` is the leader's."""

    def __init__(
        self,
        paths: Sequence[Path],
        leader: Path,
        connection: sqlite3.Connection,
        *,
        files: CatalogFiles,
        follower: Path | None,
        mirror: CatalogMirror | None,
        lock_fds: Sequence[int],
        troubles: dict[Path, str],
        recovered: Sequence[str],
    ) -> None:
        """Take over an open connection, a mirror at the same state, and the folders' locks.

        `troubles` are of those of `paths` that are not in service; `recovered` is what was done.
        """
        self.path = leader
        self.connection = connection
        self.reserve = Reserve(leader.parent / RESERVE_NAME)
        self._leader = CatalogLeader(files)
        self._mirror = mirror
        self._follower = follower
        self._follower_reserve = Reserve(follower.parent / RESERVE_NAME) if follower else None
        self._lock_fds = list(lock_fds)
        self._troubles = dict(troubles)
        self._paths = tuple(paths)
        self.recovered = tuple(recovered)
        self._changing = threading.Lock()
        row = connection.execute(
            "SELECT value FROM filesystem WHERE name = ?", (SEQUENCE,)
        ).fetchone()
        self._sequence = int(row[0])
        self._changes = connection.total_changes
        self._left: list[object] = []
        self.leader_error: Exception | None = None
        """Why the leader must not be used any more."""
        self._log_descriptor = -1

    @property
    def has_follower(self) -> bool:
        """Whether there is another copy that could lead."""
        return self._mirror is not None

    @property
    def log_descriptor(self) -> int:
        """A descriptor of the leader's log.

        There is none of the database file, since closing one would drop SQLite's locks.
        """
        if self._log_descriptor < 0:
            self._log_descriptor = _open_log(self.path)
        return self._log_descriptor

    def begin(self) -> None:
        """Make what was committed so far durable in all copies, which are the same then. Blocks.

        From then on the space of the reserves is held where the devices have it.
        """
        os.fsync(self.log_descriptor)
        flush_directory(self.path.parent)
        self.flush_follower()
        if not self._troubles:
            for path in self._paths:
                forget_alone(path)
        for reserve in (self.reserve, self._follower_reserve):
            if reserve is not None and not reserve.restore():
                log.info("a copy of the catalog has no room for its reserve")

    def statuses(self) -> tuple[CopyStatus, ...]:
        """Every copy that the filesystem has, or should have. Their files are not looked at."""
        return tuple(
            CopyStatus(path=str(path), trouble=self._troubles.get(path, "")) for path in self._paths
        )

    def commit(self) -> None:
        """End a transaction. Then it is in the leader's log, and gathered for the follower.

        Raises sqlite3.Error when it did not become one. OSError: it cannot be handed on, so that
        the leader must not be used any more.
        """
        connection = self.connection
        if connection.total_changes == self._changes:
            connection.execute("COMMIT")
            return
        connection.execute(
            "UPDATE filesystem SET value = ? WHERE name = ?", (self._sequence + 1, SEQUENCE)
        )
        connection.execute("COMMIT")
        self._sequence += 1
        self._changes = connection.total_changes
        mirror = self._mirror
        if mirror is None:
            return
        try:
            if self._leader.collect(mirror) == 0:
                raise OSError(errno.EIO, "the log does not hold what was written to it")
        except OSError as error:
            self.leader_error = error
            raise

    @property
    def is_follower_behind(self) -> bool:
        """Whether so much is gathered in memory that the follower should be written."""
        mirror = self._mirror
        return mirror is not None and mirror.pending_pages > PENDING_PAGES_MAX

    def write_follower(self) -> None:
        """Write what is gathered, without a flush. Blocks."""
        mirror = self._mirror
        if mirror is not None:
            self._call_follower(mirror.write)

    def flush_follower(self) -> None:
        """Make everything that was committed before this call durable in the follower. Blocks."""
        mirror = self._mirror
        if mirror is not None:
            self._call_follower(mirror.flush)

    def _call_follower(self, call: Callable[[], None], *, may_wait: bool = False) -> None:
        """Call a method of the mirror, with the reserve if its device is full.

        A failure puts the follower out of service, unless it is for room and the call `may_wait`.
        """
        reserve = self._follower_reserve
        assert reserve is not None, "there is one for every follower"
        try:
            try:
                call()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                with reserve.lent():
                    call()
        except OSError as error:
            if may_wait and error.errno in NO_ROOM:
                log.debug("the log of %s grows on: %s", self._follower, error)
            else:
                self._drop_follower(error)

    def _drop_follower(self, error: Exception) -> None:
        with self._changing:
            if self._mirror is None:
                return
            assert self._follower is not None, "a mirror is of a follower"
            self._mirror = None
            self._put_out_of_service(self._follower, error)
            note_alone(self.path)
            log.error(
                "the catalog's copy %s is out of service (%s): going on with %s alone",
                self._follower,
                error,
                self.path,
            )

    def _put_out_of_service(self, path: Path, error: Exception) -> None:
        self._troubles[path] = f"out of service until the next mount: {error}"

    def flush_leader(self) -> bool:
        """Flush the leader's log; returns False when that failed and the copy is used no more.

        A copy that leads no more by then gave way to one that was flushed first: that is no
        failure. Raises OSError when there is no other copy. Blocks. Any thread.
        """
        with self._changing:
            leader, log_descriptor = self.path, os.dup(self.log_descriptor)
        try:
            os.fdatasync(log_descriptor)
        except OSError as error:
            with self._changing:
                if self.path != leader:
                    return True
                if self._mirror is None:
                    raise
                self.leader_error = error
                return False
        finally:
            os.close(log_descriptor)
        return True

    def fail_over(self) -> None:
        """Let the follower lead, because the leader failed. Blocks.

        Raises `CatalogError` when there is none that could.
        """
        error, mirror, follower = self.leader_error, self._mirror, self._follower
        if mirror is None or follower is None:
            raise CatalogError(f"the catalog's device fails: {error}")
        self.flush_follower()
        if self._mirror is None:
            raise CatalogError(f"the catalog's devices fail: {error}; {self._troubles[follower]}")
        try:
            files = CatalogFiles(str(follower))
            files.check()
            connection = open_database(follower)
            log_descriptor = _open_log(follower)
        except OSError as second:
            self._drop_follower(second)
            raise CatalogError(f"the catalog's devices fail: {error}; {second}") from second
        assert error is not None, "the leader failed"
        note_alone(follower)
        log.error(
            "the catalog's copy %s is out of service (%s): going on with %s alone",
            self.path,
            error,
            follower,
        )
        self._put_out_of_service(self.path, error)
        # Closing the connection would try to write; the mirror has the database open, and closing
        # that would drop the locks of SQLite, which has it open now.
        self._left += [self.connection, mirror]
        with self._changing:
            self._mirror = None
            self.path, self.connection, self._leader = follower, connection, CatalogLeader(files)
            self.leader_error = None
            former, self._log_descriptor = self._log_descriptor, log_descriptor
        if former >= 0:
            os.close(former)
        assert self._follower_reserve is not None, "there is one for every follower"
        self.reserve = self._follower_reserve
        self._sequence += 1
        self._changes = connection.total_changes

    def prepare_checkpoint(self) -> None:
        """Flush the leader's log and the sums of its pages: SQLite may copy it then. Blocks."""
        if self._mirror is None:
            self._leader.collect(None)
        self._leader.store_sums()

    def checkpoint_follower(self) -> None:
        """Copy the follower's log into its database. A full device costs a longer log. Blocks."""
        mirror = self._mirror
        if mirror is None:
            return
        assert self._follower_reserve is not None, "there is one for every follower"
        self._call_follower(mirror.checkpoint, may_wait=True)
        self._follower_reserve.restore()

    def close(self) -> None:
        """Let go of everything but the leader's connection. Blocks."""
        mirror = self._mirror
        if mirror is not None:
            self._call_follower(mirror.close)
            self._mirror = None
        if self._log_descriptor >= 0:
            os.close(self._log_descriptor)
        while self._lock_fds:
            os.close(self._lock_fds.pop())
