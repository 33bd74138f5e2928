"""Accelerate's save_state by fpfs: its own files, which its load_state reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from fpfs.integrations import accelerate
from tests.support.failures.calls import full
from tests.support.states import same


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(50, 50), nn.Linear(50, 50)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.randn(7, 3).t())


def prepared(*, seed: int) -> tuple[Accelerator, list[nn.Module]]:
    """Two models with their optimizers."""
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True)
    models = [Tied(), nn.Linear(300, 200)]
    prepared = []
    for model in models:
        prepared.append(accelerator.prepare(model))
        accelerator.prepare(torch.optim.AdamW(model.parameters()))
    return accelerator, prepared


def contents(folder: Path) -> dict[str, bytes]:
    # Random numbers' states are another process's.
    return {path.name: path.read_bytes() for path in folder.iterdir() if "random" not in path.name}


def test_the_files_are_accelerates_own(tmp_path: Path) -> None:
    accelerator, _ = prepared(seed=1)
    accelerator.save_state(str(tmp_path / "own"))
    handle = accelerate.register(accelerator)
    accelerator.save_state(str(tmp_path / "fpfs"))
    assert contents(tmp_path / "fpfs") == contents(tmp_path / "own")
    assert {"model.safetensors", "model_1.safetensors"} < contents(tmp_path / "fpfs").keys()
    handle.remove()


def test_accelerate_loads_it(tmp_path: Path) -> None:
    accelerator, models = prepared(seed=2)
    accelerate.register(accelerator, durable=True)
    accelerator.save_state(str(tmp_path / "c"))
    other, loaded = prepared(seed=3)
    other.load_state(str(tmp_path / "c"))
    for model, expected in zip(loaded, models, strict=True):
        assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert loaded[0].second.weight is loaded[0].first.weight


def test_fpfs_writes_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody does so again; until the handle is removed."""
    accelerator, _ = prepared(seed=4)
    written: list[str] = []
    saves = accelerate.save_safetensors

    def save(tensors: object, path: str, **options: object) -> object:
        written.append(os.path.basename(path))
        return saves(tensors, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(accelerate, "save_safetensors", save)
    handle = accelerate.register(accelerator)
    accelerator.save_state(str(tmp_path / "c"))
    assert written == ["model.safetensors", "model_1.safetensors"]
    handle.remove()
    accelerator.save_state(str(tmp_path / "c"))
    assert len(written) == 2


def test_a_failure_is_raised_and_the_former_weights_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model whose file cannot be written; the one before it has its new ones."""
    accelerator, models = prepared(seed=5)
    accelerate.register(accelerator)
    accelerator.save_state(str(tmp_path / "c"))
    before = contents(tmp_path / "c")
    with torch.no_grad():
        for model in models:
            next(model.parameters()).zero_()
    saves = accelerate.save_safetensors

    def save(tensors: Any, path: str, **options: Any) -> Any:
        if os.path.basename(path) == "model_1.safetensors":
            monkeypatch.setattr("fpfs.client.writing.write_pieces", full)
        return saves(tensors, path, **options)

    monkeypatch.setattr(accelerate, "save_safetensors", save)
    with pytest.raises(OSError, match=r"No space left.*model_1\.safetensors"):
        accelerator.save_state(str(tmp_path / "c"))
    after = contents(tmp_path / "c")
    assert {name for name in before if after[name] != before[name]} == {"model.safetensors"}
    assert after.keys() == before.keys()


@pytest.mark.parametrize("is_main", [True, False])
def test_the_main_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool
) -> None:
    """Alone: no other one has to come, as where a hook leaves it no weights."""
    accelerator, _ = prepared(seed=7)
    accelerate.register(accelerator)
    monkeypatch.setattr(Accelerator, "is_main_process", is_main)
    accelerator.save_state(str(tmp_path / "c"))
    assert (tmp_path / "c" / "model_1.safetensors").exists() == is_main


def test_weights_are_safetensors_always(tmp_path: Path) -> None:
    """A hook does not learn of `safe_serialization`."""
    accelerator, models = prepared(seed=6)
    accelerate.register(accelerator)
    accelerator.save_state(str(tmp_path / "c"), safe_serialization=False)
    assert (tmp_path / "c" / "model.safetensors").exists()
    expected = [
        {name: each.clone() for name, each in model.state_dict().items()} for model in models
    ]
    with torch.no_grad():
        for model in models:
            next(model.parameters()).zero_()
    accelerator.load_state(str(tmp_path / "c"))
    for model, state in zip(models, expected, strict=True):
        assert same(dict(model.state_dict()), state)


def test_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Accelerate makes a directory first
    accelerator, _ = prepared(seed=7)
    accelerate.register(accelerator)
    with pytest.raises(ValueError, match=r"s3://a/b/model\.safetensors is not on a filesystem"):
        accelerator.save_state("s3://a/b")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_is_no_accelerator() -> None:
    with pytest.raises(TypeError, match="register is given an Accelerator, not 5"):
        accelerate.register(5)  # type: ignore[arg-type]
    accelerator, _ = prepared(seed=8)
    with pytest.raises(TypeError, match="durable is 'no': give True or False"):
        accelerate.register(accelerator, durable="no")  # type: ignore[arg-type]
