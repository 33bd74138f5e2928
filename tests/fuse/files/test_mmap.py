"""mmap(2): shared and private, stores that read(2) sees, sizes that are no whole pages."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.support.contents import assert_same, random_bytes
from tests.support.processes import expect_line, python_child, tell
from tests.support.target import Target

SIZE = 2 * 2**20 + 4321


def make(path: Path, *, seed: int) -> bytearray:
    content = random_bytes(SIZE, seed=seed)
    path.write_bytes(content)
    return bytearray(content)


def assert_kept(target: Target, path: Path, expected: bytes | bytearray) -> None:
    """Read a file now, and after a remount."""
    assert_same(path.read_bytes(), expected)
    target.remount()
    assert_same(path.read_bytes(), expected)


@pytest.mark.parametrize("committed", [False, True])
def test_shared_stores_reach_read(target: Target, directory: Path, committed: bool) -> None:
    """After msync the stores are what read(2) returns, and they survive a remount."""
    path = directory / "file"
    expected = make(path, seed=1)
    if committed:
        target.remount()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert_same(mapped[:], expected)
        for offset in (0, 4095, 65_535, 2**20 - 1, SIZE - 5):
            mapped[offset : offset + 5] = expected[offset : offset + 5] = b"store"
        mapped.flush()
        assert_same(os.pread(file.fileno(), SIZE, 0), expected)
        assert_same(path.read_bytes(), expected)
    assert_kept(target, path, expected)


def test_shared_stores_without_msync(target: Target, directory: Path) -> None:
    """Unmapping and closing are enough for the next reader."""
    path = directory / "file"
    expected = make(path, seed=2)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[100_000:100_010] = expected[100_000:100_010] = b"0123456789"
    assert_kept(target, path, expected)


def test_fsync_writes_mapped_stores(target: Target, directory: Path) -> None:
    path = directory / "file"
    expected = make(path, seed=3)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[5:9] = expected[5:9] = b"four"
        os.fsync(file.fileno())
        assert_same(path.read_bytes(), expected)


def test_write_is_seen_through_a_map(directory: Path) -> None:
    """Reads through a map after write(2), of pages mapped before and of others."""
    path = directory / "file"
    expected = make(path, seed=4)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert_same(mapped[:200_000], expected[:200_000])
        for offset in (10, 4090, 150_000, 1_000_001):
            os.pwrite(file.fileno(), b"written", offset)
            expected[offset : offset + 7] = b"written"
            assert mapped[offset : offset + 7] == b"written"
        assert_same(mapped[:], expected)


def test_private_stores_stay_private(target: Target, directory: Path) -> None:
    path = directory / "file"
    expected = make(path, seed=5)
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
            mapped[:] = bytes(SIZE)
            assert mapped[:100] == bytes(100)
        assert_same(os.pread(file.fileno(), SIZE, 0), expected)
    target.remount()
    assert_same(path.read_bytes(), expected)


def test_mapping_outlives_its_descriptor_and_name(directory: Path) -> None:
    path = directory / "file"
    expected = make(path, seed=6)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    path.unlink()
    mapped[7:11] = expected[7:11] = b"gone"
    assert_same(mapped[:], expected)
    mapped.close()


def test_stores_behind_the_end_are_not_kept(target: Target, directory: Path) -> None:
    """The rest of the last page belongs to nobody: after an extension it reads as zeros."""
    path = directory / "file"
    path.write_bytes(b"x" * 8192)
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 8192) as mapped:
            os.ftruncate(file.fileno(), 5000)
            mapped[5000:5100] = b"y" * 100
            mapped.flush()
        os.ftruncate(file.fileno(), 9000)
        assert_same(os.pread(file.fileno(), 9000, 0), b"x" * 5000 + bytes(4000))
    target.remount()
    assert_same(path.read_bytes(), b"x" * 5000 + bytes(4000))


def test_map_grows_with_the_file(target: Target, directory: Path) -> None:
    path = directory / "file"
    with path.open("w+b") as file:
        file.truncate(100)
        with mmap.mmap(file.fileno(), 0) as mapped:
            mapped[:] = b"a" * 100
            mapped.resize(300_000)
            mapped[299_990:] = b"b" * 10
    expected = b"a" * 100 + bytes(299_890) + b"b" * 10
    assert_kept(target, path, expected)


def test_map_into_a_hole(target: Target, directory: Path) -> None:
    path = directory / "file"
    size = 3 * 2**20
    with path.open("w+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), 0) as mapped:
            assert mapped[2**20 : 2**20 + 5000] == bytes(5000)
            mapped[2**20 + 1] = 7
            mapped.flush()
        assert os.fstat(file.fileno()).st_blocks * 512 < size
    target.remount()
    content = path.read_bytes()
    assert (len(content), content[2**20 + 1], content.count(0)) == (size, 7, size - 1)


PAGES = 2048

RACING_STORER = """
import mmap, os, sys
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
print("mapped", flush=True)
for offset in range(100, len(mapped), 4096):
    os.read(0, 1)
    mapped[offset] = 7
