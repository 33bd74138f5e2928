"""Steps of a drain beside programs that remove what is to be moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio.testing

from fpfs.daemon.maintenance.evacuate import Draining
from tests.support.catalog.rig import rig


@trio.testing.trio_test
async def test_a_file_that_is_removed_meanwhile_is_none_to_hold(tmp_path: Path) -> None:
    """Between a look at who refers to the blocks and the next: what is left then is moved."""
    async with rig(tmp_path) as mount:
        unused: Any = None
        draining = Draining(
            catalog=mount.catalog,
            engine=unused,
            inodes=mount.inodes,
            registry=unused,
            removals_recorded=mount.commit.removals_recorded,
        )
        await mount.write_file("file", b"content")
        await mount.commit.make_names_durable()
        inode = await draining._hold((await mount.resolve("file")).ino)
        assert inode is not None
        mount.inodes.release(inode)
        assert await draining._hold(inode.ino + 1000) is None
