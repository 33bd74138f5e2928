"""Metrics of a running server: gathers its figures and serves them where the mount was told to.

Concurrency: trio thread, but for what asks filesystems, and for what makes the text.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

import fpfs
from fpfs.daemon.catalog.replicas import look_at
from fpfs.daemon.telemetry.snapshot import gather

if TYPE_CHECKING:
    import socket

    from fpfs.core.engine import Engine
    from fpfs.core.options import ServerConfig
    from fpfs.core.statistics import EngineStatistics
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.replicas import CopyStatus
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.devices.keeper_link import KeeperLink
    from fpfs.daemon.devices.members import DeviceRegistry, Member
    from fpfs.daemon.names.namespace import Namespace
    from fpfs.daemon.telemetry.prometheus import DeviceFigures, Figures

_log = logging.getLogger(__name__)


class Scrape:
    """What a scrape of one server is answered from; over before the parts are closed."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        registry: DeviceRegistry,
        catalog: Catalog,
        engine: Engine,
        namespace: Namespace,
        commit: Commit,
        link: KeeperLink,
        restarts: int,
    ) -> None:
        """Keep the parts; none of them is closed here."""
        self._config = config
        self._registry = registry
        self._catalog = catalog
        self._engine = engine
        self._namespace = namespace
        self._commit = commit
        self._link = link
        self._restarts = restarts
        self._looking = trio.CapacityLimiter(1)

    async def serve(self, listener: socket.socket | None, *, open_to_others: bool) -> None:
        """Serve metrics until cancelled. What fails here is logged, and the mount goes on."""
        # Imported late: mounts without metrics start sooner and need less memory.
        from fpfs.core.addresses import parse_listen_address
        from fpfs.daemon.telemetry.http import MetricsServer

        address = parse_listen_address(self._config.options.metrics, name="metrics")
        server = MetricsServer(address=address, open_to_others=open_to_others, render=self.render)
        try:
            await server.serve(listener)
        except Exception:  # noqa: BLE001 (programs that use the mount are not to feel it)
            _log.exception("metrics are no longer served")

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The text of a scrape, and its content type."""
        from fpfs.daemon.telemetry.prometheus import render

        figures = await self.figures()
        return await trio.to_thread.run_sync(
            lambda: render(figures, accept=accept), limiter=self._looking
        )

    async def figures(self) -> Figures:
        """Figures of now."""
        from fpfs.daemon.telemetry.prometheus import Figures

        # What may be closed before the filesystems have answered is asked first.
        members = self._registry.members
        moment = gather(
            catalog=self._catalog,
            engine=self._engine,
            namespace=self._namespace,
            commit=self._commit,
        )
        devices, copies = await trio.to_thread.run_sync(
            _look, members, moment.engine, self._catalog.copies(), limiter=self._looking
        )
        return Figures(
            mountpoint=self._config.mountpoint,
            version=fpfs.__version__,
            filesystem_id=self._catalog.filesystem_id,
            restarts=self._restarts,
            started_unix_s=self._link.started_unix_s,
            engine=moment.engine,
            devices=devices,
            ack_to_durable=moment.ack_to_durable,
            files_written=moment.files_written,
            bytes_pending=moment.bytes_pending,
            oldest_pending_s=moment.oldest_pending_s,
            versions_pending=moment.commit.pending,
            versions_committed=moment.commit.committed,
            transactions=moment.commit.transactions,
            versions_failed=len(moment.commit.failures),
            catalog_flushes=moment.catalog_flushes,
            catalog_copies=sum(not copy.trouble for copy in copies),
        )


def _look(
    members: Sequence[Member], statistics: EngineStatistics, copies: Sequence[CopyStatus]
) -> tuple[Sequence[DeviceFigures], Sequence[CopyStatus]]:
    """What filesystems have to be asked for. Blocks."""
    return _device_figures(members, statistics), look_at(copies)


def _device_figures(
    members: Sequence[Member], statistics: EngineStatistics
) -> Sequence[DeviceFigures]:
    """Blocks: it asks the devices' filesystems."""
    from fpfs.daemon.telemetry.prometheus import DeviceFigures

    found = []
    kept_bytes = statistics.kept_bytes
    for member in members:
        free = total = 0
        if not member.is_missing:
            # That a filesystem fails is counted where it is used.
            with contextlib.suppress(OSError):
                filesystem = os.statvfs(member.path)
                free = filesystem.f_bavail * filesystem.f_frsize + kept_bytes.get(member.number, 0)
                total = filesystem.f_blocks * filesystem.f_frsize
        found.append(
            DeviceFigures(
                number=member.number,
                path=member.path,
                takes_chunks=not member.is_draining,
                statistics=None if member.is_missing else statistics.devices.get(member.number),
                bytes_free=free,
                bytes_total=total,
            )
        )
    return found
