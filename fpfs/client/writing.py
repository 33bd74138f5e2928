"""What one rank does in a save: it writes its share."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from fpfs.client.container import Container, Record
from fpfs.client.gathering import Source, Strip, gone_of, strips_of
from fpfs.client.peers import GONE, Peers, RankFailed
from fpfs.client.plan import Piece, Share
from fpfs.core.mounts import mount_containing
from fpfs.core.transfers import PieceWriter, combine_crc32, run_to_end, write_pieces

REQUEST_BYTES = 256 * 1024
"""So small that what was summed up is still in the processor's cache when the kernel copies it:
3.4 GB/s instead of 2.7 with 1 MiB (Xeon with 2 MiB of L2 a core, 2 cores, November 2026)."""


class Progress:
    """How much of its part of a save a rank has written. For any thread."""

    def __init__(self) -> None:
        self.total_bytes = 0
        """Of the files that are agreed on by now."""
        self._lock = threading.Lock()
        self._before = 0
        self._writer: PieceWriter | None = None

    @property
    def bytes_written(self) -> int:
        """So far."""
        with self._lock:
            return self._before + (0 if self._writer is None else self._writer.bytes_written)

    @contextlib.contextmanager
    def follow(self, writer: PieceWriter) -> Iterator[None]:
        """Count what is written meanwhile."""
        with self._lock:
            self._writer = writer
        try:
            yield
        finally:
            with self._lock:
                self._before += writer.bytes_written
                # It has the memory that it writes.
                self._writer = None


class Written(NamedTuple):
    """What one rank wrote of a file."""

    rank: int
    bytes: int
    seconds: float
    copied_bytes: int
    """Copied before they were written: what is not a tensor's, and tensors of a few KiB."""
    threads: int

    def and_then(self, other: Written) -> Written:
        """Return what the rank wrote in all."""
        return self._replace(
            bytes=self.bytes + other.bytes,
            seconds=self.seconds + other.seconds,
            copied_bytes=self.copied_bytes + other.copied_bytes,
        )


class Located(msgspec.Struct):
    """Where others read what a rank has of tensors that are cut along an inner dimension."""

    pid: int
    addresses: dict[int, int]
    """By the records' numbers. 0: it has nothing."""


class Task(msgspec.Struct):
    """What a rank cannot know of what it is to write, from rank 0."""

    temporary_path: bytes
    sources: dict[int, list[Source]]
    """Of the records that the rank writes of and several ranks have parts of, by their numbers."""


class Done(msgspec.Struct):
    """What a rank has written."""

    written: Written
    crcs: dict[int, int]
    """What this rank's bytes of each record are of its CRC32 (`crc32_parts`)."""

    def and_then(self, other: Done) -> Done:
        """Return what the rank wrote in all, of different records."""
        return Done(self.written.and_then(other.written), self.crcs | other.crcs)


def write_share(
    share: Share,
    task: Task,
    container: Container,
    peers: Peers,
    own_fd: int,
    threads: int,
    progress: Progress,
) -> Done:
    """Write what this rank has to, by `own_fd` if that is open."""
    started = time.monotonic()
    strips = list[Strip]()
    for number, sources in task.sources.items():
        record = container.record(number)
        strips += strips_of(record, sources, offset=record.offset, peers=peers)
    copied_bytes, crcs = 0, dict[int, int]()
    if share.pieces or share.texts:
        fd = own_fd if own_fd >= 0 else _open(task, peers)
        try:
            copied_bytes, of_runs = write(
                share,
                container,
                fd=fd,
                threads=threads,
                progress=progress,
                gathered=task.sources,
                strips=strips,
                check=peers.check,
            )
            crcs = crc32_parts(share.pieces, of_runs, container)
            if own_fd < 0 and not mount_containing(os.fsdecode(task.temporary_path)).is_fpfs:
                # Rank 0 flushes what it knows of, which may be less on another machine.
                os.fsync(fd)
        except OSError as error:
            # Who failed or died no longer has what was read there.
            gone = gone_of(itertools.chain.from_iterable(task.sources.values()))
            peers.check()
            for rank in gone:
                raise RankFailed(rank, GONE, gone=True) from error
            raise
        finally:
            if own_fd < 0:
                os.close(fd)
    seconds = time.monotonic() - started
    bytes_written = share.bytes + sum(container.text_part(number).bytes for number in share.texts)
    return Done(Written(peers.rank, bytes_written, seconds, copied_bytes, threads), crcs)


