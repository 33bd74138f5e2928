"""Where a file is, and whether it is safe yet: what programs and tools ask of a server.

Concurrency: plain blocking functions; each call has a connection of its own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

import msgspec

from fpfs.core.mounts import mount_at
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import INODES_MAX, AskStatus, DescribeFiles, ListRuns, WaitDurable
from fpfs.core.protocol.reports import FileRun, FileStatus, Flushed, Status, join_runs
from fpfs.core.refusal import Refused

STATUS_TIMEOUT_S = 60.0
"""How long a server may take to tell what it knows."""

TRIES = 5
"""How often a file is asked for that is replaced while it is told where it lies."""

BLOCK_BYTES = 64 * 1024
"""As in `fpfs.core.engine`, which would load the extension."""


class NotKept(Refused):
    """Something that was to become durable could not be kept; its previous version stays."""


def wait_durable(path: str | os.PathLike[str], *, timeout_s: float | None = None) -> None:
    """Wait until a file on a mount of fpfs, or a directory with all that is in it, is durable.

    A file that somebody has open for writing is waited for until it is closed. Of a directory that
    is everything in it and below at the time of the call. On return it survives power loss.

    Raises `NotKept` when a version could not be kept, `TimedOut` (a TimeoutError) after
    `timeout_s` seconds, and `Refused`, of which both are, when `path` is not there, or is not on a
    mount of fpfs, or that ends.
    """
    flushed = wait_for(os.fspath(path), timeout_s=timeout_s)
    if flushed.failures:
        raise NotKept(
            asked=f"wait for {os.fspath(path)}",
            wrong=flushed.failures[0].message,
            remedy="write it again where there is room, or see fpfs-ctl status",
        )


def wait_for(path: str, *, timeout_s: float | None = None) -> Flushed:
    """Wait as `wait_durable`, and return what could not be kept of a directory's files."""
    asked = f"wait for {path}"
    # Connected first: what a server that died left answers ENOTCONN to stat.
    with ControlClient(find_fpfs(path, asked=asked), asked=asked) as client:
        found = stat_on_mount(path, asked=asked)
        question = WaitDurable(ino=found.st_ino, below=stat.S_ISDIR(found.st_mode))
        return client.ask(question, timeout_s=timeout_s)


def status(
    path: str | os.PathLike[str], *, timeout_s: float = STATUS_TIMEOUT_S
) -> FileStatus | Status:
    """Return what is known of a file on a mount of fpfs, or of the mount at a mountpoint.

    `path` of a file, directory or whatever else is on the mount gives a `FileStatus`; a mountpoint
    gives the mount's `Status`.

    Raises `Refused` when `path` is not there, is not on a mount of fpfs, or is not in a directory
    that the caller may read and search; `TimedOut` (a TimeoutError, and a `Refused`) when the
    server does not answer within `timeout_s` seconds.
    """
    name = os.fspath(path)
    asked = f"status of {name}"
    entry = find_fpfs(name, asked=asked)
    with ControlClient(entry, asked=asked) as client:
        if mount_at(name) == entry:
            return client.ask(AskStatus(), timeout_s=timeout_s)
        ino = stat_on_mount(name, asked=asked).st_ino
        return describe_one(client, ino, asked=asked, timeout_s=timeout_s)


def stat_on_mount(path: str, *, asked: str) -> os.stat_result:
    """Return what stat(2) says of a path, links followed. Raises `Refused`."""
    try:
        return os.stat(path)
    except OSError as error:
        raise Refused(
            asked=asked, wrong=f"{error.strerror}", remedy="name a file on the mount"
        ) from None


def describe(
    client: ControlClient, inos: Sequence[int], *, timeout_s: float | None = STATUS_TIMEOUT_S
) -> dict[int, FileStatus]:
    """Return what is known of those of some inodes that there are, and that one may see."""
    found: dict[int, FileStatus] = {}
    for first in range(0, len(inos), INODES_MAX):
        question = DescribeFiles(inos=tuple(inos[first : first + INODES_MAX]))
        for each in client.ask(question, timeout_s=timeout_s).files:
            found[each.ino] = each
    return found


def describe_one(
    client: ControlClient, ino: int, *, asked: str, timeout_s: float | None = STATUS_TIMEOUT_S
) -> FileStatus:
    """Return what is known of an inode. Raises `Refused`."""
    found = describe(client, [ino], timeout_s=timeout_s)
    if ino not in found:
        raise Refused(
            asked=asked,
            wrong="the server tells nothing of it",
            remedy="ask as root or as one who may read and search the directory that it is in; of"
            " what is made up below .fpfs/versions nothing is known",
        )
    return found[ino]


class Whereabouts(msgspec.Struct, kw_only=True, frozen=True):
    """Where a committed content lies. Of its blocks of 64 KiB some have no checksum, or none."""

    runs: tuple[FileRun, ...]
    blocks_with_checksum: int
    blocks_without_checksum: int


def locate(client: ControlClient, ino: int, *, asked: str) -> Whereabouts:
    """Return where the committed content of a file lies. Raises `Refused`.

    One that is replaced meanwhile is asked for anew, a few times.
    """
    for _ in range(TRIES):
        pages = list(_pages(client, ino))
        if len({version for version, _runs in pages}) == 1:
            break
    else:
        raise Refused(
            asked=asked, wrong="it is being replaced all the time", remedy="try again later"
        )
    runs: list[FileRun] = []
    for _version, page in pages:
        join_runs(runs, page)
    blocks = {
        has_checksums: sum(
            run.size_bytes // BLOCK_BYTES
            for run in runs
            if run.written and run.checksums is has_checksums
        )
        for has_checksums in (True, False)
    }
    return Whereabouts(
        runs=tuple(runs), blocks_with_checksum=blocks[True], blocks_without_checksum=blocks[False]
    )


def _pages(client: ControlClient, ino: int) -> Iterator[tuple[int, Sequence[FileRun]]]:
    segment: int | None = 0
    while segment is not None:
        shown = client.ask(ListRuns(ino=ino, segment=segment), timeout_s=STATUS_TIMEOUT_S)
        yield shown.version, shown.runs
        segment = shown.next_segment
