"""A training loop that does not wait for its checkpoints.

    python examples/save_beside_training.py /ckpt/run1

goes on from the last checkpoint that is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import fpfs

STEPS = 20
SAVE_EVERY = 5
WIDTH = 512


def main() -> None:
    """Train, and save every few steps while training goes on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint goes: a mount, or any")
    folder: Path = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    latest = folder / "latest.pt"

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    first = 0
    if latest.exists():
        found = fpfs.load(latest)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"] + 1

    # What the optimizer changes is copied while the next forward and backward pass run; its next
    # step waits for that. A save that fails is in the log, and the checkpoint before stays.
    with fpfs.AsyncSaver(optimizers=optimizer, strict=False) as saver:
        for step in range(first, first + STEPS):
            rows = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = (model(rows) - rows).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % SAVE_EVERY == SAVE_EVERY - 1:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                saving = saver.save(state, latest)
    saved = saving.durable.result()  # raises what it has failed of
    print(f"steps {first} to {step}, loss {loss:.4f}; {saved}")


if __name__ == "__main__":
    main()
