"""Where the blocks of files lie on the devices, and damage done to them there."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import NamedTuple

from fpfs.core.engine import BLOCK_BYTES
from fpfs.core.layout import UNWRITTEN, runs_of_file
from fpfs.testing.mounted import Mount


class StoredBlock(NamedTuple):
    """A block of a committed file: number `block` of inode `ino`."""

    ino: int
    block: int
    device: int
    object: int
    object_block: int
    path: Path
    """The file that the object is."""

    @property
    def offset(self) -> int:
        """Where it begins in the object."""
        return self.object_block * BLOCK_BYTES

    def log_pattern(self) -> str:
        """What the server logs when it meets the block damaged."""
        return (
            rf"inode {self.ino}: its block {self.block} \(64 KiB\) is damaged: block "
            rf"{self.object_block} of object {self.object:016x} on device {self.device} does not"
        )


def stored_blocks(mount: Mount, *, copy: int = 0) -> list[StoredBlock]:
    """All blocks that a copy of the catalog refers to; the mount may be up, but must be at rest."""
    blocks = []
    for ino, blobs in _segments(mount.devices[copy]).items():
        for run in runs_of_file(blobs):
            if run.flags == UNWRITTEN:
                continue
            name = f"{run.object:016x}"
            path = mount.devices[run.device] / "objects" / name[-2:] / name
            blocks += [
                StoredBlock(ino, run.block + i, run.device, run.object, run.object_block + i, path)
                for i in range(run.count)
            ]
    return blocks


def blocks_of(mount: Mount, path: Path, *, copy: int = 0) -> list[StoredBlock]:
    """The blocks of one file, in order, as a copy of the catalog has them."""
    ino = path.stat().st_ino
    return sorted(block for block in stored_blocks(mount, copy=copy) if block.ino == ino)


def unknown_objects(mount: Mount) -> set[str]:
    """Objects on the devices that the catalog does not name, of a mount that has ended cleanly."""
    alone = [device for device in mount.devices if (device / "catalog.alone").exists()]
    newest = (alone or mount.devices)[0]
    with contextlib.closing(sqlite3.connect(newest / "catalog.db")) as connection:
        rows = connection.execute("SELECT device, id FROM objects").fetchall()
    known = {f"{device}/{id_ & (1 << 64) - 1:016x}" for device, id_ in rows}
    found = {
        f"{number}/{path.name}"
        for number, device in enumerate(mount.devices)
        for path in (device / "objects").glob("??/*")
    }
    assert known <= found, f"objects are gone: {known - found}"
    return found - known


def _segments(device: Path) -> dict[int, list[bytes]]:
    """Segments by inode. A mount locks its catalog, so a copy is read, with its log."""
    found: dict[int, list[bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("catalog.db", "catalog.db-wal"):
            if (device / name).exists():
                shutil.copy(device / name, folder)
        connection = sqlite3.connect(Path(folder, "catalog.db"))
        for ino, blob in connection.execute("SELECT ino, blob FROM segments"):
            found.setdefault(ino, []).append(blob)
        connection.close()
    return found


def flip(path: Path, offset: int, *, bit: int = 4) -> None:
    """Flip one bit of a stored byte. Twice is not at all."""
    with path.open("r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), offset)
        os.fsync(file.fileno())


def read_past_caches(path: Path, offset: int, count: int) -> bytes:
    """Read with O_DIRECT: what a device has, whatever the kernel keeps. Both are multiples of
    4,096; EIO where a part of it is damaged."""
    with mmap.mmap(-1, count) as buffer:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            done = 0
            while done < count:
                with memoryview(buffer)[done:] as rest:
                    n = os.preadv(descriptor, [rest], offset + done)
                done += n
                if n == 0 or done % 4096:
                    break
            return buffer[:done]
        finally:
            os.close(descriptor)


def whole_size(size: int) -> int:
    """What holds `size` bytes in multiples of 4,096, and at least one."""
    return max(1, -(-size // 4096)) * 4096
