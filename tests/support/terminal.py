"""Commands on a terminal of 80 columns, without a program that draws one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import termios
from collections.abc import Iterator

from tests.support.processes import REPOSITORY

COLUMNS, LINES = 80, 24
DEADLINE_S = 60


class Running:
    """A program that runs on a terminal; `status` is its exit status when it has ended."""

    def __init__(self, terminal: int, pid: int) -> None:
        self._terminal = terminal
        self._pid = pid
        self._shown = b""
        self.status: int | None = None

    def read_until(self, text: str) -> str:
        """Read until a text is shown; fails when the command ends without it."""
        while text not in (shown := self._shown.decode(errors="replace")):
            assert self._read(), f"it ended without {text!r}: {shown}"
        return shown

    def read_all(self) -> str:
        """Return everything that was shown, when the command has ended."""
        while self._read():
            pass
        _, status = os.waitpid(self._pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def type(self, text: str) -> None:
        """Type a text; what was shown before does not count any more."""
        self._shown = b""
        os.write(self._terminal, text.encode())

    def _read(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], DEADLINE_S)
        assert ready, f"nothing more was shown: {self._shown!r}"
        try:
            piece = os.read(self._terminal, 65536)
        except OSError:  # the terminal's end
            return False
        self._shown += piece
        return bool(piece)


@contextlib.contextmanager
def running_program(*words: str) -> Iterator[Running]:
    """Run a program; it is ended (SIGHUP) when the terminal is closed."""
    pid, terminal = os.forkpty()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        os.chdir(REPOSITORY)
        os.environ["TERM"] = "xterm"
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        os.execvp(words[0], words)
    made = Running(terminal, pid)
    try:
        yield made
    finally:
        os.close(terminal)
        if made.status is None:
            os.waitpid(pid, 0)


@contextlib.contextmanager
def running(*words: str, module: str = "fpfs.cli.ctl") -> Iterator[Running]:
    """Run a command of this repository."""
    with running_program(sys.executable, "-m", module, *words) as made:
        yield made


def on_terminal(*words: str, module: str = "fpfs.cli.ctl") -> str:
    """What a command shows on a terminal."""
    with running(*words, module=module) as command:
        return command.read_all()
