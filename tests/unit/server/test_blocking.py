"""A filesystem that does not answer holds up who asks about it, and nobody else."""

from __future__ import annotations

import ast
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

import fpfs
from fpfs.daemon.devices.free_space import DeviceSpace
from fpfs.daemon.devices.members import Member
from fpfs.daemon.maintenance.evacuate import Draining
from fpfs.daemon.telemetry.collector import Scrape
from fpfs.daemon.telemetry.snapshot import gather
from tests.support.catalog.rig import Rig, rig

CALLERS = 45
"""More than trio has threads for all who name no limiter."""

Ask = Callable[[], Awaitable[object]]

is_held = ContextVar("is_held", default=False)
"""Whether what a task asks of a filesystem waits; the thread that asks for it has it, too."""


class Filesystem:
    """Answers those who are held when it is let, and nobody on the thread of the event loop."""

    def __init__(self, real: Callable[[str], os.statvfs_result]) -> None:
        self.answers = threading.Event()
        self.waiting = 0
        self._real = real

    def statvfs(self, path: str) -> os.statvfs_result:
        """Stand in for `os.statvfs`."""
        assert threading.current_thread() is not threading.main_thread()
        if is_held.get():
            self.waiting += 1
            self.answers.wait()
        return self._real(path)


@pytest.fixture
def filesystem(monkeypatch: pytest.MonkeyPatch) -> Filesystem:
    """The one that the daemon asks."""
    made = Filesystem(os.statvfs)
    monkeypatch.setattr(os, "statvfs", made.statvfs)
    return made


def members(folder: Path, *, count: int = 1) -> list[Member]:
    """Devices that all are in one folder."""
    return [Member(number=number, path=str(folder), device_id="") for number in range(count)]


def scrape_of(mount: Rig) -> Scrape:
    """What answers Prometheus."""
    parts: dict[str, Any] = {
        "config": SimpleNamespace(mountpoint=""),
        "registry": SimpleNamespace(members=members(mount.folder)),
        "link": SimpleNamespace(started_unix_s=0.0),
    }
    return Scrape(
        **parts,
        catalog=mount.catalog,
        engine=mount.engine,
        namespace=mount.namespace,
        commit=mount.commit,
        restarts=0,
    )


def questions(mount: Rig) -> dict[str, Ask]:
    """All that asks a device's filesystem while programs use the mount."""
    space = DeviceSpace(lambda: {0: str(mount.folder)}, dict)
    scrape = scrape_of(mount)
    return {
        "statfs": lambda: space.measure(inode_count=1),
        "removal": lambda: space.is_tight(wanted_bytes=1),
        "new file": space.free_by_device,
        "scrape": scrape.figures,
    }


async def ask_and_wait(ask: Ask) -> None:
    """Ask as one whom the filesystem keeps waiting."""
    is_held.set(True)
    await ask()


@pytest.mark.parametrize("kind", ["statfs", "removal", "new file", "scrape"])
@trio.testing.trio_test
async def test_who_waits_for_a_filesystem_holds_up_no_save_and_no_question_of_another_kind(
    kind: str, tmp_path: Path, filesystem: Filesystem
) -> None:
    async with rig(tmp_path) as mount, trio.open_nursery() as nursery:
        others = questions(mount)
        ask = others.pop(kind)
        try:
            for _ in range(CALLERS):
                nursery.start_soon(ask_and_wait, ask)
            while not filesystem.waiting:
                await trio.testing.wait_all_tasks_blocked()
            await mount.write_file("file", b"content")
            with trio.fail_after(30):
                await mount.commit.make_names_durable()
                for other in others.values():
                    await other()
        finally:
            filesystem.answers.set()
    assert mount.commit.durability.ack_to_durable().count == 1


@trio.testing.trio_test
async def test_figures_of_now_ask_no_filesystem(
    tmp_path: Path, filesystem: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, **_keywords: Any) -> None:
        raise AssertionError(path)

    async with rig(tmp_path) as mount:
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", refuse)
            now = gather(
                catalog=mount.catalog,
                engine=mount.engine,
                namespace=mount.namespace,
                commit=mount.commit,
            )
    assert now.catalog_copies_in_service == now.catalog_copies
    assert not filesystem.waiting


@trio.testing.trio_test
async def test_a_drain_compares_devices_beside_the_event_loop(
    tmp_path: Path, filesystem: Filesystem
) -> None:
    """`Filesystem` refuses to be asked there."""
    async with rig(tmp_path) as mount:
        registry: Any = SimpleNamespace(members=members(tmp_path, count=3))
        devices = {number: SimpleNamespace(failed=False) for number in range(3)}
        statistics = SimpleNamespace(devices=devices, kept_bytes={})
        engine: Any = SimpleNamespace(statistics=lambda: statistics)
        draining = Draining(
            catalog=mount.catalog,
            engine=engine,
            inodes=mount.inodes,
            registry=registry,
            removals_recorded=mount.commit.removals_recorded,
            ask_again=mount.commit.ask_again,
        )
        assert await draining.choose(0, Counter({1: 3, 2: 5})) == 1
    assert not filesystem.waiting


def names_no_limiter(tree: ast.AST) -> Iterator[int]:
    """Lines that run something in a thread of those that trio lends to all."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    limited = [call.func for call in calls if any(word.arg == "limiter" for word in call.keywords)]
    for node in ast.walk(tree):
        is_name = isinstance(node, ast.Attribute) and ast.unparse(node).endswith("thread.run_sync")
        if is_name and node not in limited:
            yield node.lineno


def test_no_two_kinds_of_calls_share_threads() -> None:
    root = Path(fpfs.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}"
        for path in root.rglob("*.py")
        for line in names_no_limiter(ast.parse(path.read_text()))
    ]
    assert not found
