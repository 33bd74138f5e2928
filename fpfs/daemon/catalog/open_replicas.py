"""Opening the catalog: the newest sound copy leads, and the other is made the same.

Invariants:
  * Nothing is changed on any device before one copy was found sound.
  * A copy is replaced whole or not at all; the one it is made from stays as it is meanwhile.
  * A copy of another filesystem is refused, never overwritten.

Concurrency: the functions block; they run before the catalog is used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import CatalogFiles, CatalogMirror
from fpfs.core.errors import CatalogBusy, CatalogError, CatalogMissing, CatalogTooNew
from fpfs.daemon.catalog.migration import migrate
from fpfs.daemon.catalog.replicas import (
    ALONE_NAME,
    PENDING_PAGES_MAX,
    Copies,
    check_one_went_on,
    leading,
    note_alone,
)
from fpfs.daemon.catalog.reserve import RESERVE_NAME, empty_if_full
from fpfs.daemon.catalog.schema import FORMAT_VERSION, SEQUENCE, open_database
from fpfs.daemon.catalog.schema_check import shape_fault

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


class _Copy(NamedTuple):
    """A copy as it was found; `trouble` says why it cannot be used, if it cannot."""

    path: Path
    files: CatalogFiles
    trouble: str
    is_missing: bool

    @property
    def is_sound(self) -> bool:
        return not self.trouble


def open_copies(
    paths: Sequence[Path], *, filesystem_id: str, is_new: bool, absent: Sequence[Path] = ()
) -> Copies:
    """Open the catalog whose copies are, or should be, at `paths`; the first one is preferred.

    `filesystem_id` is what they must belong to, or "" for any. `is_new`: it was made just now, so
    that it is no news when a copy is missing. `absent` are copies whose devices are missing.
    Raises `CatalogMissing`, `CatalogTooNew`, `CatalogBusy`, `CatalogError`.
    """
    lock_fds: list[int] = []
    try:
        lock_fds += [_lock(path) for path in paths if path.parent.is_dir()]
        with ThreadPoolExecutor() as threads:  # each waits for its own device
            found = list(threads.map(_examine, paths))
        sound = [copy for copy in found if copy.is_sound]
        if not sound:
            raise _refusal(found)
        _check_none_is_newer(found)
        for copy in sound:
            _check_format(copy)
            if not copy.files.has_sums:
                _add_sums(copy)
            _check_identity(copy, filesystem_id or sound[0].files.filesystem_id)
        with ThreadPoolExecutor() as threads:
            checkpointed = list(threads.map(_checkpoint_log, sound))
        found = [*checkpointed, *(copy for copy in found if not copy.is_sound)]
        sound = [copy for copy in checkpointed if copy.is_sound]
        if not sound:
            raise _refusal(found)
        _check_none_is_newer(found)
        check_one_went_on([copy.path for copy in sound])
        leader = _choose(sound)
        troubles: dict[Path, str] = {}
        recovered: list[str] = []
        follower, mirror = None, None
        for copy in found:
            if copy is not leader:
                mirror = _make_follower(copy, leader, troubles, recovered)
                follower = copy.path
        for path in absent:
            troubles[path] = "its device is missing"
            note_alone(leader.path)
        if not is_new:
            for line in recovered:
                log.warning("%s", line)
        connection = open_database(leader.path)
        try:
            migrate(connection)
            _check_shape(connection, leader.path)
        except CatalogError:
            connection.close()
            raise
        return Copies(
            (*paths, *absent),
            leader.path,
            connection,
            files=leader.files,
            follower=follower if mirror else None,
            mirror=mirror,
            lock_fds=lock_fds,
            troubles=troubles,
            recovered=() if is_new else recovered,
        )
    except BaseException:
        for lock_fd in lock_fds:
            os.close(lock_fd)
        raise


def _lock(path: Path) -> int:
    """Lock a copy's folder; returns the descriptor that holds the lock."""
    lock_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        raise CatalogBusy(f"catalog {path} is in use by another process") from None
    return lock_fd


def _examine(path: Path) -> _Copy:
    """Look whether a copy is sound, and change nothing."""
    files = CatalogFiles(str(path))
    try:
        files.check()
    except OSError as error:
        is_missing = error.errno == errno.ENOENT
        trouble = "it is missing" if is_missing else error.strerror or str(error)
        return _Copy(path, files, trouble, is_missing)
    return _Copy(path, files, "", is_missing=False)


def _refusal(found: Sequence[_Copy]) -> CatalogError:
    """Why none of the copies can be used, and what to do."""
    if all(copy.is_missing for copy in found):
        places = " nor at ".join(str(copy.path) for copy in found)
        return CatalogMissing(
            f"there is no catalog at {places}, which names what lies on the devices",
            remedy="put it back from a backup, without -wal, or empty the devices to begin anew",
        )
    troubles = "; ".join(f"catalog {copy.path} cannot be used: {copy.trouble}" for copy in found)
    return CatalogError(
        troubles,
        remedy="put back catalog.db and catalog.sums of one device from a backup, without -wal, and"
        " remove those of the others",
    )


