"""A SQLite database on the mount: rollback journal and WAL, two processes, killed writers."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.testing.mounted import IN_MEMORY
from tests.support.processes import expect_line, python_child, tell
from tests.support.seeds import IS_LONG
from tests.support.target import Target, open_target

pytestmark = pytest.mark.clients

ROWS_EACH = 120 if IS_LONG else 60
WRITER = f"""
import sqlite3, sys
path, journal, writer = sys.argv[1], sys.argv[2], int(sys.argv[3])
database = sqlite3.connect(path, timeout=600)
database.execute(f"pragma journal_mode={{journal}}")
print("ready", flush=True)
sys.stdin.readline()
for number in range({ROWS_EACH}):
    with database:
        database.execute("begin immediate")
        (total,) = database.execute("select total from sums").fetchone()
        blob = bytes((writer + number) % 251 for _ in range(number * 7))
        database.execute("insert into entries values (?, ?, ?)", (writer, number, blob))
        database.execute("update sums set total = ?", (total + 1,))
database.close()
print("done", flush=True)
"""
INTERRUPTED = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("pragma cache_size=1")
database.execute("begin immediate")
database.execute("update entries set content = zeroblob(5000)")
print("changed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """One for all tests of this module: each transaction waits for several flushes."""
    with open_target(parent=IN_MEMORY) as opened:
        yield opened


def create(path: Path, journal: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"pragma journal_mode={journal}")
        database.execute("create table entries (writer, number, content)")
        database.execute("create table sums (total)")
        database.execute("insert into sums values (0)")
        database.commit()


def check(path: Path, *, writers: int) -> None:
    """The database is sound, and holds every transaction of every writer once."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        assert database.execute("select total from sums").fetchone() == (writers * ROWS_EACH,)
        for writer in range(writers):
            rows = database.execute(
                "select number, content from entries where writer = ? order by number", (writer,)
            ).fetchall()
            expected = [
                (number, bytes((writer + number) % 251 for _ in range(number * 7)))
                for number in range(ROWS_EACH)
            ]
            assert rows == expected


@pytest.mark.parametrize("journal", ["delete", "truncate", "persist", "wal"])
def test_two_writing_processes(target: Target, directory: Path, journal: str) -> None:
    path = directory / "data.db"
    create(path, journal)
    with (
        python_child(WRITER, path, journal, 0) as one,
        python_child(WRITER, path, journal, 1) as other,
    ):
        for child in (one, other):
            expect_line(child, "ready")
        for child in (one, other):
            tell(child)
        for child in (one, other):
            expect_line(child, "done")
    check(path, writers=2)
    target.remount()
    check(path, writers=2)


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_a_killed_transaction_is_rolled_back(directory: Path, journal: str) -> None:
    """A writer dies with half of its changes in the file; the next opener undoes them."""
    path = directory / "data.db"
    create(path, journal)
    with python_child(WRITER, path, journal, 0) as child:
        expect_line(child, "ready")
        tell(child)
        expect_line(child, "done")
    with python_child(INTERRUPTED, path) as child:
        expect_line(child, "changed")
        child.kill()
        child.wait()
    check(path, writers=1)


def test_vacuum_shrinks_the_file(directory: Path) -> None:
    path = directory / "data.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("create table blobs (content)")
        database.execute("begin")
        for _ in range(200):
            database.execute("insert into blobs values (randomblob(20000))")
        database.execute("commit")
        before = path.stat().st_size
        database.execute("delete from blobs where rowid % 10 <> 0")
        kept = database.execute("select content from blobs").fetchall()
        database.execute("vacuum")
        assert database.execute("select content from blobs").fetchall() == kept
    assert path.stat().st_size < before / 5
