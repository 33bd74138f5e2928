"""Accelerate's save_state by fpfs: its own files, which its load_state reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from fpfs.integrations import accelerate
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


def test_a_failure_is_raised_and_the_former_weights_stay(tmp_path: Path) -> None:
    accelerator, models = prepared(seed=5)
    accelerate.register(accelerator)
    accelerator.save_state(str(tmp_path / "c"))
    before = contents(tmp_path / "c")
    (tmp_path / "c" / "model_1.safetensors").unlink()
    (tmp_path / "c" / "model_1.safetensors").mkdir()
    with torch.no_grad():
        next(models[1].parameters()).zero_()
    with pytest.raises(IsADirectoryError, match=r"model_1\.safetensors"):
        accelerator.save_state(str(tmp_path / "c"))
    (tmp_path / "c" / "model_1.safetensors").rmdir()
    assert contents(tmp_path / "c").items() <= before.items()


def test_what_is_no_accelerator() -> None:
    with pytest.raises(TypeError, match="register is given an Accelerator, not 5"):
        accelerate.register(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s is 'x': give seconds"):
        accelerate.register(Accelerator(), timeout_s="x")  # type: ignore[arg-type]
