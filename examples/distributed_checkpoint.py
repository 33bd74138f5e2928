"""Sharded training that saves with torch.distributed.checkpoint by fpfs, beside the next epoch.

    torchrun --standalone --nproc-per-node 2 examples/distributed_checkpoint.py /ckpt/run1

goes on from the last checkpoint that is there, on as many ranks as there are now.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fpfs

EPOCHS = 3
WIDTH = 512


def main() -> None:
    """Train, and save after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go: a mount of fpfs, or any")
    folder: Path = parser.parse_args().folder

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, of its own
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())

    first = 0
    latest = folder / "latest"
    if latest.exists():
        states = get_state_dict(model, optimizer)
        found = {"epoch": 0, "model": states[0], "optimizer": states[1]}
        dcp.load(found, storage_reader=fpfs.dcp.Reader(latest))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        first = found["epoch"] + 1

    # The thread that saves talks to the other ranks while this one trains with them.
    group = dist.new_group(backend="gloo")
    # The next step waits until what it changes was copied.
    stager = fpfs.dcp.Stager(optimizers=optimizer)
    saving: Any = None
    for epoch in range(first, first + EPOCHS):
        loss = model(torch.randn(8, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if saving is not None:
            saving.upload_completion.result()
        states = get_state_dict(model, optimizer)
        # Into one directory again and again: it has a whole checkpoint at any time.
        saving = dcp.async_save(
            {"epoch": epoch, "model": states[0], "optimizer": states[1]},
            storage_writer=fpfs.dcp.Writer(latest),
            async_stager=stager,
            process_group=group,
        )
    saving.upload_completion.result()
    stager.close()
    if dist.get_rank() == 0:
        print(f"epochs {first} to {epoch} by {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
