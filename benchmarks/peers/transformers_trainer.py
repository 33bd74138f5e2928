"""A transformers Trainer whose model and optimizer are 1 GiB, and how long a checkpoint holds it.

Concurrency: one run at a time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.worker import Timing

WIDTH = 1024
FIRST, SECOND, STEPS = 2, 4, 5
"""The second checkpoint is timed: the first one has found memory for it."""


class _Layers(nn.Module):
    """A layer and AdamW's states of it are 12 MiB."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(inputs).square().mean()}


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.full((WIDTH,), float(index))}


class _First(TrainerCallback):
    """Called before what saves: when a step has ended."""

    def __init__(self) -> None:
        self.ended_s = 0.0
        self.saving: Any = None

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> Any:
        control.should_save = state.global_step in {FIRST, SECOND}
        if state.global_step == SECOND:
            self.ended_s = time.monotonic()
        elif self.saving is not None:
            # As where steps between checkpoints take longer than storing one.
            self.saving.wait()
        return control


class _Last(TrainerCallback):
    """Called behind what saves: when the next step begins."""

    def __init__(self) -> None:
        self.begun_s = 0.0

    def on_step_begin(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        if state.global_step == SECOND:
            self.begun_s = time.monotonic()


class Run:
    """A Trainer, for run after run."""

    def __init__(self, *, total_bytes: int, by_fpfs: bool) -> None:
        self._model = _Layers(total_bytes // (3 * 4 * WIDTH**2))
        self._by_fpfs = by_fpfs

    def train(self, folder: str) -> Timing:
        """Train, with checkpoints in a folder; when one held training."""
        from fpfs.integrations.transformers import FpfsCallback

        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=1,
            save_strategy="steps",
            save_steps=FIRST,
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        first, last = _First(), _Last()
        trainer = Trainer(model=self._model, args=arguments, train_dataset=_Rows())
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(first)
        if self._by_fpfs:
            first.saving = FpfsCallback(trainer)
            trainer.add_callback(first.saving)
        trainer.add_callback(last)
        trainer.train()
        return Timing(started_s=first.ended_s, ended_s=last.begun_s)
