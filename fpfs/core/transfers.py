"""Bytes between memory and a file, moved by native threads without the GIL.

A piece is ``(address, bytes, offset in the file)``, the place of a CRC32 ``(offset in the file,
index of a piece)``: native/src/client/piece_writer.h. What a piece of address 0 has is in strips:
``(process or 0, address, offset in the file, bytes of a run, count, step)``, strips.h. A transfer
keeps `owners`, whose memory the pieces are, and a descriptor of its own until it is closed, or
goes, whatever interrupts its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fpfs import _native

SIGNALS_S = 0.1
"""How long a signal waits for the interpreter while native threads work."""

PieceReader = _native.PieceReader
PieceWriter = _native.PieceWriter
allow_reading = _native.allow_reading
combine_crc32 = _native.combine_crc32
count_moved = _native.count_moved
moved_bytes = _native.moved_bytes
"""By transfers of this process, and what else is counted."""
read_pieces = _native.read_pieces
read_process = _native.read_process
reserve_file = _native.reserve_file
write_pieces = _native.write_pieces


class Transfer(Protocol):
    """Bytes that others move."""

    def wait(self, seconds: float, /) -> bool:
        """Whether all are moved, or something has failed and nothing is under way."""

    def check(self) -> None:
        """Raise what has failed."""

    def close(self) -> None:
        """Return when nothing is under way."""


def run_to_end(transfer: Transfer, *, check: Callable[[], object] = lambda: None) -> None:
    """Wait until everything is moved. OSError of the first failure; nothing is under way then.

    What `check`, which is called now and then meanwhile, raises ends the transfer as well.
    """
    try:
        while not transfer.wait(SIGNALS_S):
            check()
        transfer.check()
    finally:
        transfer.close()


def write_memory(
    pieces: Sequence[tuple[int, int, int]],
    owners: object,
    *,
    fd: int,
    request_bytes: int,
    threads: int,
) -> list[int]:
    """Write pieces of this process's memory to a file; returns their CRC32s, when all are there."""
    writer = write_pieces(
        pieces,
        [],
        strips=[],
        owners=owners,
        fd=fd,
        request_bytes=request_bytes,
        threads=threads,
    )
    run_to_end(writer)
    return writer.crc32()


__all__ = [
    "PieceReader",
    "PieceWriter",
    "Transfer",
    "allow_reading",
    "combine_crc32",
    "count_moved",
    "moved_bytes",
    "read_pieces",
    "read_process",
    "reserve_file",
    "run_to_end",
    "write_memory",
    "write_pieces",
]
