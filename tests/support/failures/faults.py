"""Devices that fill up and fail: small filesystems on loop devices under a mount.

Invariants:
  * Only what this module made is filled or broken: image files in the test's own folder.
  * A device that failed is repaired (mounted again, its log recovered) before the lab goes down.

Concurrency: one thread.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from fpfs.testing.lab import Lab, lab
from fpfs.testing.mounted import Mount, mounted
from tests.support.processes import run

MEBIBYTE = 2**20
DEVICE_BYTES = 320 * MEBIBYTE
SHUT_DOWN = 0x8004587D  # XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN
WITHOUT_LOG = struct.pack("I", 2)
BALLAST = "ballast"
BUSY_S = 60.0
BUSY_RETRY_S = 0.1
UNUSED_S = 60.0


class Filesystem(enum.Enum):
    """What lies on a device."""

    XFS = "xfs"
    EXT4 = "ext4"


def wait_until_unused(device: str) -> None:
    """Return when no filesystem on a block device is mounted any more.

    Whoever makes a mount namespace has a copy of every mount, for a moment at least.
    """
    deadline_s = time.monotonic() + UNUSED_S
    while True:
        try:
            os.close(os.open(device, os.O_RDWR | os.O_EXCL))
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(BUSY_RETRY_S)  # nothing tells when the kernel has let go
        else:
            return


def make_ext4(device: str) -> None:
    """Format a block device, once it is unused."""
    wait_until_unused(device)
    run("mkfs.ext4", "-q", "-F", device)


class FaultyDevices:
    """The devices of a lab, and what can happen to them."""

    def __init__(self, made: Lab, filesystem: Filesystem) -> None:
        """Take over fresh XFS devices; they become what is asked for."""
        self.mountpoints = made.mountpoints
        self._loops = [str(device.loop) for device in made.devices()]
        self._filesystem = filesystem
        self.broken: set[int] = set()
        if filesystem is Filesystem.EXT4:
            for number, mountpoint in enumerate(self.mountpoints):
                run("umount", mountpoint)
                make_ext4(self._loops[number])
                self._mount(number)
        self.folders = [mountpoint / "device" for mountpoint in self.mountpoints]
        for folder in self.folders:
            folder.mkdir()

    def _mount(self, number: int) -> None:
        options = "errors=remount-ro" if self._filesystem is Filesystem.EXT4 else "defaults"
        kind = self._filesystem.value
        run("mount", "-t", kind, "-o", options, self._loops[number], self.mountpoints[number])

    def free_bytes(self, number: int) -> int:
        """What the filesystem of a device has left."""
        figures = os.statvfs(self.mountpoints[number])
        return figures.f_bavail * figures.f_frsize

    def fill(self, number: int, *, leave_bytes: int) -> None:
        """Take the space of a device but for `leave_bytes`; nothing is written for it."""
        with (self.mountpoints[number] / BALLAST).open("ab") as file:
            step_bytes = DEVICE_BYTES
            while step_bytes >= 4096:
                taken = min(step_bytes, self.free_bytes(number) - leave_bytes)
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, taken)
                except OSError as error:
                    # What the filesystem needs for itself cannot be taken.
                    assert error.errno in (errno.ENOSPC, errno.EINVAL)
                    step_bytes //= 2

    def leave_no_room_for_a_file(self, number: int) -> None:
        """Take the space of a device, and what it needs to make an empty file.

        XFS makes room for many files at a time, and gives back what it freed when its log is
        written: this returns when no file could be made right after that.
        """
        directory = self.mountpoints[number]
        directory_fd = os.open(directory, os.O_RDONLY)
        made, before = 0, -1
        try:
            while made > before:
                before = made
                os.fsync(directory_fd)
                self.fill(number, leave_bytes=0)
                try:
                    while True:
                        (directory / f"{made}").touch()
                        made += 1
                except OSError as error:
                    assert error.errno == errno.ENOSPC
        finally:
            os.close(directory_fd)

    def empty(self, number: int) -> None:
        """Give the space back that `fill` took."""
        (self.mountpoints[number] / BALLAST).unlink()

    def fail(self, number: int) -> None:
        """Let every further access to a device's disk end with EIO, and lose what is unflushed."""
        self.broken.add(number)
        fd = os.open(self.mountpoints[number], os.O_RDONLY)
        try:
            fcntl.ioctl(fd, SHUT_DOWN, WITHOUT_LOG)
        finally:
            os.close(fd)

    def make_read_only(self, number: int) -> None:
        """Let ext4 find an error in itself, at which it turns read-only."""
        self.broken.add(number)
        name = Path(self._loops[number]).name
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("broken by a test")

    def _unmount(self, number: int) -> None:
        """Unmount; what a killed server had open is let go of a moment after its end."""
        deadline_s = time.monotonic() + BUSY_S
        while True:
            try:
                run("umount", self.mountpoints[number])
            except AssertionError as error:
                if "busy" not in str(error) or time.monotonic() > deadline_s:
                    raise
                time.sleep(BUSY_RETRY_S)  # nothing tells when a mount ceases to be busy
            else:
                break
        # Or it would be mounted as it is, and not as its disk has it.
        wait_until_unused(self._loops[number])

    def repair(self, number: int) -> None:
        """Mount a device again; nothing may be open on it."""
        self._unmount(number)
        if self._filesystem is Filesystem.EXT4:
            # 1 says that it mended something, as it should.
            run("sh", "-c", f"e2fsck -p -f {self._loops[number]} || test $? -eq 1")
        self._mount(number)
        self.broken.discard(number)


@contextlib.contextmanager
def faulty_mount(
    folder: Path,
    *,
    device_count: int = 2,
    filesystem: Filesystem = Filesystem.XFS,
    options: tuple[str, ...] = (),
) -> Iterator[tuple[Mount, FaultyDevices]]:
    """A mount over small devices of its own, unthrottled."""
    with lab(
        device_count=device_count, mib_per_s=0, size_bytes=DEVICE_BYTES, parent=folder
    ) as made:
        devices = FaultyDevices(made, filesystem)
        with mounted(
            devices=devices.folders, staging="16M", options=options, parent=folder
        ) as opened:
            try:
                yield opened, devices
            finally:
                if devices.broken:
                    opened.tear_down()
                    for number in sorted(devices.broken):
                        devices.repair(number)
