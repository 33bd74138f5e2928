"""torch_checkpointing by fpfs: both ways with its own storage, by ranks, and what fails."""

from __future__ import annotations

import errno
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.serialization import config
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import (
    JsonSerialization,
    LayoutInfo,
    RawSerialization,
    SafetensorsSerialization,
)
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointLoaderConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.base_storage import ReadArgs
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from fpfs.client import writing
from fpfs.integrations import torch_checkpointing
from fpfs.integrations.torch_checkpointing import FpfsStorageConfig
from tests.support.failures.calls import tell_steps, told_steps
from tests.support.ranks import Worlds
from tests.support.states import large_state, same, some_states

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

STORAGES: dict[str, Any] = {
    "fpfs": FpfsStorageConfig(),
    "fpfs, early": FpfsStorageConfig(durable=False, threads=3),
    "own": LocalFileSystemStorageConfig(use_direct_io=False),
}


def manager(storage: str, **config: Any) -> CheckpointManager:
    """One that saves when it is told to, in this process."""
    config = {"save": SyncCheckpointSaverConfig(), **config}
    return CheckpointManager(CheckpointManager.Config(storage_config=STORAGES[storage], **config))


def save(folder: Path, payload: dict[str, Any], storage: str, **config: Any) -> None:
    saving = manager(storage, **config)
    saving.save(str(folder), payload)
    saving.close()


def payload() -> dict[str, Any]:
    return {"model": large_state(seed=1), "step": 7, "small": {"w": torch.ones(3, 4).t()}}


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize(
    ("writer", "reader"), [("fpfs", "own"), ("own", "fpfs"), ("fpfs, early", "fpfs")]
)
def test_both_ways(tmp_path: Path, writer: str, reader: str, use_mmap: bool) -> None:
    folder = tmp_path / "step7"
    save(folder, payload(), writer)
    assert os.listdir(tmp_path) == ["step7"]
    assert sorted(os.listdir(folder)) == ["model_0.pt", "small_0.pt", "step_0.pt"]
    into = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in payload()["model"].items()},
        "step": 0,
        "small": {"w": torch.zeros(3, 4).t()},
    }
    loading = manager(reader, load=CheckpointLoaderConfig(use_mmap=use_mmap))
    assert same(loading.load(folder, into=into), payload())
    assert same(into["model"], payload()["model"]), "where they are"
    loading.close()


@pytest.mark.parametrize("name", ["odd", "empty", "tensor", "text"])
def test_whatever_torch_saves(tmp_path: Path, name: str) -> None:
    state = some_states()[name]
    save(tmp_path / "c", {"item": state}, "fpfs")
    assert same(torch.load(tmp_path / "c" / "item_0.pt", weights_only=False), state)


def test_all_formats(tmp_path: Path) -> None:
    layouts = {
        "weights": LayoutInfo("model.safetensors", SafetensorsSerialization()),
        "config": LayoutInfo("deep/er/config.json", JsonSerialization()),
        "raw": LayoutInfo("raw.bin", RawSerialization()),
    }
    items = {key: ItemSpec(layout=layout) for key, layout in layouts.items()}
    saved = {"weights": large_state(seed=2), "config": {"a": [1, 2]}, "raw": os.urandom(100_000)}
    for storage in ("fpfs", "own"):
        save(tmp_path / storage, saved, storage, items=items)
    for path in ("model.safetensors", "deep/er/config.json", "raw.bin"):
        assert (tmp_path / "fpfs" / path).read_bytes() == (tmp_path / "own" / path).read_bytes()
    loading = manager("fpfs", items=items)
    found = dict(loading.load(tmp_path / "own", into=dict.fromkeys(items)))
    found["weights"] = dict(sorted(found["weights"].items()))
    assert same(found, saved)
    loading.close()


def test_beside_training(tmp_path: Path) -> None:
    """In its own process, to which the storage goes."""
    # Its process loads torch, which takes longer than its 30 s where others are busy.
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=300)
    saving = manager("fpfs", save=AsyncCheckpointSaverConfig(process_config=process))
    for step in range(2):
        state = large_state(seed=step)
        future = saving.save(str(tmp_path / f"step{step}"), {"model": state})
        assert future is not None
        with saving.lock():
            for tensor in state.values():
                tensor.zero_()
        future.result(timeout=300)
        found = torch.load(tmp_path / f"step{step}" / "model_0.pt")
        assert same(found, large_state(seed=step))
    saving.close()
    assert sorted(os.listdir(tmp_path)) == ["step0", "step1"]


