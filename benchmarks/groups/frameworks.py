"""Frameworks and formats by fpfs, beside their own ways.

Checkpoints take turns at two files. What a framework leaves to a thread has ended, and all disks
are quiet, before the next round.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.client import beside, rotating
from benchmarks.peers import fio
from benchmarks.places import Bench, state_bytes, sync
from benchmarks.worker import alike


class _Save(NamedTuple):
    """A way to save, and where."""

    name: str
    on_fpfs: bool
    command: str
    options: dict[str, Any]


@contextlib.contextmanager
def _stalls(
    bench: Bench, *, saves: Sequence[_Save], wait: str, has_own_state: bool = False
) -> Iterator[Sequence[Entry]]:
    """Seconds that training waits for a save, beside one copy; `wait` waits for its end.

    has_own_state: what saves is told how many bytes, and makes them.
    """
    tensors = bench.scale.tensors
    told = {"total_bytes": state_bytes(tensors)} if has_own_state else {}
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        copying = stack.enter_context(bench.worker(tensors=tensors))
        copying.call("copy")
        entries: list[Entry] = [Contender(name="copy", play=lambda: alike([copying], "copy"))]
        entries += [
            beside(
                save.name,
                worker=stack.enter_context(bench.worker(tensors=0 if has_own_state else tensors)),
                folder=mount.path if save.on_fpfs else plain,
                flush=mount.flush,
                command=save.command,
                wait=wait,
                **save.options,
                **told,
            )
            for save in saves
        ]
        yield entries


@contextlib.contextmanager
def _durable(bench: Bench, *, saves: Sequence[_Save]) -> Iterator[Sequence[Entry]]:
    """Durable saves beside the device's limit."""
    tensors = 2 * bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        worker = stack.enter_context(bench.worker(tensors=tensors))

        entries: list[Entry] = [fio.overwriting(plain, total_bytes=total_bytes)]
        entries += [
            rotating(
                save.name,
                workers=[worker],
                total_bytes=total_bytes,
                folder=mount.path if save.on_fpfs else plain,
                quiesce=mount.flush if save.on_fpfs else sync,
                command=save.command,
                **save.options,
            )
            for save in saves
        ]
        yield entries


GROUPS = (
    Group(
        name="safetensors-save",
        title="a file of safetensors, durable, over two names in turn",
        unit="GB/s",
        open=functools.partial(
            _durable,
            saves=(
                _Save("fpfs.save_safetensors", True, "save_safetensors_by_fpfs", {}),
                _Save("safetensors to fpfs", True, "save_safetensors", {"fsync": True}),
                _Save("safetensors", False, "save_safetensors", {"fsync": True}),
            ),
        ),
        bounds=(
            Bound(contender="fpfs.save_safetensors", peer="fio, overwriting", figure=0.85),
            Bound(contender="fpfs.save_safetensors", peer="safetensors", figure=1.5),
        ),
    ),
    Group(
        name="torch_checkpointing-save",
        title="a checkpoint of Meta's torch_checkpointing, durable, to two directories in turn",
        unit="GB/s",
        open=functools.partial(
            _durable,
            saves=tuple(
                _Save(name, on_fpfs, "save_torch_checkpointing", {"fsync": True, **options})
                for name, on_fpfs, options in (
                    ("FpfsStorageConfig", True, {"direct": False, "by_fpfs": True}),
                    ("its own to fpfs", True, {"direct": True}),
                    ("its own", False, {"direct": False}),
                )
            ),
        ),
        bounds=(
            Bound(contender="FpfsStorageConfig", peer="fio, overwriting", figure=0.85),
            Bound(contender="FpfsStorageConfig", peer="its own", figure=1.5),
        ),
    ),
    Group(
        name="accelerate-save",
        title="save_state of Accelerate, a model's weights, durable, to two directories in turn",
        unit="GB/s",
        open=functools.partial(
            _durable,
            saves=(
                _Save("registered", True, "save_by_accelerate", {"by_fpfs": True}),
                _Save("Accelerate on fpfs", True, "save_by_accelerate", {"by_fpfs": False}),
                _Save("Accelerate", False, "save_by_accelerate", {"by_fpfs": False}),
            ),
        ),
        bounds=(
            Bound(contender="registered", peer="fio, overwriting", figure=0.85),
            Bound(contender="registered", peer="Accelerate", figure=1.5),
        ),
    ),
    Group(
        name="lightning-stall",
        title="a Lightning checkpoint of 1 GiB, until training goes on",
        unit="s",
        open=functools.partial(
            _stalls,
            wait="wait_lightning",
            saves=(
                _Save("FpfsCheckpointIO", True, "save_by_lightning", {"plugin": "fpfs"}),
                _Save("Lightning", False, "save_by_lightning", {"plugin": "torch"}),
                _Save("Lightning on fpfs", True, "save_by_lightning", {"plugin": "torch"}),
                _Save("AsyncCheckpointIO", False, "save_by_lightning", {"plugin": "async"}),
            ),
        ),
        bounds=(
            Bound(contender="FpfsCheckpointIO", peer="copy", figure=1.15, sense=Sense.AT_MOST),
            Bound(contender="FpfsCheckpointIO", peer="Lightning", sense=Sense.AT_MOST, figure=0.5),
        ),
    ),
    Group(
        name="transformers-stall",
        title="a checkpoint of transformers' Trainer of 1 GiB, until the next step begins",
        unit="s",
        open=functools.partial(
            _stalls,
            wait="wait_transformers",
            has_own_state=True,
            saves=(
                _Save("FpfsCallback", True, "save_by_transformers", {"by_fpfs": True}),
                _Save("Trainer", False, "save_by_transformers", {"by_fpfs": False}),
                _Save("Trainer on fpfs", True, "save_by_transformers", {"by_fpfs": False}),
            ),
        ),
        bounds=(
            Bound(contender="FpfsCallback", peer="copy", figure=1.15, sense=Sense.AT_MOST),
            Bound(contender="FpfsCallback", peer="Trainer", sense=Sense.AT_MOST, figure=0.5),
        ),
    ),
    Group(
        name="deepspeed-stall",
        title="a DeepSpeed checkpoint of 1 GiB, until weights may be updated",
        unit="s",
        open=functools.partial(
            _stalls,
            wait="wait_deepspeed",
            saves=(
                _Save("registered", True, "save_by_deepspeed", {"engine": "fpfs"}),
                _Save("DeepSpeed", False, "save_by_deepspeed", {"engine": "torch"}),
                _Save("DeepSpeed on fpfs", True, "save_by_deepspeed", {"engine": "torch"}),
                _Save("DeepSpeed, decoupled", False, "save_by_deepspeed", {"engine": "decoupled"}),
            ),
        ),
        bounds=(
            Bound(contender="registered", peer="copy", figure=1.15, sense=Sense.AT_MOST),
            Bound(contender="registered", peer="DeepSpeed", sense=Sense.AT_MOST, figure=0.5),
        ),
    ),
)
