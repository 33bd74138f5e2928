"""Images of the catalog: private copies of it as it was at one moment, made without touching it.

A copy of the catalog is its database, its log and the checksums of its pages. The three files are
copied, and the log is then brought into the database of the image, as a mount would do it.

Of a catalog in use the files are copied while they change. That is sound because of three things:
the log only grows until it was copied into the database as a whole; the checksums are replaced
before that begins; and each page is compared with its checksum, or comes from the log. So an image
is taken again when the checksums changed meanwhile, or a page does not fit.

Invariants:
  * Nothing is written, made or removed beside the catalog.
  * An image holds whole transactions only, and as much memory as was ever in its files.

Concurrency: plain blocking functions; an image belongs to one thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from typing import TYPE_CHECKING

from fpfs.core.engine import CatalogFiles
from fpfs.core.errors import CatalogError, CatalogTooNew
from fpfs.daemon.catalog.migration import migrate
from fpfs.daemon.catalog.replicas import ALONE_NAME, check_one_went_on, leading
from fpfs.daemon.catalog.safe_open import open_regular
from fpfs.daemon.catalog.schema import (
    FORMAT_VERSION,
    SEQUENCE,
    open_database,
)
from fpfs.daemon.catalog.schema_check import shape_fault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DATABASE = "catalog.db"
SUMS = "catalog.sums"
FILES = (DATABASE, f"{DATABASE}-wal", SUMS)
"""In this order: see above."""

TRIES_MAX = 20
"""How often an image of a catalog in use is begun again."""

_COPY_BYTES = 1024 * 1024


class CatalogImage:
    """A private copy of a catalog; `connection` may be written to, and dies with its folder."""

    def __init__(self, source: Path, connection: sqlite3.Connection, troubles: dict[Path, str]):
        """Take over a connection. `troubles` says which copies cannot be used, and why."""
        self.source = source
        self.connection = connection
        self.troubles = troubles
        values = dict(connection.execute("SELECT name, value FROM filesystem").fetchall())
        self.filesystem_id = str(values.get("filesystem_id", ""))
        self.ended_cleanly = bool(values.get("ended_cleanly", 1))

    def close(self) -> None:
        """Let go of the database."""
        self.connection.close()


def lacks_room(error: OSError | sqlite3.Error) -> bool:
    """Whether the folder of an image is full: nothing else is written while one is made."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def take_image(paths: Sequence[Path], *, folder: Path, filesystem_id: str) -> CatalogImage | None:
    """Return an image of the newest sound copy of a catalog that nobody uses, made in `folder`.

    None: there is none at any of the `paths`. Raises `CatalogError` when none can be used, or each
    of two has what the other lacks.
    """
    troubles: dict[Path, str] = {}
    sequences: dict[Path, int] = {}
    for number, path in enumerate(paths):
        place = folder / str(number)
        place.mkdir()
        try:
            sequences[path] = _copy_consistent(path, place, filesystem_id)
        except OSError as error:
            if lacks_room(error):
                raise
            is_missing = error.errno == errno.ENOENT
            troubles[path] = "it is missing" if is_missing else error.strerror or str(error)
    if not sequences:
        if all(not os.path.lexists(path) for path in paths):
            return None
        raise CatalogError(
            "; ".join(f"catalog {path} cannot be used: {why}" for path, why in troubles.items()),
            remedy="put back catalog.db and catalog.sums of one device from a backup",
        )
    for path, why in troubles.items():
        if os.path.lexists(path.with_name(ALONE_NAME)):
            raise CatalogError(
                f"catalog {path} cannot be used: {why}; the other copy lacks what was changed"
                " after it failed",
                remedy=f"put back {path} and its catalog.sums, or remove {ALONE_NAME} beside it to"
                " go back to the older state",
            )
    check_one_went_on(list(sequences))
    source = leading(sequences)
    place = folder / str(paths.index(source))
    return CatalogImage(source, _open(place / DATABASE), troubles)


def take_live_image(path: Path, *, folder: Path, filesystem_id: str) -> CatalogImage:
    """Return an image of a copy that a server uses. Raises `CatalogError` when that fails."""
    trouble: OSError | None = None
    for number in range(TRIES_MAX):
        place = folder / str(number)
        place.mkdir()
        try:
            before = _content(path.with_name(SUMS))
            _copy(path, place)
            if _content(path.with_name(SUMS)) == before:
                _make_consistent(place, path, filesystem_id)
                return CatalogImage(path, _open(place / DATABASE), {})
        except CatalogTooNew:
            raise
        except OSError as error:
            if lacks_room(error):
                raise
            trouble = error
        for each in place.iterdir():
            each.unlink()
    if trouble is not None:
        why = trouble.strerror or str(trouble)
        raise CatalogError(f"catalog {path} cannot be read: {why}") from trouble
    raise CatalogError(
        f"catalog {path} changes too fast to be copied",
        remedy="try again when less is being written",
    )


def _copy_consistent(path: Path, place: Path, filesystem_id: str) -> int:
    """Make an image of a copy at rest; returns the number of its last transaction."""
    _copy(path, place)
    _make_consistent(place, path, filesystem_id)
    with contextlib.closing(_open(place / DATABASE)) as connection:
        row = connection.execute(
            "SELECT value FROM filesystem WHERE name = ?", (SEQUENCE,)
        ).fetchone()
    return int(row[0]) if row else 0


def _copy(path: Path, place: Path) -> None:
    """Copy the files of a copy; only the database has to be there."""
    for name in FILES:
        try:
            source = open_regular(path.with_name(name), os.O_RDONLY)
        except FileNotFoundError:
            if name == DATABASE:
                raise
            continue
        try:
            with (place / name).open("xb") as copy:
                _copy_data(source, copy.fileno())
        finally:
            os.close(source)


def _copy_data(source: int, copy: int) -> None:
    """Copy what a file has, and leave its holes: an absurd length costs nothing."""
    size = os.fstat(source).st_size
    position = 0
    while position < size:
        try:
            position = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                break
            raise
        end = min(os.lseek(source, position, os.SEEK_HOLE), size)
        while position < end:
            piece = os.pread(source, min(_COPY_BYTES, end - position), position)
            if not piece:
                break
            position += os.pwrite(copy, piece, position)
    os.ftruncate(copy, size)


def _content(path: Path) -> bytes:
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def _make_consistent(place: Path, path: Path, filesystem_id: str) -> None:
    """Check copied files, and bring their log into their database. Raises OSError."""
    files = CatalogFiles(str(place / DATABASE))
    files.check()
    if files.format > FORMAT_VERSION:
        raise CatalogTooNew(
            f"catalog {path} has format {files.format},"
            f" this fpfs knows formats up to {FORMAT_VERSION}",
            remedy="use the newer fpfs that wrote it",
        )
    if files.has_sums:
        files.checkpoint_log()
        if files.filesystem_id != filesystem_id:
            raise CatalogError(f"it is of filesystem {files.filesystem_id}, not {filesystem_id}")


def _open(database: Path) -> sqlite3.Connection:
    """Open an image for checks, which change it."""
    connection = open_database(database)
    try:
        migrate(connection)
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA trusted_schema = OFF")
        fault = shape_fault(connection)
    except sqlite3.Error as error:
        connection.close()
        if lacks_room(error):
            raise
        raise CatalogError(f"it cannot be read: {error}") from error
    if fault:
        connection.close()
        raise CatalogError(fault)
    return connection
