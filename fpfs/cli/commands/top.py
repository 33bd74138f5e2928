"""``fpfs-ctl top``: what a mount does, refreshed on the whole screen."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.live import Live

from fpfs.cli.commands.activity_view import activity_tables, device_table, file_table, rate_lines
from fpfs.cli.show import ending_by_signal
from fpfs.core.mounts import MountEntry
from fpfs.core.protocol.activity import Activity, FilesInProgress, Rates, rates_between
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import AskActivity, ListInProgress
from fpfs.core.refusal import Refused

INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0
FIRST_S = 0.2
"""Until the first rates."""
ANSWER_S = 60.0


class Look(NamedTuple):
    """Figures of now, rates since the look before, files, and their rates by inode."""

    activity: Activity
    rates: Rates
    files: FilesInProgress | None
    file_rates: dict[int, float]


class ActivityReader:
    """Asks a mount again and again, and makes rates of it."""

    def __init__(self, client: ControlClient, entry: MountEntry, *, timeout_s: float) -> None:
        """Ask for the first time; each answer may take so long."""
        self._client = client
        self._timeout_s = timeout_s
        self._may_see_files = os.geteuid() in (0, entry.owner_uid)
        self._files: FilesInProgress | None = None
        self.activity = client.ask(AskActivity(), timeout_s=timeout_s)
        self._read_files()

    def read(self) -> Look:
        """Figures of now."""
        before, files_before = self.activity, self._files
        self.activity = self._client.ask(AskActivity(), timeout_s=self._timeout_s)
        self._read_files()
        return Look(
            self.activity,
            rates_between(before, self.activity),
            self._files,
            file_rates(files_before, self._files),
        )

    def _read_files(self) -> None:
        if self._may_see_files:
            self._files = self._client.ask(ListInProgress(), timeout_s=self._timeout_s)


def file_rates(before: FilesInProgress | None, now: FilesInProgress | None) -> dict[int, float]:
    """Bytes that were acknowledged in a second, by inode; only of files that both have."""
    if before is None or now is None or now.measured_s <= before.measured_s:
        return {}
    known = {file.ino: file.bytes_acknowledged for file in before.files}
    elapsed_s = now.measured_s - before.measured_s
    return {
        file.ino: (file.bytes_acknowledged - known[file.ino]) / elapsed_s
        for file in now.files
        # One that was unloaded meanwhile counts from zero again.
        if known.get(file.ino, file.bytes_acknowledged + 1) <= file.bytes_acknowledged
    }


def top(mountpoint: str, /, *, interval: float = 1.0) -> int:
    """Show what the mount at MOUNTPOINT does, on the whole screen, until q or Ctrl-C.

    Each device's throughput, mean latencies and queue (requests the kernel has + those that wait),
    staging, writers that wait, and each file that is not durable: how much of it is in no version
    yet, how much is in staging alone, since when, and how long the devices need for that.

    Parameters
    ----------
    interval
        Seconds between two looks.
    """
    asked = f"top of {mountpoint}"
    if not INTERVAL_S_MIN <= interval <= INTERVAL_S_MAX:
        raise Refused(
            asked=f"--interval {interval:g}",
            wrong=f"this is not between {INTERVAL_S_MIN:g} and {INTERVAL_S_MAX:g} seconds",
            remedy="write one such as 1",
        )
    if not sys.stdout.isatty():
        raise Refused(
            asked=asked,
            wrong="standard output is no terminal",
            remedy=f"fpfs-ctl status {mountpoint} shows it once",
        )
    entry = find_fpfs(mountpoint, asked=asked)
    with ControlClient(entry, asked=asked) as client:
        reader = ActivityReader(client, entry, timeout_s=ANSWER_S)
        console = Console(highlight=False, markup=False, emoji=False)
        with (
            ending_by_signal(),
            _keys() as keys,
            contextlib.suppress(KeyboardInterrupt),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            wait_s = FIRST_S
            while not _quits(keys, wait_s):
                now, rates, files, by_file = reader.read()
                tables = activity_tables(
                    now, rates, files, file_rates=by_file, lines=console.size.height
                )
                live.update(tables, refresh=True)
                wait_s = interval
    return 0


def show_once(console: Console, look: Look) -> None:
    """Print what the live view shows, but for what is no rate."""
    now, rates, files, by_file = look
    for line in rate_lines(now, rates):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(device_table(now.devices, rates))
    if files is not None and files.files:
        console.print(file_table(files, rates, by_file, count=len(files.files)))


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """A descriptor that keys can be read from one by one, if there is a keyboard."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _quits(keys: int | None, wait_s: float) -> bool:
    """Wait so long; True at once when q is pressed."""
    until_s = time.monotonic() + wait_s
    watched = [] if keys is None else [keys]
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select(watched, [], [], left_s)[0]:
            pressed = os.read(watched[0], 64)
            if not pressed:
                watched = []  # the keyboard is gone
            if b"q" in pressed.lower():
                return True
    return False
