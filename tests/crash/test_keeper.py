"""The keeper: programs do not notice that a server died, whatever they were doing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fpfs
from fpfs.core.protocol.control import ControlClient, ServerEnded
from fpfs.core.protocol.questions import (
    AskStatus,
    FlushAll,
    Question,
    RestartServer,
    ScrubNext,
    WaitDurable,
)
from fpfs.core.protocol.reports import Renewing
from fpfs.testing.mounted import REPOSITORY, Mount, check_fpfs, mounted, run_fpfs
from tests.crash.kill import WEIGHTS, Team, kill_again_and_again
from tests.support.failures.poison import poisoned_mount
from tests.support.processes import expect_line, python_child, tell
from tests.support.seeds import IS_LONG, chosen_seed
from tests.support.servers import EXIT_TIMEOUT_S, kill, stop, wait_collected, wait_for_exit
from tests.support.waiting import inodes_used, wait_until

KILLS = 15 if IS_LONG else 6
DIED = r"fpfs.keeper: server \d+ died"


@pytest.fixture
def mount() -> Iterator[Mount]:
    """A mount whose server may die."""
    with mounted(devices=2) as made:
        made.allow_log(DIED)
        yield made


def test_a_save_goes_on_over_several_servers(mount: Mount) -> None:
    content = os.urandom(40_000_003)
    path = mount.root / "step.pt"
    with path.open("wb", buffering=0) as stream:
        for first in range(0, len(content), 10_000_000):
            stream.write(content[first : first + 10_000_000])
            kill(mount)
    assert path.read_bytes() == content
    mount.flush()
    kill(mount)
    assert path.read_bytes() == content
    assert mount.status().restarts == 6
    mount.remount()
    assert path.read_bytes() == content
    assert mount.status().restarts == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGALRM, signal.SIGXCPU])
def test_whatever_a_server_dies_of(mount: Mount, number: signal.Signals) -> None:
    (mount.root / "file").write_bytes(b"content")
    mount.expect_log(rf"server \d+ died \(signal {number.value}\): starting another")
    kill(mount, number)
    assert (mount.root / "file").read_bytes() == b"content"


def test_open_files_live_on(mount: Mount) -> None:
    path = mount.root / "file"
    path.write_bytes(b"0123456789")
    with path.open("r+b", buffering=0) as stream, path.open("ab", buffering=0) as appending:
        assert stream.read(4) == b"0123"
        (mount.root / "gone").write_bytes(b"without a name")
        unnamed = (mount.root / "gone").open("rb", buffering=0)
        (mount.root / "gone").unlink()
        kill(mount)
        assert stream.read(3) == b"456"
        stream.write(b"x")
        appending.write(b"end")
        assert unnamed.read() == b"without a name"
        assert os.fstat(unnamed.fileno()).st_nlink == 0
        kill(mount)
        unnamed.seek(8)
        assert unnamed.read() == b"a name"
        unnamed.close()
    assert path.read_bytes() == b"0123456x89end"
    assert os.listdir(mount.root) == ["file"]


def test_a_file_without_name_goes_when_its_last_handle_does(mount: Mount) -> None:
    path = mount.root / "large"
    with path.open("wb", buffering=0) as stream:
        stream.write(os.urandom(20_000_000))
        os.fsync(stream.fileno())
        path.unlink()
        kill(mount)
        assert mount.stored_bytes() >= 20_000_000
    # The kernel tells of the last handle's end when it comes to it: a flush may be there before.
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while mount.stored_bytes() > 1_000_000:
        assert time.monotonic() < deadline_s, "the space does not come back"
        mount.flush()


def test_locks_live_on(mount: Mount) -> None:
    path = mount.root / "file"
    with path.open("wb") as first, path.open("wb") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        kill(mount)
        with pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(first, fcntl.LOCK_UN)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_listing_goes_on(mount: Mount) -> None:
    names = {f"file{number:04}" for number in range(3000)}
    for name in names:
        (mount.root / name).touch()
    with os.scandir(mount.root) as listing:
        found = {next(listing).name}
        kill(mount)
        found |= {entry.name for entry in listing}
    assert found == names


def test_requests_that_wait_are_answered_by_the_next_server(mount: Mount) -> None:
    stop(mount.server_pid)
    results: dict[str, object] = {}

    def make() -> None:
        os.mkdir(mount.root / "folder")
        (mount.root / "file").write_bytes(os.urandom(3_000_000))
        results["size"] = (mount.root / "file").stat().st_size

    thread = threading.Thread(target=make)
    thread.start()
    os.kill(mount.server_pid, signal.SIGKILL)
    thread.join(EXIT_TIMEOUT_S)
    assert not thread.is_alive()
    assert results == {"size": 3_000_000}
    mount.note_processes()


def test_a_mapped_file_is_read_and_stored_to(mount: Mount) -> None:
    path = mount.root / "mapped"
    path.write_bytes(b"a" * 200_000)
    code = """if True:
        import mmap, sys
        with open(sys.argv[1], "r+b") as stream:
            mapped = mmap.mmap(stream.fileno(), 0)
        mapped[:5] = b"store"
        print("stored", flush=True)
        sys.stdin.readline()
        mapped[100_000:100_005] = b"again"
        mapped.flush()
        print(mapped[:5].decode(), flush=True)
        sys.stdin.readline()
    """
    with python_child(code, path) as child:
        expect_line(child, "stored")
        kill(mount)
        tell(child)
        expect_line(child, "store")
        tell(child)
    content = path.read_bytes()
    assert (content[:5], content[100_000:100_005]) == (b"store", b"again")


def test_without_its_keeper_a_server_drains_and_ends_the_mount(mount: Mount) -> None:
    content = os.urandom(30_000_000)
    (mount.root / "file").write_bytes(content)
    mount.expect_log("the keeper died: draining and unmounting")
    os.kill(mount.keeper_pid, signal.SIGKILL)
    wait_for_exit(mount.server_pid)
    assert mount.entry() is None
    mount.forget()
    mount.mount()
    assert (mount.root / "file").read_bytes() == content


def test_what_was_acknowledged_survives_keeper_and_server(mount: Mount) -> None:
    # One or both: the first may have been committed by then.
    mount.expect_log(
        "took over 0 open handles and [12] files with changes, of which [12] were closed"
    )
    content = os.urandom(30_000_003)
    (mount.root / "closed").write_bytes(content)
    code = """if True:
        import os, sys, time
        stream = open(sys.argv[1], "wb", buffering=0)
        stream.write(b"x" * 5_000_000)
        print("written", flush=True)
        sys.stdin.readline()
    """
    with python_child(code, mount.root / "open") as child:
        expect_line(child, "written")
        mount.kill(mount.keeper_pid, mount.server_pid)
        child.kill()
    mount.tear_down()
    mount.mount()
    assert (mount.root / "closed").read_bytes() == content
    assert (mount.root / "open").read_bytes() == b"x" * 5_000_000


@pytest.mark.parametrize("is_keeper_killed", [False, True])
@pytest.mark.parametrize("change", ["", "os.write(second, b'y')", "os.truncate(second, 7_000_001)"])
def test_what_was_closed_is_kept_although_it_is_open_again(
    mount: Mount, change: str, *, is_keeper_killed: bool
) -> None:
    """Its writer had finished; who opened it next is killed before all of it is current."""
    if change:
        mount.allow_log(r"the writer of step\.pt was cut off by (SIGKILL|the end of the mount)")
    path = mount.root / "step.pt"
    path.write_bytes(b"before")
    mount.flush()
    code = f"""if True:
        import os, sys
        first = os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)
        os.write(first, b"x" * 40_000_000)
        os.close(first)
        second = os.open(sys.argv[1], os.O_WRONLY)
        {change}
        print("open again", flush=True)
        sys.stdin.readline()
    """
    with python_child(code, path) as child:
        expect_line(child, "open again")
        if is_keeper_killed:
            mount.kill(mount.keeper_pid, mount.server_pid)
        else:
            kill(mount)
        child.kill()
        child.wait()
    if is_keeper_killed:
        mount.tear_down()
        mount.mount()
    assert path.read_bytes() == b"x" * 40_000_000
    mount.remount()
    assert path.read_bytes() == b"x" * 40_000_000
    assert len(os.listdir(mount.root / ".fpfs/partial")) == bool(change)


def test_the_tools_wait_for_the_next_server(mount: Mount) -> None:
    content = os.urandom(30_000_000)
    for _ in range(3):
        (mount.root / "file").write_bytes(content)
        os.kill(mount.server_pid, signal.SIGKILL)
        check_fpfs("wait", mount.root / "file", module="fpfs.cli.ctl")
        mount.note_processes()
    os.kill(mount.server_pid, signal.SIGKILL)
    mount.unmount()
    mount.mount()
    assert (mount.root / "file").read_bytes() == content


def test_what_the_tools_asked_a_server_that_dies_is_asked_the_next_one(mount: Mount) -> None:
    content = os.urandom(3_000_000)
    (mount.root / "file").write_bytes(content)
    ino = (mount.root / "file").stat().st_ino
    entry = mount.entry()
    assert entry is not None
    asked: list[Question[Any]] = [
        AskStatus(),
        WaitDurable(ino=ino),
        FlushAll(),
        ScrubNext(ino=ino),
    ]
    for question in asked:
        with ControlClient(entry, asked="test") as client:
            stop(mount.server_pid)  # so that it does not answer before it dies
            client.send(question)
            os.kill(mount.server_pid, signal.SIGKILL)
            client.receive(question.answer, timeout_s=EXIT_TIMEOUT_S)
        mount.note_processes()
    with ControlClient(entry, asked="test") as client:
        stop(mount.server_pid)
        client.send(RestartServer())
        os.kill(mount.server_pid, signal.SIGKILL)
        with pytest.raises(ServerEnded):
            client.receive(Renewing, timeout_s=EXIT_TIMEOUT_S)
    mount.note_processes()
    assert mount.status().restarts == len(asked) + 1


def test_an_unmount_goes_on_with_the_next_server(mount: Mount) -> None:
    content = os.urandom(30_000_000)
    for _ in range(3):
        (mount.root / "file").write_bytes(content)
        stop(mount.server_pid)
        with start_fpfs("umount", mount.root) as unmount:
            while not any_asks(mount):
                assert unmount.poll() is None
            os.kill(mount.server_pid, signal.SIGKILL)
            assert unmount.wait(EXIT_TIMEOUT_S) == 0
        mount.forget()
        mount.mount()
        assert (mount.root / "file").read_bytes() == content


def start_fpfs(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start ``fpfs``, and do not wait for its end."""
    command = [sys.executable, "-m", "fpfs.cli.main", *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY)


