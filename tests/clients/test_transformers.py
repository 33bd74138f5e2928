"""A transformers Trainer on a mount: save_steps, rotation, resume_from_checkpoint; also by fpfs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fpfs.testing.mounted import REPOSITORY, Mount
from tests.support.fixtures import Example
from tests.support.processes import run_program
from tests.support.seeds import chosen_seed
from tests.support.target import Target

pytestmark = pytest.mark.clients

PROGRAM = Path(__file__).parent / "programs" / "trainer.py"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def train(folder: Path, steps_max: int, mode: str, result: Path, saver: str) -> str:
    arguments = (folder, str(steps_max), mode, result, saver)
    return run_program(PROGRAM, *arguments, environment=OFFLINE)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.long
@pytest.mark.parametrize("saver", ["itself", "fpfs"])
def test_save_rotate_and_resume(target: Target, directory: Path, plain: Path, saver: str) -> None:
    """A run stopped after six steps and resumed to ten ends where an unbroken run ends."""
    output = train(
        directory / "run", steps_max=6, mode="fresh", result=plain / "six.pt", saver=saver
    )
    assert "trained 6" in output
    assert checkpoints(directory / "run") == ["checkpoint-4", "checkpoint-6"]
    target.remount()
    output = train(
        directory / "run", steps_max=10, mode="resume", result=plain / "ten.pt", saver=saver
    )
    assert "trained 10" in output
    assert checkpoints(directory / "run") == ["checkpoint-10", "checkpoint-8"]
    train(plain / "run", 10, "fresh", plain / "unbroken.pt", "itself")
    resumed, unbroken = torch.load(plain / "ten.pt"), torch.load(plain / "unbroken.pt")
    assert resumed.keys() == unbroken.keys()
    for name, tensor in unbroken.items():
        assert torch.equal(resumed[name], tensor), name


ENVIRONMENT = {**OFFLINE, "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_the_example(target: Target, directory: Path, run_example: Example, ranks: int) -> None:
    """The second run goes on from what the first has saved."""
    for steps in ("1 to 4", "5 to 8") if ranks else ("1 to 4",):
        printed = run_example("transformers_trainer.py", directory, ranks=ranks)
        assert printed.splitlines()[-1] == f"steps {steps} by {max(ranks, 1)}"
        target.remount()
    kept = {0: ["checkpoint-2", "checkpoint-4"], 2: ["checkpoint-6", "checkpoint-8"]}[ranks]
    assert checkpoints(directory) == kept == sorted(path.name for path in directory.iterdir())
    for name in kept:
        assert len(load_file(directory / name / "model.safetensors")) == 28
        states = list((directory / name).glob("rng_state*.pth"))
        assert len(states) == max(ranks, 1)


@pytest.mark.long
def test_a_trainer_that_is_killed_leaves_whole_checkpoints(killed: Mount, plain: Path) -> None:
    """At random moments; the next one goes on from the last."""
    directory = killed.root / "run"
    chooser = random.Random(chosen_seed())
    arguments = [directory, 1_000_000, "resume", plain / "never.pt", "fpfs"]
    seen = 0
    for attempt in range(5):
        arguments[2] = "resume" if attempt else "fresh"
        command = [sys.executable, "-W", "ignore", PROGRAM, *arguments]
        with subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as trainer:
            assert trainer.stdout is not None
            for _ in range(chooser.randrange(40, 60)):
                assert trainer.stdout.readline()
            trainer.kill()
        found = checkpoints(directory)
        assert found
        for name in found:
            state = torch.load(directory / name / "optimizer.pt")
            assert len(state["state"]) == 28
            assert len(load_file(directory / name / "model.safetensors")) == 28
            (step,) = {int(each["step"]) for each in state["state"].values()}
            assert name == f"checkpoint-{step}"
            seen = max(seen, step)
    assert seen > 100
