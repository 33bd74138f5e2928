"""The device lab: N throttled XFS filesystems on loop devices, which behave as N independent disks.

Each device is an image file in the lab's directory, attached to a loop device with direct I/O (so
that the image's own page cache takes no part), formatted, mounted, and limited to a bandwidth by
the block cgroup. Measured on the development machine (2 cores, kernel 6.18, November 2026): fio
reaches 1.00, 2.00 and 3.99 times the limit on 1, 2 and 4 devices.

Invariants:
  * A loop device is ours if, and only if, its backing file is an image of this lab: nothing else is
    ever unmounted, detached or limited. So `down` needs no memory of what `up` had reached.
  * The state file is written before anything is made and removed after everything is gone.

Concurrency: `up` and `down` hold an exclusive flock on the lab's directory. Standard library only:
the lab must run before anything is installed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fpfs.core.mounts import mount_table
from fpfs.testing.throttle import CgroupVersion, Throttle, ThrottleError, find_throttle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STATE_NAME = "lab.json"
STATE_FORMAT = 1
MIB = 1024 * 1024
DEVICE_COUNT_MAX = 64
SIZE_BYTES_MIN = 320 * MIB
"""mkfs.xfs refuses less than 300 MiB."""

BUSY_S = 60.0
BUSY_RETRY_S = 0.1

TOOLS = ("losetup", "mkfs.xfs", "mount", "umount")


class LabError(RuntimeError):
    """The lab cannot be made or taken down; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class LabDevice:
    """One device of a lab: where it should be, and what is there now."""

    image: Path
    mountpoint: Path
    loop: str | None
    device_number: str | None
    mounted: bool
    limited: bool


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A lab as its state file describes it."""

    directory: Path
    device_count: int
    size_bytes: int
    mib_per_s: int
    throttle: Throttle | None

    @property
    def mountpoints(self) -> tuple[Path, ...]:
        """The mounted filesystems, one for each device."""
        return tuple(self.directory / f"device{number}" for number in range(self.device_count))

    @property
    def images(self) -> tuple[Path, ...]:
        """The image files, one for each device."""
        return tuple(self.directory / f"device{number}.img" for number in range(self.device_count))

    def devices(self) -> tuple[LabDevice, ...]:
        """What the kernel says about each device now."""
        loops = _loops_by_image(self.images)
        limited = self.throttle.limited() if self.throttle else set()
        found = []
        for image, mountpoint in zip(self.images, self.mountpoints, strict=True):
            loop = loops.get(image)
            number = _device_number(loop) if loop else None
            found.append(
                LabDevice(
                    image=image,
                    mountpoint=mountpoint,
                    loop=loop,
                    device_number=number,
                    mounted=os.path.ismount(mountpoint),
                    limited=number in limited,
                )
            )
        return tuple(found)


def unavailable_reason(*, throttled: bool = True) -> str | None:
    """Why no lab can be made here, in one line for a skipped test; None if one can."""
    if os.geteuid() != 0:
        return "the device lab needs root (loop devices, mounts, block cgroup)"
    if not Path("/dev/loop-control").exists():
        return "the device lab needs loop devices (/dev/loop-control is missing: modprobe loop)"
    missing = [tool for tool in TOOLS if _tool(tool) is None]
    if missing:
        return f"the device lab needs {', '.join(missing)} (Debian: util-linux, mount, xfsprogs)"
    if throttled:
        try:
            find_throttle()
        except ThrottleError as error:
            return f"the device lab needs the block cgroup: {error}"
    return None


def up(directory: Path, *, device_count: int, mib_per_s: int, size_bytes: int) -> Lab:
    """Make a lab in `directory` (created if absent). `mib_per_s` 0 means unlimited.

    Raises LabError; nothing is left behind then.
    """
    _check_request(directory, device_count, mib_per_s, size_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.resolve()
    with _locked(directory):
        if (directory / STATE_NAME).exists():
            raise LabError(f"there is a lab in {directory} already: take it down first (lab down)")
        try:
            throttle = find_throttle() if mib_per_s else None
        except ThrottleError as error:
            raise LabError(str(error)) from error
        lab = Lab(
            directory=directory,
            device_count=device_count,
            size_bytes=size_bytes,
            mib_per_s=mib_per_s,
            throttle=throttle,
        )
        _save(lab)
        try:
            for image, mountpoint in zip(lab.images, lab.mountpoints, strict=True):
                _make_device(lab, image, mountpoint)
        except BaseException:
            _take_down(lab)
            raise
        return lab


def down(directory: Path) -> bool:
    """Take a lab down, whatever state it is in; False if there is none.

    Raises LabError if something stays in use for BUSY_S; calling it again goes on from there.
    """
    if not (directory / STATE_NAME).exists():
        return False
    directory = directory.resolve()
    with _locked(directory):
        _take_down(load(directory))
    return True


def load(directory: Path) -> Lab:
    """The lab that lives in `directory`. LabError if there is none or its state is unreadable."""
    path = directory.resolve() / STATE_NAME
    try:
        state = json.loads(path.read_text())
        if state["format"] != STATE_FORMAT:
            raise LabError(
                f"{path} has format {state['format']}; this version knows {STATE_FORMAT}"
            )
        throttle = state["throttle"]
        return Lab(
            directory=path.parent,
            device_count=state["device_count"],
            size_bytes=state["size_bytes"],
            mib_per_s=state["mib_per_s"],
            throttle=throttle
            and Throttle(
                version=CgroupVersion(throttle["version"]),
                groups=tuple(throttle["groups"]),
                join_group=throttle["join_group"],
            ),
        )
    except FileNotFoundError as error:
        raise LabError(f"there is no lab in {directory} ({path} is missing)") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} is no state of a lab: {error!r}") from error


@contextlib.contextmanager
def lab(
    *, device_count: int, mib_per_s: int, size_bytes: int, parent: Path | None = None
) -> Iterator[Lab]:
    """A lab in a fresh directory under `parent`, joined by this process, taken down at the end.

    A device that is still in use then is LabError, and goes away with its last user.
    """
    directory = Path(tempfile.mkdtemp(prefix="fpfs-lab-", dir=parent))
    try:
        made = up(directory, device_count=device_count, mib_per_s=mib_per_s, size_bytes=size_bytes)
        try:
            if made.throttle is not None:
                made.throttle.join()
            yield made
        finally:
            try:
                down(directory)
            except LabError:
                _abandon(made)
                raise
    finally:
        if not (directory / STATE_NAME).exists():
            shutil.rmtree(directory)


def _check_request(directory: Path, device_count: int, mib_per_s: int, size_bytes: int) -> None:
    reason = unavailable_reason(throttled=mib_per_s > 0)
    if reason is not None:
        raise LabError(reason)
    if not 1 <= device_count <= DEVICE_COUNT_MAX:
        raise LabError(f"{device_count} devices asked for; between 1 and {DEVICE_COUNT_MAX} work")
    if mib_per_s < 0:
        raise LabError(f"{mib_per_s} MiB/s asked for; 0 means unlimited")
    if size_bytes < SIZE_BYTES_MIN:
        raise LabError(f"{size_bytes} bytes a device; XFS needs at least {SIZE_BYTES_MIN}")
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if device_count * size_bytes > free_bytes:
        raise LabError(
            f"{device_count} devices of {size_bytes} bytes do not fit: {existing} has"
            f" {free_bytes} bytes free; ask for less with --size"
        )


def _make_device(lab: Lab, image: Path, mountpoint: Path) -> None:
    with open(image, "xb") as file:
        file.truncate(lab.size_bytes)
    mountpoint.mkdir()
    loop = _run("losetup", "--direct-io=on", "--find", "--show", str(image)).strip()
    _run("mkfs.xfs", "-q", "-f", loop)
    if lab.throttle is not None:
        lab.throttle.limit(_device_number(loop), bytes_per_s=lab.mib_per_s * MIB)
    _run("mount", "-t", "xfs", loop, str(mountpoint))


def _take_down(lab: Lab) -> None:
    for device in lab.devices():
        if device.loop is None or device.device_number is None:
            continue
        if lab.throttle is not None:
            lab.throttle.clear(device.device_number)  # first: unmounting writes the log
        for mounted in _mountpoints_of(device.device_number):
            _unmount(mounted)
        _run("losetup", "--detach", device.loop)
    deadline_s = time.monotonic() + BUSY_S
    while attached := sorted(_loops_by_image(lab.images).values()):
        if time.monotonic() < deadline_s:
            time.sleep(BUSY_RETRY_S)  # a program with mounts of its own still has this one
            continue
        raise LabError(f"{', '.join(attached)} still in use: see `lsof {attached[0]}`, then repeat")
    _remove_files(lab)


def _abandon(lab: Lab) -> None:
    """Take down what is in use: it vanishes from the tree now, and for good with its last user."""
    for device in lab.devices():
        if device.loop is None or device.device_number is None:
            continue
        for mounted in _mountpoints_of(device.device_number):
            _run("umount", "--lazy", mounted)
        _run("losetup", "--detach", device.loop)
    _remove_files(lab)


def _unmount(mountpoint: str) -> None:
    """Unmount; a filesystem may stay busy for a moment while a killed process is taken apart."""
    deadline_s = time.monotonic() + BUSY_S
    while True:
        try:
            _run("umount", mountpoint)
        except LabError as error:
            if "busy" not in str(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(BUSY_RETRY_S)  # nothing tells when a mount ceases to be busy
        else:
            return


def _remove_files(lab: Lab) -> None:
    for image, mountpoint in zip(lab.images, lab.mountpoints, strict=True):
        image.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            mountpoint.rmdir()
    (lab.directory / STATE_NAME).unlink()


def _save(lab: Lab) -> None:
    state = {
        "format": STATE_FORMAT,
        "device_count": lab.device_count,
        "size_bytes": lab.size_bytes,
        "mib_per_s": lab.mib_per_s,
        "throttle": lab.throttle
        and (asdict(lab.throttle) | {"version": lab.throttle.version.value}),
        "mountpoints": [str(mountpoint) for mountpoint in lab.mountpoints],
    }
    temporary = lab.directory / f".{STATE_NAME}.tmp"
    with open(temporary, "w") as file:
        json.dump(state, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(lab.directory / STATE_NAME)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _loops_by_image(images: Sequence[Path]) -> dict[Path, str]:
    """The loop devices whose backing file is one of `images`."""
    wanted = {str(image): image for image in images}
    found = {}
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = backing.read_text().rstrip("\n").removesuffix(" (deleted)")
        except OSError as error:
            # Detached since: before the file was opened, or before it was read.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
            continue
        if name in wanted:
            found[wanted[name]] = f"/dev/{backing.parent.parent.name}"
    return found


def _mountpoints_of(device_number: str) -> list[str]:
    """Where a block device is mounted, innermost last mounted first."""
    return [each.mountpoint for each in reversed(mount_table()) if each.device == device_number]


def _device_number(loop: str) -> str:
    return Path("/sys/block", Path(loop).name, "dev").read_text().strip()


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _run(tool: str, *arguments: str) -> str:
    executable = _tool(tool)
    if executable is None:
        raise LabError(f"{tool} is not installed")
    result = subprocess.run([executable, *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        command = " ".join((tool, *arguments))
        raise LabError(f"`{command}` failed ({result.returncode}): {result.stderr.strip()}")
    return result.stdout
