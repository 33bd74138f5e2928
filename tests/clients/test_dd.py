"""dd with odd sizes, direct I/O, synchronous writes, seeking, skipping and appending."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.contents import assert_same, random_bytes
from tests.support.processes import run
from tests.support.target import Target

pytestmark = pytest.mark.clients

SOURCE_BYTES = 3 * 2**20 + 12_345


@pytest.fixture
def source(plain: Path) -> Path:
    path = plain / "source"
    path.write_bytes(random_bytes(SOURCE_BYTES, seed=1))
    return path


def dd(source: Path | str, target: Path, *operands: str) -> None:
    run("dd", f"if={source}", f"of={target}", "status=none", *operands)


@pytest.mark.parametrize(
    "operands",
    [
        ["bs=4097"],
        ["bs=1"],
        ["bs=65537", "conv=fsync"],
        ["bs=1048575", "conv=fdatasync"],
        ["bs=511", "oflag=dsync", "count=200"],
        ["bs=99999", "oflag=sync", "count=20"],
        ["bs=5M"],
        ["ibs=4097", "obs=777777"],
    ],
    ids=" ".join,
)
def test_sizes(target: Target, directory: Path, source: Path, operands: list[str]) -> None:
    if "bs=1" in operands:
        source.write_bytes(source.read_bytes()[:20_001])
    content = source.read_bytes()
    options = dict(operand.split("=") for operand in operands)
    if "count" in options:
        content = content[: int(options["count"]) * int(options["bs"])]
    dd(source, directory / "out", *operands)
    assert_same((directory / "out").read_bytes(), content)
    target.remount()
    assert_same((directory / "out").read_bytes(), content)


@pytest.mark.parametrize("block_bytes", [4096, 65_536, 1_048_576])
def test_direct(target: Target, directory: Path, source: Path, block_bytes: int) -> None:
    """Direct in both directions; the unaligned rest is dd's own buffered last write."""
    dd(source, directory / "out", f"bs={block_bytes}", "oflag=direct", "iflag=fullblock")
    assert_same((directory / "out").read_bytes(), source.read_bytes())
    target.remount()
    dd(directory / "out", directory / "again", f"bs={block_bytes}", "iflag=direct,fullblock")
    assert_same((directory / "again").read_bytes(), source.read_bytes())


def test_seek_and_skip(target: Target, directory: Path, source: Path) -> None:
    """Parts of the source put over a file in odd places, without truncating it."""
    content = bytearray(source.read_bytes())
    out = directory / "out"
    dd(source, out, "bs=1M")
    for block_bytes, skip, seek, count in (
        (4097, 3, 11, 40),
        (513, 100, 2000, 77),
        (65_539, 1, 20, 9),
        (100_003, 5, 60, 3),
    ):
        operands = (f"skip={skip}", f"seek={seek}", f"count={count}", "conv=notrunc")
        dd(source, out, f"bs={block_bytes}", *operands)
        part = source.read_bytes()[skip * block_bytes :][: count * block_bytes]
        start = seek * block_bytes
        content.extend(bytes(max(0, start + len(part) - len(content))))
        content[start : start + len(part)] = part
    assert_same(out.read_bytes(), content)
    target.remount()
    assert_same(out.read_bytes(), content)


def test_seek_truncates_behind_and_leaves_a_hole(directory: Path, source: Path) -> None:
    out = directory / "out"
    out.write_bytes(b"x" * 100_000)
    dd(source, out, "bs=4097", "seek=3", "count=2")
    expected = b"x" * (3 * 4097) + source.read_bytes()[: 2 * 4097]
    assert_same(out.read_bytes(), expected)
    dd(source, out, "bs=4097", "seek=1000", "count=1", "conv=notrunc")
    expected += bytes(1000 * 4097 - len(expected)) + source.read_bytes()[:4097]
    assert_same(out.read_bytes(), expected)


def test_append(target: Target, directory: Path, source: Path) -> None:
    out = directory / "out"
    expected = b""
    for count in (1, 7, 40):
        dd(source, out, "bs=4097", f"count={count}", "oflag=append", "conv=notrunc")
        expected += source.read_bytes()[: count * 4097]
        assert_same(out.read_bytes(), expected)
        target.remount()
    assert_same(out.read_bytes(), expected)


def test_sparse_conversion(directory: Path, plain: Path) -> None:
    content = random_bytes(70_000, seed=2) + bytes(8 * 2**20) + random_bytes(5000, seed=3)
    (plain / "holes").write_bytes(content)
    dd(plain / "holes", directory / "out", "bs=64K", "conv=sparse")
    assert_same((directory / "out").read_bytes(), content)
    assert (directory / "out").stat().st_blocks * 512 < 2**20
