"""Checks of the name plane: names, inodes, directories, counts of links.

Concurrency: one thread; the functions own the image that they look at.
"""

from __future__ import annotations

import sqlite3
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.fsck import Finding, Kind
from fpfs.core.limits import FILE_BYTES_MAX, NAME_BYTES_MAX, SYMLINK_BYTES_MAX
from fpfs.core.paths import show_name
from fpfs.daemon.catalog.schema import FIXED_DIRECTORIES, NUMBER_FIRST, ROOT_INO
from fpfs.daemon.offline.contents import has_content
from fpfs.daemon.offline.findings import Found, Paths, Statement

if TYPE_CHECKING:
    from collections.abc import Iterator

LOST_AND_FOUND = b"lost+found"
_DIRECTORY = stat.S_IFDIR >> 12
_KINDS = (
    stat.S_IFREG,
    stat.S_IFDIR,
    stat.S_IFLNK,
    stat.S_IFIFO,
    stat.S_IFSOCK,
    stat.S_IFCHR,
    stat.S_IFBLK,
)
_NUMBER_END = 2**63
_IS_DIRECTORY = f"mode >> 12 = {_DIRECTORY}"
_FIXED = tuple(ino for ino, *_rest in FIXED_DIRECTORIES)


def check_names(connection: sqlite3.Connection, paths: Paths) -> Iterator[Found]:
    """Yield what is wrong with names and inodes."""
    lost = LostAndFound(connection)
    yield from _check_fixed(connection)
    yield from _check_inodes(connection, paths)
    yield from _check_entries(connection, paths, lost)
    yield from _check_directories(connection, paths, lost)
    yield from _check_links(connection, paths, lost)
    yield from _check_former(connection)
    yield from _check_leftovers(connection)
    yield from _check_counter(connection)


def is_name(name: bytes) -> bool:
    """Whether this may stand in a directory."""
    return (
        0 < len(name) <= NAME_BYTES_MAX
        and name not in (b".", b"..")
        and b"/" not in name
        and b"\0" not in name
    )


class LostAndFound:
    """The directory `lost+found` in the root, for what has no place of its own any more."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Look whether there is one; it is made with the first thing that is put there."""
        self._connection = connection
        row = connection.execute(
            f"SELECT i.ino FROM names n JOIN inodes i ON i.ino = n.ino AND i.{_IS_DIRECTORY}"
            " WHERE n.parent = ? AND n.name = ?",
            (ROOT_INO, LOST_AND_FOUND),
        ).fetchone()
        self._ino = int(row[0]) if row else 0
        self._number = 0

    def _take_number(self) -> int:
        if not self._number:
            largest = _largest_number(self._connection)
            self._number = max(largest + 1, _next_number(self._connection))
        self._number += 1
        return self._number - 1

    def _make(self) -> list[Statement]:
        if self._ino:
            return []
        self._ino = self._take_number()
        now = time.time_ns()
        # Whatever else has the name gives it up.
        return [
            (
                (
                    "UPDATE OR REPLACE names SET name = CAST(name || '.' || cookie AS BLOB)"
                    " WHERE parent = ? AND name = ?"
                ),
                (ROOT_INO, LOST_AND_FOUND),
            ),
            (
                (
                    "INSERT INTO inodes (ino, mode, uid, gid, nlink, size, allocated_bytes,"
                    " atime_ns, mtime_ns, ctime_ns, rdev, parent)"
                    " SELECT ?, ?, uid, gid, 2, 0, 0, ?, ?, ?, 0, ? FROM inodes WHERE ino = ?"
                ),
                (self._ino, stat.S_IFDIR | 0o700, now, now, now, ROOT_INO, ROOT_INO),
            ),
            (
                "INSERT INTO names VALUES (?, ?, ?, ?, ?)",
                (self._ino, ROOT_INO, LOST_AND_FOUND, self._ino, _DIRECTORY),
            ),
            ("UPDATE inodes SET nlink = nlink + 1 WHERE ino = ?", (ROOT_INO,)),
        ]

    def _counted(self) -> list[Statement]:
        return [
            ("UPDATE filesystem SET value = ? WHERE name = 'next_number'", (self._number,)),
        ]

    def enter(self, ino: int) -> tuple[Statement, ...]:
        """Give an inode without a name one there."""
        made = self._make()
        cookie = self._take_number()
        name = b"#%d" % ino
        entered: Statement = (
            (
                "INSERT OR REPLACE INTO names SELECT ?, ?, ?, ino, mode >> 12 FROM inodes"
                " WHERE ino = ?"
            ),
            (cookie, self._ino, name, ino),
        )
        changeable: Statement = ("UPDATE inodes SET kept = 0 WHERE ino = ?", (ino,))
        return (*made, entered, changeable, *self._counted())

    def move(self, cookie: int, ino: int) -> tuple[Statement, ...]:
        """Move a name there."""
        made = self._make()
        moved: Statement = (
            "UPDATE OR REPLACE names SET parent = ?, name = ? WHERE cookie = ?",
            (self._ino, b"#%d.%d" % (ino, cookie), cookie),
        )
        return (*made, moved, *(self._counted() if made else ()))


