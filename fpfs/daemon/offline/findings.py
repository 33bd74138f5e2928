"""What a check finds, and what would correct it.

A correction is SQL, so that it can be tried on an image of the catalog and then be done to the
catalog itself in one transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fpfs.core.fsck import Finding
from fpfs.core.paths import show_name

if TYPE_CHECKING:
    import sqlite3

    from fpfs.core.engine import ObjectId

Statement: TypeAlias = tuple[str, tuple[Any, ...]]
"""SQL, and its values."""


class Found(NamedTuple):
    """Something wrong. `statements` correct the catalog, `removals` are objects to be removed.

    Without either nothing can be done about it. `comes_of_repair` says that correcting something
    else may bring it about, so that it is no news then.
    """

    finding: Finding
    statements: tuple[Statement, ...] = ()
    removals: tuple[ObjectId, ...] = ()
    comes_of_repair: bool = False


PATH_PARTS_MAX = 2_000


class Paths:
    """Paths of inodes in an image, for reports."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Index the names by inode, which the catalog does not."""
        self._connection = connection
        connection.execute("CREATE INDEX IF NOT EXISTS image_names ON names (ino)")

    def of(self, ino: int) -> bytes:
        """A path of an inode from the root, or nothing when it has none."""
        parts: list[bytes] = []
        while ino != 1:
            row = self._connection.execute(
                "SELECT parent, name FROM names WHERE ino = ? ORDER BY cookie LIMIT 1", (ino,)
            ).fetchone()
            if row is None or len(parts) > PATH_PARTS_MAX:
                return b""
            ino, name = row
            parts.append(name)
        return b"/".join(reversed(parts))

    def show(self, ino: int) -> str:
        """Path and number of an inode, for people."""
        path = self.of(ino)
        return f"{show_name(path) if path else 'a file without a name'} (inode {ino})"
