"""rename(2) and renameat2(2): replacing, refusing to, exchanging, and what must not be renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.system import RenameFlag, errno_of, renameat2
from tests.support.target import Target


def make_file(path: Path) -> None:
    path.write_bytes(path.name.encode() * 30_000)


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text(path.name)


def make_symlink(path: Path) -> None:
    path.symlink_to(f"target of {path.name}")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


MAKERS = [make_file, make_folder, make_symlink, make_fifo]


def look(path: Path) -> object:
    """What is at a path, content included."""
    if path.is_symlink():
        return os.readlink(path)
    if path.is_dir():
        return (path / "inside").read_text()
    if path.is_file():
        return path.read_bytes()
    return path.lstat().st_mode


@pytest.mark.parametrize("make_one", MAKERS)
@pytest.mark.parametrize("make_other", MAKERS)
def test_exchange(
    target: Target,
    directory: Path,
    make_one: Callable[[Path], None],
    make_other: Callable[[Path], None],
) -> None:
    (directory / "folder").mkdir()
    one, other = directory / "one", directory / "folder" / "other"
    make_one(one)
    make_other(other)
    before = (look(one), look(other), one.lstat().st_ino, other.lstat().st_ino)
    renameat2(one, other, RenameFlag.EXCHANGE)
    after = (look(other), look(one), other.lstat().st_ino, one.lstat().st_ino)
    assert after == before
    target.remount()
    assert (look(other), look(one)) == before[:2]


def test_exchange_keeps_link_counts_of_folders(directory: Path) -> None:
    (directory / "a").mkdir()
    make_folder(directory / "a" / "x")
    make_file(directory / "y")
    parents = directory.stat().st_nlink, (directory / "a").stat().st_nlink
    renameat2(directory / "a" / "x", directory / "y", RenameFlag.EXCHANGE)
    moved = directory.stat().st_nlink, (directory / "a").stat().st_nlink
    assert moved == (parents[0] + 1, parents[1] - 1)


def test_exchange_needs_both(directory: Path) -> None:
    make_file(directory / "one")
    for pair in (("one", "none"), ("none", "one")):
        paths = [directory / name for name in pair]
        assert errno_of(renameat2, *paths, RenameFlag.EXCHANGE) == "ENOENT"


def test_exchange_of_a_folder_with_its_own_child(directory: Path) -> None:
    (directory / "a" / "b").mkdir(parents=True)
    paths = directory / "a", directory / "a" / "b"
    assert errno_of(renameat2, *paths, RenameFlag.EXCHANGE) == "EINVAL"
    assert errno_of(renameat2, *reversed(paths), RenameFlag.EXCHANGE) in ("EINVAL", "ENOTEMPTY")


@pytest.mark.parametrize("make_other", MAKERS)
def test_noreplace(directory: Path, make_other: Callable[[Path], None]) -> None:
    make_file(directory / "one")
    make_other(directory / "other")
    before = look(directory / "other")
    paths = directory / "one", directory / "other"
    assert errno_of(renameat2, *paths, RenameFlag.NOREPLACE) == "EEXIST"
    assert look(directory / "other") == before
    renameat2(directory / "one", directory / "free", RenameFlag.NOREPLACE)
    assert look(directory / "free") == b"one" * 30_000
    assert not (directory / "one").exists()


def test_flags_that_exclude_each_other(directory: Path) -> None:
    make_file(directory / "one")
    make_file(directory / "other")
    paths = directory / "one", directory / "other"
    assert errno_of(renameat2, *paths, RenameFlag.NOREPLACE | RenameFlag.EXCHANGE) == "EINVAL"
    assert errno_of(renameat2, *paths, RenameFlag(64)) == "EINVAL"


def test_replace_keeps_the_mover_and_frees_the_replaced(target: Target, directory: Path) -> None:
    make_file(directory / "new")
    make_file(directory / "old")
    os.link(directory / "old", directory / "still")
    ino = (directory / "new").stat().st_ino
    (directory / "new").rename(directory / "old")
    target_status = (directory / "old").stat()
    assert (target_status.st_ino, target_status.st_nlink) == (ino, 1)
    assert (directory / "still").stat().st_nlink == 1
    target.remount()
    assert look(directory / "old") == b"new" * 30_000
    assert look(directory / "still") == b"old" * 30_000
    assert sorted(os.listdir(directory)) == ["old", "still"]


def test_rename_to_another_link_of_the_same_file_does_nothing(directory: Path) -> None:
    make_file(directory / "one")
    os.link(directory / "one", directory / "other")
    (directory / "one").rename(directory / "other")
    assert sorted(os.listdir(directory)) == ["one", "other"]
    assert (directory / "one").stat().st_nlink == 2


def test_folder_over_an_empty_folder(directory: Path) -> None:
    make_folder(directory / "full")
    (directory / "empty").mkdir()
    links = directory.stat().st_nlink
    (directory / "full").rename(directory / "empty")
    assert look(directory / "empty") == "full"
    assert directory.stat().st_nlink == links - 1


def test_dot_dot_of_a_moved_folder(directory: Path) -> None:
    (directory / "a" / "b").mkdir(parents=True)
    (directory / "c").mkdir()
    fd = os.open(directory / "a" / "b", os.O_RDONLY | os.O_DIRECTORY)
    (directory / "a" / "b").rename(directory / "c" / "b")
    parent = os.stat("..", dir_fd=fd)
    os.close(fd)
    assert parent.st_ino == (directory / "c").stat().st_ino


def test_names_are_looked_up_afresh_after_a_rename(directory: Path) -> None:
    """The kernel's cached names and missing names follow."""
    one, other = directory / "one", directory / "other"
    make_file(one)
    for _ in range(20):
        assert not other.exists()
        one.rename(other)
        assert not one.exists()
        assert other.exists()
        other.rename(one)


def test_rename_across_many_folders_keeps_everything(target: Target, directory: Path) -> None:
    for number in range(20):
        (directory / f"folder{number}").mkdir()
    make_folder(directory / "folder0" / "traveller")
    for number in range(19):
        name = directory / f"folder{number}" / "traveller"
        name.rename(directory / f"folder{number + 1}" / "traveller")
    target.remount()
    assert look(directory / "folder19" / "traveller") == "traveller"
    assert [p.name for p in directory.glob("*/traveller")] == ["traveller"]
