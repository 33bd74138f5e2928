"""Former versions of names: what a policy `versions=N` keeps when a content is replaced.

A former version is an inode of its own, which does not change any more. It shares the blocks that
it has in common with what took its place (`rows.shared_extents`). A name's former versions are
numbered; they are seen under `.fpfs/versions`, a view: for each directory there is one in which its
former versions are, as NAME@NUMBER, beside the views of the directories in it.

Invariants:
  * A row of `former` has an inode with `kept` set and one link, and the other way round.
  * The number of a directory's view is the directory's own plus `VIEW_BASE`; that of the root's is
    VERSIONS_INO.

Concurrency: every function runs in the catalog's worker, inside its transaction.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.errors import InvalidOperation, NoSuchEntry
from fpfs.daemon.catalog.rows.attributes import INODE_COLUMNS, InodeRow, fetch_inode
from fpfs.daemon.catalog.rows.clone import split_off
from fpfs.daemon.catalog.rows.dirents import DIRECTORY_TYPE, Entry, touch_directory
from fpfs.daemon.catalog.schema import FPFS_INO, ROOT_INO, VERSIONS_INO, VIEW_BASE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fpfs.daemon.catalog.executor import Transaction

REGULAR_TYPE = stat.S_IFREG >> 12


class Former(NamedTuple):
    """A former version of a name. `time_ns` is when another took its place."""

    ino: int
    number: int
    size: int
    mtime_ns: int
    time_ns: int


class Gone(NamedTuple):
    """A former version that was given up: its inode, and its name in a view."""

    ino: int
    view: int
    name: bytes


class Changed(NamedTuple):
    """How many former versions a transaction made, and those that it gave up."""

    made: int
    gone: tuple[Gone, ...] = ()


NOTHING = Changed(0)


class Restored(NamedTuple):
    """The inode that a restored content replaced, the links it has left, and what else changed."""

    replaced: int
    nlink: int
    changed: Changed


def view_of(directory: int) -> int:
    """Return the number of a directory's view."""
    return VERSIONS_INO if directory == ROOT_INO else VIEW_BASE + directory


def is_view(ino: int) -> bool:
    """Whether a number is a view's."""
    return ino == VERSIONS_INO or ino >= VIEW_BASE


def directory_of(view: int) -> int:
    """Return the directory that a view is of."""
    return ROOT_INO if view == VERSIONS_INO else view - VIEW_BASE


def keep(
    transaction: Transaction, ino: int, parent: int, name: bytes, *, count: int, now_ns: int
) -> Changed:
    """Keep the committed content of an inode, which is about to be replaced under a name.

    At most `count` are kept; the oldest go, and have no link then. An empty content is not worth
    keeping.
    """
    (size,) = transaction.execute("SELECT size FROM inodes WHERE ino = ?", (ino,)).fetchone()
    if size == 0:
        return NOTHING
    made = split_off(transaction, ino, nlink=1)
    transaction.execute("UPDATE inodes SET kept = 1 WHERE ino = ?", (made,))
    (last,) = transaction.execute(
        "SELECT coalesce(max(number), 0) FROM former WHERE parent = ? AND name = ?", (parent, name)
    ).fetchone()
    transaction.execute(
        "INSERT INTO former VALUES (?, ?, ?, ?, ?)", (made, parent, name, last + 1, now_ns)
    )
    return Changed(1, prune(transaction, parent, name, count=count).gone)


def prune(transaction: Transaction, parent: int, name: bytes, *, count: int) -> Changed:
    """Drop the oldest former versions of a name beyond `count`."""
    rows = transaction.execute(
        "SELECT ino FROM former WHERE parent = ? AND name = ? ORDER BY number DESC"
        " LIMIT -1 OFFSET ?",
        (parent, name, count),
    ).fetchall()
    return _drop(transaction, [ino for (ino,) in rows])


