"""What is durable when: O_SYNC, fsync of files and folders, closes, the modes of `ack`.

A crash here is the server killed and the mount aborted: what was durable is there at the next
mount. (That devices are flushed, too, only a recorder below the server could tell.)

Invariants:
  * A commit is seen in the server's own count; so a test that expects none first sees one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fpfs.core.protocol.control import ControlClient
from fpfs.core.protocol.questions import CommitGroup, FlushAll
from fpfs.testing.mounted import Mount, check_fpfs, mounted
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.crash import close_dead, crash_and_mount
from tests.support.failures.stopped_threads import stopped_threads
from tests.support.processes import expect_line, python_child, run, tell

SIZE = 2 * 2**20 + 777


@pytest.fixture
def fresh() -> Iterator[Mount]:
    """A mount of its own, for tests that kill the server."""
    with mounted() as opened:
        yield opened


def commits(mount: Mount) -> int:
    """Versions committed since the mount, when nothing is pending."""
    status = mount.status().commit
    assert status.pending == 0
    return status.committed


def test_fsync_of_a_file_survives_a_crash(fresh: Mount) -> None:
    path = fresh.root / "file"
    expected = random_bytes(SIZE, seed=1)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, expected)
    os.fsync(fd)
    os.close(fd)
    crash_and_mount(fresh)
    assert_same(path.read_bytes(), expected)


def test_fsync_before_a_crash_in_the_middle_keeps_what_was_synced(fresh: Mount) -> None:
    """The handle is open when the server dies: the bytes of the last fsync are there."""
    path = fresh.root / "file"
    first, second = random_bytes(SIZE, seed=2), random_bytes(SIZE, seed=3)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, first)
    os.fsync(fd)
    os.pwrite(fd, second, 0)
    crash_and_mount(fresh)
    close_dead(fd)
    assert path.read_bytes() in (first, second)


@pytest.mark.parametrize("flag", [os.O_SYNC, os.O_DSYNC])
def test_synchronous_writes_survive_a_crash(fresh: Mount, flag: int) -> None:
    path = fresh.root / "file"
    expected = b""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | flag)
    before = commits(fresh)
    for seed in range(4):
        data = random_bytes(70_001, seed=seed)
        os.write(fd, data)
        expected += data
        assert commits(fresh) == before + seed + 1
    crash_and_mount(fresh)
    close_dead(fd)
    assert_same(path.read_bytes(), expected)


def test_what_was_closed_before_a_synchronous_write_survives_with_it(fresh: Mount) -> None:
    expected = {f"file{number}": random_bytes(20_000, seed=number) for number in range(10)}
    fd = os.open(fresh.root / "log", os.O_WRONLY | os.O_CREAT | os.O_DSYNC)
    for name, content in expected.items():
        (fresh.root / name).write_bytes(content)
    os.write(fd, b"all are written")
    crash_and_mount(fresh)
    close_dead(fd)
    assert (fresh.root / "log").read_bytes() == b"all are written"
    for name, content in expected.items():
        assert_same((fresh.root / name).read_bytes(), content)


def test_fsync_of_a_folder_makes_its_names_durable(fresh: Mount) -> None:
    (fresh.root / "folder").mkdir()
    (fresh.root / "folder" / "before").write_bytes(b"content")
    (fresh.root / "folder" / "before").rename(fresh.root / "folder" / "after")
    fd = os.open(fresh.root / "folder", os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)
    crash_and_mount(fresh)
    assert os.listdir(fresh.root / "folder") == ["after"]
    assert (fresh.root / "folder" / "after").read_bytes() == b"content"


def test_fsync_through_a_handle_that_only_reads(fresh: Mount) -> None:
    path = fresh.root / "file"
    expected = random_bytes(SIZE, seed=4)
    writer = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(writer, expected)
    reader = os.open(path, os.O_RDONLY)
    before = commits(fresh)
    os.fsync(reader)
    assert commits(fresh) == before + 1
    os.close(reader)
    os.close(writer)


def test_a_torn_overwrite_leaves_old_or_new(fresh: Mount) -> None:
    """The server dies while a file is overwritten: its name never holds a mix."""
    path = fresh.root / "checkpoint.pt"
    old, new = random_bytes(SIZE, seed=5), random_bytes(SIZE, seed=6)
    path.write_bytes(old)
    fresh.flush()
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, new[: SIZE // 2])
    crash_and_mount(fresh)
    close_dead(fd)
    assert path.read_bytes() == old


@pytest.mark.parametrize("flags", [os.O_TRUNC, 0])
def test_an_overwrite_right_after_a_close_leaves_what_was_closed(fresh: Mount, flags: int) -> None:
    """The next writer comes before the commit of what was closed, and dies with the server."""
    path = fresh.root / "checkpoint.pt"
    old, new = random_bytes(SIZE, seed=7), random_bytes(SIZE, seed=8)
    path.write_bytes(old)
    fd = os.open(path, os.O_WRONLY | flags)
    os.write(fd, new[: SIZE // 2])
    # Versions become current in the order of closes, so this commits the first one.
    with open(fresh.root / "behind", "wb") as behind:
        behind.write(b"content")
        behind.flush()
        os.fsync(behind.fileno())
    crash_and_mount(fresh)
    close_dead(fd)
    assert_same(path.read_bytes(), old)


def test_wait_and_flush(mount: Mount, directory: Path) -> None:
    """A closed file is committed by itself soon; `fpfs-ctl flush` waits for it."""
    before = mount.status().commit.committed
    (directory / "file").write_bytes(random_bytes(SIZE, seed=7))
    assert mount.flush().failures == ()
    assert commits(mount) > before


@pytest.mark.parametrize("verb", ["flush", "commit"])
def test_what_was_closed_is_in_it_though_nobody_has_received_the_close(
    fresh: Mount, verb: str
) -> None:
    """The kernel sends RELEASE behind the back of close(2), and a command comes another way.

    A message keeps the file until channel threads are stopped, so that close(2) itself is answered.
    """
    check_fpfs("policy", "set", fresh.root, "commit=group", module="fpfs.cli.ctl")
    group = fresh.root / "step"
    group.mkdir()
    ino = group.stat().st_ino
    path = group / "model.pt"
    path.write_bytes(b"previous")
    fresh.flush()
    before = commits(fresh)
    sender, receiver = socket.socketpair()
    with path.open("r+b") as file:
        file.write(b"changed!")
        file.flush()
        socket.send_fds(sender, [b"kept"], [file.fileno()])
    entry = fresh.entry()
    assert entry is not None
    with (
        ControlClient(entry, asked=f"{verb}") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with stopped_threads_or_skip(fresh.server_pid):
            sender.close()
            receiver.close()
            question = FlushAll() if verb == "flush" else CommitGroup(ino=ino)
            asked = pool.submit(client.ask, question)
            for _ in range(20):  # others that come later are answered meanwhile
                fresh.status()
            assert not asked.done()
        assert asked.result().failures == ()
    assert commits(fresh) == before + 1


@contextlib.contextmanager
def stopped_threads_or_skip(server_pid: int) -> Iterator[None]:
    """A server that receives nothing from the kernel."""
    with contextlib.ExitStack() as stopped:
        try:
            stopped.enter_context(stopped_threads(server_pid, "fpfs-channel"))
        except PermissionError:
            pytest.skip("users may not trace their processes here")
        yield


REDIRECTION = "exec 3>{path}; (echo first >&3); read line; (echo second >&3); read line; exec 3>&-"


def test_shell_redirection_commits_once_at_its_end(mount: Mount, directory: Path) -> None:
    """Each ( ) is a child whose exit flushes a handle that the shell still writes to."""
    path = directory / "file.pt"  # of others what was appended is committed now and then
    mount.flush()
    before = commits(mount)
    with subprocess.Popen(
        ["sh", "-c", REDIRECTION.format(path=path)], stdin=subprocess.PIPE, text=True
    ) as shell:
        for expected in ("first\n", "first\nsecond\n"):
            while path.exists() is False or path.read_text() != expected:
                assert shell.poll() is None
            assert commits(mount) == before
            tell(shell)
        assert shell.wait() == 0
    assert path.read_text() == "first\nsecond\n"
    mount.flush()
    assert commits(mount) == before + 1


SAVER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.write(fd, b"a" * 3_000_000)
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
else:
    os.close(os.dup(fd))
print("middle", flush=True)
sys.stdin.readline()
os.write(fd, b"b" * 3_000_000)
os.close(fd)
print("closed", flush=True)
"""


