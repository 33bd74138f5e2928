"""Striping over devices whose bandwidth adds up: the lab under a real mount.

Concurrency: one lab and one mount at a time, in temporary directories.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fpfs.testing import lab
from fpfs.testing.mounted import Mount, mounted

REASON = lab.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

MIB = 1024 * 1024
MIB_PER_S = 100
FILE_MIB = 192
CONTENT = os.urandom(MIB)


def save_and_sync(path: Path) -> None:
    """Write a file and fsync it."""
    with open(path, "wb", buffering=0) as file:
        for _ in range(FILE_MIB):
            file.write(CONTENT)
        os.fsync(file.fileno())


def mib_written(mount: Mount) -> list[float]:
    """MiB that each device has received."""
    return [device.bytes_written / MIB for device in mount.status().devices]


def device_folders(made: lab.Lab, count: int) -> list[Path]:
    """A fresh device directory on each of the lab's first `count` filesystems."""
    folders = [mountpoint / f"of{count}" for mountpoint in made.mountpoints[:count]]
    for folder in folders:
        folder.mkdir()
    return folders


def test_chunks_go_to_the_devices_in_turn(tmp_path: Path) -> None:
    with lab.lab(
        device_count=4, mib_per_s=MIB_PER_S, size_bytes=512 * MIB, parent=tmp_path
    ) as made:
        for count in (1, 4):
            with mounted(devices=device_folders(made, count), parent=tmp_path) as mount:
                save_and_sync(mount.root / "file")
                shares = mib_written(mount)
                assert sum(shares) >= FILE_MIB
                assert max(shares) - min(shares) <= 2
                mount.remount()  # what is read comes from the devices
                content = (mount.root / "file").read_bytes()
                assert content == CONTENT * FILE_MIB
