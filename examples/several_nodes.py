"""Training on several nodes, each of which keeps a share of the checkpoint on its own drives.

    torchrun --nnodes 2 --nproc-per-node 8 ... examples/several_nodes.py /ckpt/run1

on each node, which has a mount of its own (on one node with `--standalone` instead of `--nnodes`),
goes on from the last checkpoint that is there, on as many ranks and nodes as there are now.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fpfs

STEPS = 3
WIDTH = 512


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="this node's directory: on a mount, or any")
    folder: Path = parser.parse_args().folder

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())

    first = 0
    there: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(there, (folder / "manifest.json").exists())
    if any(there):
        found = fpfs.load_shares(
            folder
        )  # each byte is read where it lies, and sent to who wants it
        layers.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"] + 1

    for step in range(first, first + STEPS):
        rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(rows) - rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = {"step": step, "model": layers.state_dict(), "optimizer": optimizer.state_dict()}
    # With copies=2 each share is on another node as well, and a node may be lost.
    saved = fpfs.save_shares(state, folder)
    if dist.get_rank() == 0:
        print(f"steps {first} to {step}, loss {loss:.4f}; {saved}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
