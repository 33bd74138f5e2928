"""Makes one ordinary torch.save file of shares, and checks shares by their CRC32s.

Threads read a share block by block; each range has a CRC32 of its own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import itertools
import mmap
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from fpfs.client.paths import default_threads, naming, resolve, resolve_file
from fpfs.client.replacement import Replacement
from fpfs.client.shares.blocks import (
    Block,
    PartCrc32,
    RangeCrc32s,
    blocks_of,
    in_order,
    parts_of_block,
    runs_of_block,
)
from fpfs.client.shares.format import Damaged, Manifest
from fpfs.client.shares.reading import (
    Failure,
    OpenShare,
    Shares,
    newest_manifests,
    open_each,
    opened_shares,
    pass_over,
    places_of,
)
from fpfs.core.transfers import write_memory

BLOCK_BYTES = 16 * 1024 * 1024
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

    A share is taken from the first directory where it is sound. The file takes its name when it is
    whole and durable. Raises OSError, which names `path` or its directory if it is theirs, and
    `Damaged`.
    """
    name, names = resolve_file(path), [resolve(each) for each in directories]
    with opened_shares(names) as (manifest, shares):
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

            Shares(manifest, [[share] for share in shares]).check_whole()
            done = _Progress(progress, total)
            for number, share in enumerate(shares):
                failures = list[Failure]()
                more = open_each(manifest, number, names, failures, after=share.path)
                _store(itertools.chain([share], more), failures, store, done)
            replacement.commit(durable=True)
    return total


def verify(directories: Sequence[str], *, progress: Progress) -> tuple[Manifest, list[Checked]]:
    """Return the newest checkpoint of the directories, and what there is of each of its shares.

    A share that several directories have is checked in each. Raises OSError of directories that
    have no checkpoint, and `Damaged` of what is no manifest.
    """
    names = [resolve(each) for each in directories]
    with contextlib.ExitStack() as closing:
        for manifest in newest_manifests(names):
            copies = [
                _open_copies(manifest, number, names, closing)
                for number in range(len(manifest.shares))
            ]
            if min(map(len, copies)) >= manifest.copies:
                break
        total = sum(
            file.bytes * len(places) for file, places in zip(manifest.shares, copies, strict=True)
        )
        done = _Progress(progress, total)
        found = []
        for number, (file, places) in enumerate(zip(manifest.shares, copies, strict=True)):
            if not places:
                found.append(Checked(number, file.node, None, file.bytes, "is in no directory"))
            for path, share in places.items():
                problem: str | None
                try:
                    problem = (
                        _check(share, None, done) if isinstance(share, OpenShare) else str(share)
                    )
                except (OSError, Damaged) as failure:
                    problem = str(failure)
                found.append(Checked(number, file.node, path, file.bytes, problem))
    return manifest, found


def _open_copies(
    manifest: Manifest, number: int, directories: Sequence[str], closing: contextlib.ExitStack
) -> dict[str, OpenShare | Failure]:
    """Return a share as each directory has it, by its path: open, or what is wrong with it."""
    found: dict[str, OpenShare | Failure] = {}
    for path in places_of(manifest.shares[number], directories):
        try:
            found[path] = closing.enter_context(OpenShare(path, manifest, number))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, Damaged) as failure:
            if isinstance(failure, OSError) and failure.errno == errno.EMFILE:
                raise
            found[path] = failure
    return found


def _store(
    copies: Iterable[OpenShare], failures: list[Failure], store: Stored, done: _Progress
) -> None:
    """Store the first copy of a share whose bytes are sound.

    failures: takes what is wrong with those before; the first is raised if none is sound.
    """
    for share in copies:
        before = done.done
        try:
            with share:
                problem = _check(share, store, done)
        except OSError as failure:
            if failure.filename != share.path:  # of what is written
                raise
            failures.append(failure)
        except Damaged as failure:
            failures.append(failure)
        else:
            if problem is None:
                pass_over(failures)
                return
            failures.append(Damaged(f"{share.path}: {problem}"))
        done.repeat(since=before)
    raise failures[0]


class _Progress:
    """Counts what several threads have done."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self.done = progress, total, 0
        self._lock = threading.Lock()

    def repeat(self, *, since: int) -> None:
        """What was done since then is done once more."""
        self._total += self.done - since

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            self._progress(self.done, self._total)


def _check(share: OpenShare, store: Stored | None, done: _Progress) -> str | None:
    """Read a share; what is wrong with it. `store` takes what was read."""
    ranges = in_order(share.ranges)
    own = threading.local()

    def check(block: Block) -> list[PartCrc32]:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        view = own.buffer[: block.bytes]
        share.read([(view, block.at)])
        found = [
            PartCrc32(number, zlib.crc32(view[begin:end]), end - begin)
            for number, begin, end in parts_of_block(ranges, block)
        ]
        if store is not None:
            store(view, runs_of_block(ranges, block))
        done.add(block.bytes)
        return found

    crcs = RangeCrc32s(ranges)
    for parts in _in_threads(check, blocks_of(ranges, BLOCK_BYTES)):
        crcs.add(parts)
    return crcs.problem(share.begin)


def _in_threads(
    work: Callable[[Block], list[PartCrc32]], blocks: Iterable[Block]
) -> Iterator[list[PartCrc32]]:
    """Yield what `work` returns of each block, in order."""
    with concurrent.futures.ThreadPoolExecutor(default_threads()) as executor:
        try:
            yield from executor.map(work, blocks)
        finally:
            executor.shutdown(cancel_futures=True)


__all__ = ["Checked", "gather", "verify"]
