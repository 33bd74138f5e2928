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
import hashlib
import os
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fpfs.client.container import Container, lay_out
from fpfs.client.gathering import Part, Source, can_gather, own_parts
from fpfs.client.paths import resolve
from fpfs.client.peers import Alone, Peers, Process, RankFailed, peers_of
from fpfs.client.replacement import Replacement, remove_left
from fpfs.client.shares import Division
from fpfs.client.writing import Done, Task, Written, write, write_share
from fpfs.core.policy import CHUNK_BYTES_DEFAULT
from fpfs.core.units import format_rate, format_size

if TYPE_CHECKING:
    import torch.distributed as dist

TIMEOUT_S = 300.0


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
    durable: return when the file and its name survive power loss, as after fsync(2).
    timeout_s: seconds that a rank waits at most for another that it knows nothing of.

    Elsewhere than on a mount of fpfs it works as well, and flushes the file before the rename.

    Raises OSError as open(2) and write(2) do (ENOSPC before the first byte is written, where the
    filesystem can reserve room), TypeError of what is no path, ValueError of a tensor whose parts
    are not a whole, what torch.save raises of what cannot be pickled, and RankFailed of what
    another rank has raised.
    """
    started = time.monotonic()
    with peers_of(group, timeout_s=timeout_s) as peers:
        name = resolve(path)
        try:
            container = lay_out(state, whole=peers.is_group)
            offer = _Offer(
                os.fsencode(name), *_signature(container), Process.own(), own_parts(container)
            )
            with _Coordinator(
                name, container, peers, durable=durable, started=started
            ) as coordinator:
                task = peers.exchange("share", offer, coordinator.divide, of=Task)
                part = write_share(task, container, peers, coordinator.fd)
                finished = peers.exchange("part", part, coordinator.finish, of=_Finished)
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


class _Offer(msgspec.Struct):
    """What a rank comes with."""

    path: bytes
    tensors: int
    bytes_of_storages: int
    digest: bytes
    process: Process
    parts: list[Part]
    """What the rank has of each sharded tensor."""


class _Finished(msgspec.Struct):
    """What rank 0 knows in the end: the fields of `Saved` that are the same on all ranks."""

    total_bytes: int
    lay_out_s: float
    write_s: float
    written: tuple[Written, ...]


def _signature(container: Container) -> tuple[int, int, bytes]:
    """What must be the same on all ranks: tensors, bytes of storages, and a digest of both."""
    sizes = [part.bytes for part in container.parts[1::2]]
    digest = hashlib.blake2b(repr((container.tensors, sizes)).encode(errors="surrogatepass"))
    return len(container.tensors), sum(sizes), digest.digest()


class _Coordinator:
    """Rank 0's part: the file, its shares, and its name at last. Other ranks call nothing of it."""

    def __init__(
        self, name: str, container: Container, peers: Peers, *, durable: bool, started: float
    ) -> None:
        self._name = name
        self._container = container
        self._peers = peers
        self._durable = durable
        self._started = started
        self._laid_out = started
        self._stack = contextlib.ExitStack()
        self._replacement: Replacement | None = None
        self._division: Division | None = None

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
        self._division = Division(
            self._container,
            ranks=len(offers),
            block_bytes=CHUNK_BYTES_DEFAULT,
            boxes=[[part.box for part in offer.parts] for offer in offers],
            gathers=can_gather(
                [offer.process for offer in offers],
                [offer.parts for offer in offers],
                self._container,
            ),
        )
        replacement = self._replacement = self._stack.enter_context(Replacement(self._name))
        replacement.reserve(self._container.bytes)
        self._laid_out = time.monotonic()
        path = os.fsencode(replacement.temporary_path)
        sources = {
            index: [
                Source(rank, offer.process.pid, offer.parts[sharded])
                for rank, offer in enumerate(offers)
                if offer.parts[sharded].box.elements > 0
            ]
            for index, sharded in self._division.gathered.items()
        }
        tasks = []
        for share in self._division.shares:
            own = {piece.part for piece in share.pieces} & sources.keys()
            tasks.append(Task(path, share, {index: sources[index] for index in own}))
        return tasks

    def finish(self, parts: list[Done]) -> list[_Finished]:
        """Write what is left, and give the file its name."""
        assert self._replacement is not None
        assert self._division is not None
        rest = self._division.finish([part.crcs for part in parts])
        write(rest, self._container, fd=self._replacement.fd, threads=1)
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
        if offer.digest != offers[0].digest:
            raise RankFailed(
                rank,
                f"saves {_described(offer)}, and rank 0 {_described(offers[0])}: all ranks save"
                " tensors of the same names, types and shapes, in the same order",
            )


def _described(offer: _Offer) -> str:
    of_them = f" ({len(offer.parts)} of them DTensors)" if offer.parts else ""
    return f"{offer.tensors} tensors{of_them} in {format_size(offer.bytes_of_storages)}"
