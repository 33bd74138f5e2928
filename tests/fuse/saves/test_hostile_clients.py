"""Clients that stand still where a filesystem might wait for them: nobody else does.

Each test has a client suspended, traced, in the middle of an exec, or with its memory where it
never comes from; others work meanwhile, all native threads of the server come to rest, and the
mount ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount, mounted
from tests.support.contents import assert_same
from tests.support.failures.hostile import (
    CONTENT,
    DEADLINE_S,
    MEMORY,
    USES_OF_MEMORY,
    never_hanging,
    others_go_on,
    silent,
    suspended,
    wait_at_rest,
    wait_ended,
    wait_in,
    wait_in_exec,
)
from tests.support.failures.stopped_threads import traced
from tests.support.processes import KILLED, expect_line, python_child, run, tell

WRITER = """
import os, signal, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(fd, b"torn")
print("ready", flush=True)
signal.pause()
"""

ASKER = f"""
import os, signal, sys
signal.alarm({DEADLINE_S})
print("asks", flush=True)
while os.path.exists(sys.argv[1]):
    pass
print("gone", flush=True)
"""


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    """The mount whose threads must not wait; two of them receive requests."""
    with mounted(options=["receivers=2"]) as opened:
        opened.allow_log(KILLED)
        yield opened


@pytest.fixture(scope="module")
def other() -> Iterator[Mount]:
    """A filesystem of somebody else, which will not answer."""
    with mounted(devices=1) as opened:
        opened.allow_log(KILLED)
        (opened.root / "file").write_bytes(CONTENT)
        yield opened


@pytest.fixture
def folder(folder: Path) -> Path:
    """With a file that was written before."""
    (folder / "file").write_bytes(CONTENT)
    return folder


def kill_a_writer(path: Path) -> None:
    """Leave a beginning of a file, which is no file then."""
    with python_child(WRITER, path) as child:
        expect_line(child, "ready")
        child.kill()
        child.wait(timeout=DEADLINE_S)


def check(mount: Mount, folder: Path, *, held: str = "") -> None:
    """Others work in all ways, also in the client's own folder, and no thread is left behind.

    Except the one that is `held`, which nobody waits for.
    """
    assert_same((folder / "file").read_bytes(), CONTENT)
    with (folder / "file").open("rb") as reader, (folder / "file").open("r+b") as writer:
        assert_same(reader.read(), CONTENT)  # from the page cache, which the next line invalidates
        writer.write(CONTENT)
    others_go_on(mount.root / f"{folder.name}-others")
    mount.flush()
    wait_at_rest(mount, held=held)


@pytest.mark.root
@pytest.mark.parametrize("use", USES_OF_MEMORY)
def test_memory_that_is_never_paged_in(mount: Mount, folder: Path, use: str) -> None:
    (folder / "client").write_bytes(CONTENT)
    code = f"{MEMORY}\npath = sys.argv[1]\nmemory = paged_out()\n{USES_OF_MEMORY[use]}"
    with python_child(code, folder / "client") as child:
        expect_line(child, "ready")
        wait_in(child.pid, "userfault")
        check(mount, folder)
        child.kill()
        child.wait(timeout=DEADLINE_S)
    check(mount, folder)


@pytest.mark.root
@pytest.mark.parametrize("use", USES_OF_MEMORY)
def test_memory_on_a_filesystem_that_hangs(
    mount: Mount, other: Mount, folder: Path, use: str
) -> None:
    (folder / "client").write_bytes(CONTENT)
    with (other.root / "file").open("rb") as cached:
        os.posix_fadvise(cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = (
        f"{MEMORY}\npath = sys.argv[1]\nmemory = mapped(sys.argv[2])\n"
        f"os.write(1, b'mapped\\n')\nassert sys.stdin.readline() == 'go\\n'\n{USES_OF_MEMORY[use]}"
    )
    with python_child(code, folder / "client", other.root / "file") as child:
        expect_line(child, "mapped")
        with silent(other):
            tell(child)
            expect_line(child, "ready")
            wait_in(child.pid, "fuse|folio|request_wait|filemap")
            check(mount, folder)
        child.wait(timeout=DEADLINE_S)
    check(mount, folder)


@pytest.mark.root
def test_a_name_that_goes_from_a_directory_that_somebody_holds(mount: Mount, folder: Path) -> None:
    """The kernel is told of a name whose directory's lock a reader holds; others' writes go on.

    When the reader goes on, who only asks for the name, and has asked before, finds it gone.
    """
    partial = mount.root / ".fpfs/partial"
    reader = f"{MEMORY}\npath = sys.argv[1]\nmemory = paged_out()\n{USES_OF_MEMORY['list']}"
    with python_child(WRITER, folder / "step.pt") as killed:
        expect_line(killed, "ready")
        with python_child(reader, folder / "x") as holds:
            expect_line(holds, "ready")
            wait_in(holds.pid, "userfault")
            killed.kill()
            killed.wait(timeout=DEADLINE_S)
            check(mount, folder, held="fpfs-names")
            with python_child(ASKER, folder / "step.pt") as asks:
                expect_line(asks, "asks")
                check(mount, folder, held="fpfs-names")
                tell(holds)
                assert holds.wait(timeout=DEADLINE_S) == 0
                expect_line(asks, "gone")
    wait_at_rest(mount)
    assert not (folder / "step.pt").exists()
    (left,) = partial.iterdir()
    assert left.read_bytes() == b"torn"


@pytest.mark.root
def test_what_is_mounted_in_the_mount_stays_when_a_name_goes(mount: Mount, folder: Path) -> None:
    inner, outer = folder / "inner", folder / "outer"
    inner.mkdir()
    outer.mkdir()
    (outer / "file").write_bytes(b"outer")
    run("mount", "--bind", outer, inner)
    try:
        kill_a_writer(folder / "elsewhere.pt")
        mount.flush()
        wait_at_rest(mount)
        assert not (folder / "elsewhere.pt").exists()
        assert (inner / "file").read_bytes() == b"outer"
    finally:
        run("umount", inner)


@pytest.mark.parametrize("stopped", [suspended, traced])
def test_a_client_that_is_stopped_in_the_middle_of_writing(
    mount: Mount, folder: Path, stopped: Callable[[int], AbstractContextManager[None]]
) -> None:
    """It is stopped anywhere in a loop of writes, again and again."""
    code = """
