"""The fixtures of this folder; see tests/support/fixtures.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fpfs.testing.mounted import Mount, mounted
from tests.support.fixtures import directory, mount, plain, run_example, target
from tests.support.processes import KILLED


@pytest.fixture
def killed() -> Iterator[Mount]:
    """A mount of a test's own, where writers are killed."""
    with mounted() as own:
        own.allow_log(KILLED)
        yield own


__all__ = ["directory", "killed", "mount", "plain", "run_example", "target"]