# --- what fails ---


def test_what_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save(tmp_path / "c", {"good": torch.ones(3), "bad": {"f": lambda: None}}, "fpfs")
    assert not (tmp_path / "c").exists()
    assert "bad_0.pt" not in {path.name for path in tmp_path.rglob("*")}


def test_a_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "former", payload(), "fpfs")

    def write_nothing(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "write_pieces", write_nothing)
    with pytest.raises(OSError, match=r"No space left.*_0\.pt"):
        save(tmp_path / "next", payload(), "fpfs")
    assert not (tmp_path / "next").exists()
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and "former" not in str(path)
    ]


def test_a_checkpoint_that_is_there_stays(tmp_path: Path) -> None:
    save(tmp_path / "c", {"step": 1}, "fpfs")
    with pytest.raises(FileExistsError, match="Refusing to rename"):
        save(tmp_path / "c", {"step": 2}, "fpfs")
    assert torch.load(tmp_path / "c" / "step_0.pt") == 1


def test_a_state_that_changes_its_shape_meanwhile(tmp_path: Path) -> None:
    """What torch.save is given is not what the storage was told of."""
    storage = FpfsStorageConfig().create_storage()
    with (
        pytest.raises(RuntimeError, match="was the state changed while it was saved"),
        storage.get_write_stream(tmp_path / "f", torch.ones(3)) as stream,
    ):
        torch.save(torch.ones(300), stream)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("threads", [0, -1, 1.5, "two"])
def test_threads_that_are_none(threads: Any) -> None:
    with pytest.raises(ValueError, match="give a number from 1, or None"):
        FpfsStorageConfig(threads=threads)


def test_settings_of_torch_hold(tmp_path: Path) -> None:
    """They are the calling thread's."""
    storage, tensor = FpfsStorageConfig().create_storage(), torch.ones(3)
    with (
        config.patch("save.storage_alignment", 4096),
        storage.get_write_stream(tmp_path / "f", tensor) as stream,
    ):
        torch.save(tensor, stream)
    assert (tmp_path / "f").stat().st_size > 4096
    assert torch.equal(torch.load(tmp_path / "f"), tensor)


def test_what_is_no_content(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="durable is 'no': give True or False"):
        FpfsStorageConfig(durable="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int"):
        FpfsStorageConfig().create_storage().write(tmp_path / "f", 5)
    assert os.listdir(tmp_path) == []


def test_a_stream_that_is_left_by_an_error(tmp_path: Path) -> None:
    """The error is the caller's, and afterwards torch.save saves bytes again."""
    storage = FpfsStorageConfig().create_storage()
    with (
        pytest.raises(KeyError, match="own"),
        storage.get_write_stream(tmp_path / "f", torch.ones(3)) as stream,
    ):
        torch.save(torch.ones(3), stream)
        raise KeyError("own")
    assert os.listdir(tmp_path) == []
    buffer = io.BytesIO()
    torch.save(torch.ones(3), buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), torch.ones(3))


# --- the storage ---


@pytest.mark.parametrize("source", ["file", "directory"])
@pytest.mark.parametrize("there", ["nothing", "file", "empty", "populated"])
def test_rename_is_as_it_must_be(tmp_path: Path, source: str, there: str) -> None:
    storage = FpfsStorageConfig().create_storage()
    src, dst = tmp_path / "src", tmp_path / "dst"
    if source == "file":
        storage.write(src, b"new")
    else:
        storage.mkdir(src)
        storage.write(src / "f", b"new")
    if there == "file":
        storage.write(dst, b"old")
    elif there != "nothing":
        storage.mkdir(dst)
        if there == "populated":
            storage.write(dst / "f", b"old")
    commits = {"file": {"nothing", "file"}, "directory": {"nothing", "empty"}}[source]
    if there in commits:
        storage.rename(src, dst, is_directory=source == "directory")
        assert not src.exists()
        assert storage.read(dst if source == "file" else dst / "f") == b"new"
    else:
        with pytest.raises(OSError, match="Refusing to rename"):
            storage.rename(src, dst, is_directory=source == "directory")
        assert src.exists()


