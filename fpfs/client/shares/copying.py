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
from collections.abc import Mapping

from fpfs.client.parallel_file import Piece
from fpfs.client.paths import naming
from fpfs.client.replacement import Replacement
from fpfs.client.shares.blocks import (
    PartCrc32,
    RangeCrc32s,
    blocks_of,
    in_order,
    parts_of_block,
)
from fpfs.client.shares.format import Damaged, Identity, Manifest, share_name
from fpfs.client.shares.serving import FarShare, Serving
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

        servers: the ranks, by the shares' numbers. `Damaged`: what has come of one is not what its
            CRC32s say; it gets no name.
        """
        shares = {
            number: FarShare(serving, servers[number], manifest, number) for number in self._files
        }
        for share in shares.values():
            share.begin_opening()
        for number, file in self._files.items():
            shares[number].finish_opening()
            _copy(shares[number], file.fd, threads)
            file.complete(durable=True)
            file.take_name()
            self._named.append(self._paths[number])
            file.flush_name()

    def remove(self) -> None:
        """Remove those that have names."""
        for path in self._named:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def discard(self) -> None:
        """Remove those that have no names, and close what is open."""
        for file in self._files.values():
            file.discard()


def _copy(share: FarShare, fd: int, threads: int) -> None:
    """Write a share to a file; while a block is written, the next one is read."""
    ranges = in_order(share.ranges)
    crcs = RangeCrc32s(ranges)
    blocks = list(blocks_of(ranges, BLOCK_BYTES))
    room = max((block.bytes for block in blocks), default=1)
    buffers = [mmap.mmap(-1, room) for _ in range(2)]
    memories = [(ctypes.c_char * room).from_buffer(buffer) for buffer in buffers]

    def begin(number: int) -> Transfer:
        memory, block = memories[number % 2], blocks[number]
        piece = (ctypes.addressof(memory), block.bytes, share.begin + block.at)
        return share.start([piece], memory)

    def write(pieces: list[Piece], owners: object) -> list[int]:
        return write_memory(pieces, owners, fd=fd, request_bytes=REQUEST_BYTES, threads=threads)

    header = (ctypes.c_char * share.begin).from_buffer(share.header)
    write([(ctypes.addressof(header), share.begin, 0)], header)
    with contextlib.ExitStack() as closing:
        for number, block in enumerate(blocks):
            if number == 0:
                reading = begin(number)
                closing.callback(reading.close)
            with naming(share.path):
                run_to_end(reading)
            if number + 1 < len(blocks):
                reading = begin(number + 1)
                closing.callback(reading.close)
            parts = parts_of_block(ranges, block)
            memory = memories[number % 2]
            address, offset = ctypes.addressof(memory), share.begin + block.at
            pieces = [(address + low, high - low, offset + low) for _, low, high in parts]
            found = write(pieces, memory)
            crcs.add(
                PartCrc32(part, crc, high - low)
                for (part, low, high), crc in zip(parts, found, strict=True)
            )
    problem = crcs.problem(share.begin)
    if problem is not None:
        raise Damaged(f"{share.path}: {problem}")


__all__ = ["Copies", "holders"]
