"""Requests that make a server die: answered with EIO at last, and they alone."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount
from tests.support.failures.poison import Orders, poisoned_mount
from tests.support.servers import kill

TIMEOUT_S = 120
DEATHS = 5
DIED = r"fpfs.keeper: server \d+ died \({}\): starting another"


@pytest.fixture
def poisoned(tmp_path: Path) -> Iterator[tuple[Mount, Orders]]:
    """A mount whose servers do what they are told."""
    with poisoned_mount(tmp_path) as (mount, orders):
        yield mount, orders


def ask(path: Path, name: str) -> int:
    """Ask for an extended attribute; returns the errno."""
    try:
        os.getxattr(path, f"user.{name}")
    except OSError as error:
        return error.errno or 0
    return 0


def refusal(mount: Mount, path: Path) -> str:
    """The line in the log about a request of this process."""
    return (
        rf"GETXATTR \(request \d+\) of inode {path.stat().st_ino} by user {os.getuid()},"
        rf" process \d+, is answered with EIO: {DEATHS} servers died of it within 60 s"
    )


@pytest.mark.parametrize(
    ("how", "death"),
    [("SIGSEGV", "signal 11"), ("exit", "exit status 1")],
)
def test_a_request_that_servers_die_of_is_refused_at_last(
    poisoned: tuple[Mount, Orders], how: str, death: str
) -> None:
    mount, orders = poisoned
    path = mount.root / "file"
    path.write_bytes(b"content")
    mount.expect_log(DIED.format(death))
    mount.expect_log(refusal(mount, path))
    orders.give("fatal", how)
    assert ask(path, "fatal") == errno.EIO
    assert mount.status().restarts == DEATHS
    assert path.read_bytes() == b"content"
    orders.take_back("fatal")
    assert ask(path, "fatal") == errno.ENODATA
    mount.note_processes()
    assert mount.status().restarts == DEATHS
    mount.remount()
    assert path.read_bytes() == b"content"


def work(folder: Path, number: int, stop: threading.Event) -> int:
    """Use the mount in many ways until told to stop; returns how often."""
    count = 0
    while not stop.is_set():
        path = folder / f"file{number}"
        content = os.urandom(300_000)
        with path.open("wb", buffering=0) as stream:
            stream.write(content)
            os.fsync(stream.fileno())
        (folder / f"folder{number}").mkdir()
        path.rename(folder / f"folder{number}" / "moved")
        assert (folder / f"folder{number}" / "moved").read_bytes() == content
        assert ask(folder / f"folder{number}", "absent") == errno.ENODATA
        (folder / f"folder{number}" / "moved").unlink()
        (folder / f"folder{number}").rmdir()
        count += 1
    return count


def test_others_do_not_notice_that_servers_die_of_two_requests(
    poisoned: tuple[Mount, Orders],
) -> None:
    """What is under way beside them is answered, also where it is under way at each death."""
    mount, orders = poisoned
    mount.expect_log(DIED.format("signal 6"))
    path = mount.root / "file"
    path.touch()
    mount.expect_log(refusal(mount, path))
    for name in ("fatal", "deadly"):
        orders.give(name, "SIGABRT")
    stop = threading.Event()
    with ThreadPoolExecutor(12) as pool:
        try:
            workers = [pool.submit(work, mount.root, number, stop) for number in range(8)]
            answers = [pool.submit(ask, path, name) for name in ("fatal", "deadly")]
            assert [answer.result(TIMEOUT_S) for answer in answers] == [errno.EIO, errno.EIO]
        finally:
            stop.set()
        assert all(worker.result(TIMEOUT_S) > 0 for worker in workers)
    mount.note_processes()
    assert mount.log_text().count("is answered with EIO") == 2
    # Both may have been under way at a death: at the first, before which nobody was suspected, and
    # where a server takes so long to die of one that it goes on to the other (kAnswerWait).
    assert DEATHS <= mount.status().restarts <= 2 * DEATHS


def test_a_request_that_waits_while_servers_are_killed_is_not_blamed(
    poisoned: tuple[Mount, Orders],
) -> None:
    mount, orders = poisoned
    mount.expect_log(DIED.format("signal 9"))
    path = mount.root / "file"
    path.touch()
    orders.give("slow", "wait")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, path, "slow")
        try:
            for _ in range(DEATHS + 2):
                kill(mount)
            assert not answer.done()
        finally:
            orders.take_back("slow")
        assert answer.result(TIMEOUT_S) == errno.ENODATA


def test_what_fails_beside_the_requests_ends_a_server_and_not_the_mount(
    poisoned: tuple[Mount, Orders],
) -> None:
    mount, orders = poisoned
    mount.expect_log("fpfs.server: serving failed")
    mount.expect_log(DIED.format("exit status 70"))
    with (mount.root / "file").open("wb", buffering=0) as file:
        file.write(b"before, ")
        orders.give("at-asked", "once error")
        assert mount.status().restarts == 1
        file.write(b"after")
    assert (mount.root / "file").read_bytes() == b"before, after"


def test_a_thread_that_ends_ends_its_server_and_not_the_mount(
    poisoned: tuple[Mount, Orders],
) -> None:
    """The catalog's, by an error of its checkpoint. Nobody waits for it any more."""
    mount, orders = poisoned
    mount.expect_log("fpfs.server: serving failed")
    mount.expect_log(r"Traceback \(most recent call last\)")
    mount.expect_log(DIED.format("exit status 70"))
    orders.give("at-checkpoint", "once error")
    for number in range(1000):  # more changes than the log is to hold for long
        (mount.root / str(number)).write_bytes(b"x")
    orders.wait_met("at-checkpoint")
    (mount.root / "later").write_bytes(b"y")
    mount.flush()
    assert mount.status().restarts == 1
    assert len(os.listdir(mount.root)) == 1001
    mount.remount()
    assert len(os.listdir(mount.root)) == 1001


def test_a_change_that_memory_does_not_follow_ends_its_server_and_is_made_once(
    poisoned: tuple[Mount, Orders],
) -> None:
    """Of memory that is short behind the catalog's COMMIT nobody can say what has followed."""
    mount, orders = poisoned
    mount.expect_log("fpfs.server: serving failed")
    mount.expect_log(r"Traceback \(most recent call last\)")
    mount.expect_log(DIED.format("exit status 70"))
    (mount.root / "before").mkdir()
    mount.flush()
    orders.give("at-committed", "once memory")
    (mount.root / "made").mkdir()
    orders.wait_met("at-committed")
    assert sorted(os.listdir(mount.root)) == ["before", "made"]
    assert mount.status().restarts == 1
    (mount.root / "made" / "inside").mkdir()
    assert (mount.root / "made").stat().st_nlink == 3
