"""safetensors: temporary name, ftruncate to full size, writes, rename; loads map the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.contents import assert_same_files
from tests.support.target import Target

pytestmark = pytest.mark.clients


def tensors(*, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(2047, 1025, generator=generator),
        "half": torch.randn(333, 77, generator=generator).to(torch.bfloat16),
        "bytes": torch.randint(0, 256, (1_000_003,), dtype=torch.uint8, generator=generator),
        "empty": torch.empty(0),
    }


def assert_loads(path: Path, expected: dict[str, torch.Tensor]) -> None:
    loaded = load_file(path)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def test_save_and_load(target: Target, directory: Path, plain: Path) -> None:
    expected = tensors(seed=1)
    save_file(expected, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    assert_loads(directory / "model.safetensors", expected)
    assert_same_files(directory / "model.safetensors", plain / "model.safetensors")
    target.remount()
    assert_loads(directory / "model.safetensors", expected)
    assert_same_files(directory / "model.safetensors", plain / "model.safetensors")


def test_replace_and_leave_no_temporary_file(directory: Path) -> None:
    for seed in (2, 3):
        save_file(tensors(seed=seed), directory / "model.safetensors")
        assert_loads(directory / "model.safetensors", tensors(seed=seed))
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]


def test_slices_of_a_mapped_file(directory: Path) -> None:
    expected = tensors(seed=4)
    save_file(expected, directory / "model.safetensors")
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        part = file.get_slice("weight")[100:177, 3:]
    assert torch.equal(part, expected["weight"][100:177, 3:])
