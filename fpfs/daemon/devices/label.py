"""What a device directory says about itself: its stamp, its lock, and where it lies.

Invariants:
  * A stamp is replaced whole or not at all, durably.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fpfs.core.mounts import mount_at
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.safe_open import make_regular, open_folder, open_regular, read_small

FORMAT_VERSION = 1
STAMP_NAME = "fpfs.json"
STAMP_MADE_NAME = f".{STAMP_NAME}.new"
"""What a stamp is called until it is whole."""
LOCK_NAME = "lock"

STAMP_BYTES_MAX = 64 * 1024 * 1024
"""More than a stamp with the paths of as many devices as there can be."""

LOCK_BYTES_MAX = 64 * 1024

DRAIN_S = 60
"""How long a mount waits for a server that was unmounted and still drains."""

_FS_IOC_GETFSUUID = 0x80111500
"""_IOR(0x15, 0, struct fsuuid2): one length byte and 16 of UUID. Linux 6.9, needs no privilege."""


log = logging.getLogger(__name__)


class Backing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device directory lies. `uuid` is empty where the kernel cannot tell it."""

    uuid: str
    inode: int


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``fpfs.json``. `paths` are the directories of the last mount, for messages.

    What it says of other devices may be older than what their stamps say: that of the largest
    `generation` holds.
    """

    format_version: int
    filesystem_id: str
    device_number: int
    device_id: str
    device_count: int
    """How many numbers were ever given to devices."""
    backing: Backing
    paths: tuple[str, ...]
    """By number."""
    removed: tuple[int, ...] = ()
    """Numbers of devices that there are no more."""
    catalog_devices: tuple[int, ...] = ()
    """Which devices hold a copy of the catalog; empty: those of 0 and 1 that there are."""
    generation: int = 0
    """Grows with every change of the devices."""
    joining: bool = False
    """Whether this device was being added when it was written: the catalog says if it was."""


def newest(stamps: Sequence[Stamp]) -> Stamp:
    """Return the stamp that knows of the last change of the devices."""
    return max(stamps, key=lambda stamp: (not stamp.joining, stamp.generation))


class _StampVersion(msgspec.Struct):
    format_version: int


class LockHolder(msgspec.Struct, frozen=True):
    """Content of ``lock``: who holds it."""

    pid: int
    mountpoint: str


def read_stamp(path: str, *, asked: str) -> Stamp | None:
    """The stamp of a directory, or None when it has none. Raises `Refused` when unreadable."""
    with refusing(path, asked=asked):
        try:
            raw = read_small(Path(path, STAMP_NAME), bytes_max=STAMP_BYTES_MAX)
        except FileNotFoundError:
            return None
    try:
        version = msgspec.json.decode(raw, type=_StampVersion).format_version
        if version <= FORMAT_VERSION:
            return msgspec.json.decode(raw, type=Stamp)
    except msgspec.MsgspecError as error:
        raise Refused(
            asked=asked,
            wrong=f"{path}/{STAMP_NAME} is damaged ({error})",
            remedy="restore it from a backup; the stamps of the other devices show its form",
        ) from None
    raise Refused(
        asked=asked,
        wrong=f"{path} has format {version}, and this fpfs knows formats up to {FORMAT_VERSION}",
        remedy="mount it with the newer fpfs that wrote it",
    )


def read_backing(path: str) -> Backing:
    """Identity of a directory. Raises OSError."""
    folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        answer = bytearray(17)
        filesystem_uuid = ""
        try:
            fcntl.ioctl(folder_fd, _FS_IOC_GETFSUUID, answer)
            # All zeros come from filesystems without an identity of their own.
            filesystem_uuid = answer[1 : 1 + answer[0]].hex().strip("0") and answer[1:].hex()
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM):
                raise
        return Backing(uuid=filesystem_uuid, inode=os.fstat(folder_fd).st_ino)
    finally:
        os.close(folder_fd)


def write_stamp(path: str, stamp: Stamp) -> None:
    """Replace the stamp durably: whole or not at all."""
    temporary = os.path.join(path, STAMP_MADE_NAME)
    content = msgspec.json.format(msgspec.json.encode(stamp), indent=2) + b"\n"
    with open(make_regular(temporary), "wb") as file:  # which writes on after a part
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, os.path.join(path, STAMP_NAME))
    folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def lock_directory(
    path: str, *, mountpoint: str, asked: str, holder_pid: int = 0, starter_fd: int = -1
) -> int:
    """Take a directory's lock; returns the descriptor that holds it.

    `holder_pid` is the process that is named as the holder, this one if it is 0.

    A server that was unmounted and still drains is waited for, `DRAIN_S` at most, and no longer
    than somebody reads from the pipe `starter_fd`.
    """
    lock_path = os.path.join(path, LOCK_NAME)
    with refusing(path, asked=asked):
        lock_fd = open_regular(lock_path, os.O_RDWR | os.O_CREAT)
    try:
        if not _try_lock(lock_fd):
            holder = lock_holder(path)
            drained = _wait_while_it_drains(path, holder, asked=asked, starter_fd=starter_fd)
            if not (drained and _try_lock(lock_fd)):
                raise _in_use(path, holder, asked=asked)
        content = msgspec.json.encode(LockHolder(holder_pid or os.getpid(), mountpoint))
        # Over what is there, and cut then: a full device lets a block go and has none for it again.
        os.pwrite(lock_fd, content, 0)
        os.ftruncate(lock_fd, len(content))
        return lock_fd
    except BaseException:
        os.close(lock_fd)
        raise


def lock_unnoted(path: str, *, asked: str, alone: bool) -> int:
    """Keep mounts off a directory without a change to it; unless `alone`, several may at a time.

    Returns the descriptor that holds the lock. Raises `Refused` when it is mounted.
    """
    with refusing(path, asked=asked):
        try:
            lock_fd = open_regular(os.path.join(path, LOCK_NAME), os.O_RDONLY)
        except FileNotFoundError:  # nobody ever mounted it, or the copy of one lacks it
            lock_fd = open_folder(path)
    if not _try_lock(lock_fd, fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
        os.close(lock_fd)
        raise _in_use(path, lock_holder(path), asked=asked)
    return lock_fd


def _try_lock(lock_fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(lock_fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_while_it_drains(
    path: str, holder: LockHolder | None, *, asked: str, starter_fd: int
) -> bool:
    """Whether the holder had been unmounted; then it is waited for. Raises `Refused`."""
    if holder is None or not holder.mountpoint:
        return False
    entry = mount_at(holder.mountpoint)
    if entry is not None and entry.is_fpfs:
        return False
    try:
        process_fd = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return True
    log.info(
        "%s is in use by process %d, whose mount at %s is not seen here: waiting %d s at most",
        *(path, holder.pid, holder.mountpoint, DRAIN_S),
    )
    try:
        poll = select.poll()
        poll.register(process_fd, select.POLLIN)
        if starter_fd >= 0:
            poll.register(starter_fd, 0)  # which tells of an error when nobody reads any more
        ready = dict(poll.poll(DRAIN_S * 1000))
    finally:
        os.close(process_fd)
    if starter_fd in ready:
        raise Refused(
            asked=asked,
            wrong=f"whoever started this server did not wait until {path} was free",
            remedy="mount again",
        )
    return True


def _in_use(path: str, holder: LockHolder | None, *, asked: str) -> Refused:
    if holder is None or not os.path.exists(f"/proc/{holder.pid}"):
        # Who only looks does not write himself down.
        wrong, remedy = f"{path} is in use", "unmount it, or let its fsck or export end"
        return Refused(asked=asked, wrong=wrong, remedy=remedy)
    place = f"at {holder.mountpoint} " if holder.mountpoint else ""
    wrong = f"{path} is in use {place}(process {holder.pid})"
    return Refused(asked=asked, wrong=wrong, remedy="unmount it there first")


def lock_holder(path: str) -> LockHolder | None:
    """Who locked a device directory last, or None when that was never written whole."""
    try:
        raw = read_small(Path(path, LOCK_NAME), bytes_max=LOCK_BYTES_MAX)
        return msgspec.json.decode(raw, type=LockHolder)
    except (OSError, msgspec.MsgspecError):
        return None


@contextlib.contextmanager
def refusing(path: str, *, asked: str) -> Iterator[None]:
    """Turn an OSError on a device directory into `Refused`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise Refused(
            asked=asked,
            wrong=f"the device directory {path} cannot be used ({error.strerror or error})",
            remedy="make room on its filesystem"
            if full
            else "see that it is on a writable filesystem and belongs to you; fpfs mount --degraded"
            " does without a device that is lost",
        ) from error
