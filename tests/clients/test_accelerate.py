"""Accelerate's save_state and load_state on a mount, by fpfs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fpfs.testing.mounted import REPOSITORY
from tests.support.fixtures import Example
from tests.support.processes import run
from tests.support.states import same
from tests.support.target import Target

pytestmark = pytest.mark.clients

EXAMPLE = REPOSITORY / "examples" / "accelerate_state.py"
ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY)}


def train(folder: Path, *, ranks: int = 1) -> str:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    words = torchrun if ranks > 1 else ()
    return run(sys.executable, *words, EXAMPLE, folder, environment=ENVIRONMENT)


def test_the_example(target: Target, directory: Path, run_example: Example) -> None:
    printed = run_example("accelerate_state.py", directory)
    assert printed.startswith("steps 0 to 2 by 1, loss ")
    target.remount()
    folder = directory / "step2"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}
    weights = load_file(folder / "model.safetensors")
    optimizer = torch.load(folder / "optimizer.bin")
    assert len(weights) == len(optimizer["state"]) == 4


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume(target: Target, directory: Path, plain: Path, ranks: int) -> None:
    """Two runs of three steps end where one of six does."""
    train(directory, ranks=ranks)
    target.remount()
    resumed = train(directory, ranks=ranks)
    code = f"import runpy; main = runpy.run_path({str(EXAMPLE)!r})['main']"
    code += "; main.__globals__['STEPS'] = 6; main()"
    unbroken = run(sys.executable, "-c", code, plain / "run", environment=ENVIRONMENT)
    assert f"by {ranks}, " in resumed
    assert unbroken.partition("loss")[2] == resumed.partition("loss")[2]
    found = load_file(directory / "step5" / "model.safetensors")
    expected = load_file(plain / "run" / "step5" / "model.safetensors")
    if ranks == 1:
        assert same(found, expected)
    else:  # means of gradients of two
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name])
