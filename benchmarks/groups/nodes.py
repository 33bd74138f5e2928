"""Nodes, with a mount each on one disk, save shares of a checkpoint and load it.

So the disk is what both need, and the network between them is the machine's own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.groups.ranks import ranks_of
from benchmarks.peers import fio
from benchmarks.places import Bench, FpfsMount, drop_caches, state_bytes
from benchmarks.worker import Worker, together

NODES = 2
WORLDS = {
    "in another order": [[3], [1], [2], [0]],
    "one sees two shares, and one none": [[2], [0, 3], [], [1]],
}
"""Whose shares each of four nodes sees then."""


@contextlib.contextmanager
def _saves(bench: Bench) -> Iterator[Sequence[Entry]]:
    tensors = bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(bench.plain())
        mounts = [stack.enter_context(bench.fpfs()) for _ in range(NODES)]
        workers = stack.enter_context(ranks_of(bench, NODES, tensors=tensors, layout="replicas"))

        entries: list[Entry] = [fio.overwriting(plain, total_bytes=total_bytes)]
        for name, copies in (("2 nodes", 1), ("2 nodes, 2 copies", 2)):
            entries.append(_rotating(name, workers, mounts, copies, total_bytes=total_bytes))
        yield entries


def _rotating(
    name: str,
    workers: Sequence[Worker],
    mounts: Sequence[FpfsMount],
    copies: int,
    *,
    total_bytes: int,
) -> Contender:
    """Saves to two directories in turn; GB/s of the checkpoint, however often it is kept."""
    turns = itertools.cycle(f"{copies} copies, {number}" for number in range(2))

    def play() -> float:
        turn = next(turns)
        paths = [str(mount.path / turn) for mount in mounts]
        took_s = together(workers, "save_shares", path=paths, copies=[copies] * NODES)
        return total_bytes / took_s / 1e9

    def quiesce() -> None:
        for mount in mounts:
            mount.flush()

    # Until all that is replaced takes new bytes.
    for _ in range(4):
        play()
        quiesce()
    return Contender(name=name, play=play, quiesce=quiesce)


@contextlib.contextmanager
def _loads(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Two ranks load all of it at once, cold: of what both see, or half from each other."""
    tensors = bench.scale.tensors
    total_bytes = state_bytes(tensors)
    with contextlib.ExitStack() as stack:
        mounts = [stack.enter_context(bench.fpfs()) for _ in range(NODES)]
        workers = stack.enter_context(ranks_of(bench, NODES, tensors=tensors, layout="replicas"))
        entries: list[Entry] = []
        for name, copies in (("each sees all", 2), ("each sees half", 1)):
            paths = [str(mount.path / f"{copies} copies") for mount in mounts]
            together(workers, "save_shares", path=paths, copies=[copies] * NODES)

            def play(paths: Sequence[str] = paths) -> float:
                return total_bytes / together(workers, "load_shares", path=paths) / 1e9

            play()
            entries.append(Contender(name=name, play=play, prepare=drop_caches))
        yield entries


@contextlib.contextmanager
def _worlds(bench: Bench) -> Iterator[Sequence[Entry]]:
    """Four nodes load in a world that has changed, cold; how often a device reads each byte."""
    tensors = bench.scale.tensors
    with contextlib.ExitStack() as stack:
        mounts = [stack.enter_context(bench.fpfs()) for _ in range(4)]
        workers = stack.enter_context(ranks_of(bench, 4, tensors=tensors, layout="replicas"))
        folders = [str(mount.path / "step") for mount in mounts]
        together(workers, "save_shares", path=folders, copies=[1] * 4)
        entries: list[Entry] = []
        for name, seen in WORLDS.items():
            of_ranks = [
                [folders[share] for share in shares] or [f"{folders[rank]} is lost"]
                for rank, shares in enumerate(seen)
            ]

            def play(of_ranks: Sequence[Sequence[str]] = of_ranks) -> float:
                before = _bytes_read(mounts)
                together(workers, "load_shares", path=of_ranks)
                return (_bytes_read(mounts) - before) / state_bytes(tensors)

            entries.append(Contender(name=name, play=play, prepare=drop_caches))
        yield entries


def _bytes_read(mounts: Sequence[FpfsMount]) -> int:
    """From all devices, so far."""
    return sum(device["bytes_read"] for mount in mounts for device in mount.status()["devices"])


GROUPS = (
    Group(
        name="client-nodes",
        title="fpfs.save_shares by two nodes with a mount each on one disk, durable",
        unit="GB/s",
        open=_saves,
        bounds=(
            Bound(contender="2 nodes", peer="fio, overwriting", figure=0.90),
            # Twice the bytes go to the one disk, and half of them are read again.
            Bound(
                contender="2 nodes, 2 copies", peer="fio, overwriting", peer_factor=0.5, figure=0.6
            ),
        ),
    ),
    Group(
        name="client-load-nodes",
        title="fpfs.load_shares by two nodes at once, into tensors, page cache dropped",
        unit="GB/s",
        open=_loads,
        bounds=(Bound(contender="each sees half", peer="each sees all", figure=0.9),),
    ),
    Group(
        name="client-load-worlds",
        title="what devices read in fpfs.load_shares by four nodes in a world that has changed",
        unit="times",
        open=_worlds,
        rounds_max=3,
        bounds=tuple(Bound(contender=name, figure=1.02, sense=Sense.AT_MOST) for name in WORLDS),
    ),
)
