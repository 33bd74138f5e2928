"""A remount keeps everything: contents, attributes, links, holes, special files, inode numbers."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount
from tests.support.contents import random_bytes, tree
from tests.support.target import Target

SIZES = (0, 1, 100, 16_383, 16_384, 16_385, 65_535, 65_537, 2**20, 2**20 + 1, 5_000_001)


def plant(root: Path, *, seed: int) -> None:
    """Files of many sizes written in odd pieces, links, folders, holes, attributes."""
    chooser = random.Random(seed)
    for number, size in enumerate(SIZES):
        folder = root / f"folder{number % 3}" / "deeper"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"file{number}"
        content = random_bytes(size, seed=seed + number)
        with path.open("wb", buffering=0) as file:
            offset = 0
            while offset < size:
                offset += file.write(content[offset : offset + chooser.randrange(1, 300_000)])
        os.chmod(path, chooser.choice([0o600, 0o4755, 0o644, 0o2640]))
        os.setxattr(path, "user.number", str(number).encode())
        os.utime(path, ns=(number, 10**18 + number))
        os.link(path, root / f"link{number}")
        (root / f"symlink{number}").symlink_to(path)
    with (root / "holes").open("wb") as file:
        for offset in (10_000_000, 90_000_001):
            file.seek(offset)
            file.write(b"island")
    os.mkfifo(root / "fifo")


def numbers(root: Path) -> dict[str, int]:
    """Inode numbers by name."""
    return {str(path): path.lstat().st_ino for path in sorted(root.rglob("*"))}


def test_remount_keeps_everything(target: Target, directory: Path) -> None:
    plant(directory, seed=1)
    before, inodes = tree(directory), numbers(directory)
    for _ in range(2):
        target.remount()
        assert tree(directory) == before
        assert numbers(directory) == inodes
        assert os.getxattr(directory / "link3", "user.number") == b"3"
        assert (directory / "holes").stat().st_blocks * 512 < 4 * 2**20


def test_changes_after_a_remount_are_kept_too(target: Target, directory: Path) -> None:
    plant(directory, seed=2)
    for round_number in range(3):
        target.remount()
        for number, size in enumerate(SIZES):
            with (directory / f"link{number}").open("r+b") as file:
                file.seek(size // 2)
                file.write(random_bytes(70_000, seed=round_number * 100 + number))
        (directory / f"new{round_number}").write_bytes(random_bytes(30_000, seed=round_number))
        (directory / f"symlink{round_number}").unlink()
        (directory / "folder0").rename(directory / "renamed")
        (directory / "renamed").rename(directory / "folder0")
        before = tree(directory)
    target.remount()
    assert tree(directory) == before


def test_what_was_deleted_stays_deleted(mount: Mount, directory: Path) -> None:
    """Names and space: both are as before, also for what was open when it was deleted."""
    mount.flush()
    used = mount.stored_bytes()
    plant(directory / "", seed=3)
    fd = os.open(directory / "link10", os.O_RDONLY)
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()
    os.close(fd)
    mount.remount()
    assert os.listdir(directory) == []
    mount.flush()
    assert mount.stored_bytes() <= used + 2**20


@pytest.mark.parametrize("count", [300])
def test_many_small_files(target: Target, directory: Path, count: int) -> None:
    """Small contents live in the catalog; rewritten ones too."""
    for number in range(count):
        (directory / str(number)).write_bytes(random_bytes(number * 60, seed=number))
    for number in range(0, count, 7):
        (directory / str(number)).write_bytes(b"again")
    target.remount()
    for number in range(count):
        expected = b"again" if number % 7 == 0 else random_bytes(number * 60, seed=number)
        assert (directory / str(number)).read_bytes() == expected
