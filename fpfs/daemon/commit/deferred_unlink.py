"""Names that were removed before everything that was closed earlier is current.

`rows.deferred_unlink` says why they are kept for a while. Here are the inodes that wait with them.

Concurrency: trio thread only; used by `pipeline`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.paths import show_name
from fpfs.daemon.catalog.rows import deferred_unlink

if TYPE_CHECKING:
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.inodes.table import Inode, InodeTable

log = logging.getLogger(__name__)


class _Held(NamedTuple):
    """An inode that waits for version `mark`, with a row in the catalog."""

    mark: int
    number: int
    """Of this removal: it makes two that wait for one version comparable."""
    inode: Inode


class DeferredUnlinks:
    """The inodes of deferred unlinks, each with the number of the version that it waits for."""

    def __init__(self, *, catalog: Catalog, inodes: InodeTable) -> None:
        """Start with none."""
        self._catalog = catalog
        self._inodes = inodes
        self._held: list[_Held] = []
        """A heap: a commit looks at what it makes final, not at all that waits."""
        self._numbers = itertools.count()
        self._without_row: list[Inode] = []
        """Those whose rows went with the transaction that they waited for."""
        self._passed = 0
        """The last version that has been kept, with all before it."""

    def hold(self, inode: Inode, *, mark: int) -> None:
        """Keep an inode whose name was removed until versions up to `mark` have been kept.

        Called, as is `finalized`, in the order of the catalog's transactions.
        """
        inode.users += 1
        inode.deferred_unlinks += 1
        heapq.heappush(self._held, _Held(mark, next(self._numbers), inode))

    @staticmethod
    def finalize(transaction: Transaction, mark: int) -> None:
        """Make final, with the transaction that makes a version current, what waited for it."""
        deferred_unlink.finalize(transaction, mark)

    def finalized(self, mark: int) -> None:
        """Note that this transaction was carried out: rows of later ones are not gone with it."""
        self._without_row += self._take(mark)

    @property
    def waiting(self) -> bool:
        """Whether any removal is not final yet."""
        return bool(self._held)

    def _take(self, mark: int) -> list[Inode]:
        """Return, and wait no longer with, what waits for versions up to `mark`."""
        taken = []
        while self._held and self._held[0].mark <= mark:
            taken.append(heapq.heappop(self._held).inode)
        return taken

    async def catch_up(self) -> None:
        """Release what became current while its name was being removed."""
        await self.pass_by(self._passed)

    async def pass_by(self, mark: int) -> None:
        """Release what waited for versions up to `mark`, which have been kept."""
        self._passed = max(self._passed, mark)
        without_row, self._without_row = self._without_row, []
        with_row = self._take(mark)
        if with_row:
            await self._forget_rows(mark)
        for inode in (*without_row, *with_row):
            inode.deferred_unlinks -= 1
            self._inodes.release(inode)

    async def _forget_rows(self, mark: int) -> None:
        try:
            await self._catalog.write_urgently(partial(deferred_unlink.finalize, mark=mark))
        except OSError as error:
            # Power loss would bring names back that are not looked for any more: no harm.
            log.error("names that were removed may come back after power loss: %s", error)

    async def take_over(self, *, mark: int) -> frozenset[int]:
        """Go on for a server that died; returns the inodes that wait for version `mark` now.

        0: there is nothing to wait for.
        """
        inos = await self._catalog.read(deferred_unlink.list_deferred)
        if not inos:
            return frozenset()
        if not mark:
            await self._catalog.write_urgently(partial(deferred_unlink.finalize, mark=1 << 62))
            return frozenset()
        await self._catalog.write_urgently(partial(deferred_unlink.mark_anew, mark=mark))
        for ino in inos:
            self.hold(await self._inodes.get(ino), mark=mark)
        return frozenset(inos)

    async def put_back(self) -> None:
        """Put names back after power loss: what was closed before their removal is lost."""
        if not await self._catalog.read(deferred_unlink.list_deferred):
            return
        for path in await self._catalog.write_urgently(deferred_unlink.put_back):
            log.warning(
                "%s was removed after something was saved that is lost: it is back",
                show_name(path),
            )
