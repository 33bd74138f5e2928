"""What is known of files: how far each has come, and where it lies.

Invariants:
  * What is said to be durable would be there, under its name, if power were lost at the moment at
    which the catalog was read. What is on its way may be called so a moment too long.

Concurrency: trio thread only.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import msgspec

from fpfs.core.errors import NoSuchEntry
from fpfs.core.placement import decode_layout
from fpfs.core.protocol.reports import FileState, FileStatus
from fpfs.daemon.catalog.rows.queries import fetch_facts, list_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpfs.core.engine import Engine
    from fpfs.core.protocol.reports import RunsShown
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.rows.queries import Asker, Facts
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.inodes.table import InodeTable


class FileStatuses:
    """Tells of the files of one filesystem."""

    def __init__(
        self, *, catalog: Catalog, engine: Engine, inodes: InodeTable, commit: Commit
    ) -> None:
        """Keep what is needed."""
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self._commit = commit

    async def describe(
        self, inos: Sequence[int], *, seen_by: Asker | None = None
    ) -> tuple[FileStatus, ...]:
        """Return what is known of those of some inodes that there are, and that somebody may see.

        None sees everything.
        """
        read = self._catalog.read if len(inos) == 1 else self._catalog.read_many
        return await read(
            lambda t: fetch_facts(t, inos, seen_by=seen_by),
            apply=lambda found: tuple(map(self._status, found)),
        )

    async def describe_one(self, ino: int) -> FileStatus:
        """Return what is known of an inode. Raises `NoSuchEntry`."""
        found = await self.describe([ino])
        if not found:
            raise NoSuchEntry(f"inode {ino} does not exist")
        return found[0]

    async def list_runs(self, ino: int, *, segment: int) -> RunsShown:
        """Return where a committed content lies. Raises `NoSuchEntry`, `DamagedData`."""
        return await self._catalog.read_many(lambda t: list_runs(t, ino, segment))

    def _status(self, facts: Facts) -> FileStatus:
        """Put together what the catalog holds and what is not in it yet."""
        size, writers, is_changed, is_longer = facts.size, 0, bool(facts.unfinished), False
        inode = self._inodes.cached(facts.ino)
        if inode is not None:
            is_dirty = self._inodes.refresh(inode)
            size, writers = inode.size, inode.writers
            is_changed = is_dirty or inode.unfinished or bool(inode.pending)
            is_longer = is_dirty and self._engine.attributes(facts.ino).only_longer
        is_catalog_durable = self._catalog.is_durable(facts.ino) and not any(
            directory in self._catalog.directories_not_durable for directory in facts.above
        )
        durable = is_catalog_durable and not is_changed
        failure = self._commit.failure_of(facts.ino)
        status = FileStatus(
            ino=facts.ino,
            is_regular=stat.S_ISREG(facts.mode),
            state=_state(durable=durable, writers=writers, failure=failure),
            durable=durable,
            version=facts.version,
            size_acknowledged=size,
            size_committed=facts.size,
            size_durable=size if durable else facts.size if is_catalog_durable and is_longer else 0,
            writers=writers,
            failure=failure,
        )
        return _placed(status, facts) if status.is_regular else status


def _state(*, durable: bool, writers: int, failure: str) -> FileState:
    if failure:
        return FileState.NOT_KEPT
    if writers:
        return FileState.WRITING
    return FileState.DURABLE if durable else FileState.WAITING


def _placed(status: FileStatus, facts: Facts) -> FileStatus:
    """Add what only regular files have."""
    layout = decode_layout(facts.layout)
    return msgspec.structs.replace(
        status,
        chunk_bytes=layout.chunk_bytes,
        width=len(layout.devices),
        devices=tuple(layout.devices[layout.first :] + layout.devices[: layout.first]),
        inline=bool(facts.inline),
        former_versions=facts.former,
    )
