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
import select
from collections.abc import Collection, Iterable, Sequence

import msgspec

from fpfs.client.boxes import box_of, runs_of
from fpfs.client.container import Container, Record
from fpfs.client.peers import Peers, Process
from fpfs.core.transfers import allow_reading, read_process

logger = logging.getLogger(__name__)

DEATH_S = 1.0
"""A process whose memory cannot be read any more may take so long to end."""

Strip = tuple[int, int, int, int, int, int]
"""As `transfers.write_pieces` has them."""


class Source(msgspec.Struct, array_like=True):
    """Where a rank's part of a sharded tensor is read."""

    rank: int
    pid: int
    address: int


class Offered:
    """What this process has of tensors that others may want to read; they may, while this exists.

    numbers: of the records that they do; None: it is not known yet.
    addresses: by the records' numbers. 0: it has nothing.
    """

    def __init__(self, container: Container, numbers: Collection[int] | None = None) -> None:
        self.addresses: dict[int, int] = {}
        self._owners = []
        for number, sharded in container.sharded:
            if not sharded.sharding.is_one_run and (numbers is None or number in numbers):
                local = sharded.local.cpu()
                self._owners.append(local)
                self.addresses[number] = local.data_ptr()
        if self.addresses:
            allow_reading()


def can_gather(processes: Sequence[Process], addresses: Sequence[dict[int, int]]) -> bool:
    """Whether there is something to gather, and ranks can read it, as far as this one can try.

    processes, addresses: of each rank, this process among them.
    """
    if not addresses[0]:
        return False
    for rank, (process, own) in enumerate(zip(processes, addresses, strict=True)):
        # Some memory cannot be read, as what is shared with a device.
        why = _unreadable(process, filter(None, own.values()))
        if why:
            logger.warning(
                "the memory of rank %d cannot be read (%s): tensors that are sharded along an"
                " inner dimension are saved in small pieces, slowly",
                rank,
                why,
            )
            return False
    return True


def _unreadable(process: Process, addresses: Iterable[int]) -> str | None:
    """Why some of it cannot be read, if so."""
    if not process.is_near():
        return "it is on another machine"
    try:
        for address in addresses:
            read_process(process.pid, address, 1)
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


def strips_of(
    record: Record, sources: Iterable[Source], *, offset: int, peers: Peers
) -> list[Strip]:
    """Where the bytes of a record, which begins at `offset` in the file, are in ranks' memory."""
    assert record.sharded is not None
    sharding = record.sharded.sharding
    strips = []
    for source in sources:
        pid = 0 if source.rank == peers.rank else source.pid
        box = box_of(sharding, peers.ranks[source.rank])
        for runs in runs_of(box, sharding.shape, sharding.itemsize):
            address, at = source.address + runs.start, offset + runs.offset
            strips.append((pid, address, at, runs.bytes, runs.count, runs.step))
    return strips


def gone_of(sources: Iterable[Source]) -> list[int]:
    """Ranks that were to be read from and are no more, after reading has failed."""
    gone = []
    for source in sources:
        try:
            read_process(source.pid, source.address, 1)
        except ProcessLookupError:
            gone.append(source.rank)
        except OSError:
            # A process that dies loses its memory first.
            if _ends(source.pid, within_s=DEATH_S):
                gone.append(source.rank)
    return gone


def _ends(pid: int, *, within_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # a sandbox without pidfds
        return False
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))
    finally:
        os.close(pidfd)


__all__ = ["Offered", "Source", "Strip", "can_gather", "gone_of", "strips_of"]
