"""Checking a filesystem, mounted or not, and repairing one that is not.

Everything is found out on an image of the catalog and by looking at the devices. Corrections are
tried on the image, until nothing is left that can be corrected, and then done to the catalog in one
transaction, by the code that a server uses (`repair`).

Invariants:
  * Without a repair nothing on the devices is changed.
  * Nothing is repaired while staging memory holds what a server acknowledged and did not commit.
  * Of a mounted filesystem only that is reported which two images, before and after, agree on.

Concurrency: plain blocking functions of a command, which has one thread.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fpfs.core.errors import CatalogError
from fpfs.core.fsck import CheckReport, Finding, Kind
from fpfs.core.protocol.control import ControlClient
from fpfs.core.protocol.questions import AskStatus
from fpfs.core.protocol.reports import DeviceState
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.rows.devices import fetch_devices
from fpfs.daemon.devices.arena import arena_path
from fpfs.daemon.devices.directory import find_devices
from fpfs.daemon.devices.opened_set import DeviceDirectory, DeviceSet
from fpfs.daemon.offline.contents import check_contents
from fpfs.daemon.offline.findings import Found, Paths
from fpfs.daemon.offline.image import (
    DATABASE,
    CatalogImage,
    lacks_room,
    take_image,
    take_live_image,
)
from fpfs.daemon.offline.names import check_names
from fpfs.daemon.offline.objects import Objects
from fpfs.daemon.offline.repair import apply, try_corrections
from fpfs.daemon.offline.storage import (
    DataCheck,
    check_objects,
    check_unused,
    describe_damage,
    list_objects,
    still_damaged,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from fpfs.core.mounts import MountEntry
    from fpfs.daemon.offline.storage import DamagedBlock

STATUS_TIMEOUT_S = 60.0

INTEGRITY_LINES_MAX = 20


class Wishes(NamedTuple):
    """What a check is to do. `progress` is told the bytes that were read, and how many will be."""

    repair: bool
    data: bool
    progress: Callable[[int, int], None]


def check_devices(paths: Sequence[str], wishes: Wishes) -> CheckReport:
    """Check a filesystem that is not mounted, and repair it if that is wished.

    Raises `Refused` when it cannot be checked, or must not be repaired.
    """
    asked = f"fsck of {', '.join(paths)}"
    with contextlib.ExitStack() as stack:
        devices = find_devices(paths, asked=asked, to_change=wishes.repair)
        stack.enter_context(devices)
        arena = arena_path(devices.filesystem_id)
        if wishes.repair and os.path.lexists(arena):
            raise Refused(
                asked=asked,
                wrong=f"{arena} holds what a server that died had acknowledged",
                remedy="mount it once and unmount it, which recovers that, and repair it then",
            )
        folder = stack.enter_context(image_folder(asked))
        image = open_image(devices, folder, asked=asked)
        if image is None:
            return _never_mounted(devices.filesystem_id)
        stack.callback(image.close)
        objects = Objects(devices.devices)
        stack.callback(objects.close)
        check = _Check(image.connection, objects, devices.devices)
        return check.report(image, devices, wishes, asked=asked)


def check_mounted(entry: MountEntry, wishes: Wishes) -> CheckReport:
    """Check a mounted filesystem while programs use it; nothing is changed. Raises `Refused`."""
    asked = f"fsck of {entry.mountpoint}"
    with ControlClient(entry, asked=asked) as client:
        status = client.ask(AskStatus(), timeout_s=STATUS_TIMEOUT_S)
    devices = [DeviceDirectory(each.number, each.path, "") for each in status.devices]
    missing = {each.number for each in status.devices if each.state is DeviceState.MISSING}
    usable = [Path(copy.path) for copy in status.catalog.copies if not copy.trouble]
    if not usable:
        raise Refused(
            asked=asked,
            wrong="; ".join(f"{copy.path}: {copy.trouble}" for copy in status.catalog.copies),
            remedy="unmount it, which writes the catalog once more, and see what that says",
        )
    path = usable[0]

    def look(stack: contextlib.ExitStack) -> CatalogImage:
        folder = stack.enter_context(image_folder(asked))
        image = take_live_image(path, folder=folder, filesystem_id=status.filesystem_id)
        stack.callback(image.close)
        return image

    with contextlib.ExitStack() as stack:
        stack.enter_context(refusing_image(asked))
        image = look(stack)
        objects = Objects([device for device in devices if device.number not in missing])
        stack.callback(objects.close)
        first = _Check(image.connection, objects, devices, missing)
        first.look()
        damaged = first.read(wishes) if wishes.data else []
        findings = [each.finding for each in first.catalog]
        if first.storage or damaged:
            # What was replaced meanwhile may have gone from the devices: that is no damage.
            image = look(stack)
            second = _Check(image.connection, objects, devices, missing)
            second.look(list_again=False, of=first)
            now = {_key(each.finding) for each in second.storage}
            findings += [each.finding for each in first.storage if _key(each.finding) in now]
            damaged = still_damaged(image.connection, damaged)
        findings += [each.finding for each in first.describe(damaged)]
        notes = [f"{copy.path}: {copy.trouble}" for copy in status.catalog.copies if copy.trouble]
        return CheckReport(
            filesystem_id=status.filesystem_id,
            ended_cleanly=True,
            mounted=True,
            findings=tuple(findings),
            notes=tuple(notes),
            inodes=first.count("inodes"),
            objects=first.count("objects"),
            bytes_checked=first.bytes_checked,
            bytes_unverified=first.bytes_unverified,
        )


def _key(finding: Finding) -> tuple[object, ...]:
    return (finding.kind, finding.ino, finding.device, finding.object)


class _Check:
    """One look at an image and the devices."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        objects: Objects,
        devices: Sequence[DeviceDirectory],
        missing: Collection[int] = (),
    ) -> None:
        self.connection = connection
        self._objects = objects
        self._device_paths = {device.number: device.path for device in devices}
        self._missing = {number: self._device_paths[number] for number in missing}
        self._paths = Paths(connection)
        self.catalog: list[Found] = []
        """What is wrong in the catalog."""
        self.strays: list[Found] = []
        self.storage: list[Found] = []
        """What is wrong between the catalog and the objects."""
        self.unused: list[Found] = []
        self.bytes_checked = 0
        self.bytes_unverified = 0

    def look(self, *, list_again: bool = True, of: _Check | None = None) -> None:
        """Look at everything; at the devices only if they were not listed for this image."""
        connection = self.connection
        if of is not None:
            _copy_found(of.connection, connection)
        elif list_again:
            self.strays = list_objects(connection, self._objects)
            self.strays += [
                Found(Finding(kind=Kind.STRAY, text=text, device=device))
                for device, text in self._objects.troubles.items()
            ]
        self.catalog = list(_check_structure(connection))
        self.catalog += check_names(connection, self._paths)
        self.catalog += check_contents(connection, self._paths, self._device_paths.keys())
        self.storage = list(check_objects(connection, self._paths, self._missing))
        self.unused = list(check_unused(connection))

    def look_again(self) -> list[Found]:
        """Look at an image that was changed; returns all that is wrong."""
        self.look(list_again=False)
        return [*self.catalog, *self.storage, *self.unused]

    def read(self, wishes: Wishes) -> list[DamagedBlock]:
        """Compare all contents on devices with their checksums."""
        check = DataCheck(self.connection, self._objects)
        damaged = check.run(wishes.progress)
        self.bytes_checked = check.bytes_checked
        self.bytes_unverified = check.bytes_unverified
        return damaged

    def describe(self, damaged: list[DamagedBlock]) -> Iterator[Found]:
        """Findings of damaged blocks."""
        yield from describe_damage(damaged, self._paths, self._device_paths)

    def count(self, table: str) -> int:
        """Rows of a table."""
        return int(self.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def report(
        self, image: CatalogImage, devices: DeviceSet, wishes: Wishes, *, asked: str
    ) -> CheckReport:
        """Check a filesystem that is not mounted, and repair it if that is wished."""
        self.look()
        inodes, objects = self.count("inodes"), self.count("objects")
        damaged = list(self.describe(self.read(wishes))) if wishes.data else []
        notes = list(_notes(image, devices, self.connection))
        copies = [
            Found(Finding(kind=Kind.COPY, text=f"catalog {path} cannot be used: {trouble}"))
            for path, trouble in image.troubles.items()
        ]
        if not image.ended_cleanly and not wishes.repair and self.unused:
            # What a crash leaves is no damage: the next mount sees to it.
            orphans = sum(each.finding.kind is Kind.ORPHAN for each in self.unused)
            notes.append(f"{orphans} objects belong to no file: the next mount removes them")
            self.unused = [e for e in self.unused if e.finding.kind is not Kind.ORPHAN]
        found = [*self.catalog, *self.storage, *self.unused]
        findings = [*copies, *found]
        if wishes.repair:
            corrections = try_corrections(self.connection, found, self.look_again)
            apply(corrections, devices, self._objects, remake_copies=bool(copies), asked=asked)
            findings = [
                *(each._replace(finding=_corrected(each.finding)) for each in copies),
                *(each._replace(finding=_corrected(each.finding)) for each in corrections.done),
                *corrections.left,
            ]
        return CheckReport(
            filesystem_id=devices.filesystem_id,
            ended_cleanly=image.ended_cleanly,
            mounted=False,
            findings=tuple(each.finding for each in [*findings, *self.strays, *damaged]),
            notes=tuple(notes),
            inodes=inodes,
            objects=objects,
            bytes_checked=self.bytes_checked,
            bytes_unverified=self.bytes_unverified,
        )


def _corrected(finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, corrected=True)


def _copy_found(source: sqlite3.Connection, into: sqlite3.Connection) -> None:
    """Give another image the listing of the devices."""
    into.execute("CREATE TEMP TABLE found (device INTEGER, id INTEGER, size INTEGER)")
    into.executemany(
        "INSERT INTO found VALUES (?, ?, ?)", source.execute("SELECT device, id, size FROM found")
    )
    into.execute("CREATE INDEX temp.found_by_id ON found (device, id)")


def _check_structure(connection: sqlite3.Connection) -> Iterator[Found]:
    """What SQLite says of its own structure."""
    lines = connection.execute(f"PRAGMA integrity_check({INTEGRITY_LINES_MAX})").fetchall()
    for (line,) in lines:
        if line != "ok":
            text = f"the catalog's database: {' '.join(str(line).split())}"
            yield Found(Finding(kind=Kind.STRUCTURE, text=text))


def _notes(
    image: CatalogImage, devices: DeviceSet, connection: sqlite3.Connection
) -> Iterator[str]:
    arena = arena_path(devices.filesystem_id)
    if os.path.lexists(arena):
        yield (
            "its server died in this boot of the machine: a mount recovers what was acknowledged"
            f" and not committed ({arena}); what is told here is without that"
        )
    elif not image.ended_cleanly:
        yield (
            "its last mount was not ended cleanly, or a device failed in it: the next mount looks"
            " for what was never finished, and removes it"
        )
    (waiting,) = connection.execute(
        "SELECT count(*) FROM inodes i WHERE nlink = 0 AND NOT EXISTS"
        " (SELECT 1 FROM names n WHERE n.ino = i.ino) AND NOT EXISTS"
        " (SELECT 1 FROM group_members m WHERE m.former = i.ino) AND NOT EXISTS"
        " (SELECT 1 FROM group_members m WHERE m.ino = i.ino)"
    ).fetchone()
    if waiting:
        yield f"{waiting} files without a name, which were open: the next mount deletes them"


def _never_mounted(filesystem_id: str) -> CheckReport:
    return CheckReport(
        filesystem_id=filesystem_id,
        ended_cleanly=True,
        mounted=False,
        findings=(),
        notes=("it was formatted, and nothing was ever stored in it",),
        inodes=0,
        objects=0,
    )


@contextlib.contextmanager
def image_folder(asked: str) -> Iterator[Path]:
    """A folder for an image, which goes with it. Raises `Refused`."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="fpfs-image-")
    except OSError as error:
        raise _no_image(error, asked) from error
    with folder as path:
        yield Path(path)


@contextlib.contextmanager
def refusing_image(asked: str) -> Iterator[None]:
    """Turn the failure to make an image, or to read it, into `Refused`."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise _no_image(error, asked) from error


def _no_image(error: OSError | sqlite3.Error, asked: str) -> Refused:
    if lacks_room(error):
        return Refused(
            asked=asked,
            wrong=f"the temporary folder {tempfile.gettempdir()} has no room for a copy of the"
            " catalog",
            remedy="make room there, or name a larger folder with TMPDIR",
        )
    why = getattr(error, "strerror", None) or str(error)
    remedy = f"see that there is room for a copy of the catalog in {tempfile.gettempdir()}"
    if isinstance(error, CatalogError):
        remedy = error.remedy or "put the catalog back from a backup"
    elif isinstance(error, PermissionError):
        remedy = "ask for it as the owner of the mount, or as root"
    return Refused(asked=asked, wrong=f"the catalog cannot be read: {why}", remedy=remedy)


def open_image(devices: DeviceSet, folder: Path, *, asked: str) -> CatalogImage | None:
    """An image of the catalog of devices that nobody uses; None where none was ever made.

    The devices are then those that it knows. Raises `Refused` where one of them was not named.
    """
    paths = [Path(each, DATABASE) for each in devices.catalog_directories]
    with refusing_image(asked):
        image = take_image(paths, folder=folder, filesystem_id=devices.filesystem_id)
        if image is None and devices.was_used:
            raise CatalogError(
                f"there is none at {' nor at '.join(str(path) for path in paths)}",
                remedy="put it back from a backup, without -wal",
            )
        if image is not None:
            known = fetch_devices(image.connection)
            try:
                devices.reconcile(known, is_degraded=False, asked=asked)
            except Refused:
                image.close()
                raise
    return image
