"""The catalog: names, attributes and layouts in SQLite, behind one thread. (Being written.)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One device as the catalog knows it: its number in layouts, its identity, its last path."""

    number: int
    device_id: str
    path: str


class RootOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Owner and permission bits of the root directory of a new filesystem."""

    uid: int
    gid: int
    permissions: int = 0o755


class Catalog:
    """`filesystem_id`, `object_base` (fresh at every open), `devices` are attributes."""

    filesystem_id: str
    object_base: int
    devices: tuple[DeviceRecord, ...]

    @staticmethod
    def format(
        path: Path, *, filesystem_id: str, devices: Sequence[DeviceRecord], root: RootOwner
    ) -> None:
        """Make an empty catalog at `path` (durable on return). Blocks: call it in a thread."""
        raise NotImplementedError

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open and start the thread; takes a fresh object_base, durably. Blocks."""
        raise NotImplementedError

    async def make_durable(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Checkpoint and stop the thread."""
        raise NotImplementedError
