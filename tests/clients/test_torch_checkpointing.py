"""Meta's torch_checkpointing on a mount, by fpfs's storage and by its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig

from fpfs.integrations.torch_checkpointing import FpfsStorageConfig
from fpfs.testing.mounted import REPOSITORY, Mount, mounted
from tests.support.fixtures import Example
from tests.support.processes import run
from tests.support.states import large_state, same
from tests.support.target import Target

pytestmark = pytest.mark.clients

EXAMPLE = REPOSITORY / "examples" / "torch_checkpointing_manager.py"


def train(folder: Path, *words: str) -> str:
    program = (sys.executable, *(words or (str(EXAMPLE),)))
    return run(*program, folder, environment={"PYTHONPATH": str(REPOSITORY)})


def test_the_example(target: Target, directory: Path, run_example: Example) -> None:
    printed = run_example("torch_checkpointing_manager.py", directory)
    assert re.fullmatch(r"steps 0 to 2, loss \d+\.\d{4}\n", printed)
    target.remount()
    assert sorted(path.name for path in directory.iterdir()) == ["step0", "step1", "step2"]
    state = torch.load(directory / "step2" / "optimizer_0.pt")
    assert state["param_groups"][0]["momentum"] == 0.9


@pytest.mark.long
def test_resume(target: Target, directory: Path, plain: Path) -> None:
    """Two runs of three steps end where one of six does: the second goes on from the first."""
    train(directory)
    target.remount()
    resumed = train(directory)
    code = f"import runpy; main = runpy.run_path({str(EXAMPLE)!r})['main']"
    code += "; main.__globals__['STEPS'] = 6; main()"
    unbroken = train(plain / "run", "-c", code)
    assert unbroken.removeprefix("steps 0 to 5") == resumed.removeprefix("steps 3 to 5")
    for name in ("model_0.pt", "optimizer_0.pt"):
        found, expected = (
            torch.load(folder / "step5" / name) for folder in (directory, plain / "run")
        )
        assert same(found, expected)


@pytest.fixture
def own() -> Iterator[Mount]:
    """A mount whose power is lost."""
    with mounted() as mount:
        mount.allow_log(r"not committed when the last mount ended|never finished")
        yield mount


def test_what_is_saved_survives_power_loss(own: Mount) -> None:
    """All that the save has returned for: files, directories and their names."""
    folder = own.root / "runs" / "one" / "step1"
    manager = CheckpointManager(
        CheckpointManager.Config(
            save=SyncCheckpointSaverConfig(), storage_config=FpfsStorageConfig()
        )
    )
    manager.save(str(folder), {"model": large_state(seed=3), "step": 1})
    manager.close()
    own.kill(own.keeper_pid, own.server_pid)
    own.tear_down()
    own.remove_arena()
    own.mount()
    assert same(torch.load(folder / "model_0.pt"), large_state(seed=3))
    assert torch.load(folder / "step_0.pt") == 1
    assert [path.name for path in folder.parent.iterdir()] == ["step1"]
