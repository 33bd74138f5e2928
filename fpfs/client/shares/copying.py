"""Copies of other nodes' shares, so that a node that is lost loses nothing.

Nodes are in groups of as many as there are copies, each of which has the shares of all (Gemini,
SOSP '23: fewer pairs of lost nodes lose something than where each node's share goes to the next).
If nodes are left over, they are of the last group, where each share goes to the next nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Mapping

from fpfs.client.parallel_file import Piece
from fpfs.client.replacement import Replacement
from fpfs.client.shares.format import Identity, Manifest, share_name
from fpfs.client.shares.reading import OpenShare
from fpfs.client.shares.serving import Serving
from fpfs.client.writing import REQUEST_BYTES
from fpfs.core.transfers import Transfer, run_to_end, write_memory

BLOCK_BYTES = 32 * 1024 * 1024


def holders(share: int, nodes: int, copies: int) -> list[int]:
    """Return the nodes that have a share, by their numbers; its own is the first."""
    group = min(share // copies, nodes // copies - 1)
    first = group * copies
    size = nodes - first if group == nodes // copies - 1 else copies
    return [first + (share - first + number) % size for number in range(copies)]


class Copies:
    """The shares of other nodes that a node keeps, made beside their names. It has room for them.

    sizes: of the shares, by their numbers.
    """

    def __init__(
        self, directory: str, checkpoint: Identity, nodes: int, sizes: Mapping[int, int]
    ) -> None:
        self._paths: dict[int, str] = {}
        self._files: dict[int, Replacement] = {}
        self._named: list[str] = []
        try:
            for share, size in sizes.items():
                path = os.path.join(directory, share_name(share, nodes, checkpoint))
                self._paths[share] = path
                self._files[share] = Replacement(path)
                self._files[share].reserve(size)
        except BaseException:
            self.discard()
            raise

    def fetch(
        self, serving: Serving, servers: Mapping[int, int], manifest: Manifest, threads: int
    ) -> None:
        """Read the shares, each from a rank, and make the copies durable, with their names.

        servers: the ranks, by the shares' numbers.
        """
        for share, file in self._files.items():

            def start(pieces: list[Piece], owners: object, share: int = share) -> Transfer:
                return serving.start(servers[share], share, pieces, owners)

            _copy(start, manifest.shares[share].bytes, file.fd, threads)
            file.complete(durable=True)
            file.take_name()
            self._named.append(self._paths[share])
            file.flush_name()
            # Whether it is what the manifest says.
            with OpenShare(self._paths[share], manifest, share):
                pass

    def remove(self) -> None:
        """Remove those that have names."""
        for path in self._named:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def discard(self) -> None:
        """Remove those that have no names, and close what is open."""
        for file in self._files.values():
            file.discard()


def _copy(
    start: Callable[[list[tuple[int, int, int]], object], Transfer],
    size: int,
    fd: int,
    threads: int,
) -> None:
    """Write what `start` reads; while a block is written, the next one is read."""
    buffers = [mmap.mmap(-1, min(BLOCK_BYTES, max(1, size))) for _ in range(2)]
    memories = [(ctypes.c_char * len(buffer)).from_buffer(buffer) for buffer in buffers]
    offsets = range(0, size, BLOCK_BYTES)

    def begin(number: int) -> Transfer:
        memory, offset = memories[number % 2], offsets[number]
        count = min(BLOCK_BYTES, size - offset)
        return start([(ctypes.addressof(memory), count, offset)], memory)

    with contextlib.ExitStack() as closing:
        reading = begin(0)
        closing.callback(reading.close)
        for number, offset in enumerate(offsets):
            run_to_end(reading)
            if number + 1 < len(offsets):
                reading = begin(number + 1)
                closing.callback(reading.close)
            memory = memories[number % 2]
            piece = (ctypes.addressof(memory), min(BLOCK_BYTES, size - offset), offset)
            write_memory([piece], memory, fd=fd, request_bytes=REQUEST_BYTES, threads=threads)


__all__ = ["Copies", "holders"]
