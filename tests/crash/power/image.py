"""Images of devices after a power cut, mounted by the product itself and looked at.

The server is not started as a command: a process that has everything imported becomes keeper and
server by the same functions (`fpfs.daemon.mount.main.run`), which takes a tenth of the time.

Concurrency: the caller has one thread, since it forks.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from fpfs.core.mounts import mount_at
from fpfs.core.options import MountOptions
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import AddDevice, AskStatus, FlushAll
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.schema import DeviceUse
from fpfs.daemon.devices.arena import arena_path
from fpfs.daemon.devices.label import LOCK_NAME, STAMP_MADE_NAME, newest, read_stamp
from fpfs.daemon.mount import main
from fpfs.daemon.mount.fusermount import abort_connection, unmount
from fpfs.daemon.mount.launch import Readiness, prepare, stop

OPTIONS = MountOptions(staging_bytes=16 * 1024 * 1024, chunk_bytes=128 * 1024, adopt=True)
"""How images are mounted: they lie elsewhere than what was recorded, so `adopt`."""


COLLECTED_S = 60.0
"""How long the removal of what no version refers to may take, with very few such objects."""
DEVICES = 2
"""How many a filesystem has when it is made."""


class Violation(AssertionError):
    """A promise that a power cut broke."""


class MountRefused(Violation):
    """What was left cannot be mounted."""


class MountedImage:
    """A mount of an image; leaving the block unmounts it in good order, or by force."""

    def __init__(self, devices: Sequence[Path], folder: Path) -> None:
        """Nothing is mounted yet."""
        self.devices = devices
        self.root = folder / "mount"
        self.log = folder / "server.log"
        self._keeper_pid = 0

    def __enter__(self) -> MountedImage:
        """Mount; raises `MountRefused`."""
        self.root.mkdir(exist_ok=True)
        self.log.unlink(missing_ok=True)
        ready, ready_writer = os.pipe2(os.O_CLOEXEC)
        self._keeper_pid = os.fork()
        if self._keeper_pid == 0:
            os.close(ready)
            self._be_keeper(ready_writer)
        os.close(ready_writer)
        with open(ready, "rb") as reader:
            line = reader.readline()
        readiness = msgspec.json.decode(line, type=Readiness) if line else None
        if readiness is None or readiness.refusal is not None:
            self._forget()
            why = readiness.refusal if readiness is not None else "the server died"
            raise MountRefused(f"the mount is refused: {why}\n{self.log.read_text()}")
        return self

    def _be_keeper(self, ready_fd: int) -> None:
        """Become keeper and server: never returns."""
        status = 1
        try:
            os.setsid()
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.set_inheritable(ready_fd, True)
            config = prepare(
                mountpoint=str(self.root),
                devices=[str(device) for device in self.devices],
                options=OPTIONS,
                log=str(self.log),
                ready_fd=ready_fd,
            )
            status = main.run(config)
        finally:
            os._exit(status)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Unmount, and leave nothing behind whatever happened."""
        if kind is None:
            final = stop(str(self.root))
            if final.failures:
                raise Violation(f"not everything could be kept: {final.failures}")
        self._forget()

    def flush(self) -> None:
        """Make everything durable, and have space given back, also what the cut left of it."""
        deadline_s = time.monotonic() + COLLECTED_S
        with ControlClient(find_fpfs(str(self.root), asked="flush"), asked="flush") as client:
            client.ask(FlushAll())
            while client.ask(AskStatus()).recovery.objects_removed is None:
                if time.monotonic() > deadline_s:
                    raise Violation(f"objects of no version are there after {COLLECTED_S:.0f} s")

    def add(self, folder: Path) -> None:
        """Add a directory as a device; raises `Refused`."""
        with ControlClient(find_fpfs(str(self.root), asked="add"), asked="add") as client:
            client.ask(AddDevice(path=str(folder)))

    def _forget(self) -> None:
        entry = mount_at(str(self.root))
        if entry is not None and entry.is_fpfs:
            abort_connection(entry)
            try:
                unmount(entry.mountpoint, lazy=True)
            except Refused:
                assert mount_at(str(self.root)) is None, f"{self.root} cannot be unmounted"
        os.waitpid(self._keeper_pid, 0)
        stamp = read_stamp(str(self.devices[0]), asked="clean up")
        if stamp is not None:
            Path(arena_path(stamp.filesystem_id)).unlink(missing_ok=True)


