"""Figures of one moment of a server, for the live view and for Prometheus.

Concurrency: trio thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fpfs.daemon.telemetry.dirty_files import files_in_progress

if TYPE_CHECKING:
    from fpfs.core.engine import Engine
    from fpfs.core.protocol.activity import FileInProgress
    from fpfs.core.statistics import Durations, EngineStatistics
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.commit.pipeline import Commit, CommitStatistics
    from fpfs.daemon.names.namespace import Namespace


class Moment(NamedTuple):
    """What both tell."""

    engine: EngineStatistics
    commit: CommitStatistics
    files: Sequence[FileInProgress]
    ack_to_durable: Durations
    """From the acknowledgement of a version's oldest byte until it is durable."""
    waiting_s: float
    """How long ago the oldest byte of current versions was acknowledged that are not durable."""
    catalog_flushes: int
    catalog_copies: int
    catalog_copies_in_service: int

    @property
    def files_written(self) -> int:
        """Files that are open for writing."""
        return sum(file.writers > 0 for file in self.files)

    @property
    def bytes_pending(self) -> int:
        """Bytes that were acknowledged and are in no version yet."""
        return sum(file.bytes_pending for file in self.files)

    @property
    def oldest_pending_s(self) -> float:
        """How long ago the oldest byte that is not durable was acknowledged; 0: all are."""
        return max([self.waiting_s, *(file.age_s for file in self.files)])


def gather(*, catalog: Catalog, engine: Engine, namespace: Namespace, commit: Commit) -> Moment:
    """Gather the figures of now. Waits for nothing, and asks no filesystem."""
    namespace.catch_up()
    copies = catalog.copies()
    return Moment(
        engine=engine.statistics(),
        commit=commit.statistics(),
        files=files_in_progress(files=namespace.files, commit=commit, engine=engine),
        ack_to_durable=commit.durability.ack_to_durable(),
        waiting_s=commit.durability.oldest_s(),
        catalog_flushes=catalog.statistics().flushes,
        catalog_copies=len(copies),
        catalog_copies_in_service=sum(not copy.trouble for copy in copies),
    )
