"""Libraries that save checkpoints, each unchanged: to fpfs, and to the filesystem below it.

A fresh name each round. Meta's torch_checkpointing saves a directory, synchronously, in the place
of its background process: what is measured is the write. It opens files with O_DIRECT by default,
which not every filesystem takes from its unaligned pieces; where that fails, its buffered mode
plays alone.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.framework import Bound, Entry, Group, Missing
from benchmarks.groups.saving import saver
from benchmarks.places import Bench, state_bytes, sync

LIBRARIES: dict[str, dict[str, Any]] = {
    "torch.save": {"command": "save"},
    "safetensors": {"command": "save_safetensors"},
    "torch_checkpointing": {"command": "save_torch_checkpointing", "direct": True},
    "torch_checkpointing, buffered": {"command": "save_torch_checkpointing", "direct": False},
}
"""What a worker is asked for, by the library's name."""


def _clear(path: Path, quiesce: Callable[[], None]) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    quiesce()


@contextlib.contextmanager
def _fresh(bench: Bench, *, fsync: bool) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    with bench.worker(tensors=tensors) as worker, bench.plain() as plain, bench.fpfs() as mount:

        def entry(library: str, place: str, folder: Path, quiesce: Callable[[], None]) -> Entry:
            name, path = f"{library}: {place}", folder / "state"
            try:
                return saver(
                    name,
                    worker=worker,
                    path=path,
                    total_bytes=state_bytes(tensors),
                    prepare=partial(_clear, path, quiesce),
                    quiesce=quiesce,
                    fsync=fsync,
                    **LIBRARIES[library],
                )
            except RuntimeError as error:
                if not LIBRARIES[library].get("direct"):
                    raise
                return Missing(name=name, reason=str(error))

        yield [
            entry(library, place, folder, quiesce)
            for library in LIBRARIES
            for place, folder, quiesce in (
                ("fpfs", mount.path, mount.flush),
                ("filesystem", plain, sync),
            )
        ]


BOUNDS = tuple(
    Bound(contender=f"{library}: fpfs", peer=f"{peer}: filesystem", figure=1.0)
    for library, peer in (
        ("torch.save", "torch.save"),
        ("safetensors", "safetensors"),
        ("torch_checkpointing", "torch_checkpointing, buffered"),
    )
)

GROUPS = (
    Group(
        name="libraries",
        title="a fresh checkpoint, by library, until it returns",
        unit="GB/s",
        open=lambda bench: _fresh(bench, fsync=False),
    ),
    Group(
        name="libraries-fsync",
        title="a fresh checkpoint, by library, and fsync",
        unit="GB/s",
        open=lambda bench: _fresh(bench, fsync=True),
        bounds=BOUNDS,
    ),
)
