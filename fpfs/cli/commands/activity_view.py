"""What a mount does, as tables of at most 80 columns: for the live view, and once for status."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fpfs.cli.show import add_figures, new_table
from fpfs.core.paths import show_text
from fpfs.core.protocol.activity import (
    Activity,
    DeviceActivity,
    FilesInProgress,
    Rates,
    durable_in_s,
)
from fpfs.core.protocol.reports import DeviceState
from fpfs.core.units import format_rate, format_size

BAR_CELLS = 20
PATH_COLUMNS = 24
DEVICE_PATH_COLUMNS = 12


def activity_tables(
    now: Activity,
    rates: Rates,
    files: FilesInProgress | None,
    *,
    file_rates: Mapping[int, float],
    lines: int,
) -> RenderableType:
    """All of it, in at most so many lines; the last files are left out."""
    summary = summary_lines(now, rates)
    devices = device_table(now.devices, rates)
    taken = len(summary) + 1 + 1 + len(now.devices) + 1  # blank lines, and a head
    return Group(
        *(Text(line, no_wrap=True, overflow="ellipsis") for line in summary),
        Text(),
        devices,
        Text(),
        *_file_part(files, rates, file_rates, lines=max(2, lines - taken)),
    )


def summary_lines(now: Activity, rates: Rates) -> list[str]:
    """Staging, writes, commits."""
    used, total = now.staging_bytes_used, now.staging_bytes_total
    cells = round(BAR_CELLS * used / total) if total else 0
    bar = "#" * cells + "." * (BAR_CELLS - cells)
    restarts = f"{now.restarts} restarts" if now.restarts != 1 else "1 restart"
    kept = f", {now.versions_failed} not kept" if now.versions_failed else ""
    up = format_time(max(0.0, time.time() - now.started_unix_s))
    staged = f"{format_size(used)} of {format_size(total)}, {now.writes_waiting} writers wait"
    commits = f"{now.versions_committed} done, {now.versions_pending} under way{kept}"
    copies = f"{now.catalog_copies_in_service} of {now.catalog_copies} copies"
    return [
        f"{show_text(now.mountpoint)}: fpfs {now.version}, up {up}, {restarts}",
        f"staging  [{bar}] {staged}",
        f"commits  {commits}; catalog {copies}",
        *rate_lines(now, rates),
    ]


def rate_lines(now: Activity, rates: Rates) -> list[str]:
    """What is written, how soon it is answered and durable, and what is not."""
    answered, durable = format_time(rates.write_to_ack_s), format_time(rates.ack_to_durable_s)
    written = format_rate(rates.bytes_acknowledged_per_s)
    pending = "all is durable"
    if now.oldest_pending_s:
        oldest = format_time(now.oldest_pending_s)
        pending = f"{format_size(now.bytes_pending)} in no version yet, the oldest for {oldest}"
    return [
        f"writes   {written}, answered in {answered}, durable in {durable}",
        f"pending  {pending}",
    ]


def device_table(devices: Sequence[DeviceActivity], rates: Rates) -> Table:
    """A line for each device."""
    table = _table("dev", "directory", "state")
    add_figures(table, "written", "read", "write", "flush", "queue", "errors")
    names = distinct([show_text(device.path) for device in devices], DEVICE_PATH_COLUMNS)
    for device, name in zip(devices, names, strict=True):
        found = rates.devices.get(device.number)
        if found is None or device.state is DeviceState.MISSING:
            figures = ["-"] * 6
        else:
            figures = [
                format_rate(found.written_per_s),
                format_rate(found.read_per_s),
                format_time(found.write_s),
                format_time(found.flush_s),
                f"{device.requests_in_flight}+{device.requests_queued}",
                str(device.errors),
            ]
        table.add_row(str(device.number), name, device.state, *figures)
    return table


def _file_part(
    files: FilesInProgress | None,
    rates: Rates,
    file_rates: Mapping[int, float],
    *,
    lines: int,
) -> list[RenderableType]:
    if files is None:
        return [Text("files: only root and the mount's owner may see them")]
    if not files.files:
        return [Text("no file is being written")]
    room = lines - 2 if files.count > lines - 1 else lines - 1
    count = min(len(files.files), max(1, room))
    table = file_table(files, rates, file_rates, count=count)
    left_out = files.count - count
    return [table, Text(f"and {left_out} more")] if left_out else [table]


def file_table(
    files: FilesInProgress, rates: Rates, file_rates: Mapping[int, float], *, count: int
) -> Table:
    """A line for each of the first files."""
    table = _table("file")
    add_figures(table, "open", "rate", "pending", "staged", "since", "durable in")
    for file in files.files[:count]:
        rate = file_rates.get(file.ino)
        name = show_text(file.path) if file.path else f"inode {file.ino}, no name known"
        table.add_row(
            shortened(name, PATH_COLUMNS),
            str(file.writers) if file.writers else "closed",
            "-" if rate is None else format_rate(rate),
            format_size(file.bytes_pending),
            format_size(file.bytes_staged),
            format_time(file.age_s or None),
            format_time(durable_in_s(file, rates)),
        )
    return table


def _table(*headings: str) -> Table:
    table = new_table()
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def format_time(duration_s: float | None) -> str:
    """A duration in three digits or so; a dash where there is none."""
    if duration_s is None:
        return "-"
    for factor, unit in ((1e6, "us"), (1e3, "ms"), (1, "s")):
        if duration_s * factor < 1000 or unit == "s":
            value = duration_s * factor
            break
    if unit == "s" and value >= 120:
        minutes, seconds = divmod(int(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"


def distinct(paths: Sequence[str], columns: int) -> list[str]:
    """Paths in so many columns; where they are too long, a directory by which each is known."""
    if all(len(path) <= columns for path in paths):
        return list(paths)
    parts = [path.split("/") for path in paths]
    alike = 0
    if len(paths) > 1:
        ends = zip(*(reversed(each) for each in parts), strict=False)
        alike = sum(1 for _ in itertools.takewhile(lambda end: len(set(end)) == 1, ends))
        alike = max(0, min(alike, *(len(each) - 2 for each in parts)))  # each keeps a name
    if not alike:
        return [shortened(path, columns) for path in paths]
    return [shortened(f".../{each[-1 - alike]}", columns) for each in parts]


def shortened(path: str, columns: int) -> str:
    """A path in so many columns; its end says more than its begin."""
    if len(path) <= columns:
        return path
    name = os.path.basename(path)
    return f"...{path[3 - columns :]}" if len(name) <= columns - 3 else f"{name[: columns - 3]}..."
