"""Steps of a drain beside programs that remove what is to be moved, and steps that fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from fpfs.core.engine import CopiedRange, Damage
from fpfs.core.errors import CatalogError
from fpfs.core.protocol.reports import DrainCursor
from fpfs.daemon.maintenance.evacuate import Draining
from tests.support.catalog.rig import LARGE, Rig, rig


def draining_of(mount: Rig, engine: Any) -> Draining:
    """What the steps of drains use, with devices that nobody asks for."""
    unused: Any = None
    return Draining(
        catalog=mount.catalog,
        engine=engine,
        inodes=mount.inodes,
        registry=unused,
        removals_recorded=mount.commit.removals_recorded,
        ask_again=mount.commit.ask_again,
    )


@trio.testing.trio_test
async def test_a_file_that_is_removed_meanwhile_is_none_to_hold(tmp_path: Path) -> None:
    """Between a look at who refers to the blocks and the next: what is left then is moved."""
    async with rig(tmp_path) as mount:
        draining = draining_of(mount, None)
        await mount.write_file("file", b"content")
        await mount.commit.make_names_durable()
        inode = await draining._hold((await mount.resolve("file")).ino)
        assert inode is not None
        mount.inodes.release(inode)
        assert await draining._hold(inode.ino + 1000) is None


class Copying:
    """An engine that copies ranges, and makes an object of them."""

    async def copy(self, to: int, ranges: Sequence[CopiedRange]) -> tuple[int, Sequence[Damage]]:
        await trio.lowlevel.checkpoint()
        assert (to, len(ranges)) == (1, 3)
        return 77, ()


@trio.testing.trio_test
async def test_what_was_copied_for_a_catalog_that_fails_is_looked_for_by_the_next_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean end would leave it for good; and the catalog may have it, and give up the other."""

    async def fail(_operation: object) -> None:
        raise CatalogError("the catalog's devices fail")

    async def choose(_device: int, _held: object) -> int:
        await trio.lowlevel.checkpoint()
        return 1

    async with rig(tmp_path) as mount:
        await mount.write_file("file", bytes(LARGE))
        await mount.commit.flush_all()
        draining = draining_of(mount, Copying())
        monkeypatch.setattr(draining, "choose", choose)
        monkeypatch.setattr(mount.catalog, "read", fail)
        mount.catalog.ended_cleanly = True
        with pytest.raises(CatalogError):
            await draining.step(0, DrainCursor(), LARGE)
        assert not mount.catalog.ended_cleanly
        monkeypatch.undo()