import os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
content = bytes(range(256)) * 8192
os.write(fd, content)
print("ready", flush=True)
while True:
    os.pwrite(fd, content, 0)
"""
    with python_child(code, folder / "client") as child:
        expect_line(child, "ready")
        for _ in range(5):
            with stopped(child.pid):
                check(mount, folder)
                assert_same((folder / "client").read_bytes(), CONTENT)
        child.kill()
        child.wait(timeout=DEADLINE_S)
    check(mount, folder)


def test_a_client_whose_exec_hangs_elsewhere(mount: Mount, other: Mount, folder: Path) -> None:
    """It closes a file that never gets closed, and holds what every look at it waits for."""
    code = """
import os, sys
victim, other = sys.argv[1:]
files = [os.open(path, os.O_CREAT | os.O_WRONLY)
         for path in (f"{victim}/before.pt", f"{other}/client", f"{victim}/after.pt")]
for file in files:
    os.write(file, b"whole")
print("ready", flush=True)
assert sys.stdin.readline() == "go\\n"
os.execlp("true", "true")
"""
    with python_child(code, folder, other.root) as child:
        expect_line(child, "ready")
        with silent(other):
            tell(child)
            wait_in_exec(child.pid)
            check(mount, folder)
            assert (folder / "before.pt").read_bytes() == b"whole"
        assert child.wait(timeout=DEADLINE_S) == 0
    mount.flush()
    assert (folder / "after.pt").read_bytes() == b"whole"
    check(mount, folder)


def test_the_mount_ends_although_a_client_is_stopped() -> None:
    """By a signal, as an operator ends it."""
    with mounted() as mount, never_hanging(mount):
        mount.expect_log("files were open at the end")
        with python_child(WRITER, mount.root / "file") as child:
            expect_line(child, "ready")
            with suspended(child.pid):
                process_fd = os.pidfd_open(mount.server_pid)
                os.kill(mount.keeper_pid, signal.SIGTERM)
                wait_ended(process_fd)
                os.close(process_fd)
        mount.forget()
