"""Device directories: formatting them, knowing them again, and keeping them to one server.

A device directory holds ``fpfs.json`` (the stamp), ``lock``, ``objects/``, and on two devices, at
first 0 and 1, a copy of the catalog. The stamp says which filesystem and which of its devices this
is, and on which backing filesystem and inode the directory lay, so that a copy is not taken for the
original.

Invariants:
  * A directory is stamped only when it was empty (``lost+found`` aside) and locked.
  * A mount uses only directories that nobody else can change or replace (`trusted_path`).
  * All devices of one mount carry the same filesystem id, and every number that was given and not
    taken back once.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Sequence

from fpfs.core.engine import check_objects_directory
from fpfs.core.mounts import is_below
from fpfs.core.refusal import Refused
from fpfs.daemon.devices.label import (
    FORMAT_VERSION,
    LOCK_NAME,
    STAMP_MADE_NAME,
    Stamp,
    lock_directory,
    lock_unnoted,
    read_backing,
    read_stamp,
    refusing,
    write_stamp,
)
from fpfs.daemon.devices.missing import CATALOG_DEVICES_FIRST, MissingDevice, Search, set_apart
from fpfs.daemon.devices.opened_set import OBJECTS_NAME, DeviceSet
from fpfs.daemon.devices.trusted_path import check_trusted

DEVICES_MAX = 65_535


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
    starter_fd: int = -1,
) -> DeviceSet:
    """Lock device directories, format them when all are empty, and check that they fit together.

    `adopt` accepts directories that were copied or moved to another filesystem; without
    `may_format`, empty ones are refused. `degraded` accepts that some cannot be used, or are not
    named. `held_fds` hold the locks already of all that a server before used, and are taken over:
    what it did without, or has lost, is missing then; else `holder_pid` is named as their holder,
    and a server that drains is waited for while somebody reads from the pipe `starter_fd`.
    Raises `Refused`.
    """
    search = Search(paths, {}, is_degraded=degraded or bool(held_fds))
    if search.is_degraded:
        search = set_apart(search, asked=asked, held_fds=held_fds)
    resolved = _check_paths(search.paths, asked=asked)
    # What the server before used is used by this one, too: programs have files open there.
    for path in () if held_fds else search.paths:
        check_trusted(path, asked=asked)
    lock = functools.partial(
        lock_directory, mountpoint=mountpoint, holder_pid=holder_pid, starter_fd=starter_fd
    )
    lock_fds: list[int] = list(held_fds)
    try:
        stamps = _read_stamps(resolved, may_format=may_format, asked=asked)
        for path in () if held_fds else resolved:
            lock_fds += [lock(path, asked=asked)]
        if not held_fds:
            # Again, since the mount that was waited for may have changed its devices meanwhile.
            stamps = _read_stamps(resolved, may_format=may_format, asked=asked)
        missing: Sequence[MissingDevice] = ()
        formatted = not stamps
        if formatted:
            stamps = _format(resolved, asked=asked)
        else:
            _check_stamps(resolved, stamps, asked=asked, adopt=adopt)
            missing = search.missing(stamps, asked=asked)
        return _opened(stamps, resolved, lock_fds, missing, formatted=formatted)
    except BaseException:
        for lock_fd in lock_fds:
            os.close(lock_fd)
        raise


def _read_stamps(paths: Sequence[str], *, may_format: bool, asked: str) -> Sequence[Stamp]:
    """The stamps of directories, none where all of these are empty. Raises `Refused`."""
    stamps = [read_stamp(path, asked=asked) for path in paths]
    fresh = [stamp is None for stamp in stamps]
    for path, is_fresh in zip(paths, fresh, strict=True):
        if is_fresh:
            check_empty(path, asked=asked)
    _check_all_or_none_fresh(paths, fresh, asked=asked)
    if any(fresh) and not may_format:
        raise Refused(
            asked=asked,
            wrong=f"{paths[0]} is empty, and a read-only mount does not format",
            remedy="mount it writable once, or run fpfs format",
        )
    return [stamp for stamp in stamps if stamp]


def find_devices(paths: Sequence[str], *, asked: str, to_change: bool = False) -> DeviceSet:
    """The devices of a filesystem, locked against a mount; nothing in them is changed here.

    Without `to_change`, others may look at them meanwhile, and copies of the directories are as
    good as the originals, wherever they lie. Raises `Refused`.
    """
    for path in paths if to_change else ():
        check_trusted(path, asked=asked)
    resolved = _check_paths(paths, asked=asked)
    _read_all_stamps(resolved, asked=asked)
    lock_fds: list[int] = []
    try:
        for path in resolved:
            lock_fds += [lock_unnoted(path, asked=asked, alone=to_change)]
        # Again, since a mount may have changed its devices, and ended, in between.
        stamps = _read_all_stamps(resolved, asked=asked)
        _check_stamps(resolved, stamps, asked=asked, adopt=not to_change)
        Search(paths, {}, is_degraded=False).missing(stamps, asked=asked)
    except BaseException:
        for lock_fd in lock_fds:
            os.close(lock_fd)
        raise
    return DeviceSet(stamps, resolved, lock_fds=lock_fds)


def _read_all_stamps(paths: Sequence[str], *, asked: str) -> list[Stamp]:
    """The stamps of directories that all have one. Raises `Refused`."""
    stamps = []
    for path in paths:
        stamp = read_stamp(path, asked=asked)
        if stamp is None:
            raise Refused(
                asked=asked,
                wrong=f"{path} holds no fpfs device",
                remedy="name all directories of one filesystem",
            )
        stamps.append(stamp)
    return stamps


def _opened(
    stamps: Sequence[Stamp],
    paths: Sequence[str],
    lock_fds: Sequence[int],
    missing: Sequence[MissingDevice],
    *,
    formatted: bool,
) -> DeviceSet:
    devices = DeviceSet(
        stamps,
        paths,
        lock_fds=lock_fds,
        formatted=formatted,
        notes=_shared_backing_notes(paths),
        missing=missing,
    )
    devices.restamp()
    return devices


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
        resolved.append(check_directory(path, resolved, asked=asked))
    return resolved


def check_directory(path: str, others: Sequence[str], *, asked: str) -> str:
    """The resolved path of a directory that lies apart from others. Raises `Refused`."""
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
    for other in others:
        _check_apart(real, other, asked=asked)
    return real


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


def check_empty(path: str, *, asked: str) -> None:
    """Refuse a directory that has anything in it. Raises `Refused`."""
    with refusing(path, asked=asked):
        # A lock alone, or a stamp never finished, is what a refused or interrupted format leaves.
        found = sorted(set(os.listdir(path)) - {"lost+found", LOCK_NAME, STAMP_MADE_NAME})
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


def _make_objects(path: str) -> None:
    """Make the folder of a device's objects. OSError where they could not be read."""
    objects = os.path.join(path, OBJECTS_NAME)
    os.mkdir(objects, 0o700)
    try:
        check_objects_directory(objects)
    except BaseException:
        os.rmdir(objects)
        raise


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
                catalog_devices=CATALOG_DEVICES_FIRST[: len(paths)],
            )
            _make_objects(path)
            write_stamp(path, stamp)
        stamps.append(stamp)
    return stamps
