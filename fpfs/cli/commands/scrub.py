"""What ``fpfs-ctl scrub`` does: asks step by step, at a given rate, and shows what is damaged."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
from rich.console import Console

from fpfs.cli.asking import print_json
from fpfs.cli.show import byte_progress
from fpfs.core.engine import BLOCK_BYTES
from fpfs.core.mounts import MountEntry
from fpfs.core.paths import show_text
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import ScrubNext, ScrubStep
from fpfs.core.protocol.reports import DamagedContent, Scrubbed, ScrubCursor
from fpfs.core.refusal import Refused
from fpfs.core.units import format_size

STEP_BYTES_MAX = 32 * 1024 * 1024
STEP_BYTES_MIN = 64 * 1024
STEPS_A_SECOND = 8
"""At a given rate, so that the devices are read evenly."""


class ScrubReport(msgspec.Struct, kw_only=True):
    """What a scrub came to; ``--json`` prints it as it is. Sizes in bytes."""

    bytes_checked: int = 0
    bytes_unverified: int = 0
    damage: list[DamagedContent] = msgspec.field(default_factory=list)


def scrub(path: str, *, bytes_per_s: int | None, json: bool) -> int:
    """Scrub a file, a directory tree or, at a mountpoint, everything; returns the exit status."""
    asked = f"scrub of {path}"
    entry = find_fpfs(path, asked=asked)
    report = ScrubReport()
    steps = _Steps(entry, asked=asked, bytes_per_s=bytes_per_s)
    try:
        inos, total = _what(path, entry, asked=asked)
        with byte_progress() as progress:
            task = progress.add_task("scrub", total=total)
            for done in steps.all_of(inos):
                report.bytes_checked += done.bytes_checked
                report.bytes_unverified += done.bytes_unverified
                report.damage += done.damage
                if done.bytes_total:
                    progress.update(task, total=done.bytes_total)
                progress.update(task, completed=report.bytes_checked + report.bytes_unverified)
                if not json:
                    _show_damage(progress.console, done.damage)
    finally:
        steps.close()
    if json:
        print_json(report)
    else:
        _show_sum(report)
    return 1 if report.damage else 0


def _what(path: str, entry: MountEntry, *, asked: str) -> tuple[Iterable[int], int | None]:
    """Which inodes to look at (0: all), and about how many bytes they hold."""
    if os.path.realpath(path) == entry.mountpoint:
        return [0], None
    try:
        found = dict(_regular_files(path))
    except OSError as error:
        raise Refused(
            asked=asked,
            wrong=f"{error.filename or path}: {error.strerror}",
            remedy="scrub the mountpoint, which looks at everything whatever its permissions",
        ) from None
    return found, sum(found.values())


def _regular_files(path: str) -> Iterator[tuple[int, int]]:
    """Inode and bytes on devices of each regular file at or below a path.

    What is removed meanwhile is left out.
    """
    status = os.stat(path)
    if stat.S_ISREG(status.st_mode):
        yield status.st_ino, status.st_blocks * 512
    folders = [path] if stat.S_ISDIR(status.st_mode) else []
    while folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for each in entries:
                if each.is_dir(follow_symlinks=False):
                    folders.append(each.path)
                elif each.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = each.stat(follow_symlinks=False)
                        yield status.st_ino, status.st_blocks * 512


class Pace:
    """Keeps to a rate (None: does not): sleeps as long as more was done than the time allows."""

    def __init__(
        self,
        bytes_per_s: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Begin now."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._began_s = clock()
        self._bytes_done = 0

    @property
    def step_bytes(self) -> int:
        """How much to ask for at once."""
        if self._bytes_per_s is None:
            return STEP_BYTES_MAX
        return min(max(self._bytes_per_s // STEPS_A_SECOND, STEP_BYTES_MIN), STEP_BYTES_MAX)

    def done(self, bytes_done: int) -> None:
        """Return when the next step may begin."""
        self._bytes_done += bytes_done
        if self._bytes_per_s is not None:
            early_s = self._began_s + self._bytes_done / self._bytes_per_s - self._clock()
            if early_s > 0:
                self._sleep(early_s)


class _Steps:
    """Asks for one step after the other, no faster than at the rate."""

    def __init__(self, entry: MountEntry, *, asked: str, bytes_per_s: int | None) -> None:
        self._pace = Pace(bytes_per_s)
        self._client = ControlClient(entry, asked=asked)

    def all_of(self, inos: Iterable[int]) -> Iterator[Scrubbed]:
        """Yield what each step came to, until all inodes were looked at."""
        bytes_before = 0
        for ino in inos:
            cursor: ScrubCursor | None = ScrubCursor()
            while cursor is not None:
                self._pace.done(bytes_before)
                step = ScrubStep(cursor=cursor, bytes_max=self._pace.step_bytes)
                done = self._client.ask(ScrubNext(ino=ino, step=step))
                cursor, bytes_before = done.cursor, done.bytes_checked
                yield done

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _show_damage(console: Console, damage: Iterable[DamagedContent]) -> None:
    for each in damage:
        last = each.offset_bytes + each.size_bytes - 1
        where = f" bytes {each.offset_bytes} to {last}" if each.size_bytes else ""
        place = ""
        if each.object:
            blocks = f"block {each.object_block}"
            if each.size_bytes > BLOCK_BYTES:
                blocks += f" to {each.object_block + each.size_bytes // BLOCK_BYTES - 1}"
            place = f" {blocks} of object {each.object} on {each.device_path}:"
        name = each.path or "a file without a name"
        line = f"damaged: {show_text(name)} (inode {each.ino}){where}:{place} {each.error}"
        # Through the bar's console, which keeps the bar below what is printed.
        if console.is_terminal and sys.stdout.isatty():
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        else:
            sys.stdout.write(line + "\n")


def _show_sum(report: ScrubReport) -> None:
    unverified = ""
    if report.bytes_unverified:
        unverified = f", {format_size(report.bytes_unverified)} without checksums not checked"
    files = len({each.ino for each in report.damage})
    damaged = f"damaged files: {files}" if files else "all is well"
    sys.stdout.write(f"checked {format_size(report.bytes_checked)}{unverified}: {damaged}\n")
