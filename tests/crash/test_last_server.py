"""Servers that die at the end of an unmount: what ``fpfs umount`` makes of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.daemon.mount.fusermount import ConnectionControl, abort_connection, unmount
from fpfs.testing.mounted import REPOSITORY, Mount, check_fpfs, mounted
from tests.support.failures.poison import Orders, poisoned_mount
from tests.support.servers import EXIT_TIMEOUT_S, stop, wait_for_exit

CONTENT = os.urandom(3_000_001)


@pytest.fixture
def poisoned(tmp_path: Path) -> Iterator[tuple[Mount, Orders]]:
    """A mount with a file, whose servers do what they are told."""
    with poisoned_mount(tmp_path) as (mount, orders):
        mount.allow_log(r"fpfs.keeper: server \d+ died \(signal 9\)")
        (mount.root / "file").write_bytes(CONTENT)
        yield mount, orders


def start_umount(mount: Mount) -> subprocess.Popen[str]:
    """Start ``fpfs umount``, and do not wait for its end."""
    return subprocess.Popen(
        [sys.executable, "-m", "fpfs.cli.main", "umount", str(mount.root)],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_next_mount(mount: Mount) -> None:
    """Everything is there again."""
    assert mount.entry() is None
    mount.forget()
    mount.mount()
    assert (mount.root / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("point", ["draining", "ending"])
def test_an_unmount_whose_server_dies_at_its_end_has_succeeded(
    poisoned: tuple[Mount, Orders], point: str
) -> None:
    """The next server goes on with it; when all is durable, none is needed."""
    mount, orders = poisoned
    orders.give(f"at-{point}", "once SIGKILL")
    check_fpfs("umount", mount.root)
    orders.wait_met(f"at-{point}")
    check_next_mount(mount)


def test_an_unmount_that_the_next_server_has_ended_before_it_is_asked(
    poisoned: tuple[Mount, Orders],
) -> None:
    mount, orders = poisoned
    orders.give("at-draining", "block")
    with start_umount(mount) as unmount:
        orders.wait_met("at-draining")
        stop(unmount.pid)
        os.kill(mount.server_pid, signal.SIGKILL)
        orders.take_back("at-draining")
        wait_for_exit(mount.keeper_pid)
        unmount.send_signal(signal.SIGCONT)
        _, said = unmount.communicate(timeout=EXIT_TIMEOUT_S)
    assert (unmount.returncode, said) == (0, "")
    check_next_mount(mount)


def test_a_group_stays_although_the_server_dies_at_the_end(
    poisoned: tuple[Mount, Orders],
) -> None:
    mount, orders = poisoned
    check_fpfs("policy", "set", mount.root, "commit=group", module="fpfs.cli.ctl")
    (mount.root / "step").mkdir()
    (mount.root / "step" / "shard").write_bytes(CONTENT)
    orders.give("at-ending", "once SIGKILL")
    check_fpfs("umount", mount.root)
    check_next_mount(mount)
    assert (mount.root / "step" / "shard").read_bytes() == CONTENT


def test_an_aborted_mount_goes_although_its_server_dies_while_it_ends_it(
    poisoned: tuple[Mount, Orders],
) -> None:
    """That takes it away when all is durable, which the keeper does for it then."""
    mount, orders = poisoned
    mount.expect_log("the server died where nobody else held the mount: it is taken away")
    entry = mount.entry()
    assert entry is not None
    orders.give("at-ending", "once SIGKILL")
    assert abort_connection(entry)
    wait_for_exit(mount.keeper_pid)
    orders.wait_met("at-ending")
    check_next_mount(mount)


def test_an_unmount_whose_keeper_and_server_die_says_what_is_known(
    poisoned: tuple[Mount, Orders],
) -> None:
    mount, orders = poisoned
    orders.give("at-draining", "block")
    with start_umount(mount) as unmount:
        orders.wait_met("at-draining")
        mount.kill(mount.keeper_pid, mount.server_pid)
        _, said = unmount.communicate(timeout=EXIT_TIMEOUT_S)
    orders.take_back("at-draining")
    assert unmount.returncode == 1
    assert said == (
        f"fpfs: unmount {mount.root}: its server was gone before it said that all is durable; it is"
        " not mounted any more; mount again: what was acknowledged comes back as long as the"
        " machine runs\n"
    )
    check_next_mount(mount)


def mount_with_number(number: str, root: Path, stack: contextlib.ExitStack) -> Mount | None:
    """Mount something else at a place, with a device number that is free; None where it is not.

    The kernel gives the lowest free number to who comes first, which is another program perhaps.
    """
    for _ in range(5):
        other = stack.enter_context(mounted())
        other.unmount()
        other.root = root
        other.mount()
        entry = other.entry()
        assert entry is not None
        if entry.device == number:
            return other
        other.unmount()
    return None


@pytest.mark.alone  # others could take the number
def test_a_mount_that_ends_takes_none_away_that_was_made_in_its_place(
    poisoned: tuple[Mount, Orders],
) -> None:
    """It was unmounted and drains still; the kernel gives its number to the next one."""
    mount, orders = poisoned
    entry = mount.entry()
    assert entry is not None
    orders.give("at-draining", "block")
    with contextlib.ExitStack() as stack:
        unmount(str(mount.root))
        orders.wait_met("at-draining")
        other = mount_with_number(entry.device, mount.root, stack)
        orders.take_back("at-draining")
        wait_for_exit(mount.keeper_pid)
        if other is not None:
            assert other.status().server_pid == other.server_pid
            (other.root / "another").write_bytes(b"served")
            other.unmount()
    check_next_mount(mount)
    if other is None:
        pytest.skip("another program got the number of the mount")


@pytest.mark.alone
def test_what_ends_a_connection_ends_no_other() -> None:
    with mounted() as former:
        entry = former.entry()
        assert entry is not None
        with contextlib.ExitStack() as stack, ConnectionControl(entry.device) as control:
            former.unmount()
            other = mount_with_number(entry.device, former.root, stack)
            if other is None:
                pytest.skip("another program got the number of the mount")
            assert control.abort()
            (other.root / "file").write_bytes(b"served")
            assert abort_connection(entry._replace(mount_id=0)) is False
            (other.root / "file").write_bytes(b"served")
            other.unmount()
        former.mount()
