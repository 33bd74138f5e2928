"""``fpfs-ctl policy``: what holds in a directory and below it."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from rich.table import Table

from fpfs.cli.show import open_console
from fpfs.core.control import ControlClient, find_fpfs
from fpfs.core.paths import inode_of_directory, show_text
from fpfs.core.policy import check_key, split_setting
from fpfs.core.questions import ChangePolicy, PolicyChange
from fpfs.core.refusal import Refused

app = App(name="policy", help="Show and change what holds in a directory and below it.")

Json = Annotated[bool, Parameter(negative="", show_default=False)]


@app.command(name="get")
def show(directory: str, /, *, json: Json = False) -> int:
    """Show what holds in DIRECTORY, and where it was set.

    Parameters
    ----------
    json
        Print it as JSON.
    """
    return _change(directory, PolicyChange(), asked=f"policy of {directory}", json=json)


@app.command(name="set")
def set_(directory: str, /, *settings: str, json: Json = False) -> int:
    """Set KEY=VALUE for DIRECTORY and all below it, until a directory below differs.

    replace=whole|inplace: whether a file's content stays until the one that replaces it is whole.
    versions=N: how many former contents of each name are kept.
    commit=close|group: whether each file is complete when it is closed, or each directory that is
    made here when it is said to be; after a crash that is there with all its files or not at all.
    commit_marker=NAME: the name whose appearance by rename says so (.metadata).

    Parameters
    ----------
    settings
        What to set, each as KEY=VALUE.
    json
        Print what holds then as JSON.
    """
    asked = f"policy set {directory}"
    if not settings:
        raise Refused(asked=asked, wrong="nothing to set", remedy="write KEY=VALUE, see --help")
    values: dict[str, str] = {}
    for word in settings:
        key, value = split_setting(word, asked=asked)
        if values.setdefault(key, value) != value:
            raise Refused(asked=asked, wrong=f"{key} is set twice", remedy="leave one out")
    return _change(directory, PolicyChange(values=values), asked=asked, json=json)


@app.command
def unset(directory: str, /, *keys: str, json: Json = False) -> int:
    """Let DIRECTORY go by what holds above it again, in KEYS.

    Parameters
    ----------
    keys
        Which settings of its own to drop.
    json
        Print what holds then as JSON.
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
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown).decode(), indent=2) + "\n")
        return 0
    table = Table("setting", "value", "from")
    for setting in shown.settings:
        origin = "default" if setting.is_default else setting.set_at
        table.add_row(setting.key, show_text(setting.value), show_text(origin))
    open_console().print(table)
    return 0
