"""Device directories: formatting them, knowing them again, and keeping them to one server.

A device directory holds ``fpfs.json`` (the stamp), ``lock``, ``objects/``, and on devices 0 and 1
a copy of the catalog. The stamp says which filesystem and which of its devices this is, and on
which backing filesystem and inode the directory lay, so that a copy is not taken for the original.

Invariants:
  * A directory is stamped only when it was empty (``lost+found`` aside) and locked.
  * All devices of one mount carry the same filesystem id, and every number of 0..count-1 once.
  * While a `DeviceSet` is open, each of its directories is locked (flock) by this process.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec

from fpfs.core.mounts import is_below
from fpfs.core.refusal import Refused
from fpfs.daemon.missing import MissingDevice, Search, set_apart
from fpfs.daemon.stamp import (
    FORMAT_VERSION,
    LOCK_NAME,
    Stamp,
    lock_directory,
    lock_unnoted,
    read_backing,
    read_stamp,
    refusing,
    write_stamp,
)

DEVICES_MAX = 65_535
OBJECTS_NAME = "objects"
CATALOG_COPIES = 2
"""Devices that hold a copy of the catalog, where there are as many."""


class DeviceDirectory(NamedTuple):
    """One device of an open set."""

    number: int
    path: str
    device_id: str

    @property
    def objects_path(self) -> str:
        """The folder of its objects."""
        return os.path.join(self.path, OBJECTS_NAME)


class DeviceSet:
    """The locked devices of one filesystem, in order of their numbers; close() unlocks them."""

    def __init__(
        self,
        *,
        filesystem_id: str,
        devices: Sequence[DeviceDirectory],
        lock_fds: Sequence[int],
        formatted: bool,
        notes: Sequence[str],
        missing: Sequence[MissingDevice] = (),
    ) -> None:
        """Take over the locks. `formatted`: the directories were empty until now."""
        self.filesystem_id = filesystem_id
        self.devices = tuple(devices)
        self.formatted = formatted
        self.notes = tuple(notes)
        self.missing = tuple(missing)
        """Devices that the filesystem has, too, and that cannot be used in this mount."""
        self._lock_fds = list(lock_fds)

    @property
    def catalog_directories(self) -> tuple[str, ...]:
        """The directories that hold copies of the catalog: devices 0 and 1."""
        return tuple(device.path for device in self.devices if device.number < CATALOG_COPIES)

    @property
    def missing_catalog_directories(self) -> tuple[str, ...]:
        """Where copies of the catalog were that are missing with their devices."""
        return tuple(device.path for device in self.missing if device.number < CATALOG_COPIES)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all devices, those that are missing, too: what layouts go by."""
        return tuple(
            sorted(
                [device.number for device in self.devices] + [lost.number for lost in self.missing]
            )
        )

    def close(self) -> None:
        """Unlock the directories, also where another process holds the same descriptors."""
        while self._lock_fds:
            fcntl.flock(self._lock_fds[-1], fcntl.LOCK_UN)
            os.close(self._lock_fds.pop())

    @property
    def lock_fds(self) -> tuple[int, ...]:
        """The descriptors that hold the locks, in the order in which the devices were named."""
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


def open_devices(
    paths: Sequence[str],
    *,
    mountpoint: str,
    asked: str,
    adopt: bool = False,
    may_format: bool = True,
    degraded: bool = False,
    held_fds: Sequence[int] = (),
    holder_pid: int = 0,
) -> DeviceSet:
    """Lock device directories, format them when all are empty, and check that they fit together.

    `adopt` accepts directories that were copied or moved to another filesystem; without
    `may_format`, empty ones are refused. `degraded` accepts that some cannot be used, or are not
    named. `held_fds` hold the locks already of all that a server before used, and are taken over:
    what it did without, or has lost, is missing then; else `holder_pid` is named as their holder.
    Raises `Refused`.
    """
    search = Search(paths, {}, is_degraded=degraded or bool(held_fds))
    if search.is_degraded:
        search = set_apart(search, asked=asked, held_fds=held_fds)
    resolved = _check_paths(search.paths, asked=asked)
    lock_fds: list[int] = list(held_fds)
    try:
        stamps = [read_stamp(path, asked=asked) for path in resolved]
        fresh = [stamp is None for stamp in stamps]
        for path, is_fresh in zip(resolved, fresh, strict=True):
            if is_fresh:
                _check_empty(path, asked=asked)
        _check_all_or_none_fresh(resolved, fresh, asked=asked)
        if any(fresh) and not may_format:
            raise Refused(
                asked=asked,
                wrong=f"{resolved[0]} is empty, and a read-only mount does not format",
                remedy="mount it writable once, or run fpfs format",
            )
        for path in resolved[len(lock_fds) :]:
            lock_fds += [
                lock_directory(path, mountpoint=mountpoint, asked=asked, holder_pid=holder_pid)
            ]
        if all(fresh):
            known: Sequence[Stamp] = _format(resolved, asked=asked)
            missing: Sequence[MissingDevice] = ()
        else:
            known = [stamp for stamp in stamps if stamp]
            _check_stamps(resolved, known, asked=asked, adopt=adopt)
            missing = search.missing(known, catalog_copies=CATALOG_COPIES, asked=asked)
        return _opened(known, resolved, lock_fds, missing, formatted=all(fresh))
    except BaseException:
        for lock_fd in lock_fds:
            os.close(lock_fd)
        raise


