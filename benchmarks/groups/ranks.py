"""Ranks of a group save one file together, durable, each writing its part, and load it.

Saves on the plain disk beside the device's limit and torch.distributed.checkpoint, which has a file
of each rank; and in the lab, where devices are slower than ranks and their number is what counts.
Loads are of one file by all ranks at once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.framework import Bound, Contender, Entry, Group
from benchmarks.groups.client import FILE, loader, rotating
from benchmarks.groups.striping import DEVICE_BYTES, MIB_PER_S, WIDTHS
from benchmarks.peers import fio
from benchmarks.places import Bench, FpfsMount, drop_caches, state_bytes, sync
from benchmarks.worker import Worker, alike, together

RANKS = (2, 4)


@contextlib.contextmanager
def ranks_of(bench: Bench, size: int, *, tensors: int, layout: str) -> Iterator[Sequence[Worker]]:
    """Ranks of one group, with a state of `tensors` x 64 MiB that they have as `layout` says."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(bench.worker(tensors=tensors)) for _ in range(size)]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        together(workers, "join", rank=range(size), size=[size] * size, port=[port] * size)
        alike(workers, "lay_out", layout=layout)
        yield workers


@contextlib.contextmanager
def _saves(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())

        entries: list[Entry] = [fio.overwriting(plain, total_bytes=total_bytes)]
        for name, size, layout in (
            ("1 process", 1, "replicas"),
            ("2 ranks, replicas", 2, "replicas"),
            ("2 ranks, rows", 2, "rows"),
            ("2 ranks, columns", 2, "columns"),
        ):
            workers = stack.enter_context(ranks_of(bench, size, tensors=tensors, layout=layout))
            entries.append(
                rotating(
                    name,
                    workers=workers,
                    folder=mount.path,
                    total_bytes=total_bytes,
                    quiesce=mount.flush,
                    command="save_client",
                )
            )
            if layout == "rows":
                entries.append(
                    rotating(
                        "DCP, 2 ranks, rows",
                        workers=workers,
                        folder=plain,
                        total_bytes=total_bytes,
                        quiesce=sync,
                        command="save_dcp_together",
                    )
                )
        yield entries


@contextlib.contextmanager
def _loads(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Two ranks load one file at once, cold: each all of it, or each its rows."""
    tensors = bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mount = stack.enter_context(bench.fpfs())
        with bench.worker(tensors=tensors) as writer:
            writer.call("save_client", path=str(plain / FILE))

        entries: list[Entry] = [
            Contender(name="fio", play=lambda: fio.read_gb_per_s(plain / FILE), prepare=drop_caches)
        ]
        options: dict[str, Any]
        for name, layout, command, options in (
            ("2 ranks, each all", "replicas", "load_only", {"client": True}),
            ("2 ranks, each all, in place", "replicas", "load_into", {}),
            ("2 ranks, each its rows", "rows", "load_into", {}),
        ):
            workers = stack.enter_context(ranks_of(bench, 2, tensors=tensors, layout=layout))
            path = mount.path / f"{layout}.pt"
            alike(workers, "save_client", path=str(path))
            entries.append(
                loader(
                    name,
                    workers=workers,
                    path=path,
                    total_bytes=total_bytes,
                    command=command,
                    **options,
                )
            )
        yield entries


@contextlib.contextmanager
def _lab(bench: Bench) -> Iterator[Sequence[Entry]]:
    """One mount for each width, all over the same four devices, one at work at a time."""
    tensors = bench.scale.tensors_lab // 2
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        disks = stack.enter_context(
            bench.lab(device_count=WIDTHS[-1], mib_per_s=MIB_PER_S, size_bytes=DEVICE_BYTES)
        ).mountpoints
        entries: list[Entry] = [
            Contender(
                name="fio, 1 device",
                play=lambda: fio.write_gb_per_s(disks[0], total_bytes=total_bytes),
            )
        ]
        # Fresh blocks, as fio's are.
        mounts = {
            width: stack.enter_context(
                bench.fpfs(filesystems=disks[:width], options=("-o", "reuse=0"))
            )
            for width in WIDTHS
        }
        for size in RANKS:
            workers = stack.enter_context(ranks_of(bench, size, tensors=tensors, layout="rows"))
            entries += [
                _fresh(_lab_name(size, width), workers, mount, total_bytes=total_bytes)
                for width, mount in mounts.items()
            ]
        yield entries


def _lab_name(size: int, width: int) -> str:
    return f"{size} ranks, {width} device{'s' if width > 1 else ''}"


def _fresh(
    name: str, workers: Sequence[Worker], mount: FpfsMount, *, total_bytes: int
) -> Contender:
    path = mount.path / "state.pt"

    def prepare() -> None:
        path.unlink(missing_ok=True)
        mount.flush()

    def play() -> float:
        return total_bytes / alike(workers, "save_client", path=str(path)) / 1e9

    return Contender(name=name, prepare=prepare, play=play, quiesce=mount.flush)


GROUPS = (
    Group(
        name="client-ranks",
        title="fpfs.save by ranks of a group, durable, over two names in turn",
        unit="GB/s",
        open=_saves,
        bounds=(
            Bound(contender="2 ranks, replicas", peer="fio, overwriting", figure=0.90),
            Bound(contender="2 ranks, rows", peer="fio, overwriting", figure=0.90),
            Bound(contender="2 ranks, columns", peer="fio, overwriting", figure=0.90),
            Bound(contender="2 ranks, rows", peer="DCP, 2 ranks, rows", figure=2.0),
        ),
    ),
    Group(
        name="client-load-ranks",
        title="fpfs.load by ranks of a group at once, page cache dropped",
        unit="GB/s",
        open=_loads,
        bounds=(
            Bound(contender="2 ranks, each all", peer="fio", figure=0.95),
            Bound(contender="2 ranks, each all, in place", peer="fio", figure=0.95),
            Bound(contender="2 ranks, each its rows", peer="fio", figure=0.95),
        ),
        # New tensors are fresh memory, which a hypervisor may have taken back.
        rounds_min=9,
    ),
    Group(
        name="lab-ranks",
        title=f"fresh file by ranks, durable, over devices of {MIB_PER_S} MiB/s each",
        unit="GB/s",
        open=_lab,
        bounds=tuple(
            Bound(
                contender=_lab_name(size, width),
                peer="fio, 1 device",
                peer_factor=width,
                figure=0.97,
            )
            for size in RANKS
            for width in WIDTHS
        ),
    ),
)
