"""What a mount does now: counters and gauges that are cheap to ask for, and rates between two.

Durations and counters are those since the server started; a server that took over begins at zero.
"""

from __future__ import annotations

import msgspec

from fpfs.core.protocol.reports import DeviceState
from fpfs.core.statistics import Durations


class DeviceActivity(msgspec.Struct, kw_only=True, frozen=True):
    """One device. A missing one has zeros."""

    number: int
    path: str
    state: DeviceState
    bytes_written: int = 0
    bytes_read: int = 0
    requests_in_flight: int = 0
    requests_queued: int = 0
    errors: int = 0
    write_latency: Durations = Durations()
    read_latency: Durations = Durations()
    flush_latency: Durations = Durations()


class Activity(msgspec.Struct, kw_only=True, frozen=True):
    """Figures of one moment; `measured_s` is when that was, by a clock of the server's machine.

    `write_to_ack` is from a write's receipt to its answer, `ack_to_durable` from the
    acknowledgement of a version's oldest byte until it is durable. `oldest_pending_s` is how long
    ago the oldest byte that is not durable was acknowledged; 0 if all are.
    """

    mountpoint: str
    version: str
    server_pid: int
    restarts: int
    started_unix_s: float
    measured_s: float
    staging_bytes_used: int
    staging_bytes_total: int
    writes: int
    bytes_acknowledged: int
    writes_waiting: int
    write_to_ack: Durations
    ack_to_durable: Durations
    files_written: int
    bytes_pending: int
    oldest_pending_s: float
    versions_pending: int
    versions_committed: int
    versions_failed: int
    catalog_copies: int
    catalog_copies_in_service: int
    devices: tuple[DeviceActivity, ...]


class FileInProgress(msgspec.Struct, kw_only=True, frozen=True):
    """A file that somebody writes, or whose last version is on its way.

    `bytes_acknowledged` counts since the inode was loaded. Of these `bytes_pending` are in no
    version yet, and `bytes_staged` on no device. `age_s` is how long ago the oldest byte that is
    not durable was acknowledged; 0 where there is none. `path` starts at the mountpoint, and is
    empty for a file without a name, and where the catalog cannot be read.
    """

    ino: int
    writers: int
    bytes_acknowledged: int
    bytes_pending: int
    bytes_staged: int
    age_s: float
    path: str = ""


class FilesInProgress(msgspec.Struct, kw_only=True, frozen=True):
    """Those with the most bytes pending; `count` is how many there are in all."""

    measured_s: float
    count: int
    files: tuple[FileInProgress, ...]


class Rates(msgspec.Struct, kw_only=True, frozen=True):
    """What happened in a second between two moments; latencies are None where nothing happened.

    `interval_s` is how far the moments are apart.
    """

    interval_s: float
    bytes_acknowledged_per_s: float
    writes_per_s: float
    write_to_ack_s: float | None
    ack_to_durable_s: float | None
    devices: dict[int, DeviceRates]


class DeviceRates(msgspec.Struct, kw_only=True, frozen=True):
    """Of one device: bytes in a second, and how long a request took on average."""

    written_per_s: float
    read_per_s: float
    write_s: float | None
    read_s: float | None
    flush_s: float | None


def rates_between(before: Activity, after: Activity) -> Rates:
    """What happened between; of another server's counters, since that began."""
    elapsed_s = max(after.measured_s - before.measured_s, 1e-9)
    if before.server_pid != after.server_pid:
        before = _zeros(after, before.measured_s)
    known = {device.number: device for device in before.devices}
    return Rates(
        interval_s=elapsed_s,
        bytes_acknowledged_per_s=(after.bytes_acknowledged - before.bytes_acknowledged) / elapsed_s,
        writes_per_s=(after.writes - before.writes) / elapsed_s,
        write_to_ack_s=mean_s(after.write_to_ack.since(before.write_to_ack)),
        ack_to_durable_s=mean_s(after.ack_to_durable.since(before.ack_to_durable)),
        devices={
            device.number: _device_rates(known[device.number], device, elapsed_s)
            for device in after.devices
            if device.number in known
        },
    )


def durable_in_s(file: FileInProgress, rates: Rates) -> float | None:
    """How long all devices need for what of a file is in staging; None if they write nothing."""
    drained_per_s = sum(each.written_per_s for each in rates.devices.values())
    return file.bytes_staged / drained_per_s if drained_per_s else None


def _device_rates(before: DeviceActivity, after: DeviceActivity, elapsed_s: float) -> DeviceRates:
    return DeviceRates(
        written_per_s=(after.bytes_written - before.bytes_written) / elapsed_s,
        read_per_s=(after.bytes_read - before.bytes_read) / elapsed_s,
        write_s=mean_s(after.write_latency.since(before.write_latency)),
        read_s=mean_s(after.read_latency.since(before.read_latency)),
        flush_s=mean_s(after.flush_latency.since(before.flush_latency)),
    )


def _zeros(like: Activity, measured_s: float) -> Activity:
    """The figures of a server at its begin."""
    devices = tuple(
        DeviceActivity(number=device.number, path=device.path, state=device.state)
        for device in like.devices
    )
    return msgspec.structs.replace(
        like,
        measured_s=measured_s,
        writes=0,
        bytes_acknowledged=0,
        write_to_ack=Durations(),
        ack_to_durable=Durations(),
        devices=devices,
    )


def mean_s(durations: Durations) -> float | None:
    """The mean of durations, or None of none."""
    return durations.sum_ns / durations.count / 1e9 if durations.count else None
