"""``fpfs-ctl status``: what a mount is, what it has, and what it does now."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from rich.console import Console

from fpfs.cli.asking import Json, print_json
from fpfs.cli.commands import top as live
from fpfs.cli.show import (
    add_figures,
    add_texts,
    check_timeout,
    new_table,
    open_console,
    say,
)
from fpfs.core.paths import show_text
from fpfs.core.protocol.activity import DeviceActivity, FileInProgress, Rates, durable_in_s
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import AskStatus
from fpfs.core.protocol.reports import DeviceState, DeviceStatus, Status
from fpfs.core.units import format_size

STATUS_TIMEOUT_S = 60.0


class DeviceNow(msgspec.Struct, kw_only=True, frozen=True):
    """What one device does: bytes in a second, and how long a request took on average.

    A time is None where no such request ended; all but the state is zero or None of one that was
    not there at both looks. `requests_queued` wait before the kernel has them, `errors` are
    requests of any kind that failed since the server started.
    """

    number: int
    path: str
    state: DeviceState
    bytes_written_per_s: float
    bytes_read_per_s: float
    write_s: float | None
    read_s: float | None
    flush_s: float | None
    requests_in_flight: int
    requests_queued: int
    errors: int


class FileNow(msgspec.Struct, kw_only=True, frozen=True):
    """A file that somebody writes, or whose last version is not durable.

    `writers` are handles that are open for writing. Of what was acknowledged `bytes_pending` are
    in no version yet, and `bytes_staged` on no device; `durable_in_s` is how long all devices need
    for these at the rate of now, None where they write nothing. `age_s` is how long ago the oldest
    byte that is not durable was acknowledged; 0 where there is none. `path` starts at the
    mountpoint, and is empty for a file without a name.
    """

    ino: int
    path: str
    writers: int
    bytes_acknowledged_per_s: float | None
    """None of a file that was not there at the first look."""
    bytes_pending: int
    bytes_staged: int
    age_s: float
    durable_in_s: float | None


class ActivityReport(msgspec.Struct, kw_only=True, frozen=True):
    """What the mount does: figures of now, and rates over the last `interval_s`.

    `write_to_ack_s` is the mean time from a write's receipt to its answer, `ack_to_durable_s` that
    from the acknowledgement of a version's oldest byte until it is durable; None where there was
    none. `oldest_pending_s` is how long ago the oldest byte that is not durable was acknowledged; 0
    if all are. Of the files that are not durable, `files_count`, the `files` with the most bytes
    pending are told; None to those who may not see them.
    """

    interval_s: float
    bytes_acknowledged_per_s: float
    writes_per_s: float
    write_to_ack_s: float | None
    ack_to_durable_s: float | None
    staging_bytes_used: int
    staging_bytes_total: int
    writes_waiting: int
    files_written: int
    bytes_pending: int
    oldest_pending_s: float
    devices: tuple[DeviceNow, ...]
    files_count: int | None
    files: tuple[FileNow, ...] | None


class StatusReport(Status, kw_only=True, frozen=True):
    """What ``fpfs-ctl status --json`` prints."""

    activity: ActivityReport


def status(
    mountpoint: str,
    /,
    *,
    json: Json = False,
    timeout: float = STATUS_TIMEOUT_S,
) -> int:
    """Show the figures of the mount at MOUNTPOINT.

    Parameters
    ----------
    timeout
        Give up after so many seconds, with exit status 1.
    """
    check_timeout(timeout)
    asked = f"status of {mountpoint}"
    entry = find_fpfs(mountpoint, asked=asked)
    with ControlClient(entry, asked=asked) as client:
        reader = live.ActivityReader(client, entry, timeout_s=timeout)
        began_s = time.monotonic()
        found = client.ask(AskStatus(), timeout_s=timeout)
        time.sleep(max(0.0, began_s + live.FIRST_S - time.monotonic()))
        look = reader.read()
    if json:
        print_json(StatusReport(**msgspec.structs.asdict(found), activity=report_activity(look)))
        return 0
    console = open_console()
    _show_status(console, found)
    live.show_once(console, look)
    return 0


def report_activity(look: live.Look) -> ActivityReport:
    """Return what the live view shows, as figures."""
    now, rates, files, by_file = look
    return ActivityReport(
        interval_s=rates.interval_s,
        bytes_acknowledged_per_s=rates.bytes_acknowledged_per_s,
        writes_per_s=rates.writes_per_s,
        write_to_ack_s=rates.write_to_ack_s,
        ack_to_durable_s=rates.ack_to_durable_s,
        staging_bytes_used=now.staging_bytes_used,
        staging_bytes_total=now.staging_bytes_total,
        writes_waiting=now.writes_waiting,
        files_written=now.files_written,
        bytes_pending=now.bytes_pending,
        oldest_pending_s=now.oldest_pending_s,
        devices=tuple(_device(device, rates) for device in now.devices),
        files_count=None if files is None else files.count,
        files=None
        if files is None
        else tuple(_file(file, rates, by_file.get(file.ino)) for file in files.files),
    )


def _device(device: DeviceActivity, rates: Rates) -> DeviceNow:
    found = rates.devices.get(device.number)
    return DeviceNow(
        number=device.number,
        path=device.path,
        state=device.state,
        bytes_written_per_s=found.written_per_s if found else 0.0,
        bytes_read_per_s=found.read_per_s if found else 0.0,
        write_s=found.write_s if found else None,
        read_s=found.read_s if found else None,
        flush_s=found.flush_s if found else None,
        requests_in_flight=device.requests_in_flight,
        requests_queued=device.requests_queued,
        errors=device.errors,
    )


def _file(file: FileInProgress, rates: Rates, acknowledged_per_s: float | None) -> FileNow:
    return FileNow(
        ino=file.ino,
        path=file.path,
        writers=file.writers,
        bytes_acknowledged_per_s=acknowledged_per_s,
        bytes_pending=file.bytes_pending,
        bytes_staged=file.bytes_staged,
        age_s=file.age_s,
        durable_in_s=durable_in_s(file, rates),
    )


def _show_status(console: Console, found: Status) -> None:
    say(
        console,
        f"{found.mountpoint}: fpfs {found.version}, filesystem {found.filesystem_id},"
        f" server {found.server_pid} (keeper {found.keeper_pid}, {found.restarts} restarts),"
        f" answers {found.ack}, log {found.log or 'on stderr'}",
    )
    _show_devices(console, found.devices)
    staging = found.staging
    say(
        console,
        f"staging: {format_size(staging.bytes_used)} of {format_size(staging.bytes_total)}"
        f"{'' if staging.pinned else ' (not pinned)'};"
        f" commits: {found.commit.pending} pending, {found.commit.committed} done",
    )
    _show_unfinished(console, found)
    catalog = found.catalog
    say(
        console,
        f"catalog: {catalog.copies_in_service} of {len(catalog.copies)} copies in service",
    )
    for copy in catalog.copies:
        if copy.trouble:
            say(console, f"warning: {copy.path}: {copy.trouble}")
    for failure in found.commit.failures:
        say(console, f"not kept: {failure.message}")


def _show_devices(console: Console, devices: Sequence[DeviceStatus]) -> None:
    table = new_table()
    add_figures(table, "dev")
    add_texts(table, "directory", "I/O")
    add_figures(table, "used", "free", "written", "read")
    for device in devices:
        table.add_row(
            str(device.number),
            show_text(device.path),
            device.state
            if device.error
            else f"{device.backend}, {'direct' if device.direct else 'buffered'}",
            format_size(device.bytes_used),
            format_size(device.bytes_free),
            format_size(device.bytes_written),
            format_size(device.bytes_read),
        )
    console.print(table)
    for device in devices:
        if device.error:
            say(console, f"warning: device {device.number} ({device.path}): {device.error}")


def _show_unfinished(console: Console, found: Status) -> None:
    """Tell of what writers left that were cut off, and of groups that are not committed."""
    for save in found.quarantined:
        say(
            console,
            f"cut off: the writer of {save.path} ({save.killed_by},"
            f" {_when(save.time_unix_s)});"
            f" its {format_size(save.size)} are .fpfs/partial/{save.name}",
        )
    for group in found.uncommitted:
        when = _when(group.time_unix_s)
        where = f"since a crash ({when}) it is .fpfs/uncommitted/{group.name}"
        say(console, f"not committed: {group.path}; {where if group.name else f'made {when}'}")


def _when(time_unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_unix_s))
