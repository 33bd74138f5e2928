"""flock(2), fcntl(2) record locks and open file description locks, between processes."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

import pytest

from tests.support.processes import expect_line, python_child, tell

HOLDER = """
import fcntl, os, struct, sys
kind, path, shared = sys.argv[1], sys.argv[2], sys.argv[3] == "shared"
fd = os.open(path, os.O_RDWR)
if kind == "flock":
    fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
elif kind == "ofd":
    record = struct.pack("hhqqi", fcntl.F_RDLCK if shared else fcntl.F_WRLCK, 0, 100, 50, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, record)
else:
    fcntl.lockf(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, 50, 100)
print("locked", flush=True)
for line in sys.stdin:
    if line == "unlock\\n":
        os.close(fd)
        print("unlocked", flush=True)
"""


def attempt(fd: int, kind: str, *, shared: bool) -> bool:
    """Try to lock bytes 100 to 149 (flock: the file) without waiting."""
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    try:
        if kind == "flock":
            fcntl.flock(fd, operation)
        elif kind == "ofd":
            record = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
            packed = struct.pack("hhqqi", record, 0, 100, 50, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, packed)
        else:
            fcntl.lockf(fd, operation, 50, 100)
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("kind", ["flock", "fcntl", "ofd"])
def test_exclusive_excludes(directory: Path, kind: str) -> None:
    path = directory / "file"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDWR)
    with python_child(HOLDER, kind, path, "exclusive") as child:
        expect_line(child, "locked")
        assert not attempt(fd, kind, shared=True)
        assert not attempt(fd, kind, shared=False)
        tell(child, "unlock")
        expect_line(child, "unlocked")
        assert attempt(fd, kind, shared=False)
    os.close(fd)


@pytest.mark.parametrize("kind", ["flock", "fcntl", "ofd"])
def test_shared_allows_shared(directory: Path, kind: str) -> None:
    path = directory / "file"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDWR)
    with python_child(HOLDER, kind, path, "shared") as child:
        expect_line(child, "locked")
        assert attempt(fd, kind, shared=True)
        assert not attempt(fd, kind, shared=False)
    os.close(fd)


@pytest.mark.parametrize("kind", ["flock", "fcntl", "ofd"])
def test_death_releases(directory: Path, kind: str) -> None:
    path = directory / "file"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDWR)
    with python_child(HOLDER, kind, path, "exclusive") as child:
        expect_line(child, "locked")
        assert not attempt(fd, kind, shared=False)
        child.kill()
        child.wait()
        assert attempt(fd, kind, shared=False)
    os.close(fd)


@pytest.mark.parametrize("kind", ["flock", "fcntl", "ofd"])
def test_waiting_until_unlocked(directory: Path, kind: str) -> None:
    """A process that waits for a lock gets it when the holder closes the file."""
    path = directory / "file"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDWR)
    assert attempt(fd, kind, shared=False)
    with python_child(HOLDER, kind, path, "exclusive") as child:
        os.close(fd)
        expect_line(child, "locked")


def test_records_beside_each_other(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDWR)
    with python_child(HOLDER, "fcntl", path, "exclusive") as child:
        expect_line(child, "locked")
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 100, 0)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 0, 150)
        with pytest.raises(BlockingIOError):
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 149)
    os.close(fd)


def test_getlk_names_the_holder(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(bytes(1000))
    fd = os.open(path, os.O_RDWR)
    with python_child(HOLDER, "fcntl", path, "exclusive") as child:
        expect_line(child, "locked")
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0)
        answer = struct.unpack("hhqqi", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        assert answer == (fcntl.F_WRLCK, 0, 100, 50, child.pid)
    os.close(fd)
