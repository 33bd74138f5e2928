"""The lab: saves and loads over 1, 2 and 4 devices of 200 MiB/s each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.framework import Bound, Contender, Entry, Group
from benchmarks.groups.loading import FILE, loader
from benchmarks.groups.saving import saver
from benchmarks.peers import fio
from benchmarks.places import GIB, Bench, FpfsMount, state_bytes
from benchmarks.worker import Worker

MIB_PER_S = 200
WIDTHS = (1, 2, 4)
DEVICE_BYTES = 8 * GIB


@contextlib.contextmanager
def _saving(bench: Bench) -> Iterator[Sequence[Entry]]:
    """One mount for each width, all over the same four devices, one at work at a time."""
    total_bytes = state_bytes(bench.scale.tensors_lab)
    with contextlib.ExitStack() as stack:
        disks = _disks(bench, stack)
        worker = stack.enter_context(bench.worker(tensors=bench.scale.tensors_lab))
        entries: list[Entry] = [
            Contender(
                name="fio, 1 device",
                play=lambda: fio.write_gb_per_s(disks[0], total_bytes=total_bytes),
            )
        ]
        for width in WIDTHS:
            # Fresh blocks, as fio's are.
            mount = stack.enter_context(
                bench.fpfs(filesystems=disks[:width], options=("-o", "reuse=0"))
            )
            entries.append(_fresh_save(width, mount, worker, total_bytes=total_bytes))
        yield entries


def _fresh_save(width: int, mount: FpfsMount, worker: Worker, *, total_bytes: int) -> Contender:
    path = mount.path / FILE

    def prepare() -> None:
        path.unlink(missing_ok=True)
        mount.flush()

    return saver(
        f"fpfs, {width} device{'s' if width > 1 else ''}",
        worker=worker,
        path=path,
        total_bytes=total_bytes,
        prepare=prepare,
        quiesce=mount.flush,
        fsync=True,
    )


@contextlib.contextmanager
def _loading(bench: Bench, *, mmap: bool) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    with contextlib.ExitStack() as stack:
        disks = _disks(bench, stack)
        mounts = {
            width: stack.enter_context(bench.fpfs(filesystems=disks[:width]))
            for width in (1, WIDTHS[-1])
        }
        with bench.worker(tensors=tensors) as writer:
            for mount in mounts.values():
                writer.call("save", path=str(mount.path / FILE), fsync=True)
        worker = stack.enter_context(bench.worker())
        worker.call("load", path=str(mounts[WIDTHS[-1]].path / FILE), mmap=mmap)
        yield [
            loader(
                f"fpfs, {width} device{'s' if width > 1 else ''}",
                workers=[worker],
                path=mount.path / FILE,
                total_bytes=state_bytes(tensors),
                mmap=mmap,
            )
            for width, mount in mounts.items()
        ]


def _disks(bench: Bench, stack: contextlib.ExitStack) -> tuple[Path, ...]:
    made = stack.enter_context(
        bench.lab(device_count=WIDTHS[-1], mib_per_s=MIB_PER_S, size_bytes=DEVICE_BYTES)
    )
    return made.mountpoints


LOADING_BOUNDS = (Bound(contender="fpfs, 4 devices", peer="fpfs, 1 device", figure=3.0),)

GROUPS = (
    Group(
        name="lab-save",
        title=f"fresh file and fsync over devices of {MIB_PER_S} MiB/s each",
        unit="GB/s",
        open=_saving,
        bounds=(
            Bound(contender="fpfs, 1 device", peer="fio, 1 device", figure=0.97),
            Bound(contender="fpfs, 2 devices", peer="fio, 1 device", peer_factor=2, figure=0.97),
            Bound(contender="fpfs, 4 devices", peer="fio, 1 device", peer_factor=4, figure=0.97),
        ),
    ),
    Group(
        name="lab-load",
        title=f"torch.load, page cache dropped, from devices of {MIB_PER_S} MiB/s each",
        unit="GB/s",
        open=lambda bench: _loading(bench, mmap=False),
        bounds=LOADING_BOUNDS,
    ),
    Group(
        name="lab-load-mmap",
        title=f"torch.load(mmap=True), page cache dropped, from devices of {MIB_PER_S} MiB/s each",
        unit="GB/s",
        open=lambda bench: _loading(bench, mmap=True),
        bounds=LOADING_BOUNDS,
    ),
)
