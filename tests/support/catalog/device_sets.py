"""Device directories that are not mounted, with a catalog that tests change at will."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fpfs.core.engine import CatalogFiles
from fpfs.daemon.devices.label import read_stamp
from fpfs.testing.mounted import mounted
from tests.support.contents import random_bytes

LARGE_BYTES = 2_500_000
SMALL = b"small"
CONTENT_BYTES_MAX = 64 << 20


class DeviceSet:
    """Directories that can be brought back to how they were, in place."""

    def __init__(self, folder: Path, devices: Sequence[Path]) -> None:
        """Keep a copy of the directories as they are now."""
        self.devices = tuple(devices)
        self._kept = folder / "kept"
        for device in self.devices:
            shutil.copytree(device, self._kept / device.name)
        stamp = read_stamp(str(devices[0]), asked="test")
        assert stamp is not None
        self.filesystem_id = stamp.filesystem_id

    @property
    def words(self) -> list[str]:
        """The directories as arguments."""
        return [str(device) for device in self.devices]

    def restore(self) -> None:
        """Make everything as it was; the directories themselves stay, as their stamps ask for."""
        for device in self.devices:
            for entry in device.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            shutil.copytree(self._kept / device.name, device, dirs_exist_ok=True)
            os.chown(device, os.geteuid(), os.getegid())

    def change(self, *statements: str | tuple[str, Sequence[Any]]) -> None:
        """Change the catalog, both copies alike, with checksums that fit."""
        for device in self.devices[:2]:
            path = device / "catalog.db"
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                for statement in statements:
                    sql, values = (statement, ()) if isinstance(statement, str) else statement
                    connection.execute(sql, values)
            files = CatalogFiles(str(path))
            files.make_sums(self.filesystem_id)

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of the catalog as device 0 has it."""
        uri = f"{(self.devices[0] / 'catalog.db').as_uri()}?immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            return connection.execute(sql, values).fetchall()

    def ino(self, name: str) -> int:
        """The inode of a name, which must be unique."""
        ((ino,),) = self.query("SELECT ino FROM names WHERE name = ?", name.encode())
        return int(ino)

    def object_path(self, device: int, id_: int) -> Path:
        """The file that an object is."""
        name = f"{id_:016x}"
        return self.devices[device] / "objects" / name[-2:] / name

    def objects_of(self, ino: int) -> list[Path]:
        """The files of an inode's objects."""
        rows = self.query("SELECT device, id FROM objects WHERE ino = ? ORDER BY device, id", ino)
        return [self.object_path(*row) for row in rows]

    def hashes(self) -> dict[str, tuple[object, ...]]:
        """Everything about everything in the directories, but for access times."""
        return {
            str(path): _describe(path)
            for device in self.devices
            for path in [device, *sorted(device.rglob("*"))]
        }


def _describe(path: Path) -> tuple[object, ...]:
    content = ""
    if stat.S_ISREG(os.lstat(path).st_mode):
        with path.open("rb") as file:  # some are absurdly long, and hold little
            os.fsync(file.fileno())  # ext4 knows what a file's extents take when they are written
            content = hashlib.sha256(file.read(CONTENT_BYTES_MAX)).hexdigest()
    found = os.lstat(path)
    blocks = found.st_blocks
    return found.st_mode, found.st_uid, found.st_mtime_ns, found.st_ctime_ns, blocks, content


def fill(root: Path) -> None:
    """What every set holds: large and small files, folders, links, attributes."""
    (root / "folder" / "deeper").mkdir(parents=True)
    (root / "large").write_bytes(random_bytes(LARGE_BYTES, seed=1))
    (root / "folder" / "other").write_bytes(random_bytes(LARGE_BYTES // 2, seed=2))
    (root / "folder" / "deeper" / "small").write_bytes(SMALL)
    os.setxattr(root / "large", "user.note", b"value")
    os.link(root / "large", root / "folder" / "link")
    os.symlink("../large", root / "folder" / "symlink")
    with (root / "sparse").open("wb") as file:
        file.seek(5_000_000)
        file.write(b"end of the hole")
    os.chmod(root / "folder" / "other", 0o640)
    os.utime(root / "large", ns=(1_500_000_000_000_000_001, 1_600_000_000_000_000_002))


@contextmanager
def filled() -> Iterator[DeviceSet]:
    """Two device directories that were filled and unmounted."""
    with mounted(devices=2) as mount:
        fill(mount.root)
        mount.unmount()
        yield DeviceSet(mount.folder, mount.devices)