def _check_fixed(connection: sqlite3.Connection) -> Iterator[Found]:
    """The root and the directories that every filesystem has."""
    for ino in (ROOT_INO, *_FIXED):
        row = connection.execute("SELECT mode, parent FROM inodes WHERE ino = ?", (ino,)).fetchone()
        if row is None or row[0] >> 12 != _DIRECTORY:
            text = f"the directory with inode {ino}, which every filesystem has, is missing"
            yield Found(Finding(kind=Kind.STRUCTURE, text=text, ino=ino))
        elif ino == ROOT_INO and row[1] != ROOT_INO:
            yield Found(
                Finding(kind=Kind.LINKS, text=f"the root's parent is inode {row[1]}", ino=ino),
                (("UPDATE inodes SET parent = ? WHERE ino = ?", (ROOT_INO, ROOT_INO)),),
            )


def _check_inodes(connection: sqlite3.Connection, paths: Paths) -> Iterator[Found]:
    """Kinds, sizes and targets that cannot be."""
    kinds = ", ".join(str(kind >> 12) for kind in _KINDS)
    link = stat.S_IFLNK >> 12
    rows = connection.execute(
        f"SELECT ino, mode, size, length(target) FROM inodes WHERE mode >> 12 NOT IN ({kinds})"
        " OR size < 0 OR size > ? OR allocated_bytes < 0 OR nlink < 0"
        f" OR (mode >> 12 = {link} AND (target IS NULL OR length(target) NOT BETWEEN 1 AND ?"
        " OR instr(target, x'00') > 0))",
        (FILE_BYTES_MAX, SYMLINK_BYTES_MAX),
    ).fetchall()
    for ino, mode, size, target_bytes in rows:
        what = f"mode {mode:o}, size {size}"
        if mode >> 12 == link:
            what += f", a target of {target_bytes or 0} bytes"
        text = f"{paths.show(ino)} has impossible attributes: {what}"
        yield Found(Finding(kind=Kind.INODE, text=text, ino=ino))


def _check_entries(
    connection: sqlite3.Connection, paths: Paths, lost: LostAndFound
) -> Iterator[Found]:
    """Names one by one."""
    rows = connection.execute(
        f"SELECT n.cookie, n.parent, n.name, n.ino, n.type, i.mode, d.ino, {has_content('n')}"
        " FROM names n"
        " LEFT JOIN inodes i ON i.ino = n.ino"
        f" LEFT JOIN inodes d ON d.ino = n.parent AND d.{_IS_DIRECTORY}"
        " WHERE i.ino IS NULL OR d.ino IS NULL OR n.type <> i.mode >> 12"
        " OR length(n.name) NOT BETWEEN 1 AND ? OR n.name IN (x'2e', x'2e2e')"
        " OR instr(n.name, x'2f') > 0 OR instr(n.name, x'00') > 0",
        (NAME_BYTES_MAX,),
    ).fetchall()
    for cookie, parent, name, ino, type_, mode, directory, is_kept in rows:
        if mode is None and is_kept:  # it gets an inode first
            continue
        where = f"the name '{show_name(name)}' in directory inode {parent}"
        path = show_name(paths.of(parent))
        if mode is None:
            text = f"{where} ({path or '/'}) is of inode {ino}, which is not there"
            statements: tuple[Statement, ...] = (("DELETE FROM names WHERE cookie = ?", (cookie,)),)
        elif directory is None:
            text = f"{where}, of inode {ino}: there is no such directory"
            statements = lost.move(cookie, ino)
        elif not is_name(name):
            text = f"{where} ({path or '/'}), of inode {ino}, is not one that a file can have"
            statements = lost.move(cookie, ino)
        else:
            kind = mode >> 12
            text = f"{where} ({path or '/'}) says that inode {ino} is of kind {type_}, not {kind}"
            statements = (("UPDATE names SET type = ? WHERE cookie = ?", (mode >> 12, cookie)),)
        yield Found(Finding(kind=Kind.NAME, text=text, ino=ino, path=path), statements)


