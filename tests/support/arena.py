"""The staging arena as a test damages it: its tables, and single bits of them.

docs/format.md describes it. Concurrency: an arena is changed when no server has it.
"""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import NamedTuple

from fpfs.daemon.devices.arena import arena_path
from fpfs.daemon.devices.label import read_stamp
from fpfs.testing.mounted import Mount

_TABLES_AT = 168
_TABLE = struct.Struct("<IIQQ")
_TABLE_COUNT = 8
JOURNAL = 3
JOURNAL_BYTES = 64 * 1024
"""What is flipped of each area of the journal: more than a test's changes take."""


class Region(NamedTuple):
    """A table, or a part of one, by kind: 1 slots, 2 handles, 3 journal, 4 published, 0 header."""

    kind: int
    offset: int
    size: int


def path_of(mount: Mount) -> Path:
    """The arena of a mount that has died, or is alive."""
    stamp = read_stamp(str(mount.devices[0]), asked="test")
    assert stamp is not None
    return Path(arena_path(stamp.filesystem_id))


def regions(arena: Path) -> list[Region]:
    """Where the tables are."""
    with arena.open("rb") as file:
        head = file.read(4096)
    found = [Region(0, 0, 368 + 72)]
    for index in range(_TABLE_COUNT):
        kind, record_bytes, offset, count = _TABLE.unpack_from(
            head, _TABLES_AT + index * _TABLE.size
        )
        if kind == JOURNAL:
            found.append(Region(kind, offset, JOURNAL_BYTES))
        elif kind:
            found.append(Region(kind, offset, record_bytes * count))
    return found


def used_bytes(arena: Path) -> list[tuple[int, int]]:
    """Every byte of the tables that is not zero, as (kind, offset)."""
    places = []
    with arena.open("rb") as file:
        for region in regions(arena):
            content = os.pread(file.fileno(), region.size, region.offset)
            places += [(region.kind, region.offset + i) for i, byte in enumerate(content) if byte]
    return places


def random_flip(arena: Path, numbers: random.Random) -> tuple[int, int, int]:
    """A bit to flip: of a kind of table, one of its bytes that are used (or any, now and then)."""
    kind, offset, size = numbers.choice(regions(arena))
    used = [at for found, at in used_bytes(arena) if found == kind]
    if used and numbers.random() < 0.9:
        return kind, numbers.choice(used), numbers.randrange(8)
    return kind, offset + numbers.randrange(size), numbers.randrange(8)


def flip(arena: Path, offset: int, bit: int) -> None:
    """Flip one bit."""
    with arena.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)
