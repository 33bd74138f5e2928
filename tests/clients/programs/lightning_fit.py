"""A Lightning run with ModelCheckpoint, in a process of its own.

Usage: lightning_fit.py SAVES CHECKPOINT_FOLDER EPOCHS [RESUME_FROM]; SAVES says by whom, of which
of the two packages the Trainer is, and whether it trains in processes of its own.

Prints the SHA-256 of the final parameters.
"""

from __future__ import annotations

import hashlib
import logging
import sys

import torch

if "pytorch_lightning" in sys.argv[1]:
    import pytorch_lightning as pl
else:
    import lightning.pytorch as pl  # type: ignore[no-redef]

from fpfs.integrations.lightning import FpfsCheckpointIO


class Regression(pl.LightningModule):
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


def fit(saves: str, folder: str, *, epochs: int, resume_from: str | None) -> Regression:
    torch.manual_seed(1)
    rows = torch.randn(64, 32)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=16)
    keep = pl.callbacks.ModelCheckpoint(
        dirpath=folder, monitor="loss", save_top_k=2, save_last=True, every_n_epochs=1
    )
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        plugins=[FpfsCheckpointIO()] if "fpfs" in saves else None,
        strategy="ddp_spawn" if "spawned" in saves else "auto",
        devices=1,
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, loader, ckpt_path=resume_from, weights_only=False)
    return model


def main() -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    saves, folder, epochs, *resume_from = sys.argv[1:]
    model = fit(saves, folder, epochs=int(epochs), resume_from=next(iter(resume_from), None))
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