EXPECTED = re.compile(
    # The cut fell between the two copies' making. One that is there must be sound.
    r"was made anew from \S+: it is missing$"
    # What was being saved as a whole is not whole.
    r"|group \S+ was (not committed|changed and not committed again) when the last mount ended: "
    # What was being written is no checkpoint.
    r"|was made and never finished when the last mount ended: it is removed$"
    r"|was removed after something was saved that is lost: it is back$"
)
"""What a server may say of a cut, loudly enough for its owner to hear."""


def check_log(image: MountedImage) -> None:
    """Nothing in the server's log says that something was wrong."""
    bad = [line for line in image.log.read_text().splitlines() if _is_bad(line)]
    if bad:
        raise Violation(f"the server's log says: {bad}")


def _is_bad(line: str) -> bool:
    words = line.split(" ", 2)
    is_loud = len(words) > 1 and words[1] in ("WARNING", "ERROR", "CRITICAL")
    return is_loud and not EXPECTED.search(line)


def named_devices(images: Sequence[Path]) -> list[Path]:
    """The directories of an image that a mount is given: those with a stamp.

    Where nothing was stamped yet, the first two are formatted, as they were.
    """
    stamped = [image for image in images if read_stamp(str(image), asked="mount") is not None]
    return stamped or list(images[:DEVICES])


def check_left_out(images: Sequence[Path], names: Collection[str]) -> list[Path]:
    """Directories beside the devices `names` are as good as empty, or stamped; returns the former.

    A directory that was to be a device and is none, or was one, can be used again.
    """
    free = []
    for image in images:
        if image.name in names:
            continue
        stamp = read_stamp(str(image), asked="look")
        if stamp is None or stamp.joining:
            free.append(image)
        found = set(os.listdir(image)) - {LOCK_NAME, STAMP_MADE_NAME}
        if stamp is None and found:
            raise Violation(f"{image.name} is no device and has no stamp, but {sorted(found)}")
    return free


def check_at_rest(devices: Sequence[Path]) -> None:
    """After a clean unmount: the catalog is sound, and the objects are those that it names."""
    stamps = {
        device: stamp
        for device in devices
        if (stamp := read_stamp(str(device), asked="look")) is not None
    }
    last = newest(list(stamps.values()))
    holder = next(d for d, s in stamps.items() if s.device_number in last.catalog_devices)
    connection = sqlite3.connect(f"file:{holder / 'catalog.db'}?mode=ro", uri=True)
    try:
        (integrity,) = connection.execute("PRAGMA integrity_check").fetchone()
        named = set(connection.execute("SELECT device, id FROM objects").fetchall())
        (removals,) = connection.execute("SELECT count(*) FROM removals").fetchone()
        used = set(
            connection.execute(
                "SELECT number, device_id FROM devices WHERE state != ?", (DeviceUse.REMOVED,)
            ).fetchall()
        )
    finally:
        connection.close()
    if integrity != "ok":
        raise Violation(f"the catalog is damaged: {integrity}")
    there = {
        (stamp.device_number, int(path.name, 16))
        for device, stamp in stamps.items()
        if (stamp.device_number, stamp.device_id) in used
        for path in (device / "objects").glob("??/*")
    }
    if there != named:
        raise Violation(
            f"objects without a name: {sorted(there - named)}, missing: {sorted(named - there)}"
        )
    if removals:
        raise Violation(f"{removals} removals are still to be done after a flush")
