"""Frameworks and formats by fpfs, beside their own ways.

Checkpoints take turns at two files. What a framework leaves to a thread has ended, and all disks
are quiet, before the next round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.client import beside, rotating
from benchmarks.peers import fio
from benchmarks.places import Bench, state_bytes, sync
from benchmarks.worker import alike


@contextlib.contextmanager
def _lightning(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Seconds that a plugin's save_checkpoint takes until it returns."""
    tensors = bench.scale.tensors
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())

        def saving(name: str, folder: Path, plugin: str) -> Contender:
            return beside(
                name,
                worker=stack.enter_context(bench.worker(tensors=tensors)),
                folder=folder,
                flush=mount.flush,
                command="save_by_lightning",
                wait="wait_lightning",
                plugin=plugin,
            )

        copying = stack.enter_context(bench.worker(tensors=tensors))
        copying.call("copy")
        yield [
            Contender(name="copy", play=lambda: alike([copying], "copy")),
            saving("FpfsCheckpointIO", mount.path, "fpfs"),
            saving("Lightning", plain, "torch"),
            saving("Lightning on fpfs", mount.path, "torch"),
            saving("AsyncCheckpointIO", plain, "async"),
        ]


@contextlib.contextmanager
def _safetensors(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = 2 * bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        worker = stack.enter_context(bench.worker(tensors=tensors))
        common: dict[str, Any] = {"workers": [worker], "total_bytes": total_bytes}
        on_fpfs: dict[str, Any] = {"folder": mount.path, "settle": mount.flush, **common}

        def limit() -> float:
            return fio.write_gb_per_s(plain, total_bytes=total_bytes, overwrite=True)

        limit()
        own: dict[str, Any] = {"command": "save_safetensors", "fsync": True}
        yield [
            Contender(name="fio, overwriting", play=limit, settle=sync),
            rotating("fpfs.save_safetensors", command="save_safetensors_by_fpfs", **on_fpfs),
            rotating("safetensors to fpfs", **own, **on_fpfs),
            rotating("safetensors", folder=plain, settle=sync, **own, **common),
        ]


@contextlib.contextmanager
def _torch_checkpointing(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = 2 * bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        worker = stack.enter_context(bench.worker(tensors=tensors))
        common: dict[str, Any] = {
            "workers": [worker],
            "total_bytes": total_bytes,
            "command": "save_torch_checkpointing",
            "fsync": True,
        }
        on_fpfs: dict[str, Any] = {"folder": mount.path, "settle": mount.flush, **common}

        def limit() -> float:
            return fio.write_gb_per_s(plain, total_bytes=total_bytes, overwrite=True)

        limit()
        yield [
            Contender(name="fio, overwriting", play=limit, settle=sync),
            rotating("FpfsStorageConfig", direct=False, by_fpfs=True, **on_fpfs),
            rotating("its own to fpfs", direct=True, **on_fpfs),
            rotating("its own", direct=False, folder=plain, settle=sync, **common),
        ]


GROUPS = (
    Group(
        name="safetensors-save",
        title="a file of safetensors, durable, over two names in turn",
        unit="GB/s",
        open=_safetensors,
        bounds=(
            Bound(contender="fpfs.save_safetensors", peer="fio, overwriting", figure=0.85),
            Bound(contender="fpfs.save_safetensors", peer="safetensors", figure=1.5),
        ),
    ),
    Group(
        name="torch_checkpointing-save",
        title="a checkpoint of Meta's torch_checkpointing, durable, to two directories in turn",
        unit="GB/s",
        open=_torch_checkpointing,
        bounds=(
            Bound(contender="FpfsStorageConfig", peer="fio, overwriting", figure=0.85),
            Bound(contender="FpfsStorageConfig", peer="its own", figure=1.5),
        ),
    ),
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
