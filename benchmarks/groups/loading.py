"""torch.load with the page cache dropped: plain, mapped, and by four processes at once.

`load-mmap-cached` is what the kernel alone makes of a mapped file that is in its page cache: the
server has no part in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.framework import Bound, Contender, Entry, Group
from benchmarks.places import Bench, drop_caches, state_bytes
from benchmarks.worker import Worker, together

FILE = "state.pt"
PROCESS_COUNT = 4
ROUNDS = 16
"""A cold load depends on which memory the page cache gets: where the hypervisor has taken it back,
touching it costs several times the load itself. More rounds than usual, to meet both."""


def loader(
    name: str,
    *,
    workers: Sequence[Worker],
    path: Path,
    total_bytes: int,
    mmap: bool,
    cached: bool = False,
) -> Contender:
    """All `workers` load one file at once and sum every tensor; all bytes together in GB/s.

    The page cache is dropped before, or, if `cached`, filled by the same load.
    """

    def load() -> float:
        count = len(workers)
        return together(workers, "load", path=[str(path)] * count, mmap=[mmap] * count)

    def prepare() -> None:
        if cached:
            load()
        else:
            drop_caches()

    def play() -> float:
        return len(workers) * total_bytes / load() / 1e9

    return Contender(name=name, play=play, prepare=prepare)


@contextlib.contextmanager
def _open(
    bench: Bench, *, process_count: int, mmap: bool, cached: bool = False
) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        with bench.worker(tensors=tensors) as writer:
            for directory in (plain, mount.path):
                writer.call("save", path=str(directory / FILE), fsync=True)
        workers = [stack.enter_context(bench.worker()) for _ in range(process_count)]
        # The first load imports torch and touches fresh memory.
        together(
            workers, "load", path=[str(plain / FILE)] * process_count, mmap=[mmap] * process_count
        )
        common: dict[str, Any] = {
            "workers": workers,
            "total_bytes": state_bytes(tensors),
            "mmap": mmap,
            "cached": cached,
        }
        yield [
            loader("fpfs", path=mount.path / FILE, **common),
            loader("filesystem", path=plain / FILE, **common),
        ]


BOUNDS = (Bound(contender="fpfs", peer="filesystem", figure=1.0),)

GROUPS = (
    Group(
        name="load",
        title="torch.load, page cache dropped, every tensor summed",
        unit="GB/s",
        open=lambda bench: _open(bench, process_count=1, mmap=False),
        bounds=BOUNDS,
        rounds_min=ROUNDS,
    ),
    Group(
        name="load-mmap",
        title="torch.load(mmap=True), page cache dropped, every tensor summed",
        unit="GB/s",
        open=lambda bench: _open(bench, process_count=1, mmap=True),
        bounds=BOUNDS,
        rounds_min=ROUNDS,
    ),
    Group(
        name="load-four",
        title="four processes torch.load one file, page cache dropped",
        unit="GB/s",
        open=lambda bench: _open(bench, process_count=PROCESS_COUNT, mmap=False),
        bounds=BOUNDS,
        rounds_min=ROUNDS,
    ),
    Group(
        name="load-four-mmap",
        title="four processes torch.load(mmap=True) one file, page cache dropped",
        unit="GB/s",
        open=lambda bench: _open(bench, process_count=PROCESS_COUNT, mmap=True),
        bounds=BOUNDS,
        rounds_min=ROUNDS,
    ),
    Group(
        name="load-mmap-cached",
        title="torch.load(mmap=True) of a file in the page cache: the kernel alone",
        unit="GB/s",
        open=lambda bench: _open(bench, process_count=1, mmap=True, cached=True),
    ),
)
