"""tar, rsync and cp: whole trees with links, modes, times, holes and extended attributes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.contents import assert_same_files, random_bytes, tree
from tests.support.processes import run
from tests.support.target import Target

pytestmark = pytest.mark.clients

MEBIBYTE = 2**20


def make_tree(root: Path) -> None:
    """A tree with everything that an archiver has to carry."""
    (root / "a" / "deep" / "er").mkdir(parents=True)
    (root / "empty folder").mkdir(mode=0o700)
    for number, size in enumerate((0, 1, 4095, 4097, 65_537, 1_048_577, 3_333_333)):
        path = root / "a" / f"file {number}"
        path.write_bytes(random_bytes(size, seed=number))
        os.utime(path, ns=(10**18 + number, 10**18 + 123_456_789 + number))
    os.link(root / "a" / "file 3", root / "a" / "deep" / "hard link")
    (root / "a" / "deep" / "er" / "symlink").symlink_to("../../file 1")
    (root / "a" / "file 2").chmod(0o4751)
    os.mkfifo(root / "fifo", 0o640)
    (root / ("n" * 255)).write_text("longest name")
    os.setxattr(root / "a" / "file 1", "user.note", b"kept")
    make_sparse(root / "sparse")
    for name in ("n" * 255, "sparse"):
        os.utime(root / name, ns=(10**18 + 7, 10**18 + 987_654_321))


def make_sparse(path: Path) -> None:
    """32 MiB with three small islands of data."""
    with path.open("wb") as file:
        for offset in (5 * MEBIBYTE + 17, 16 * MEBIBYTE - 3, 32 * MEBIBYTE - 5):
            file.seek(offset)
            file.write(b"data!")


def assert_sparse(path: Path) -> None:
    assert path.stat().st_blocks * 512 < 4 * MEBIBYTE


def assert_same_tree(found: Path, expected: Path) -> None:
    assert tree(found) == tree(expected)
    assert os.getxattr(found / "a" / "file 1", "user.note") == b"kept"
    assert_sparse(found / "sparse")


def test_tar_out_and_in(target: Target, directory: Path, plain: Path) -> None:
    make_tree(plain / "tree")
    run("tar", "--sparse", "--xattrs", "-cf", plain / "in.tar", "-C", plain / "tree", ".")
    (directory / "tree").mkdir()
    run("tar", "--xattrs", "-xpf", plain / "in.tar", "-C", directory / "tree")
    assert_same_tree(directory / "tree", plain / "tree")
    target.remount()
    assert_same_tree(directory / "tree", plain / "tree")
    run("tar", "--sparse", "--xattrs", "-cf", directory / "out.tar", "-C", directory / "tree", ".")
    run("tar", "--compare", "-f", directory / "out.tar", "-C", plain / "tree")
    (plain / "again").mkdir()
    run("tar", "--xattrs", "-xpf", directory / "out.tar", "-C", plain / "again")
    assert_same_tree(plain / "again", plain / "tree")


def test_tar_updates_an_archive_in_place(directory: Path) -> None:
    for name in ("one", "two"):
        (directory / name).write_bytes(random_bytes(300_001, seed=len(name)))
    run("tar", "-cf", "all.tar", "one", cwd=directory)
    run("tar", "-rf", "all.tar", "two", cwd=directory)
    run("tar", "--delete", "-f", "all.tar", "one", cwd=directory)
    assert run("tar", "-tf", "all.tar", cwd=directory) == "two\n"
    run("tar", "--compare", "-f", "all.tar", cwd=directory)


def test_rsync_there_and_back(target: Target, directory: Path, plain: Path) -> None:
    make_tree(plain / "tree")
    options = ("-aHXS", "--delete")
    run("rsync", *options, f"{plain}/tree/", f"{directory}/tree/")
    assert_same_tree(directory / "tree", plain / "tree")
    (plain / "tree" / "a" / "file 5").unlink()
    with (plain / "tree" / "a" / "file 6").open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"changed in the middle")
    run("rsync", *options, f"{plain}/tree/", f"{directory}/tree/")
    assert_same_tree(directory / "tree", plain / "tree")
    target.remount()
    assert run("rsync", *options, "-ni", f"{plain}/tree/", f"{directory}/tree/") == ""
    run("rsync", *options, f"{directory}/tree/", f"{plain}/back/")
    assert_same_tree(plain / "back", plain / "tree")


@pytest.mark.parametrize("options", [["--inplace", "--no-whole-file"], ["--append"]])
def test_rsync_changes_a_file_in_place(directory: Path, plain: Path, options: list[str]) -> None:
    """The delta algorithm over local files: only changed blocks are written."""
    content = random_bytes(5_000_001, seed=1)
    (plain / "file").write_bytes(content)
    old = content[:3_000_003] if "--append" in options else content[:2_000_000] + content[3:]
    (directory / "file").write_bytes(old)
    run("rsync", "-a", *options, plain / "file", directory / "file")
    assert_same_files(directory / "file", plain / "file")


@pytest.mark.parametrize("sparse", ["always", "auto", "never"])
def test_cp_sparse(target: Target, directory: Path, plain: Path, sparse: str) -> None:
    make_sparse(plain / "sparse")
    run("cp", f"--sparse={sparse}", plain / "sparse", directory / "copy")
    run("cp", f"--sparse={sparse}", directory / "copy", directory / "again")
    target.remount()
    for name in ("copy", "again"):
        assert_same_files(directory / name, plain / "sparse")
    if sparse == "never":
        assert (directory / "again").stat().st_blocks * 512 >= 32 * MEBIBYTE
    else:
        assert_sparse(directory / "again")


def test_cp_archive(directory: Path, plain: Path) -> None:
    make_tree(plain / "tree")
    run("cp", "-a", plain / "tree", directory / "tree")
    run("cp", "-a", directory / "tree", directory / "again")
    assert_same_tree(directory / "again", plain / "tree")


def test_mv_between_filesystems(directory: Path, plain: Path) -> None:
    make_tree(plain / "tree")
    make_tree(plain / "other")
    run("mv", plain / "other", directory / "moved")
    assert not (plain / "other").exists()
    run("mv", directory / "moved", plain / "back")
    assert list(directory.iterdir()) == []
    assert_same_tree(plain / "back", plain / "tree")
