"""A training loop with Accelerate, whose models' weights fpfs writes.

    python examples/accelerate_state.py /ckpt/run1
    torchrun --nproc-per-node 2 examples/accelerate_state.py /ckpt/run1

goes on from the last checkpoint that is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from fpfs.integrations import accelerate

STEPS = 3


def main() -> None:
    """Train for some steps, and save after them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go: a mount of fpfs, or any")
    folder: Path = parser.parse_args().folder

    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accelerator = Accelerator(cpu=True)
    accelerate.register(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)

    done = sorted(int(path.name.removeprefix("step")) for path in folder.glob("step*"))
    begun = done[-1] + 1 if done else 0
    if done:
        accelerator.load_state(str(folder / f"step{done[-1]}"))
    for step in range(begun, begun + STEPS):
        rows = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(rows).squeeze(-1) - rows.sum(-1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / f"step{begun + STEPS - 1}"))
    ranks = accelerator.num_processes
    accelerator.print(f"steps {begun} to {begun + STEPS - 1} by {ranks}, loss {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
