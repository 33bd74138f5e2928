"""A transformers Trainer on the mount: save_steps, rotation and resume_from_checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.processes import run_program
from tests.support.target import Target

pytestmark = [pytest.mark.clients, pytest.mark.long]

PROGRAM = Path(__file__).parent / "programs" / "trainer.py"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def train(folder: Path, *, steps_max: int, mode: str, result: Path) -> str:
    arguments = (folder, str(steps_max), mode, result)
    return run_program(PROGRAM, *arguments, environment=OFFLINE, timeout_s=180)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_save_rotate_and_resume(target: Target, directory: Path, plain: Path) -> None:
    """A run stopped after six steps and resumed to ten ends where an unbroken run ends."""
    output = train(directory / "run", steps_max=6, mode="fresh", result=plain / "six.pt")
    assert "trained 6" in output
    assert checkpoints(directory / "run") == ["checkpoint-4", "checkpoint-6"]
    target.remount()
    output = train(directory / "run", steps_max=10, mode="resume", result=plain / "ten.pt")
    assert "trained 10" in output
    assert checkpoints(directory / "run") == ["checkpoint-10", "checkpoint-8"]
    train(plain / "run", steps_max=10, mode="fresh", result=plain / "unbroken.pt")
    resumed, unbroken = torch.load(plain / "ten.pt"), torch.load(plain / "unbroken.pt")
    assert resumed.keys() == unbroken.keys()
    for name, tensor in unbroken.items():
        assert torch.equal(resumed[name], tensor), name
