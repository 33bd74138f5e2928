"""fpfs.dcp: torch.distributed.checkpoint by fpfs, beside itself on the plain filesystem.

Checkpoints take turns at two directories, and are durable. torch's own FileSystemWriter has as many
threads as help, and its stager is both the one that `async_save` makes for each call and one that
is kept, whose memory is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.client import beside, rotating
from benchmarks.peers import fio
from benchmarks.places import Bench, drop_caches, state_bytes, sync
from benchmarks.worker import alike

FOLDER = "checkpoint"


@contextlib.contextmanager
def _saves(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = 2 * bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        worker = stack.enter_context(bench.worker(tensors=tensors))
        common: dict[str, Any] = {"workers": [worker], "total_bytes": total_bytes}

        yield [
            fio.overwriting(plain, total_bytes=total_bytes),
            rotating(
                "fpfs.dcp",
                folder=mount.path,
                quiesce=mount.flush,
                command="save_dcp_by_fpfs",
                **common,
            ),
            rotating(
                "DCP to fpfs", folder=mount.path, quiesce=mount.flush, command="save_dcp", **common
            ),
            rotating("DCP", folder=plain, quiesce=sync, command="save_dcp", **common),
        ]


@contextlib.contextmanager
def _stalls(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Seconds that async_save takes until it returns."""
    tensors = bench.scale.tensors
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())

        def saving(name: str, folder: Path, stager: str) -> Contender:
            return beside(
                name,
                worker=stack.enter_context(bench.worker(tensors=tensors)),
                folder=folder,
                flush=mount.flush,
                command="save_dcp_beside",
                wait="wait_dcp",
                stager=stager,
            )

        copying = stack.enter_context(bench.worker(tensors=tensors))
        copying.call("copy")
        yield [
            Contender(name="copy", play=lambda: alike([copying], "copy")),
            saving("fpfs.dcp", mount.path, "fpfs"),
            saving("fpfs.dcp, optimizers known", mount.path, "fpfs, later"),
            saving("DCP async", plain, "torch"),
            saving("DCP async, kept stager", plain, "torch, kept"),
        ]


@contextlib.contextmanager
def _durable_beside(bench: Bench) -> Iterator[Sequence[Entry]]:
    """async_save until it is durable."""
    tensors = bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())

        def saves(name: str, folder: Path, stager: str) -> Contender:
            return rotating(
                name,
                workers=[stack.enter_context(bench.worker(tensors=tensors))],
                folder=folder,
                total_bytes=total_bytes,
                quiesce=mount.flush if folder == mount.path else sync,
                command="save_dcp_beside_durably",
                stager=stager,
            )

        yield [
            fio.overwriting(plain, total_bytes=total_bytes),
            saves("fpfs.dcp", mount.path, "fpfs"),
            saves("fpfs.dcp, optimizers known", mount.path, "fpfs, later"),
            saves("DCP async, kept stager", plain, "torch, kept"),
        ]


@contextlib.contextmanager
def _loads(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        worker = stack.enter_context(bench.worker(tensors=tensors))
        for folder in (plain, mount.path):
            worker.call("save_dcp_by_fpfs", path=str(folder / FOLDER))
        (file,) = (plain / FOLDER).glob("*.distcp")

        def loads(name: str, folder: Path, *, by_fpfs: bool) -> Contender:
            def play() -> float:
                path = str(folder / FOLDER)
                seconds = alike([worker], "load_dcp", path=path, by_fpfs=by_fpfs)
                return total_bytes / seconds / 1e9

            return Contender(name=name, play=play, prepare=drop_caches)

        yield [
            Contender(name="fio", play=lambda: fio.read_gb_per_s(file), prepare=drop_caches),
            loads("fpfs.dcp", mount.path, by_fpfs=True),
            loads("DCP from fpfs", mount.path, by_fpfs=False),
            loads("DCP", plain, by_fpfs=False),
        ]


GROUPS = (
    Group(
        name="dcp-save",
        title="torch.distributed.checkpoint by fpfs, durable, to two directories in turn",
        unit="GB/s",
        open=_saves,
        bounds=(Bound(contender="fpfs.dcp", peer="fio, overwriting", figure=0.85),),
    ),
    Group(
        name="dcp-stall",
        title="its async_save of 1 GiB, until it returns",
        unit="s",
        open=_stalls,
        bounds=(Bound(contender="fpfs.dcp", peer="DCP async", figure=0.5, sense=Sense.AT_MOST),),
    ),
    Group(
        name="dcp-async",
        title="its async_save of 1 GiB, until it is durable, to two directories in turn",
        unit="GB/s",
        open=_durable_beside,
        bounds=(
            Bound(contender="fpfs.dcp, optimizers known", peer="fio, overwriting", figure=0.85),
        ),
    ),
    Group(
        name="dcp-load",
        title="its load into a state, page cache dropped",
        unit="GB/s",
        open=_loads,
        bounds=(Bound(contender="fpfs.dcp", peer="fio", figure=0.95),),
    ),
)
