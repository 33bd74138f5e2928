"""Directories: listing while entries change, 100,000 entries, seeking, names of every kind."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from tests.support.directory_stream import DirectoryStream
from tests.support.system import errno_of
from tests.support.target import Target


def names_of(path: Path) -> list[str]:
    """Names as readdir(3) gives them, without the dots; none twice."""
    with DirectoryStream(path) as stream:
        found = [entry.name for entry in stream]
    assert found.count(".") == found.count("..") == 1
    assert len(set(found)) == len(found)
    return [name for name in found if name not in (".", "..")]


def test_listing_while_entries_are_removed(directory: Path) -> None:
    """What stays during a listing appears exactly once; rm -r relies on it."""
    for number in range(1500):
        (directory / f"entry{number}").touch()
    seen = []
    with DirectoryStream(directory) as stream:
        for entry in stream:
            if entry.name.startswith("entry"):
                seen.append(entry.name)
                (directory / entry.name).unlink()
    assert len(seen) == len(set(seen)) == 1500
    assert os.listdir(directory) == []


def test_listing_while_entries_are_added_and_renamed(directory: Path) -> None:
    stable = {f"stable{number}" for number in range(1000)}
    for name in stable:
        (directory / name).touch()
    chooser = random.Random(1)
    seen: list[str] = []
    with DirectoryStream(directory) as stream:
        for number, entry in enumerate(stream):
            seen.append(entry.name)
            (directory / f"new{number}").touch()
            if chooser.random() < 0.5:
                (directory / f"new{number}").rename(directory / f"moved{number}")
            if number > 10_000:
                raise AssertionError("a listing never ends while entries are added")
    assert stable <= set(seen)
    assert len([name for name in seen if name in stable]) == len(stable)


def test_seekdir_returns_to_the_same_entry(directory: Path) -> None:
    """telldir's positions stay valid while other entries come and go."""
    for number in range(1000):
        (directory / f"entry{number:05}").touch()
    with DirectoryStream(directory) as stream:
        walked = [(entry.name, stream.tell()) for entry in stream]
        followers = dict(zip([p for _, p in walked], [n for n, _ in walked[1:]], strict=False))
        for number, (name, position) in enumerate(walked[:-1:97]):
            (directory / f"extra{number}").touch()
            if name.startswith("entry"):
                (directory / name).unlink()
            stream.seek(position)
            assert next(iter(stream)).name == followers[position]


def test_rewind_sees_new_entries(directory: Path) -> None:
    (directory / "one").touch()
    with DirectoryStream(directory) as stream:
        assert {entry.name for entry in stream} == {".", "..", "one"}
        (directory / "two").touch()
        stream.rewind()
        assert {entry.name for entry in stream} == {".", "..", "one", "two"}


@pytest.mark.root
def test_types_and_inode_numbers(directory: Path) -> None:
    """d_type and d_ino agree with lstat(2)."""
    (directory / "file").touch()
    (directory / "folder").mkdir()
    (directory / "link").symlink_to("file")
    os.mkfifo(directory / "fifo")
    os.mknod(directory / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    with DirectoryStream(directory) as stream:
        for entry in stream:
            status = (directory / entry.name).lstat()
            assert entry.type == stat.S_IFMT(status.st_mode) >> 12, entry.name
            assert entry.ino == status.st_ino, entry.name


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.long)])
def test_thousands_of_entries(target: Target, count: int) -> None:
    """All are listed once, also after a remount; what stays is, while others vanish."""
    crowded = target.root / f"crowded{count}"
    crowded.mkdir()
    for number in range(count):
        os.mknod(crowded / f"entry{number}", 0o644)
    everything = {f"entry{number}" for number in range(count)}
    assert set(names_of(crowded)) == everything
    target.remount()
    going = iter([f"entry{number}" for number in range(1, count, 20)])
    gone, seen = set(), []
    with DirectoryStream(crowded) as stream:
        for entry in stream:
            seen.append(entry.name)
            if (name := next(going, None)) is not None:
                (crowded / name).unlink()
                gone.add(name)
    assert len(set(seen)) == len(seen)
    assert everything - gone <= set(seen)
    assert set(names_of(crowded)) == everything - gone
    assert not (crowded / f"entry{count}").exists()


@pytest.mark.parametrize(
    "name",
    [
        b"x" * 255,
        "ü".encode() * 127,
        b"\xff\xfe not UTF-8 \x80",
        b"new\nline",
        b" ",
        b"-rf",
        b"...",
        b"a\\b\"c'd",
        b".hidden",
    ],
    ids=ascii,
)
def test_names(target: Target, directory: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(directory), name)
    with open(path, "wb") as file:
        file.write(name)
    assert os.listdir(os.fsencode(directory)) == [name]
    target.remount()
    assert os.listdir(os.fsencode(directory)) == [name]
    with open(path, "rb") as file:
        assert file.read() == name


def test_names_differ_by_case_and_normal_form(directory: Path) -> None:
    names = {"a", "A", "\u00e9", "e\u0301"}
    for name in names:
        (directory / name).write_text(name)
    assert {path.name for path in directory.iterdir()} == names
    assert all((directory / name).read_text() == name for name in names)


def test_names_that_are_too_long(directory: Path) -> None:
    long = directory / ("x" * 256)
    for call, arguments in (
        (os.mkdir, ()),
        (os.open, (os.O_CREAT | os.O_WRONLY,)),
        (os.stat, ()),
        (os.unlink, ()),
        (os.mkfifo, ()),
    ):
        assert errno_of(call, long, *arguments) == "ENAMETOOLONG"
    assert errno_of(os.symlink, "target", long) == "ENAMETOOLONG"
    assert errno_of(os.rename, directory, long) == "ENAMETOOLONG"


def test_symlink_targets(target: Target, directory: Path) -> None:
    """Any bytes, up to 4095 of them; longer ones are refused."""
    targets = [b"x", b"/" * 4095, b"\xff\x80", "ü".encode() * 2000, b"does/not/exist"]
    for number, content in enumerate(targets):
        os.symlink(content, os.fsencode(directory / str(number)))
    target.remount()
    for number, content in enumerate(targets):
        path = os.fsencode(directory / str(number))
        assert os.readlink(path) == content
        assert os.lstat(path).st_size == len(content)
    assert errno_of(os.symlink, b"x" * 4096, os.fsencode(directory / "long")) == "ENAMETOOLONG"


def test_link_counts_of_folders(directory: Path) -> None:
    assert directory.stat().st_nlink == 2
    for number in range(5):
        (directory / f"folder{number}").mkdir()
    assert directory.stat().st_nlink == 7
    (directory / "folder0").rename(directory / "folder1" / "moved")
    assert directory.stat().st_nlink == 6
    (directory / "folder1" / "moved").rmdir()
    (directory / "folder1").rmdir()
    assert directory.stat().st_nlink == 5


def test_deep_tree(target: Target, directory: Path) -> None:
    """As deep as a path can name, and back out of it by descriptors."""
    path = directory
    while len(str(path)) < 3900:
        path = path / ("deep" * 20)
        path.mkdir()
    (path / "bottom").write_text("here")
    target.remount()
    assert (path / "bottom").read_text() == "here"


def test_many_links_to_one_file(directory: Path) -> None:
    (directory / "file").write_bytes(b"shared")
    for number in range(1000):
        os.link(directory / "file", directory / f"link{number}")
    assert (directory / "file").stat().st_nlink == 1001
    for number in range(0, 1000, 2):
        (directory / f"link{number}").unlink()
    assert (directory / "link999").stat().st_nlink == 501
    assert (directory / "link999").read_bytes() == b"shared"
