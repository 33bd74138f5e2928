"""Whether a database has the tables of a catalog, and nothing that would run by itself.

A file with sound checksums may still have been made by somebody else: with tables that lack
columns, views in their place, or triggers. SQLite would go on until a statement fails.

Concurrency: the function blocks; whoever owns the connection calls it.
"""

from __future__ import annotations

import contextlib
import sqlite3

from fpfs.daemon.catalog.schema import TABLES


def shape_fault(connection: sqlite3.Connection) -> str:
    """Return why a database of this version's format is no catalog, or nothing. sqlite3.Error."""
    rows = connection.execute("SELECT type, name FROM sqlite_schema").fetchall()
    for kind, name in rows:
        if kind not in ("table", "index"):
            return f"the catalog has a {kind} ({name}), which fpfs does not make"
    with contextlib.closing(sqlite3.connect(":memory:")) as wanted:
        for statement in TABLES:
            wanted.execute(statement)
        names = wanted.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        for (name,) in names:
            if _columns(connection, name) != _columns(wanted, name):
                return f"the catalog's table {name} is missing, or has other columns"
    return ""


def _columns(connection: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    """Name, type and place in the primary key of each column, and how the table is kept."""
    found = connection.execute(
        "SELECT name, type, pk FROM pragma_table_info(?) ORDER BY name", (table,)
    ).fetchall()
    kept = connection.execute(
        "SELECT type, wr, strict FROM pragma_table_list(?) WHERE schema = 'main'", (table,)
    ).fetchall()
    return [*found, *kept]
