"""torch.distributed.checkpoint by fpfs: checkpoints whose parts do not fit each other."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from fpfs.dcp import Reader, Writer
from tests.support.failures.calls import tell_steps, told_steps

pytestmark = [
    # torch's own: of one process, of what it does itself.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

READERS = [Reader, dcp.FileSystemReader]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a checkpoint is saved."""
    return tmp_path / "checkpoint"


def save(folder: Path) -> None:
    """A small tensor, and a larger one behind it."""
    tensors = {"a": torch.arange(8.0), "b": torch.full((1000,), 7.0)}
    dcp.save(tensors, storage_writer=Writer(folder), no_dist=True)


def edit(folder: Path, change: Callable[[Metadata], None]) -> None:
    """Change what the metadata says."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def claim(metadata: Metadata, shape: tuple[int, ...]) -> None:
    """As if the tensor had another shape."""
    tensor: Any = metadata.state_dict_metadata["a"]
    tensor.size = torch.Size(shape)
    start = torch.Size([0] * len(shape))
    tensor.chunks = [ChunkStorageMetadata(start, tensor.size)]
    (index,) = (each for each in metadata.storage_data if each.fqn == "a")
    moved = dataclasses.replace(index, offset=start)
    metadata.storage_data[moved] = metadata.storage_data.pop(index)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("shape", [(200,), (9,), (2, 4)])
def test_metadata_that_claims_more_than_there_is(
    folder: Path, reader: type[dcp.FileSystemReader], shape: tuple[int, ...]
) -> None:
    save(folder)
    edit(folder, lambda metadata: claim(metadata, shape))
    target = torch.zeros(shape)
    with pytest.raises(CheckpointException) as refused:
        dcp.load({"a": target}, storage_reader=reader(folder), no_dist=True)
    if reader is Reader:
        (error,) = [each for each, _ in refused.value.failures.values()]
        assert isinstance(error, ValueError)
        start = (0,) * len(shape)
        assert f"a: {shape} from {start} on is to be read, the file has (8,)" in str(error)
    assert not target.any(), "nothing is changed"


@pytest.mark.parametrize("reader", READERS)
def test_an_archive_that_claims_more_than_it_has(
    folder: Path, reader: type[dcp.FileSystemReader]
) -> None:
    save(folder)
    edit(folder, lambda metadata: claim(metadata, (200,)))
    (file,) = folder.glob("*.distcp")
    shape = b"K\x08\x85"
    content = file.read_bytes()
    assert content.count(shape) == 1
    file.write_bytes(content.replace(shape, b"K\xc8\x85"))
    target, other = torch.zeros(200), torch.zeros(1000)
    told = "it has 32 bytes for a, which takes 800" if reader is Reader else "not resizable"
    with pytest.raises(CheckpointException, match=told):
        dcp.load({"b": other, "a": target}, storage_reader=reader(folder), no_dist=True)
    assert not target.any(), "it is not changed"
    assert reader is not Reader or not other.any(), "nor is what lies in the same file"


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """Elsewhere than on fpfs, also if they need not be durable; new directories' names, if so."""
    tell_steps(tmp_path / "log", monkeypatch)
    writer = Writer(tmp_path / "new" / "deeper", durable=durable)
    dcp.save({"a": torch.ones(8)}, storage_writer=writer, no_dist=True)
    steps = told_steps(tmp_path / "log", tmp_path)
    steps = [re.sub(r"__0_\w+", "", step) for step in steps]
    assert steps == [
        *["flush new", "flush ."] * durable,
        "flush new/deeper/.distcp",
        "flush new/deeper/.metadata",
        "name new/deeper/.metadata",
        *["flush new/deeper"] * durable,
    ]
