"""The fixtures of this folder; see tests/support/fixtures.py."""

from tests.support.fixtures import directory, folder, mount, places, plain, target

__all__ = ["directory", "folder", "mount", "places", "plain", "target"]
