"""What the commands of ``fpfs-ctl`` have in common: connections, JSON, and signs of life.

Everything that ``--json`` prints is a struct; docs/json has the schema of each.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console

from fpfs.core.paths import show_text
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import Answer, Question

Json = Annotated[
    bool,
    Parameter(
        name="--json",
        negative="",
        show_default=False,
        help="Print JSON: sizes in bytes, times in seconds since 1970; docs/json has the schema.",
    ),
]

Flag = Annotated[bool, Parameter(negative="", show_default=False)]

SILENT_S = 1.0
"""What takes longer shows, on a terminal, that it is under way."""


def print_json(shown: object) -> None:
    """Print what a command found."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown).decode(), indent=2) + "\n")


def ask(
    path: str, question: Question[Answer], *, asked: str, timeout_s: float | None = None
) -> Answer:
    """Ask the server of the mount that a path is on one question. Raises as `ControlClient`."""
    with ControlClient(find_fpfs(path, asked=asked), asked=asked) as client:
        return client.ask(question, timeout_s=timeout_s)


class Clients:
    """Connections to the servers of the mounts that paths are on, one for each mount."""

    def __init__(self) -> None:
        """Connect to nobody yet."""
        self._clients: dict[str, ControlClient] = {}

    def of(self, path: str, *, asked: str) -> ControlClient:
        """Return a connection to the server of the mount that a path is on. Raises `Refused`."""
        entry = find_fpfs(path, asked=asked)
        if entry.device not in self._clients:
            self._clients[entry.device] = ControlClient(entry, asked=asked)
        return self._clients[entry.device]

    def __enter__(self) -> Clients:
        """Return the connections; leaving the block closes them."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()


@contextlib.contextmanager
def waiting(for_what: str) -> Iterator[None]:
    """Show on stderr, where that is a terminal, that a command waits for more than a second."""
    console = Console(stderr=True, markup=False, emoji=False)
    if not console.is_terminal:
        yield
        return
    sign = console.status(show_text(for_what))
    timer = threading.Timer(SILENT_S, sign.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        sign.stop()
