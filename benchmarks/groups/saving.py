"""One process saves: acknowledged early, with fsync, and at the speed of the device.

Names that several contenders share: ``fpfs`` is plain torch.save to the mount, ``filesystem`` the
same to the filesystem that the device directory lies on, ``filesystem, in place`` torch.save there
into a file that is not truncated first, whose pages are all in the page cache.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.framework import Bound, Contender, Entry, Group, nothing
from benchmarks.peers import fio
from benchmarks.places import Bench, FpfsMount, remove, state_bytes, sync
from benchmarks.worker import Worker

FILE = "state.pt"
WARM = "state-in-place.pt"


def saver(
    name: str,
    *,
    worker: Worker,
    path: Path,
    total_bytes: int,
    prepare: Callable[[], None] = nothing,
    quiesce: Callable[[], None] = sync,
    command: str = "save",
    **options: Any,
) -> Contender:
    """A contender that saves `total_bytes` to `path`; GB/s. One round is played as warm-up."""

    def play() -> float:
        timing = worker.call(command, path=str(path), **options)
        return total_bytes / timing.seconds / 1e9

    prepare()
    play()
    quiesce()
    return Contender(name=name, play=play, prepare=prepare, quiesce=quiesce)


@contextlib.contextmanager
def _rewrites(bench: Bench, tensors: int, *, fsync: bool) -> Iterator[Sequence[Entry]]:
    """Saves over the file of the round before; without fsync also the bound that torch sets."""
    with (
        bench.worker(tensors=tensors) as worker,
        bench.plain() as plain,
        bench.naive() as naive,
        bench.fpfs() as mount,
    ):
        common: dict[str, Any] = {
            "worker": worker,
            "total_bytes": state_bytes(tensors),
            "fsync": fsync,
        }
        entries = [] if fsync else [saver("/dev/null", path=Path("/dev/null"), **common)]
        yield [
            *entries,
            saver("fpfs", path=mount.path / FILE, quiesce=mount.flush, **common),
            saver("filesystem", path=plain / FILE, **common),
            saver("filesystem, in place", path=plain / WARM, command="save_in_place", **common),
            saver("naive", path=naive / FILE, **common),
        ]


@contextlib.contextmanager
def _device_speed(bench: Bench, tensors: int) -> Iterator[Sequence[Entry]]:
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(bench.worker(tensors=tensors))
        plain = stack.enter_context(bench.plain())
        # Fresh blocks, as fio's are.
        mount = stack.enter_context(bench.fpfs(options=("-o", "reuse=0")))
        common: dict[str, Any] = {"worker": worker, "total_bytes": total_bytes, "fsync": True}

        def fresh(name: str, **options: Any) -> Contender:
            path = mount.path / FILE

            def prepare() -> None:
                path.unlink(missing_ok=True)
                mount.flush()

            return saver(name, path=path, prepare=prepare, quiesce=mount.flush, **common, **options)

        entries: list[Entry] = [
            Contender(
                name="fio",
                play=lambda: fio.write_gb_per_s(plain, total_bytes=total_bytes),
                quiesce=sync,
            ),
            fresh("fpfs, CRC32 off", crc32=False),
            fresh("fpfs, legacy", legacy=True),
            fresh("fpfs, zip"),
        ]
        entries += _deepspeed(bench, stack, plain, tensors=tensors)
        yield entries


def _deepspeed(
    bench: Bench, stack: contextlib.ExitStack, plain: Path, *, tensors: int
) -> list[Entry]:
    worker = stack.enter_context(bench.worker(tensors=tensors))
    path = plain / "deepspeed.pt"
    return [
        saver(
            f"DeepSpeed, {'legacy' if legacy else 'zip'}",
            worker=worker,
            path=path,
            total_bytes=state_bytes(tensors),
            prepare=lambda: remove(path),
            command="save_deepspeed",
            legacy=legacy,
        )
        for legacy in (False, True)
    ]


ROTATED = 2
"""Names that checkpoints take turns at."""


@contextlib.contextmanager
def _rotation(bench: Bench, tensors: int) -> Iterator[Sequence[Entry]]:
    total_bytes = state_bytes(tensors)
    with (
        bench.worker(tensors=tensors) as worker,
        bench.plain() as plain,
        bench.fpfs() as mount,
        bench.fpfs(options=("-o", "reuse=0")) as fresh,
    ):

        def rotating(name: str, on: FpfsMount, **options: Any) -> Contender:
            names = itertools.cycle(on.path / f"state{number}.pt" for number in range(ROTATED))

            def play() -> float:
                timing = worker.call("save", path=str(next(names)), fsync=True, **options)
                return total_bytes / timing.seconds / 1e9

            # Until all that is replaced takes new bytes.
            for _ in range(2 * ROTATED):
                play()
                on.flush()
            return Contender(name=name, play=play, quiesce=on.flush)

        yield [
            fio.overwriting(plain, total_bytes=total_bytes),
            rotating("fpfs, CRC32 off", mount, crc32=False),
            rotating("fpfs, CRC32 off, reuse=0", fresh, crc32=False),
            rotating("fpfs, zip", mount),
        ]


EARLY_BOUNDS = (
    Bound(contender="fpfs", peer="/dev/null", figure=0.42),
    Bound(contender="fpfs", peer="filesystem", figure=0.95),
)
SYNCED_BOUNDS = (Bound(contender="fpfs", peer="filesystem", figure=1.5),)
DEVICE_BOUNDS = (
    Bound(contender="fpfs, CRC32 off", peer="fio", figure=0.80),
    Bound(contender="fpfs, legacy", peer="fio", figure=0.80),
)

ROTATION_BOUNDS = (
    Bound(contender="fpfs, CRC32 off", peer="fio, overwriting", figure=0.85),
    Bound(contender="fpfs, CRC32 off", peer="fpfs, CRC32 off, reuse=0", figure=1.1),
)

GROUPS = (
    Group(
        name="save-early",
        title="torch.save until it returns",
        unit="GB/s",
        open=lambda bench: _rewrites(bench, bench.scale.tensors, fsync=False),
        bounds=EARLY_BOUNDS,
    ),
    Group(
        name="save-early-large",
        title="torch.save of 4 x the arena until it returns",
        unit="GB/s",
        open=lambda bench: _rewrites(bench, bench.scale.tensors_large, fsync=False),
        bounds=EARLY_BOUNDS,
    ),
    Group(
        name="save-fsync",
        title="torch.save and fsync",
        unit="GB/s",
        open=lambda bench: _rewrites(bench, bench.scale.tensors, fsync=True),
        bounds=SYNCED_BOUNDS,
    ),
    Group(
        name="save-fsync-large",
        title="torch.save of 4 x the arena and fsync",
        unit="GB/s",
        open=lambda bench: _rewrites(bench, bench.scale.tensors_large, fsync=True),
        bounds=SYNCED_BOUNDS,
    ),
    Group(
        name="save-device",
        title="fresh file and fsync against the device",
        unit="GB/s",
        open=lambda bench: _device_speed(bench, bench.scale.tensors),
        bounds=DEVICE_BOUNDS,
    ),
    Group(
        name="save-device-large",
        title="fresh file of 4 x the arena and fsync against the device",
        unit="GB/s",
        open=lambda bench: _device_speed(bench, bench.scale.tensors_large),
        bounds=DEVICE_BOUNDS,
    ),
    Group(
        name="save-rotating",
        title="torch.save and fsync over two names in turn against the device",
        unit="GB/s",
        open=lambda bench: _rotation(bench, bench.scale.tensors),
        bounds=ROTATION_BOUNDS,
    ),
)
