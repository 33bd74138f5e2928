"""The fixtures of this folder."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a state is saved."""
    return tmp_path / "state.pt"


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory whose files nobody waits for."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)
