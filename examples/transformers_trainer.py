"""A transformers Trainer whose checkpoints fpfs saves, beside training.

    python examples/transformers_trainer.py /ckpt/run1
    torchrun --nproc-per-node 2 examples/transformers_trainer.py /ckpt/run1

goes on from the last checkpoint that is there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from fpfs.integrations.transformers import FpfsCallback

STEPS = 4


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random ones, the same in every run."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 128, (64, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        """How many."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One, whose next tokens are to be learnt."""
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    """Train for some steps, and save after each second one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where checkpoints go: a mount of fpfs, or any")
    folder: Path = parser.parse_args().folder

    folder.mkdir(parents=True, exist_ok=True)
    last = get_last_checkpoint(folder)
    begun = int(last.rpartition("-")[2]) if last else 0
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=begun + STEPS,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        save_steps=2,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=128, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Sequences())
    trainer.add_callback(FpfsCallback(trainer))
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        print(f"steps {begun + 1} to {trainer.state.global_step} by {arguments.world_size}")


if __name__ == "__main__":
    main()