def find_devices(paths: Sequence[str], *, asked: str, to_change: bool = False) -> DeviceSet:
    """The devices of a filesystem, locked against a mount; nothing in them is changed here.

    Without `to_change`, others may look at them meanwhile, and copies of the directories are as
    good as the originals. Raises `Refused`.
    """
    resolved = _check_paths(paths, asked=asked)
    stamps = []
    for path in resolved:
        stamp = read_stamp(path, asked=asked)
        if stamp is None:
            raise Refused(
                asked=asked,
                wrong=f"{path} holds no fpfs device",
                remedy="name all directories of one filesystem",
            )
        stamps.append(stamp)
    lock_fds: list[int] = []
    try:
        for path in resolved:
            lock_fds += [lock_unnoted(path, asked=asked, alone=to_change)]
        _check_stamps(resolved, stamps, asked=asked, adopt=not to_change)
        Search(paths, {}, is_degraded=False).missing(
            stamps, catalog_copies=CATALOG_COPIES, asked=asked
        )
    except BaseException:
        for lock_fd in lock_fds:
            os.close(lock_fd)
        raise
    return DeviceSet(
        filesystem_id=stamps[0].filesystem_id,
        devices=sorted(
            DeviceDirectory(stamp.device_number, path, stamp.device_id)
            for stamp, path in zip(stamps, resolved, strict=True)
        ),
        lock_fds=lock_fds,
        formatted=False,
        notes=(),
    )


def _opened(
    stamps: Sequence[Stamp],
    paths: Sequence[str],
    lock_fds: Sequence[int],
    missing: Sequence[MissingDevice],
    *,
    formatted: bool,
) -> DeviceSet:
    devices = sorted(
        DeviceDirectory(stamp.device_number, path, stamp.device_id)
        for stamp, path in zip(stamps, paths, strict=True)
    )
    places = {device.number: device.path for device in devices}
    places.update({device.number: device.path for device in missing})
    ordered_paths = tuple(places[number] for number in sorted(places))
    for stamp, path in zip(stamps, paths, strict=True):
        current = msgspec.structs.replace(stamp, paths=ordered_paths, backing=read_backing(path))
        if current != stamp:
            write_stamp(path, current)
    return DeviceSet(
        filesystem_id=stamps[0].filesystem_id,
        devices=devices,
        lock_fds=lock_fds,
        formatted=formatted,
        notes=_shared_backing_notes([device.path for device in devices]),
        missing=missing,
    )


def _shared_backing_notes(paths: Sequence[str]) -> list[str]:
    """Several directories on one filesystem work, but they share its speed and its loss."""
    by_filesystem: dict[int, list[str]] = {}
    for path in paths:
        by_filesystem.setdefault(os.stat(path).st_dev, []).append(path)
    return [
        f"{' and '.join(shared)} lie on one filesystem: they share its speed and fail together"
        for shared in by_filesystem.values()
        if len(shared) > 1
    ]


