"""safetensors: temporary name, ftruncate to full size, writes, rename; loads map the file. And
fpfs.save_safetensors, which writes the same files, on a mount.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fpfs
from tests.support.contents import assert_same_files
from tests.support.fixtures import Example
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


def test_fpfs_writes_the_same_file(target: Target, directory: Path, plain: Path) -> None:
    for seed in (5, 6):
        expected = tensors(seed=seed)
        save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
        saved = fpfs.save_safetensors(
            expected, directory / "model.safetensors", metadata={"format": "pt"}, durable=True
        )
        assert saved.durable
        assert_same_files(directory / "model.safetensors", plain / "model.safetensors")
    target.remount()
    assert_loads(directory / "model.safetensors", tensors(seed=6))
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_example(target: Target, directory: Path, run_example: Example, ranks: int) -> None:
    printed = run_example("safetensors_shards.py", directory, ranks=ranks)
    assert printed == f"2 shards, written by {max(ranks, 1)} rank(s), loaded bit for bit\n"
    target.remount()
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) == 12
    assert len(list(directory.iterdir())) == 3


@pytest.mark.long
def test_transformers_load_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    config.save_pretrained(directory)
    for limit in (100_000, 10**9):
        fpfs.save_safetensors(
            model.state_dict(),
            directory / "model.safetensors",
            metadata={"format": "pt"},
            max_shard_bytes=limit,
        )
        loaded = AutoModelForCausalLM.from_pretrained(directory)
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
