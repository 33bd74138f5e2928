"""The fixtures of this folder; see tests/support."""

from tests.support.fixtures import directory, folder, mount, places, plain, target
from tests.support.ranks import forks

__all__ = ["directory", "folder", "forks", "mount", "places", "plain", "target"]
