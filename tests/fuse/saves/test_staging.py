"""A small staging arena: many partly filled files, writers that wait, and writers killed waiting.

Staging stays full for as long as a device stands still (`tests.support.failures.frozen`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount, mounted
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.frozen import (
    FILLER,
    STAGING,
    STAGING_BYTES,
    Freezer,
    devices_to_freeze,
    needs_lab,
    wait_until_full,
    wait_until_writes_wait,
)
from tests.support.processes import KILLED, expect_line, python_child, tell
from tests.support.seeds import IS_LONG

MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def small() -> Iterator[Mount]:
    """A mount whose arena holds sixteen chunks."""
    with mounted(staging=STAGING) as opened:
        yield opened


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Let this process open thousands of files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[1], 8192), max(before[1], 8192)))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_descriptors")
def test_thousands_of_open_files_with_partly_filled_chunks(small: Mount) -> None:
    """Each takes a slot or a part of one; there are sixteen, and nothing waits for ever."""
    folder = small.root / "open"
    folder.mkdir()
    count, piece = 2000 if IS_LONG else 1000, 20_001
    handles = [os.open(folder / str(n), os.O_RDWR | os.O_CREAT) for n in range(count)]
    for step in range(2):
        for number, fd in enumerate(handles):
            os.pwrite(fd, random_bytes(piece, seed=number * 2 + step), step * piece)
    for number, fd in enumerate(handles):
        expected = b"".join(random_bytes(piece, seed=number * 2 + step) for step in range(2))
        assert_same(os.pread(fd, 3 * piece, 0), expected)
        os.close(fd)
    small.remount()
    for number in range(0, count, 37):
        expected = b"".join(random_bytes(piece, seed=number * 2 + step) for step in range(2))
        assert_same((folder / str(number)).read_bytes(), expected)


def test_nothing_is_staged_when_all_is_durable(small: Mount) -> None:
    path = small.root / "streamed"
    with path.open("wb", buffering=0) as file:
        for seed in range(20):
            file.write(random_bytes(MEBIBYTE, seed=seed))
        file.write(b"part of a chunk, which waits for the rest of it")
        assert small.status().staging.bytes_used > 0
    small.flush()
    while small.status().staging.bytes_used > 0:  # the thread that received them goes to sleep
        pass


def test_a_file_much_larger_than_staging(small: Mount) -> None:
    path = small.root / "large"
    parts = [random_bytes(MEBIBYTE + 1, seed=seed) for seed in range(16)]
    with path.open("wb", buffering=0) as file:
        for number in range(128):
            file.write(parts[number % 16])
    with path.open("rb", buffering=0) as file:
        for number in range(128):
            assert_same(file.read(MEBIBYTE + 1), parts[number % 16])
        assert file.read() == b""
    path.unlink()


PARALLEL_WRITER = """
import os, sys
path = sys.argv[1]
data = open(sys.argv[2], "rb").read()
fd = os.open(path, os.O_WRONLY | os.O_CREAT)
for number in range(24):
    os.pwrite(fd, data, number * 1_000_003)
