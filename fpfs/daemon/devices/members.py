"""The devices of a mounted filesystem as they are now: number, directory, tags, state.

What a device is to the filesystem is in the catalog; where its directory is, and whether it can be
used in this mount, is known since the mount opened it. Both come together here, and everybody who
has to know the devices of now asks here.

Invariants:
  * What is in memory is what the catalog holds: `apply` functions change it in the catalog's order.

Concurrency: trio thread only. `members`, `usable` and `paths` are replaced as a whole and never
changed, so other threads may read what they were given.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from fpfs.core.device_names import TagChange, describe_devices, devices_named, is_number
from fpfs.core.errors import BusyFile, NoSuchEntry
from fpfs.daemon.catalog.rows.devices import add_device, change_tags, set_use
from fpfs.daemon.catalog.rows.relocation import forget_removals_on, usage_of
from fpfs.daemon.catalog.schema import DeviceUse
from fpfs.daemon.devices.opened_set import DeviceDirectory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpfs.daemon.catalog.database import Catalog, DeviceRecord
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.catalog.rows.relocation import DeviceUsage
    from fpfs.daemon.devices.opened_set import DeviceSet


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the filesystem. `trouble` says why the mount does without it, if it does."""

    number: int
    path: str
    device_id: str
    use: DeviceUse = DeviceUse.IN_USE
    tags: frozenset[str] = frozenset()
    trouble: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether the mount does without it."""
        return bool(self.trouble)

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new chunks, since it is to go."""
        return self.use is DeviceUse.DRAINING

    @property
    def directory(self) -> DeviceDirectory:
        """Its directory."""
        return DeviceDirectory(self.number, self.path, self.device_id)


class DeviceRegistry:
    """All devices of one mount, kept up to date."""

    def __init__(self, *, catalog: Catalog, devices: DeviceSet) -> None:
        """Know what the catalog said when it was opened, and what the mount has opened."""
        self._catalog = catalog
        self._places = {device.number: device.path for device in devices.devices}
        self._troubles = {device.number: device.trouble for device in devices.missing}
        self._lost_at = {device.number: device.path for device in devices.missing}
        self._apply(catalog.devices)

    def _apply(self, records: Sequence[DeviceRecord]) -> None:
        """Follow the catalog."""
        self.records = tuple(records)
        """What the catalog has, removed devices, too."""
        self.members: tuple[Member, ...] = tuple(
            Member(
                number=record.number,
                path=self._places.get(record.number) or self._lost_at.get(record.number, ""),
                device_id=record.device_id,
                use=record.use,
                tags=record.tags,
                trouble=self._troubles.get(record.number, ""),
            )
            for record in records
            if record.use is not DeviceUse.REMOVED
        )
        """Every device, those that are missing, too, in order of their numbers."""
        self.usable: tuple[int, ...] = tuple(
            member.number for member in self.members if not member.is_draining
        )
        """Numbers of the devices that new contents are striped over, missing ones too: what is
        meant for these goes elsewhere."""
        self.paths: Mapping[int, str] = MappingProxyType(
            {member.number: member.path for member in self.members}
        )
        """Directories by number, those of missing devices, too."""

    @property
    def present(self) -> tuple[DeviceDirectory, ...]:
        """The directories of the devices that this mount has."""
        return tuple(member.directory for member in self.members if not member.is_missing)

    @property
    def missing(self) -> frozenset[int]:
        """Numbers of the devices that this mount does without."""
        return frozenset(member.number for member in self.members if member.is_missing)

    def named(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the devices that a number, a directory or a tag names, in order.

        Raises `NoSuchEntry` when there is none.
        """
        found = devices_named(name, self.members)
        if not found:
            known = describe_devices(self.members)
            gone = [each.number for each in self.records if each.use is DeviceUse.REMOVED]
            if is_number(name) and int(name) in gone:
                raise NoSuchEntry(f"device {name} was removed", remedy=f"there are {known}")
            raise NoSuchEntry(f"no device is called {name!r}", remedy=f"there are {known}")
        return found

    def one_named(self, name: str) -> Member:
        """Return the device that a number, a directory, or a tag of it alone names.

        Raises `NoSuchEntry` when there is none, or more than one.
        """
        found = self.named(name)
        if len(found) > 1:
            numbers = ", ".join(map(str, found))
            raise NoSuchEntry(f"{name!r} names devices {numbers}", remedy="name one by its number")
        return self.member(found[0])

    async def tag(self, number: int, change: TagChange) -> Member:
        """Give tags to a device and take others away, durably; returns it as it is then.

        Raises `InvalidOperation`, `NoSpace`.
        """
        await self._catalog.write(lambda t: change_tags(t, number, change), apply=self._apply)
        await self._catalog.make_durable()
        return self.member(number)

    async def add(self, device: DeviceRecord) -> None:
        """Enter a device that the mount has opened. Raises what `Catalog.write` does."""
        self._places[device.number] = device.path
        await self._catalog.write(lambda t: add_device(t, device), apply=self._apply)

    async def set_use(self, number: int, use: DeviceUse) -> None:
        """Let a device be something else to the filesystem. Raises what `Catalog.write` does."""
        await self._catalog.write(lambda t: set_use(t, number, use), apply=self._apply)

    async def remove(self, member: Member) -> None:
        """Let there be no such device any more. Raises `BusyFile` while something is on it."""

        def take_out(transaction: Transaction) -> tuple[DeviceRecord, ...]:
            usage = usage_of(transaction, member.number)
            if member.is_missing:
                # Nobody can give back what was removed there; it is lost with the device.
                forget_removals_on(transaction, member.number)
                usage = usage._replace(removals=0)
            if any(usage):
                raise still_used(usage, member)
            return set_use(transaction, member.number, DeviceUse.REMOVED)

        await self._catalog.write(take_out, apply=self._apply)

    def member(self, number: int) -> Member:
        """Return the device with a number."""
        return next(member for member in self.members if member.number == number)


def still_used(usage: DeviceUsage, member: Member) -> BusyFile:
    """Say what is on a device that therefore cannot be removed."""
    where = f"device {member.number} ({member.path})"
    if not (usage.objects or usage.shared):
        return BusyFile(
            f"space on {where} is still being given back", remedy="ask again in a moment"
        )
    if member.is_missing:
        remedy = "mount with it and drain it, or remove the files that cannot be read without it"
    else:
        remedy = "let fpfs-ctl device drain come to its end first"
    return BusyFile(f"{where} holds contents of files", remedy=remedy)
