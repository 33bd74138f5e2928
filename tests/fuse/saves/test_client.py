"""fpfs.client on a mount: whole or not at all, whoever is killed, whatever is full or damaged."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fpfs
from fpfs import client
from fpfs.cli import ctl
from fpfs.client import Plan, Topology
from fpfs.core import transfers
from fpfs.core.protocol.reports import FileStatus
from fpfs.core.temporary_names import PREFIX
from fpfs.testing.mounted import Mount, mounted
from tests.support.failures.damage import blocks_of, flip
from tests.support.failures.faults import MEBIBYTE, faulty_mount
from tests.support.failures.hostile import suspended
from tests.support.processes import DEADLINE_S, python_child
from tests.support.ranks import Worlds
from tests.support.seeds import IS_LONG, chosen_seed
from tests.support.servers import assert_read, kill, reads_of, stop, wait_for_exit
from tests.support.states import large_state, odd_state, only_value, same
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.clients,
    # torch's own, of types that it is not done with.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

KILLS = 100 if IS_LONG else 6
DELAY_S = 0.15

# For each line on stdin it has a child that saves over and over, from that step on.
SAVES = """
import os, sys, torch
from fpfs import client
path, beside = sys.argv[1], sys.argv[2] == "beside training"
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child:
        print("child", child, flush=True)
        os.waitpid(child, 0)
        continue
    step = int(line)
    state = {str(i): torch.zeros(500_001 + i, dtype=torch.int32) for i in range(8)}
    saver = client.AsyncSaver()
    while True:
        for tensor in state.values():
            tensor.fill_(step)
        if beside:
            saving = saver.save(state, path)
            for tensor in state.values():
                tensor.fill_(-1)
            saving.acknowledged.result()
        else:
            client.save(state, path, durable=step % 3 == 0)
        os.write(1, f"saved {step}\\n".encode())
        step += 1
