"""What tests of behaviour run against: a mount of fpfs, or any directory for comparison.

FPFS_TEST_DIRECTORY=/some/dir in the environment makes the tests run there, on a plain filesystem.
That is how the tests themselves are tested: what fails there is wrong in the test.

Invariants:
  * Whatever a target made is gone when its context ends, also after a failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from fpfs.testing.mounted import STAGING_DEFAULT, mounted
from tests.support.system import syncfs

DIRECTORY_VARIABLE = "FPFS_TEST_DIRECTORY"


class Target(Protocol):
    """A directory under test. `root` stays the same path over a remount."""

    @property
    def root(self) -> Path:
        """Where tests may write."""

    @property
    def is_fpfs(self) -> bool:
        """Whether fpfs is under `root`; what only fpfs promises is tested only then."""

    def remount(self) -> None:
        """Unmount and mount again: nothing may be lost. Nothing on a plain directory."""


class PlainTarget:
    """A directory of whatever filesystem is there."""

    is_fpfs = False

    def __init__(self, root: Path) -> None:
        self.root = root

    def remount(self) -> None:
        """Write everything back; a plain directory stays where it is."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            syncfs(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def plain_target(parent: Path | None = None) -> Iterator[PlainTarget]:
    """A fresh directory under `parent`, removed at the end."""
    root = Path(tempfile.mkdtemp(prefix="fpfs-plain-", dir=parent))
    root.chmod(0o755)
    try:
        yield PlainTarget(root)
    finally:
        shutil.rmtree(root)


def open_target(
    *, options: Sequence[str] = (), staging: str = STAGING_DEFAULT, parent: Path | None = None
) -> contextlib.AbstractContextManager[Target]:
    """A plain target where the environment asks for one, else a mount with these options.

    The mount lies in `parent`, or where temporary files do.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory:
        return plain_target(Path(directory))
    return mounted(options=options, staging=staging, parent=parent)
