"""``fpfs-ctl policy``: what holds in a directory and below it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from fpfs.cli.asking import Flag, Json, ask, print_json
from fpfs.cli.commands.policy_files import Difference, difference, read_settings, write_settings
from fpfs.cli.show import add_texts, new_table, open_console, say
from fpfs.core.paths import inode_of_directory, show_text
from fpfs.core.policy import PROFILES, check_key, split_setting
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import (
    ApplyPolicies,
    ChangePolicy,
    ExplainPolicy,
    ListPolicies,
    PolicyChange,
)
from fpfs.core.protocol.reports import PoliciesListed, PolicyExplained, PolicySetting
from fpfs.core.refusal import Refused, refuse_empty
from fpfs.core.units import format_exact, format_size

HELP = """Show and change what holds in a directory and below it.

Settings hold for a directory and all below it, until a directory below differs. Where contents go
counts from the next version of a file on: what is committed stays where it is.

- width=N|all: over how many devices a file is striped.
- devices=WORD,...|all: which it may use, by number or tag (fpfs-ctl device list).
- chunk=SIZE: bytes on one device before the next device's turn, 128K to 1G.
- first=rotate|least-used|rank: which device gets the first chunk: the one after the last file's,
  the one with the most free space, or the one that the rank in the file's name counts to.
- depth=N|auto: how many chunks of a file may be on their way to each device at once.
- buffers=N|auto: how many of them may be staged for each device; 2 is double buffering.
- ack=early|close|durable: when a writer is answered: at once, or at close() or at each write() when
  its bytes are durable.
- commit=close|group: whether each file is complete when it is closed, or each directory that is
  made here when it is said to be: after a crash it is there with all its files, or not at all.
- commit_marker=NAME: the name whose appearance by rename says so (.metadata).
- versions=N: how many former versions of each name are kept.
- replace=whole|inplace: whether a content stays until the one that replaces it is whole.
- whole=PATTERN:...|none: all-or-nothing names, which never show what a killed writer left.
- readahead=SIZE|auto: how far ahead of a sequential reader the devices are read, 1M to 16M; auto
  leaves that to the kernel, which reads ahead for the page cache only.
