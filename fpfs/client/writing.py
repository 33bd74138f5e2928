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

from fpfs.client.accelerators import Copies, Moment, memory_for, now
from fpfs.client.container import Container
from fpfs.client.gathering import Source, Strip, gone_of, strips_of
from fpfs.client.peers import ALONE, GONE, Peers, RankFailed
from fpfs.client.plan import Piece, Share
from fpfs.client.snapshot import ALIGNMENT, bytes_of
from fpfs.core.mounts import mount_containing
from fpfs.core.transfers import PieceWriter, combine_crc32, moved_bytes, run_to_end, write_pieces

REQUEST_BYTES = 256 * 1024
"""So small that what was summed up is still in the processor's cache when the kernel copies it:
3.4 GB/s instead of 2.7 with 1 MiB (Xeon with 2 MiB of L2 a core, 2 cores, November 2026)."""

WAVE_BYTES = 64 * 1024 * 1024
"""What is brought from other devices at a time: there are two buffers of that size."""

_LITTLE = struct.Struct("<L")


class Progress:
    """How much of its part of a save a rank has written. For any thread. peers: all ranks."""

    def __init__(self, peers: Peers = ALONE) -> None:
        self._peers = peers
        self.total_bytes = 0
        """Of the files that are agreed on by now."""
        self.given_up: BaseException | None = None
        """Why nobody waits for the save any more."""
        self._lock = threading.Lock()
        self._before = 0
        self._writer: PieceWriter | None = None

    @property
    def bytes_written(self) -> int:
        """So far."""
        with self._lock:
            return self._before + (0 if self._writer is None else self._writer.bytes_written)

    def moved(self) -> object:
        """Return another value than before if any rank is known to have moved bytes since."""
        return moved_bytes(), self._peers.signed_s

    def check(self) -> None:
        """Raise if the save is given up, and so may not get its name."""
        if self.given_up is not None:
            raise self.given_up

    @contextlib.contextmanager
    def track(self, writer: PieceWriter) -> Iterator[None]:
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
    durable: bool = False
    """Whether the rank wants them to survive power loss."""

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
    runs, owners, elsewhere = [], list[Any](), dict[int, torch.Tensor]()
    for index, piece in enumerate(share.pieces):
        if piece.record in gathered:
            runs.append(_Run(piece.offset, 0, piece.bytes, index))
            continue
        storage, start = container.record(piece.record)[2:4]
        if storage.device.type == "cpu":
            owners.append(storage)
            address = storage.data_ptr() + start
        else:
            first = start + piece.start
            elsewhere[index] = bytes_of(storage, first, first + piece.total_bytes)
            address = -piece.start
        runs += [_Run(offset, address + at, piece.bytes, index) for offset, at in piece.runs()]
    for number in share.texts:
        text = container.text_part(number)
        if text.bytes > 0:
            address = ctypes.addressof(memory) + text.start
            runs.append(_Run(text.offset, address, text.bytes, -1 - number))
    # Pieces of several runs may reach into each other.
    runs.sort()
    sums = _Sums(share.pieces, container)
    copied_bytes = 0
    for wave in _brought(runs, elsewhere, after=container.moment, check=check):
        writer = write_pieces(
            [(run.address, run.bytes, run.offset) for run in wave.runs],
            sums.places(wave.runs),
            strips=list(strips),
            owners=(memory, owners, wave.buffer),
            fd=fd,
            request_bytes=REQUEST_BYTES,
            threads=threads,
            first_crc=sums.of_begin,
        )
        with (progress or Progress()).track(writer):
            run_to_end(writer, check=check)
        sums.add(wave, writer.crc32())
        copied_bytes += writer.copied_bytes
    return copied_bytes, sums.of_pieces


class _Run(NamedTuple):
    """Bytes that lie in one piece in the file and in memory."""

    offset: int
    """In the file."""
    address: int
    """0: they are in strips. Of what another device has: where in the piece's bytes."""
    bytes: int
    owner: int
    """The piece; -1 - k: text k."""


class _Wave(NamedTuple):
    """Runs that are written together, in order, all in the processor's memory."""

    runs: list[_Run]
    is_cut: bool
    """Whether the last one goes on in the next wave."""
    buffer: torch.Tensor | None
    """What has those of other devices."""


