"""The fixtures of this folder."""

from pathlib import Path

import pytest

from tests.support.ranks import forks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a state is saved."""
    return tmp_path / "state.pt"


__all__ = ["forks", "path"]
