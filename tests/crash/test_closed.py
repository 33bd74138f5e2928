"""Files that were begun and never written to, and a server that dies when they are closed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from fpfs.testing.mounted import Mount, check_fpfs
from tests.support.failures.poison import Orders, poisoned_mount
from tests.support.servers import EXIT_TIMEOUT_S


@pytest.fixture
def poisoned(tmp_path: Path) -> Iterator[tuple[Mount, Orders]]:
    """A mount whose servers do what they are told."""
    with poisoned_mount(tmp_path) as (mount, orders):
        mount.expect_log(r"fpfs.keeper: server \d+ died \(signal 9\): starting another")
        yield mount, orders


def begin_checkpoint(path: Path) -> NoReturn:
    """Open a new checkpoint, and write nothing. Never returns."""
    os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    signal.pause()
    os._exit(1)


def test_a_checkpoint_that_was_begun_by_a_killed_writer_is_none(
    poisoned: tuple[Mount, Orders],
) -> None:
    """How a file was closed is known to the next server, also when nothing was written."""
    mount, orders = poisoned
    mount.expect_log("the writer of step.pt was cut off by SIGKILL: what it wrote, 0 bytes")
    path = mount.root / "step.pt"
    child = os.fork()
    if child == 0:
        begin_checkpoint(path)
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline_s
    orders.give("at-closed", "once SIGKILL")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    assert mount.status().restarts == 1
    assert path.name not in os.listdir(mount.root)


def test_an_empty_file_that_was_closed_stays_although_everything_dies_then(
    poisoned: tuple[Mount, Orders],
) -> None:
    mount, orders = poisoned
    path = mount.root / "step.pt"
    orders.give("at-closed", "once SIGKILL")
    path.open("wb").close()
    assert path.read_bytes() == b""
    mount.note_processes()
    assert mount.status().restarts == 1
    check_fpfs("wait", path, module="fpfs.cli.ctl")
    mount.kill(mount.keeper_pid, mount.server_pid)
    mount.tear_down()
    mount.mount()
    assert path.read_bytes() == b""