def _drop(transaction: Transaction, inos: Sequence[int]) -> Changed:
    """Take the links of former versions; their inodes can be deleted then."""
    gone = []
    for ino in inos:
        parent, name = transaction.execute(
            "DELETE FROM former WHERE ino = ?"
            " RETURNING parent, CAST(name || '@' || number AS BLOB)",
            (ino,),
        ).fetchone()
        transaction.execute("UPDATE inodes SET nlink = 0 WHERE ino = ?", (ino,))
        gone.append(Gone(ino, view_of(parent), name))
    return Changed(0, tuple(gone))


def drop_oldest(transaction: Transaction, *, size_bytes: int, count: int) -> Changed:
    """Drop the former versions of any names that were replaced first.

    As many as have `size_bytes` together, but not more than `count`.
    """
    rows = transaction.execute(
        "SELECT f.ino, i.allocated_bytes FROM former f JOIN inodes i ON i.ino = f.ino"
        " ORDER BY f.time_ns, f.ino LIMIT ?",
        (count,),
    ).fetchall()
    return _drop(transaction, as_many_as(rows, size_bytes))


def as_many_as(rows: Iterable[tuple[int, int]], size_bytes: int) -> list[int]:
    """Return the first inodes, of rows with what each has allocated, that have so much together."""
    chosen = []
    for ino, allocated_bytes in rows:
        chosen.append(ino)
        size_bytes -= allocated_bytes
        if size_bytes <= 0:
            break
    return chosen


def count_former(transaction: Transaction) -> int:
    """Return how many former versions there are."""
    (count,) = transaction.execute("SELECT count(*) FROM former").fetchone()
    return int(count)


def move(
    transaction: Transaction,
    source: tuple[int, bytes],
    destination: tuple[int, bytes],
    *,
    count: int,
) -> Changed:
    """Let former versions follow a name that was moved; those beyond `count` go."""
    (last,) = transaction.execute(
        "SELECT coalesce(max(number), 0) FROM former WHERE parent = ? AND name = ?", destination
    ).fetchone()
    moved = transaction.execute(
        "UPDATE former SET parent = ?, name = ?, number = number + ? WHERE parent = ? AND name = ?",
        (*destination, last, *source),
    ).rowcount
    return prune(transaction, *destination, count=count) if moved else NOTHING


def list_former(transaction: Transaction, parent: int, name: bytes) -> list[Former]:
    """Return the former versions of a name, the oldest first."""
    rows = transaction.execute(
        "SELECT f.ino, f.number, i.size, i.mtime_ns, f.time_ns FROM former f"
        " JOIN inodes i ON i.ino = f.ino WHERE f.parent = ? AND f.name = ? ORDER BY f.number",
        (parent, name),
    ).fetchall()
    return [Former._make(row) for row in rows]


def find(transaction: Transaction, parent: int, name: bytes, number: int) -> int:
    """Return the inode of a former version; `NoSuchEntry` when there is none."""
    row = transaction.execute(
        "SELECT ino FROM former WHERE parent = ? AND name = ? AND number = ?",
        (parent, name, number),
    ).fetchone()
    if row is None:
        raise NoSuchEntry(
            f"no version {number} of it is kept", remedy="see fpfs-ctl versions for those that are"
        )
    return int(row[0])


