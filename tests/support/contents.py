"""Contents of files: reproducible random bytes, comparison, and whole trees as values."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import numpy as np

_PIECE_BYTES = 4 * 1024 * 1024


def random_bytes(count: int, *, seed: int) -> bytes:
    """`count` bytes that are the same for the same seed."""
    return np.random.SFC64(seed).random_raw(-(-count // 8)).tobytes()[:count]


def assert_same(found: bytes | bytearray | memoryview, expected: bytes | bytearray) -> None:
    """Fail with the place of the first difference instead of two dumps."""
    if found == expected:
        return
    assert len(found) == len(expected), f"{len(found)} bytes instead of {len(expected)}"
    first = next(i for i in range(len(expected)) if found[i] != expected[i])
    last = next(i for i in reversed(range(len(expected))) if found[i] != expected[i])
    raise AssertionError(
        f"bytes differ first at {first} ({found[first]:#04x} instead of {expected[first]:#04x}), "
        f"last at {last}, of {len(expected)}"
    )


def assert_same_files(found: Path, expected: Path) -> None:
    """Compare two files piece by piece."""
    assert found.stat().st_size == expected.stat().st_size
    with found.open("rb") as one, expected.open("rb") as other:
        offset = 0
        while piece := one.read(_PIECE_BYTES):
            try:
                assert_same(piece, other.read(_PIECE_BYTES))
            except AssertionError as error:
                raise AssertionError(f"{found} from byte {offset}: {error}") from error
            offset += len(piece)
        assert not other.read(1), f"{found} ends at byte {offset}, which is not its size"


def digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything under `root` by relative path: type, mode, owner, times, links and content.

    Directory sizes and link counts are left out: filesystems count them differently.
    """
    entries: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            common = (stat.filemode(status.st_mode), status.st_uid, status.st_gid)
            key = str(path.relative_to(root))
            if stat.S_ISREG(status.st_mode):
                times = (status.st_size, status.st_mtime_ns, status.st_nlink)
                entries[key] = (*common, *times, digest(path))
            elif stat.S_ISLNK(status.st_mode):
                entries[key] = (*common, os.readlink(path))
            elif stat.S_ISDIR(status.st_mode):
                entries[key] = common
            else:
                entries[key] = (*common, status.st_rdev)
    return entries
