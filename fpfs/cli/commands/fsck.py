"""What ``fpfs fsck`` and ``fpfs-ctl fsck`` show: a line for each finding, and a sum."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence

from rich.progress import TaskID

from fpfs.cli.asking import print_json
from fpfs.cli.show import byte_progress, ending_by_signal
from fpfs.core.fsck import EXIT_NOT_CHECKED, CheckReport
from fpfs.core.mounts import mount_at
from fpfs.core.protocol.control import find_fpfs
from fpfs.core.refusal import Refused, refuse_empty
from fpfs.core.units import format_size
from fpfs.daemon.offline.fsck import Wishes, check_devices, check_mounted

Progressing = Callable[[int, int], None]


def fsck(places: Sequence[str], *, repair: bool, data: bool, json: bool) -> int:
    """Check the mount at one place, or the device directories; returns the exit status."""
    return _run("fpfs", lambda update: _check(places, Wishes(repair, data, update)), json=json)


def fsck_mounted(mountpoint: str, *, data: bool, json: bool) -> int:
    """Check the mount that a path is on; returns the exit status."""

    def check(update: Progressing) -> CheckReport:
        entry = find_fpfs(mountpoint, asked=f"fsck of {mountpoint}")
        return check_mounted(entry, Wishes(repair=False, data=data, progress=update))

    return _run("fpfs-ctl", check, json=json)


def _run(tool: str, check: Callable[[Progressing], CheckReport], *, json: bool) -> int:
    try:
        with ending_by_signal(), progress_bar() as bar:
            report = check(bar.update)
    except Refused as refused:
        sys.stderr.write(f"{tool}: {refused}\n")
        return EXIT_NOT_CHECKED
    except Exception:  # noqa: BLE001 (Python's own exit status would say that all is corrected)
        traceback.print_exc()
        return EXIT_NOT_CHECKED
    if json:
        print_json(report)
    else:
        _show(report)
    return report.exit_status


def _check(places: Sequence[str], wishes: Wishes) -> CheckReport:
    if not places:
        raise Refused(
            asked="fsck",
            wrong="no device directory is named",
            remedy="name all of one filesystem, or the place where it is mounted",
        )
    for place in places:
        refuse_empty(place, what="device directory", asked="fsck")
    entry = mount_at(places[0]) if len(places) == 1 else None
    if entry is None or not entry.is_fpfs:
        return check_devices(places, wishes)
    if wishes.repair:
        raise Refused(
            asked=f"fsck of {entry.mountpoint}",
            wrong="a mounted filesystem cannot be repaired",
            remedy=f"run fpfs umount {entry.mountpoint}, and name its device directories",
        )
    return check_mounted(entry, wishes)


class ProgressBar:
    """A bar on stderr, where that is a terminal; it counts bytes."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._progress = byte_progress()
        self._task: TaskID | None = None

    def update(self, done: int, total: int) -> None:
        """Show that `done` bytes of `total` are done."""
        if self._task is None:
            self._progress.start()
            self._task = self._progress.add_task("bytes", total=total)
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> ProgressBar:
        """Return the bar; leaving the block removes it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        self._progress.stop()


def progress_bar() -> ProgressBar:
    """A bar that appears with its first update."""
    return ProgressBar()


def _show(report: CheckReport) -> None:
    for finding in report.findings:
        verb = "corrected" if finding.corrected else "wrong"
        sys.stdout.write(f"{verb}: {finding.text}\n")
    for note in report.notes:
        sys.stdout.write(f"note: {note}\n")
    checked = f"{report.inodes} inodes, {report.objects} objects"
    if report.bytes_checked or report.bytes_unverified:
        checked += f", {format_size(report.bytes_checked)} of contents"
    if report.bytes_unverified:
        checked += f" ({format_size(report.bytes_unverified)} without checksums not checked)"
    corrected = sum(finding.corrected for finding in report.findings)
    left = len(report.findings) - corrected
    outcome = "all is well"
    if corrected or left:
        outcome = f"{corrected} corrected, {left} left as they are"
    sys.stdout.write(f"filesystem {report.filesystem_id}: {checked}: {outcome}\n")
