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
import ctypes
import hashlib
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from fpfs.client.container import Container, Record, lay_out
from fpfs.client.paths import default_threads, resolve
from fpfs.client.peers import Alone, Peers, RankFailed, peers_of
from fpfs.client.replacement import Replacement, remove_left
from fpfs.client.sharding import Box
from fpfs.client.shares import TEXT, Division, Piece, Share, crc32_parts
from fpfs.core.mounts import mount_containing
from fpfs.core.policy import CHUNK_BYTES_DEFAULT
from fpfs.core.transfers import run_to_end, write_pieces
from fpfs.core.units import format_rate, format_size

if TYPE_CHECKING:
    import torch.distributed as dist

REQUEST_BYTES = 256 * 1024
"""So small that what was summed up is still in the processor's cache when the kernel copies it:
3.4 GB/s instead of 2.7 with 1 MiB (Xeon with 2 MiB of L2 a core, 2 cores, November 2026)."""
TIMEOUT_S = 300.0


class Written(NamedTuple):
    """What one rank wrote of a file."""

    rank: int
    bytes: int
    seconds: float
    copied_bytes: int
    """Copied before they were written: what is not a tensor's, and tensors of a few KiB."""
    threads: int


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
            boxes = [sharded.box for sharded in container.sharded]
            offer = _Offer(os.fsencode(name), *_signature(container), boxes)
            with _Coordinator(
                name, container, peers, durable=durable, started=started
            ) as coordinator:
                task = peers.exchange("share", offer, coordinator.divide, of=_Task)
                part = _write_share(task, container, peers, coordinator.fd)
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
    boxes: list[Box]
    """What the rank has of each sharded tensor."""


class _Task(msgspec.Struct):
    """What a rank is to write, and where."""

    temporary_path: bytes
    share: Share


class _Part(msgspec.Struct):
    """What a rank has written."""

    written: Written
    crcs: dict[int, int]
    """`shares.crc32_parts`."""


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

    def divide(self, offers: list[_Offer]) -> list[_Task]:
        """Make the file, with room for all of it, and tell each rank what to write."""
        _compare(offers)
        self._division = Division(
            self._container,
            ranks=len(offers),
            block_bytes=CHUNK_BYTES_DEFAULT,
            boxes=[offer.boxes for offer in offers],
        )
        replacement = self._replacement = self._stack.enter_context(Replacement(self._name))
        replacement.reserve(self._container.bytes)
        self._laid_out = time.monotonic()
        path = os.fsencode(replacement.temporary_path)
        return [_Task(path, share) for share in self._division.shares]

    def finish(self, parts: list[_Part]) -> list[_Finished]:
        """Write what is left, and give the file its name."""
        assert self._replacement is not None
        assert self._division is not None
        rest = self._division.finish([part.crcs for part in parts])
        _write(rest, self._container, fd=self._replacement.fd, threads=1)
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
                " each rank, give group=fpfs.client.ALONE",
            )
        if offer.digest != offers[0].digest:
            raise RankFailed(
                rank,
                f"saves {_described(offer)}, and rank 0 {_described(offers[0])}: all ranks save"
                " tensors of the same names, types and shapes, in the same order",
            )


def _described(offer: _Offer) -> str:
    return f"{offer.tensors} tensors in {format_size(offer.bytes_of_storages)}"


def _write_share(task: _Task, container: Container, peers: Peers, own_fd: int) -> _Part:
    """Write what this rank has to, by `own_fd` if that is open."""
    started = time.monotonic()
    share, threads = task.share, max(1, default_threads() // peers.size)
    copied_bytes, crcs = 0, dict[int, int]()
    if share.pieces:
        fd = own_fd if own_fd >= 0 else _open(task, peers)
        try:
            copied_bytes, of_runs = _write(
                share, container, fd=fd, threads=threads, check=peers.check
            )
            crcs = crc32_parts(share, of_runs, container)
            if own_fd < 0 and not mount_containing(os.fsdecode(task.temporary_path)).is_fpfs:
                # Rank 0 flushes what it knows of, which may be less on another machine.
                os.fsync(fd)
        finally:
            if own_fd < 0:
                os.close(fd)
    seconds = time.monotonic() - started
    return _Part(Written(peers.rank, share.total_bytes, seconds, copied_bytes, threads), crcs)


def _open(task: _Task, peers: Peers) -> int:
    try:
        return os.open(task.temporary_path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        peers.check()  # Who failed had it removed.
        name = os.fsdecode(task.temporary_path)
        raise FileNotFoundError(
            error.errno, "all ranks must see the directory that rank 0 sees", name
        ) from error


def _write(
    share: Share,
    container: Container,
    *,
    fd: int,
    threads: int,
    check: Callable[[], object] = lambda: None,
) -> tuple[int, list[list[int]]]:
    """Write a share; returns how much was copied first, and the CRC32s of each piece's runs.

    `check` may end it.
    """
    text = (ctypes.c_char * len(share.text)).from_buffer(share.text)
    base = ctypes.addressof(text)
    runs, kept = [], list[Any]()
    for index, piece in enumerate(share.pieces):
        if piece.part == TEXT:
            address = base
        else:
            record = container.parts[piece.part]
            assert isinstance(record, Record)
            address, owner = _in_memory(record, piece)
            kept.append(owner)
        runs += [(offset, address + start, piece.bytes, index) for offset, start in piece.runs()]
    # Pieces of several runs may reach into each other.
    runs.sort()
    numbers = {index: number for number, (_, _, _, index) in enumerate(runs)}
    writer = write_pieces(
        [(address, count, offset) for offset, address, count, _ in runs],
        [(place, numbers[index]) for place, index in share.crc_places],
        owners=(text, kept),
        fd=fd,
        request_bytes=REQUEST_BYTES,
        threads=threads,
    )
    run_to_end(writer, check=check)
    crcs: list[list[int]] = [[] for _ in share.pieces]
    for (_, _, _, index), crc in zip(runs, writer.crc32(), strict=True):
        crcs[index].append(crc)
    return writer.copied_bytes, crcs


def _in_memory(record: Record, piece: Piece) -> tuple[int, Any]:
    """Where in the processor's memory the piece's `start` is counted from, and whose that is."""
    storage, start = record.storage, record.start + piece.start
    if storage.device.type == "cpu":
        return storage.data_ptr() + record.start, storage
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    copy = whole[start : start + piece.total_bytes].cpu()
    return copy.data_ptr() - piece.start, copy