def _open(task: Task, peers: Peers) -> int:
    try:
        return os.open(task.temporary_path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        peers.check()  # Who failed had it removed.
        name = os.fsdecode(task.temporary_path)
        raise FileNotFoundError(
            error.errno, "all ranks must see the directory that rank 0 sees", name
        ) from error


def write(
    share: Share,
    container: Container,
    *,
    fd: int,
    threads: int,
    progress: Progress | None = None,
    gathered: Collection[int] = (),
    strips: Sequence[Strip] = (),
    check: Callable[[], object] = lambda: None,
) -> tuple[int, list[list[int]]]:
    """Write a share; returns how much was copied first, and the CRC32s of each piece's runs.

    gathered: the numbers of records that lie in `strips`. `check` may end it.
    """
    memory = (ctypes.c_char * len(container.text)).from_buffer(container.text)
    runs, owners = [], list[Any]()
    for index, piece in enumerate(share.pieces):
        if piece.record in gathered:
            runs.append((piece.offset, 0, piece.bytes, index))
            continue
        address, owner = _in_memory(container.record(piece.record), piece)
        owners.append(owner)
        runs += [(offset, address + start, piece.bytes, index) for offset, start in piece.runs()]
    for number in share.texts:
        text = container.text_part(number)
        if text.bytes == 0:
            continue
        runs.append((text.offset, ctypes.addressof(memory) + text.start, text.bytes, -1))
    # Pieces of several runs may reach into each other.
    runs.sort()
    of_records = {
        share.pieces[index].record: number for number, (*_, index) in enumerate(runs) if index >= 0
    }
    # The text behind a record is in the share if all of the record is, in one piece.
    places = [
        (offset, of_records[record])
        for number in share.texts
        for record, offset in container.crc_places.get(number, ())
        if record in of_records
    ]
    writer = write_pieces(
        [(address, count, offset) for offset, address, count, _ in runs],
        places,
        strips=list(strips),
        owners=(memory, owners),
        fd=fd,
        request_bytes=REQUEST_BYTES,
        threads=threads,
    )
    with (progress or Progress()).follow(writer):
        run_to_end(writer, check=check)
    crcs: list[list[int]] = [[] for _ in share.pieces]
    for (*_, index), crc in zip(runs, writer.crc32(), strict=True):
        if index >= 0:
            crcs[index].append(crc)
    return writer.copied_bytes, crcs


def put_crc32(
    numbers: Iterable[int], crcs: Iterable[Mapping[int, int]], container: Container
) -> None:
    """Write CRC32s into the texts `numbers`, given what each rank's bytes are of them."""
    whole = [0] * (len(container.parts) // 2)
    for found in crcs:
        for record, crc in found.items():
            whole[record] ^= crc
    for number in numbers:
        text = container.text_part(number)
        for record, offset in container.crc_places.get(number, ()):
            at = text.start + (offset - text.offset)
            struct.pack_into("<L", container.text, at, whole[record])


def crc32_parts(
    pieces: Sequence[Piece],
    crcs: Sequence[Sequence[int]],
    container: Container,
) -> dict[int, int]:
    """What the pieces are of the CRC32 of each record, by the record's number.

    crcs: the CRC32 of each run of each piece. A CRC32 is the sum (exclusive or) of what it would be
    of each part, were there only zeros beside it.
    """
    found: dict[int, int] = {}
    for piece, of_runs in zip(pieces, crcs, strict=True):
        record = container.record(piece.record)
        end = record.offset + record.bytes
        for (offset, _), crc in zip(piece.runs(), of_runs, strict=True):
            shifted = combine_crc32(crc, 0, end - offset - piece.bytes)
            found[piece.record] = found.get(piece.record, 0) ^ shifted
    return found


def _in_memory(record: Record, piece: Piece) -> tuple[int, Any]:
    """Where in the processor's memory the piece's `start` is counted from, and whose that is."""
    storage, start = record.storage, record.start + piece.start
    if storage.device.type == "cpu":
        return storage.data_ptr() + record.start, storage
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    copy = whole[start : start + piece.total_bytes].cpu()
    return copy.data_ptr() - piece.start, copy


__all__ = [
    "Done",
    "Located",
    "Progress",
    "Task",
    "Written",
    "crc32_parts",
    "put_crc32",
    "write",
    "write_share",
]
