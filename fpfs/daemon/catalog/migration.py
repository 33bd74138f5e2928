"""Bringing a catalog of an earlier format to the present one.

Concurrency: the function blocks; it runs before trio starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfs.core.errors import CatalogError
from fpfs.daemon.catalog.rows.objects import count_all
from fpfs.daemon.catalog.rows.shared_extents import recount, shared_objects
from fpfs.daemon.catalog.schema import (
    FORMAT_VERSION,
    FPFS_INO,
    ROOT_INO,
    SEQUENCE,
    TABLES,
    RootOwner,
    fill_fixed_directories,
)

if TYPE_CHECKING:
    import sqlite3

ADDED_COLUMNS = (
    ("inodes", "unfinished"),
    ("inodes", "kept"),
    ("inodes", "version"),
    ("devices", "state"),
    ("devices", "bytes"),
    ("objects", "bytes"),
)
"""Columns that tables of earlier formats lack."""


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a catalog of an earlier format to the present one; its rows stay as they are.

    Raises `CatalogError`, with nothing changed, when a name is in the way.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == FORMAT_VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    for table, column in ADDED_COLUMNS:
        columns = connection.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()
        if (column,) not in columns:
            connection.execute(
                f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0"
            )
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema").fetchall()}
    for statement in TABLES:
        name = statement.replace("UNIQUE ", "", 1).split(maxsplit=3)[2]
        if name not in there:
            connection.execute(statement)
    if connection.execute(
        "SELECT 1 FROM names WHERE parent = ? AND name = ? AND ino <> ?",
        (ROOT_INO, b".fpfs", FPFS_INO),
    ).fetchone():
        connection.execute("ROLLBACK")
        raise CatalogError(
            "there is a file or directory .fpfs, a name that this fpfs uses itself",
            remedy="mount it with the fpfs that wrote it, and rename that",
        )
    owner = connection.execute("SELECT uid, gid FROM inodes WHERE ino = ?", (ROOT_INO,)).fetchone()
    fill_fixed_directories(connection, RootOwner(uid=owner[0], gid=owner[1]))
    connection.execute("INSERT OR IGNORE INTO filesystem VALUES (?, 1)", (SEQUENCE,))
    count_all(connection)
    recount(connection, shared_objects(connection))
    connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
    connection.execute("COMMIT")
