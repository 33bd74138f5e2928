"""The examples of saves beside training, and over several nodes, on a mount."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import fpfs
from tests.support.fixtures import Example
from tests.support.target import Target

pytestmark = pytest.mark.clients


def test_a_run_goes_on(target: Target, directory: Path, run_example: Example) -> None:
    folder = directory / "run"
    printed = run_example("save_beside_training.py", folder)
    assert printed.startswith("steps 0 to 19, loss ")
    assert f"; {folder}/latest.pt: 12.0 MiB durable in " in printed
    target.remount()
    again = run_example("save_beside_training.py", folder)
    assert again.startswith("steps 20 to 39, loss ")
    assert os.listdir(folder) == ["latest.pt"]
    assert torch.load(folder / "latest.pt")["step"] == 39


@pytest.mark.parametrize("ranks", [1, 2])
def test_nodes(target: Target, directory: Path, run_example: Example, ranks: int) -> None:
    """By ranks of one node here, and then by another number of them."""
    printed = run_example("several_nodes.py", directory / "run", ranks=ranks)
    assert printed.startswith("steps 0 to 2, loss ")
    target.remount()
    again = run_example("several_nodes.py", directory / "run", ranks=3 - ranks)
    assert again.startswith("steps 3 to 5, loss ")
    found = fpfs.load(directory / "run")
    assert found["step"] == 5
    assert len(found["optimizer"]["state"]) == 8
