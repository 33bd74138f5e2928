"""Catalogs of two copies with known contents, states that a crash leaves them in, and damage.

Concurrency: one thread; the catalogs run in the caller's trio loop.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import stat
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fpfs.daemon.catalog.database import Catalog, DeviceRecord, RootOwner, Transaction
from fpfs.daemon.catalog.replicas import ALONE_NAME
from fpfs.daemon.catalog.rows import dirents
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.attributes import store_xattr
from fpfs.daemon.catalog.rows.dirents import NewInode
from fpfs.daemon.catalog.rows.objects import count_all
from fpfs.daemon.catalog.schema import (
    FIXED_DIRECTORIES,
    FPFS_INO,
    NUMBER_FIRST,
    PARTIAL_INO,
)

ROOT = 1
FILESYSTEM_ID = "0123456789abcdef"
LATE = b"late"
"""What the names begin with that were made after the last `make_durable`."""

FILES = ("catalog.db", "catalog.db-wal", "catalog.sums")

LEFT_BY_A_CATALOG = ("objects/00", "reserve", "catalog.db-wal", "catalog.alone")
"""Each is in a device directory only if there was a catalog."""

LEFT_BY_NO_CATALOG = (".catalog.db.new", "catalog.sums")
"""What is there when a first mount is killed before its catalog has its name."""

Entry = tuple[Any, ...]


def paths_of(folder: Path) -> tuple[Path, Path]:
    """Where the copies of a catalog of two devices are."""
    return folder / "a" / "catalog.db", folder / "b" / "catalog.db"


def leave(path: Path) -> None:
    """Make one of the things that are left."""
    if path.parent.name == "objects":
        path.mkdir()
    else:
        path.write_bytes(b"half of something")


def make_catalog(folder: Path) -> Catalog:
    """A new catalog with copies on two devices."""
    paths = paths_of(folder)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    Catalog.format(
        paths[0],
        filesystem_id=FILESYSTEM_ID,
        devices=[
            DeviceRecord(number=number, device_id=path.parent.name, path=str(path.parent))
            for number, path in enumerate(paths)
        ],
        root=RootOwner(uid=1, gid=2),
    )
    return Catalog.open(*paths, is_new=True)


def open_catalog(folder: Path) -> Catalog:
    """Open a catalog with copies on two devices, as a server does."""
    return Catalog.open(*paths_of(folder), filesystem_id=FILESYSTEM_ID)


def change(transaction: Transaction, name: bytes, number: int) -> None:
    """Make a file whose mode, size and extended attributes tell its number."""
    new = NewInode(stat.S_IFREG | (number % 0o1000), number, number + 1, 0, number)
    ino = dirents.make(transaction, ROOT, name, new)
    transaction.execute("UPDATE inodes SET size = ? WHERE ino = ?", (number * 7, ino))
    store_xattr(transaction, ino, b"user.number", b"%d" % number * 20, ctime_ns=number)


async def make_names(catalog: Catalog, numbers: range, *, prefix: bytes = b"n") -> None:
    """Make files, one transaction each; every fifth replaces the one before it."""
    for number in numbers:
        name = prefix + b"%06d" % number
        await catalog.write(partial(change, name=name, number=number))
        if number % 5 == 4 and prefix != LATE:
            before = prefix + b"%06d" % (number - 1)
            await catalog.write(
                partial(
                    dirents.rename,
                    source=(ROOT, name),
                    destination=(ROOT, before),
                    mode=dirents.RenameMode.REPLACE,
                    now_ns=number,
                )
            )


def name_plane(transaction: Transaction) -> dict[bytes, Entry]:
    """Every name that was made, with what is behind it."""
    rows = transaction.execute(
        "SELECT n.name, i.ino, i.mode, i.uid, i.gid, i.nlink, i.size, i.mtime_ns, x.value"
        " FROM names n JOIN inodes i ON i.ino = n.ino LEFT JOIN xattrs x ON x.ino = i.ino"
        " WHERE n.cookie >= ?",
        (NUMBER_FIRST,),
    ).fetchall()
    return {name: tuple(rest) for name, *rest in rows}


def make_earlier(path: Path, *, version: int) -> sqlite3.Connection:
    """Make a catalog that nobody has open what an earlier fpfs would have made; alone."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("ALTER TABLE devices DROP COLUMN bytes")
    connection.execute("ALTER TABLE objects DROP COLUMN bytes")
    connection.execute(f"PRAGMA user_version = {version}")
    if version == 5:
        path.with_name("catalog.sums").unlink()
        return connection
    connection.execute("DROP TABLE device_tags")
    connection.execute("ALTER TABLE devices DROP COLUMN state")
    connection.execute("ALTER TABLE inodes DROP COLUMN version")
    if version == 4:
        path.with_name("catalog.sums").unlink()
        return connection
    for ino, *_rest in FIXED_DIRECTORIES:
        if version < 3 or ino > PARTIAL_INO:
            connection.execute("DELETE FROM inodes WHERE ino = ?", (ino,))
            connection.execute("DELETE FROM names WHERE ino = ?", (ino,))
    connection.execute("ALTER TABLE inodes DROP COLUMN kept")
    for table in ("policies", "former", "withheld", "groups", "group_members", "group_names"):
        connection.execute(f"DROP TABLE {table}")
    if version == 3:
        connection.execute("UPDATE inodes SET nlink = nlink - 2 WHERE ino = ?", (FPFS_INO,))
        path.with_name("catalog.sums").unlink()
        return connection
    connection.execute("DROP INDEX unfinished")
    connection.execute("ALTER TABLE inodes DROP COLUMN unfinished")
    connection.execute("DROP TABLE shares")
    connection.execute("DROP TABLE partials")
    connection.execute("DELETE FROM filesystem WHERE name = 'sequence'")
    if version == 1:
        connection.execute("DROP TABLE requests")
    path.with_name("catalog.sums").unlink()
    return connection


