"""The fixtures of this folder; see tests/support/fixtures.py."""

from tests.support.fixtures import directory, mount, plain, target

__all__ = ["directory", "mount", "plain", "target"]