- reads=cached|direct: whether who only reads goes through the kernel's page cache.
"""

app = App(name="policy", help=HELP)


@app.command(name="get")
def show(directory: str, /, *, json: Json = False) -> int:
    """Show what holds in DIRECTORY, and where it was set."""
    return _change(directory, PolicyChange(), asked=f"policy of {directory}", json=json)


@app.command(name="set")
def set_(directory: str, /, *settings: str, profile: str | None = None, json: Json = False) -> int:
    """Set KEY=VALUE for DIRECTORY and all below it, until a directory below differs.

    Parameters
    ----------
    settings
        What to set, each as KEY=VALUE (fpfs-ctl policy --help has the keys).
    profile
        Set all that a profile has first: throughput, safe, small-files, archive.
    """
    asked = f"policy set {directory}"
    values: dict[str, str] = {}
    for word in settings:
        key, value = split_setting(word, asked=asked)
        if values.setdefault(key, value) != value:
            raise Refused(asked=asked, wrong=f"{key} is set twice", remedy="leave one out")
    if profile is not None:
        values = {**_profile(profile, asked=asked), **values}
    if not values:
        raise Refused(asked=asked, wrong="nothing to set", remedy="write KEY=VALUE, see --help")
    return _change(directory, PolicyChange(values=values), asked=asked, json=json)


def _profile(name: str, *, asked: str) -> Mapping[str, str]:
    if name not in PROFILES:
        raise Refused(
            asked=asked,
            wrong=f"there is no profile '{name}'",
            remedy=f"known are {', '.join(PROFILES)}",
        )
    return PROFILES[name]


@app.command
def unset(directory: str, /, *keys: str, json: Json = False) -> int:
    """Remove KEYS from DIRECTORY, so that they are inherited from above.

    Parameters
    ----------
    keys
        Settings of DIRECTORY to remove (fpfs-ctl policy --help has them).
    """
    asked = f"policy unset {directory}"
    if not keys:
        raise Refused(asked=asked, wrong="nothing to unset", remedy="name settings, see --help")
    for key in keys:
        check_key(key, asked=asked)
    return _change(directory, PolicyChange(unset=keys), asked=asked, json=json)


def _change(directory: str, change: PolicyChange, *, asked: str, json: bool) -> int:
    entry = find_fpfs(directory, asked=asked)
    with ControlClient(entry, asked=asked) as client:
        ino = inode_of_directory(directory, asked=asked)
        shown = client.ask(ChangePolicy(ino=ino, change=change))
    if json:
        print_json(shown)
    else:
        _show_settings(shown.settings)
    return 0


def _show_settings(settings: Sequence[PolicySetting]) -> None:
    table = new_table()
    add_texts(table, "setting", "value", "from")
    for setting in settings:
        origin = "default" if setting.is_default else setting.set_at
        table.add_row(setting.key, show_text(setting.value), show_text(origin))
    open_console().print(table)


@app.command(name="list")
def list_(directory: str = ".", /, *, json: Json = False) -> int:
    """List what was set for DIRECTORY and for those below it."""
    listed = _list(directory, asked=f"policies of {directory}")
    if json:
        print_json(listed)
        return 0
    if not listed.directories:
        sys.stdout.write("nothing is set: the mount's options and defaults hold\n")
        return 0
    table = new_table()
    add_texts(table, "directory", "setting", "value")
    for each in listed.directories:
        for number, (key, value) in enumerate(sorted(each.settings.items())):
            table.add_row("" if number else show_text(each.path), key, show_text(value))
    open_console().print(table)
    return 0


def _list(directory: str, *, asked: str) -> PoliciesListed:
    ino = inode_of_directory(directory, asked=asked)
    return ask(directory, ListPolicies(ino=ino), asked=asked)


@app.command
def explain(path: str, /, *, json: Json = False) -> int:
    """Explain what holds for the file at PATH, which need not exist, and where it lies.

    Where it lies is told as of its last commit (fpfs-ctl wait PATH waits for that).
    """
    asked = f"policy of {path}"
    refuse_empty(path, what="path", asked=asked)
    directory, name = os.path.split(path)
    if not name or os.path.isdir(path):
        raise Refused(asked=asked, wrong="this is a directory", remedy="use fpfs-ctl policy get")
    ino = inode_of_directory(directory or ".", asked=asked)
    question = ExplainPolicy(directory=ino, name=os.fsencode(name))
    found = ask(directory or ".", question, asked=asked)
    if json:
        print_json(found)
        return 0
    _show_settings(found.settings)
    for line in _explain(found):
        say(open_console(), line)
    return 0


def _explain(found: PolicyExplained) -> list[str]:
    devices = ", ".join(map(str, found.devices))
    where = f"all of the devices {devices}"
    if found.width < len(found.devices):
        where = f"{found.width} of the devices {devices}"
    rank = "" if found.rank is None else f", from the one that its rank {found.rank} counts to"
    lines = [f"its next version goes to {where}{rank}"]
    if found.is_all_or_nothing:
        lines.append("its name never shows what a killed writer left")
    present = found.present
    if present is None:
        return [*lines, "there is no such file yet"]
    held = ", ".join(
        f"{format_size(size_bytes)} on device {number}"
        for number, size_bytes in sorted(present.bytes_by_device.items())
    )
    chunk = f" in chunks of {format_exact(present.chunk_bytes)}" if held else ""
    lines.append(f"now it has {format_size(present.size)}: {held or 'in the catalog'}{chunk}")
    if not present.follows_policy:
        lines.append("that is from before the policy: its next version goes where the policy says")
    return lines


@app.command
def profiles(*, json: Json = False) -> int:
    """List the profiles, which are settings that go together."""
    if json:
        print_json(PROFILES)
        return 0
    table = new_table()
    add_texts(table, "profile", "settings")
    for name, settings in PROFILES.items():
        table.add_row(name, " ".join(f"{key}={value}" for key, value in settings.items()))
    open_console().print(table)
    return 0


@app.command(name="export")
def export_(directory: str = ".", /, *, output: Annotated[str, Parameter(alias="-o")] = "-") -> int:
    """Write what was set for DIRECTORY and for those below it as TOML.

    Parameters
    ----------
    output
        The file to write, which is replaced whole; - is standard output.
    """
    asked = f"policy export {directory}"
    listed = _list(directory, asked=asked)
    text = write_settings(_by_relative_path(listed, directory))
    if output == "-":
        sys.stdout.write(text)
        return 0
    made = Path(f"{output}.new")
    try:
        made.write_text(text)
        made.replace(output)
    except OSError as error:
        raise Refused(
            asked=asked,
            wrong=f"{output} cannot be written ({error.strerror})",
            remedy="name another",
        ) from None
    return 0


def _by_relative_path(listed: PoliciesListed, directory: str) -> dict[str, Mapping[str, str]]:
    """Return settings by path from `directory`, which is "." itself."""
    root = find_fpfs(directory, asked="policy").mountpoint
    top = os.path.normpath(f"/{os.path.relpath(os.path.realpath(directory), root)}")
    return {os.path.relpath(each.path, top): each.settings for each in listed.directories}


@app.command
def apply(
    directory: str,
    file: str,
    /,
    *,
    yes: Annotated[Flag, Parameter(alias="-y")] = False,
    json: Json = False,
) -> int:
    """Make the policies of DIRECTORY and below what FILE has, which policy export wrote.

    What differs is shown first; then it is asked for, or done at once with --yes. Settings that
    FILE does not have are dropped. All of it is done, or nothing. With --json nobody is asked.

    Parameters
    ----------
    file
        A TOML file; - is standard input.
    yes
        Do not ask.
    """
    asked = f"policy apply {directory}"
    wanted = read_settings(file, asked=asked)
    present = _by_relative_path(_list(directory, asked=asked), directory)
    differences = difference(present, wanted)
    if not json:
        _show_differences(differences)
    is_wanted = bool(differences) and (yes or (not json and _confirmed()))
    if is_wanted:
        _apply(directory, differences, asked=asked)
    if json:
        print_json(PoliciesApplied(differences=tuple(map(_told, differences)), applied=is_wanted))
    elif differences and not is_wanted:
        sys.stdout.write("nothing was changed; --yes applies it\n")
    return 1 if differences and not is_wanted else 0


class PolicyDifference(msgspec.Struct, kw_only=True, frozen=True):
    """A setting of a directory, below DIRECTORY, that a file has otherwise; None: it is not set."""

    path: str
    key: str
    before: str | None
    after: str | None


class PoliciesApplied(msgspec.Struct, kw_only=True, frozen=True):
    """What differs between policies and a file, and whether it was changed (--yes)."""

    differences: tuple[PolicyDifference, ...]
    applied: bool


def _told(each: Difference) -> PolicyDifference:
    return PolicyDifference(path=each.path, key=each.key, before=each.before, after=each.after)


def _show_differences(differences: Sequence[Difference]) -> None:
    if not differences:
        sys.stdout.write("nothing differs\n")
    console = open_console()
    for each in differences:
        say(console, each.shown())


def _apply(directory: str, differences: Sequence[Difference], *, asked: str) -> None:
    changes = tuple(
        (inode_of_directory(os.path.join(directory, path), asked=f"{asked}: {path}"), change)
        for path, change in _changes_of(differences).items()
    )
    ask(directory, ApplyPolicies(changes=changes), asked=asked)


def _changes_of(differences: Sequence[Difference]) -> dict[str, PolicyChange]:
    changes: dict[str, PolicyChange] = {}
    for path in dict.fromkeys(each.path for each in differences):
        mine = [each for each in differences if each.path == path]
        changes[path] = PolicyChange(
            values={each.key: each.after for each in mine if each.after is not None},
            unset=tuple(each.key for each in mine if each.after is None),
        )
    return changes


def _confirmed() -> bool:
    """Ask on a terminal; elsewhere nobody is there to answer."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    sys.stdout.write("apply it? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
