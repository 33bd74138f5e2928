"""One rank of a job that saves and loads with torch.distributed.checkpoint over gloo.

Usage: distributed_checkpoint.py RANK WORLD_SIZE RENDEZVOUS_FILE CHECKPOINT_FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build_model(seed: int) -> torch.nn.Module:
    """The same parameters on every rank, sharded over the ranks."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(517, 1024), torch.nn.Linear(1024, 203))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    return model


def state_of(model: torch.nn.Module, *, step: int) -> dict[str, object]:
    return {"model": model.state_dict(), "step": step}


def check(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Every local shard is the same, bit for bit."""
    pairs = zip(found.state_dict().items(), expected.state_dict().items(), strict=True)
    for (name, one), (_, other) in pairs:
        assert torch.equal(one.to_local(), other.to_local()), name


def save_and_load(folder: Path) -> None:
    saved = build_model(seed=1)
    dcp.save(state_of(saved, step=7), checkpoint_id=folder / "sync")
    future = dcp.async_save(state_of(saved, step=8), checkpoint_id=folder / "async")
    future.result()
    for name, step in (("sync", 7), ("async", 8)):
        loaded = build_model(seed=2)
        state = state_of(loaded, step=0)
        dcp.load(state, checkpoint_id=folder / name)
        loaded.load_state_dict(state["model"])
        assert state["step"] == step
        check(loaded, saved)


def main() -> None:
    rank, world_size, rendezvous, folder = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world_size)
    )
    save_and_load(Path(folder))
    dist.destroy_process_group()
    print("same")


if __name__ == "__main__":
    main()
