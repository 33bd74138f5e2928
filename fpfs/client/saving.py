"""Saves a state as one ordinary torch.save file, by several threads, with its CRC32s right.

How: torch.save lays the file out without moving a tensor's bytes (`container`), the file is sized
and its room reserved, native threads write tensors from where they lie to where they belong, and
one rename gives the file its name (`replacement`). Ranks of a group each write a share (`planning`)
and tell each other how it went (`peers`); one process is a group of one.

Concurrency: `save` may be called from several threads at once, by one of them for a group. A tensor
that changes meanwhile is saved as some mixture of what it was and what it became, with a CRC32 that
may be wrong; it must not be resized, shared or freed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from fpfs.client.container import Container, Layout, lay_out
from fpfs.client.gathering import Offered, Source, can_gather
from fpfs.client.paths import default_threads, resolve
from fpfs.client.peers import Alone, Peers, Process, RankFailed, peers_of
from fpfs.client.plan import Plan
from fpfs.client.planning import Planning
from fpfs.client.replacement import Replacement, locked_directory, remove_left
from fpfs.client.snapshot import Memory, Uncopied, copy_rest
from fpfs.client.topology import TIMEOUT_S
from fpfs.client.updates import NOTHING_HELD, Held
from fpfs.client.writing import Done, Located, Task, Written, rest_of, write, write_share
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
    with Save(peers_of(group, timeout_s=timeout_s)) as steps:
        steps.agree(state, path, plan)
        laid_out = time.monotonic()
        finished = steps.write(durable=durable)
    return Saved(
        path=steps.path,
        bytes=finished.total_bytes,
        seconds=time.monotonic() - started,
        lay_out_s=laid_out - started,
        write_s=finished.write_s,
        durable=durable,
        written=finished.written,
    )


class Finished(msgspec.Struct):
    """What rank 0 knows in the end: the fields of `Saved` that are the same on all ranks."""

    total_bytes: int
    write_s: float
    written: tuple[Written, ...]


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


class _Agreed(msgspec.Struct):
    """What a rank learns from all offers."""

    gathers: bool
    """Whether ranks can read each other's memory, and have to."""
    layout: Layout | None
    """How the file is laid out; None: as this rank has laid it out."""


class LayOut(Protocol):
    """What lays a file out: `lay_out`, or another format's."""

    def __call__(self, state: Any, *, whole: bool) -> Container:
        """As `lay_out`."""


