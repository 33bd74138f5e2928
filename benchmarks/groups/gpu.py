"""What a save costs the training of a GPU, beside the copies that nobody can do without.

A round ends when a kernel that was queued after the save, on the stream of the training, has
changed a tensor of the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from benchmarks.framework import Bound, Contender, Entry, Group, Sense, Unavailable
from benchmarks.groups.client import beside
from benchmarks.places import Bench
from benchmarks.worker import Worker, alike


@contextlib.contextmanager
def _stalls(bench: Bench) -> Iterator[Sequence[Entry]]:
    import torch

    if torch.cuda.device_count() == 0:
        raise Unavailable("torch has no GPU here")
    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(bench.fpfs())

        def worker() -> Worker:
            found = stack.enter_context(bench.worker(tensors=bench.scale.tensors))
            found.call("use_gpu")
            return found

        def copying(name: str, to: str) -> Contender:
            own = worker()
            own.call("copy_from_gpu", to=to)
            return Contender(name=name, play=lambda: alike([own], "copy_from_gpu", to=to))

        def saving(name: str, *, snapshots: bool) -> Contender:
            own = worker()
            own.call("wait_beside")
            return beside(
                name,
                worker=own,
                folder=mount.path,
                flush=mount.flush,
                command="save_beside_gpu",
                wait="wait_beside",
                snapshots=snapshots,
            )

        yield [
            copying("copy to pinned memory", "cpu"),
            copying("copy on the GPU", "cuda"),
            saving("AsyncSaver", snapshots=False),
            saving("AsyncSaver, copied on the GPU first", snapshots=True),
        ]


GROUPS = (
    Group(
        name="gpu-stall",
        title="AsyncSaver.save of 1 GiB of a GPU, until its stream has changed a tensor of it",
        unit="s",
        open=_stalls,
        bounds=(
            Bound(
                contender="AsyncSaver",
                peer="copy to pinned memory",
                figure=1.2,
                sense=Sense.AT_MOST,
            ),
            Bound(
                contender="AsyncSaver, copied on the GPU first",
                peer="copy on the GPU",
                figure=2,
                sense=Sense.AT_MOST,
            ),
        ),
    ),
)
