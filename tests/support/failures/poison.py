"""Mounts whose servers die of requests or at points of their way, or come to no end with them.

The folder ``poison_hook`` beside this file is in the servers' PYTHONPATH; see its sitecustomize.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fpfs.testing.mounted import REPOSITORY, Mount, mounted

TIMEOUT_S = 60
HOOK = REPOSITORY / "tests" / "support" / "failures" / "poison_hook"


class Orders:
    """What becomes of requests for extended attributes, and of servers at points."""

    def __init__(self, folder: Path) -> None:
        """Give orders in an empty folder."""
        self.folder = folder

    def give(self, name: str, how: str) -> None:
        """Let servers die of requests for ``user.NAME``: of a signal, or by ``exit``.

        With ``wait`` such requests wait, with ``block`` all that the name plane does. ``once end
        TASK`` lets one end a task with an error, and waits; with ``list`` it leaves `task_names`.
        ``at-NAME`` is a point that servers come to. While ``program-gone`` is given, a keeper finds
        no program to execute. ``once`` before a death lets one die of it.
        """
        made = self.folder / f".{name}"
        made.write_text(how)
        made.rename(self.folder / name)

    def wait_met(self, name: str) -> None:
        """Return when a server has come to such a request."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (self.folder / f"{name}.met").exists():
            assert time.monotonic() < deadline_s, f"no server got a request for user.{name}"
        (self.folder / f"{name}.met").unlink()

    def task_names(self, name: str) -> set[str]:
        """What tasks there were when a server got such a request."""
        return set((self.folder / f"{name}.names").read_text().split("\n"))

    def take_back(self, name: str) -> None:
        """Let them, and what waits, go on as they would."""
        (self.folder / name).unlink()


@contextlib.contextmanager
def poisoned_mount(
    folder: Path, *, devices: int = 2, options: Sequence[str] = (), faults_max: int = 0
) -> Iterator[tuple[Mount, Orders]]:
    """A mount whose servers take orders.

    faults_max: so many servers may die of what they did. 0: as many as of other mounts.
    """
    orders = Orders(folder / "orders")
    orders.folder.mkdir()
    if faults_max:
        orders.give("faults-max", str(faults_max))
    environment = {
        "PYTHONPATH": os.pathsep.join((str(HOOK), str(REPOSITORY))),
        "FPFS_TEST_POISON": str(orders.folder),
    }
    with mounted(devices=devices, options=options, parent=folder, environment=environment) as mount:
        yield mount, orders
