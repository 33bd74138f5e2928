"""docs/format.md is what lies there: the catalog's columns, and the arena read by its tables."""

from __future__ import annotations

import re
import sqlite3
import struct
import zlib
from pathlib import Path

import pytest

from fpfs.core.engine import crc32c
from fpfs.daemon.places import arena_path
from fpfs.testing.mounted import REPOSITORY, Mount, mounted

DOCUMENT = (REPOSITORY / "docs" / "format.md").read_text()
_ROW = re.compile(r"^\| (\d+) \| (\d+)(?: each)? \| (.+) \|$", re.MULTILINE)
_CODES = {4: "<I", 8: "<Q"}


def offsets(heading: str) -> dict[str, tuple[int, int]]:
    """Offset and size of each field in the table below a heading, by the field's first words."""
    (table,) = re.findall(rf"^### {heading}\n\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    rows = _ROW.findall(table)
    fields = {re.split("[,:;]", text)[0]: (int(at), int(size)) for at, size, text in rows}
    assert len(fields) == len(rows) > 4
    return fields


def number(record: bytes, field: tuple[int, int]) -> int:
    """The number at a field of a record."""
    at, size = field
    return int(struct.unpack_from(_CODES[size], record, at)[0])


def records(arena: bytes, kind: int) -> list[bytes]:
    """The records of one of the arena's tables, as its header tells; all that were written."""
    at, size = offsets("Arena header")["8 tables"]
    for index in range(8):
        found, length, where, count = struct.unpack_from("<IIQQ", arena, at + index * size)
        if found == kind:
            table = arena[where : where + count * length]
            each = [table[start : start + length] for start in range(0, len(table), length)]
            return [record for record in each if any(record)]
    raise AssertionError(f"the header names no table of kind {kind}")


def is_sound(record: bytes, crc: tuple[int, int]) -> bool:
    """Whether a record's checksum is that of everything before it."""
    return crc32c(record[: crc[0]]) == number(record, crc)


@pytest.fixture
def arena() -> bytes:
    """The arena of a mount in which 100,000 bytes at 5,000 of an open file are acknowledged."""
    with mounted() as mount:
        return arena_while_writing(mount)


def arena_while_writing(mount: Mount) -> bytes:
    """Write into a file, and read the arena before the file is closed."""
    with (mount.root / "file").open("wb", buffering=0) as writer:
        writer.seek(5_000)
        writer.write(b"x" * 100_000)
        return Path(arena_path(mount.status().filesystem_id)).read_bytes()


def test_the_arenas_header_is_as_documented(arena: bytes) -> None:
    fields = offsets("Arena header")
    at, size = fields["magic `FPFARENA`"]
    assert arena[at : at + size] == b"FPFARENA"
    assert number(arena, fields["format"]) == 1
    length = number(arena, fields["size of the header"])
    assert length == sum(fields["CRC32C of everything before"])
    assert is_sound(arena[:length], fields["CRC32C of everything before"])
    slots = number(arena, fields["number of slots"]) * number(arena, fields["size of a slot"])
    assert number(arena, fields["where the data begins"]) + slots == len(arena)
    at, size = fields["boot id"]
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert arena[at : at + size].rstrip(b"\0") == boot_id.encode()


def test_an_acknowledged_write_is_found_in_the_arena_as_documented(arena: bytes) -> None:
    slot, handle = offsets("Arena slot record"), offsets("Arena handle record")
    (opened,) = [r for r in records(arena, 2) if number(r, handle["handle"])]
    assert is_sound(opened, handle["CRC32C of everything before"])
    filling = [r for r in records(arena, 1) if number(r, slot["state"]) == 1]
    newest = max(filling, key=lambda record: number(record, slot["sequence"]))
    assert is_sound(newest, slot["CRC32C of everything before"])
    assert number(newest, slot["inode"]) == number(opened, handle["inode"])
    assert number(newest, slot["size of the file after the last write into the slot"]) == 105_000
    assert number(newest, slot["chunk of the file that the slot holds"]) == 0
    assert number(newest, slot["number of ranges"]) == 1
    at, _ = slot["8 ranges of bytes in the chunk that were acknowledged"]
    assert struct.unpack_from("<II", newest, at) == (5_000, 105_000)


def test_the_catalogs_columns_are_as_documented() -> None:
    documented = {
        table: columns.split(", ")
        for table, columns in re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| ", DOCUMENT, re.MULTILINE)
    }
    with mounted() as mount:
        (mount.root / "file").write_bytes(b"content")
        mount.unmount()
        path = Path(mount.devices[0], "catalog.db")
        with sqlite3.connect(path) as catalog:
            tables = catalog.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
            actual = {
                table: [row[1] for row in catalog.execute(f"PRAGMA table_info({table})")]
                for (table,) in tables
            }
            ((ino, content, crc),) = catalog.execute("SELECT * FROM inline")
            assert catalog.execute("PRAGMA application_id").fetchone() == (0x46504653,)
        catalog.close()
    assert documented == actual
    assert zlib.crc32(struct.pack("<q", ino) + content) == crc
