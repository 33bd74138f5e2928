"""A transformers Trainer run on a tiny random GPT-2, in a process of its own.

Usage: trainer.py OUTPUT_FOLDER STEPS_MAX resume|fresh RESULT_FILE fpfs|itself

The model comes from a configuration and the data from a seed, so nothing is downloaded.
RESULT_FILE receives the final parameters, for comparison of a resumed run with a whole one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, the same in every run."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 128, (64, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build_trainer(folder: Path, steps_max: int) -> Trainer:
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=128, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps_max,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=11,
    )
    model = GPT2LMHeadModel(config)
    return Trainer(model=model, args=arguments, train_dataset=Tokens())


def main() -> None:
    folder, steps_max, mode, result, saver = sys.argv[1:]
    trainer = build_trainer(Path(folder), int(steps_max))
    if saver == "fpfs":
        from fpfs.integrations.transformers import FpfsCallback

        trainer.add_callback(FpfsCallback(trainer))
    trainer.train(resume_from_checkpoint=mode == "resume")
    torch.save(trainer.model.state_dict(), result)
    print("trained", trainer.state.global_step)


if __name__ == "__main__":
    main()
