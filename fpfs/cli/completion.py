"""``fpfs-ctl completion``: what a shell completes command lines by."""

from __future__ import annotations

import enum
import sys
from typing import Literal

from cyclopts import App


class Shell(enum.StrEnum):
    """A shell that words can be completed in."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Shell, /) -> int:
    """Print what SHELL completes the words of fpfs and fpfs-ctl by.

    make install-completion puts it where the shells of all users look; root runs that.

    Parameters
    ----------
    shell
        bash, zsh or fish.
    """
    sys.stdout.write(script_of("both", shell))
    return 0


def script_of(tool: Literal["fpfs", "fpfs-ctl", "both"], shell: Shell) -> str:
    """Return the script for one command, or for both in one."""
    # Imported late: `ctl` registers this command.
    from fpfs.cli import ctl, main

    apps: dict[str, App] = {"fpfs": main.app, "fpfs-ctl": ctl.app}
    return "\n".join(
        app.generate_completion(prog_name=name, shell=shell.value)
        + (_ZSH_END.format(name=name) if shell is Shell.ZSH else "")
        for name, app in apps.items()
        if tool in (name, "both")
    )


_ZSH_END = """
if [ "$funcstack[1]" = "_{name}" ]; then
  _cyclopts_{name} "$@"
elif whence compdef > /dev/null; then
  compdef _cyclopts_{name} {name}
fi
"""
"""What cyclopts makes defines a function, and calls it nowhere. zsh reads a file `_fpfs` of its
`fpath` as that function's body when it is first needed; else the script was sourced."""
