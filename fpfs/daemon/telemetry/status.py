"""Figures of a running server, from the engine, the commit module and the device filesystems."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from fpfs.core.protocol.reports import (
    CatalogCopyStatus,
    CatalogStatus,
    CommitStatus,
    DeviceState,
    DeviceStatus,
    Failure,
    QuarantinedStatus,
    StagingStatus,
    Status,
    UncommittedStatus,
)
from fpfs.core.statistics import DeviceStatistics, EngineStatistics
from fpfs.daemon.catalog.replicas import CopyStatus, look_at
from fpfs.daemon.catalog.rows.groups import Uncommitted
from fpfs.daemon.catalog.rows.quarantine import QuarantinedSave
from fpfs.daemon.commit.pipeline import CommitFailure, CommitStatistics
from fpfs.daemon.commit.quarantine import signal_name
from fpfs.daemon.devices.members import Member


def device_statuses(
    members: Sequence[Member],
    statistics: EngineStatistics,
    copies: Sequence[CopyStatus],
    held_bytes: Mapping[int, int],
) -> tuple[DeviceStatus, ...]:
    """Status of each device, which holds so many bytes of contents. Blocks on its filesystem.

    What is not among `held_bytes`, since the catalog cannot be read, is told as 0.
    """
    with_catalog = {os.path.dirname(copy.path) for copy in copies}
    return tuple(
        msgspec.structs.replace(
            _missing_status(member)
            if member.is_missing
            else _device_status(member, statistics.devices[member.number]),
            bytes_used=held_bytes.get(member.number, 0),
            tags=tuple(sorted(member.tags)),
            has_catalog=member.path in with_catalog,
        )
        for member in members
    )


def _missing_status(device: Member) -> DeviceStatus:
    return DeviceStatus(
        number=device.number,
        path=device.path,
        state=DeviceState.MISSING,
        error=f"missing: {device.trouble}",
        bytes_used=0,
        bytes_free=0,
        bytes_total=0,
        bytes_written=0,
        bytes_read=0,
        requests_in_flight=0,
        backend="",
        direct=False,
    )


def _device_status(device: Member, figures: DeviceStatistics) -> DeviceStatus:
    state = DeviceState.DRAINING if device.is_draining else DeviceState.OK
    troubles = []
    if figures.checksum_errors:
        state = DeviceState.DAMAGED
        troubles.append(f"damaged blocks were met {figures.checksum_errors} times")
    if figures.read_errors:
        state = DeviceState.DAMAGED
        troubles.append(f"reads failed {figures.read_errors} times")
    if figures.failed:
        state = DeviceState.FAILED
        troubles.insert(0, "failed: new chunks avoid it")
    bytes_free = bytes_total = 0
    try:
        filesystem = os.statvfs(device.path)
        bytes_free = filesystem.f_bavail * filesystem.f_frsize + figures.kept_bytes
        bytes_total = filesystem.f_blocks * filesystem.f_frsize
        # statfs(2) answers for a filesystem that has failed, too.
        with os.scandir(device.directory.objects_path) as folders:
            next(folders, None)
    except OSError as problem:
        state = DeviceState.FAILED
        troubles.append(f"cannot be read: {problem.strerror}")
    return DeviceStatus(
        number=device.number,
        path=device.path,
        state=state,
        error="; ".join(troubles),
        bytes_used=0,
        bytes_free=bytes_free,
        bytes_total=bytes_total,
        bytes_written=figures.bytes_written,
        bytes_read=figures.bytes_read,
        requests_in_flight=figures.in_flight,
        checksum_errors=figures.checksum_errors,
        read_errors=figures.read_errors,
        backend=figures.backend,
        direct=figures.direct,
    )


def staging_status(statistics: EngineStatistics) -> StagingStatus:
    """Status of the staging arena."""
    staging = statistics.staging
    return StagingStatus(
        buffer_bytes=staging.slot_bytes,
        bytes_used=staging.bytes_used,
        bytes_total=staging.bytes_total,
        pinned=staging.pinned,
    )


def channel_counters(statistics: EngineStatistics) -> dict[str, int]:
    """Requests that the channel saw, by name."""
    figures = msgspec.structs.asdict(statistics.channel)
    return {name: value for name, value in figures.items() if isinstance(value, int)}


def commit_status(statistics: CommitStatistics) -> CommitStatus:
    """Status of the commit module."""
    return CommitStatus(
        pending=statistics.pending,
        committed=statistics.committed,
        transactions=statistics.transactions,
        failures=failures(statistics.failures),
    )


def quarantined_status(found: Sequence[QuarantinedSave]) -> tuple[QuarantinedStatus, ...]:
    """What killed writers left. Bytes that are no text are shown as escapes."""
    return tuple(
        QuarantinedStatus(
            path=entry.path.decode(errors="backslashreplace"),
            name=entry.name.decode(errors="backslashreplace"),
            killed_by=signal_name(entry.killed_by),
            time_unix_s=entry.time_ns / 1e9,
            size=entry.size,
        )
        for entry in found
    )


def uncommitted_status(found: Sequence[Uncommitted]) -> tuple[UncommittedStatus, ...]:
    """Groups that are not committed. Bytes that are no text are shown as escapes."""
    return tuple(
        UncommittedStatus(
            path=group.path.decode(errors="backslashreplace"),
            name=group.name.decode(errors="backslashreplace"),
            time_unix_s=group.time_ns / 1e9,
        )
        for group in found
    )


def catalog_status(copies: Sequence[CopyStatus]) -> CatalogStatus:
    """Status of the catalog's copies. Blocks: it looks for their files."""
    found = tuple(
        CatalogCopyStatus(path=copy.path, trouble=copy.trouble) for copy in look_at(copies)
    )
    return CatalogStatus(
        copies_in_service=sum(not copy.trouble for copy in found),
        copies=found,
    )


def failures(found: Sequence[CommitFailure]) -> tuple[Failure, ...]:
    """Failed commits as the control protocol tells them."""
    return tuple(
        Failure(ino=failure.ino, errno=failure.errno, message=failure.message) for failure in found
    )


def without_names(status: Status) -> Status:
    """A status for those who may not see every file: without what names files."""
    return msgspec.structs.replace(
        status,
        quarantined=(),
        uncommitted=(),
        commit=msgspec.structs.replace(status.commit, failures=()),
    )
