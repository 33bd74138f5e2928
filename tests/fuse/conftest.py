"""The fixtures of this folder; see tests/support/fixtures.py."""

from tests.support.fixtures import directory, plain, target

__all__ = ["directory", "plain", "target"]
