"""Ways into a file that few programs take: io_uring, descriptors in sockets, pipes, limits, layers.

docs/testing.md lists which edges of Linux have been tried, and by which tests.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from fpfs.testing.mounted import Mount, check_fpfs
from tests.support.contents import assert_same, random_bytes
from tests.support.processes import KILLED, REPOSITORY, expect_line, python_child, run, tell
from tests.support.target import Target
from tests.support.uring import Flag, Op, Ring, Setup

GOOD = random_bytes(3 * 2**20 + 17, seed=1)
MIB = 2**20


@pytest.fixture
def quarantine(mount: Mount) -> Iterator[Path]:
    """The folder of what was quarantined."""
    mount.allow_log(KILLED)
    folder = mount.root / ".fpfs/partial"
    yield folder
    for path in folder.iterdir():
        path.unlink()


def quarantined(mount: Mount) -> list[bytes]:
    """What killed writers left, when that is known."""
    mount.flush()
    return [path.read_bytes() for path in (mount.root / ".fpfs/partial").iterdir()]


# --- io_uring -------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [Flag.NONE, Flag.ASYNC])
@pytest.mark.parametrize("setup", [Setup.NONE, Setup.SQPOLL])
@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
def test_io_uring_from_a_registered_buffer(
    target: Target, directory: Path, flags: Flag, setup: Setup, direct: int
) -> None:
    """By the caller itself, its worker threads and the kernel's thread for a ring."""
    path = directory / "file"
    ring = Ring(memory_bytes=4 * MIB, setup=setup)
    content = random_bytes(4 * MIB, seed=3)
    ring.memory[:] = content
    fd = os.open(path, os.O_CREAT | os.O_RDWR | direct, 0o644)
    for at in range(0, 4 * MIB, MIB):
        offset = 4 * MIB - MIB - at
        assert ring.transfer(
            Op.WRITE_FIXED, fd, memory_at=offset, size=MIB, offset=offset, flags=flags
        )
    ring.memory[:] = bytes(4 * MIB)
    read = ring.transfer(Op.READ_FIXED, fd, memory_at=0, size=4 * MIB, offset=4096, flags=flags)
    assert read == 4 * MIB - 4096
    assert_same(ring.memory[:read], content[4096:])
    os.close(fd)
    target.remount()
    assert_same(path.read_bytes(), content)


URING_WRITER = f"""
import os, signal, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.support.uring import Flag, Op, Ring, Setup
path, flags, setup = sys.argv[1], Flag(int(sys.argv[2])), Setup(int(sys.argv[3]))
ring = Ring(memory_bytes=1 << 20, setup=setup)
ring.memory[:4] = b"torn"
fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
ring.transfer(Op.WRITE_FIXED, fd, memory_at=0, size=4, offset=0, flags=flags)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("flags", [Flag.NONE, Flag.ASYNC])
@pytest.mark.parametrize("setup", [Setup.NONE, Setup.SQPOLL])
def test_a_writer_that_is_killed_and_wrote_by_io_uring(
    mount: Mount, quarantine: Path, directory: Path, flags: Flag, setup: Setup
) -> None:
    """Its writes came from threads that the kernel made for it: they count as its own."""
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    with python_child(URING_WRITER, path, flags, setup) as child:
        expect_line(child, "ready")
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert quarantined(mount) == [b"torn"]
    assert_same(path.read_bytes(), GOOD)
    with python_child(URING_WRITER, path, flags, setup) as child:
        expect_line(child, "ready")
        tell(child)
        assert child.wait() == 0
    assert quarantined(mount) == [b"torn"]
    assert path.read_bytes() == b"torn"


def test_a_file_of_io_uring_that_has_no_descriptor(target: Target, directory: Path) -> None:
    """It is closed without a FLUSH."""
    path = directory / "step.pt"
    ring = Ring(memory_bytes=MIB)
    ring.memory[:] = GOOD[:MIB]
    ring.open_in_place(str(path), os.O_CREAT | os.O_WRONLY, place=5)
    ring.transfer(Op.WRITE_FIXED, 5, memory_at=0, size=MIB, offset=0, flags=Flag.FIXED_FILE)
    ring.close_place(5)
    assert_same(path.read_bytes(), GOOD[:MIB])
    target.remount()
    assert_same(path.read_bytes(), GOOD[:MIB])


WITHOUT_DESCRIPTOR = f"""
import os, signal, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.support.uring import Flag, Op, Ring
ring = Ring(memory_bytes=1 << 20)
ring.memory[:4] = b"torn"
ring.open_in_place(sys.argv[1], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, place=0)
ring.transfer(Op.WRITE_FIXED, 0, memory_at=0, size=4, offset=0, flags=Flag.FIXED_FILE)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_of_a_file_without_a_descriptor_counts_as_ended(
    mount: Mount, directory: Path
) -> None:
    """The kernel closes such a file in a thread of its own, and tells nobody's end with it."""
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    with python_child(WITHOUT_DESCRIPTOR, path) as child:
        assert child.wait() == -signal.SIGKILL
    check_fpfs("wait", path, module="fpfs.cli.ctl")  # for the kernel's thread
    assert quarantined(mount) == []
    assert path.read_bytes() == b"torn"


