"""What devices are said to hold is what is there, and nobody looks at the objects for it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fpfs.core.engine import BLOCK_BYTES
from fpfs.testing.mounted import Mount, check_fpfs, mounted, stored_bytes
from tests.support.contents import random_bytes
from tests.support.servers import kill
from tests.support.waiting import wait_until

CTL = "fpfs.cli.ctl"
SIZES = (0, 17_000, 40_000, 65_536, 70_000, 1_000_000, 3_333_333)


def create(root: Path) -> None:
    for number, size in enumerate(SIZES * 3):
        (root / f"{number}").write_bytes(random_bytes(size, seed=number))


def overwrite(root: Path) -> None:
    for number, path in enumerate(sorted(root.iterdir())[::2]):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(random_bytes(80_000, seed=number))
            file.flush()
            os.fsync(file.fileno())
            file.write(b"behind")


def append(root: Path) -> None:
    for number in range(1, len(SIZES) * 3, 2):
        with (root / f"{number}").open("ab") as file:
            file.write(b"y" * 20_000)


def truncate(root: Path) -> None:
    for number in range(len(SIZES) * 3):
        path = root / f"{number}"
        os.truncate(path, path.stat().st_size * (number % 4) // 2)


def replace(root: Path) -> None:
    (root / "new").write_bytes(random_bytes(500_000, seed=1))
    (root / "new").rename(root / "5")


def remove(root: Path) -> None:
    for number in range(4, len(SIZES) * 3, 3):
        (root / f"{number}").unlink()


def check_used(mount: Mount) -> None:
    """Devices hold together what the files take, and each what its objects take.

    Of the last block of a file not all may be stored, and of one that was the last all may count.
    The kernel tells late of files that it has forgotten, and objects are cut behind a flush.
    """
    found: list[str] = []

    def is_exact() -> bool:
        found[:] = differences_in_use(mount)
        return not found

    with contextlib.suppress(AssertionError):
        wait_until(is_exact)
    assert found == []


def differences_in_use(mount: Mount) -> list[str]:
    """What differs, when all is flushed."""
    mount.flush()
    files = [path.stat() for path in mount.root.iterdir()]
    devices = mount.status().devices
    used, taken = (
        sum(device.bytes_used for device in devices),
        sum(f.st_blocks * 512 for f in files),
    )
    found = [] if used == taken else [f"{used} bytes are used, and the files take {taken}"]
    for device in devices:
        stored = stored_bytes(Path(device.path))
        if abs(stored - device.bytes_used) > len(files) * BLOCK_BYTES:
            found.append(f"{device.path} has {stored} bytes, {device.bytes_used} are used")
    return found


@pytest.mark.parametrize("restart", [Mount.remount, kill], ids=["remount", "server_dies"])
def test_what_devices_hold_is_known_whatever_happens(restart: Callable[[Mount], None]) -> None:
    with mounted(devices=2) as mount:
        mount.allow_log(r"server \d+ died \(signal 9\): starting another")
        for *changes, last in (
            (create, overwrite),
            (append, truncate),
            (replace, remove, overwrite),
        ):
            for change in changes:
                change(mount.root)
                check_used(mount)
            last(mount.root)
            restart(mount)
            check_used(mount)
        before = [device.bytes_used for device in mount.status().devices]
        assert min(before) > 1_000_000
        check_fpfs("device", "drain", mount.root, "0", module=CTL)
        check_used(mount)
        mount.remount()
        drained, full = mount.status().devices
        assert (drained.bytes_used, full.bytes_used) == (0, sum(before))
        mount.unmount()
        assert json.loads(check_fpfs("fsck", "--json", *mount.devices))["findings"] == []
        mount.mount()
        for path in mount.root.iterdir():
            path.unlink()
        check_used(mount)
        assert [device.bytes_used for device in mount.status().devices] == [0, 0]


def test_nobody_looks_at_the_objects_for_the_status() -> None:
    """What somebody else puts among them is not in it."""
    with mounted(devices=2) as mount:
        (mount.root / "file").write_bytes(random_bytes(3_000_000, seed=1))
        mount.flush()
        before = [device.bytes_used for device in mount.status().devices]
        assert sum(before) == 3_002_368  # the last block ends at a multiple of 4,096
        for folder in mount.devices:
            (folder / "objects" / "00" / "stray").write_bytes(bytes(2_000_000))
        assert [device.bytes_used for device in mount.status().devices] == before
