"""``fpfs-ctl stat``: where files are, and whether they are safe yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console

from fpfs.cli.asking import Clients, Flag, Json, print_json
from fpfs.cli.show import add_figures, add_texts, new_table, open_console, say
from fpfs.core.paths import encodable
from fpfs.core.protocol.reports import FileRun, FileState, FileStatus
from fpfs.core.protocol.whereabouts import Whereabouts, describe_one, locate, stat_on_mount
from fpfs.core.refusal import Refused
from fpfs.core.units import format_size

RUNS_SHOWN = 16
"""Rows of a table, unless all are asked for."""


class FileReport(msgspec.Struct, kw_only=True, frozen=True):
    """One file: how far it has come, and where its committed content lies (regular files)."""

    path: str
    status: FileStatus
    where: Whereabouts | None


class FilesReport(msgspec.Struct, kw_only=True, frozen=True):
    """What ``fpfs-ctl stat --json`` prints."""

    files: tuple[FileReport, ...]


def stat(*files: str, runs: Flag = False, json: Json = False) -> int:
    """Show how far each file has come, and where it lies.

    State: writing (open for writing), waiting (closed, on its way), durable, or not kept (the last
    version failed, the one before stays). Sizes: what was acknowledged, of the version that was
    committed last, and how much of what is read now would be there after power loss. The version
    is a number that grows with each commit on the mount.

    Parameters
    ----------
    files
        Files or directories on a mount.
    runs
        Show all ranges, however many there are.
    """
    if not files:
        raise Refused(asked="stat", wrong="no file is named", remedy="name files on a mount")
    with Clients() as clients:
        report = FilesReport(files=tuple(_report(clients, path) for path in files))
    if json:
        print_json(report)
    else:
        _show(report.files, all_runs=runs)
    return 0


def _report(clients: Clients, path: str) -> FileReport:
    asked = f"stat {path}"
    client = clients.of(path, asked=asked)
    status = describe_one(client, stat_on_mount(path, asked=asked).st_ino, asked=asked)
    where = locate(client, status.ino, asked=asked) if status.is_regular else None
    return FileReport(path=encodable(path), status=status, where=where)


def _show(files: Sequence[FileReport], *, all_runs: bool) -> None:
    console = open_console()
    for number, file in enumerate(files):
        if number:
            say(console, "")
        say(console, file.path)
        for heading, text in _lines(file):
            say(console, f"  {heading:<9} {text}")
        if file.where is not None and file.where.runs:
            _show_runs(console, file.where.runs, all_runs=all_runs)


def _lines(file: FileReport) -> Iterable[tuple[str, str]]:
    status = file.status
    yield "state", describe_state(status)
    yield "inode", f"{status.ino}, version {status.version}"
    if file.where is None:
        return
    sizes = (status.size_acknowledged, status.size_committed, status.size_durable)
    acknowledged, committed, durable = map(format_size, sizes)
    yield "size", f"{acknowledged} ({sizes[0]} bytes) acknowledged"
    yield "", f"{committed} committed, {durable} durable"
    devices = ", ".join(map(str, status.devices))
    yield "new data", f"chunks of {format_size(status.chunk_bytes)} to devices {devices} in turn"
    blocks = file.where.blocks_with_checksum
    without = file.where.blocks_without_checksum
    if status.inline:
        yield "content", "in the catalog, which has a checksum of it"
    else:
        yield "checksums", f"of {blocks} blocks" + (f", none of {without}" if without else "")
    if status.former_versions:
        count = status.former_versions
        many = f"{count} contents are" if count != 1 else "1 content is"
        yield "former", f"{many} kept: fpfs-ctl versions lists them"


def describe_state(status: FileStatus) -> str:
    """The state of a file, in words."""
    match status.state:
        case FileState.WRITING:
            many = f"{status.writers} handles" if status.writers != 1 else "1 handle"
            rest = "all so far is durable" if status.durable else "not all is durable"
            return f"being written by {many}; {rest}"
        case FileState.WAITING:
            done = "closed" if status.is_regular else "made or moved"
            return f"{done}, on its way to the devices"
        case FileState.NOT_KEPT:
            return f"not kept: {status.failure}"
        case _:
            return "durable"


def _show_runs(console: Console, runs: Sequence[FileRun], *, all_runs: bool) -> None:
    table = new_table()
    add_figures(table, "from", "to", "device")
    add_texts(table, "object")
    add_figures(table, "at")
    shown = runs if all_runs else runs[:RUNS_SHOWN]
    for run in shown:
        table.add_row(
            str(run.offset_bytes),
            str(run.offset_bytes + run.size_bytes - 1),
            str(run.device),
            run.object,
            str(run.object_offset_bytes) if run.written else "allocated",
        )
    console.print(table)
    if len(shown) < len(runs):
        say(console, f"  and {len(runs) - len(shown)} more ranges: --runs shows all")
