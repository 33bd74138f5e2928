"""Requests that a server carried out and did not answer, and whose callers were killed then.

The kernel sends what nobody has answered to the next server, unless the caller is killed before
that has taken it: then it gives the request up, and tells nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount, check_fpfs
from tests.support.failures.poison import Orders, poisoned_mount
from tests.support.waiting import inodes_used, wait_until

TIMEOUT_S = 60
ATTEMPTS = 8
# Each keeps the next server, which takes up what is sent again one by one, for a moment.
SLOW = tuple(f"slow{number}" for number in range(12))
GIVEN_UP = "the kernel has given up"


@pytest.fixture
def poisoned(tmp_path: Path) -> Iterator[tuple[Mount, Orders]]:
    """A mount whose servers do what they are told."""
    with poisoned_mount(tmp_path) as (mount, orders):
        mount.expect_log(r"fpfs.keeper: server \d+ died \(signal 6\): starting another")
        mount.allow_log(r"the writer of .* was cut off by SIGKILL")
        yield mount, orders


def ask(path: Path, name: str) -> None:
    """Ask for an extended attribute that is not there."""
    with contextlib.suppress(OSError):
        os.getxattr(path, f"user.{name}")


def wait_for_next_server(orders: Orders) -> None:
    """Return when a server has begun to take up what is sent again."""
    met = [orders.folder / f"{name}.met" for name in SLOW]
    wait_until(lambda: any(path.exists() for path in met))


def be_killed_unanswered(
    mount: Mount,
    orders: Orders,
    operation: str,
    act: Callable[[], object],
    *,
    kill_another: bool = False,
) -> bool:
    """Let a child ask for something, the server die when it has done it, and then the child.

    With `kill_another` the next server dies, too, before that. Returns whether the kernel gave the
    request up: a server may have been faster.
    """
    before = mount.log_text().count(GIVEN_UP)
    path = mount.root / "other"
    path.touch()
    for name in SLOW:
        orders.give(name, "wait")
    with ThreadPoolExecutor(len(SLOW)) as pool:
        try:
            waiting = [pool.submit(ask, path, name) for name in SLOW]
            for name in SLOW:
                orders.wait_met(name)
            if kill_another:
                orders.give(SLOW[-1], "once SIGABRT")  # the next one that takes it
            orders.give(f"at-{operation}-done", "once SIGABRT")
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    act()
                os._exit(0)
            orders.wait_met(f"at-{operation}-done")
            wait_for_next_server(orders)
            if kill_another:
                orders.wait_met(SLOW[-1])
                for name in SLOW:
                    (orders.folder / f"{name}.met").unlink(missing_ok=True)
                wait_for_next_server(orders)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        finally:
            for name in SLOW:
                (orders.folder / name).unlink(missing_ok=True)
        for each in waiting:
            each.result(TIMEOUT_S)
    for name in SLOW:
        (orders.folder / f"{name}.met").unlink(missing_ok=True)
    mount.note_processes()
    return mount.log_text().count(GIVEN_UP) > before


def given_up_at_last(
    mount: Mount,
    orders: Orders,
    operation: str,
    attempt: Callable[[int], Callable[[], object]],
    check: Callable[[int], object],
    *,
    kill_another: bool = False,
) -> None:
    """Prepare, let a child ask, and check what that came to, until the kernel gave a request up."""
    for number in range(ATTEMPTS):
        act = attempt(number)
        given_up = be_killed_unanswered(mount, orders, operation, act, kill_another=kill_another)
        check(number)
        if given_up:
            return
    raise AssertionError(f"in {ATTEMPTS} attempts the next server was always faster")


def open_to_write(path: Path) -> None:
    """Begin to write a file."""
    os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    signal.pause()


@pytest.mark.parametrize("kill_another", [False, True])
def test_a_checkpoint_that_was_to_be_overwritten_stays(
    poisoned: tuple[Mount, Orders], kill_another: bool
) -> None:
    mount, orders = poisoned
    path = mount.root / "step.pt"
    content = os.urandom(300_000)
    path.write_bytes(content)
    given_up_at_last(
        mount,
        orders,
        "open",
        lambda _number: lambda: open_to_write(path),
        lambda _number: assert_content(path, content),
        kill_another=kill_another,
    )
    # It is nobody's any more: what is written next becomes current when it is closed.
    path.write_bytes(b"next")
    check_fpfs("wait", "--timeout", str(TIMEOUT_S), path, module="fpfs.cli.ctl")
    mount.remount()
    assert path.read_bytes() == b"next"


def assert_content(path: Path, content: bytes) -> None:
    """Read and compare."""
    assert path.read_bytes() == content
    assert path.stat().st_size == len(content)


def test_a_new_checkpoint_is_none(poisoned: tuple[Mount, Orders]) -> None:
    mount, orders = poisoned

    def check(number: int) -> None:
        path = mount.root / f"step{number}.pt"
        with pytest.raises(FileNotFoundError):
            path.read_bytes()  # which waits until it is gone
        assert path.name not in os.listdir(mount.root)

    given_up_at_last(
        mount,
        orders,
        "create",
        lambda number: lambda: open_to_write(mount.root / f"step{number}.pt"),
        check,
    )


def test_another_file_that_was_opened_becomes_current_when_it_is_written_again(
    poisoned: tuple[Mount, Orders],
) -> None:
    mount, orders = poisoned
    path = mount.root / "train.log"
    path.write_bytes(b"before")
    given_up_at_last(
        mount,
        orders,
        "open",
        lambda _number: lambda: open_to_write(path),
        lambda _number: assert_content(path, b""),  # as POSIX has it: it was cut
    )
    path.write_bytes(b"after")
    check_fpfs("wait", "--timeout", str(TIMEOUT_S), path, module="fpfs.cli.ctl")
    assert_content(path, b"after")


def test_names_are_what_became_of_them(poisoned: tuple[Mount, Orders]) -> None:
    """The kernel has kept what it knew before, and is not told by the answers."""
    mount, orders = poisoned

    def path(name: str, number: int) -> Path:
        return mount.root / f"{name}{number}"

    def to_be_removed(number: int) -> Callable[[], object]:
        path("removed", number).write_bytes(b"content")
        assert path("removed", number).stat().st_size == len(b"content")
        return lambda: path("removed", number).unlink()

    def to_be_moved(number: int) -> Callable[[], object]:
        path("from", number).write_bytes(b"content")
        assert not path("to", number).exists()
        return lambda: path("from", number).rename(path("to", number))

    def to_be_made(number: int) -> Callable[[], object]:
        assert not path("made", number).exists()
        return lambda: path("made", number).mkdir()

    def is_removed(number: int) -> None:
        assert not path("removed", number).exists()

    def is_moved(number: int) -> None:
        assert not path("from", number).exists()
        assert_content(path("to", number), b"content")

    def is_made(number: int) -> None:
        assert path("made", number).is_dir()

    given_up_at_last(mount, orders, "unlink", to_be_removed, is_removed)
    given_up_at_last(mount, orders, "rename", to_be_moved, is_moved)
    given_up_at_last(mount, orders, "mkdir", to_be_made, is_made)


def test_a_directory_is_not_kept(poisoned: tuple[Mount, Orders]) -> None:
    mount, orders = poisoned
    (mount.root / "other").touch()
    before = inodes_used(mount.root)

    def prepare(number: int) -> Callable[[], object]:
        (mount.root / f"folder{number}").mkdir()
        return lambda: os.listdir(mount.root / f"folder{number}")

    given_up_at_last(
        mount,
        orders,
        "opendir",
        prepare,
        lambda number: (mount.root / f"folder{number}").rmdir(),
    )
    wait_until(lambda: inodes_used(mount.root) == before)
