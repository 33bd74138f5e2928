"""The device directories that a process holds locked, and what their stamps say of each other.

Invariants:
  * While a `DeviceSet` is open, each of its directories is locked (flock) by this process.
  * What stamps say is replaced one stamp after the other: the one of the largest generation holds,
    and the catalog knows better than any (`reconcile`).

Concurrency: one thread at a time; the methods that write stamps block.
"""

from __future__ import annotations

import fcntl
import logging
import os
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.replicas import ALONE_NAME
from fpfs.daemon.catalog.reserve import RESERVE_NAME
from fpfs.daemon.catalog.schema import CATALOG_NAME, DeviceUse
from fpfs.daemon.devices.label import LOCK_NAME, newest, read_backing, read_stamp, write_stamp
from fpfs.daemon.devices.missing import (
    CATALOG_DEVICES_FIRST,
    MissingDevice,
    folder_of_lock,
    refuse_without,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from fpfs.daemon.catalog.schema import DeviceRecord
    from fpfs.daemon.devices.label import Stamp

OBJECTS_NAME = "objects"

CATALOG_TRACES = (f"{CATALOG_NAME}-wal", ALONE_NAME, RESERVE_NAME)
"""Files that are made only beside a catalog that is durable. Its sums are there before it is."""

log = logging.getLogger(__name__)


class DeviceDirectory(NamedTuple):
    """One device of an open set."""

    number: int
    path: str
    device_id: str

    @property
    def objects_path(self) -> str:
        """The folder of its objects."""
        return os.path.join(self.path, OBJECTS_NAME)

    @property
    def lock_path(self) -> str:
        """The file that keeps others off it."""
        return os.path.join(self.path, LOCK_NAME)


class DeviceSet:
    """The locked devices of one filesystem, in order of their numbers; close() unlocks them."""

    def __init__(
        self,
        stamps: Sequence[Stamp],
        paths: Sequence[str],
        *,
        lock_fds: Sequence[int],
        formatted: bool = False,
        notes: Sequence[str] = (),
        missing: Sequence[MissingDevice] = (),
    ) -> None:
        """Take over the locks. `formatted`: the directories were empty until now."""
        last = newest(stamps)
        self.filesystem_id = last.filesystem_id
        self.devices = tuple(
            sorted(
                DeviceDirectory(stamp.device_number, path, stamp.device_id)
                for stamp, path in zip(stamps, paths, strict=True)
            )
        )
        self.formatted = formatted
        self.notes = tuple(notes)
        self.missing = tuple(missing)
        """Devices that the filesystem has, too, and that cannot be used in this mount."""
        self.joining = frozenset(stamp.device_number for stamp in stamps if stamp.joining)
        """Devices that may, or may not, have been added before a server died."""
        first = CATALOG_DEVICES_FIRST[: last.device_count]
        self.catalog_numbers = last.catalog_devices or first
        """Devices that hold a copy of the catalog, as far as there are such devices."""
        self._count = last.device_count
        self._removed = frozenset(last.removed)
        self._generation = last.generation
        self._lock_fds = list(lock_fds)

    @property
    def catalog_directories(self) -> tuple[str, ...]:
        """The directories that hold copies of the catalog."""
        return tuple(each.path for each in self.devices if each.number in self.catalog_numbers)

    @property
    def missing_catalog_directories(self) -> tuple[str, ...]:
        """Where copies of the catalog were that are missing with their devices."""
        return tuple(each.path for each in self.missing if each.number in self.catalog_numbers)

    @property
    def was_used(self) -> bool:
        """Whether there may ever have been a catalog. Raises OSError where that cannot be told."""
        return bool(self.joining) or any(map(_was_used, self.devices))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all devices, those that are missing, too: what layouts go by."""
        return tuple(
            sorted(
                [device.number for device in self.devices] + [lost.number for lost in self.missing]
            )
        )

    def reconcile(self, records: Sequence[DeviceRecord], *, is_degraded: bool, asked: str) -> bool:
        """Correct the stamps by the catalog, which knows of every completed change of the devices.

        A directory that it does not know of, since a server died while it added it, or does not
        know any more, is left out. Returns whether stamps have to be written (`devices_changed`).
        Raises `Refused` for a device that was not named.
        """
        before = self._count, self._removed
        known = {record.number: record for record in records}
        for device in self.devices:
            record = known.get(device.number)
            is_it = record is not None and record.device_id == device.device_id
            if is_it and record is not None and record.use is DeviceUse.REMOVED:
                self._leave_out(device, "it was removed, and can be emptied")
            elif not is_it and device.number in self.joining:
                self._leave_out(device, "it was not added: a server died meanwhile; add it again")
        self._apply_records(records)
        here = {device.number for device in self.devices}
        told = {device.number: device for device in self.missing}
        self.missing = tuple(
            told.get(number) or MissingDevice(number, known[number].path, "it was not named")
            for number in sorted(known.keys() - here - self._removed)
        )
        if self.missing and not is_degraded:
            raise refuse_without(self.missing, of=len(known) - len(self._removed), asked=asked)
        return bool(self.joining) or before != (self._count, self._removed)

    def _apply_records(self, records: Sequence[DeviceRecord]) -> None:
        self._count = max([self._count, *(record.number + 1 for record in records)])
        self._removed = frozenset(
            record.number for record in records if record.use is DeviceUse.REMOVED
        )

    def _leave_out(self, device: DeviceDirectory, why: str) -> None:
        """Do without a directory that is no device, or none any more; it is a stranger then."""
        self.notes = (*self.notes, f"{device.path} is left out: {why}")
        self.devices = tuple(each for each in self.devices if each != device)

    @property
    def next_number(self) -> int:
        """A number that no device ever had."""
        return self._count

    def join(self, device: DeviceDirectory, lock_fd: int) -> None:
        """Take a device in, with its lock."""
        self.devices = tuple(sorted((*self.devices, device)))
        self._lock_fds.append(lock_fd)

    def leave(self, number: int) -> None:
        """Unlock a device and forget it.

        A keeper that holds the lock, too, is to be told.
        """
        gone = [device.path for device in self.devices if device.number == number]
        self.devices = tuple(device for device in self.devices if device.number != number)
        self.missing = tuple(device for device in self.missing if device.number != number)
        for lock_fd in list(self._lock_fds):
            if folder_of_lock(lock_fd) in gone:
                self._unlock(lock_fd)

    def unlock_strangers(self) -> list[str]:
        """Unlock directories that are of no device; returns their locks, for a keeper.

        A server took them to add them, and died before there was anything in them.
        """
        ours = {device.path for device in self.devices} | {lost.path for lost in self.missing}
        unlocked = []
        for lock_fd in list(self._lock_fds):
            folder = folder_of_lock(lock_fd)
            if folder not in ours:
                unlocked.append(os.path.join(folder, LOCK_NAME))
                self._unlock(lock_fd)
        return unlocked

    def _unlock(self, lock_fd: int) -> None:
        self._lock_fds.remove(lock_fd)
        fcntl.flock(lock_fd, fcntl.LOCK_UN)
        os.close(lock_fd)

    def devices_changed(
        self, records: Sequence[DeviceRecord], *, catalog_numbers: Sequence[int] | None = None
    ) -> None:
        """Let the stamps say what the catalog does, and which devices hold it, if that changed.

        A device that fails keeps its stamp, which is older than those of the others then.
        """
        if catalog_numbers is not None:
            self.catalog_numbers = tuple(catalog_numbers)
        self._apply_records(records)
        self._generation += 1
        self.joining = frozenset()
        self.restamp(all_must=False)

    def restamp(self, *, all_must: bool = True) -> None:
        """Let the stamps say what devices there are, and where they lie now.

        Those of devices that may not have been added stay as they are. Raises OSError where
        `all_must` be written.
        """
        places = {device.number: device.path for device in self.devices}
        places.update({device.number: device.path for device in self.missing})
        paths = tuple(places.get(number, "") for number in range(self._count))
        for device in self.devices:
            if device.number in self.joining:
                continue
            try:
                self._restamp_one(device, paths)
            except (OSError, Refused) as error:
                if all_must:
                    raise
                log.warning("the stamp of device %d (%s) cannot be written: %s", *device[:2], error)

    def _restamp_one(self, device: DeviceDirectory, paths: tuple[str, ...]) -> None:
        stamp = read_stamp(device.path, asked="stamp")
        if stamp is None:
            raise FileNotFoundError(f"{device.path} has no stamp any more")
        current = msgspec.structs.replace(
            stamp,
            paths=paths,
            backing=read_backing(device.path),
            device_count=self._count,
            removed=tuple(sorted(self._removed)),
            catalog_devices=self.catalog_numbers,
            generation=self._generation,
            joining=False,
        )
        if current != stamp:
            write_stamp(device.path, current)

    def close(self) -> None:
        """Unlock the directories, also where another process holds the same descriptors."""
        while self._lock_fds:
            fcntl.flock(self._lock_fds[-1], fcntl.LOCK_UN)
            os.close(self._lock_fds.pop())

    @property
    def lock_fds(self) -> tuple[int, ...]:
        """The descriptors that hold the locks."""
        return tuple(self._lock_fds)

    def __enter__(self) -> DeviceSet:
        """Return the set; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unlock the directories."""
        self.close()


def _was_used(device: DeviceDirectory) -> bool:
    try:
        if os.listdir(device.objects_path):
            return True
    except FileNotFoundError:
        return True  # a server died while it emptied one that was removed
    return any(os.path.lexists(os.path.join(device.path, name)) for name in CATALOG_TRACES)