class _Place(NamedTuple):
    """Where a directory is entered."""

    cookie: int
    parent: int


def _check_directories(
    connection: sqlite3.Connection, paths: Paths, lost: LostAndFound
) -> Iterator[Found]:
    """Each directory has one name, and is below the root."""
    rows = connection.execute(
        "SELECT n.ino, n.cookie, n.parent, i.parent FROM names n JOIN inodes i ON i.ino = n.ino"
        f" AND i.{_IS_DIRECTORY} ORDER BY n.ino, n.parent <> i.parent, n.cookie"
    ).fetchall()
    places: dict[int, _Place] = {}
    for ino, cookie, parent, noted in rows:
        if ino in places or ino == ROOT_INO:
            text = f"directory inode {ino} has another name, in directory inode {parent}"
            yield Found(
                Finding(kind=Kind.NAME, text=text, ino=ino),
                (("DELETE FROM names WHERE cookie = ?", (cookie,)),),
            )
            continue
        places[ino] = _Place(cookie, parent)
        if parent != noted:
            text = (
                f"directory {paths.show(ino)} says that its parent is inode {noted}, not {parent}"
            )
            yield Found(
                Finding(kind=Kind.LINKS, text=text, ino=ino),
                (("UPDATE inodes SET parent = ? WHERE ino = ?", (parent, ino)),),
                comes_of_repair=True,
            )
    for ino in _cycles(places):
        text = f"directory inode {ino} is below itself, and not below the root"
        yield Found(
            Finding(kind=Kind.UNNAMED, text=text, ino=ino), lost.move(places[ino].cookie, ino)
        )


def _cycles(places: dict[int, _Place]) -> Iterator[int]:
    """One directory of each circle of directories."""
    looked_at: dict[int, int] = {}
    for start in places:
        ino = start
        while ino in places and ino not in looked_at:
            looked_at[ino] = start
            ino = places[ino].parent
        if ino in places and looked_at[ino] == start:
            yield ino


def _check_links(
    connection: sqlite3.Connection, paths: Paths, lost: LostAndFound
) -> Iterator[Found]:
    """Inodes without a name, and counts of links."""
    connection.execute("DROP TABLE IF EXISTS temp.counted")
    connection.execute(
        "CREATE TEMP TABLE counted (ino INTEGER PRIMARY KEY, names INTEGER, folders INTEGER)"
    )
    connection.execute(
        "INSERT INTO counted SELECT i.ino,"
        " (SELECT count(*) FROM names n WHERE n.ino = i.ino)"
        " + (SELECT count(*) FROM former f WHERE f.ino = i.ino),"
        f" CASE WHEN i.{_IS_DIRECTORY} THEN (SELECT count(*) FROM names n JOIN inodes c"
        f"  ON c.ino = n.ino AND c.{_IS_DIRECTORY} WHERE n.parent = i.ino AND n.cookie >= ?)"
        " ELSE 0 END FROM inodes i",
        (NUMBER_FIRST,),
    )
    rows = connection.execute(
        "SELECT i.ino, i.mode, i.nlink, c.names, c.folders FROM inodes i JOIN counted c USING (ino)"
        f" WHERE i.nlink <> CASE WHEN i.{_IS_DIRECTORY} THEN c.folders + 2 ELSE c.names END"
        " OR (c.names = 0 AND i.nlink > 0)"
    ).fetchall()
    fixed = {ino: parent for ino, _permissions, parent, *_rest in FIXED_DIRECTORIES}
    for ino, mode, nlink, names, folders in rows:
        is_directory = mode >> 12 == _DIRECTORY
        # The root does not count `.fpfs`; `.fpfs` counts its directory.
        subfolders = folders + sum(parent == ino != ROOT_INO for parent in fixed.values())
        wanted = subfolders + 2 if is_directory else names
        if names == 0 and ino != ROOT_INO:
            if nlink > 0:
                text = f"inode {ino} has no name, and a count of links of {nlink}"
                yield Found(Finding(kind=Kind.UNNAMED, text=text, ino=ino), lost.enter(ino))
        elif nlink != wanted:
            text = f"{paths.show(ino)} has a count of links of {nlink}, not of {wanted}"
            yield Found(
                Finding(kind=Kind.LINKS, text=text, ino=ino, path=show_name(paths.of(ino))),
                (("UPDATE inodes SET nlink = ? WHERE ino = ?", (wanted, ino)),),
                comes_of_repair=True,
            )