os.close(fd)
print("done", flush=True)
"""


def test_more_writers_than_slots(small: Mount, tmp_path: Path) -> None:
    count = 24
    pieces = [random_bytes(1_000_003, seed=seed) for seed in range(count)]
    with contextlib.ExitStack() as stack:
        children = []
        for number, piece in enumerate(pieces):
            (tmp_path / f"w{number}").write_bytes(piece)
            arguments = (small.root / f"w{number}", tmp_path / f"w{number}")
            children.append(stack.enter_context(python_child(PARALLEL_WRITER, *arguments)))
        for child in children:
            expect_line(child, "done")
    for number, piece in enumerate(pieces):
        expected = piece * 24
        assert_same((small.root / f"w{number}").read_bytes(), expected)
        (small.root / f"w{number}").unlink()


@pytest.fixture
def frozen_lab(tmp_path: Path) -> Iterator[tuple[Mount, Freezer]]:
    """A small mount on two loop devices, and the means to make the second stand still."""
    with (
        devices_to_freeze(tmp_path) as (folders, freezer),
        mounted(devices=folders, staging=STAGING, parent=tmp_path) as opened,
    ):
        try:
            yield opened, freezer
        finally:
            freezer.thaw()


@needs_lab
def test_a_writer_killed_while_it_waits_for_staging_dies(
    frozen_lab: tuple[Mount, Freezer],
) -> None:
    mount, freezer = frozen_lab
    (mount.root / "before").write_bytes(b"committed")
    mount.flush()
    with python_child(FILLER, mount.root / "endless") as child:
        expect_line(child, "open")
        freezer.freeze()
        tell(child)
        wait_until_full(mount.root)
        assert mount.status().staging.bytes_used > STAGING_BYTES // 2
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(timeout=60) == -signal.SIGKILL  # the device is still frozen
    assert (mount.root / "before").read_bytes() == b"committed"
    freezer.thaw()
    (mount.root / "after").write_bytes(b"goes on")
    mount.flush()


KILLER = """
import os, random, select, signal, sys, time
folder, waves, all_wait = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "all wait"
chance = random.Random(1)
content = bytes(2**20)
files = [os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT) for number in range(25)]
for file in files:
    os.posix_fallocate(file, 0, len(content))
print("open", flush=True)
sys.stdin.readline()

def start(file):
    '''A child that writes when it is told to.'''
    wait_fd, go_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_fd)
        os.read(wait_fd, 1)
        os.write(file, content)
        os._exit(0)
    os.close(wait_fd)
    return pid, os.pidfd_open(pid), go_fd

def waits(pid):
    with open(f"/proc/{pid}/stack") as stack:
        return "request_wait_answer" in stack.read()

for wave in range(waves):
    children = [start(file) for file in files]
    for pid, _, go_fd in children:
        os.write(go_fd, b"x")
        if all_wait:
            continue
        until_s = time.monotonic() + chance.uniform(0, 0.001)
        while time.monotonic() < until_s:
            pass  # it is killed before, while and after its request is received
        os.kill(pid, signal.SIGKILL)
    if all_wait:
        while not all(waits(pid) for pid, _, _ in children):
            ended = select.select([process_fd for _, process_fd, _ in children], [], [], 0)[0]
            assert not ended, f"some of wave {wave} did not wait"
        for pid, _, _ in children:
            os.kill(pid, signal.SIGKILL)
    for pid, process_fd, go_fd in children:
        if not select.select([process_fd], [], [], 60)[0]:
            print(f"{pid} of wave {wave} does not die", flush=True)
            os._exit(1)
        assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
        os.close(process_fd)
        os.close(go_fd)
print("all died", flush=True)
sys.stdin.readline()
"""


@needs_lab
@pytest.mark.parametrize(("when", "waves"), [("any moment", 20), ("all wait", 2)])
def test_many_writers_killed_while_they_wait_for_staging_die(
    frozen_lab: tuple[Mount, Freezer], when: str, waves: int
) -> None:
    """Also when the kernel's message of it overtakes the request, or more wait than are let in."""
    mount, freezer = frozen_lab
    mount.remount("staging=16M", "receivers=4")
    mount.allow_log(KILLED)
    with (
        python_child(FILLER, mount.root / "endless") as filler,
        python_child(KILLER, mount.root, waves, when) as killer,
    ):
        expect_line(filler, "open")
        expect_line(killer, "open")
        freezer.freeze()
        try:
            tell(filler)
            wait_until_full(mount.root)
            tell(killer)
            expect_line(killer, "all died")
            filler.kill()
            assert filler.wait(timeout=60) == -signal.SIGKILL
        finally:
            freezer.thaw()
        tell(killer)
    (mount.root / "after").write_bytes(b"goes on")
    mount.flush()
    mount.remount()
    assert (mount.root / "after").read_bytes() == b"goes on"


