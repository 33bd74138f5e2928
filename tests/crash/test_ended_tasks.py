"""Tasks of a server that end by an error: another server takes over, and files go on.

Each is ended where it waits, or where it begins if it does not stay. `STARTED` names all that the
source starts.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fpfs
from fpfs.testing.mounted import CommandFailed, Mount, check_fpfs
from tests.support.failures.poison import Orders, poisoned_mount
from tests.support.servers import kill, wait_for_exit

METRICS = "metrics.socket"
SCRAPE = "fpfs.daemon.telemetry.http.MetricsServer.converse"
QUESTION = "fpfs.daemon.control.server._while_there.<locals>.watch"
RUNNING = (
    "fpfs.core.native_engine.NativeEngine.run",
    "fpfs.daemon.commit.pipeline.Commit.run",
    "fpfs.daemon.commit.pipeline.Commit._gather",
    "fpfs.daemon.commit.pipeline.Commit._drain_entries",
    "fpfs.daemon.commit.pipeline.Commit._commit_in_order",
    "fpfs.daemon.commit.pipeline.Commit._flush_in_time",
    "fpfs.daemon.commit.pipeline.Commit._commit_open_in_time",
    "fpfs.daemon.control.server.ControlServer.serve",
    "fpfs.daemon.mount.shutdown.Ending.watch_keeper",
    "fpfs.daemon.mount.shutdown.Ending.watch_signals",
    "fpfs.daemon.commit.space_gc.Reclaim.run_deletions",
    "fpfs.daemon.commit.space_gc.Reclaim.run_removals",
    "fpfs.daemon.mount.server.Server._relay_events",
    "fpfs.daemon.mount.server.Server._run_pyfuse3",
    "fpfs.daemon.telemetry.tracing.Tracing.run",
    "pyfuse-",
)
"""Tasks that stay: how trio's names for them begin."""


def write_synchronously(mount: Mount) -> None:
    """A write that is to be durable."""
    fd = os.open(mount.root / "synchronous", os.O_CREAT | os.O_WRONLY | os.O_SYNC)
    assert os.write(fd, b"x") == 1
    os.close(fd)


def ask_metrics(mount: Mount) -> None:
    """A scrape, which the server does not live to answer."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(mount.folder.parent / METRICS))
        with contextlib.suppress(ConnectionError):
            asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert asking.recv(1) == b""


def end_by_signal(mount: Mount) -> None:
    """Ask the server alone to end, and return when it is gone."""
    os.kill(mount.server_pid, signal.SIGTERM)
    wait_for_exit(mount.server_pid)


BEGUN: dict[str, Callable[[Mount], object]] = {
    "fpfs.core.threads.run_alone": write_synchronously,
    "fpfs.daemon.commit.pipeline.Commit._answer_sync_write": write_synchronously,
    "fpfs.daemon.control.server.ControlServer._converse": Mount.status,
    "fpfs.daemon.maintenance.membership.DeviceChanges.ensure_copies": kill,
    "fpfs.daemon.mount.shutdown.Ending._end_by_signal": end_by_signal,
    "fpfs.daemon.mount.server.Server._collect_orphans": kill,
    "fpfs.daemon.maintenance.crash_resume.TakeOver.delete_forgotten": kill,
}
"""Tasks that do not stay, and what lets a server begin one."""

MAIN = {"fpfs.daemon.mount.server.serve", "fpfs.daemon.mount.server.Server._serve_metrics"}
"""What waits for the others, and what a scrape that fails may have ended."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mount, Orders]]:
    """A mount whose servers do what they are told."""
    folder = tmp_path_factory.mktemp("poisoned")
    with poisoned_mount(folder, options=[f"metrics=unix:{folder / METRICS}"]) as (mount, orders):
        mount.allow_log(r"fpfs.server: serving failed|Traceback \(most recent call last\)")
        mount.allow_log(r"server \d+ died \((exit status 70|signal 9)\): starting another")
        yield mount, orders


