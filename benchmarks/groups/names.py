"""Names: many small files, and attributes that the kernel has cached."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group, Sense, Unavailable
from benchmarks.places import Bench, FpfsMount, sync
from benchmarks.worker import Worker

STAT_COUNT = 10_000
RELAYED = "relayed"
"""The counter of requests that went on to Python, in the status of the channel."""


def _small_files(
    name: str, *, worker: Worker, parent: Path, count: int, flush: Callable[[], None]
) -> Contender:
    """Files a second, creating, writing and closing, with one flush of everything at the end."""
    directory = parent / "small"

    def play() -> float:
        started_s = time.monotonic()
        worker.call("small_files", directory=str(directory), count=count)
        flush()
        return count / (time.monotonic() - started_s)

    def quiesce() -> None:
        shutil.rmtree(directory)
        flush()

    return Contender(name=name, prepare=directory.mkdir, play=play, quiesce=quiesce)


@contextlib.contextmanager
def _open_small_files(bench: Bench) -> Iterator[Sequence[Entry]]:
    count = bench.scale.small_files
    with bench.worker() as worker, bench.plain() as plain, bench.fpfs() as mount:
        yield [
            _small_files("fpfs", worker=worker, parent=mount.path, count=count, flush=mount.flush),
            _small_files("filesystem", worker=worker, parent=plain, count=count, flush=sync),
        ]


def _relayed(mount: FpfsMount) -> int:
    channel: dict[str, int] = mount.status()["channel"]
    if RELAYED not in channel:
        raise Unavailable(f"the status has no counter '{RELAYED}' among {sorted(channel)}")
    return channel[RELAYED]


@contextlib.contextmanager
def _open_stat(bench: Bench) -> Iterator[Sequence[Entry]]:
    with bench.worker() as worker, bench.fpfs() as mount:
        path = mount.path / "cached"
        before_creation = _relayed(mount)
        path.write_bytes(b"content")
        mount.flush()
        if _relayed(mount) == before_creation:
            raise RuntimeError("creating a file did not count: no counter that stands still says 0")

        def play() -> float:
            before = _relayed(mount)
            worker.call("stat_often", path=str(path), count=STAT_COUNT)
            return _relayed(mount) - before

        def look_up() -> None:
            path.stat()

        yield [Contender(name="fpfs", prepare=look_up, play=play)]


GROUPS = (
    Group(
        name="small-files",
        title="files of 4 KiB created, written, closed, flushed at the end",
        unit="files/s",
        open=_open_small_files,
        bounds=(Bound(contender="fpfs", figure=1000),),
    ),
    Group(
        name="stat",
        title=f"requests that reach Python in {STAT_COUNT:,} x stat of a cached name",
        unit="requests",
        open=_open_stat,
        bounds=(Bound(contender="fpfs", figure=0, sense=Sense.AT_MOST),),
    ),
)
