"""A Lightning Trainer that saves by fpfs, beside training.

    python examples/lightning_trainer.py /ckpt/run1

goes on from the last checkpoint that is there.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from fpfs.integrations.lightning import FpfsCheckpointIO

EPOCHS = 3


class Regression(lightning.LightningModule):
    """Two layers that learn a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def training_step(self, batch: tuple[torch.Tensor], _index: int) -> torch.Tensor:
        """Return the loss of a batch: rows of 64 numbers, to be summed."""
        (rows,) = batch
        return (self.layers(rows).squeeze(-1) - rows.sum(-1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, whose state is twice the model."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for some epochs, and save after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go: a mount of fpfs, or any")
    folder: Path = parser.parse_args().folder

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    last = folder / "last.ckpt"
    begun = torch.load(last, mmap=True, weights_only=True)["epoch"] + 1 if last.exists() else 0
    trainer = lightning.Trainer(
        max_epochs=begun + EPOCHS,
        accelerator="cpu",
        plugins=[FpfsCheckpointIO()],
        callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(1)
    rows = torch.utils.data.TensorDataset(torch.randn(256, 64))
    loader = torch.utils.data.DataLoader(rows, batch_size=32)
    trainer.fit(Regression(), loader, ckpt_path=last if begun else None)
    print(f"epochs {begun} to {trainer.current_epoch - 1}")


if __name__ == "__main__":
    main()
