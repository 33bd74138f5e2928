"""What tools cost that ask a server all the time: saves with 200 clients of the control socket.

Each client asks once a second, as a dashboard for each of 200 users would.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group
from benchmarks.groups.saving import FILE, saver
from benchmarks.places import Bench, FpfsMount, state_bytes

CLIENTS = 200
ROOT = Path(__file__).resolve().parents[2]
ALONE, ASKED = "alone", f"{CLIENTS} clients"


class Asking:
    """The clients, which ask while they run."""

    def __init__(self, mount: FpfsMount) -> None:
        self._mount = mount
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Connect all clients; they begin to ask."""
        words = [str(self._mount.path), str(CLIENTS)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.control_clients", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "connected\n":
            raise RuntimeError("the clients could not connect")

    def stop(self) -> None:
        """End them. RuntimeError when they got no answers."""
        if self._process is None:
            return
        said, _ = self._process.communicate()
        status, self._process = self._process.returncode, None
        if status or not said.strip().isdigit():
            raise RuntimeError(f"the clients ended with status {status}: {said}")


@contextlib.contextmanager
def _open(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    with bench.worker(tensors=tensors) as worker, bench.fpfs() as mount:
        asking = Asking(mount)

        def quiesce() -> None:
            asking.stop()
            mount.flush()

        def contender(name: str, *, asked: bool) -> Contender:
            return saver(
                name,
                worker=worker,
                path=mount.path / FILE,
                total_bytes=state_bytes(tensors),
                prepare=asking.start if asked else asking.stop,
                quiesce=quiesce,
                fsync=False,
            )

        try:
            yield [contender(ALONE, asked=False), contender(ASKED, asked=True)]
        finally:
            asking.stop()


GROUPS = (
    Group(
        name="control-clients",
        title=f"torch.save while {CLIENTS} clients ask the server once a second each",
        unit="GB/s",
        open=_open,
        bounds=(Bound(contender=ASKED, peer=ALONE, figure=0.95),),
        rounds_min=4,
    ),
)
