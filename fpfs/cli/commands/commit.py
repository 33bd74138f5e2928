"""``fpfs-ctl commit``: says that a directory is complete."""

from __future__ import annotations

from cyclopts import App

from fpfs.cli.asking import Json, print_json, waiting
from fpfs.cli.show import check_timeout
from fpfs.core.group import commit_group
from fpfs.core.protocol.reports import Flushed

app = App(name="commit", help="Say that a directory with commit=group is complete, durably.")


@app.default
def commit(directory: str, /, *, timeout: float | None = None, json: Json = False) -> int:
    """Commit DIRECTORY: after a crash it is there with everything that is in it now.

    What somebody has open for writing counts as it was last closed or synced.

    Parameters
    ----------
    timeout
        Give up after so many seconds, with exit status 1.
    """
    check_timeout(timeout)
    with waiting(f"committing {directory}"):
        commit_group(directory, timeout_s=timeout)
    if json:
        print_json(Flushed())
    return 0