class Save:
    """A save, step by step. As a context: what is begun and not finished is undone.

    All ranks of the group do each step, which raises as `save`. A step may be another thread's than
    the one before. Several files that get their names together are agreed on and written one after
    the other.
    """

    path = ""
    """The file, links followed; after `agree`."""
    _container: Container
    _planning: Planning
    _offered: Offered
    _plan: Plan
    _uncopied: Uncopied

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._files: list[Replacement] = []
        """Rank 0's, the last one being written."""
        self._paths: list[str] = []

    def __enter__(self) -> Save:
        self._peers.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._peers.__exit__, kind, error, trace)
            if error is not None:
                # First, or ranks that come late would only find that there is no file.
                self._peers.tell(error)
            for file in self._files:
                stack.callback(file.discard)
            if isinstance(error, RankFailed) and error.rank == 0 and error.gone:
                # It made the files, and would have removed them. The mount may have gone with it.
                for path in self._paths:
                    with contextlib.suppress(OSError):
                        remove_left(path)
            if isinstance(error, OSError) and error.filename is None and self.path:
                # What fails for a descriptor does not know the name.
                error.filename = self.path

    def agree(
        self,
        state: Any,
        path: str | bytes | os.PathLike[Any],
        plan: Plan | None,
        *,
        lay_out: LayOut = lay_out,
        follow: bool = True,
    ) -> None:
        """Lay out the file, make sure that all ranks save the same, and know who writes what.

        follow: links; otherwise `path` is absolute, and what is there is replaced itself.
        """
        self.path = resolve(path) if follow else os.fsdecode(path)
        self._paths.append(self.path)
        container = lay_out(state, whole=self._peers.is_group)
        self._planning = Planning(container, self._peers, plan)
        self._offered = Offered(container)
        offer = _Offer(
            path=os.fsencode(self.path),
            tensors=len(container.tensors),
            bytes_of_storages=int(self._planning.records.sizes.sum()),
            records=self._planning.records.digest,
            layout=container.layout_digest(),
            plan=self._planning.digest,
            process=Process.own(),
            addresses=self._offered.addresses,
        )

        def agree(offers: list[_Offer]) -> list[_Agreed]:
            _compare(offers)
            gathers = can_gather(
                [offer.process for offer in offers], [offer.addresses for offer in offers]
            )
            layout = None
            if any(offer.layout != offers[0].layout for offer in offers):
                layout = container.layout()
            return [
                _Agreed(gathers, None if offer.layout == offers[0].layout else layout)
                for offer in offers
            ]

        agreed = self._peers.exchange("offer", offer, agree, of=_Agreed)
        records = self._planning.records
        if agreed.layout is not None:
            container = container.laid_out_as(agreed.layout)
            records = container.records()
        self._container = container
        self._plan = self._planning.plan(records, gathers=agreed.gathers)

    def snapshot(self, memory: Memory, *, later: Held = NOTHING_HELD) -> None:
        """Copy what this rank writes, and what others read of it: so the tensors may change.

        later: what `finish_snapshot` is to copy.
        """
        self._container, self._uncopied = memory.copy(
            self._container,
            self._plan.share(self._peers.rank),
            whole=self._plan.gathered,
            later=later,
        )
        self._offered = Offered(self._container, self._plan.gathered)

    def finish_snapshot(self) -> None:
        """Copy what `snapshot` has left."""
        copy_rest(self._uncopied)

    def write(
        self,
        *,
        durable: bool,
        threads: int | None = None,
        commit: bool = True,
        then: Callable[[], object] | None = None,
    ) -> Finished:
        """Write this rank's share; returns when all have written, and the file has its name.

        threads: how many write. None: this rank's share of as many as there are processors.
        commit: give the file its name, and all those that have been written without.
        then: what rank 0 does when they have their names, before other saves that have a `then`
            give names in this directory.
        """
        started = time.monotonic()
        addresses = {number: self._offered.addresses[number] for number in self._plan.gathered}
        located = Located(os.getpid(), addresses)
        task = self._peers.exchange("share", located, self._make_file, of=Task)
        share = self._plan.share(self._peers.rank)
        own_fd = self._files[-1].fd if self._files else -1
        if threads is None:
            threads = max(1, default_threads() // self._peers.size)
        done = write_share(share, task, self._container, self._peers, own_fd, threads)

        def finish(parts: list[Done]) -> list[Finished]:
            written = self._write_rest(parts)
            seconds = time.monotonic() - started
            if commit:
                self._commit(durable=durable, then=then)
            finished = Finished(self._container.bytes, seconds, written)
            return [finished] * len(parts)

        return self._peers.exchange("part", done, finish, of=Finished)

    def flush(self) -> None:
        """Return when the files and their names survive power loss."""

        def flush() -> None:
            for file in self._files:
                file.flush()

        self._do_once("flush", flush)

    def commit(self, *, durable: bool) -> None:
        """Give the files, which have been written, their names."""
        self._do_once("commit", lambda: self._commit(durable=durable, then=None))

    def _do_once(self, step: str, action: Callable[[], object]) -> None:
        """Rank 0 does it; returns when it has."""

        def do(ranks: list[None]) -> list[None]:
            action()
            return ranks

        self._peers.exchange(step, None, do, of=type(None))

    def _commit(self, *, durable: bool, then: Callable[[], object] | None) -> None:
        """Rank 0: give all files their names, when all are as safe as they must be."""
        for file in self._files:
            file.complete(durable=durable)
        with contextlib.ExitStack() as stack:
            if then is not None:
                stack.enter_context(locked_directory(os.path.dirname(self.path)))
            for file in self._files:
                file.take_name()
            if then is not None:
                then()
            if durable:
                for file in self._files:
                    file.flush_name()

    def _make_file(self, ranks: list[Located]) -> list[Task]:
        """Rank 0: make the file, with room for all of it, and tell where everything is."""
        file = Replacement(self.path)
        self._files.append(file)
        file.reserve(self._container.bytes)
        path = os.fsencode(file.temporary_path)
        tasks = []
        for rank in range(len(ranks)):
            sources = {}
            if self._plan.gathered:
                own = set(self._plan.share(rank).table[:, 2].tolist())
                for number in own.intersection(self._plan.gathered):
                    sources[number] = [
                        Source(holder, ranks[holder].pid, ranks[holder].addresses[number])
                        for holder in self._planning.holders(number, nearest=rank)
                    ]
            tasks.append(Task(path, sources))
        return tasks

    def _write_rest(self, parts: list[Done]) -> tuple[Written, ...]:
        """Rank 0: write what had to wait for all CRC32s."""
        rest = rest_of(self._plan.rest, [part.crcs for part in parts], self._container)
        write(rest, self._container, fd=self._files[-1].fd, threads=1)
        rest_bytes = sum(self._container.text_part(number).bytes for number in rest.texts)
        own = parts[0].written
        parts[0].written = own._replace(bytes=own.bytes + rest_bytes)
        return tuple(part.written for part in parts if part.written.bytes > 0)


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
    plural = "s" * (offer.tensors != 1)
    return f"{offer.tensors} tensor{plural} in {format_size(offer.bytes_of_storages)}"
