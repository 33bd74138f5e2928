"""Former versions: kept where a policy says so, listed, restored, and given up when space is short.

The transactions are in `rows.versions`. What is kept is decided in them, in the catalog's
worker (`of_version`, `of_replaced`, `of_removed`, `of_moved`); what follows for inodes in memory is
done here, when they are delivered.

Concurrency: trio thread, but for the functions named above.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import TYPE_CHECKING

import trio

from fpfs.core.errors import BusyFile, NoSuchEntry
from fpfs.core.paths import show_name
from fpfs.core.policy import Replace
from fpfs.core.protocol.reports import FormerVersion, VersionsShown
from fpfs.core.units import format_size
from fpfs.daemon.catalog.rows import dirents, versions
from fpfs.daemon.catalog.rows.dirents import path_of
from fpfs.daemon.catalog.rows.versions import NOTHING
from fpfs.daemon.catalog.schema import FIXED_DIRECTORIES, ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.dirents import Name
    from fpfs.daemon.catalog.rows.versions import Changed, Restored
    from fpfs.daemon.commit.groups import Groups
    from fpfs.daemon.inodes.policies import Policies
    from fpfs.daemon.inodes.table import Inode, InodeTable

log = logging.getLogger(__name__)

GIVEN_UP_BYTES = 8 * 1024 * 1024
GIVEN_UP_MAX = 64
"""What is given up in one step when space is short: so many bytes, but not more contents."""

NAMES_INVALIDATED_S = 10
"""How long a restored content may wait for the kernel to forget the one before."""

_FIXED = frozenset(ino for ino, *_rest in FIXED_DIRECTORIES)
"""Nothing is kept of what is in these directories themselves."""


class Versions:
    """Former versions of names."""

    def __init__(
        self, *, catalog: Catalog, engine: Engine, inodes: InodeTable, policies: Policies
    ) -> None:
        """Keep nothing before `load`."""
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes
        self._policies = policies
        self.count = 0
        """Former versions that there are."""

    async def load(self) -> None:
        """Count what there is."""
        self.count = await self._catalog.read(versions.count_former)
        if self.count:
            self._engine.set_gives_way()

    @property
    def is_used(self) -> bool:
        """Whether former versions are there, or may come to be."""
        return self.count > 0 or self._policies.any_sets("versions")

    # In transactions.

    def of_version(self, transaction: Transaction, ino: int) -> list[Changed]:
        """Keep what a version is about to replace, under each name of its inode."""
        if not self._policies.any_sets("versions"):
            return []
        changed = []
        names = transaction.execute(
            "SELECT parent, name FROM names WHERE ino = ?", (ino,)
        ).fetchall()
        for parent, name in names:
            policy = self._policies.effective(transaction, parent)
            if policy.versions and policy.replace is Replace.WHOLE and parent not in _FIXED:
                changed.append(self._keep(transaction, ino, parent, name, policy.versions))
        return changed

    def of_replaced(
        self, transaction: Transaction, parent: int, name: bytes, replaced: Name
    ) -> Changed:
        """Keep the content of a file that loses its name to another."""
        is_file = replaced.type == versions.REGULAR_TYPE
        if not is_file or not self._policies.any_sets("versions"):
            return NOTHING
        count = self._policies.effective(transaction, parent).versions
        if not count or parent in _FIXED:
            return NOTHING
        return self._keep(transaction, replaced.ino, parent, name, count)

    def _keep(
        self, transaction: Transaction, ino: int, parent: int, name: bytes, count: int
    ) -> Changed:
        return versions.keep(transaction, ino, parent, name, count=count, now_ns=time.time_ns())

    def of_removed(self, transaction: Transaction, parent: int, name: bytes) -> Changed:
        """Drop the former versions of a name that is removed."""
        if not self.is_used:
            return NOTHING
        return versions.prune(transaction, parent, name, count=0)

    def of_moved(
        self, transaction: Transaction, source: tuple[int, bytes], destination: tuple[int, bytes]
    ) -> Changed:
        """Let the former versions of a name follow it."""
        if not self.is_used:
            return NOTHING
        count = self._policies.effective(transaction, destination[0]).versions
        return versions.move(transaction, source, destination, count=count)

    async def apply(self, changes: Sequence[Changed]) -> list[Inode]:
        """Count what transactions have made, and drop what they have given up; returns that."""
        given_up = []
        for changed in changes:
            self.count += changed.made - len(changed.gone)
            self._inodes.count += changed.made
            if changed.made:
                self._engine.set_gives_way()
            for ino, view, name in changed.gone:
                inode = await self._inodes.get(ino)
                inode.nlink = 0
                if inode.lookups:
                    self._engine.invalidate_name(view, name)
                self._inodes.drop_if_unused(inode)
                given_up.append(inode)
        return given_up

    # What the tools ask for.

    async def show(self, directory: int, name: bytes) -> VersionsShown:
        """Return the former versions of a name."""
        return await self._catalog.read(lambda t: _show(t, directory, name))

    async def find_present(self, directory: int, name: bytes, number: int) -> int:
        """Return the inode of a name that has a former version `number`.

        Raises `NoSuchEntry`.
        """

        def find(transaction: Transaction) -> int:
            versions.find(transaction, directory, name, number)
            row = dirents.look_up(transaction, directory, name)
            if row is None:
                raise NoSuchEntry(f"{show_name(name)} was removed: make it anew to restore it")
            return row.ino

        return await self._catalog.read(find)

    async def restore(
        self, directory: int, name: bytes, number: int, *, groups: Groups
    ) -> VersionsShown:
        """Make a former version the present one; what was there is kept, and `groups` note it.

        Everything queued is current. Raises `NoSuchEntry`, `InvalidOperation`, `BusyFile`,
        `NoSpace`.
        """
        parent = await self._inodes.get(directory)
        present = await self._inodes.get(await self.find_present(directory, name, number))
        if present.writers or present.pending:
            raise BusyFile("somebody is writing to it: wait until it is closed")
        present.users += 1
        # Who opens it from now on looks its name up again, which comes behind the transaction.
        present.stale = True
        try:
            done = await self._replace(parent, name, number, present, groups)
        except BaseException:
            present.stale = False
            raise
        finally:
            self._inodes.release(present)
        self._engine.invalidate_name(directory, name)
        self._engine.invalidate(directory)
        await self.apply([done.changed])
        # Who asked reads the name next.
        with trio.move_on_after(NAMES_INVALIDATED_S) as waiting:
            await self._engine.names_invalidated()
        if waiting.cancelled_caught:
            log.warning(
                "%s: programs see the restored content when one that holds its directory goes on",
                show_name(name),
            )
        return await self.show(directory, name)

    async def _replace(
        self, parent: Inode, name: bytes, number: int, present: Inode, groups: Groups
    ) -> Restored:
        """Let a copy of a former version take the place of what a name has at `present`."""
        now_ns = time.time_ns()
        directory = parent.ino

        def replace(transaction: Transaction) -> Restored:
            count = max(self._policies.effective(transaction, directory).versions, 1)
            done = versions.restore(
                transaction, directory, name, number, count=count, now_ns=now_ns
            )
            if done.replaced != present.ino:
                raise BusyFile("somebody has just replaced it: see what it is now")
            return done

        def replaced(done: Restored) -> Restored:
            self._inodes.count += 1
            self._inodes.names_changed(parent, now_ns)
            present.nlink = done.nlink
            present.stale = done.nlink == 0
            self._inodes.changed(present, ctime_ns=now_ns)
            return done

        return await self._catalog.write(groups.making(directory, name, replace), apply=replaced)

    async def give_up_oldest(self) -> list[Inode]:
        """Give up some former versions, the oldest first; returns their inodes."""
        if not self.count:
            return []
        changed = await self._catalog.write_urgently(
            partial(versions.drop_oldest, size_bytes=GIVEN_UP_BYTES, count=GIVEN_UP_MAX)
        )
        log.info("the devices are full: gave up %d former versions", len(changed.gone))
        return await self.apply([changed])

    async def gives_up_at_once(self, inode: Inode) -> bool:
        """Whether a content that is truncated gives up its space before it is replaced."""
        if not self._policies.any_sets("replace"):
            return False

        def find(transaction: Transaction) -> bool:
            names = transaction.execute(
                "SELECT DISTINCT parent FROM names WHERE ino = ?", (inode.ino,)
            ).fetchall()
            return any(
                self._policies.effective(transaction, parent).replace is Replace.INPLACE
                for (parent,) in names
            )

        return await self._catalog.read(find)

    async def say_refused(self, ino: int) -> None:
        """Say in the log that a write found no space, and what would help."""

        def look(transaction: Transaction) -> tuple[bytes, int]:
            row = transaction.execute(
                "SELECT allocated_bytes FROM inodes WHERE ino = ?", (ino,)
            ).fetchone()
            return path_of(transaction, ino), row[0] if row else 0

        try:
            path, allocated_bytes = await self._catalog.read_many(look)
        except OSError as error:
            log.error("no space for inode %d, of which the catalog tells nothing: %s", ino, error)
            return
        name = show_name(path) or f"inode {ino}"
        if allocated_bytes:
            log.warning(
                "no space for %s: overwriting needs the space of both contents, and the one before"
                " holds %s until the new one is whole; make room, or give it up first"
                " (fpfs-ctl policy set DIRECTORY replace=inplace)",
                name,
                format_size(allocated_bytes),
            )
        else:
            log.info("no space for %s", name)


def _show(transaction: Transaction, directory: int, name: bytes) -> VersionsShown:
    above = path_of(transaction, directory) + b"/" if directory != ROOT_INO else b""
    shown = []
    for former in versions.list_former(transaction, directory, name):
        path = b".fpfs/versions/%s%s@%d" % (above, name, former.number)
        shown.append(
            FormerVersion(
                number=former.number,
                size=former.size,
                time_unix_s=former.mtime_ns / 1e9,
                replaced_unix_s=former.time_ns / 1e9,
                path=os.fsdecode(path).encode(errors="backslashreplace").decode(),
            )
        )
    return VersionsShown(versions=tuple(shown))
