"""Tensors cut along an inner dimension: ranks of one machine read them from each other's memory.

A rank's part is many short runs of the file then. If each wrote its own runs, a save would take ten
times as long; so a rank that writes a range of such a tensor copies from every rank's memory what
belongs there (process_vm_readv(2)), which each leaves as it is until all have written.

The kernel lets a process read another of the same user, unless one has changed its user or a
sandbox forbids it. Where it does not, each rank writes its own runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence

import msgspec

from fpfs.client.container import Container, Record
from fpfs.client.peers import GONE, Process, RankFailed
from fpfs.client.sharding import Box, Sharded, is_one_run, runs_of
from fpfs.core.transfers import allow_reading, read_process

logger = logging.getLogger(__name__)

Strip = tuple[int, int, int, int, int, int]
"""As `transfers.write_pieces` has them."""


class Part(msgspec.Struct, array_like=True):
    """What a rank has of a sharded tensor."""

    box: Box
    address: int
    """In the rank's memory; 0: it is on a device."""


class Source(msgspec.Struct, array_like=True):
    """Where a part of a sharded tensor is read."""

    rank: int
    pid: int
    part: Part


def own_parts(container: Container) -> list[Part]:
    """What this process has of the container's sharded tensors. Others may read it from now on."""
    parts = []
    for sharded in container.sharded:
        is_here = sharded.local.device.type == "cpu"
        parts.append(Part(sharded.box, sharded.local.data_ptr() if is_here else 0))
        if not is_one_run(sharded.box, sharded.shape):
            allow_reading()
    return parts


def can_gather(
    processes: Sequence[Process], parts: Sequence[Sequence[Part]], container: Container
) -> bool:
    """Whether ranks can read each other's memory, as far as this one can try.

    processes, parts: of each rank, this process among them.
    """
    shapes = [sharded.shape for sharded in container.sharded]
    for rank, (process, own) in enumerate(zip(processes, parts, strict=True)):
        wanted = (
            part for part, shape in zip(own, shapes, strict=True) if not is_one_run(part.box, shape)
        )
        for part in wanted:  # some memory cannot be read, as what is shared with a device
            why = _unreadable(process, part)
            if why:
                logger.warning(
                    "the memory of rank %d cannot be read (%s): tensors that are sharded along an"
                    " inner dimension are saved in small pieces, slowly",
                    rank,
                    why,
                )
                return False
    return True


def _unreadable(process: Process, part: Part) -> str | None:
    """Why a part cannot be read, if so."""
    if not process.is_near():
        return "it is on another machine"
    try:
        read_process(process.pid, part.address, 1)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def strips_of(
    record: Record, sources: Iterable[Source], *, offset: int, own_rank: int
) -> list[Strip]:
    """Where the bytes of a record, which begins at `offset` in the file, are in ranks' memory."""
    sharded = record.sharded
    assert isinstance(sharded, Sharded)
    strips = []
    for source in sources:
        pid = 0 if source.rank == own_rank else source.pid
        for runs in runs_of(source.part.box, sharded.shape, sharded.itemsize):
            address, at = source.part.address + runs.start, offset + runs.offset
            strips.append((pid, address, at, runs.bytes, runs.count, runs.step))
    return strips


def check_sources(sources: Iterable[Source]) -> None:
    """Raise RankFailed if a rank that was to be read from is no more."""
    for source in sources:
        try:
            read_process(source.pid, source.part.address, 1)
        except ProcessLookupError as error:
            raise RankFailed(source.rank, GONE, gone=True) from error


__all__ = ["Part", "Source", "Strip", "can_gather", "check_sources", "own_parts", "strips_of"]
