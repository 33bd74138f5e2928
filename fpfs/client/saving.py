"""Saves a state as one ordinary torch.save file, by several threads, with its CRC32s right.

How: torch.save lays the file out without moving a tensor's bytes (`container`), the file is sized
and its room reserved, native threads write tensors from where they lie to where they belong, and
one rename gives the file its name (`replacement`). Ranks of a group each write a share (`shares`)
and tell each other how it went (`peers`); one process is a group of one.

Concurrency: `save` may be called from several threads at once, by one of them for a group. A tensor
that changes meanwhile is saved as some mixture of what it was and what it became, with a CRC32 that
may be wrong; it must not be resized, shared or freed.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fpfs.client.container import Container, lay_out
from fpfs.client.gathering import Offered, Source, can_gather
from fpfs.client.paths import resolve
from fpfs.client.peers import Alone, Peers, Process, RankFailed, peers_of
from fpfs.client.plan import Plan
from fpfs.client.planning import Planning
from fpfs.client.replacement import Replacement, remove_left
from fpfs.client.topology import TIMEOUT_S
from fpfs.client.writing import Done, Task, Written, rest_of, write, write_share
from fpfs.core.units import format_rate, format_size

if TYPE_CHECKING:
    import torch.distributed as dist


class Saved(NamedTuple):
    """What `save` did."""

    path: str
    """The file, links followed."""
    bytes: int
    """Of the file."""
    seconds: float
    """Of the whole call, as this rank saw it."""
    lay_out_s: float
    """Until writing began."""
    write_s: float
    """Until all ranks had written."""
    durable: bool
    """Whether it survives power loss by now."""
    written: tuple[Written, ...]
    """By rank; those that had nothing to write are left out."""

    def __str__(self) -> str:
        """One line for a log."""
        safe = "durable" if self.durable else "saved"
        rate = format_rate(self.bytes / self.seconds)
        by = f" by {len(self.written)} ranks" if len(self.written) > 1 else ""
        size = format_size(self.bytes)
        return f"{self.path}: {size} {safe} in {self.seconds:.2f} s{by}, {rate}"


def save(
    state: Any,
    path: str | bytes | os.PathLike[Any],
    *,
    group: dist.ProcessGroup | Alone | None = None,
    plan: Plan | None = None,
    durable: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Saved:
    """Save `state` as torch.save does, faster, and whole or not at all.

    What lies at `path` afterwards is what torch.save writes: torch.load and unzip read it. It takes
    the name by one rename after its last byte, so at any time the name holds the new file or the
    former one; if something fails, the former one, and nothing else. Links are followed; owner and
    mode of a former file stay.

    state: what torch.save takes. Storages on other devices are copied to the processor's memory
        first, what a rank writes of them.
    group: whose ranks write it together, each a part: all call `save`, with the same tensors and a
        path to the same file. What is not a tensor is rank 0's. A DTensor is saved whole, as an
        ordinary tensor in the processor's memory: each rank writes of its part. None: the default
        group of torch.distributed, if that is initialized. ALONE: this process only.
    plan: which ranks write what, the same on all ranks (`Plan.build`). If the state is another one
        by now, that is said in the log, and planned anew for the same ranks and writers. None:
        all ranks that have the same bytes divide them.
    durable: return when the file and its name survive power loss, as after fsync(2).
    timeout_s: seconds that a rank waits at most for another that it knows nothing of.

    Elsewhere than on a mount of fpfs it works as well, says so once in the log, and flushes the
    file before the rename.

    Raises OSError as open(2) and write(2) do (ENOSPC before the first byte is written, where the
    filesystem can reserve room), TypeError of what is no path, ValueError of a tensor whose parts
    are not a whole or a plan for other ranks, what torch.save raises of what cannot be pickled, and
    RankFailed of what another rank has raised.
    """
    started = time.monotonic()
    with peers_of(group, timeout_s=timeout_s) as peers:
        name = resolve(path)
        try:
            finished = _save(state, name, peers, plan, durable=durable, started=started)
        except RankFailed as error:
            if error.rank == 0 and error.gone:
                # It made the file, and would have removed it. The mount may have gone with it.
                with contextlib.suppress(OSError):
                    remove_left(name)
            raise
        except OSError as error:
            # What fails for a descriptor does not know the name.
            if error.filename is None:
                error.filename = name
            raise
    return Saved(
        path=name,
        bytes=finished.total_bytes,
        seconds=time.monotonic() - started,
        lay_out_s=finished.lay_out_s,
        write_s=finished.write_s,
        durable=durable,
        written=finished.written,
    )


def _save(
    state: Any, name: str, peers: Peers, plan: Plan | None, *, durable: bool, started: float
) -> _Finished:
    """What each rank does."""
    container = lay_out(state, whole=peers.is_group)
    planning = Planning(container, peers, plan)
    offered = Offered(container)
    offer = _Offer(
        path=os.fsencode(name),
        tensors=len(container.tensors),
        bytes_of_storages=int(planning.records.sizes.sum()),
        records=planning.records.digest,
        layout=container.layout_digest(),
        plan=planning.digest,
        process=Process.own(),
        addresses=offered.addresses,
    )
    with _Coordinator(
        name, container, planning, peers, durable=durable, started=started
    ) as coordinator:
        task = peers.exchange("share", offer, coordinator.divide, of=Task)
        records = planning.records
        if task.layout is not None:
            container = container.laid_out_as(task.layout)
            records = container.records()
        share = planning.plan(records, gathers=task.gathers).share(peers.rank)
        part = write_share(share, task, container, peers, coordinator.fd)
        return peers.exchange("part", part, coordinator.finish, of=_Finished)


class _Offer(msgspec.Struct):
    """What a rank comes with."""

    path: bytes
    tensors: int
    bytes_of_storages: int
    records: bytes
    """Their digest."""
    layout: str
    """Its digest: what is no tensor may be longer on one rank, and move all."""
    plan: bytes
    """Of whom and what was given as a plan."""
    process: Process
    addresses: dict[int, int]
    """`Offered.addresses`."""


class _Finished(msgspec.Struct):
    """What rank 0 knows in the end: the fields of `Saved` that are the same on all ranks."""

    total_bytes: int
    lay_out_s: float
    write_s: float
    written: tuple[Written, ...]


class _Coordinator:
    """Rank 0's part: the file, its shares, and its name at last. Other ranks call nothing of it."""

    def __init__(
        self,
        name: str,
        container: Container,
        planning: Planning,
        peers: Peers,
        *,
        durable: bool,
        started: float,
    ) -> None:
        self._name = name
        self._container = container
        self._planning = planning
        self._peers = peers
        self._durable = durable
        self._started = started
        self._laid_out = started
        self._stack = contextlib.ExitStack()
        self._replacement: Replacement | None = None
        self._plan: Plan | None = None

    def __enter__(self) -> _Coordinator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # First, or ranks that come late would only find that there is no file.
            self._peers.tell(error)
        self._stack.close()

    @property
    def fd(self) -> int:
        """Of the file; negative on other ranks, which have only its path."""
        return -1 if self._replacement is None else self._replacement.fd

    def divide(self, offers: list[_Offer]) -> list[Task]:
        """Make the file, with room for all of it, and tell each rank what to write."""
        _compare(offers)
        container = self._container
        gathers = can_gather(
            [offer.process for offer in offers], [offer.addresses for offer in offers]
        )
        self._plan = self._planning.plan(self._planning.records, gathers=gathers)
        replacement = self._replacement = self._stack.enter_context(Replacement(self._name))
        replacement.reserve(container.bytes)
        self._laid_out = time.monotonic()
        path = os.fsencode(replacement.temporary_path)
        layout = None
        if any(offer.layout != offers[0].layout for offer in offers):
            layout = container.layout()
        tasks = []
        for rank in range(len(offers)):
            sources = {}
            if self._plan.gathered:
                own = set(self._plan.share(rank).table[:, 2].tolist())
                for number in own.intersection(self._plan.gathered):
                    sources[number] = [
                        Source(holder, offers[holder].process.pid, offers[holder].addresses[number])
                        for holder in self._planning.holders(number, nearest=rank)
                    ]
            is_as_here = offers[rank].layout == offers[0].layout
            tasks.append(Task(path, gathers, None if is_as_here else layout, sources))
        return tasks

    def finish(self, parts: list[Done]) -> list[_Finished]:
        """Write what is left, and give the file its name."""
        assert self._replacement is not None
        assert self._plan is not None
        rest = rest_of(self._plan.rest, [part.crcs for part in parts], self._container)
        write(rest, self._container, fd=self._replacement.fd, threads=1)
        own = parts[0].written
        rest_bytes = sum(self._container.text_part(number).bytes for number in rest.texts)
        parts[0].written = own._replace(bytes=own.bytes + rest_bytes)
        written_at = time.monotonic()
        self._replacement.commit(durable=self._durable)
        finished = _Finished(
            total_bytes=self._container.bytes,
            lay_out_s=self._laid_out - self._started,
            write_s=written_at - self._laid_out,
            written=tuple(part.written for part in parts if part.written.bytes > 0),
        )
        return [finished] * len(parts)


def _compare(offers: list[_Offer]) -> None:
    """Raise RankFailed of a rank that saves something else than rank 0."""
    for rank, offer in enumerate(offers):
        if offer.path != offers[0].path:
            path, own = os.fsdecode(offer.path), os.fsdecode(offers[0].path)
            raise RankFailed(
                rank,
                f"saves to {path!r}, and rank 0 to {own!r}: a group saves one file; for a file of"
                " each rank, give group=fpfs.ALONE",
            )
        if offer.plan != offers[0].plan:
            raise RankFailed(
                rank,
                "was given another plan than rank 0: all ranks save by plans of the same topology"
                " and writers, or none",
            )
        if offer.records != offers[0].records:
            raise RankFailed(
                rank,
                f"saves {_described(offer)}, and rank 0 {_described(offers[0])}: all ranks save"
                " tensors of the same names, types and shapes, in the same order, sharded alike",
            )


def _described(offer: _Offer) -> str:
    return f"{offer.tensors} tensors in {format_size(offer.bytes_of_storages)}"