def any_asks(mount: Mount) -> bool:
    """Whether somebody is connected to the control socket of a mount whose server is stopped."""
    entry = mount.entry()
    assert entry is not None
    name = f"/{entry.device.replace(':', '-')}.{mount.keeper_pid}.sock"
    lines = Path("/proc/net/unix").read_text().splitlines()
    # The socket that listens, and one that is connected and not yet accepted.
    return sum(name in line for line in lines) > 1


def test_a_signal_to_the_keeper_ends_the_mount_whoever_serves_it(mount: Mount) -> None:
    content = os.urandom(30_000_000)
    (mount.root / "file").write_bytes(content)
    keeper_fd = os.pidfd_open(mount.keeper_pid)
    os.kill(mount.server_pid, signal.SIGKILL)
    signal.pidfd_send_signal(keeper_fd, signal.SIGTERM)
    ended, _, _ = select.select([keeper_fd], [], [], EXIT_TIMEOUT_S)
    os.close(keeper_fd)
    assert ended
    assert mount.entry() is None
    mount.forget()
    mount.mount()
    assert (mount.root / "file").read_bytes() == content


def test_files_without_a_name_go_with_keeper_and_server(mount: Mount) -> None:
    mount.expect_log("deleting 2 inodes that were open without a name")
    (mount.root / "kept").write_bytes(b"content")
    inodes_before = inodes_used(mount.root)
    code = """if True:
        import os, sys
        staged, synced = (open(path, "w+b", buffering=0) for path in sys.argv[1:])
        staged.write(bytes(9_000_000))
        synced.write(bytes(9_000_000))
        os.fsync(synced.fileno())
        synced.write(bytes(3_000_000))
        for path in sys.argv[1:]:
            os.unlink(path)
        print("written", flush=True)
        sys.stdin.readline()
    """
    with python_child(code, mount.root / "staged", mount.root / "synced") as child:
        expect_line(child, "written")
        mount.kill(mount.keeper_pid, mount.server_pid)
        child.kill()
    mount.tear_down()
    mount.mount()
    assert os.listdir(mount.root) == ["kept"]
    assert inodes_used(mount.root) == inodes_before
    mount.flush()
    wait_until(lambda: mount.stored_bytes() < 1_000_000)  # objects are removed in the background


