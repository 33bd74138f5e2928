"""Two processes save at once, each its own file, against one alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from benchmarks.framework import Bound, Contender, Entry, Group
from benchmarks.places import Bench, FpfsMount, state_bytes
from benchmarks.worker import Worker, together


def _contender(
    name: str, mount: FpfsMount, workers: Sequence[Worker], *, total_bytes: int, fsync: bool
) -> Contender:
    """All `workers` save at once; their bytes together in GB/s."""
    paths = [str(mount.path / f"process{index}.pt") for index in range(len(workers))]

    def play() -> float:
        seconds = together(workers, "save", path=paths, fsync=[fsync] * len(workers))
        return len(workers) * total_bytes / seconds / 1e9

    play()
    mount.flush()
    return Contender(name=name, play=play, quiesce=mount.flush)


@contextlib.contextmanager
def _open(bench: Bench, *, fsync: bool) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    with (
        bench.worker(tensors=tensors) as first,
        bench.worker(tensors=tensors) as second,
        bench.fpfs() as mount,
    ):
        total_bytes = state_bytes(tensors)
        yield [
            _contender("one", mount, [first], total_bytes=total_bytes, fsync=fsync),
            _contender("two", mount, [first, second], total_bytes=total_bytes, fsync=fsync),
        ]


GROUPS = (
    Group(
        name="save-two",
        title="two processes save at once, until both returned",
        unit="GB/s",
        open=lambda bench: _open(bench, fsync=False),
        bounds=(Bound(contender="two", peer="one", figure=0.95),),
    ),
    Group(
        name="save-two-fsync",
        title="two processes save at once, and fsync",
        unit="GB/s",
        open=lambda bench: _open(bench, fsync=True),
        bounds=(Bound(contender="two", peer="one", figure=0.95),),
    ),
)
