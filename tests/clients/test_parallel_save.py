"""The example whose ranks save together, under torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY, run

pytestmark = pytest.mark.clients


def test_the_example(directory: Path) -> None:
    printed = run(
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        REPOSITORY / "examples" / "parallel_save.py",
        directory,
        environment={"PYTHONPATH": str(REPOSITORY)},
    )
    lines = printed.splitlines()
    assert len(lines) == 3
    for epoch, line in enumerate(lines):
        assert line.startswith(f"{directory}/epoch{epoch}.pt: 48.1 MiB durable in ")
        assert " by 2 ranks, " in line
    assert sorted(os.listdir(directory)) == ["epoch0.pt", "epoch1.pt", "epoch2.pt"]
