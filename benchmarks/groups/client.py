"""fpfs.client: one process saves and loads, durable, beside the device's limit and other libraries.

Savers take turns at two names, as checkpoints do: what is replaced takes what comes. Libraries that
write in parallel or around the page cache do so in their best mode on the plain filesystem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.checksums import TICKS_A_SECOND, machine_ticks
from benchmarks.peers import fio
from benchmarks.places import (
    GIB,
    Bench,
    drop_caches,
    state_bytes,
    sync,
)
from benchmarks.worker import Worker, alike

ROTATED = 2
"""Names that checkpoints take turns at."""
FILE = "state.pt"


def rotating(
    name: str,
    *,
    workers: Sequence[Worker],
    folder: Path,
    total_bytes: int,
    quiesce: Callable[[], None],
    command: str,
    **options: Any,
) -> Contender:
    """A contender whose workers save together, to each of some names in turn."""
    names = itertools.cycle(folder / f"{name}{number}.pt" for number in range(ROTATED))
    turn = next(names)

    def prepare() -> None:
        nonlocal turn
        turn = next(names)
        # The one library that saves to a directory wants none there.
        if turn.is_dir() and command == "save_torch_checkpointing":
            shutil.rmtree(turn)
            quiesce()

    def play() -> float:
        return total_bytes / alike(workers, command, path=str(turn), **options) / 1e9

    # Until all that is replaced takes new bytes.
    for _ in range(2 * ROTATED):
        prepare()
        play()
        quiesce()
    return Contender(name=name, prepare=prepare, play=play, quiesce=quiesce)


def beside(
    name: str,
    *,
    worker: Worker,
    folder: Path,
    flush: Callable[[], None],
    command: str,
    wait: str,
    **options: Any,
) -> Contender:
    """A contender whose worker saves beside training: seconds until `command` returns.

    `wait` is the command that returns when that save has ended.
    """
    names = itertools.cycle(str(folder / f"{name}{number}") for number in range(ROTATED))

    def play() -> float:
        return alike([worker], command, path=next(names), **options)

    def quiesce() -> None:
        worker.call(wait)
        flush()
        sync()

    # Until all that is replaced takes new bytes.
    for _ in range(2 * ROTATED):
        play()
        quiesce()
    return Contender(name=name, play=play, quiesce=quiesce)


def loader(
    name: str,
    *,
    workers: Sequence[Worker],
    path: Path,
    total_bytes: int,
    command: str,
    **options: Any,
) -> Contender:
    """A contender whose workers load one file at once, the page cache dropped."""

    def play() -> float:
        return total_bytes / alike(workers, command, path=str(path), **options) / 1e9

    play()  # imports torch and touches fresh memory
    return Contender(name=name, play=play, prepare=drop_caches)


@contextlib.contextmanager
def _saves(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = 2 * bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        worker = stack.enter_context(bench.worker(tensors=tensors))
        common: dict[str, Any] = {"total_bytes": total_bytes}
        on_fpfs: dict[str, Any] = {"folder": mount.path, "quiesce": mount.flush, **common}
        on_plain: dict[str, Any] = {"folder": plain, "quiesce": sync, **common}

        entries: list[Entry] = [
            fio.overwriting(plain, total_bytes=total_bytes),
            rotating("fpfs.client", workers=[worker], command="save_client", **on_fpfs),
            rotating("torch.save to fpfs", workers=[worker], command="save", fsync=True, **on_fpfs),
            rotating("DCP", workers=[worker], command="save_dcp", **on_plain),
            rotating(
                "torch_checkpointing",
                workers=[worker],
                command="save_torch_checkpointing",
                direct=False,
                fsync=True,
                **on_plain,
            ),
        ]
        entries.append(_deepspeed(bench, stack, plain, tensors=tensors))
        yield entries


@contextlib.contextmanager
def _processor_time(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Seconds of processor time for each GiB that is saved, of the whole machine."""
    tensors = 2 * bench.scale.tensors
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        worker = stack.enter_context(bench.worker(tensors=tensors))
        common: dict[str, Any] = {"total_bytes": state_bytes(tensors)}
        on_fpfs: dict[str, Any] = {"folder": mount.path, "quiesce": mount.flush, **common}

        def counted(contender: Contender) -> Contender:
            def play() -> float:
                before = machine_ticks()
                contender.play()
                ticks = machine_ticks() - before
                return ticks / TICKS_A_SECOND / (state_bytes(tensors) / GIB)

            return dataclasses.replace(contender, play=play)

        saves = [
            rotating("fpfs.client", workers=[worker], command="save_client", **on_fpfs),
            rotating("torch.save to fpfs", workers=[worker], command="save", fsync=True, **on_fpfs),
        ]
        entries: list[Entry] = [counted(save) for save in saves]
        entries.append(counted(_deepspeed(bench, stack, plain, tensors=tensors)))
        yield entries