# --- descriptors in sockets -----------------------------------------------------------------

SENDER = """
import os, socket, sys
path, address, way = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX)
connection.connect(address)
fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
os.write(fd, b"begun")
socket.send_fds(connection, [b"x"], [fd])
if way == "closes":
    os.close(fd)
print("ready", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def sent(path: Path, address: Path, way: str) -> Iterator[tuple[Popen[str], socket.socket]]:
    """A writer of `path`, and the socket in which its descriptor waits for somebody."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        with python_child(SENDER, path, address, way) as child:
            expect_line(child, "ready")
            connection, _ = listener.accept()
            with connection:
                yield child, connection


@pytest.mark.parametrize(
    ("way", "current"), [("keeps", GOOD), ("closes", b"begun")], ids=["keeps", "closes"]
)
def test_a_writer_that_is_killed_while_a_socket_holds_its_file(
    mount: Mount, quarantine: Path, directory: Path, tmp_path: Path, way: str, current: bytes
) -> None:
    """What it closed is finished; the file is released when the socket goes, by the kernel."""
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    with sent(path, tmp_path / "socket", way) as (child, _connection):
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert quarantined(mount) == ([b"begun"] if way == "keeps" else [])
    assert_same(path.read_bytes(), current)


@pytest.mark.parametrize("way", ["keeps", "closes"])
def test_a_file_that_outlives_its_writer_in_a_socket(
    mount: Mount, directory: Path, tmp_path: Path, way: str
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    with sent(path, tmp_path / "socket", way) as (child, connection):
        tell(child)
        assert child.wait() == 0
        mount.flush()
        _, (fd,), _, _ = socket.recv_fds(connection, 1, 1)
        os.write(fd, b" and ended")
        os.close(fd)
    assert quarantined(mount) == []
    assert path.read_bytes() == b"begun and ended"


# --- pipes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 2 * MIB - 77])
def test_splice_into_a_file_and_out_of_it(target: Target, directory: Path, offset: int) -> None:
    """The bytes go by pages of a pipe, which nobody's buffer holds."""
    (directory / "from").write_bytes(GOOD)
    (directory / "to").write_bytes(GOOD)
    fd_from = os.open(directory / "from", os.O_RDONLY)
    fd_to = os.open(directory / "to", os.O_RDWR)
    pipe_out, pipe_in = os.pipe()
    done = 0
    while moved := os.splice(fd_from, pipe_in, 30_000, offset_src=done):
        left = moved
        while left:
            at = offset + done + moved - left
            left -= os.splice(pipe_out, fd_to, left, offset_dst=at)
        done += moved
    for fd in (fd_from, fd_to, pipe_out, pipe_in):
        os.close(fd)
    target.remount()
    assert_same((directory / "to").read_bytes(), GOOD[:offset] + GOOD)


def test_sendfile_between_files(target: Target, directory: Path) -> None:
    (directory / "from").write_bytes(GOOD)
    fd_from = os.open(directory / "from", os.O_RDONLY)
    fd_to = os.open(directory / "to", os.O_CREAT | os.O_WRONLY, 0o644)
    offset = 0
    while sent_bytes := os.sendfile(fd_to, fd_from, offset, 2**30):
        offset += sent_bytes
    os.close(fd_from)
    os.close(fd_to)
    target.remount()
    assert_same((directory / "to").read_bytes(), GOOD)


# --- a file in its own map ------------------------------------------------------------------


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
def test_a_file_is_written_from_its_own_map_and_read_into_it(
    target: Target, directory: Path, direct: int
) -> None:
    """What is written lies in pages that the same file must be read for, which nobody holds yet."""
    path = directory / "file"
    content = random_bytes(2 * MIB, seed=5)
    path.write_bytes(content)
    target.remount()
    fd = os.open(path, os.O_RDWR | direct)
    with mmap.mmap(fd, 2 * MIB) as mapped, memoryview(mapped) as memory:
        assert os.pwrite(fd, memory[:MIB], MIB) == MIB
        assert_same(bytes(memory), content[:MIB] * 2)
        mapped[MIB : MIB + 4] = b"more"
        assert os.preadv(fd, [memory[:MIB]], MIB) == MIB
    os.close(fd)
    expected = b"more" + content[4:MIB]
    target.remount()
    assert_same(path.read_bytes(), expected * 2)


# --- limits ---------------------------------------------------------------------------------

LIMITED = """
import errno, os, resource, signal, sys
path, way = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
if way != "dies":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
else:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
print(os.write(fd, bytes(1_500_000)))
for call in (
    lambda: os.write(fd, b"x"),
    lambda: os.pwrite(fd, b"x", 2**40),
    lambda: os.ftruncate(fd, 1_000_001),
    lambda: os.posix_fallocate(fd, 0, 1_000_001),
):
    try:
        call()
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
os.ftruncate(fd, 1_000_000)
print(os.fstat(fd).st_size, flush=True)
"""


def test_a_limit_on_the_size_of_files(target: Target, directory: Path) -> None:
    """A write up to the limit is short, one behind it fails, and so does what would make room."""
    path = directory / "file"
    with python_child(LIMITED, path, "goes on") as child:
        output, _ = child.communicate(timeout=60)
        assert child.returncode == 0
    assert output.split() == ["1000000", *["EFBIG"] * 4, "1000000"]
    target.remount()
    assert path.read_bytes() == bytes(1_000_000)


def test_a_writer_that_dies_of_its_limit(mount: Mount, quarantine: Path, directory: Path) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    with python_child(LIMITED, path, "dies") as child:
        assert child.wait(timeout=60) == -signal.SIGXFSZ
    assert quarantined(mount) == [bytes(1_000_000)]
    assert_same(path.read_bytes(), GOOD)


# --- layers ---------------------------------------------------------------------------------


@pytest.fixture
def layers(directory: Path, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Folders of an overlay: on the mount, of the plain filesystem, and where it is shown."""
    made = {
        "ours": directory / "ours",
        "our work": directory / "work",
        "plain": tmp_path / "plain",
        "plain work": tmp_path / "work",
        "merged": tmp_path / "merged",
    }
    for folder in made.values():
        folder.mkdir()
    yield made
    if made["merged"].is_mount():
        run("umount", made["merged"])


def mount_overlay(lower: Path, upper: Path, work: Path, merged: Path) -> None:
    """Raises AssertionError when it is refused."""
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    run("mount", "-t", "overlay", "overlay", "-o", options, merged)


@pytest.mark.root
def test_the_lower_layer_of_an_overlay(layers: dict[str, Path]) -> None:
    """As a container has a model's files below what it changes."""
    ours, merged = layers["ours"], layers["merged"]
    for name in ("changed", "removed", "moved"):
        (ours / name).write_bytes(GOOD)
    mount_overlay(ours, layers["plain"], layers["plain work"], merged)
    assert_same((merged / "changed").read_bytes(), GOOD)
    with (merged / "changed").open("r+b") as file:
        file.write(b"changed")
    (merged / "removed").unlink()
    (merged / "moved").rename(merged / "here")
    assert sorted(path.name for path in merged.iterdir()) == ["changed", "here"]
    assert_same((merged / "changed").read_bytes(), b"changed" + GOOD[7:])
    assert_same((merged / "here").read_bytes(), GOOD)
    run("umount", merged)
    for name in ("changed", "removed", "moved"):
        assert_same((ours / name).read_bytes(), GOOD)


@pytest.mark.root
@pytest.mark.usefixtures("mount")
def test_the_upper_layer_of_an_overlay_is_refused(layers: dict[str, Path]) -> None:
    """The kernel asks for whiteouts there, which fpfs has none of: it says so at once."""
    with pytest.raises(AssertionError, match="mount: .*"):
        mount_overlay(layers["plain"], layers["ours"], layers["our work"], layers["merged"])
    assert list(layers["ours"].iterdir()) == []
