"""Objects as files of devices that nobody has mounted: listing, reading, removing them.

Invariants:
  * Folders are opened from a descriptor of the device's directory and never through symbolic
    links; nothing but a regular file is opened.

Concurrency: plain blocking functions of one thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import BLOCK_BYTES, ObjectId, checksum_blocks
from fpfs.core.paths import show_name
from fpfs.daemon.catalog.safe_open import open_folder, open_regular
from fpfs.daemon.devices.opened_set import OBJECTS_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fpfs.daemon.devices.opened_set import DeviceDirectory

READ_BLOCKS = 64
"""Blocks that are read at once."""

_OPEN_MAX = 64
_FOLDER = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"[0-9a-f]{16}")
_PROBE = ".direct-probe"
_ID_END = 2**63


class StoredObject(NamedTuple):
    """An object that is there."""

    device: int
    id: int
    size: int


class Stray(NamedTuple):
    """Something in an objects directory that is no object, or cannot be read; `what` says why."""

    device: int
    path: str
    what: str


class Objects:
    """The objects of all devices. A device whose directory cannot be opened has none."""

    def __init__(self, devices: Sequence[DeviceDirectory]) -> None:
        """Open the directories."""
        self._folders: dict[int, int] = {}
        self._files: dict[ObjectId, int] = {}
        self._buffer = mmap.mmap(-1, READ_BLOCKS * BLOCK_BYTES)
        self.troubles: dict[int, str] = {}
        """Devices whose objects cannot be reached, and why."""
        for device in devices:
            try:
                device_fd = open_folder(device.path)
                try:
                    self._folders[device.number] = open_folder(OBJECTS_NAME, folder_fd=device_fd)
                finally:
                    os.close(device_fd)
            except OSError as error:
                path = os.path.join(device.path, OBJECTS_NAME)
                is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
                why = "it is no directory" if is_link else error.strerror
                self.troubles[device.number] = f"{path} cannot be used: {why}"

    def close(self) -> None:
        """Close everything."""
        self.close_files()
        for folder_fd in self._folders.values():
            os.close(folder_fd)
        self._folders.clear()
        self._buffer.close()

    def close_files(self) -> None:
        """Close the objects that are kept open."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def list_all(self) -> Iterator[StoredObject | Stray]:
        """Yield everything that is in the objects directories."""
        for device, root_fd in self._folders.items():
            try:
                names = sorted(os.listdir(root_fd))
            except OSError as error:
                yield Stray(device, OBJECTS_NAME, _unreadable(error))
                continue
            for name in names:
                if name != _PROBE:
                    yield from self._list_folder(device, root_fd, name)

    def _list_folder(self, device: int, root_fd: int, name: str) -> Iterator[StoredObject | Stray]:
        shown = show_name(os.fsencode(f"{OBJECTS_NAME}/{name}"))
        if not _FOLDER.fullmatch(name):
            yield Stray(device, shown, "is nothing of fpfs")
            return
        try:
            folder_fd = open_folder(name, folder_fd=root_fd)
        except OSError as error:
            is_no_folder = error.errno in (errno.ENOTDIR, errno.ELOOP)
            yield Stray(device, shown, "is no directory" if is_no_folder else _unreadable(error))
            return
        try:
            for entry in sorted(os.listdir(folder_fd)):
                path = f"{shown}/{show_name(os.fsencode(entry))}"
                try:
                    found = os.stat(entry, dir_fd=folder_fd, follow_symlinks=False)
                except FileNotFoundError:  # removed meanwhile
                    continue
                except OSError as error:
                    yield Stray(device, path, _unreadable(error))
                    continue
                id_ = int(entry, 16) if _OBJECT.fullmatch(entry) else _ID_END
                if id_ >= _ID_END or f"{id_ & 0xFF:02x}" != name:
                    yield Stray(device, path, "is no object")
                elif not stat.S_ISREG(found.st_mode):
                    yield Stray(device, path, "is in the place of an object, and no regular file")
                else:
                    yield StoredObject(device, id_, found.st_size)
        except OSError as error:
            yield Stray(device, shown, _unreadable(error))
        finally:
            os.close(folder_fd)

    def read_blocks(self, place: ObjectId, block: int, count: int) -> bytes:
        """Return blocks of an object, past the page cache; what is behind its end is zeros.

        `count` is at most `READ_BLOCKS`. Raises OSError.
        """
        descriptor = self._open(place)
        wanted = count * BLOCK_BYTES
        done = 0
        with memoryview(self._buffer) as view:
            while done < wanted:
                with view[done:wanted] as rest:
                    piece = os.preadv(descriptor, [rest], block * BLOCK_BYTES + done)
                done += piece
                if piece == 0 or done % mmap.PAGESIZE:  # the object ends there
                    break
            return bytes(view[:done]) + bytes(wanted - done)

    def count_blocks(self, place: ObjectId) -> int:
        """How many blocks an object has, the last one perhaps in part. Raises OSError."""
        return -(-os.fstat(self._open(place)).st_size // BLOCK_BYTES)

    def damaged_blocks(
        self, place: ObjectId, block: int, checksums: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        """Yield those of the blocks that are not sound, from 0, and why: in order."""
        for first in range(0, len(checksums), READ_BLOCKS):
            wanted = checksums[first : first + READ_BLOCKS]
            try:
                found = checksum_blocks(self.read_blocks(place, block + first, len(wanted)))
            except OSError:
                yield from self._damaged_singly(place, block, first, wanted)
                continue
            for i, (is_, should_be) in enumerate(zip(found, wanted, strict=True)):
                if is_ != should_be:
                    yield first + i, "checksum differs"

    def _damaged_singly(
        self, place: ObjectId, block: int, first: int, wanted: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        """Blocks of a range that cannot be read as a whole."""
        for i, checksum in enumerate(wanted, first):
            try:
                if checksum_blocks(self.read_blocks(place, block + i, 1)) != [checksum]:
                    yield i, "checksum differs"
            except OSError as error:
                yield i, _unreadable(error)

    def _open(self, place: ObjectId) -> int:
        found = self._files.get(place)
        if found is not None:
            return found
        if place.device not in self._folders:
            why = self.troubles.get(place.device, f"there is no device {place.device}")
            raise OSError(errno.ENODEV, why)
        if len(self._files) >= _OPEN_MAX:
            self.close_files()
        folder_fd = open_folder(f"{place.id & 0xFF:02x}", folder_fd=self._folders[place.device])
        try:
            descriptor = _open_direct(f"{place.id:016x}", folder_fd)
        finally:
            os.close(folder_fd)
        self._files[place] = descriptor
        return descriptor

    def remove(self, place: ObjectId) -> None:
        """Remove an object, durably with `flush_removals`. Raises OSError."""
        folder_fd = open_folder(f"{place.id & 0xFF:02x}", folder_fd=self._folders[place.device])
        try:
            os.unlink(f"{place.id:016x}", dir_fd=folder_fd)
        finally:
            os.close(folder_fd)

    def flush_removals(self, places: Sequence[ObjectId]) -> None:
        """Make durable that these were removed."""
        for device, low in sorted({(place.device, place.id & 0xFF) for place in places}):
            folder_fd = open_folder(f"{low:02x}", folder_fd=self._folders[device])
            try:
                os.fsync(folder_fd)
            finally:
                os.close(folder_fd)


def _unreadable(error: OSError) -> str:
    return f"cannot be read: {error.strerror}"


def _open_direct(name: str, folder_fd: int) -> int:
    try:
        return open_regular(name, os.O_RDONLY | os.O_DIRECT, folder_fd=folder_fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return open_regular(name, os.O_RDONLY, folder_fd=folder_fd)
