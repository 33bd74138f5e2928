"""Training with a checkpoint after each iteration, beside training without: by the iteration.

One device of the lab, so slow that a checkpoint takes most of an iteration to be stored, as on a
machine with GPUs, where iterations are shorter and states larger. The model trains on one thread,
so that a processor is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group, Missing, Sense
from benchmarks.groups.striping import DEVICE_BYTES
from benchmarks.places import Bench, deepspeed_python, sync
from benchmarks.worker import Timing, Worker

ITERATIONS = 4
PERSIST = 0.65
"""How much of an iteration a checkpoint takes to be stored."""
LEAST_MIB_PER_S = 32
FPFS = {
    "fpfs": "fpfs",
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


class _Trainer:
    """A worker that trains, and what its last round took."""

    def __init__(self, worker: Worker, saver: str, folder: Path) -> None:
        self._worker = worker
        worker.call("train_with", saver=saver, folder=str(folder))
        self._began: Timing
        self.job_s = 0.0
        # Memory that the first and the second save take is touched, names are there.
        for _ in range(2):
            worker.call("train", iterations=1)
            worker.call("wait_for_training")

    def begin(self) -> None:
        """An iteration that no checkpoint is under way beside."""
        self._began = self._worker.call("train", iterations=1)

    def iterate(self) -> float:
        """Seconds of an iteration, a checkpoint being under way."""
        return self._worker.call("train", iterations=ITERATIONS).seconds / ITERATIONS

    def end(self) -> None:
        """Wait for the last checkpoint; the whole job is known then."""
        ended = self._worker.call("wait_for_training")
        self.job_s = ended.ended_s - self._began.started_s
        sync()

    def contender(self, name: str) -> Contender:
        """It."""
        return Contender(
            name=name,
            prepare=self.begin,
            play=self.iterate,
            settle=self.end,
            also={job(name): lambda: self.job_s},
        )


def job(name: str) -> str:
    """What the whole job is called."""
    return f"{name}: {1 + ITERATIONS} iterations until durable"


def _mib_per_s(bench: Bench) -> int:
    """A device's speed at which a checkpoint takes PERSIST of an iteration."""
    with bench.plain() as folder, bench.worker() as worker:
        worker.call("train_with", saver="torch_save", folder=str(folder))
        worker.call("save_training")
        (saved,) = folder.iterdir()
        mib = saved.stat().st_size / 2**20
    with bench.plain() as folder, bench.worker() as worker:
        iteration_s = _Trainer(worker, "none", folder).iterate()
    return max(LEAST_MIB_PER_S, round(mib / (PERSIST * iteration_s)))


@contextlib.contextmanager
def _training(bench: Bench) -> Iterator[Sequence[Entry]]:
    mib_per_s = _mib_per_s(bench)
    with contextlib.ExitStack() as stack:
        lab = bench.lab(device_count=1, mib_per_s=mib_per_s, size_bytes=DEVICE_BYTES)
        (disk,) = stack.enter_context(lab).mountpoints
        plain = stack.enter_context(bench.plain(parent=disk))
        mount = stack.enter_context(bench.fpfs(filesystems=[disk]))

        def trainer(name: str, saver: str, folder: Path, python: Path | None = None) -> Contender:
            worker = stack.enter_context(bench.worker(python=python))
            return _Trainer(worker, saver, folder).contender(name)

        entries: list[Entry] = [trainer(NONE, "none", plain)]
        alone = stack.enter_context(bench.worker())
        alone.call("train_with", saver="fpfs_save", folder=str(mount.path))
        entries.append(
            Contender(
                name="fpfs.save alone",
                play=lambda: alone.call("save_training").seconds,
                settle=mount.flush,
            )
        )
        entries += [trainer(name, saver, mount.path) for name, saver in FPFS.items()]
        python = deepspeed_python()
        for name, saver in OTHERS.items():
            if saver != "deepspeed":
                entries.append(trainer(name, saver, plain))
            elif isinstance(python, Missing):
                entries.append(Missing(name=name, reason=python.reason))
            else:
                entries.append(trainer(name, saver, plain, python))
        yield entries


GROUPS = (
    Group(
        name="training",
        title="a small GPT on one thread, a checkpoint after each iteration",
        unit="s",
        open=_training,
        bounds=(
            Bound(contender="fpfs", peer=NONE, figure=1.05, sense=Sense.AT_MOST),
            Bound(contender="fpfs.save alone", peer=NONE, figure=0.5),
            Bound(contender="fpfs.save alone", peer=NONE, figure=0.8, sense=Sense.AT_MOST),
        ),
    ),
)