def _check_paths(paths: Sequence[str], *, asked: str) -> list[str]:
    if len(paths) > DEVICES_MAX:
        raise Refused(
            asked=asked,
            wrong=f"{len(paths)} devices are more than {DEVICES_MAX}",
            remedy="name fewer directories with -d",
        )
    resolved: list[str] = []
    for path in paths:
        real = os.path.realpath(path)
        if not os.path.isdir(real):
            with refusing(path, asked=asked):
                state = "is not a directory" if _exists(real) else "does not exist"
            raise Refused(
                asked=asked,
                wrong=f"the device directory {path} {state}",
                remedy="name an empty directory on the device, or one that fpfs formatted; fpfs"
                " mount --degraded does without a device that is lost",
            )
        for other in resolved:
            _check_apart(real, other, asked=asked)
        resolved.append(real)
    return resolved


def _exists(path: str) -> bool:
    """Whether there is something; raises OSError when that cannot be told."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _check_apart(path: str, other: str, *, asked: str) -> None:
    if os.path.samefile(path, other):
        raise Refused(
            asked=asked,
            wrong=f"the device directory {path} is given twice",
            remedy="name each directory once",
        )
    if is_below(path, other) or is_below(other, path):
        raise Refused(
            asked=asked,
            wrong=f"the device directories {other} and {path} lie within each other",
            remedy="name directories beside each other",
        )


def _check_empty(path: str, *, asked: str) -> None:
    with refusing(path, asked=asked):
        # A lock alone is what a refused or interrupted format leaves.
        found = sorted(set(os.listdir(path)) - {"lost+found", LOCK_NAME})
    if found:
        raise Refused(
            asked=asked,
            wrong=f"{path} is not empty ({found[0]} is in it) and holds no fpfs device",
            remedy="name an empty directory, or one that fpfs formatted",
        )


def _check_all_or_none_fresh(paths: Sequence[str], fresh: Sequence[bool], *, asked: str) -> None:
    if any(fresh) and not all(fresh):
        empty = paths[fresh.index(True)]
        used = paths[fresh.index(False)]
        raise Refused(
            asked=asked,
            wrong=f"{empty} is empty, while {used} belongs to a filesystem",
            remedy=f"name all directories of {used}'s filesystem and no other"
            f" (is the filesystem of {empty} mounted? --degraded does without it; after a format"
            f" that was interrupted, empty {used} too)",
        )


def _check_stamps(
    paths: Sequence[str], stamps: Sequence[Stamp], *, asked: str, adopt: bool
) -> None:
    first, first_path = stamps[0], paths[0]
    by_number: dict[int, str] = {}
    for path, stamp in zip(paths, stamps, strict=True):
        if stamp.filesystem_id != first.filesystem_id:
            raise Refused(
                asked=asked,
                wrong=f"{path} belongs to filesystem {stamp.filesystem_id}, and {first_path}"
                f" to {first.filesystem_id}",
                remedy="name the directories of one filesystem",
            )
        if stamp.device_number in by_number:
            raise Refused(
                asked=asked,
                wrong=f"{by_number[stamp.device_number]} and {path} are both device"
                f" {stamp.device_number}: one is a copy",
                remedy="name the original only",
            )
        by_number[stamp.device_number] = path
        if not adopt:
            _check_backing(path, stamp, asked=asked)


def _check_backing(path: str, stamp: Stamp, *, asked: str) -> None:
    now = read_backing(path)
    moved = now.inode != stamp.backing.inode or (
        bool(now.uuid and stamp.backing.uuid) and now.uuid != stamp.backing.uuid
    )
    if moved:
        last = stamp.paths[stamp.device_number]
        raise Refused(
            asked=asked,
            wrong=f"{path} was copied or moved: its stamp was written for another directory"
            f" (last at {last})",
            remedy="mount the original, or accept this one for good with -o adopt",
        )


def _format(paths: Sequence[str], *, asked: str) -> Sequence[Stamp]:
    """Make a new filesystem of empty, locked directories; the stamp of each is written last."""
    filesystem_id = uuid.uuid4().hex[:16]
    stamps = []
    for number, path in enumerate(paths):
        with refusing(path, asked=asked):
            stamp = Stamp(
                format_version=FORMAT_VERSION,
                filesystem_id=filesystem_id,
                device_number=number,
                device_id=uuid.uuid4().hex[:16],
                device_count=len(paths),
                backing=read_backing(path),
                paths=tuple(paths),
            )
            os.mkdir(os.path.join(path, OBJECTS_NAME), 0o700)
            write_stamp(path, stamp)
        stamps.append(stamp)
    return stamps
