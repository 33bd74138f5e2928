"""numpy: save, savez, load, and memory maps that read, write and share."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import expect_line, python_child, tell
from tests.support.target import Target

pytestmark = pytest.mark.clients

SHAPE = (1031, 517)


def values(*, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE)


def test_save_and_load(target: Target, directory: Path) -> None:
    one, other = values(seed=1), values(seed=2)
    np.save(directory / "one.npy", one)
    np.savez(directory / "both.npz", one=one, other=other)
    for _ in range(2):
        np.testing.assert_array_equal(np.load(directory / "one.npy"), one)
        with np.load(directory / "both.npz") as both:
            np.testing.assert_array_equal(both["other"], other)
        mapped = np.load(directory / "one.npy", mmap_mode="r")
        np.testing.assert_array_equal(mapped, one)
        del mapped
        target.remount()


def test_memmap_created(target: Target, directory: Path) -> None:
    """Mode w+ makes the file: stores reach read(2) after flush, and survive a remount."""
    expected = values(seed=3)
    mapped = np.memmap(directory / "new.bin", dtype=np.float64, mode="w+", shape=SHAPE)
    mapped[:] = expected
    mapped.flush()
    assert (directory / "new.bin").read_bytes() == expected.tobytes()
    del mapped
    target.remount()
    assert (directory / "new.bin").read_bytes() == expected.tobytes()


def test_memmap_updated(target: Target, directory: Path) -> None:
    """Mode r+ changes some elements in place; the others stay."""
    expected = values(seed=4)
    expected.tofile(directory / "old.bin")
    target.remount()
    mapped = np.memmap(directory / "old.bin", dtype=np.float64, mode="r+", shape=SHAPE)
    np.testing.assert_array_equal(mapped, expected)
    mapped[3:900:7, 100] = expected[3:900:7, 100] = 1.25
    mapped.flush()
    assert (directory / "old.bin").read_bytes() == expected.tobytes()
    del mapped
    target.remount()
    assert (directory / "old.bin").read_bytes() == expected.tobytes()


def test_memmap_copy_on_write_leaves_the_file(directory: Path) -> None:
    expected = values(seed=5)
    expected.tofile(directory / "private.bin")
    mapped = np.memmap(directory / "private.bin", dtype=np.float64, mode="c", shape=SHAPE)
    mapped[:] = 0
    assert (directory / "private.bin").read_bytes() == expected.tobytes()


SHARED_WRITER = """
import sys, numpy as np
mapped = np.memmap(sys.argv[1], dtype=np.int64, mode="r+")
print("mapped", flush=True)
for line in sys.stdin:
    mapped[int(line)] = int(line) + 1
    print("stored", flush=True)
"""


def test_memmap_shared_between_processes(directory: Path) -> None:
    """What one process stores, another sees through its own map without any system call."""
    path = directory / "shared.bin"
    np.zeros(3 * mmap.PAGESIZE, dtype=np.int64).tofile(path)
    mapped = np.memmap(path, dtype=np.int64, mode="r+")
    with python_child(SHARED_WRITER, path) as child:
        expect_line(child, "mapped")
        for index in (0, 511, 512, 4097, 3 * mmap.PAGESIZE - 1):
            assert mapped[index] == 0
            tell(child, str(index))
            expect_line(child, "stored")
            assert mapped[index] == index + 1
    del mapped