def test_nothing_is_left_of_servers_that_died(mount: Mount) -> None:
    mount.expect_log(r"removed \d+ objects that no version refers to")
    for number in range(3):
        with (mount.root / f"file{number}").open("wb", buffering=0) as stream:
            stream.write(os.urandom(5_000_000))
            kill(mount)
            stream.write(os.urandom(5_000_000))
        (mount.root / "again").write_bytes(os.urandom(3_000_000))
    contents = {path.name: path.read_bytes() for path in mount.root.iterdir()}
    wait_collected(mount)
    mount.unmount()
    there, used = set(), 0
    for number, device in enumerate(mount.devices):
        for path in device.glob("objects/*/*"):
            there.add((number, int(path.name, 16)))
            used += path.stat().st_blocks * 512
    with contextlib.closing(sqlite3.connect(mount.devices[0] / "catalog.db")) as catalog:
        named = set(catalog.execute("SELECT device, id FROM objects"))
    assert there == named
    # Nor is more taken than the contents need, in blocks of 64 KiB.
    assert used <= sum(len(content) + 4 * 65_536 for content in contents.values())
    mount.mount()
    assert {path.name: path.read_bytes() for path in mount.root.iterdir()} == contents


def test_a_killed_writer_and_a_server_that_dies_before_its_version_is_stored(mount: Mount) -> None:
    """The server that takes over knows how the writer ended: from its close, or from its handle."""
    mount.allow_log(r"the writer of step\.pt was cut off by SIGKILL")
    good, path = os.urandom(5_000_001), mount.root / "step.pt"
    path.write_bytes(good)
    mount.flush()
    code = """if True:
        import os, signal, sys
        stream = open(sys.argv[1], "wb", buffering=0)
        stream.write(b"torn" * 1_000_000)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        for _ in range(int(sys.argv[2])):
            if os.fork() == 0:
                break
        else:
            print("written", flush=True)
        signal.pause()
    """
    for turn in range(6):
        # With a child that holds the file open, the handle outlives its writer.
        children = turn % 2
        with python_child(code, path, children) as child:
            expect_line(child, "written")
            held = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
            assert len(held) == children
            child.kill()
            child.wait()
            kill(mount)
            for pid in held:
                os.kill(int(pid), signal.SIGTERM)
                wait_for_exit(int(pid))
        mount.flush()
        assert path.read_bytes() == good
        assert len(os.listdir(mount.root / ".fpfs/partial")) == 1