@pytest.mark.parametrize("how", ["fork", "dup"])
def test_a_flush_in_the_middle_of_a_save_does_not_commit(
    mount: Mount, directory: Path, how: str
) -> None:
    path = directory / "file"
    path.write_bytes(b"previous")
    mount.flush()
    before = commits(mount)
    with python_child(SAVER, path, how) as child:
        expect_line(child, "middle")
        assert commits(mount) == before
        tell(child)
        expect_line(child, "closed")
    mount.flush()
    assert commits(mount) == before + 1
    assert path.read_bytes() == b"a" * 3_000_000 + b"b" * 3_000_000


def test_a_flush_in_the_middle_and_a_crash_leave_the_previous_content(fresh: Mount) -> None:
    path = fresh.root / "model.pt"
    path.write_bytes(b"previous")
    fresh.flush()
    with python_child(SAVER, path, "fork") as child:
        expect_line(child, "middle")
        crash_and_mount(fresh)
        assert path.read_bytes() == b"previous"


def test_sh_echo_overwrite(mount: Mount, directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(random_bytes(100_000, seed=8))
    run("sh", "-c", f"echo x > {path}")
    assert path.read_bytes() == b"x\n"
    run("sh", "-c", f"echo y >> {path}")
    assert path.read_bytes() == b"x\ny\n"


@pytest.mark.parametrize("mode", ["close", "durable"])
def test_close_waits_for_durability(mode: str) -> None:
    """With ack=close or ack=durable a file that was closed survives a crash at once."""
    with mounted(options=[f"ack={mode}"]) as opened:
        expected = {}
        for seed in range(5):
            expected[f"file{seed}"] = random_bytes(SIZE, seed=seed)
            (opened.root / f"file{seed}").write_bytes(expected[f"file{seed}"])
        crash_and_mount(opened)
        for name, content in expected.items():
            assert_same((opened.root / name).read_bytes(), content)


def copy(source: int, target: int) -> None:
    """`SIZE` bytes by copy_file_range(2), without reading them."""
    done = 0
    while done < SIZE:
        done += os.copy_file_range(source, target, SIZE - done, done, done)


@pytest.mark.parametrize("mode", ["close", "durable"])
def test_close_waits_for_changes_that_are_no_writes(mode: str) -> None:
    """What was copied, allocated or truncated is durable like what was written."""
    with mounted(options=[f"ack={mode}"]) as opened:
        content = random_bytes(SIZE, seed=1)
        for name in ("source", "truncated", "punched"):
            (opened.root / name).write_bytes(content)
        source = os.open(opened.root / "source", os.O_RDONLY)
        for name, change in {
            "copied": lambda fd: copy(source, fd),
            "allocated": lambda fd: os.posix_fallocate(fd, 0, SIZE),
            "truncated": lambda fd: os.ftruncate(fd, 10_000),
        }.items():
            fd = os.open(opened.root / name, os.O_WRONLY | os.O_CREAT)
            change(fd)
            before = commits(opened)
            os.close(fd)
            assert commits(opened) > before or mode == "durable", name
        os.close(source)
        run(
            "fallocate",
            "--punch-hole",
            "--offset",
            "4096",
            "--length",
            "4096",
            opened.root / "punched",
        )
        crash_and_mount(opened)
        assert_same((opened.root / "copied").read_bytes(), content)
        assert_same((opened.root / "allocated").read_bytes(), bytes(SIZE))
        assert_same((opened.root / "truncated").read_bytes(), content[:10_000])
        punched = content[:4096] + bytes(4096) + content[8192:]
        assert_same((opened.root / "punched").read_bytes(), punched)


def test_only_the_owner_that_wrote_commits_by_closing() -> None:
    """With ack=close, too, a flush of somebody who wrote nothing must not commit."""
    with mounted(options=["ack=close"]) as opened:
        path = opened.root / "file"
        with path.open("wb", buffering=0) as file:
            file.write(random_bytes(SIZE, seed=1))
            before = commits(opened)
            child = os.fork()
            if child == 0:
                os._exit(0)  # closes, and so flushes, what it inherited
            assert os.waitpid(child, 0)[1] == 0
            assert commits(opened) == before
        assert commits(opened) > before


def test_a_duplicate_that_is_closed_makes_current_what_is_there() -> None:
    """With ack=close; what its process writes after that is for the next close."""
    with mounted(options=["ack=close"]) as opened:
        path = opened.root / "file"
        content = random_bytes(SIZE, seed=1)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(fd, content)
        before = commits(opened)
        os.close(os.dup(fd))
        assert commits(opened) > before
        os.write(fd, content)
        crash_and_mount(opened)
        close_dead(fd)
        assert_same(path.read_bytes()[:SIZE], content)


def test_durable_acknowledges_each_write_when_durable() -> None:
    with mounted(options=["ack=durable"]) as opened:
        path = opened.root / "file"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        expected = b""
        for seed in range(4):
            data = random_bytes(100_003, seed=seed)
            os.write(fd, data)
            expected += data
        crash_and_mount(opened)
        close_dead(fd)
        assert_same(path.read_bytes(), expected)


def test_durable_acknowledges_copies_and_allocations_when_durable() -> None:
    with mounted(options=["ack=durable"]) as opened:
        content = random_bytes(SIZE, seed=1)
        (opened.root / "source").write_bytes(content)
        source = os.open(opened.root / "source", os.O_RDONLY)
        fds = {
            name: os.open(opened.root / name, os.O_WRONLY | os.O_CREAT)
            for name in ("copied", "allocated")
        }
        before = commits(opened)
        copy(source, fds["copied"])
        assert (copied := commits(opened)) > before
        os.posix_fallocate(fds["allocated"], 0, SIZE)
        assert commits(opened) > copied
        crash_and_mount(opened)
        for fd in (source, *fds.values()):
            close_dead(fd)
        assert_same((opened.root / "copied").read_bytes(), content)
        assert_same((opened.root / "allocated").read_bytes(), bytes(SIZE))


def test_a_mount_with_sync_answers_when_durable() -> None:
    """Writes, as with O_SYNC, and names."""
    with mounted(options=["sync"]) as opened:
        content = random_bytes(100_003, seed=1)
        fd = os.open(opened.root / "file", os.O_WRONLY | os.O_CREAT)
        before = commits(opened)
        os.write(fd, content)
        assert commits(opened) > before
        crash_and_mount(opened)
        close_dead(fd)
        assert_same((opened.root / "file").read_bytes(), content)
