"""What a server does now, for the live view.

Concurrency: trio thread only.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import trio

import fpfs
from fpfs.core.protocol.activity import Activity, DeviceActivity, FilesInProgress
from fpfs.core.protocol.questions import AskActivity, ListInProgress
from fpfs.core.protocol.reports import DeviceState
from fpfs.core.statistics import DeviceStatistics
from fpfs.daemon.catalog.rows.dirents import path_of
from fpfs.daemon.telemetry.dirty_files import files_in_progress
from fpfs.daemon.telemetry.snapshot import gather

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpfs.core.engine import Engine
    from fpfs.core.protocol.questions import Handler, Question
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.devices.members import DeviceRegistry, Member
    from fpfs.daemon.names.namespace import Namespace

_log = logging.getLogger(__name__)

FILES_MAX = 20
"""Files in one answer."""
PATHS_KNOWN_S = 5.0
"""How long a path is taken for right: finding one may look at every name."""


class ActivityControl:
    """Answers what is asked of the present."""

    def __init__(
        self,
        *,
        mountpoint: str,
        started_unix_s: float,
        restarts: int,
        registry: DeviceRegistry,
        catalog: Catalog,
        engine: Engine,
        namespace: Namespace,
        commit: Commit,
    ) -> None:
        """Keep the parts; none of them is closed here."""
        self._mountpoint = mountpoint
        self._started_unix_s = started_unix_s
        self._restarts = restarts
        self._registry = registry
        self._catalog = catalog
        self._engine = engine
        self._namespace = namespace
        self._commit = commit
        self._paths: dict[int, str] = {}
        self._paths_until_s = 0.0

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers each question."""
        return {AskActivity: self.activity, ListInProgress: self.in_progress}

    async def activity(self, _question: AskActivity) -> Activity:
        """Figures of now."""
        return self.now()

    def now(self) -> Activity:
        """Figures of now; waits for nothing."""
        moment = gather(
            catalog=self._catalog,
            engine=self._engine,
            namespace=self._namespace,
            commit=self._commit,
        )
        channel, staging, commit = moment.engine.channel, moment.engine.staging, moment.commit
        return Activity(
            mountpoint=self._mountpoint,
            version=fpfs.__version__,
            server_pid=os.getpid(),
            restarts=self._restarts,
            started_unix_s=self._started_unix_s,
            measured_s=time.monotonic(),
            staging_bytes_used=staging.bytes_used,
            staging_bytes_total=staging.bytes_total,
            writes=channel.writes,
            bytes_acknowledged=channel.write_bytes,
            writes_waiting=channel.writes_waiting,
            write_to_ack=channel.write_to_ack,
            ack_to_durable=moment.ack_to_durable,
            files_written=moment.files_written,
            bytes_pending=moment.bytes_pending,
            oldest_pending_s=moment.oldest_pending_s,
            versions_pending=commit.pending,
            versions_committed=commit.committed,
            versions_failed=len(commit.failures),
            catalog_copies=moment.catalog_copies,
            catalog_copies_in_service=moment.catalog_copies_in_service,
            devices=tuple(
                _device(member, moment.engine.devices.get(member.number))
                for member in self._registry.members
            ),
        )

    async def in_progress(self, _question: ListInProgress) -> FilesInProgress:
        """Files that are written, or are not durable yet, with their paths."""
        self._namespace.catch_up()
        found = files_in_progress(
            files=self._namespace.files, commit=self._commit, engine=self._engine
        )
        first = sorted(found, key=lambda file: (-file.bytes_pending, file.ino))[:FILES_MAX]
        await self._find_paths([file.ino for file in first])
        return FilesInProgress(
            measured_s=time.monotonic(),
            count=len(found),
            files=tuple(
                msgspec.structs.replace(file, path=self._paths.get(file.ino, "")) for file in first
            ),
        )

    async def _find_paths(self, inos: Sequence[int]) -> None:
        if trio.current_time() > self._paths_until_s:
            self._paths = {}
            self._paths_until_s = trio.current_time() + PATHS_KNOWN_S
        unknown = [ino for ino in inos if ino not in self._paths]
        if unknown:
            try:
                self._paths |= await self._catalog.read_many(lambda t: _paths(t, unknown))
            except OSError as error:
                # A catalog that cannot be read does not keep the rest back.
                _log.debug("paths cannot be told: %s", error)


def _paths(transaction: Transaction, inos: Sequence[int]) -> dict[int, str]:
    """Paths from the mountpoint. Bytes that are no text are shown as escapes."""
    return {ino: path_of(transaction, ino).decode(errors="backslashreplace") for ino in inos}


def _device(member: Member, figures: DeviceStatistics | None) -> DeviceActivity:
    if member.is_missing or figures is None:
        return DeviceActivity(number=member.number, path=member.path, state=DeviceState.MISSING)
    state = DeviceState.DRAINING if member.is_draining else DeviceState.OK
    if figures.checksum_errors or figures.read_errors:
        state = DeviceState.DAMAGED
    if figures.failed:
        state = DeviceState.FAILED
    return DeviceActivity(
        number=member.number,
        path=member.path,
        state=state,
        bytes_written=figures.bytes_written,
        bytes_read=figures.bytes_read,
        requests_in_flight=figures.in_flight,
        requests_queued=figures.queued,
        errors=figures.errors,
        write_latency=figures.write_latency,
        read_latency=figures.read_latency,
        flush_latency=figures.flush_latency,
    )
