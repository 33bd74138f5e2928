"""Where both commands start: nothing is imported before an interrupt is handled.

Importing the commands takes a good part of a second, in which Ctrl-C shall end them in one line
too. `fpfs.cli.show.run_app` handles it from then on.
"""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130
"""As a shell shows a program that SIGINT ended."""


def fpfs() -> int:
    """Entry of the command ``fpfs``."""
    try:
        from fpfs.cli.main import main

        return main()
    except KeyboardInterrupt:
        return _interrupted("fpfs")


def fpfs_ctl() -> int:
    """Entry of the command ``fpfs-ctl``."""
    try:
        from fpfs.cli.ctl import main

        return main()
    except KeyboardInterrupt:
        return _interrupted("fpfs-ctl")


def _interrupted(name: str) -> int:
    sys.stderr.write(f"{name}: interrupted\n")
    return EXIT_INTERRUPTED