def _brought(
    runs: list[_Run],
    elsewhere: Mapping[int, torch.Tensor],
    *,
    after: Moment | None,
    check: Callable[[], object],
) -> Iterator[_Wave]:
    """All runs in waves. While one is written, the next one's bytes come from their devices.

    elsewhere: of pieces that another device has, by their numbers.
    """
    if not elsewhere:
        yield _Wave(runs, is_cut=False, buffer=None)
        return
    devices = {tensor.device for tensor in elsewhere.values()}
    waves = list(_cut_into_waves(runs, elsewhere))
    size = max(sum(_room(run) for run in wave if run.owner in elsewhere) for wave, _ in waves)
    buffers = [memory_for(size, devices) for _ in waves[:2]]
    copies = Copies(after or now(devices))
    brought = _bring(waves[0][0], elsewhere, buffers[0], copies)
    for number, (_, is_cut) in enumerate(waves):
        copies.wait(check=check)
        wave = _Wave(brought, is_cut, buffers[number % 2])
        if number + 1 < len(waves):
            # What the buffer had is written.
            other = buffers[(number + 1) % 2]
            brought = _bring(waves[number + 1][0], elsewhere, other, copies)
        yield wave


def _cut_into_waves(
    runs: Iterable[_Run], elsewhere: Mapping[int, torch.Tensor]
) -> Iterator[tuple[list[_Run], bool]]:
    """Waves, of other devices at most WAVE_BYTES each, and whether their last run is cut."""
    wave, room = list[_Run](), WAVE_BYTES
    for each in runs:
        run = each
        while run.owner in elsewhere and _room(run) > room:
            # Where a request ends.
            fits = (run.offset + room) // REQUEST_BYTES * REQUEST_BYTES - run.offset
            if fits > 0:
                wave.append(run._replace(bytes=fits))
                offset, address, count, owner = run
                run = _Run(offset + fits, address + fits, count - fits, owner)
            yield wave, fits > 0
            wave, room = [], WAVE_BYTES
        wave.append(run)
        if run.owner in elsewhere:
            room -= _room(run)
    yield wave, False


def _room(run: _Run) -> int:
    return -(-run.bytes // ALIGNMENT) * ALIGNMENT


def _bring(
    runs: Iterable[_Run],
    elsewhere: Mapping[int, torch.Tensor],
    buffer: torch.Tensor,
    copies: Copies,
) -> list[_Run]:
    """Begin to copy what lies on other devices; returns the runs as they lie then."""
    brought, at = [], 0
    for run in runs:
        if run.owner not in elsewhere:
            brought.append(run)
            continue
        source = elsewhere[run.owner][run.address : run.address + run.bytes]
        copies.begin(buffer[at : at + run.bytes], source)
        brought.append(run._replace(address=buffer.data_ptr() + at))
        at += _room(run)
    return brought


class _Sums:
    """CRC32s of what is written, wave after wave."""

    def __init__(self, pieces: Sequence[Piece], container: Container) -> None:
        self._pieces, self._container = pieces, container
        self.of_pieces: list[list[int]] = [[] for _ in pieces]
        """Of the runs of each."""
        self.of_begin = 0
        """Of what was written of the next wave's first run."""
        self._of_records = dict[int, int]()

    def places(self, runs: Sequence[_Run]) -> list[tuple[int, int]]:
        """Where in a wave's texts is a CRC32 of one of its runs; others that are known are entered.

        The text behind a record is in a share if all of the record is, in one piece.
        """
        last = {
            self._pieces[run.owner].record: number
            for number, run in enumerate(runs)
            if run.owner >= 0
        }
        found = []
        for run in runs:
            if run.owner >= 0:
                continue
            text = self._container.text_part(-1 - run.owner)
            for record, offset in self._container.crc_places.get(-1 - run.owner, ()):
                if record in last:
                    found.append((offset, last[record]))
                elif record in self._of_records:
                    at = text.start + (offset - text.offset)
                    _LITTLE.pack_into(self._container.text, at, self._of_records[record])
        return found

    def add(self, wave: _Wave, crcs: Sequence[int]) -> None:
        """A wave is written."""
        self.of_begin = crcs[-1] if wave.is_cut else 0
        whole = len(crcs) - wave.is_cut
        for run, crc in zip(wave.runs[:whole], crcs, strict=False):
            if run.owner >= 0:
                self.of_pieces[run.owner].append(crc)
                self._of_records[self._pieces[run.owner].record] = crc


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
            _LITTLE.pack_into(container.text, at, whole[record])


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