def test_ranges_of_a_file(tmp_path: Path) -> None:
    storage = FpfsStorageConfig().create_storage()
    content = os.urandom(9_000_001)
    storage.write(tmp_path / "f", memoryview(content))
    assert (storage.getsize(tmp_path / "f"), storage.ls(tmp_path)) == (len(content), ["f"])
    with storage.stream_read(tmp_path / "f", ReadArgs(pre_read_full_file=False)) as stream:
        for at, count in ((0, 10), (4_000_000, 5_000_001), (17, 4_500_000), (9_000_000, 1)):
            assert stream.seek(at) == at
            buffer = bytearray(count)
            assert stream.readinto(buffer) == count
            assert buffer == content[at : at + count]
        assert stream.readinto(bytearray(5)) == 0
    with pytest.raises(FileNotFoundError):
        storage.read(tmp_path / "none")


def test_names_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of new directories, and of the one that has the checkpoint; not where nobody asks for it."""
    log = tmp_path / "log"
    tell_steps(log, monkeypatch)
    save(tmp_path / "new" / "step1", {"step": 1}, "fpfs")
    steps = told_steps(log, tmp_path)
    assert steps[:2] == ["flush new", "flush ."]
    assert steps[-2:] == ["name new/step1", "flush new"]
    log.unlink()
    save(tmp_path / "newer" / "step1", {"step": 1}, "fpfs, early")
    assert not {"flush newer", "flush ."} & set(told_steps(log, tmp_path))


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_written_bit_by_bit_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """As the files of consolidated checkpoints are, which get their names then."""
    flushed: list[int] = []
    fsync = os.fsync

    def count(fd: int) -> None:
        fsync(fd)
        flushed.append(os.fstat(fd).st_size)

    monkeypatch.setattr(torch_checkpointing.os, "fsync", count)
    storage = torch_checkpointing.FpfsStorageConfig(durable=durable).create_storage()
    with storage.stream_write(tmp_path / "file") as stream:
        stream.write(b"one")
        stream.write(b" and two")
    assert flushed == [11] * durable
    assert (tmp_path / "file").read_bytes() == b"one and two"


# --- ranks ---


def own_payload(rank: int) -> dict[str, Any]:
    return {"model": large_state(seed=rank), "rank": rank}


def save_and_load_by_ranks(folder: str, writer: str, reader: str) -> None:
    """As a rank. (What lies between worlds, torch_checkpointing sends by CUDA alone.)"""
    rank = dist.get_rank()
    save(Path(folder), own_payload(rank), writer)
    dist.barrier()
    assert not Path(folder).with_name("tmp_step1").exists()
    into = {"model": {name: torch.zeros_like(t) for name, t in large_state(seed=0).items()}}
    loading = manager(reader)
    assert same(dict(loading.load(folder, into={**into, "rank": 0})), own_payload(rank))
    loading.close()


@pytest.mark.parametrize(("writer", "reader"), [("fpfs", "own"), ("own", "fpfs")])
def test_ranks(forks: Worlds, tmp_path: Path, writer: str, reader: str) -> None:
    folder = tmp_path / "step1"
    forks.start(2, save_and_load_by_ranks, folder, writer, reader).values()
    names = ["model_0.pt", "model_1.pt", "rank_0.pt", "rank_1.pt"]
    assert sorted(os.listdir(folder)) == names


@pytest.mark.parametrize(("writer", "reader"), [("fpfs", "own"), ("own", "fpfs")])
def test_a_part_of_a_tensor(tmp_path: Path, writer: str, reader: str) -> None:
    """Resharding reads ranges of files."""
    items = {"model": ItemSpec(resharder=DefaultResharder())}
    save(tmp_path / "c", {"model": large_state(seed=1)}, writer, items=items)
    into = {name: torch.zeros_like(tensor) for name, tensor in large_state(seed=1).items()}
    loading = manager(reader, items=items)
    loading.load(tmp_path / "c", into={"model": into})
    assert same(into, large_state(seed=1))
    loading.close()
