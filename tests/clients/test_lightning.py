"""Lightning's ModelCheckpoint on the mount: best and last checkpoints, and resuming."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run_program
from tests.support.target import Target

pytestmark = [pytest.mark.clients, pytest.mark.long]

PROGRAM = Path(__file__).parent / "programs" / "lightning_fit.py"


def test_checkpoint_and_resume(target: Target, directory: Path, plain: Path) -> None:
    """Three epochs and, resumed, two more end where five on a plain directory end."""
    run_program(PROGRAM, directory, "3")
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]
    target.remount()
    resumed = run_program(PROGRAM, directory, "5", directory / "last.ckpt")
    unbroken = run_program(PROGRAM, plain, "5")
    assert resumed == unbroken
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["epoch=3-step=16.ckpt", "epoch=4-step=20.ckpt", "last.ckpt"]