"""


def step_of(path: Path) -> int:
    """The step that a checkpoint is of, whose tensors are all there and of one step."""
    state = client.load(path)
    assert len(state) == 8
    return only_value(state.values())


def nothing_is_left_by_a_save(path: Path) -> bool:
    """Whether another save leaves nothing else, and removes what killed ones have left.

    A mount learns a moment after a process has ended that its files are locked no more.
    """
    client.save({}, path)
    return os.listdir(path.parent) == [path.name]


def test_both_ways_with_torch(directory: Path, mount: Mount) -> None:
    state = {"odd": odd_state(), "large": large_state(seed=1)}
    theirs, ours = directory / "theirs.pt", directory / "ours.pt"
    torch.save(state, theirs)
    client.save(state, ours)
    mount.remount()
    for path in (theirs, ours):
        assert same(client.load(path, weights_only=False), state)
    assert same(torch.load(ours, weights_only=False), state)
    assert same(torch.load(ours, weights_only=False, mmap=True)["large"], state["large"])
    assert sorted(os.listdir(directory)) == ["ours.pt", "theirs.pt"]


def save_together(path: str, seed: int) -> list[int]:
    """As a rank: save, durably; returns which ranks have written."""
    saved = client.save(large_state(seed=seed), path, durable=True)
    return [part.rank for part in saved.written]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_write_one_file(directory: Path, mount: Mount, forks: Worlds, ranks: int) -> None:
    path = directory / "state.pt"
    for seed in (6, 7):
        writers = forks.start(ranks, save_together, path, seed).values()
        assert writers == [list(range(ranks))] * ranks
        status = fpfs.status(path)
        assert isinstance(status, FileStatus)
        assert status.durable
        assert same(client.load(path), large_state(seed=seed))
    mount.remount()
    assert same(torch.load(path), large_state(seed=7))
    assert os.listdir(directory) == ["state.pt"]


def load_together(path: str, how: str) -> bool:
    """As a rank: load; returns whether it is what was saved."""
    expected = {str(number): torch.full((4_000_000,), number) for number in range(4)}
    group = client.ALONE if how == "alone" else None
    into = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dist.barrier()
    return same(client.load(path, group=group, into=into if how == "into" else None), expected)


@pytest.mark.parametrize(("how", "times"), [("into", 1), ("new", 1), ("alone", 3)])
def test_a_group_reads_each_byte_once(own: Mount, forks: Worlds, how: str, times: int) -> None:
    path = own.root / "state.pt"
    torch.save({str(number): torch.full((4_000_000,), number) for number in range(4)}, path)
    own.remount()
    before = reads_of(own)
    assert forks.start(3, load_together, path, how).values() == [True] * 3
    assert_read(own, before, path.stat().st_size, times=times)


def test_the_topology_of_any_place_on_a_mount(own: Mount) -> None:
    (own.root / "run").mkdir()
    for name in ("", "step.pt", "run", "run/step.pt", "not/there/step.pt"):
        topology = Topology.of(own.root / name)
        assert (topology.devices, topology.chunk_bytes) == (2, MEBIBYTE)
    assert Topology.of(own.root.parent).devices == 1


def save_durably(path: str, asks: list[bool]) -> list[object]:
    """As a rank."""
    saved = client.save(large_state(seed=7), path, durable=asks[dist.get_rank()])
    return [saved.durable, os.getxattr(path, "user.fpfs.durable").decode()]


@pytest.mark.parametrize("asks", [[True, False], [False, True]])
def test_a_save_is_durable_if_one_rank_asks_for_it(
    directory: Path, mount: Mount, forks: Worlds, asks: list[bool]
) -> None:
    world = forks.start(2, save_durably, directory / "state.pt", asks)
    assert world.values() == [[True, "1"]] * 2


def save_by_a_plan(path: str) -> list[list[int]]:
    """As a rank: as many write as the mount has devices; returns what each wrote."""
    topology = Topology.of(path)
    assert (topology.devices, topology.chunk_bytes) == (2, MEBIBYTE)
    state = large_state(seed=6)
    plan = Plan.build(state, topology, writers="device")
    saved = client.save(state, path, plan=plan, durable=True)
    return [[written.rank, written.bytes] for written in saved.written]


def test_as_many_ranks_write_as_there_are_devices(
    capsys: pytest.CaptureFixture[str], forks: Worlds
) -> None:
    with mounted(devices=2) as mount:
        path = mount.root / "state.pt"
        (written, *others) = forks.start(4, save_by_a_plan, path).values()
        assert others == [written] * 3
        assert [rank for rank, _ in written] == [0, 2]
        assert same(torch.load(path), large_state(seed=6))
        # The command tells the same, and how much of it is on which device.
        words = ["plan", str(path), "--ranks", "4", "--writers", "device", "--json"]
        assert ctl.main(words) == 0
        ranks = json.loads(capsys.readouterr().out)["ranks"]
        assert [[rank["rank"], rank["bytes"]] for rank in ranks if rank["bytes"]] == written
        where: Counter[str] = Counter()
        for rank in ranks:
            where.update(rank["device_bytes"])
        assert where.total() == path.stat().st_size
        for device in mount.status().devices:
            # In whole blocks of 64 KiB.
            assert 0 <= device.bytes_used - where[str(device.number)] < 2 * 65536


def save_and_save(path: str, step: int) -> None:
    """As a rank: save over and over, of each step another state, until a rank dies."""
    state = {str(number): torch.zeros(500_001, dtype=torch.int32) for number in range(8)}
    while True:
        for tensor in state.values():
            tensor.fill_(step)
        client.save(state, path)
        step += 1


def test_ranks_that_are_killed_leave_a_whole_file(own: Mount, forks: Worlds) -> None:
    """Each of them, or all. Nor is it noticed that the server is, as in half of the rounds."""
    own.expect_log("died .signal 9.: starting another")
    chance = random.Random(chosen_seed())
    path = own.root / "state.pt"
    last = 0
    for number in range(KILLS):
        before = path.stat().st_ino if last else 0
        world = forks.start(3, save_and_save, path, last + 1)
        wait_until(lambda before=before: path.exists() and path.stat().st_ino != before)
        time.sleep(chance.uniform(0, DELAY_S))
        killed = number % 4
        if (number + number // 4) % 2:  # with and without each of them, by turns
            kill(own)
            time.sleep(chance.uniform(0, DELAY_S))
        if killed < 3:
            world.kill(killed)
            errors = [outcome.error for outcome in world.outcomes()]
            assert errors.pop(killed) == -signal.SIGKILL
            assert errors == [f"RankFailed: rank {killed}: its process is no more"] * 2
            assert os.listdir(own.root) == ["state.pt"]
        else:
            world.end()
        last = step_of(path)
    # Of those of whom nobody was left either.
    wait_until(lambda: nothing_is_left_by_a_save(path))


def test_a_mount_that_goes_away_leaves_a_whole_file(own: Mount, forks: Worlds) -> None:
    path = own.root / "state.pt"
    world = forks.start(3, save_and_save, path, 1)
    wait_until(path.exists)
    first = path.stat().st_ino
    wait_until(lambda: path.stat().st_ino != first)
    own.kill(own.keeper_pid, own.server_pid)
    for outcome in world.outcomes():
        assert re.search(r"\[Errno \d+\] (Transport endpoint|Software caused)", str(outcome.error))
    own.tear_down()
    own.mount()
    assert os.listdir(own.root) == ["state.pt"]
    assert step_of(path) >= 1


def test_durable_is_durable(directory: Path, mount: Mount) -> None:
    saved = client.save(large_state(seed=2), directory / "state.pt", durable=True)
    assert saved.durable
    status = fpfs.status(directory / "state.pt")
    assert isinstance(status, FileStatus)
    assert status.durable


@pytest.fixture
def own() -> Iterator[Mount]:
    """A mount where writers are killed."""
    with mounted(devices=2) as mount:
        mount.allow_log("the writer of state.pt was cut off by SIGKILL: ")
        yield mount


@pytest.mark.parametrize("how", ["at once", "beside training"])
def test_a_saver_that_is_killed_leaves_a_whole_file(own: Mount, how: str) -> None:
    chance = random.Random(chosen_seed())
    path = own.root / "state.pt"
    with python_child(SAVES, path, how) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        last = 0
        for _ in range(KILLS):
            saver.stdin.write(f"{last + 1}\n")
            saver.stdin.flush()
            while not (line := saver.stdout.readline()).startswith("child "):
                # Of the one before, which was killed since.
                assert int(line.removeprefix("saved ")) <= last
            pid = int(line.removeprefix("child "))
            assert saver.stdout.readline() == f"saved {last + 1}\n"
            # At any moment of what a save does, and of what it does not.
            time.sleep(chance.uniform(0, DELAY_S))
            os.kill(pid, signal.SIGKILL)
            wait_for_exit(pid)  # it may give a file its name until then
            found = step_of(path)
            assert found > last
            last = found
    # Of all that were killed.
    wait_until(lambda: nothing_is_left_by_a_save(path))


def test_a_server_that_is_killed_is_not_noticed(
    own: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of writing: it answers nothing any more when that begins."""
    path = own.root / "state.pt"
    own.expect_log("died .signal 9.: starting another")
    states = [large_state(seed=number, tensors=3) for number in range(2)]

    def write(*arguments: Any, **options: Any) -> Any:
        stop(own.server_pid)
        writer = transfers.write_pieces(*arguments, **options)
        kill(own)
        return writer

    monkeypatch.setattr("fpfs.client.writing.write_pieces", write)
    for number in range(4):
        client.save(states[number % 2], path, durable=True)
        assert same(client.load(path), states[number % 2])
    assert own.status().restarts >= 4


