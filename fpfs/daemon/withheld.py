"""Names that were removed before everything that was closed earlier is current.

`catalog_withheld` says why they are kept for a while. Here are the inodes that wait with them.

Concurrency: trio thread only; used by `commit`.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from fpfs.daemon import catalog_withheld

if TYPE_CHECKING:
    from fpfs.daemon.catalog import Catalog
    from fpfs.daemon.inodes import Inode, InodeTable

log = logging.getLogger(__name__)


class Withheld:
    """The inodes whose names are withheld, each with the number of the version it waits for."""

    def __init__(self, *, catalog: Catalog, inodes: InodeTable) -> None:
        """Start with none."""
        self._catalog = catalog
        self._inodes = inodes
        self._held: list[tuple[int, Inode]] = []
        self._passed = 0
        """The last version that is current or given up."""

    async def hold(self, inode: Inode, *, mark: int) -> None:
        """Keep an inode whose name was removed until version `mark` is current or given up."""
        inode.users += 1
        inode.withheld += 1
        self._held.append((mark, inode))
        if mark <= self._passed:  # it became current while the name was being removed
            await self.pass_by(self._passed)

    def is_held(self, inode: Inode) -> bool:
        """Whether an inode waits."""
        return inode.withheld > 0

    async def pass_by(self, mark: int) -> None:
        """Let go what waited for versions up to `mark`."""
        self._passed = max(self._passed, mark)
        freed = [inode for number, inode in self._held if number <= mark]
        if not freed:
            return
        self._held = [each for each in self._held if each[0] > mark]
        try:
            await self._catalog.write_urgently(partial(catalog_withheld.let_go, mark=mark))
        except OSError as error:
            # Power loss would bring names back that are not looked for any more: no harm.
            log.error("names that were removed may come back after power loss: %s", error)
        for inode in freed:
            inode.withheld -= 1
            self._inodes.release(inode)

    async def take_over(self, *, mark: int) -> frozenset[int]:
        """Go on for a server that died; returns the inodes that wait for version `mark` now.

        0: there is nothing to wait for.
        """
        inos = await self._catalog.read(catalog_withheld.list_withheld)
        if not inos:
            return frozenset()
        if not mark:
            await self._catalog.write_urgently(partial(catalog_withheld.let_go, mark=1 << 62))
            return frozenset()
        await self._catalog.write_urgently(partial(catalog_withheld.mark_anew, mark=mark))
        for ino in inos:
            await self.hold(await self._inodes.get(ino), mark=mark)
        return frozenset(inos)

    async def put_back(self) -> None:
        """Put names back after power loss: what was closed before their removal is lost."""
        if not await self._catalog.read(catalog_withheld.list_withheld):
            return
        for path in await self._catalog.write_urgently(catalog_withheld.put_back):
            log.warning(
                "%s was removed after something was saved that the loss of power took: it is back",
                os.fsdecode(path),
            )