def test_who_was_on_the_way_to_open_what_a_killed_writer_began_finds_no_file(mount: Mount) -> None:
    """Also where another server answers, which has not seen how it lost its name."""
    mount.allow_log(r"the writer of step\.pt was cut off by SIGKILL")
    path = mount.root / "step.pt"
    code = """if True:
        import signal, sys
        stream = open(sys.argv[1], "wb", buffering=0)
        stream.write(b"torn" * 1_000_000)
        print("written", flush=True)
        signal.pause()
    """
    with python_child(code, path) as child:
        expect_line(child, "written")
        # The kernel knows the inode, as it does of whoever has come so far with an open(2).
        known = os.open(path, os.O_PATH)
        child.kill()
        child.wait()
    try:
        mount.flush()
        assert not path.exists()
        for _ in range(2):
            with pytest.raises(OSError, match="Stale"):
                os.open(f"/proc/self/fd/{known}", os.O_RDONLY)
            with pytest.raises(OSError, match="Stale"):
                os.truncate(f"/proc/self/fd/{known}", 0)
            kill(mount)
    finally:
        os.close(known)


def test_who_writes_when_everything_dies_has_not_finished(mount: Mount) -> None:
    """Nobody sees whether a writer goes with keeper and server, as in a container that ends."""
    good, torn = os.urandom(5_000_001), b"torn" * 1_000_000
    (mount.root / "step.pt").write_bytes(good)
    mount.flush()
    (mount.root / "closed.pt").write_bytes(good)
    code = """if True:
        import sys
        streams = [open(f"{sys.argv[1]}/{name}", "wb", buffering=0) for name in sys.argv[2:]]
        for stream in streams:
            stream.write(b"torn" * 1_000_000)
        print("written", flush=True)
        sys.stdin.readline()
    """
    with python_child(code, mount.root, "step.pt", "new.pt", "file") as child:
        expect_line(child, "written")
        mount.kill(mount.keeper_pid, mount.server_pid)
        child.kill()
    mount.tear_down()
    mount.allow_log(r"the writer of (step|new)\.pt was cut off by the end of the mount")
    mount.mount()
    mount.flush()
    assert sorted(os.listdir(mount.root)) == ["closed.pt", "file", "step.pt"]
    assert (mount.root / "step.pt").read_bytes() == good
    assert (mount.root / "closed.pt").read_bytes() == good
    assert (mount.root / "file").read_bytes() == torn
    quarantine = mount.root / ".fpfs/partial"
    assert [(quarantine / name).read_bytes() for name in os.listdir(quarantine)] == [torn, torn]
    assert {save.killed_by for save in mount.status().quarantined} == {"the end of the mount"}


