"""torch.distributed.checkpoint by fpfs: checkpoints whose parts do not fit each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fpfs.dcp import Reader, Writer

pytestmark = [
    # torch's own: of one process, of what it does itself.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a checkpoint is saved."""
    return tmp_path / "checkpoint"


def save(folder: Path) -> None:
    """A small tensor."""
    dcp.save({"a": torch.arange(8.0)}, storage_writer=Writer(folder), no_dist=True)


def test_a_file_that_is_shorter_than_a_rank_has_written(folder: Path) -> None:
    """As a rank sees it to whose directory the other one's bytes have not come."""
    save(folder)
    before = sorted(os.listdir(folder))

    class Cutting(Writer):
        def write_data(self, *arguments: Any) -> Any:
            done = super().write_data(*arguments)
            (name,) = set(os.listdir(folder)) - set(before)
            os.truncate(folder / name, (folder / name).stat().st_size - 1)
            return done

    with pytest.raises(CheckpointException, match="which a rank has written, is not there"):
        dcp.save({"a": torch.ones(8)}, storage_writer=Cutting(folder), no_dist=True)
    target = torch.zeros(8)
    dcp.load({"a": target}, storage_reader=Reader(folder), no_dist=True)
    assert target.tolist() == list(range(8))


@pytest.mark.parametrize("durable", [False, True])
def test_bytes_are_flushed_before_metadata_names_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """Elsewhere than on fpfs, also if they need not be durable."""
    done = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(fd: int) -> None:
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{fd}')).suffix}")
        fsync(fd)

    def note_rename(source: str, target: str, **options: Any) -> None:
        done.append(f"name {target}")
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    writer = Writer(folder, durable=durable)
    dcp.save({"a": torch.ones(8)}, storage_writer=writer, no_dist=True)
    last = ["flush "] * durable
    assert done == ["flush .distcp", "flush .metadata", "name .metadata", *last]
