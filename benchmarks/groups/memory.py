"""Memory while one very large file is written: of the processes, and of the page cache.

The highest of many samples counts, not the last. The arena is subtracted from the processes' share
(PSS), and shared memory (where the arena lies) from the page cache.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.places import Bench, FpfsMount, drop_caches
from benchmarks.worker import Worker

MIB = 1024 * 1024
SAMPLE_INTERVAL_S = 0.5
PAGE_CACHE_MIB_MAX = 256
"""Room for whatever else the machine reads meanwhile; 20 GiB are written."""


def fpfs_pids(keeper_pid: int) -> list[int]:
    """The keeper and all its descendants: the server."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name in parentheses may hold spaces; the parent is the second field after it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [keeper_pid]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss_less_arena_mib(pid: int) -> float:
    """Proportional set size of a process without its mappings of the arena."""
    total_kib = arena_kib = 0
    inside_arena = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            inside_arena = "/dev/shm/fpfs-" in line or "/memfd:fpfs" in line
        elif first == "Pss:":
            kib = int(line.split()[1])
            total_kib += kib
            arena_kib += kib if inside_arena else 0
    return (total_kib - arena_kib) / 1024


def page_cache_mib() -> float:
    """Pages of files that lie in memory, without shared memory."""
    fields = {
        line.split(":")[0]: int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
    }
    return (fields["Cached"] - fields["Shmem"]) / 1024


@dataclass(kw_only=True)
class Peak:
    """The highest values seen while a file was written."""

    pss_mib: float = 0.0
    page_cache_growth_mib: float = 0.0
    page_cache_before_mib: float = field(default_factory=page_cache_mib)

    def sample(self, pids: Sequence[int]) -> None:
        """Look once."""
        self.pss_mib = max(self.pss_mib, sum(pss_less_arena_mib(pid) for pid in pids))
        growth_mib = page_cache_mib() - self.page_cache_before_mib
        self.page_cache_growth_mib = max(self.page_cache_growth_mib, growth_mib)


def _write_and_watch(mount: FpfsMount, worker: Worker, *, total_bytes: int) -> Peak:
    path = mount.path / "large.bin"
    pids = fpfs_pids(mount.status()["keeper_pid"])
    drop_caches()
    peak = Peak()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_INTERVAL_S):
            peak.sample(pids)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        worker.call("stream", path=str(path), total_bytes=total_bytes)
        mount.flush()
    finally:
        ended.set()
        watcher.join()
    peak.sample(pids)
    path.unlink()
    return peak


@contextlib.contextmanager
def _open(bench: Bench) -> Iterator[Sequence[Entry]]:
    with bench.worker() as worker, bench.fpfs() as mount:
        peaks: list[Peak] = []

        def write() -> float:
            peaks.append(_write_and_watch(mount, worker, total_bytes=bench.scale.stream_bytes))
            return peaks[-1].pss_mib

        yield [
            Contender(name="fpfs processes less arena", play=write),
            Contender(name="page cache growth", play=lambda: peaks[-1].page_cache_growth_mib),
        ]


GROUPS = (
    Group(
        name="memory",
        title="highest memory while one large file is written",
        unit="MiB",
        open=_open,
        bounds=(
            Bound(contender="fpfs processes less arena", figure=150, sense=Sense.AT_MOST),
            Bound(contender="page cache growth", figure=PAGE_CACHE_MIB_MAX, sense=Sense.AT_MOST),
        ),
        rounds_max=1,
    ),
)
