"""How both commands run and show what came of it: one line for a refusal, and exit statuses.

Exit statuses: 0 done, 1 refused or something was not kept, 2 the arguments cannot be read.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError, UnusedCliTokensError
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fpfs.cli.entry import EXIT_INTERRUPTED
from fpfs.core.control import Flushed
from fpfs.core.refusal import Refused

PIPE_COLUMNS = 400
TIMEOUT_S_MAX = 1_000_000.0
"""poll(2) counts milliseconds in 31 bits."""


def run_app(app: App, arguments: Sequence[str], *, surplus: Mapping[str, str]) -> int:
    """Run a command line; returns its exit status.

    `surplus` says, by command, where words that are one too many belong.
    """
    try:
        status = app(
            arguments, exit_on_error=False, print_error=False, result_action="return_value"
        )
    except UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or ())
        command = (error.command_chain or ("",))[0]
        hint = surplus.get(command, "it takes no such words")
        sys.stderr.write(f"{app.name[0]}: {command} does not take '{words}': {hint}; see --help\n")
        return 2
    except CycloptsError as error:
        wrong = " ".join(str(error).split()).rstrip(".")
        sys.stderr.write(f"{app.name[0]}: {wrong}; see --help\n")
        return 2
    except Refused as refused:
        sys.stderr.write(f"{app.name[0]}: {refused}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{app.name[0]}: interrupted\n")
        return EXIT_INTERRUPTED
    return int(status or 0)


@contextlib.contextmanager
def ending_by_signal() -> Iterator[None]:
    """Let SIGTERM end the command as SIGINT does, with what it has made for a while taken away."""

    def end(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_timeout(timeout_s: float | None) -> None:
    """Refuse what is no time to wait for: zero, less, infinity and not-a-number."""
    if timeout_s is not None and not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise Refused(
            asked=f"--timeout {timeout_s:g}",
            wrong=f"this is not a number of seconds above 0 and up to {TIMEOUT_S_MAX:.0f}",
            remedy="write one such as 30, or leave it out",
        )


def open_console() -> Console:
    """Where tables are printed; in a file or pipe they are as wide as they need to be."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def show_failures(flushed: Flushed) -> int:
    """Name what was not kept; returns the exit status."""
    for failure in flushed.failures:
        sys.stderr.write(f"not kept: {failure.message}\n")
    return 1 if flushed.failures else 0


def byte_progress() -> Progress:
    """A bar that counts bytes, on stderr, where that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
