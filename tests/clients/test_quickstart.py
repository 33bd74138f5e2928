"""What `make run` runs, with a smaller model."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fpfs.core.mounts import is_below, mount_table
from tests.support.processes import REPOSITORY, run_program

pytestmark = pytest.mark.clients


def test_the_quickstart(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    arguments = ("--folder", folder, "--layers", "1")
    said = run_program(
        REPOSITORY / "examples" / "quickstart.py", *arguments, environment={"COLUMNS": "200"}
    )
    # All but the tables.
    mounted, trained, unmounted, again, loaded, same, ended = [
        line for line in said.splitlines() if line[:1].isalpha()
    ]
    assert mounted == again == f"mounted {folder}/ckpt over 4 device folders"
    assert unmounted == ended == "unmounted"
    assert re.fullmatch(
        r"trained a small GPT for 5 steps on the CPU, losses (\d\.\d\d(, |$)){5}", trained
    )
    assert loaded.startswith("torch.load after the remount: ")
    assert re.fullmatch(r"all \d+ tensors \([\d.]+ MiB\) came back bit for bit", same)
    for number in range(4):
        assert re.search(rf"device{number} │ [1-9][\d.]* MiB *│ [1-9][\d.]* MiB", said), said
    assert not [entry for entry in mount_table() if is_below(entry.mountpoint, str(tmp_path))]
    assert os.listdir(tmp_path) == []


def test_what_it_did_not_make_stays(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "step1.pt").write_bytes(b"weeks of work")
    with pytest.raises(AssertionError, match="is no empty folder: name another with --folder"):
        run_program(REPOSITORY / "examples" / "quickstart.py", "--folder", tmp_path)
    assert (tmp_path / "ckpt" / "step1.pt").read_bytes() == b"weeks of work"