def restore(
    transaction: Transaction, parent: int, name: bytes, number: int, *, count: int, now_ns: int
) -> Restored:
    """Let a copy of a former version take the place of a name's content, which is kept.

    Raises `NoSuchEntry`, `InvalidOperation` when the name leads to something else than a file.
    """
    former = find(transaction, parent, name, number)
    row = transaction.execute(
        "SELECT n.cookie, n.ino, i.mode FROM names n JOIN inodes i ON i.ino = n.ino"
        " WHERE n.parent = ? AND n.name = ?",
        (parent, name),
    ).fetchone()
    if row is None:
        raise NoSuchEntry(f"{name!r} does not exist in directory {parent}")
    cookie, present, mode = row
    if not stat.S_ISREG(mode):
        raise InvalidOperation(f"inode {present} is not a regular file")
    made = split_off(transaction, former, nlink=1)
    transaction.execute(
        "UPDATE inodes SET version = ? WHERE ino = ?", (transaction.take_number(), made)
    )
    transaction.touch(made)
    changed = keep(transaction, present, parent, name, count=count, now_ns=now_ns)
    transaction.execute("UPDATE names SET ino = ? WHERE cookie = ?", (made, cookie))
    (nlink,) = transaction.execute(
        "UPDATE inodes SET nlink = nlink - 1, ctime_ns = ? WHERE ino = ? RETURNING nlink",
        (now_ns, present),
    ).fetchone()
    touch_directory(transaction, parent, now_ns)
    return Restored(present, nlink, changed)


# The view.


def fetch_view(transaction: Transaction, view: int) -> InodeRow:
    """Return the row of a view: read-only, with times and owner of its directory."""
    row = fetch_inode(transaction, directory_of(view))
    if not stat.S_ISDIR(row.mode) or row.nlink == 0:
        raise NoSuchEntry(f"directory {row.ino} was removed")
    return _view_row(row)


def _view_row(row: InodeRow) -> InodeRow:
    is_root = row.ino == ROOT_INO
    return row._replace(
        ino=view_of(row.ino),
        mode=stat.S_IFDIR | 0o555 & row.mode,
        nlink=2,
        parent=FPFS_INO if is_root else view_of(row.parent),
        kept=1,
        has_xattrs=False,
    )


def look_up_in_view(transaction: Transaction, view: int, name: bytes) -> InodeRow | None:
    """Return what a name in a view leads to: a former version, the view of a directory, or None."""
    directory = directory_of(view)
    base, _, number = name.rpartition(b"@")
    if base and number.isdigit() and len(number) < 10 and str(int(number)).encode() == number:
        row = transaction.execute(
            f"SELECT {INODE_COLUMNS} FROM former f JOIN inodes i ON i.ino = f.ino"
            " WHERE f.parent = ? AND f.name = ? AND f.number = ?",
            (directory, base, int(number)),
        ).fetchone()
        if row is not None:
            return InodeRow._make(row)
    row = transaction.execute(
        f"SELECT {INODE_COLUMNS} FROM names n JOIN inodes i ON i.ino = n.ino"
        " WHERE n.parent = ? AND n.name = ? AND n.type = ? AND n.ino <> ?",
        (directory, name, DIRECTORY_TYPE, FPFS_INO),
    ).fetchone()
    return None if row is None else _view_row(InodeRow._make(row))


def list_view(
    transaction: Transaction, view: int, *, after_cookie: int, below_cookie: int, count: int
) -> list[Entry]:
    """Return up to `count` entries of a view between two cookies, in the order of cookies.

    A former version's cookie is its inode's number, which comes from the same counter.
    """
    rows = transaction.execute(
        f"SELECT n.cookie, n.name, {INODE_COLUMNS} FROM names n JOIN inodes i ON i.ino = n.ino"
        " WHERE n.parent = ?1 AND n.type = ?5 AND n.ino <> ?6 AND n.cookie > ?2 AND n.cookie < ?3"
        f" UNION ALL SELECT f.ino, CAST(f.name || '@' || f.number AS BLOB), {INODE_COLUMNS}"
        " FROM former f JOIN inodes i ON i.ino = f.ino"
        " WHERE f.parent = ?1 AND f.ino > ?2 AND f.ino < ?3 ORDER BY 1 LIMIT ?4",
        (directory_of(view), after_cookie, below_cookie, count, DIRECTORY_TYPE, FPFS_INO),
    ).fetchall()
    entries = []
    for cookie, name, *values in rows:
        row = InodeRow._make(values)
        is_directory = stat.S_ISDIR(row.mode)
        entries.append(Entry(cookie, name, _view_row(row) if is_directory else row))
    return entries
