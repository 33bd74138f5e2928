"""Commit: the one module that orders durability. (Being written.)

The composition root does::

    inodes = InodeTable(catalog=catalog, engine=engine)
    commit = Commit(catalog=catalog, engine=engine, inodes=inodes, ack=policy.ack)
    namespace = Namespace(catalog=catalog, engine=engine, inodes=inodes, commit=commit,
                          policy=policy, device_paths={number: path})
    await commit.recover()                 # before the first request
    nursery.start_soon(commit.run)         # until cancelled
    async for event in engine.events():    # SyncWrite -> commit.sync_write(event)
    ...
    report = await commit.flush_all()      # fpfs-ctl flush, unmount: until all is durable
    await namespace.close(); engine.close(); await catalog.close()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fpfs.core.engine import Engine, SyncWrite
    from fpfs.core.policy import Acknowledge
    from fpfs.daemon.catalog import Catalog
    from fpfs.daemon.inodes import InodeTable


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
    removals_pending: int
    failures: tuple[CommitFailure, ...]


class Commit:
    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        inodes: InodeTable,
        ack: Acknowledge,
        durable_within_s: float = 1.0,
    ) -> None:
        raise NotImplementedError

    async def recover(self) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        raise NotImplementedError

    def sync_write(self, event: SyncWrite) -> None:
        """Start what a write on an O_SYNC handle waits for; answers it through the engine."""
        raise NotImplementedError

    async def flush_all(self) -> tuple[CommitFailure, ...]:
        """Commit everything, open files too, make it durable, give dead space back."""
        raise NotImplementedError

    async def wait_durable(self, ino: int) -> None:
        """Return when the inode's content and names are durable; raises the drain's OSError."""
        raise NotImplementedError

    def statistics(self) -> CommitStatistics:
        raise NotImplementedError
