"""Makes one ordinary torch.save file of shares, and checks shares by their CRC32s.

Threads read a share block by block; each range has a CRC32 of its own.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fpfs.client.boxes import Ints
from fpfs.client.paths import default_threads, naming, resolve
from fpfs.client.replacement import Replacement
from fpfs.client.shares.format import Damaged, Manifest
from fpfs.client.shares.reading import OpenShare, Shares, newest_manifest, opened_shares
from fpfs.core.transfers import combine_crc32, write_memory

BLOCK_BYTES = 16 * 1024 * 1024
RUNS_MAX = 100_000
"""Of a block."""
REQUEST_BYTES = 4 * 1024 * 1024

Progress = Callable[[int, int], None]
"""How many bytes are done, and of how many."""
Stored = Callable[[memoryview, list[tuple[int, int, int]]], None]
"""Takes a block, and which of its runs belong where: (begin in the block, bytes, offset)."""


class Checked(NamedTuple):
    """What has been found of a share."""

    share: int
    node: str
    path: str | None
    """None: it is in no directory."""
    bytes: int
    problem: str | None
    """None: all is well."""


def gather(directories: Sequence[str], path: str, *, progress: Progress) -> int:
    """Make the torch.save file of a checkpoint at `path`; returns how many bytes it has.

    It takes the name when it is whole and durable. Raises OSError, which names `path` or its
    directory if it is theirs, and `Damaged`.
    """
    name = resolve(path)
    with opened_shares([resolve(each) for each in directories]) as (manifest, shares):
        total = manifest.bytes
        with naming(name), Replacement(name) as replacement:
            replacement.reserve(total)
            fd = replacement.fd

            def store(block: memoryview, runs: list[tuple[int, int, int]]) -> None:
                memory = (ctypes.c_char * len(block)).from_buffer(block)
                address = ctypes.addressof(memory)
                write_memory(
                    [(address + begin, count, offset) for begin, count, offset in runs],
                    memory,
                    fd=fd,
                    request_bytes=REQUEST_BYTES,
                    threads=1,
                )

            Shares(manifest, shares).check_whole()
            done = _Progress(progress, total)
            for share in shares:
                problem = _check(share, store, done)
                if problem is not None:
                    raise Damaged(f"{share.path}: {problem}")
            replacement.commit(durable=True)
    return total


def verify(directories: Sequence[str], *, progress: Progress) -> tuple[Manifest, list[Checked]]:
    """Return the newest checkpoint of the directories, and what there is of each of its shares.

    A share that several directories have is checked in each. Raises OSError of directories that
    have no checkpoint, and `Damaged` of what is no manifest.
    """
    names = [resolve(each) for each in directories]
    manifest = newest_manifest(names)
    places = [
        (number, os.path.join(name, share.name))
        for number, share in enumerate(manifest.shares)
        for name in dict.fromkeys(names)
    ]
    there = [place for place in places if os.path.exists(place[1])]
    total = sum(manifest.shares[number].bytes for number, _ in there)
    done = _Progress(progress, total)
    found = []
    for number, file in enumerate(manifest.shares):
        paths = [path for of, path in there if of == number]
        if not paths:
            found.append(Checked(number, file.node, None, file.bytes, "is in no directory"))
        for path in paths:
            problem: str | None
            try:
                with OpenShare(path, manifest, number) as share:
                    problem = _check(share, None, done)
            except (OSError, Damaged) as error:
                problem = str(error)
            found.append(Checked(number, file.node, path, file.bytes, problem))
    return manifest, found


class _Progress:
    """Counts what several threads have done."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._progress(self._done, self._total)


class Block(NamedTuple):
    """Bytes of a share that lie behind each other."""

    at: int
    bytes: int
    first: int
    """The first range of which it has bytes."""
    end: int
    """Behind the last one."""


def blocks_of(ranges: Ints) -> Iterator[Block]:
    """Cut a share's ranges, which are in order, at blocks' ends."""
    sizes = ranges[:, 1] * ranges[:, 2]
    begins, ends = ranges[:, 4], ranges[:, 4] + sizes
    first = 0
    at = int(begins[0]) if len(ranges) else 0
    while first < len(ranges):
        at = max(at, int(begins[first]))
        # As far as there are no gaps, and not too many runs.
        room = min(BLOCK_BYTES, RUNS_MAX * max(1, int(ranges[first, 1])))
        last, runs = first, 0
        end = at
        while last < len(ranges) and begins[last] <= end and runs < RUNS_MAX:
            runs += int(ranges[last, 2])
            end = min(int(ends[last]), at + room)
            if end < ends[last]:
                break
            last += 1
        stop = last + 1 if last < len(ranges) and end > begins[last] else last
        yield Block(at, end - at, first, stop)
        at, first = end, last


def runs_of_block(ranges: Ints, block: Block) -> list[tuple[int, int, int]]:
    """The runs of a block: begin in it, bytes, and offset in the torch.save file, by the latter."""
    found = []
    end = block.at + block.bytes
    for offset, size, count, step, at, _ in ranges[block.first : block.end].tolist():
        low = max(0, (block.at - at) // size)
        high = min(count, -((at - end) // size))
        for run in range(low, high):
            begin = max(block.at, at + run * size)
            stop = min(end, at + (run + 1) * size)
            within = begin - (at + run * size)
            found.append((begin - block.at, stop - begin, offset + run * step + within))
    return sorted(found, key=lambda run: run[2])


def _check(share: OpenShare, store: Stored | None, done: _Progress) -> str | None:
    """Read a share; what is wrong with it. `store` takes what was read."""
    ranges = share.ranges[np.argsort(share.ranges[:, 4], kind="stable")]
    own = threading.local()

    def check(block: Block) -> list[tuple[int, int, int]]:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        view = own.buffer[: block.bytes]
        share.read([(view, block.at)])
        crcs = []
        for index in range(block.first, block.end):
            _, size, count, _, at, _ = ranges[index].tolist()
            begin, end = max(block.at, at), min(block.at + block.bytes, at + size * count)
            part = view[begin - block.at : end - block.at]
            crcs.append((index, zlib.crc32(part), len(part)))
        if store is not None:
            store(view, runs_of_block(ranges, block))
        done.add(block.bytes)
        return crcs

    whole = [0] * len(ranges)
    for crcs in _in_threads(check, blocks_of(ranges)):
        for index, crc, count in crcs:
            whole[index] = combine_crc32(whole[index], crc, count)
    bad = np.flatnonzero(np.array(whole, dtype=np.int64) != ranges[:, 5])
    if len(bad) == 0:
        return None
    damaged = int((ranges[bad, 1] * ranges[bad, 2]).sum())
    at = share.begin + int(ranges[bad[0], 4])
    return f"{len(bad)} ranges, of {damaged} bytes, are damaged, the first from byte {at} on"


def _in_threads(
    work: Callable[[Block], list[tuple[int, int, int]]], blocks: Iterable[Block]
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what `work` returns of each block, in order."""
    with concurrent.futures.ThreadPoolExecutor(default_threads()) as executor:
        try:
            yield from executor.map(work, blocks)
        finally:
            executor.shutdown(cancel_futures=True)


__all__ = ["Block", "Checked", "blocks_of", "gather", "runs_of_block", "verify"]