def tables(path: Path) -> dict[str, list[Entry]]:
    """Every row of every table of a copy that nobody has open."""
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        names = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        ]
        return {
            name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr)
            for name in names
        }


def held(transaction: Transaction) -> dict[str, list[Entry]]:
    """What the catalog says that objects and devices hold."""
    return {
        "objects": transaction.execute("SELECT device, id, bytes FROM objects").fetchall(),
        "devices": transaction.execute("SELECT number, bytes FROM devices").fetchall(),
    }


def check_held(transaction: Transaction) -> None:
    """What is said to be held is what all maps say, counted anew."""
    before = held(transaction)
    count_all(transaction)
    shares.recount(transaction, shares.shared_objects(transaction))
    assert before == held(transaction)


def copy_state(folder: Path, destination: Path) -> None:
    """Copy the files of both copies as they are now: what kill -9 leaves."""
    for device in ("a", "b"):
        (destination / device).mkdir(parents=True)
        for name in (*FILES, ALONE_NAME):
            if (folder / device / name).exists():
                shutil.copy(folder / device / name, destination / device)


class State(NamedTuple):
    """What a crash left: the files, the durable names, and all names that were answered."""

    folder: Path
    durable: dict[bytes, Entry]
    answered: dict[bytes, Entry]


class Damage(NamedTuple):
    """What is done to one file of a copy."""

    device: str
    file: str
    kind: str
    seed: int

    def apply(self, folder: Path) -> None:
        """Do it. Files that are not there stay so."""
        random_numbers = random.Random(self.seed)
        path = folder / self.device / self.file
        if not path.exists():
            return
        size = path.stat().st_size
        if self.kind == "delete":
            path.unlink()
        elif self.kind == "truncate":
            os.truncate(path, random_numbers.randrange(size) if size else 0)
        else:
            content = bytearray(path.read_bytes())
            for _ in range(random_numbers.choice((1, 1, 2, 16)) if size else 0):
                content[random_numbers.randrange(size)] ^= random_numbers.randrange(1, 256)
            path.write_bytes(content)


def random_damage(seed: int, *, device: str = "") -> Damage:
    """A damage by number; the same number is the same damage."""
    random_numbers = random.Random(seed)
    return Damage(
        device=device or random_numbers.choice("ab"),
        file=random_numbers.choice(FILES),
        kind=random_numbers.choice(("delete", "truncate", "truncate", "flip", "flip", "flip")),
        seed=seed,
    )
