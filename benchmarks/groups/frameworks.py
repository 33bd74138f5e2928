"""Frameworks that save by fpfs: how long training waits for a save, beside their own ways.

Checkpoints take turns at two files. What a framework leaves to a thread has ended, and all disks
are quiet, before the next round.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.client import ROTATED
from benchmarks.places import Bench, sync
from benchmarks.worker import alike


@contextlib.contextmanager
def _lightning(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Seconds that a plugin's save_checkpoint takes until it returns."""
    tensors = bench.scale.tensors
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())

        def saving(name: str, folder: Path, plugin: str) -> Contender:
            worker = stack.enter_context(bench.worker(tensors=tensors))
            paths = itertools.cycle(str(folder / f"{name}{n}.ckpt") for n in range(ROTATED))

            def play() -> float:
                return alike([worker], "save_by_lightning", path=next(paths), plugin=plugin)

            def settle() -> None:
                worker.call("wait_lightning")
                mount.flush()
                sync()

            for _ in range(2 * ROTATED):
                play()
                settle()
            return Contender(name=name, play=play, settle=settle)

        copying = stack.enter_context(bench.worker(tensors=tensors))
        copying.call("copy")
        yield [
            Contender(name="copy", play=lambda: alike([copying], "copy")),
            saving("FpfsCheckpointIO", mount.path, "fpfs"),
            saving("Lightning", plain, "torch"),
            saving("Lightning on fpfs", mount.path, "torch"),
            saving("AsyncCheckpointIO", plain, "async"),
        ]


GROUPS = (
    Group(
        name="lightning-stall",
        title="a Lightning checkpoint of 1 GiB, until training goes on",
        unit="s",
        open=_lightning,
        bounds=(
            Bound(contender="FpfsCheckpointIO", peer="copy", figure=1.15, sense=Sense.AT_MOST),
            Bound(contender="FpfsCheckpointIO", peer="Lightning", sense=Sense.AT_MOST, figure=0.5),
        ),
    ),
)
