"""``fpfs-ctl versions`` and ``restore``: former versions of a file."""

from __future__ import annotations

import os
import sys
import time

from fpfs.cli.asking import Json, print_json
from fpfs.cli.show import add_figures, add_texts, new_table, open_console
from fpfs.core.paths import show_text
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import ListVersions, RestoreVersion
from fpfs.core.protocol.reports import VersionsShown
from fpfs.core.refusal import Refused, refuse_empty
from fpfs.core.units import format_size


def versions(path: str, /, *, json: Json = False) -> int:
    """List the former versions of the file at PATH that are kept, the oldest first.

    A policy says how many are (fpfs-ctl policy set DIRECTORY versions=N). Each can be read where
    the table says, below the mountpoint, and put back with fpfs-ctl restore.
    """
    shown = _ask(path, asked=f"versions of {path}")
    if json:
        print_json(shown)
        return 0
    if not shown.versions:
        sys.stdout.write(
            f"{path}: no former version is kept (fpfs-ctl policy set DIRECTORY versions=N)\n"
        )
        return 0
    table = new_table()
    add_texts(table, "version")
    add_figures(table, "size")
    add_texts(table, "written", "replaced", "to be read at")
    for each in shown.versions:
        table.add_row(
            show_text(f"{os.path.basename(path)}@{each.number}"),
            format_size(each.size),
            _when(each.time_unix_s),
            _when(each.replaced_unix_s),
            show_text(each.path),
        )
    open_console().print(table)
    return 0


def restore(version: str, /, *, json: Json = False) -> int:
    """Put a former version back: VERSION is PATH@NUMBER, as fpfs-ctl versions shows it.

    It takes the place of the present content, which becomes a former one, and is durable when the
    command returns. Nothing is copied. Who has the file open goes on with what he has. --json
    prints the former versions that there are then.
    """
    path, sign, number = version.rpartition("@")
    asked = f"restore {version}"
    is_number = number.isascii() and number.isdecimal() and len(number) < 10
    if not sign or not is_number:
        raise Refused(
            asked=asked,
            wrong="this names no version",
            remedy="write PATH@NUMBER, as fpfs-ctl versions PATH shows it",
        )
    shown = _ask(path, asked=asked, restored=int(number))
    if json:
        print_json(shown)
        return 0
    last = shown.versions[-1].number if shown.versions else 0
    name = os.path.basename(path)
    rest = f"; what it held is {name}@{last}" if last else ""
    sys.stdout.write(f"{path}: holds {name}@{number} again{rest}\n")
    return 0


def _ask(path: str, *, asked: str, restored: int | None = None) -> VersionsShown:
    """Ask for the former versions of a name, with one of them `restored` if one is named."""
    refuse_empty(path, what="path", asked=asked)
    entry = find_fpfs(path, asked=asked)
    directory, name = os.path.split(path)
    with ControlClient(entry, asked=asked) as client:
        try:
            if not os.path.lexists(path):
                raise Refused(
                    asked=asked, wrong=f"{path} does not exist", remedy="name a file on the mount"
                )
            if os.path.isdir(path):
                raise Refused(asked=asked, wrong="this is a directory", remedy="name a file in it")
            ino = os.stat(directory or ".").st_ino
        except OSError as error:
            raise Refused(
                asked=asked, wrong=f"{error.strerror}", remedy="name a file on the mount"
            ) from None
        if restored is None:
            return client.ask(ListVersions(directory=ino, name=os.fsencode(name)))
        return client.ask(RestoreVersion(directory=ino, name=os.fsencode(name), number=restored))


def _when(time_unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_unix_s))