mapped.flush()
print("stored", flush=True)
"""


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY])
def test_writes_and_stores_to_one_page_are_both_kept(
    target: Target, directory: Path, flags: int
) -> None:
    """Each page is written to, and through a map stored to elsewhere, at the same time."""
    path = directory / "file"
    path.write_bytes(bytes(PAGES * 4096))
    expected = bytearray(PAGES * 4096)
    file = os.open(path, flags)
    with python_child(RACING_STORER, path) as child:
        expect_line(child, "mapped")
        assert child.stdin is not None
        go_on = child.stdin.fileno()
        for page in range(PAGES):
            at = page * 4096 + 2000
            os.write(go_on, b"x")
            os.pwrite(file, b"written", at)
            expected[at : at + 7] = b"written"
            expected[page * 4096 + 100] = 7
        expect_line(child, "stored")
    os.close(file)
    assert_kept(target, path, expected)


def test_a_range_is_copied_into_a_mapped_file(target: Target, directory: Path) -> None:
    """copy_file_range(2) between bytes of pages that a map has changed."""
    path = directory / "file"
    expected = make(path, seed=7)
    source = random_bytes(300_000, seed=8)
    (directory / "source").write_bytes(source)
    with (
        path.open("r+b") as file,
        (directory / "source").open("rb") as other,
        mmap.mmap(file.fileno(), 0) as mapped,
    ):
        for offset in (5000, 305_200):
            mapped[offset : offset + 5] = expected[offset : offset + 5] = b"store"
        copied = 0
        while copied < len(source):
            copied += os.copy_file_range(
                other.fileno(), file.fileno(), len(source) - copied, copied, 5100 + copied
            )
        expected[5100 : 5100 + len(source)] = source
        assert_same(mapped[:], expected)
    assert_kept(target, path, expected)


STORER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(fd, 0)
print("mapped", flush=True)
for line in sys.stdin:
    offset, value = map(int, line.split())
    assert mapped[offset] == value - 1, (mapped[offset], value)
    mapped[offset] = value
    print("stored", flush=True)
"""


def test_shared_between_processes(directory: Path) -> None:
    """Stores of two processes alternate on the same bytes."""
    path = directory / "file"
    path.write_bytes(bytes(3 * 65_536))
    with (
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as mapped,
        python_child(STORER, path) as child,
    ):
        expect_line(child, "mapped")
        for offset in (0, 4096, 65_535, 3 * 65_536 - 1):
            for value in range(1, 9, 2):
                tell(child, f"{offset} {value}")
                expect_line(child, "stored")
                assert mapped[offset] == value
                mapped[offset] = value + 1


def test_execute_from_the_mount(directory: Path) -> None:
    """Programs are mapped: a copied binary and a script run."""
    binary = directory / "true"
    binary.write_bytes(Path("/bin/true").read_bytes())
    binary.chmod(0o755)
    assert os.spawnv(os.P_WAIT, str(binary), ["true"]) == 0
    script = directory / "script"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    assert os.spawnv(os.P_WAIT, str(script), ["script"]) == 3
