"""Catalogs: what the second copy costs, in small files and after the loss of a copy."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence

from benchmarks.framework import Bound, Contender, Entry, Group
from benchmarks.places import Bench, FpfsMount
from benchmarks.worker import Worker

ALONE = "one copy"
BOTH = "two copies"


def _small_files(name: str, *, worker: Worker, mount: FpfsMount, count: int) -> Contender:
    """Files a second, creating, writing and closing, with one flush of everything at the end."""
    directory = mount.path / "small"

    def play() -> float:
        started_s = time.monotonic()
        worker.call("small_files", directory=str(directory), count=count)
        mount.flush()
        return count / (time.monotonic() - started_s)

    def quiesce() -> None:
        shutil.rmtree(directory)
        mount.flush()

    return Contender(name=name, prepare=directory.mkdir, play=play, quiesce=quiesce)


@contextlib.contextmanager
def _open(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Two mounts of two devices each, all on one disk; one of them keeps a single copy."""
    count = bench.scale.small_files
    devices = [bench.directory] * 2
    with (
        bench.worker() as worker,
        bench.fpfs(filesystems=devices, catalog_copies=1) as alone,
        bench.fpfs(filesystems=devices) as both,
    ):
        for mount, copies in ((alone, 1), (both, 2)):
            if mount.status()["catalog"]["copies_in_service"] != copies:
                raise RuntimeError(f"the mount does not keep {copies} copies of its catalog")
        yield [
            _small_files(BOTH, worker=worker, mount=both, count=count),
            _small_files(ALONE, worker=worker, mount=alone, count=count),
        ]


GROUPS = (
    Group(
        name="catalogs",
        title="files of 4 KiB created, written, closed, flushed at the end, on two devices",
        unit="files/s",
        open=_open,
        bounds=(Bound(contender=BOTH, peer=ALONE, figure=0.8),),
    ),
)
