"""Data-parallel training whose ranks save each checkpoint together, as one ordinary file.

    torchrun --standalone --nproc-per-node 2 examples/parallel_save.py /ckpt

trains a small model on the processor, saves it after each epoch, loads the last checkpoint with
plain torch.load, and compares.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fpfs

EPOCHS = 3
WIDTH = 1024


def main() -> None:
    """Train, save and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go: a mount of fpfs, or any")
    folder: Path = parser.parse_args().folder

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(EPOCHS):
        loss = model(torch.randn(8, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        state = {
            "epoch": epoch,
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        saved = fpfs.save(state, folder / f"epoch{epoch}.pt", durable=True)  # all ranks call it
        if dist.get_rank() == 0:
            print(saved)

    # Whoever wrote it, it is one file for anyone.
    found = torch.load(folder / f"epoch{EPOCHS - 1}.pt")
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(found["model"][name], tensor), name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