def _deepspeed(
    bench: Bench, stack: contextlib.ExitStack, plain: Path, *, tensors: int
) -> Contender:
    """DeepSpeed's writer, in its best mode."""
    return rotating(
        "DeepSpeed",
        workers=[stack.enter_context(bench.worker(tensors=tensors))],
        folder=plain,
        total_bytes=state_bytes(tensors),
        quiesce=sync,
        command="save_deepspeed",
        legacy=True,
    )


@contextlib.contextmanager
def _stalls(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Seconds that a save beside training takes until it returns."""
    tensors = bench.scale.tensors
    names = itertools.cycle(f"{number}.pt" for number in range(ROTATED))
    # Each tensor, and what it is padded by.
    memory_bytes = state_bytes(tensors) + tensors * 4096
    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(bench.fpfs())
        worker = stack.enter_context(bench.worker(tensors=tensors))
        worker.call("copy")
        worker.call("wait_beside", memory_bytes=memory_bytes)

        def save() -> float:
            return alike([worker], "save_beside", path=str(mount.path / next(names)))

        def quiesce() -> None:
            worker.call("wait_beside")
            mount.flush()

        yield [
            Contender(name="copy", play=lambda: alike([worker], "copy")),
            Contender(
                name="a saver's first save",
                prepare=lambda: worker.call("wait_beside", memory_bytes=memory_bytes),
                play=save,
                quiesce=quiesce,
            ),
            Contender(name="its next save", play=save, quiesce=quiesce),
        ]


@contextlib.contextmanager
def _loads(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        with bench.worker(tensors=tensors) as writer:
            for folder in (plain, mount.path):
                writer.call("save_client", path=str(folder / FILE))
        reader = stack.enter_context(bench.worker())
        common: dict[str, Any] = {
            "workers": [reader],
            "total_bytes": total_bytes,
            "command": "load_only",
        }
        yield [
            Contender(
                name="fio",
                play=lambda: fio.read_gb_per_s(plain / FILE),
                prepare=drop_caches,
            ),
            loader("fpfs.client", path=mount.path / FILE, client=True, **common),
            loader("torch.load from fpfs", path=mount.path / FILE, client=False, **common),
            loader("torch.load", path=plain / FILE, client=False, **common),
        ]


GROUPS = (
    Group(
        name="client-save",
        title="fpfs.client.save, durable, over two names in turn",
        unit="GB/s",
        open=_saves,
        bounds=(
            Bound(contender="fpfs.client", peer="fio, overwriting", figure=0.90),
            Bound(contender="fpfs.client", peer="DCP", figure=2.0),
            Bound(contender="fpfs.client", peer="torch_checkpointing", figure=1.5),
            Bound(contender="fpfs.client", peer="DeepSpeed", figure=1.5),
        ),
    ),
    Group(
        name="client-save-cpu",
        title="processor time of the same saves, of the whole machine",
        unit="s/GiB",
        open=_processor_time,
        bounds=(Bound(contender="fpfs.client", figure=0.60, sense=Sense.AT_MOST),),
    ),
    Group(
        name="client-stall",
        title="fpfs.AsyncSaver.save of 1 GiB, until it returns",
        unit="s",
        open=_stalls,
        bounds=tuple(
            Bound(contender=name, peer="copy", figure=1.15, sense=Sense.AT_MOST)
            for name in ("a saver's first save", "its next save")
        ),
    ),
    Group(
        name="client-load",
        title="fpfs.client.load, page cache dropped",
        unit="GB/s",
        open=_loads,
        bounds=(
            Bound(contender="fpfs.client", peer="fio", figure=0.95),
            Bound(contender="fpfs.client", peer="torch.load from fpfs", figure=2.0),
        ),
    ),
)
