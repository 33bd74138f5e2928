"""Small ext4 filesystems of known identity, in image files on loop devices (root)."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import run

IMAGE_BYTES = 8 << 20
KERNEL = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])

needs_filesystem_identity = pytest.mark.skipif(
    KERNEL < (6, 9), reason="kernels before 6.9 do not tell a filesystem's UUID"
)


def make_image(image: Path) -> uuid.UUID:
    """An image file with an empty ext4; returns its identity."""
    identity = uuid.uuid4()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    run("mkfs.ext4", "-q", "-F", "-U", identity, image)
    return identity


@contextlib.contextmanager
def mounted_image(image: Path) -> Iterator[Path]:
    """An image at a mountpoint beside it; returns the mountpoint."""
    mountpoint = image.with_suffix("")
    mountpoint.mkdir(exist_ok=True)
    run("mount", "-o", "loop", image, mountpoint)
    try:
        yield mountpoint
    finally:
        run("umount", "--lazy", mountpoint)  # a failed test may have something open on it
