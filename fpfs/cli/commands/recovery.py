"""What ``fpfs-ctl recovery`` shows: what a server found and did when it began, in words."""

from __future__ import annotations

import time
from collections.abc import Iterator

from fpfs.core.protocol.reports import RecoveryStatus, Status


def describe_recovery(status: Status) -> Iterator[str]:
    """Yield the lines of the report."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.started_unix_s))
    after = f", then {_count(status.restarts, 'restart', 'restarts')}" if status.restarts else ""
    yield f"{status.mountpoint}: mounted {began}{after}"
    lines = list(_lines(status.recovery))
    yield from lines or ["nothing had to be recovered"]


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _lines(found: RecoveryStatus) -> Iterator[str]:
    for line in found.catalog:
        yield f"remade: {line}"
    if found.files_taken_over:
        files = _count(found.files_taken_over, "file", "files")
        yield f"finished: {files} with changes that were acknowledged and not committed"
    if found.handles_taken_over:
        handles = _count(found.handles_taken_over, "open file", "open files")
        yield f"finished: {handles} of the server before, which programs go on with"
    if found.files_lost:
        files = _count(found.files_lost, "file", "files")
        yield f"rolled back: {files} whose changes were lost with damaged staging memory (see log)"
    if found.inodes_deleted:
        files = _count(found.inodes_deleted, "file", "files")
        yield f"rolled back: {files} without a name, or never finished, deleted"
    if found.objects_removed is None:
        yield "rolled back: objects that belong to no version are being looked for"
    elif found.objects_removed:
        objects = _count(found.objects_removed, "object", "objects")
        yield f"rolled back: {objects} that belonged to no version, removed"
