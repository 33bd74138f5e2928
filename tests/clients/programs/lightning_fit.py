"""A Lightning run with ModelCheckpoint, in a process of its own.

Usage: lightning_fit.py CHECKPOINT_FOLDER EPOCHS [RESUME_FROM]

Prints the SHA-256 of the final parameters.
"""

from __future__ import annotations

import hashlib
import logging
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Regression(lightning.LightningModule):
    """Two layers that learn a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 257), torch.nn.Linear(257, 1))

    def training_step(self, batch: tuple[torch.Tensor], batch_index: int) -> torch.Tensor:
        (rows,) = batch
        loss = (self.layers(rows).squeeze(-1) - rows.sum(-1)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(folder: str, *, epochs: int, resume_from: str | None) -> Regression:
    torch.manual_seed(1)
    rows = torch.randn(64, 32)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=16)
    keep = ModelCheckpoint(
        dirpath=folder, monitor="loss", save_top_k=2, save_last=True, every_n_epochs=1
    )
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, loader, ckpt_path=resume_from, weights_only=False)
    return model


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    resume_from = sys.argv[3] if len(sys.argv) > 3 else None
    model = fit(sys.argv[1], epochs=int(sys.argv[2]), resume_from=resume_from)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
