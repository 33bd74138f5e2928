"""``fpfs-ctl ls``: as ``ls -l``, with what only fpfs knows of each file."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import sys
import time
from collections.abc import Iterable, Sequence

import msgspec

from fpfs.cli.asking import Clients, Flag, Json, print_json
from fpfs.core.paths import encodable, show_text
from fpfs.core.protocol.control import ControlClient
from fpfs.core.protocol.reports import FileState, FileStatus
from fpfs.core.protocol.whereabouts import describe
from fpfs.core.refusal import Refused

RECENT_S = 182 * 86_400
"""Of what changed longer ago the year is shown, and not the time of day, as ls(1) does."""

HEADINGS = ("mode", "", "owner", "group", "size", "changed", "durable", "width", "version", "name")
_RIGHT = frozenset({1, 4, 7, 8})
"""Columns with numbers."""


class ListedFile(msgspec.Struct, kw_only=True, frozen=True):
    """One name. `status` is None where the server tells nothing of it."""

    path: str
    mode: int
    nlink: int
    uid: int
    gid: int
    size: int
    time_unix_s: float
    target: str
    status: FileStatus | None


class Listing(msgspec.Struct, kw_only=True, frozen=True):
    """What ``fpfs-ctl ls --json`` prints: paths, and names in directories."""

    files: tuple[ListedFile, ...]


def ls(*paths: str, all: Flag = False, json: Json = False) -> int:  # noqa: A002 (the flag's name)
    """List files as ls -l does, with how safe each is, over how many devices, in which version.

    Durable is yes, no (on its way to the devices), open (somebody is writing), or lost (the last
    version could not be kept). Width is the number of devices that the file is striped over. The
    version grows with each commit on the mount. A question mark: the server tells you nothing.

    Parameters
    ----------
    paths
        Files, or directories to look into; without any, the current directory.
    all
        Show names that begin with a dot, too.
    """
    with Clients() as clients:
        found = [_list(clients, path, hidden=all) for path in paths or (".",)]
    if json:
        print_json(Listing(files=tuple(file for files in found for file in files)))
        return 0
    for number, (path, files) in enumerate(zip(paths or (".",), found, strict=True)):
        if len(found) > 1:
            sys.stdout.write(("\n" if number else "") + show_text(path) + ":\n")
        _show(files)
    return 0


def _list(clients: Clients, path: str, *, hidden: bool) -> list[ListedFile]:
    """Return what is at a path: itself, or what is in a directory."""
    asked = f"ls {path}"
    client = clients.of(path, asked=asked)
    try:
        own = os.stat(path)
        if not stat.S_ISDIR(own.st_mode):
            return _described(client, [(path, os.lstat(path))])
        with os.scandir(path) as entries:
            names = sorted((e for e in entries if hidden or e.name[:1] != "."), key=_name)
        return _described(client, _looked_at(names))
    except OSError as error:
        raise Refused(
            asked=asked, wrong=f"{error.strerror}", remedy="name what you may look at"
        ) from None


def _name(entry: os.DirEntry[str]) -> bytes:
    return os.fsencode(entry.name)


def _looked_at(entries: Iterable[os.DirEntry[str]]) -> list[tuple[str, os.stat_result]]:
    """What there is at names of a directory; those that were removed meanwhile are left out."""
    found = []
    for entry in entries:
        try:
            found.append((entry.path, entry.stat(follow_symlinks=False)))
        except FileNotFoundError:
            continue
    return found


def _described(
    client: ControlClient, names: Sequence[tuple[str, os.stat_result]]
) -> list[ListedFile]:
    statuses = describe(client, [found.st_ino for _path, found in names])
    return [
        ListedFile(
            path=encodable(path),
            mode=found.st_mode,
            nlink=found.st_nlink,
            uid=found.st_uid,
            gid=found.st_gid,
            size=found.st_size,
            time_unix_s=found.st_mtime_ns / 1e9,
            target=encodable(os.readlink(path)) if stat.S_ISLNK(found.st_mode) else "",
            status=statuses.get(found.st_ino),
        )
        for path, found in names
    ]


def _show(files: Sequence[ListedFile]) -> None:
    rows = [HEADINGS, *map(_row, files)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row[:-1], widths, strict=True))
        ]
        sys.stdout.write(f"{' '.join(cells)} {row[-1]}\n")


def _row(file: ListedFile) -> tuple[str, ...]:
    status = file.status
    is_regular = status is not None and status.is_regular
    arrow = f" -> {show_text(file.target)}" if file.target else ""
    return (
        stat.filemode(file.mode),
        str(file.nlink),
        _owner(file.uid),
        _group(file.gid),
        str(file.size),
        _when(file.time_unix_s),
        _durable(status),
        str(status.width) if status and is_regular else "-" if status else "?",
        str(status.version) if status and is_regular else "-" if status else "?",
        show_text(os.path.basename(file.path) or file.path) + arrow,
    )


def _durable(status: FileStatus | None) -> str:
    if status is None:
        return "?"
    if status.state is FileState.NOT_KEPT:
        return "lost"
    if status.state is FileState.WRITING:
        return "open"
    return "yes" if status.durable else "no"


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _when(time_unix_s: float) -> str:
    is_recent = 0 <= time.time() - time_unix_s < RECENT_S
    return time.strftime("%b %e %H:%M" if is_recent else "%b %e  %Y", time.localtime(time_unix_s))
