"""Devices that a mount has to do without: which they are, and whether it may.

A device is *missing* when its directory is not there, is empty (its filesystem is not mounted), or
cannot be read and written. A mount that is asked for with `--degraded` goes on without it, and so
does a server that takes over from one that died.

Invariants:
  * Nothing is written to, nor made in, the place of a missing device.
  * A mount has at least one of the devices that hold the catalog.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.safe_open import open_regular
from fpfs.daemon.devices.label import LOCK_NAME, Stamp, newest, read_stamp

LOST = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EIO,
        errno.EROFS,
        errno.ENXIO,
        errno.ENODEV,
        errno.ESTALE,
        errno.ESHUTDOWN,
        errno.EUCLEAN,
        errno.ENOTCONN,
    }
)
"""What the system says of a place whose device is lost."""

REMEDY = (
    "name all its directories; fpfs mount --degraded (-o degraded) does without what is missing"
)


CATALOG_DEVICES_FIRST = (0, 1)
"""Devices that hold a copy of the catalog where nothing else is said, where there are as many."""


class MissingDevice(NamedTuple):
    """A device that this mount does without. `path` is where it is expected, or was last."""

    number: int
    path: str
    trouble: str


class Search(NamedTuple):
    """Directories that can be used, and why the other ones, by path, cannot."""

    paths: Sequence[str]
    troubles: Mapping[str, str]
    is_degraded: bool

    def missing(self, stamps: Sequence[Stamp], *, asked: str) -> Sequence[MissingDevice]:
        """Devices that the stamps tell of and none is of. `Refused` where they are needed."""
        last = newest(stamps)
        found = {stamp.device_number for stamp in stamps}
        devices = []
        for number in sorted(set(range(last.device_count)) - found - set(last.removed)):
            path = last.paths[number] if number < len(last.paths) else ""
            devices.append(MissingDevice(number, path, self.troubles.get(path, "it was not named")))
        if devices and not self.is_degraded:
            raise refuse_without(devices, of=last.device_count - len(last.removed), asked=asked)
        holders = last.catalog_devices or CATALOG_DEVICES_FIRST
        if devices and not found.intersection(holders):
            raise Refused(
                asked=asked,
                wrong=f"{_describe(devices)}, and no other device has the catalog",
                remedy=f"bring back device {' or '.join(map(str, holders))}",
            )
        return devices


def refuse_without(devices: Sequence[MissingDevice], *, of: int, asked: str) -> Refused:
    """The refusal of a mount that would have to do without devices, `of` so many."""
    return Refused(asked=asked, wrong=f"of {of} devices, {_describe(devices)}", remedy=REMEDY)


def _describe(devices: Sequence[MissingDevice]) -> str:
    names = ", ".join(
        f"device {device.number} (last at {device.path})"
        if device.path
        else f"device {device.number}"
        for device in devices
    )
    return f"{names} {'is' if len(devices) == 1 else 'are'} missing"


def set_apart(search: Search, *, asked: str, held_fds: Sequence[int]) -> Search:
    """Tell the directories that can be used from those that cannot. Blocks.

    With `held_fds`, locks that a server before held, only those are used that it held.
    Raises `Refused` when none is left.
    """
    held = [folder_of_lock(held_fd) for held_fd in held_fds]
    usable: list[str] = []
    troubles: dict[str, str] = {}
    named = [os.path.realpath(path) for path in search.paths]
    # What was added to the mount since it was made is among the locks alone.
    for path in [*search.paths, *(folder for folder in held if folder not in named)]:
        real = os.path.realpath(path)
        trouble = _trouble(real, held, asked=asked)
        if trouble:
            troubles[real] = trouble
        else:
            usable.append(path)
    if not usable:
        told = "; ".join(f"{path}: {trouble}" for path, trouble in troubles.items())
        raise Refused(
            asked=asked,
            wrong=f"none of the device directories can be used ({told})",
            remedy="name at least one that holds catalog.db",
        )
    return search._replace(paths=usable, troubles=troubles)


def folder_of_lock(lock_fd: int) -> str:
    """Return the directory that a descriptor locks.

    By name, since a filesystem that failed tells nothing else of an open file.
    """
    return os.path.dirname(os.readlink(f"/proc/self/fd/{lock_fd}"))


def _trouble(path: str, held: Collection[str], *, asked: str) -> str:
    """Why a directory cannot be used; "" if it can."""
    try:
        if not os.listdir(path):
            return "it is empty: is its filesystem mounted?"
        stamp = read_stamp(path, asked=asked)
        if stamp is None:
            return "it holds no fpfs device: is its filesystem mounted?"
        os.close(open_regular(os.path.join(path, LOCK_NAME), os.O_RDWR | os.O_CREAT))
    except Refused as refused:
        cause = refused.__cause__
        if isinstance(cause, OSError) and cause.errno in LOST:
            return cause.strerror or str(cause)
        raise
    except OSError as error:
        if error.errno in LOST:
            return error.strerror or str(error)
        raise Refused(
            asked=asked,
            wrong=f"the device directory {path} cannot be used ({error.strerror})",
            remedy="see that it is on a writable filesystem and belongs to you",
        ) from error
    if held and path not in held:
        return "it was missing when the filesystem was mounted"
    return ""