def test_servers_that_cannot_start_are_given_up(mount: Mount) -> None:
    (mount.root / "kept").write_bytes(b"durable")
    mount.flush()
    mount.expect_log("5 servers in a row did not come to answer: the mount is given up")
    mount.allow_log("there is no catalog")
    catalogs = [Path(device, "catalog.db") for device in mount.devices]
    for catalog in catalogs:
        catalog.rename(catalog.with_name("away"))
    os.kill(mount.server_pid, signal.SIGKILL)
    wait_for_exit(mount.keeper_pid)
    assert mount.entry() is None
    mount.forget()
    for catalog in catalogs:
        catalog.with_name("away").rename(catalog)
    mount.mount()
    assert (mount.root / "kept").read_bytes() == b"durable"


def test_a_mount_in_the_foreground_has_a_keeper_too(mount: Mount) -> None:
    mount.unmount()
    devices = [word for device in mount.devices for word in ("-d", str(device))]
    command = [sys.executable, "-m", "fpfs.cli.main", "mount", "--foreground", *devices]
    with subprocess.Popen(
        [*command, "-o", "staging=16M", str(mount.root)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "mounted at" not in process.stderr.readline():
            assert process.poll() is None
        mount.note_processes()
        assert mount.keeper_pid == process.pid
        (mount.root / "file").write_bytes(b"content")
        kill(mount)
        assert (mount.root / "file").read_bytes() == b"content"
        process.send_signal(signal.SIGINT)
        assert process.wait(EXIT_TIMEOUT_S) == 0
    assert mount.entry() is None
    mount.mount()


def test_programs_do_not_notice_kills_at_random_moments(mount: Mount) -> None:
    seed = chosen_seed()
    outcome = kill_again_and_again(mount, kills=KILLS, team=Team(workers=2), seed=seed)
    print(f"seed {seed}: {outcome.operations} operations, {outcome.restarts} restarts")
    assert outcome.kills >= KILLS  # more than there are where each kind is done once
    assert outcome.done.keys() == WEIGHTS.keys()
    assert outcome.restarts >= KILLS
    assert outcome.operations["work"] > 0


RESTARTED = r"server \d+ made room for the program that is installed now"


def test_a_restart_while_programs_use_the_mount(mount: Mount) -> None:
    """The keeper's process is another program's from then on, and holds the mount as before."""
    mount.expect_log(RESTARTED)
    content = os.urandom(20_000_001)
    path = mount.root / "step.pt"
    before = mount.status()
    with path.open("wb", buffering=0) as stream:
        stream.write(content[:10_000_000])
        said = check_fpfs("restart", mount.root, module="fpfs.cli.ctl")
        stream.write(content[10_000_000:])
    assert path.read_bytes() == content
    after = mount.status()
    assert (after.keeper_pid, after.restarts) == (before.keeper_pid, before.restarts + 1)
    assert after.server_pid != before.server_pid
    assert after.started_unix_s == before.started_unix_s
    assert f"server {before.server_pid} (fpfs" in said
    assert f"was replaced by {after.server_pid} (fpfs" in said
    mount.note_processes()
    kill(mount)  # the program that is the keeper now starts others
    assert path.read_bytes() == content
    check_fpfs("restart", mount.root, module="fpfs.cli.ctl")
    mount.note_processes()
    mount.remount()
    assert path.read_bytes() == content


def test_a_program_that_is_removed_before_it_is_executed_changes_nothing(tmp_path: Path) -> None:
    """It has just said that it can take over."""
    content = os.urandom(20_000_001)
    with poisoned_mount(tmp_path) as (mount, orders):
        mount.allow_log(f"{DIED}|{RESTARTED}")
        mount.expect_log(r"cannot be executed \(.*No such file or directory.*\): this one goes on")
        path = mount.root / "step.pt"
        before = mount.status()
        with path.open("wb", buffering=0) as stream:
            stream.write(content[:10_000_000])
            orders.give("program-gone", "999.0")
            done = run_fpfs("restart", mount.root, module="fpfs.cli.ctl")
            stream.write(content[10_000_000:])
        after = mount.status()
        assert (done.returncode, done.stdout) == (1, "")
        assert f"fpfs 999.0 could not be executed, and {fpfs.__version__} goes on" in done.stderr
        assert (after.keeper_pid, after.restarts) == (before.keeper_pid, before.restarts + 1)
        assert path.read_bytes() == content
        mount.note_processes()
        kill(mount)  # is a death, and no restart
        orders.take_back("program-gone")
        check_fpfs("restart", mount.root, module="fpfs.cli.ctl")
        mount.note_processes()
        assert mount.status().restarts == before.restarts + 3
        os.kill(mount.keeper_pid, signal.SIGTERM)
        wait_for_exit(mount.keeper_pid)
        mount.forget()
        mount.mount()
        assert path.read_bytes() == content


def test_a_signal_ends_a_mount_that_was_restarted(mount: Mount) -> None:
    (mount.root / "file").write_bytes(b"content" * 1_000_000)
    check_fpfs("restart", mount.root, module="fpfs.cli.ctl")
    keeper_pid = mount.keeper_pid
    os.kill(keeper_pid, signal.SIGTERM)
    wait_for_exit(keeper_pid)
    assert mount.entry() is None
    mount.forget()
    mount.mount()
    assert (mount.root / "file").read_bytes() == b"content" * 1_000_000