def test_a_save_beside_training(own: Mount) -> None:
    """A server that is killed and a child that is forked meanwhile are not noticed."""
    own.expect_log("died .signal 9.: starting another")
    path = own.root / "state.pt"
    state = large_state(seed=8)
    client.save(state, path)
    with client.AsyncSaver() as saver:
        for _ in range(3):
            saving = saver.save(state, path)
            acknowledged = saving.acknowledged
            wait_until(lambda a=acknowledged: a.done() or len(os.listdir(own.root)) == 2)
            if (child := os.fork()) == 0:
                signal.pause()
            kill(own)
            assert saving.durable.result(60).durable
            status = fpfs.status(path)
            assert isinstance(status, FileStatus)
            assert status.durable
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert same(torch.load(path), state)
    own.remount()
    assert same(client.load(path), state)
    assert os.listdir(own.root) == ["state.pt"]


def test_training_may_keep_the_interpreter(own: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that write, and make CRC32s, need none."""
    state = large_state(seed=9)
    size = sum(tensor.nbytes for tensor in state.values())
    switch_s = sys.getswitchinterval()
    with contextlib.ExitStack() as held, client.AsyncSaver() as saver:
        begun = threading.Event()

        def write(*arguments: Any, **keywords: Any) -> Any:
            # Nothing that it writes is answered until all is.
            held.enter_context(suspended(own.keeper_pid))
            held.enter_context(suspended(own.server_pid))
            monkeypatch.undo()
            # Whoever has the interpreter keeps it until that thread waits for something.
            sys.setswitchinterval(10 * DEADLINE_S)
            begun.set()
            return transfers.write_pieces(*arguments, **keywords)

        monkeypatch.setattr("fpfs.client.writing.write_pieces", write)
        saving = saver.save(state, own.root / "state.pt")
        try:
            assert begun.wait(DEADLINE_S)
            before = saving.bytes_written
            held.close()
            end_s = time.monotonic() + DEADLINE_S
            while saving.bytes_written < size and time.monotonic() < end_s:
                pass
            after = saving.bytes_written
        finally:
            sys.setswitchinterval(switch_s)
        assert saving.durable.result(DEADLINE_S).durable
    assert before < size <= after
    assert same(client.load(own.root / "state.pt"), state)


def save_without_writing(path: str) -> None:
    """As a rank: save what is not to be begun."""

    def write(*_: object, **__: object) -> None:
        raise AssertionError("it writes")

    with mock.patch("fpfs.client.writing.write_pieces", write):
        client.save(large_state(seed=3), path)


def test_what_finds_no_room_leaves_it_to_the_next(tmp_path: Path) -> None:
    """At once, when it is raised."""
    large, small = ({"a": torch.zeros(size * MEBIBYTE // 4)} for size in (150, 40))
    with faulty_mount(tmp_path) as (mount, devices):
        for number in range(2):
            devices.fill(number, leave_bytes=60 * MEBIBYTE)
        # For a moment an allocation has all there is, and the catalog what it keeps for that.
        mount.allow_log(r"WARNING fpfs\.daemon\.catalog\.")
        for _ in range(4):
            with pytest.raises(OSError, match="No space left on device"):
                client.save(large, mount.root / "large.pt")
            client.save(small, mount.root / "small.pt")
            (mount.root / "small.pt").unlink()
        assert os.listdir(mount.root) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_device_is_found_before_the_first_byte(
    tmp_path: Path, forks: Worlds, ranks: int
) -> None:
    with faulty_mount(tmp_path) as (mount, devices):
        path = mount.root / "state.pt"
        client.save({"step": 1}, path)
        mount.flush()
        for number in range(2):
            devices.fill(number, leave_bytes=4 * MEBIBYTE)

        outcomes = forks.start(ranks, save_without_writing, path).outcomes()
        for rank, outcome in enumerate(outcomes):
            assert isinstance(outcome.error, str)
            assert outcome.error.startswith(
                "RankFailed: rank 0: " * rank + "OSError: [Errno 28] reserve "
            )
            assert outcome.error.endswith(f"No space left on device: '{path}'")
        with client.AsyncSaver(strict=False) as saver:
            error = saver.save(large_state(seed=3), path).durable.exception(60)
        assert isinstance(error, OSError)
        assert (error.errno, error.filename) == (errno.ENOSPC, str(path))
        assert os.listdir(mount.root) == ["state.pt"]
        assert client.load(path) == {"step": 1}
        for number in range(2):
            devices.empty(number)


def test_an_interrupt_leaves_the_file_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "state.pt"
    client.save({"step": 1}, path)

    before = set(os.listdir("/proc/self/fd"))

    class Interrupted:
        """A writer that is interrupted when it is waited for, and has begun then."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._writer = transfers.write_pieces(*arguments, **options)
            self.close = self._writer.close

        @property
        def bytes_written(self) -> int:
            return self._writer.bytes_written

        def wait(self, seconds: float) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            return self._writer.wait(seconds)

    monkeypatch.setattr("fpfs.client.writing.write_pieces", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.save(large_state(seed=4), path)
    # Nobody writes any more, although the error is still there to look at.
    assert set(os.listdir("/proc/self/fd")) == before
    assert client.load(path) == {"step": 1}
    assert os.listdir(directory) == ["state.pt"]


def test_damaged_bytes_are_not_loaded() -> None:
    with mounted() as mount:
        path = mount.root / "state.pt"
        state = large_state(seed=5)
        client.save(state, path, durable=True)
        damaged = blocks_of(mount, path)[20]
        mount.expect_log(damaged.log_pattern())
        mount.unmount()
        flip(damaged.path, damaged.offset + 77)
        mount.mount()
        with pytest.raises(OSError, match="Input/output error") as refused:
            client.load(path)
        assert (refused.value.errno, refused.value.filename) == (errno.EIO, str(path))
        flip(damaged.path, damaged.offset + 77)
        mount.remount()
        assert same(client.load(path), state)
        assert not [name for name in os.listdir(mount.root) if os.fsencode(name).startswith(PREFIX)]