def _check_former(connection: sqlite3.Connection) -> Iterator[Found]:
    """Former versions are of names, do not change, and are in no directory themselves."""
    rows = connection.execute(
        "SELECT f.ino, f.name, f.number, f.parent,"
        f" EXISTS (SELECT 1 FROM inodes d WHERE d.ino = f.parent AND d.{_IS_DIRECTORY}), i.kept,"
        f" i.mode >> 12 = {stat.S_IFREG >> 12},"
        " EXISTS (SELECT 1 FROM names n WHERE n.ino = f.ino)"
        " FROM former f JOIN inodes i ON i.ino = f.ino"
    ).fetchall()
    for ino, name, number, parent, has_parent, kept, is_file, is_named in rows:
        what = f"former version {number} of '{show_name(name)}' in directory inode {parent}"
        if not has_parent or not is_file or is_named:
            why = "is of no directory" if not has_parent else "is something else, too"
            yield Found(
                Finding(kind=Kind.NAME, text=f"{what} (inode {ino}) {why}", ino=ino),
                (
                    ("DELETE FROM former WHERE ino = ?", (ino,)),
                    ("UPDATE inodes SET kept = 0 WHERE ino = ?", (ino,)),
                ),
            )
        elif not kept:
            yield Found(
                Finding(kind=Kind.INODE, text=f"{what} (inode {ino}) could be changed", ino=ino),
                (("UPDATE inodes SET kept = 1 WHERE ino = ?", (ino,)),),
            )


def _check_leftovers(connection: sqlite3.Connection) -> Iterator[Found]:
    """What belongs to inodes that are not there, nor are to be made for a content."""
    for table in ("xattrs", "inline", "segments", "partials", "policies", "former", "withheld"):
        rows = connection.execute(
            f"SELECT ino, count(*) FROM {table} t WHERE NOT EXISTS"
            f" (SELECT 1 FROM inodes i WHERE i.ino = t.ino) AND NOT {has_content('t')} GROUP BY ino"
        ).fetchall()
        for ino, count in rows:
            text = f"{count} rows of {table} belong to inode {ino}, which is not there"
            yield Found(
                Finding(kind=Kind.INODE, text=text, ino=ino),
                ((f"DELETE FROM {table} WHERE ino = ?", (ino,)),),
                comes_of_repair=True,
            )


def _check_counter(connection: sqlite3.Connection) -> Iterator[Found]:
    """The next number is one that was never used."""
    largest, next_number = _largest_number(connection), _next_number(connection)
    if next_number <= largest:
        text = f"the next number is {next_number}, and {largest} is in use"
        correct = ("INSERT OR REPLACE INTO filesystem VALUES ('next_number', ?)", (largest + 1,))
        is_left = largest + 1 == _NUMBER_END  # there is no larger one
        yield Found(Finding(kind=Kind.STRUCTURE, text=text), () if is_left else (correct,))


def _largest_number(connection: sqlite3.Connection) -> int:
    (largest,) = connection.execute(
        "SELECT max((SELECT coalesce(max(ino), 0) FROM inodes),"
        " (SELECT coalesce(max(version), 0) FROM inodes),"
        " (SELECT coalesce(max(cookie), 0) FROM names),"
        " (SELECT coalesce(max(cookie), 0) FROM withheld),"
        " (SELECT coalesce(max(id), 0) FROM removals))"
    ).fetchone()
    return int(largest)


def _next_number(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT value FROM filesystem WHERE name = 'next_number'").fetchone()
    return row[0] if row and isinstance(row[0], int) else 0
