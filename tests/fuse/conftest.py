"""The fixtures of this folder; see tests/support/fixtures.py."""

from tests.support.fixtures import directory, mount, places, plain, target

__all__ = ["directory", "mount", "places", "plain", "target"]
