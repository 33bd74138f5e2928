"""A directory on its way to become a device of a filesystem that is in use, or back from it.

Its stamp says so (`Stamp.joining`) until the catalog knows it: a directory that a server died over
is recognised, and can be added again.

Invariants:
  * Nothing is written to a directory that is neither empty nor such a one.
  * No content is removed: what the catalog never knew has empty objects at most.

Concurrency: functions that block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from fpfs.core.mounts import check_outside, is_below
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.schema import flush_directory
from fpfs.daemon.devices.directory import DEVICES_MAX, check_directory, check_empty
from fpfs.daemon.devices.label import (
    FORMAT_VERSION,
    LOCK_NAME,
    STAMP_NAME,
    Stamp,
    lock_directory,
    read_backing,
    read_stamp,
    refusing,
    write_stamp,
)
from fpfs.daemon.devices.opened_set import OBJECTS_NAME, DeviceDirectory
from fpfs.daemon.devices.trusted_path import check_trusted

PROBE_NAME = ".direct-probe"
"""What the engine makes for a moment, to see whether it can write past the page cache."""

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from fpfs.daemon.devices.opened_set import DeviceSet


log = logging.getLogger(__name__)


def take_directory(
    path: str,
    devices: DeviceSet,
    *,
    known_ids: Collection[str],
    mountpoint: str,
    holder_pid: int,
    asked: str,
) -> tuple[DeviceDirectory, int]:
    """Lock a directory that is to become the next device; returns it and what holds the lock.

    It is empty, or a server died while it added it: the catalog knows the devices `known_ids`.
    Raises `Refused`.
    """
    number = devices.next_number
    if number >= DEVICES_MAX:
        raise Refused(
            asked=asked,
            wrong=f"a filesystem has {DEVICES_MAX} numbers for devices, and all were given",
            remedy="copy its files to a new one",
        )
    for device in devices.devices:
        if device.path == os.path.realpath(path):
            raise Refused(
                asked=asked,
                wrong=f"{path} is device {device.number} already",
                remedy="name an empty directory",
            )
    others = [device.path for device in devices.devices if os.path.isdir(device.path)]
    real = check_directory(path, others, asked=asked)
    check_trusted(path, asked=asked)
    check_outside(mountpoint, [("device directory", real)], asked=asked)
    if is_below(mountpoint, real):
        raise Refused(
            asked=asked,
            wrong=f"the mountpoint lies in the directory {real}",
            remedy="name another directory",
        )
    _check_free(real, devices, known_ids, asked=asked)
    lock_fd = lock_directory(real, mountpoint=mountpoint, asked=asked, holder_pid=holder_pid)
    try:
        # Again, since another mount may have been quicker.
        if _check_free(real, devices, known_ids, asked=asked):
            give_back(real, asked=asked)
    except BaseException:
        os.close(lock_fd)
        raise
    return DeviceDirectory(number, real, uuid.uuid4().hex[:16]), lock_fd


def _check_free(
    path: str, devices: DeviceSet, known_ids: Collection[str], *, asked: str
) -> Stamp | None:
    """Return the stamp of a directory that was to become a device of this filesystem, if it was.

    Raises `Refused` for what is anything else than that, or empty.
    """
    stamp = read_stamp(path, asked=asked)
    if stamp is None:
        check_empty(path, asked=asked)
        return None
    is_ours = stamp.filesystem_id == devices.filesystem_id
    if is_ours and stamp.joining and stamp.device_id not in known_ids:
        return stamp
    wrong = f"{path} belongs to filesystem {stamp.filesystem_id}"
    if is_ours:
        wrong = f"{path} is, or was, device {stamp.device_number} of this filesystem"
    raise Refused(asked=asked, wrong=wrong, remedy="name an empty directory")


def give_back(path: str, *, asked: str) -> None:
    """Make a directory empty again that is no device, or none any more. Raises `Refused`.

    Objects that were made ahead of need are empty; others there cannot be.
    """
    objects = os.path.join(path, OBJECTS_NAME)
    with refusing(path, asked=asked), contextlib.suppress(FileNotFoundError):
        for folder in sorted(os.listdir(objects)):
            place = os.path.join(objects, folder)
            if folder == PROBE_NAME:
                os.unlink(place)
                continue
            for name in sorted(os.listdir(place)):
                _unlink_empty(path, os.path.join(place, name), asked=asked)
            os.rmdir(place)
        os.rmdir(objects)
    with refusing(path, asked=asked), contextlib.suppress(FileNotFoundError):
        # What has something in it has a stamp, also after the power fails.
        flush_directory(Path(path))
        os.unlink(os.path.join(path, STAMP_NAME))
        flush_directory(Path(path))


def _unlink_empty(path: str, name: str, *, asked: str) -> None:
    if os.lstat(name).st_size:
        raise Refused(
            asked=asked,
            wrong=f"{path} is no device, and yet {name} is not empty",
            remedy="name an empty directory",
        )
    os.unlink(name)


def empty_directory(path: str) -> bool:
    """Take out of a locked directory what made it a device; False where something is left.

    What has content is kept, although nothing refers to it. Blocks.
    """
    try:
        give_back(path, asked="remove")
        return not set(os.listdir(path)) - {"lost+found", LOCK_NAME}
    except OSError as error:
        log.warning("%s cannot be emptied: %s", path, error)
    except Refused as refused:
        log.warning("%s cannot be emptied: %s", path, refused.wrong)
    return False


def stamp_joining(device: DeviceDirectory, devices: Sequence[DeviceDirectory], of: str) -> None:
    """Note durably in a locked, empty directory that it is to become a device of filesystem `of`.

    Its folder for objects is durable, too: the catalog may know of the device from now on.

    Raises OSError.
    """
    places = {each.number: each.path for each in (*devices, device)}
    write_stamp(
        device.path,
        Stamp(
            format_version=FORMAT_VERSION,
            filesystem_id=of,
            device_number=device.number,
            device_id=device.device_id,
            device_count=device.number + 1,
            backing=read_backing(device.path),
            paths=tuple(places.get(number, "") for number in range(device.number + 1)),
            joining=True,
        ),
    )
    # After the stamp, by which a directory with something in it is known.
    os.mkdir(os.path.join(device.path, OBJECTS_NAME), 0o700)
    flush_directory(Path(device.path))