def _check_none_is_newer(found: Sequence[_Copy]) -> None:
    """Refuse an older copy where the one that went on without it cannot be used."""
    for copy in found:
        if not copy.is_sound and copy.path.with_name(ALONE_NAME).exists():
            raise CatalogError(
                f"catalog {copy.path} cannot be used: {copy.trouble}; the other copy lacks what was"
                " changed after it failed",
                remedy=f"put back {copy.path} and its catalog.sums, or remove {ALONE_NAME} beside"
                " it to go back to the older state",
            )


def _check_format(copy: _Copy) -> None:
    version = copy.files.format
    if version > FORMAT_VERSION:
        raise CatalogTooNew(
            f"catalog {copy.path} has format {version},"
            f" this fpfs knows formats up to {FORMAT_VERSION}",
            remedy="mount it with the newer fpfs that wrote it",
        )


def _check_identity(copy: _Copy, filesystem_id: str) -> None:
    if copy.files.filesystem_id != filesystem_id:
        raise CatalogError(
            f"catalog {copy.path} is of filesystem {copy.files.filesystem_id}, the stamps of the"
            f" devices are of filesystem {filesystem_id}",
            remedy="put back the catalog and the stamps that belong together",
        )


def _check_shape(connection: sqlite3.Connection, path: Path) -> None:
    fault = shape_fault(connection)
    if fault:
        raise CatalogError(
            f"catalog {path} cannot be used: {fault}",
            remedy="put back catalog.db and catalog.sums of one device from a backup, without -wal",
        )


def _add_sums(copy: _Copy) -> None:
    """Give a catalog of an earlier format, which has none, the sums of its pages."""
    connection = open_database(copy.path)
    try:
        (answer,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if answer != "ok":
            raise CatalogError(f"catalog {copy.path} is damaged: {answer}")
        (filesystem_id,) = connection.execute(
            "SELECT value FROM filesystem WHERE name = 'filesystem_id'"
        ).fetchone()
    except sqlite3.Error as error:
        raise CatalogError(f"catalog {copy.path} is damaged: {error}") from error
    finally:
        connection.close()  # which copies the log into the database
    copy.files.make_sums(str(filesystem_id))
    copy.files.check()
    log.info("catalog %s of format %d now has page checksums", copy.path, copy.files.format)


def _choose(sound: Sequence[_Copy]) -> _Copy:
    """The newest of the copies, none of which has a log any more."""
    first, *others = sound
    if not any(copy.files.count_differences(first.files) for copy in others):
        return first
    newest = leading({copy.path: _sequence_of(copy.path) for copy in sound})
    return next(copy for copy in sound if copy.path == newest)


def _checkpoint_log(copy: _Copy) -> _Copy:
    """Bring a copy's log into its database, with the reserve if the device is full.

    All that opening the catalog writes may use the reserve, until `Copies.begin` takes it again.
    One with which that cannot be done is of no use now: what is durable is in the other, too.
    """
    try:
        empty_if_full(copy.path.with_name(RESERVE_NAME))
        copy.files.checkpoint_log()
    except OSError as error:
        return copy._replace(trouble=f"its log cannot be copied: {error.strerror or error}")
    return copy


def _sequence_of(path: Path) -> int:
    """The number of the last transaction of a copy without a log."""
    uri = f"{path.absolute().as_uri()}?immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            row = connection.execute(
                "SELECT value FROM filesystem WHERE name = ?", (SEQUENCE,)
            ).fetchone()
    except sqlite3.Error as error:
        raise CatalogError(f"catalog {path} cannot be read: {error}") from error
    return int(row[0]) if row else 0


def _make_follower(
    copy: _Copy, leader: _Copy, troubles: dict[Path, str], recovered: list[str]
) -> CatalogMirror | None:
    """Make a copy the same as the leader, and return what keeps it so.

    A copy that cannot be made is noted in `troubles`: the catalog is used without it. One that was
    made anew is noted in `recovered`; that one lacks the last transactions is common after a crash.
    """
    try:
        differences = copy.files.count_differences(leader.files) if copy.is_sound else 0
        if not copy.is_sound or differences > PENDING_PAGES_MAX:
            copy.files.copy_from(leader.files)
        mirror = CatalogMirror(copy.files)
        mirror.open()
        if differences:
            mirror.gather_differences(leader.files)
            log.info("catalog %s lacked the last changes of %s", copy.path, leader.path)
    except OSError as error:
        reason = error.strerror or str(error)
        troubles[copy.path] = f"it cannot be made: {reason}"
        note_alone(leader.path)
        log.error("the catalog has %s alone: %s cannot be made: %s", leader.path, copy.path, reason)
        return None
    if not copy.is_sound:
        recovered.append(f"catalog {copy.path} was made anew from {leader.path}: {copy.trouble}")
    return mirror
