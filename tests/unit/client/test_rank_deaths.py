"""Ranks that fail or die while others read from them: all learn who it was, and why."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fpfs import client
from fpfs.client import gathering, peers, writing
from fpfs.core import transfers
from tests.support.ranks import Worlds
from tests.support.states import FORMER, is_as_before
from tests.support.waiting import wait_until


@pytest.fixture
def path(path: Path) -> Path:
    """Where a state is saved, with what a failure must leave."""
    client.save(FORMER, path)
    return path


def columns() -> DTensor:
    """A tensor of which each rank has some columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(4e6).reshape(1000, 4000), mesh, [Shard(1)])


def save_columns(path: str, rank: int, slowly: bool) -> None:
    """As a rank: `rank` dies before the others begin to write, who want to read of it.

    slowly: first it loses its memory.
    """
    tensor = columns()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    lost = Path(f"{path}.lost")
    gathering.DEATH_S = 60.0  # a loaded machine may take longer than a second for a death

    def lose(part: torch.Tensor) -> None:
        first, end = part.data_ptr(), part.data_ptr() + part.nbytes
        first -= first % mmap.PAGESIZE
        libc = ctypes.CDLL(None)
        assert libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(end - first), 0) == 0

    def write(*arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == rank and slowly:
            lose(tensor.to_local())
            lost.touch()
            wait_until(lambda: not lost.exists())
            time.sleep(0.2)  # meanwhile the others cannot read it, and it is alive
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if slowly:
            wait_until(lost.exists)
            dist.barrier(others)
            lost.unlink(missing_ok=True)
            return transfers.write_pieces(*arguments, **options)
        ended = os.pidfd_open(pids[rank])
        assert select.select([ended], [], [], 60)[0]
        return transfers.write_pieces(*arguments, **options)

    others = dist.new_group([other for other in range(dist.get_world_size()) if other != rank])
    writing.write_pieces = write
    client.save({"columns": tensor}, path)


@pytest.mark.parametrize(
    ("rank", "slowly"), [(0, False), (1, False), (2, False), (1, True), (2, True)]
)
def test_a_rank_dies_that_others_read(forks: Worlds, path: Path, rank: int, slowly: bool) -> None:
    world = forks.start(3, save_columns, path, rank, slowly)
    errors = [outcome.error for outcome in world.outcomes()]
    assert errors.pop(rank) == -signal.SIGKILL
    assert errors == [f"RankFailed: rank {rank}: its process is no more"] * 2
    assert is_as_before(path)


def save_and_end_first(path: str, looks_at: str) -> None:
    """As a rank: 0 fails, and ends while 1 looks who has."""
    tensor = columns()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    writes, looking = Path(f"{path}.writes"), Path(f"{path}.looking")

    def write(*arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            writes.touch()
            wait_until(looking.exists)
            looking.unlink()
            writes.unlink()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if looks_at == "memory":
            wait_until(writes.exists)
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        return transfers.write_pieces(*arguments, **options)

    def look(*arguments: Any, **options: Any) -> list[int]:
        # Who looks at processes may have none of them yet.
        has_them = looks_at == "memory" or arguments[0]._pidfds
        if not (has_them and writes.exists()):
            return looked(*arguments, **options)
        looking.touch()
        ended = os.pidfd_open(pids[0])
        assert select.select([ended], [], [], 60)[0]
        found = looked(*arguments, **options)
        assert found == [0]
        return found

    looked = writing.gone_of if looks_at == "memory" else peers._Watch.gone
    writing.write_pieces = write
    if dist.get_rank() == 1 and looks_at == "memory":
        writing.gone_of = look
    elif dist.get_rank() == 1:
        peers._Watch.gone = look  # type: ignore[method-assign]
    client.save({"columns": tensor}, path)


@pytest.mark.parametrize("looks_at", ["processes", "memory"])
def test_a_rank_that_has_ended_has_said_why(forks: Worlds, path: Path, looks_at: str) -> None:
    ranks = forks.start(2, save_and_end_first, path, looks_at).outcomes()
    own, other = (outcome.error for outcome in ranks)
    cause = f"OSError: [Errno {errno.EIO}] {os.strerror(errno.EIO)}: '{path}'"
    assert own == cause
    assert other == f"RankFailed: rank 0: {cause}"
    assert is_as_before(path)


def answer_and_end(folder: str) -> bool:
    """As a rank: 0 answers 1 and ends, while 1 looks whether it has.

    Returns whether 1 saw that before it had seen the answer.
    """
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    answering, looking = Path(folder, "answering"), Path(folder, "looking")
    saw = False

    def answer(ranks: list[str]) -> list[str]:
        answering.touch()
        wait_until(looking.exists)
        return ranks

    def look(watch: peers._Watch, **options: Any) -> list[int]:
        nonlocal saw
        if answering.exists() and watch._pidfds:
            looking.touch()
            ended = os.pidfd_open(pids[0])
            assert select.select([ended], [], [], 60)[0]
        found = looked(watch, **options)
        saw = found == [0]
        return found

    looked = peers._Watch.gone
    if dist.get_rank() == 1:
        peers._Watch.gone = look  # type: ignore[method-assign]
    with peers.peers_of(None, timeout_s=60, call="save") as found:
        assert found.exchange("end", "done", answer, of=str) == "done"
    return saw


def test_what_a_rank_answers_before_it_ends_counts(forks: Worlds, tmp_path: Path) -> None:
    assert forks.start(2, answer_and_end, tmp_path).values() == [False, True]
