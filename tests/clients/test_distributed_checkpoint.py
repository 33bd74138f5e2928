"""torch.distributed.checkpoint, unmodified: one process without a group, and two over gloo."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.processes import run_program
from tests.support.target import Target

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PROGRAM = Path(__file__).parent / "programs" / "distributed_checkpoint.py"


def state(*, seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"layer{i}.weight": torch.randn(321 + i, 1009, generator=generator) for i in range(8)
    }
    return {"model": tensors, "step": seed}


def assert_loads(folder: Path, expected: dict[str, object]) -> None:
    loaded = state(seed=99)
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert loaded["step"] == expected["step"]
    for name, tensor in expected["model"].items():
        assert torch.equal(loaded["model"][name], tensor), name


def test_save_and_load_without_a_group(target: Target, directory: Path) -> None:
    saved = state(seed=1)
    dcp.save(saved, checkpoint_id=directory / "step1", no_dist=True)
    assert sorted(p.name for p in (directory / "step1").iterdir()) == [".metadata", "__0_0.distcp"]
    assert_loads(directory / "step1", saved)
    target.remount()
    assert_loads(directory / "step1", saved)


def test_overwrite_a_checkpoint(directory: Path) -> None:
    for seed in (2, 3):
        saved = state(seed=seed)
        dcp.save(saved, checkpoint_id=directory / "latest", no_dist=True)
        assert_loads(directory / "latest", saved)


def test_async_save_without_a_group(directory: Path) -> None:
    saved = state(seed=4)
    future = dcp.async_save(saved, checkpoint_id=directory / "async", no_dist=True)
    future.result(timeout=60)
    assert_loads(directory / "async", saved)


@pytest.mark.slow
def test_two_processes(directory: Path, plain: Path) -> None:
    def rank(number: int) -> str:
        arguments = (str(number), "2", plain / "rendezvous", directory)
        return run_program(PROGRAM, *arguments, timeout_s=120)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert [line.strip() for line in pool.map(rank, range(2))] == ["same", "same"]
    for name in ("sync", "async"):
        names = sorted(path.name for path in (directory / name).iterdir())
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp"]
