"""Orphans: objects that no version refers to, which a server that died had made or not removed.

Objects are kept ready before anybody asks for them, and a version that was never committed may have
had some. After a clean unmount there are none, so that a mount after one looks at no directory.

Invariants:
  * Only objects of earlier servers are looked at: their ids are smaller than this one's.
  * Whoever ends it in the middle leaves the rest to the next mount, which must look for it.
  * An object is removed only if the catalog does not name it and no loaded inode holds it, nor what
    is to be taken over.

Concurrency: one coroutine, in the background or before the mount answers; folders are listed in
threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from fpfs.core.engine import ObjectId
from fpfs.core.threads import run_alone
from fpfs.daemon.catalog.rows.extents import list_known_objects
from fpfs.daemon.catalog.schema import flush_directory
from fpfs.daemon.devices.free_space import free_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.devices.opened_set import DeviceDirectory

log = logging.getLogger(__name__)

BATCH = 512
"""Objects that are asked for in one query."""


async def collect(*, catalog: Catalog, engine: Engine, devices: Sequence[DeviceDirectory]) -> int:
    """Remove all orphans, durably; returns how many there were.

    Raises the OSError of a device that cannot remove some, after having tried the others.
    """
    count = 0
    failure = None
    for device in devices:
        try:
            count += await _collect_device(catalog, engine, device)
        except OSError as error:
            log.warning(
                "objects that no version refers to stay on device %d: %s", device.number, error
            )
            failure = error
    if count:
        log.info("removed %d objects that no version refers to", count)
    if failure is not None:
        raise failure
    return count


async def make_room(
    *, needed_bytes: int, catalog: Catalog, engine: Engine, devices: Sequence[DeviceDirectory]
) -> None:
    """Collect where a device has less space than what is to be taken over may need.

    The servers that died on the way to that may have left more and more of them.
    """
    paths = {device.number: device.path for device in devices}
    free = await run_alone(free_bytes, paths, engine.statistics().kept_bytes)
    # A device that does not tell has nothing to collect.
    if any(bytes_free < needed_bytes for bytes_free in free.values()):
        with contextlib.suppress(OSError):  # it is in the log
            await collect(catalog=catalog, engine=engine, devices=devices)


async def _collect_device(catalog: Catalog, engine: Engine, device: DeviceDirectory) -> int:
    id_end = catalog.object_base << 32
    ids = await run_alone(_list_ids, device.objects_path, id_end)
    count = 0
    for first in range(0, len(ids), BATCH):
        await trio.lowlevel.checkpoint_if_cancelled()
        count += await _collect_batch(catalog, engine, device.number, ids[first : first + BATCH])
    # What the dead server had removed must not come back either, once nobody looks for it.
    await run_alone(_flush_folders, device.objects_path)
    return count


async def _collect_batch(catalog: Catalog, engine: Engine, device: int, ids: Sequence[int]) -> int:
    # In this order: what is held may be committed, and forgotten, in between.
    held = set(engine.held_objects())
    known = await catalog.read(lambda t: list_known_objects(t, device, ids))
    orphans = [
        key
        for key in (ObjectId(device, id_) for id_ in ids)
        if key.id not in known and key not in held
    ]
    if orphans:
        # An unmount that comes now waits for these: the engine is closed after it.
        with trio.CancelScope(shield=True):
            await engine.remove_objects(orphans)
    return len(orphans)


def _flush_folders(objects_path: str) -> None:
    for folder in os.scandir(objects_path):
        if folder.is_dir(follow_symlinks=False):
            flush_directory(Path(folder.path))


def _list_ids(objects_path: str, id_end: int) -> list[int]:
    """Ids below `id_end` of the objects of a device; other names are none of ours."""
    found = []
    for folder in os.scandir(objects_path):
        if not folder.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(folder):
            try:
                id_ = int(entry.name, 16)
            except ValueError:
                continue
            if id_ < id_end and entry.name == f"{id_:016x}":
                found.append(id_)
    return sorted(found)
