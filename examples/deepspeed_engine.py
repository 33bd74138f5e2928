"""A training loop with DeepSpeed, whose checkpoints fpfs writes beside training.

    torchrun --nproc-per-node 2 examples/deepspeed_engine.py /ckpt/run1

goes on from the last checkpoint that is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn

from fpfs.integrations.deepspeed import register

CONFIGURATION = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    """Train for some steps, and save after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go: a mount of fpfs, or any")
    parser.add_argument("--steps", type=int, default=3, help="how many; default: 3")
    given = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIGURATION
    )
    register(engine)
    if (given.folder / "latest").exists():
        engine.load_checkpoint(str(given.folder))

    begun = engine.global_steps
    for step in range(begun, begun + given.steps):
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = (engine(rows.to(engine.device)).squeeze(-1) - rows.sum(-1)).square().mean()
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(str(given.folder))
        if engine.global_rank == 0:
            print(f"step {engine.global_steps}, loss {loss:.4f}", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
