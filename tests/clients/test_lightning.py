"""Lightning's ModelCheckpoint on the mount: best and last checkpoints, and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.fixtures import Example
from tests.support.processes import run_program
from tests.support.target import Target

pytestmark = pytest.mark.clients

PROGRAM = Path(__file__).parent / "programs" / "lightning_fit.py"


@pytest.mark.long
@pytest.mark.parametrize(
    "saves", ["by itself", "by fpfs", "by fpfs, pytorch_lightning", "by fpfs, spawned"]
)
def test_checkpoint_and_resume(target: Target, directory: Path, plain: Path, saves: str) -> None:
    """Three epochs and, resumed, two more end where five on a plain directory end."""
    run_program(PROGRAM, saves, directory, "3")
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]
    target.remount()
    resumed = run_program(PROGRAM, saves, directory, "5", directory / "last.ckpt")
    unbroken = run_program(PROGRAM, saves.replace("fpfs", "itself"), plain, "5")
    assert resumed == unbroken
    names = sorted(path.name for path in directory.iterdir())
    # A spawned Trainer finds other epochs best, of its own saves, too.
    best = (2, 3) if "spawned" in saves else (3, 4)
    assert names == [*(f"epoch={n}-step={4 * n + 4}.ckpt" for n in best), "last.ckpt"]


def test_the_example(directory: Path, run_example: Example) -> None:
    """The second run goes on from what the first has saved."""
    for epochs in ("0 to 2", "3 to 5"):
        assert run_example("lightning_trainer.py", directory) == f"epochs {epochs}\n"
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["epoch=5-step=48.ckpt", "last.ckpt"]
    assert torch.load(directory / "last.ckpt", weights_only=True)["epoch"] == 5
