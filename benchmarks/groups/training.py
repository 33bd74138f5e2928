"""Training with a checkpoint after each iteration, by what iterations without one take.

One device of the lab, so slow that a checkpoint takes most of an iteration to be stored, as on a
machine with GPUs, where iterations are shorter and states larger. The model trains on one thread,
so that a processor is left.

A machine may compute twice as fast from one minute to the next. So each contender trains without
checkpoints right before and right after, in the same process; from the first the device's speed is
set, and both are what its iterations with checkpoints are compared with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.striping import DEVICE_BYTES, MIB_PER_S
from benchmarks.places import Bench, sync
from benchmarks.worker import Worker

ITERATIONS = 4
"""That are counted, after one that no checkpoint is under way beside."""
PLAIN = 2
"""Iterations without checkpoints, before and after."""
PERSIST = 0.65
"""How much of an iteration a checkpoint takes to be stored."""
FPFS = {
    "fpfs": "fpfs",
    "fpfs, no copies": "fpfs_in_place",
    "fpfs, no optimizer known": "fpfs_copy",
    "torch.save to fpfs": "torch_save_to_fpfs",
}
OTHERS = {
    "torch.save": "torch_save",
    "DCP": "dcp_save",
    "DCP async, thread": "dcp_async_save",
    "DCP async, process": "dcp_async_save_in_process",
    "torch_checkpointing": "torch_checkpointing",
    "DeepSpeed, decoupled": "deepspeed",
}
NONE = "no checkpoints"
ALONE = "fpfs.save, nothing beside"

SetSpeed = Callable[[float], None]
"""Given what an iteration takes without checkpoints, in seconds."""


class _Trainer:
    """A worker that trains, and what its last round took."""

    def __init__(self, worker: Worker, saver: str, folder: Path, set_speed: SetSpeed) -> None:
        self._worker = worker
        self._set_speed = set_speed
        self._job = 0.0
        worker.call("train_with", saver=saver, folder=str(folder))
        # Memory that the first and the second save take is touched, names are there.
        for _ in range(2):
            worker.call("train", iterations=1)
            worker.call("wait_for_training")

    def contender(self, name: str) -> Contender:
        """Iterations with checkpoints, and a job of some until all is durable."""
        return Contender(
            name=name, play=self._train, quiesce=sync, also={job(name): lambda: self._job}
        )

    def alone(self) -> Contender:
        """A save while nothing else goes on."""
        return Contender(name=ALONE, play=self._save, quiesce=sync)

    def _train(self) -> float:
        before_s = self._plain()
        self._set_speed(before_s)
        began = self._worker.call("train", iterations=1)
        counted = self._worker.call("train", iterations=ITERATIONS)
        ended = self._worker.call("wait_for_training")
        plain_s = (before_s + self._plain()) / 2
        self._job = (ended.ended_s - began.started_s) / plain_s / (1 + ITERATIONS)
        return counted.seconds / ITERATIONS / plain_s

    def _save(self) -> float:
        before_s = self._plain()
        self._set_speed(before_s)
        saved = self._worker.call("save_training")
        return saved.seconds / ((before_s + self._plain()) / 2)

    def _plain(self) -> float:
        """Seconds of an iteration without a checkpoint."""
        return self._worker.call("train", iterations=PLAIN, saves=False).seconds / PLAIN


def job(name: str) -> str:
    """What the whole job is called."""
    return f"{name}: {1 + ITERATIONS} iterations until durable"


def _bytes_of_state(bench: Bench) -> int:
    with bench.plain() as folder, bench.worker() as worker:
        worker.call("train_with", saver="torch_save", folder=str(folder))
        worker.call("save_training")
        (saved,) = folder.iterdir()
        return saved.stat().st_size


@contextlib.contextmanager
def _training(bench: Bench) -> Iterator[Sequence[Entry]]:
    state_bytes = _bytes_of_state(bench)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(
            bench.lab(device_count=1, mib_per_s=MIB_PER_S, size_bytes=DEVICE_BYTES)
        )
        (device,) = lab.devices()
        plain = stack.enter_context(bench.plain(parent=device.mountpoint))
        mount = stack.enter_context(bench.fpfs(filesystems=[device.mountpoint]))

        def set_speed(iteration_s: float) -> None:
            assert lab.throttle is not None
            assert device.device_number is not None
            bytes_per_s = round(state_bytes / (PERSIST * iteration_s))
            lab.throttle.limit(device.device_number, bytes_per_s=bytes_per_s)

        def trainer(saver: str, folder: Path) -> _Trainer:
            worker = stack.enter_context(bench.worker())
            return _Trainer(worker, saver, folder, set_speed)

        entries: list[Entry] = [
            trainer("none", plain).contender(NONE),
            trainer("fpfs_save", mount.path).alone(),
        ]
        entries += [trainer(saver, mount.path).contender(name) for name, saver in FPFS.items()]
        entries += [trainer(saver, plain).contender(name) for name, saver in OTHERS.items()]
        yield entries


GROUPS = (
    Group(
        name="training",
        title="a small GPT on one thread, a checkpoint after each iteration",
        unit="x without",
        open=_training,
        bounds=(
            Bound(contender="fpfs", figure=1.05, sense=Sense.AT_MOST),
            Bound(contender=ALONE, figure=0.5),
            Bound(contender=ALONE, figure=0.8, sense=Sense.AT_MOST),
        ),
    ),
)
