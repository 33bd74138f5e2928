"""Devices that come and go while programs use a mounted filesystem.

A change of the devices is in three places: the catalog, which decides, the stamps of all devices,
which a mount reads first, and the locks, which the keeper holds for servers to come.

Invariants:
  * A device is locked, and the keeper holds its lock, before the catalog knows it: a server that
    takes over has whatever the catalog names.
  * The catalog knows a device, durably, before any stamp of another device does, and before any
    chunk goes there.
  * A device is removed from the catalog first, and only while nothing in it names the device. Its
    directory is emptied last, and keeps what has content.

Concurrency: trio thread only; one change at a time. A change that has begun is not cancelled.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from fpfs.core.engine import RESERVE_BYTES, DeviceConfig
from fpfs.core.errors import CatalogError, InvalidOperation, NoSpace
from fpfs.core.protocol.reports import DeviceRemoved, DrainStarted
from fpfs.core.refusal import Refused
from fpfs.core.threads import run_alone
from fpfs.core.units import format_size
from fpfs.daemon.catalog.replicas import ALONE_NAME
from fpfs.daemon.catalog.reserve import RESERVE_NAME
from fpfs.daemon.catalog.rows.objects import held_by_device
from fpfs.daemon.catalog.rows.relocation import DeviceUsage
from fpfs.daemon.catalog.schema import CATALOG_NAME, DeviceRecord, DeviceUse, flush_directory
from fpfs.daemon.devices import attach
from fpfs.daemon.devices.members import DeviceRegistry, still_used

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.devices.keeper_link import KeeperLink
    from fpfs.daemon.devices.members import Member
    from fpfs.daemon.devices.opened_set import DeviceDirectory, DeviceSet

CATALOG_FILES = (
    CATALOG_NAME, f"{CATALOG_NAME}-wal", "catalog.sums", ALONE_NAME, RESERVE_NAME,
)  # fmt: skip
CATALOG_COPIES = 2
"""Devices that hold a copy of the catalog, where there are as many."""

log = logging.getLogger(__name__)


class DeviceChanges:
    """Changes of the devices of one mount."""

    def __init__(
        self,
        mountpoint: str,
        devices: DeviceSet,
        *,
        catalog: Catalog,
        engine: Engine,
        link: KeeperLink,
    ) -> None:
        """Keep the parts, none of which is closed here; chunks avoid what drains from now on."""
        self._mountpoint = mountpoint
        self._devices = devices
        self.registry = DeviceRegistry(catalog=catalog, devices=devices)
        self._catalog = catalog
        self._engine = engine
        self._link = link
        self._changing = trio.Lock()
        for member in self.registry.members:
            engine.set_draining(member.number, draining=member.is_draining)

    async def add(self, path: str) -> Member:
        """Add an empty directory as the next device; returns when new files use it.

        Raises OSError: `InvalidOperation` where the directory cannot be one.
        """
        async with self._changing:
            with trio.CancelScope(shield=True):
                device = await self._take(path)
                await self._join(device)
                await run_alone(self._devices.devices_changed, self.registry.records)
                self._engine.set_draining(device.number, draining=False)
                log.info("%s is device %d from now on", device.path, device.number)
                await self._ensure_copies()
        return self.registry.member(device.number)

    async def drain(self, name: str) -> DrainStarted:
        """Let no new chunk go to a device, also after this mount; says what it holds.

        Copies of the catalog go elsewhere. Raises OSError: `NoSpace` where what it holds does not
        fit on the others.
        """
        async with self._changing:
            member = self.registry.one_named(name)
            if member.is_missing:
                raise InvalidOperation(
                    f"device {member.number} ({member.path}) is missing",
                    remedy="mount with it; fpfs-ctl device remove takes a lost one out that"
                    " nothing is on",
                )
            others = {
                other.number: other.path
                for other in self.registry.members
                if other.number != member.number and not (other.is_missing or other.is_draining)
            }
            held_bytes = (await self._catalog.read(held_by_device))[member.number]
            kept_bytes = self._engine.statistics().kept_bytes
            free_bytes = await run_alone(_bytes_free, others, kept_bytes)
            if not others:
                raise InvalidOperation(
                    "there is no other device for what it holds",
                    remedy="add one with fpfs-ctl device add first",
                )
            if held_bytes > free_bytes:
                raise NoSpace(
                    f"device {member.number} holds {format_size(held_bytes)}, and the others have"
                    f" room for {format_size(free_bytes)}",
                    remedy="add a device with fpfs-ctl device add, or remove files, first",
                )
            with trio.CancelScope(shield=True):
                if not member.is_draining:
                    await self.registry.set_use(member.number, DeviceUse.DRAINING)
                    await self._catalog.make_durable()
                    self._engine.set_draining(member.number, draining=True)
                    log.info("device %d takes no new chunks any more", member.number)
                await self._move_catalog(member)
        return DrainStarted(number=member.number, path=member.path, bytes_total=held_bytes)

    async def keep(self, name: str) -> Member:
        """Let new chunks go to a device again that was to be drained. Raises OSError."""
        async with self._changing:
            member = self.registry.one_named(name)
            with trio.CancelScope(shield=True):
                if member.is_draining:
                    await self.registry.set_use(member.number, DeviceUse.IN_USE)
                    await self._catalog.make_durable()
                    self._engine.set_draining(member.number, draining=False)
                    log.info("device %d takes new chunks again", member.number)
                await self._ensure_copies()
        return self.registry.member(member.number)

    async def remove(self, name: str) -> DeviceRemoved:
        """Do without a device from now on that holds nothing; its directory is emptied.

        Raises OSError: `InvalidOperation` for one that is in use, `BusyFile` while something is
        on it.
        """
        async with self._changing:
            member = self.registry.one_named(name)
            number, path = member.number, member.path
            if not (member.is_draining or member.is_missing):
                raise InvalidOperation(
                    f"device {number} ({path}) is in use",
                    remedy=f"move what it holds first: fpfs-ctl device drain {self._mountpoint}"
                    f" {number}",
                )
            # In this order: what is held may be committed, and forgotten, in between.
            held = sum(place.device == number for place in self._engine.held_objects())
            if held:
                raise still_used(DeviceUsage(held, 0, 0), member)
            with trio.CancelScope(shield=True):
                await self._move_catalog(member)
                await self.registry.remove(member)
                await self._catalog.make_durable()
                if not member.is_missing:
                    await self._engine.remove_device(number)
                await run_alone(self._devices.devices_changed, self.registry.records)
                is_empty = False
                if not member.is_missing:
                    is_empty = await run_alone(attach.empty_directory, path)
                    self._link.release_lock(member.directory.lock_path)
                self._devices.leave(number)
                log.info("%s is not device %d any more", path, number)
        return DeviceRemoved(number=number, path=path, is_empty=is_empty)

    async def _move_catalog(self, member: Member) -> None:
        """Let a device have no copy of the catalog, and another one have it. OSError."""
        if member.number in self._devices.catalog_numbers:
            kept = self._copies_without(member)
            if not self._any_present(kept):
                # The only one: there is another first; both are named until this one is left.
                await self._ensure_copies()
                kept = self._copies_without(member)
            if not self._any_present(kept):
                raise CatalogError(
                    f"device {member.number} has the only copy of the catalog, and no other"
                    " device takes one",
                    remedy="see the server's log, make room on another device, and ask again",
                )
            await self._use_copies(kept)
            await self._ensure_copies()
        if not member.is_missing:
            # Also what a server left that died before it came to this.
            await run_alone(_remove_catalog, member.path)

    def _copies_without(self, member: Member) -> tuple[int, ...]:
        return tuple(n for n in self._devices.catalog_numbers if n != member.number)

    def _any_present(self, numbers: Sequence[int]) -> bool:
        return any(not self.registry.member(number).is_missing for number in numbers)

    async def _use_copies(self, numbers: Sequence[int]) -> None:
        """Have the catalog on these devices, and say so in the stamps."""
        members = [self.registry.member(number) for number in numbers]
        paths = [Path(each.path, CATALOG_NAME) for each in members if not each.is_missing]
        await self._catalog.move_copies(*paths)
        changed = functools.partial(self._devices.devices_changed, catalog_numbers=numbers)
        await run_alone(changed, self.registry.records)

    async def _take(self, path: str) -> DeviceDirectory:
        """Lock a directory, for the next servers, too."""
        take = functools.partial(
            attach.take_directory,
            path,
            self._devices,
            known_ids={record.device_id for record in self.registry.records},
            mountpoint=self._mountpoint,
            holder_pid=self._link.keeper_pid,
            asked=f"add {path}",
        )
        try:
            device, lock_fd = await run_alone(take)
        except Refused as refused:
            raise InvalidOperation(f"{refused.wrong}; {refused.remedy}") from refused
        self._devices.join(device, lock_fd)
        self._link.hold_lock(lock_fd)
        return device

    async def _join(self, device: DeviceDirectory) -> None:
        """Open a locked directory, and let the catalog know it, durably. OSError."""
        number, path, device_id = device
        others = [each for each in self._devices.devices if each != device]
        filesystem_id = self._devices.filesystem_id
        config = DeviceConfig(number=number, path=device.objects_path)
        is_open = False
        try:
            await run_alone(attach.stamp_joining, device, others, filesystem_id)
            await self._engine.add_device(config, draining=True)
            is_open = True
            await self.registry.add(DeviceRecord(number=number, device_id=device_id, path=path))
        except CatalogError:
            raise  # whether it knows the device the next mount finds out
        except OSError:
            if is_open:
                await self._engine.remove_device(number)
            await self._undo(device)
            raise
        await self._catalog.make_durable()

    async def _undo(self, device: DeviceDirectory) -> None:
        """Give back a directory that did not become a device."""
        try:
            give_back = functools.partial(attach.give_back, device.path, asked="undo")
            await run_alone(give_back)
        except Refused as refused:
            log.warning("%s", refused)
        self._devices.leave(device.number)
        self._link.release_lock(device.lock_path)

    async def ensure_copies(self) -> None:
        """Have two copies of the catalog where there are devices for them. Logs what fails."""
        async with self._changing:
            await self._ensure_copies()

    async def _ensure_copies(self) -> None:
        members = {member.number: member for member in self.registry.members}
        holders = [number for number in self._devices.catalog_numbers if number in members]
        spare = [
            member
            for member in members.values()
            if member.number not in holders and not member.is_missing and not member.is_draining
        ]
        if len(holders) >= CATALOG_COPIES or not spare:
            return
        try:
            await self._use_copies((*holders, spare[0].number))
        except OSError as error:
            log.error("the catalog has no second copy: %s", error)
            return
        log.info("device %d holds a copy of the catalog from now on", spare[0].number)


def _bytes_free(paths: Mapping[int, str], kept_bytes: Mapping[int, int]) -> int:
    """Return what can be written to devices, each filesystem counted once. Blocks."""
    free = {}
    kept = 0
    for number, path in paths.items():
        with contextlib.suppress(OSError):
            found = os.statvfs(path)
            free[os.stat(path).st_dev] = found.f_bavail * found.f_frsize - RESERVE_BYTES
            kept += kept_bytes.get(number, 0)
    return sum(max(0, each) for each in free.values()) + kept


def _remove_catalog(path: str) -> None:
    """Remove a copy of the catalog that is not used any more. Blocks."""
    for name in CATALOG_FILES:
        Path(path, name).unlink(missing_ok=True)
    flush_directory(Path(path))
