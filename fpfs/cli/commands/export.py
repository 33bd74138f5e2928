"""What ``fpfs export`` shows: a bar, what was not copied whole, and a sum."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fpfs.cli.commands.fsck import progress_bar
from fpfs.cli.show import ending_by_signal
from fpfs.core.refusal import Refused
from fpfs.core.units import format_size
from fpfs.daemon.offline.export import export


def run_export(places: Sequence[str], *, path: str) -> int:
    """Copy from all places but the last one into that; returns the exit status."""
    if not places:
        raise Refused(
            asked="export",
            wrong="nothing is named",
            remedy="name all device directories of a filesystem, and then an empty directory",
        )
    *devices, destination = places
    with ending_by_signal(), progress_bar() as bar:
        done = export(devices, destination, subtree=path, progress=bar.update)
    for problem in done.problems:
        sys.stderr.write(f"fpfs: {problem}\n")
    for note in done.notes:
        sys.stderr.write(f"note: {note}\n")
    outcome = f"{len(done.problems)} things are not whole" if done.problems else "all is whole"
    sys.stdout.write(
        f"copied {done.files} files, {done.directories} directories and {done.others} others to"
        f" {destination}, {format_size(done.bytes_copied)}: {outcome}\n"
    )
    return done.exit_status
