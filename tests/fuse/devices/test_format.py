"""docs/format.md is what lies there: the catalog's columns, and the arena read by its tables."""

from __future__ import annotations

import os
import re
import sqlite3
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fpfs.core.engine import crc32c
from fpfs.daemon.devices.arena import arena_path
from fpfs.testing.mounted import REPOSITORY, Mount, mounted
from tests.support.failures.poison import poisoned_mount

DOCUMENT = (REPOSITORY / "docs" / "format.md").read_text()
_ROW = re.compile(r"^\| (\d+) \| (\d+)(?: each)? \| (.+) \|$", re.MULTILINE)
_CODES = {4: "<I", 8: "<Q"}


def offsets(heading: str) -> dict[str, tuple[int, int]]:
    """Offset and size of each field in the table below a heading, by the field's first words."""
    (table,) = re.findall(rf"^### {heading}\n\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    rows = _ROW.findall(table)
    fields = {re.split("[,:;]", text)[0]: (int(at), int(size)) for at, size, text in rows}
    assert len(fields) == len(rows) > 3
    return fields


def number(record: bytes, field: tuple[int, int]) -> int:
    """The number at a field of a record."""
    at, size = field
    return int(struct.unpack_from(_CODES[size], record, at)[0])


def records(arena: bytes, kind: int, *, written: bool = True) -> list[bytes]:
    """The records of one of the arena's tables, as its header tells; all, or what is no zeros."""
    at, size = offsets("Arena header")["8 tables"]
    for index in range(8):
        found, length, where, count = struct.unpack_from("<IIQQ", arena, at + index * size)
        if found == kind:
            table = arena[where : where + count * length]
            each = [table[start : start + length] for start in range(0, len(table), length)]
            return [record for record in each if any(record) or not written]
    raise AssertionError(f"the header names no table of kind {kind}")


def is_sound(record: bytes, crc: tuple[int, int]) -> bool:
    """Whether a record's checksum is that of everything before it."""
    return crc32c(record[: crc[0]]) == number(record, crc)


@pytest.fixture
def arena() -> bytes:
    """The arena of a mount in which an open file was truncated, and written on from 5,000."""
    with mounted() as mount:
        return arena_while_writing(mount)


def arena_while_writing(mount: Mount) -> bytes:
    """Write into a file, and read the arena before the file is closed."""
    with (mount.root / "file").open("wb", buffering=0) as writer:
        writer.write(b"x" * 4_000)
        writer.truncate(3_000)
        writer.seek(5_000)
        writer.write(b"x" * 100_000)
        path = Path(arena_path(mount.status().filesystem_id))
        with path.open("rb") as stream:
            # Not all of it: the journal's areas are mostly holes.
            return stream.read(mount.status().staging.bytes_total + 16 * 1024**2)


def test_the_arenas_header_is_as_documented(arena: bytes) -> None:
    fields = offsets("Arena header")
    at, size = fields["magic `FPFARENA`"]
    assert arena[at : at + size] == b"FPFARENA"
    assert number(arena, fields["format"]) == 4
    length = number(arena, fields["size of the header"])
    assert length == sum(fields["CRC32C of everything before"])
    assert is_sound(arena[:length], fields["CRC32C of everything before"])
    slots = number(arena, fields["number of slots"]) * number(arena, fields["size of a slot"])
    assert number(arena, fields["where the data begins"]) + slots == journal_at(arena)
    at, size = fields["boot id"]
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert arena[at : at + size].rstrip(b"\0") == boot_id.encode()


def journal_at(arena: bytes) -> int:
    """Where the first area of the journal begins."""
    at, size = offsets("Arena header")["8 tables"]
    tables = struct.iter_unpack("<IIQQ", arena[at : at + 8 * size])
    return min(offset for kind, _, offset, _ in tables if kind == 3)


def test_a_truncation_is_found_in_the_journal_as_documented(arena: bytes) -> None:
    record = offsets("Arena journal record")
    at = journal_at(arena)
    generation, complement = struct.unpack_from("<QQ", arena, at)
    assert generation ^ complement == 2**64 - 1
    assert generation % 3 == 0
    (end,) = struct.unpack_from("<I", arena, at + 16)
    first = at
    at += 24
    found = []
    while True:
        head = arena[at : at + 64]
        whole = arena[at : at + 64 + number(head, record["size of the payload"])]
        if number(head, record["lower half of the area's generation"]) != generation:
            break
        if crc32c(whole[4:]) != number(head, record["CRC32C of everything behind it"]):
            break
        (kind,) = struct.unpack_from("<H", head, record["kind"][0])
        found.append((kind, number(head, record["size of the file after the change"])))
        at += (len(whole) + 7) // 8 * 8
    assert found == [(3, 3_000)]
    assert at == first + 8 * end


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
    assert number(newest, slot["number of ranges"]) == 2
    at, _ = slot["8 ranges of bytes in the chunk that were acknowledged"]
    assert struct.unpack_from("<IIII", newest, at) == (0, 3_000, 5_000, 105_000)


def test_a_request_under_way_is_found_in_the_arena_as_documented(tmp_path: Path) -> None:
    request = offsets("Arena request record")
    noted = request[
        "number that the kernel gave to the request which was taken and is not answered"
    ]
    with poisoned_mount(tmp_path) as (mount, orders), ThreadPoolExecutor(1) as pool:
        orders.give("slow", "wait")
        answer = pool.submit(os.getxattr, mount.root, "user.slow")
        path = Path(arena_path(mount.status().filesystem_id))
        try:
            while not (found := under_way(path, noted)):
                assert not answer.done()
        finally:
            orders.take_back("slow")
        with pytest.raises(OSError, match="No data available"):
            answer.result()
        while under_way(path, noted) & found:
            pass  # it is noted a moment after the answer


def under_way(path: Path, noted: tuple[int, int]) -> set[int]:
    """Numbers of the requests under way, as an arena tells."""
    with path.open("rb") as stream:
        arena = stream.read(16 * 1024**2)
    table = [number(record, noted) for record in records(arena, 4, written=False)]
    assert len(table) == 4096
    for index, request in enumerate(table):
        assert request == 0 or request // 2 % 4096 == index
    return set(table) - {0}


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


def test_a_layout_segment_and_its_checksums_are_as_documented() -> None:
    content = b"some bytes" * 20_000
    with mounted(devices=1) as mount:
        (mount.root / "file").write_bytes(content)
        mount.unmount()
        catalog = sqlite3.connect(Path(mount.devices[0], "catalog.db"))
        ((blob,),) = catalog.execute("SELECT blob FROM segments")
        catalog.close()
        field = offsets("Layout segment")
        assert blob[:4] == b"FSEG"
        assert struct.unpack_from("<H", blob, field["format"][0]) == (2,)
        assert number(blob, field["number of runs"]) == 1
        at, size = field["runs"]
        first, count, object_block, device, flags, object_id = struct.unpack_from(
            "<IIIHHQ", blob, at
        )
        assert (first, count, device, flags) == (0, 4, 0, 0)
        name = f"{object_id:016x}"
        stored = Path(mount.devices[0], "objects", name[-2:], name).read_bytes()
    assert struct.unpack_from("<I", blob, at + size) == (4,)
    checksums = struct.unpack_from("<4I", blob, at + size + 4)
    for index, checksum in enumerate(checksums):
        block = stored[(object_block + index) * 65_536 :][:65_536]
        assert crc32c(block.ljust(65_536, b"\0")) == checksum
    assert len(blob) == at + size + 4 + 4 * 4 + 4
    assert crc32c(blob[:-4]) == struct.unpack("<I", blob[-4:])[0]
