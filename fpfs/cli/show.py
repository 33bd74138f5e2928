"""How both commands run and show what came of it: one line for a refusal, and exit statuses.

Exit statuses: 0 done, 1 refused or something was not kept or not written, 2 the arguments cannot be
read; those of fsck are its own.

Invariants:
  * Descriptors 0 to 2 are open, so that nothing that is opened later is taken for them.
"""

from __future__ import annotations

import contextlib
import io
import os
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
from rich.table import Table

from fpfs.cli.entry import EXIT_INTERRUPTED
from fpfs.cli.examples import lay_out
from fpfs.core.fsck import EXIT_NOT_CHECKED
from fpfs.core.paths import show_text
from fpfs.core.protocol.reports import Flushed
from fpfs.core.refusal import Refused

PIPE_COLUMNS = 100_000
EXIT_NOT_WRITTEN = 1
TIMEOUT_S_MAX = 1_000_000.0
"""poll(2) counts milliseconds in 31 bits."""


def run_app(app: App, arguments: Sequence[str], *, surplus: Mapping[str, str]) -> int:
    """Run a command line; returns its exit status.

    `surplus` says, by command, where words that are one too many belong.
    """
    _prepare_streams()
    lay_out(app)
    try:
        status = _run(app, arguments, surplus)
        sys.stdout.flush()
        return status
    except OSError as error:
        if error.filename is not None:  # of a file, not of what is written to standard output
            raise
        _drop_output()
        if not isinstance(error, BrokenPipeError):  # who closed a pipe wants no more
            sys.stderr.write(f"{app.name[0]}: the output cannot be written ({error.strerror})\n")
        return EXIT_NOT_CHECKED if list(arguments[:1]) == ["fsck"] else EXIT_NOT_WRITTEN


def _prepare_streams() -> None:
    """Open what the caller has closed, and let names that are no text be written as escapes."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free: this one
    # They last as long as the process.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Let what is left to be written go nowhere: the interpreter would try it again at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _run(app: App, arguments: Sequence[str], surplus: Mapping[str, str]) -> int:
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
        wrong = " ".join(str(error).split())
        wrong = wrong if wrong.endswith("...") else wrong.rstrip(".")
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
    """Where tables are printed; in a file or pipe they are as wide as they need to be.

    Names are shown as they are: brackets and colons in them mean nothing.
    """
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=width, markup=False, emoji=False)


def new_table() -> Table:
    """A table without lines, so that 80 columns are enough."""
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)


def add_texts(table: Table, *headings: str) -> None:
    """Add columns of names and words. Where there is no room they go on in the next line."""
    for heading in headings:
        table.add_column(heading, overflow="fold")


def add_figures(table: Table, *headings: str) -> None:
    """Add columns of numbers, which are never cut."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def say(console: Console, line: str) -> None:
    """Print a line with names in it, however long."""
    console.print(show_text(line), highlight=False, soft_wrap=True)


def show_failures(flushed: Flushed) -> int:
    """Name what was not kept; returns the exit status."""
    for failure in flushed.failures:
        sys.stderr.write(f"not kept: {show_text(failure.message)}\n")
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
