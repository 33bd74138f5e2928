"""What ``fpfs-ctl device drain`` does: asks step by step, at a rate, until nothing is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import msgspec

from fpfs.cli.commands.scrub import Pace
from fpfs.cli.show import byte_progress
from fpfs.core.paths import show_text
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import DrainNext, StartDrain
from fpfs.core.protocol.reports import DamagedContent, DrainCursor, Drained
from fpfs.core.units import format_size

AGAIN_S = 0.2
"""How soon is looked again at what was being changed."""

SAY_S = 5.0
"""After how long without anything moved it is said what is waited for."""


class DrainReport(msgspec.Struct, kw_only=True):
    """What a drain came to; ``--json`` prints it as it is. Sizes in bytes."""

    number: int
    path: str
    bytes_moved: int = 0
    is_empty: bool = False
    damage: list[DamagedContent] = msgspec.field(default_factory=list)
    refused: str = ""
    """Why the device does not give its space back, if it holds nothing any more."""


class _Round(msgspec.Struct, kw_only=True):
    """What one round over everything came to."""

    bytes_moved: int = 0
    damage: list[DamagedContent] = msgspec.field(default_factory=list)
    bytes_busy: int = 0
    left: int = 0
    refused: str = ""


def drain_device(
    mountpoint: str, device: str, *, bytes_per_s: int | None, json: bool, asked: str
) -> int:
    """Drain a device of a mount; returns the exit status."""
    with ControlClient(find_fpfs(mountpoint, asked=asked), asked=asked) as client:
        started = client.ask(StartDrain(device=device))
        report = DrainReport(number=started.number, path=started.path)
        with byte_progress() as progress:
            task = progress.add_task("drain", total=started.bytes_total)

            def tell(done: Drained) -> None:
                report.bytes_moved += done.bytes_moved
                progress.update(task, completed=report.bytes_moved)

            _run(client, report, Pace(bytes_per_s), tell)
    _show(report, json=json)
    return 0 if report.is_empty else 1


def _run(
    client: ControlClient, report: DrainReport, pace: Pace, tell: Callable[[Drained], None]
) -> None:
    """Go round until nothing is left, or nothing but what is damaged, or not given back."""
    idle_since_s: float | None = time.monotonic()
    while True:
        whole = _run_round(client, report.number, pace, tell)
        report.damage, report.refused = whole.damage, whole.refused
        report.is_empty = whole.left == 0
        goes_on = whole.bytes_moved or whole.bytes_busy
        if report.is_empty or ((whole.damage or whole.refused) and not goes_on):
            return
        if whole.bytes_moved:
            idle_since_s = time.monotonic()
        elif idle_since_s is not None and time.monotonic() > idle_since_s + SAY_S:
            idle_since_s = None
            sys.stderr.write("waiting for files that are being written\n")
        time.sleep(AGAIN_S)


def _run_round(
    client: ControlClient, number: int, pace: Pace, tell: Callable[[Drained], None]
) -> _Round:
    whole = _Round()
    cursor: DrainCursor | None = DrainCursor()
    while cursor is not None:
        done = client.ask(DrainNext(number=number, cursor=cursor, bytes_max=pace.step_bytes))
        tell(done)
        whole.bytes_moved += done.bytes_moved
        whole.bytes_busy += done.bytes_busy
        whole.damage += done.damage
        whole.left, whole.refused = done.left, done.refused
        pace.done(done.bytes_moved)
        cursor = done.cursor
    return whole


def _show(report: DrainReport, *, json: bool) -> None:
    if json:
        text = msgspec.json.encode(report).decode()
        sys.stdout.write(msgspec.json.format(text, indent=2) + "\n")
        return
    for each in report.damage:
        where = f"{each.path or f'inode {each.ino}'}: {format_size(each.size_bytes)} at byte"
        sys.stdout.write(show_text(f"{where} {each.offset_bytes}: {each.error}") + "\n")
    state = "is empty" if report.is_empty else "still has what is damaged"
    if report.refused:
        state = f"holds nothing any more and gives no space back ({report.refused})"
    moved = format_size(report.bytes_moved)
    sys.stdout.write(
        f"device {report.number} ({show_text(report.path)}) {state}; {moved} were moved\n"
    )
    if report.refused:
        sys.stdout.write(
            "unmount, mount with --degraded without it, and fpfs-ctl device remove takes it out\n"
        )
