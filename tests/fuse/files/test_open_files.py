"""Open files whose names change: unlinked, renamed, replaced, linked, copied descriptors."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fpfs.testing.mounted import Mount
from tests.support.contents import assert_same, random_bytes
from tests.support.processes import expect_line, python_child, tell
from tests.support.shadow import ShadowFile
from tests.support.target import Target
from tests.support.waiting import wait_until


def test_unlinked_but_open(directory: Path) -> None:
    path = directory / "file"
    with ShadowFile(path) as file:
        file.write(0, 200_000)
        path.unlink()
        assert not path.exists()
        assert os.fstat(file.fd).st_nlink == 0
        file.write(150_001, 300_000)
        file.truncate(400_000)
        file.write(399_000, 2_000)
        os.fsync(file.fd)
        assert_same(os.pread(file.fd, 10**6, 0), file.content)
    assert list(directory.iterdir()) == []


def test_unlinked_file_keeps_apart_from_a_new_one_of_its_name(directory: Path) -> None:
    path = directory / "file"
    old = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(old, b"old")
    path.unlink()
    path.write_bytes(b"new")
    os.pwrite(old, b"er!", 3)
    assert os.pread(old, 10, 0) == b"older!"
    assert path.read_bytes() == b"new"
    os.close(old)
    assert path.read_bytes() == b"new"


def test_space_of_an_unlinked_file_comes_back_at_its_close(mount: Mount, directory: Path) -> None:
    """An open file without a name holds its space until it is closed."""
    path = directory / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, random_bytes(24 * 2**20, seed=1))
    os.fsync(fd)
    mount.flush()
    used = mount.stored_bytes()
    path.unlink()
    mount.flush()
    assert mount.stored_bytes() >= used - 2**20
    os.close(fd)
    deadline_s = time.monotonic() + 60  # the server hears of the close after it
    while mount.stored_bytes() > used - 23 * 2**20:
        assert time.monotonic() < deadline_s


def test_renamed_over_while_open(directory: Path) -> None:
    """The replaced file stays readable and writable for those who hold it."""
    old, new = directory / "old", directory / "new"
    new.write_bytes(b"replacement")
    with ShadowFile(old) as file:
        file.write(0, 100_000)
        new.rename(old)
        assert os.fstat(file.fd).st_nlink == 0
        file.write(90_000, 100_000)
        assert_same(os.pread(file.fd, 10**6, 0), file.content)
        assert old.read_bytes() == b"replacement"
    assert old.read_bytes() == b"replacement"


def test_renamed_while_written(target: Target, directory: Path) -> None:
    (directory / "sub").mkdir()
    with ShadowFile(directory / "before") as file:
        file.write(0, 100_000)
        file.path = file.path.rename(directory / "sub" / "after")
        file.write(70_000, 200_000)
        file.check()
        expected = bytes(file.content)
    target.remount()
    assert not (directory / "before").exists()
    assert_same((directory / "sub" / "after").read_bytes(), expected)


def test_written_through_one_link_read_through_another(target: Target, directory: Path) -> None:
    one, other = directory / "one", directory / "other"
    with ShadowFile(one) as file:
        file.write(0, 50_000)
        os.link(one, other)
        file.write(40_000, 70_000)
        assert_same(other.read_bytes(), file.content)
        one.unlink()
        file.write(0, 10)
        file.path = other
        file.check()
        assert os.fstat(file.fd).st_nlink == 1
        expected = bytes(file.content)
    target.remount()
    assert_same(other.read_bytes(), expected)


def test_folder_of_an_open_file_is_renamed(directory: Path) -> None:
    (directory / "a" / "b").mkdir(parents=True)
    with ShadowFile(directory / "a" / "b" / "file") as file:
        file.write(0, 1000)
        (directory / "a").rename(directory / "c")
        file.write(500, 100_000)
        file.path = directory / "c" / "b" / "file"
        file.check()


def test_removed_working_directory(directory: Path) -> None:
    (directory / "gone").mkdir()
    fd = os.open(directory / "gone", os.O_RDONLY | os.O_DIRECTORY)
    (directory / "gone").rmdir()
    assert os.listdir(fd) == []
    try:
        os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    except FileNotFoundError:
        pass
    else:
        raise AssertionError("a file was created in a removed directory")
    finally:
        os.close(fd)


FORKED = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
os.write(fd, b"parent ")
child = os.fork()
if child == 0:
    os.write(fd, b"child ")
    os._exit(0)
os.waitpid(child, 0)
print("child ended", flush=True)
sys.stdin.readline()
os.write(fd, b"parent again")
copy = os.dup(fd)
os.close(fd)
os.write(copy, b" copy")
os.close(copy)
print("done", flush=True)
"""


def test_fork_and_dup_share_the_position(directory: Path) -> None:
    path = directory / "file"
    with python_child(FORKED, path) as child:
        expect_line(child, "child ended")
        assert path.read_bytes() == b"parent child "
        tell(child)
        expect_line(child, "done")
    assert path.read_bytes() == b"parent child parent again copy"


def test_who_only_writes_fills_no_pages(mount: Mount, directory: Path) -> None:
    """Not by asking for it in advance: nobody looks for pages of a file that no reader opened."""

    def reads() -> int:
        return mount.status().channel["reads"]

    path = directory / "file"
    content = random_bytes(2**20, seed=0)
    path.write_bytes(content)
    mount.flush()
    path.stat()  # the next reader asks for attributes no more
    entry = mount.entry()
    assert entry is not None
    waiting = Path("/sys/fs/fuse/connections", entry.device.partition(":")[2], "waiting")
    before = reads()
    fd = os.open(path, os.O_WRONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    wait_until(lambda: reads() > before)
    wait_until(lambda: waiting.read_text() == "0\n")
    os.close(fd)
    refused = reads()
    assert_same(path.read_bytes(), content)
    filled = reads()
    assert filled > refused
    assert_same(path.read_bytes(), content)
    assert reads() == filled


def test_many_handles_on_one_file(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(1000))
    handles = [os.open(path, os.O_RDWR) for _ in range(200)]
    for number, fd in enumerate(handles):
        os.pwrite(fd, bytes([number]), number)
    expected = bytes(range(200)) + bytes(800)
    for fd in handles:
        assert os.pread(fd, 1000, 0) == expected
        os.close(fd)
    assert path.read_bytes() == expected