@needs_lab
def test_a_waiting_writer_goes_on_when_the_devices_do(
    frozen_lab: tuple[Mount, Freezer], tmp_path: Path
) -> None:
    mount, freezer = frozen_lab
    piece = random_bytes(1_000_003, seed=3)
    (tmp_path / "piece").write_bytes(piece)
    freezer.freeze()
    path = mount.root / "file"
    with python_child(PARALLEL_WRITER, path, tmp_path / "piece") as child:
        wait_until_writes_wait(mount.root, 1)
        assert mount.status().staging.bytes_used <= STAGING_BYTES
        freezer.thaw()
        expect_line(child, "done")
    assert_same(path.read_bytes(), piece * 24)


PWRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY)
print("open", flush=True)
sys.stdin.readline()
assert os.pwrite(fd, b"written", 2000) == 7
print("written", flush=True)
"""

STORER = """
import mmap, os, sys
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
print("mapped", flush=True)
sys.stdin.readline()
mapped[100:106] = b"stored"
print("stored", flush=True)
sys.stdin.readline()
mapped.flush()
print("flushed", flush=True)
"""


@needs_lab
def test_a_write_that_waits_is_not_lost_beside_a_map(frozen_lab: tuple[Mount, Freezer]) -> None:
    """A page that is read and stored to while a write to it waits is older than that write."""
    mount, freezer = frozen_lab
    path = mount.root / "mapped"
    path.write_bytes(bytes(4096))
    mount.flush()
    with (
        python_child(FILLER, mount.root / "endless") as filler,
        python_child(PWRITER, path) as writer,
        python_child(STORER, path) as storer,
    ):
        expect_line(filler, "open")
        expect_line(writer, "open")
        expect_line(storer, "mapped")
        freezer.freeze()
        tell(filler)
        wait_until_full(mount.root)
        tell(writer)
        wait_until_writes_wait(mount.root, 2)
        tell(storer)
        expect_line(storer, "stored")
        filler.kill()
        freezer.thaw()
        expect_line(writer, "written")
        tell(storer)
        expect_line(storer, "flushed")
    expected = bytes(100) + b"stored" + bytes(1894) + b"written" + bytes(2089)
    assert_same(path.read_bytes(), expected)
    mount.remount()
    assert_same(path.read_bytes(), expected)


@needs_lab
def test_names_are_served_while_staging_is_full(frozen_lab: tuple[Mount, Freezer]) -> None:
    """Readers of what is staged, and calls about names, do not wait behind writers."""
    mount, freezer = frozen_lab
    (mount.root / "folder").mkdir()
    (mount.root / "folder" / "small").write_bytes(b"small")
    mount.flush()
    with python_child(FILLER, mount.root / "endless") as child:
        expect_line(child, "open")
        freezer.freeze()
        tell(child)
        wait_until_full(mount.root)
        assert mount.status().staging.bytes_used > STAGING_BYTES // 2
        assert os.listdir(mount.root / "folder") == ["small"]
        assert (mount.root / "folder" / "small").stat().st_size == 5
        assert mount.status().staging.bytes_total == STAGING_BYTES
        with (mount.root / "endless").open("rb") as reader:
            assert reader.read(1000) == b"x" * 1000
        child.kill()
    freezer.thaw()


@needs_lab
def test_rewrite_of_preallocated_blocks_on_their_way(frozen_lab: tuple[Mount, Freezer]) -> None:
    """The second write finds the promised places taken by the first, and needs places of its own.

    The log of the server tells when it had none (`mounted` fails on warnings).
    """
    mount, freezer = frozen_lab
    path = mount.root / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 4 * MEBIBYTE)
    os.close(fd)
    mount.remount()  # what was preallocated beyond the file is given back
    fd = os.open(path, os.O_RDWR)
    freezer.freeze()
    os.pwrite(fd, random_bytes(4 * MEBIBYTE, seed=1), 0)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = random_bytes(4 * MEBIBYTE - 70_000, seed=2)
        rewrite = pool.submit(os.pwrite, fd, second, 0)
        concurrent.futures.wait([rewrite], timeout=1)  # it may wait for space on the device
        freezer.thaw()
        assert rewrite.result() == len(second)
    os.fsync(fd)
    os.close(fd)
    tail = random_bytes(4 * MEBIBYTE, seed=1)[-70_000:]
    expected = second + tail
    assert_same(path.read_bytes(), expected)
    mount.remount()
    assert_same(path.read_bytes(), expected)