STARTED = {
    "fpfs/daemon/catalog/database.py": ("run_alone",),
    "fpfs/daemon/catalog/executor.py": ("threading.Thread",),
    "fpfs/daemon/commit/pipeline.py": (
        *("self._answer_sync_write", "self._commit_in_order", "self._commit_open_in_time"),
        *("self._drain_entries", "self._flush_in_time", "self._gather"),
        *("self._reclaim.run_deletions", "self._reclaim.run_removals"),
    ),
    "fpfs/daemon/control/server.py": ("self._converse", "watch"),
    "fpfs/daemon/mount/shutdown.py": ("self._end_by_signal",),
    "fpfs/daemon/telemetry/http.py": ("self.converse",),
    "fpfs/daemon/mount/server.py": (
        *("run_beside", "run_beside", "run_beside"),
        *("self._changes.ensure_copies", "self._collect_orphans", "self._commit.run"),
        *("self._controlled.tracing.run", "self._make_room", "self._relay_events"),
        *("self._run_pyfuse3", "delete_forgotten"),
    ),
}
"""What the source starts. Each is above, but for the catalog's thread (`test_fatal_requests.py`),
scrapes and questions, which have tests of their own, and `_make_room`, whose end `_relay_events`
waits for."""


def ask(mount: Mount) -> None:
    """Ask for an attribute about which there may be an order."""
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        os.getxattr(mount.root, "user.task")


@pytest.mark.parametrize("name", RUNNING)
def test_a_task_that_ends_ends_its_server_and_not_the_mount(
    poisoned: tuple[Mount, Orders], name: str
) -> None:
    mount, orders = poisoned
    restarts = mount.status().restarts
    with (mount.root / "file").open("wb", buffering=0) as file:
        file.write(b"before, ")
        orders.give("task", f"once end {name}")
        ask(mount)
        file.write(b"after")
    assert (mount.root / "file").read_bytes() == b"before, after"
    mount.flush()
    assert mount.status().restarts == restarts + 1


@pytest.mark.parametrize("name", BEGUN)
def test_a_task_that_fails_at_once_ends_its_server_and_not_the_mount(
    poisoned: tuple[Mount, Orders], name: str
) -> None:
    mount, orders = poisoned
    restarts = mount.status().restarts
    mount.note_processes()
    with (mount.root / "file").open("wb", buffering=0) as file:
        file.write(b"before, ")
        orders.give(f"at-task-{name}", "once error")
        BEGUN[name](mount)
        orders.wait_met(f"at-task-{name}")
        file.write(b"after")
    assert (mount.root / "file").read_bytes() == b"before, after"
    mount.flush()
    killed = BEGUN[name] is kill
    assert mount.status().restarts == restarts + 1 + killed


def test_a_scrape_that_fails_ends_neither(poisoned: tuple[Mount, Orders]) -> None:
    """Whoever asks for figures cannot have servers end."""
    mount, orders = poisoned
    mount.expect_log("metrics are no longer served")
    restarts = mount.status().restarts
    orders.give(f"at-task-{SCRAPE}", "once error")
    ask_metrics(mount)
    mount.flush()
    assert mount.status().restarts == restarts


def test_a_question_that_fails_ends_neither(poisoned: tuple[Mount, Orders]) -> None:
    mount, orders = poisoned
    mount.expect_log("a request to wait failed")
    restarts = mount.status().restarts
    (mount.root / "file").write_bytes(b"x")
    orders.give(f"at-task-{QUESTION}", "once error")
    with pytest.raises(CommandFailed, match="the server failed at it"):
        check_fpfs("wait", mount.root / "file", module="fpfs.cli.ctl")
    assert mount.status().restarts == restarts


def test_no_task_runs_that_is_not_known(poisoned: tuple[Mount, Orders]) -> None:
    mount, orders = poisoned
    orders.give("task", "list")
    ask(mount)
    orders.take_back("task")
    found = {name for name in orders.task_names("task") if name.startswith("fpfs.")}
    assert found - MAIN - BEGUN.keys() == set(RUNNING) - {"pyfuse-"}


def test_no_task_is_started_that_is_not_known() -> None:
    package = Path(fpfs.__file__).parent
    found = {
        str(path.relative_to(package.parent)): tuple(sorted(started_in(path)))
        for path in package.rglob("*.py")
        # What a client starts is its own.
        if not any(path.is_relative_to(package / part) for part in ("client", "testing"))
    }
    expected = {path: tuple(sorted(names)) for path, names in STARTED.items()}
    assert {path: names for path, names in found.items() if names} == expected


def started_in(path: Path) -> Iterator[str]:
    """What a file of Python starts as tasks and threads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "Thread":
            yield ast.unparse(node.func)
        elif node.func.attr in ("start_soon", "start") and "nursery" in ast.unparse(
            node.func.value
        ):
            yield ast.unparse(node.args[0])
