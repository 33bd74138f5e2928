"""What checksums cost: saves, loads and processor time with them and without, and they alone.

``off`` is a mount with ``-o checksums=off``, which writes none and checks none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.loading import ROUNDS, loader
from benchmarks.groups.memory import fpfs_pids
from benchmarks.groups.saving import saver
from benchmarks.places import GIB, Bench, FpfsMount, drop_caches, state_bytes
from benchmarks.worker import Worker
from fpfs.core.engine import checksum_blocks
from fpfs.core.policy import CHUNK_BYTES_DEFAULT

FILE = "state.pt"
ALONE_BYTES = 256 * 1024 * 1024
CHUNK = "a chunk in the cache"
"""Where a chunk is when its checksums are made: a channel thread has just received it."""

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
SAVE: dict[str, Any] = {"fsync": True, "crc32": False}
"""torch's own checksum, on the caller's core, would hide what the server's costs."""


@contextlib.contextmanager
def _mounts(bench: Bench) -> Iterator[dict[str, FpfsMount]]:
    with bench.fpfs() as on, bench.fpfs(options=["-o", "checksums=off"]) as off:
        yield {"on": on, "off": off}


def _fresh(mount: FpfsMount) -> Callable[[], None]:
    """Remove the file of the round before, and wait until it is gone."""

    def prepare() -> None:
        (mount.path / FILE).unlink(missing_ok=True)
        mount.flush()

    return prepare


@contextlib.contextmanager
def _saves(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    with bench.worker(tensors=tensors) as worker, _mounts(bench) as mounts:
        yield [
            saver(
                name,
                worker=worker,
                path=mount.path / FILE,
                total_bytes=state_bytes(tensors),
                prepare=_fresh(mount),
                quiesce=mount.flush,
                **SAVE,
            )
            for name, mount in mounts.items()
        ]


@contextlib.contextmanager
def _loads(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    with bench.worker() as reader, _mounts(bench) as mounts:
        _save_for_loads(bench, mounts)
        common: dict[str, Any] = {
            "workers": [reader],
            "total_bytes": state_bytes(tensors),
            "mmap": True,
        }
        entries = [loader(n, path=mount.path / FILE, **common) for n, mount in mounts.items()]
        entries[0].play()  # imports torch and touches fresh memory
        yield entries


def _save_for_loads(bench: Bench, mounts: dict[str, FpfsMount]) -> None:
    with bench.worker(tensors=bench.scale.tensors) as writer:
        for mount in mounts.values():
            writer.call("save", path=str(mount.path / FILE), **SAVE)


# --- processor time ---------------------------------------------------------------------------


def _server_ticks(mount: FpfsMount) -> int:
    """What the keeper and the server of a mount have used so far."""
    total = 0
    for pid in fpfs_pids(mount.status()["keeper_pid"]):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


def machine_ticks(_mount: FpfsMount | None = None) -> int:
    """What all processors of the machine have worked so far, interrupts included."""
    with open("/proc/stat", encoding="ascii") as stream:
        user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, stream.readline().split()[1:])
    return user + nice + system + irq + softirq


WHO: dict[str, Callable[[FpfsMount], float]] = {"server": _server_ticks, "machine": machine_ticks}


def _processor_time(
    mounts: dict[str, FpfsMount],
    *,
    action: Callable[[FpfsMount], None],
    prepare: Callable[[FpfsMount], None],
    total_bytes: int,
) -> list[Contender]:
    """Seconds of processor time for each GiB, of the server and of everybody."""

    def contender(who: str, name: str, mount: FpfsMount) -> Contender:
        def play() -> float:
            before = WHO[who](mount)
            action(mount)
            return (WHO[who](mount) - before) / TICKS_A_SECOND / (total_bytes / GIB)

        return Contender(
            name=f"{who}, {name}", play=play, prepare=lambda: prepare(mount), quiesce=mount.flush
        )

    return [contender(who, name, mount) for who in WHO for name, mount in mounts.items()]


@contextlib.contextmanager
def _save_time(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    with bench.worker(tensors=tensors) as worker, _mounts(bench) as mounts:

        def save(mount: FpfsMount) -> None:
            worker.call("save", path=str(mount.path / FILE), **SAVE)

        for mount in mounts.values():
            save(mount)
        yield _processor_time(
            mounts,
            action=save,
            prepare=lambda mount: _fresh(mount)(),
            total_bytes=state_bytes(tensors),
        )


@contextlib.contextmanager
def _load_time(bench: Bench) -> Iterator[Sequence[Entry]]:
    with bench.worker() as reader, _mounts(bench) as mounts:
        _save_for_loads(bench, mounts)

        def load(mount: FpfsMount, worker: Worker = reader) -> None:
            worker.call("load", path=str(mount.path / FILE), mmap=True)

        load(mounts["on"])
        yield _processor_time(
            mounts,
            action=load,
            prepare=lambda _mount: drop_caches(),
            total_bytes=state_bytes(bench.scale.tensors),
        )


# --- checksums alone --------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(_bench: Bench) -> Iterator[Sequence[Entry]]:
    """The function that contents get their checksums from; its processor time, on one core."""
    content = os.urandom(ALONE_BYTES)
    chunk = content[:CHUNK_BYTES_DEFAULT]

    def gb_per_s(piece: bytes) -> float:
        count = ALONE_BYTES // len(piece)
        started_s = time.thread_time()
        for _ in range(count):
            checksum_blocks(piece)
        return ALONE_BYTES / (time.thread_time() - started_s) / 1e9

    gb_per_s(content)
    yield [
        Contender(name=CHUNK, play=lambda: gb_per_s(chunk)),
        Contender(name="256 MiB in memory", play=lambda: gb_per_s(content)),
    ]


SPEED_BOUNDS = (Bound(contender="on", peer="off", figure=0.9),)
TIME_BOUNDS = (
    Bound(contender="server, on", peer="server, off", figure=1.4, sense=Sense.AT_MOST),
    Bound(contender="machine, on", peer="machine, off", figure=1.2, sense=Sense.AT_MOST),
)

GROUPS = (
    Group(
        name="checksums-save",
        title="torch.save without its CRC32, fresh file, and fsync: checksums on and off",
        unit="GB/s",
        open=_saves,
        bounds=SPEED_BOUNDS,
    ),
    Group(
        name="checksums-load",
        title="torch.load(mmap=True), page cache dropped: checksums on and off",
        unit="GB/s",
        open=_loads,
        bounds=SPEED_BOUNDS,
        rounds_min=ROUNDS,
    ),
    Group(
        name="checksums-save-cpu",
        title="processor time of a save and fsync: checksums on and off",
        unit="s/GiB",
        open=_save_time,
        bounds=TIME_BOUNDS,
    ),
    Group(
        name="checksums-load-cpu",
        title="processor time of a load, page cache dropped: checksums on and off",
        unit="s/GiB",
        open=_load_time,
        bounds=TIME_BOUNDS,
    ),
    Group(
        name="checksums-alone",
        title="checksums alone, one core",
        unit="GB/s",
        open=_alone,
        bounds=(Bound(contender=CHUNK, figure=5),),
    ),
)
