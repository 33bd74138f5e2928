"""Files over all devices of a mount, and whether each still has its content."""

from __future__ import annotations

from collections.abc import Mapping

from fpfs.testing.mounted import Mount
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.damage import read_past_caches, whole_size


def make_files(mount: Mount, count: int, *, seed: int = 0) -> dict[str, bytes]:
    """Durable files of many sizes, over all devices; small ones lie in the catalog."""
    contents = {
        f"file{seed + number}": random_bytes(1 + number**3 * 40_000, seed=seed + number)
        for number in range(count)
    }
    for name, content in contents.items():
        (mount.root / name).write_bytes(content)
    mount.flush()
    return contents


def check_files(mount: Mount, contents: Mapping[str, bytes]) -> None:
    """Every file has its content, as the server has it: nothing of it is read from a cache."""
    for name, content in contents.items():
        path = mount.root / name
        assert path.stat().st_size == len(content), name
        assert_same(read_past_caches(path, 0, whole_size(len(content))), content)
