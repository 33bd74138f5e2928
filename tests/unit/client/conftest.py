"""The fixtures of this folder."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a state is saved."""
    return tmp_path / "state.pt"
