"""What ``fpfs-ctl tune`` finds on the lab, against a sweep of everything that it could have tried.

Both are asked once, with samples of the same size. Then torch.save, in alternating rounds, tells
what the two policies are worth; the largest figure of a hundred samples would be luck.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.saving import FILE, saver
from benchmarks.places import GIB, Bench, FpfsMount, run_tool, state_bytes

DEVICES = 4
MIB_PER_S = 100
DEVICE_BYTES = 8 * GIB
SAMPLES_OF_A_SAVE = 5
"""So many samples are as large as what is saved: about a second on all devices together, since the
throttle lets short ones pass in bursts."""

TUNED, SWEPT = "tune", "tune --exhaustive"
BUDGET = ("--bytes", "1T", "--time", "3600")


class Found(NamedTuple):
    """What one of the two came to."""

    policy: tuple[str, ...]
    bytes_written: int


@contextlib.contextmanager
def _mounted(bench: Bench) -> Iterator[FpfsMount]:
    made = bench.lab(device_count=DEVICES, mib_per_s=MIB_PER_S, size_bytes=DEVICE_BYTES)
    with made as disks, bench.fpfs(filesystems=disks.mountpoints) as mount:
        yield mount


@functools.cache
def _find(bench: Bench) -> dict[str, Found]:
    """Ask both, on a mount of their own."""
    sample_bytes = state_bytes(bench.scale.tensors_lab) // SAMPLES_OF_A_SAVE
    words = ("--json", "--sample", str(sample_bytes), *BUDGET)
    with _mounted(bench) as mount:
        return {
            TUNED: _found(run_tool("fpfs-ctl", "tune", *words, str(mount.path))),
            SWEPT: _found(run_tool("fpfs-ctl", "tune", "--exhaustive", *words, str(mount.path))),
        }


def _found(text: str) -> Found:
    report: dict[str, Any] = json.loads(text)
    policy = tuple(f"{key}={value}" for key, value in report["proposed"].items())
    return Found(policy, report["bytes_written"])


@contextlib.contextmanager
def _saving(bench: Bench) -> Iterator[Sequence[Entry]]:
    found = _find(bench)
    with bench.worker(tensors=bench.scale.tensors_lab) as worker, _mounted(bench) as mount:
        yield [
            _save_by(policy, f"{number}", name=name, bench=bench, mount=mount, worker=worker)
            for number, (name, (policy, _)) in enumerate(found.items())
        ]


def _save_by(
    policy: Sequence[str], folder: str, *, name: str, bench: Bench, mount: FpfsMount, worker: Any
) -> Contender:
    path = mount.path / folder / FILE
    path.parent.mkdir()
    run_tool("fpfs-ctl", "policy", "set", str(path.parent), *policy)

    def prepare() -> None:
        path.unlink(missing_ok=True)
        mount.flush()

    return saver(
        name,
        worker=worker,
        path=path,
        total_bytes=state_bytes(bench.scale.tensors_lab),
        prepare=prepare,
        quiesce=mount.flush,
        fsync=True,
    )


@contextlib.contextmanager
def _counting(bench: Bench) -> Iterator[Sequence[Entry]]:
    yield [
        Contender(name=name, play=functools.partial(float, found.bytes_written / GIB))
        for name, found in _find(bench).items()
    ]


GROUPS = (
    Group(
        name="tune",
        title="fresh file and fsync by the policies that fpfs-ctl tune and a whole sweep propose,"
        f" {DEVICES} devices of {MIB_PER_S} MiB/s",
        unit="GB/s",
        open=_saving,
        bounds=(Bound(contender=TUNED, peer=SWEPT, figure=0.95),),
    ),
    Group(
        name="tune-bytes",
        title="what the two wrote for that",
        unit="GiB",
        open=_counting,
        bounds=(Bound(contender=TUNED, peer=SWEPT, figure=0.1, sense=Sense.AT_MOST),),
        rounds_max=1,
    ),
)
