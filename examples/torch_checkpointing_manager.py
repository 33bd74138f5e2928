"""Meta's torch_checkpointing, whose checkpoints fpfs writes and reads.

    python examples/torch_checkpointing_manager.py /ckpt/run1

goes on from the last checkpoint that is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch_checkpointing import CheckpointManager

from fpfs.integrations.torch_checkpointing import FpfsStorageConfig

STEPS = 3


def main() -> None:
    """Train for some steps, and save after each, beside training."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go: a mount of fpfs, or any")
    folder: Path = parser.parse_args().folder

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=FpfsStorageConfig()))
    done = sorted(int(path.name.removeprefix("step")) for path in folder.glob("step*"))
    begun = done[-1] + 1 if done else 0
    if done:
        # A state that SGD has made before there is anything to load to.
        model(torch.zeros(1, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        into = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        loaded = manager.load(folder / f"step{done[-1]}", into=into)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])

    for step in range(begun, begun + STEPS):
        rows = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(rows).squeeze(-1) - rows.sum(-1)).square().mean()
        loss.backward()
        with manager.lock():  # waits while what is to be saved is copied
            optimizer.step()
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        manager.save(str(folder / f"step{step}"), state)
    manager.close()
    print(f"steps {begun} to {begun + STEPS - 1}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
