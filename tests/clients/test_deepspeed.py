"""DeepSpeed on a mount, by fpfs: the example; a run that is resumed, and one that is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fpfs.testing.mounted import REPOSITORY, Mount
from tests.support.processes import run
from tests.support.seeds import chosen_seed
from tests.support.states import same
from tests.support.target import Target

pytestmark = pytest.mark.clients

EXAMPLE = REPOSITORY / "examples" / "deepspeed_engine.py"
PROGRAM = REPOSITORY / "tests" / "clients" / "programs" / "deepspeed_example.py"
ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY), "DS_LOG_LEVEL": "error"}
# What torchrun tells the one process that it starts; its store takes any port that is free.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def command(folder: Path, *, ranks: int, steps: int = 3) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = [str(PROGRAM), str(EXAMPLE), str(folder), "--steps", str(steps)]
    return [sys.executable, *torchrun, *program]


def train(folder: Path, *, ranks: int, steps: int = 3) -> list[str]:
    return steps_of(run(*command(folder, ranks=ranks, steps=steps), environment=ENVIRONMENT))


def steps_of(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("step ")]


def test_the_example(target: Target, directory: Path) -> None:
    """The end of the process concludes the last save, also of who does not destroy the engine."""
    program = (sys.executable, PROGRAM, "lasts", EXAMPLE, directory)
    steps = steps_of(run(*program, environment=ENVIRONMENT | ALONE))
    assert [line.partition(",")[0] for line in steps] == ["step 1", "step 2", "step 3"]
    target.remount()
    assert (directory / "latest").read_text() == "global_step3"
    folder = directory / "global_step3"
    model = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    assert (model["global_steps"], len(model["module"])) == (3, 4)
    optimizer = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    assert torch.load(optimizer, weights_only=False)["optimizer_state_dict"]["zero_stage"] == 1


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_resume(target: Target, directory: Path, plain: Path, ranks: int) -> None:
    """Two runs of three steps end where one of six does."""
    first = train(directory, ranks=ranks)
    target.remount()
    resumed = train(directory, ranks=ranks)
    target.remount()
    unbroken = train(plain / "run", ranks=ranks, steps=6)
    assert first + resumed == unbroken
    name = "global_step6/mp_rank_00_model_states.pt"
    found = torch.load(directory / name, weights_only=False)["module"]
    assert same(found, torch.load(plain / "run" / name, weights_only=False)["module"])


@pytest.mark.long
def test_latest_names_a_whole_checkpoint_whoever_is_killed(killed: Mount) -> None:
    """Both ranks and the launcher, at random moments; the next run goes on."""
    directory = killed.root / "run"
    chooser = random.Random(chosen_seed())
    last = 0
    for _ in range(5):
        with subprocess.Popen(
            command(directory, ranks=2, steps=1_000_000),
            env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as trainer:
            assert trainer.stdout is not None
            for _ in range(chooser.randrange(15, 40)):
                while not (line := trainer.stdout.readline()).startswith("step "):
                    assert line
            os.killpg(trainer.pid, signal.SIGKILL)
        found = (directory / "latest").read_text()
        step = int(found.removeprefix("global_step"))
        assert step > last
        last = step
        model = torch.load(directory / found / "mp_rank_00_model_states.pt", weights_only=False)
        assert model["global_steps"] == step
        for rank in range(2):
            optimizer = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            state = torch.load(directory / found / optimizer, weights_only=False)
            (part,) = state["optimizer_state_dict"]["base_optimizer_state"]["state"].values()
            assert int(part["step"]) == step
