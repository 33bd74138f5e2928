"""torch.save and torch.load, unmodified: every format, every way to load, bit for bit."""

from __future__ import annotations

import enum
import io
from pathlib import Path

import pytest
import torch

from tests.support.contents import assert_same_files
from tests.support.target import Target

pytestmark = pytest.mark.clients


class Format(enum.Enum):
    """The two file formats of torch.save."""

    ZIP = "zip"
    LEGACY = "legacy"


def training_state(*, seed: int) -> dict[str, object]:
    """A trained model's and its AdamW's state: small and odd tensors of several types."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Embedding(1021, 96),
        torch.nn.Linear(96, 387),
        torch.nn.LayerNorm(387),
        torch.nn.Linear(387, 1021),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        tokens = torch.randint(0, 1021, (4, 16), generator=generator)
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    extra = {
        "bfloat16": torch.randn(333, 77, generator=generator).to(torch.bfloat16),
        "bytes": torch.randint(0, 256, (1_000_003,), dtype=torch.uint8, generator=generator),
        "empty": torch.empty(0),
        "view": torch.randn(64, 64, generator=generator).t()[3:17],
    }
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}


def leaves(value: object, path: str = "") -> dict[str, object]:
    """Nested state as a flat dictionary."""
    if isinstance(value, dict):
        found: dict[str, object] = {}
        for key, item in value.items():
            found |= leaves(item, f"{path}/{key}")
        return found
    if isinstance(value, list | tuple):
        return leaves(dict(enumerate(value)), path)
    return {path: value}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as bytes, so that NaN and -0.0 compare exactly."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_state(found: object, expected: object) -> None:
    """Compare every tensor bit by bit, and everything else by equality."""
    found_leaves, expected_leaves = leaves(found), leaves(expected)
    assert found_leaves.keys() == expected_leaves.keys()
    for name, value in expected_leaves.items():
        other = found_leaves[name]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor)
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert torch.equal(bits(other), bits(value)), name
        else:
            assert other == value, name


def save(state: object, path: Path | io.IOBase, file_format: Format) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=file_format is Format.ZIP)


@pytest.mark.parametrize("file_format", Format)
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(
    target: Target, directory: Path, plain: Path, file_format: Format, weights_only: bool
) -> None:
    state = training_state(seed=1)
    path = directory / "step1.pt"
    save(state, path, file_format)
    save(state, plain / "step1.pt", file_format)
    assert_same_state(torch.load(path, weights_only=weights_only), state)
    assert_same_files(path, plain / "step1.pt")
    target.remount()
    assert_same_state(torch.load(path, weights_only=weights_only), state)
    assert_same_files(path, plain / "step1.pt")


def test_load_mapped(target: Target, directory: Path) -> None:
    state = training_state(seed=2)
    torch.save(state, directory / "mapped.pt")
    assert_same_state(torch.load(directory / "mapped.pt", mmap=True), state)
    target.remount()
    assert_same_state(torch.load(directory / "mapped.pt", mmap=True), state)


def test_tensors_mapped_stay_valid_while_the_file_is_replaced(directory: Path) -> None:
    state = training_state(seed=3)
    torch.save(state, directory / "replaced.pt")
    mapped = torch.load(directory / "replaced.pt", mmap=True)
    torch.save(training_state(seed=4), directory / "new.pt")
    (directory / "new.pt").rename(directory / "replaced.pt")
    assert_same_state(mapped, state)


@pytest.mark.parametrize("file_format", Format)
def test_overwrite_with_less_and_more(directory: Path, file_format: Format) -> None:
    path = directory / "latest.pt"
    for count in (3_000_001, 1_234, 5_000_000, 0):
        tensor = torch.randint(0, 256, (count,), dtype=torch.uint8)
        save({"step": count, "tensor": tensor}, path, file_format)
        assert_same_state(torch.load(path), {"step": count, "tensor": tensor})


def test_file_object_and_buffer(directory: Path) -> None:
    state = training_state(seed=5)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    (directory / "buffer.pt").write_bytes(buffer.getvalue())
    with (directory / "object.pt").open("wb") as file:
        torch.save(state, file)
    with (directory / "object.pt").open("rb") as file:
        assert_same_state(torch.load(file), state)
    assert_same_state(torch.load(directory / "buffer.pt"), state)


@pytest.mark.parametrize("file_format", Format)
def test_larger_than_a_layout_segment(
    target: Target, directory: Path, plain: Path, file_format: Format
) -> None:
    tensors = [torch.randint(0, 256, (48 * 2**20 + i,), dtype=torch.uint8) for i in range(3)]
    save(tensors, plain / "large.pt", file_format)
    save(tensors, directory / "large.pt", file_format)
    target.remount()
    assert_same_files(directory / "large.pt", plain / "large.pt")
    assert_same_state(torch.load(directory / "large.pt", mmap=file_format is Format.ZIP), tensors)
