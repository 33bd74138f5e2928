"""Where the next version of a file goes, and how it is written: its policy, carried out.

Invariants:
  * What is staged for an inode is of the layout that the catalog has for it: a server that takes
    over goes by that. So a layout changes while nothing is staged, and is in the catalog before
    anybody can write.

Concurrency: trio thread only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fpfs.core.engine import Flow
from fpfs.core.placement import Placer, conforms, decode_layout, encode_layout
from fpfs.core.policy import First, Reads
from fpfs.daemon.catalog.rows.attributes import store_layout

if TYPE_CHECKING:
    from fpfs.core.engine import Engine, Layout
    from fpfs.core.policy import Policy
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.devices.free_space import DeviceSpace
    from fpfs.daemon.inodes.policies import Governed, Policies
    from fpfs.daemon.inodes.table import Inode

log = logging.getLogger(__name__)


class Placing:
    """Applies the policies of directories to their files."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        policies: Policies,
        space: DeviceSpace,
    ) -> None:
        """Measure `space` where a policy asks for it."""
        self._catalog = catalog
        self._engine = engine
        self._policies = policies
        self._space = space
        self._placer = Placer()
        self._stored: dict[Layout, bytes] = {}

    async def of_new_file(self, policy: Policy, name: bytes) -> bytes:
        """Return the layout of a file that is about to be made, as the catalog stores it."""
        return self._encode(await self._choose(policy, name))

    async def apply_policy(self, inode: Inode, *, begins: bool, is_emptied: bool) -> None:
        """Have a loaded inode that was just opened written and read as its policy says.

        It `begins` a version when its only writer has opened it. One that `is_emptied` takes its
        turn again among the devices; another keeps its layout where the policy allows that.
        """
        governed = await self._policies.of_file(inode.ino)
        policy = governed.policy
        self.flow(inode, policy)
        if begins:
            layout = decode_layout(inode.layout)
            devices = self._policies.mount.devices
            takes_turns = is_emptied and len(layout.devices) < len(devices)
            if takes_turns or not conforms(layout, policy, devices):
                await self._move(inode, governed, layout)

    def flow(self, inode: Inode, policy: Policy) -> None:
        """Let a loaded inode be written and read as a policy says."""
        inode.ack = policy.ack
        self._engine.set_flow(
            inode.ino,
            Flow(
                ack=policy.ack,
                depth=policy.depth,
                buffers=policy.buffers,
                is_cached=policy.reads is Reads.CACHED,
                read_ahead_bytes=policy.readahead_bytes,
            ),
        )

    async def _move(self, inode: Inode, governed: Governed, before: Layout) -> None:
        """Choose a layout again. The first writer waits for that, and nobody writes meanwhile."""
        layout = await self._choose(governed.policy, governed.name)
        stored = self._encode(layout)
        async with inode.lock:  # not in the middle of a drain or of a truncation
            if layout == before or inode.writers != 1:
                return
            try:
                self._engine.place(inode.ino, layout)
                await self._catalog.write(lambda t: store_layout(t, inode.ino, stored))
            except OSError as error:
                # Something is staged (EBUSY), or the catalog has no room: a writer can do without.
                log.debug("inode %d keeps its layout: %s", inode.ino, error)
                self._engine.place(inode.ino, before)
                return
            except BaseException:
                self._engine.place(inode.ino, before)
                raise
            inode.layout = stored

    async def _choose(self, policy: Policy, name: bytes) -> Layout:
        devices = self._policies.mount.devices
        bytes_free = None
        if policy.first is First.LEAST_USED:
            bytes_free = await self._space.free_by_device()
        return self._placer.layout(policy, name, devices, bytes_free)

    def _encode(self, layout: Layout) -> bytes:
        if layout not in self._stored:
            self._stored[layout] = encode_layout(layout)
        return self._stored[layout]
