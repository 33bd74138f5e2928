"""Mounting and unmounting through fusermount3, and the knobs of a mount's connection.

fusermount3 serves root and users alike: it mounts, and sends the /dev/fuse descriptor over the
socket named by ``_FUSE_COMMFD`` (libfuse's protocol).

Concurrency: plain blocking functions; the server calls them in threads once trio runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from fpfs.core.mounts import MountEntry, mount_at, mount_table
from fpfs.core.refusal import Refused, refuse_empty

FUSERMOUNT = "fusermount3"
READ_AHEAD_KIB = 4096
"""Read-ahead asked for where root can: the kernel starts FUSE mounts at 128 KiB."""
MAX_READ_BYTES = 512 * 1024
"""Largest READ asked for: half a chunk, so that a reader takes one while the next is on its way."""

MOUNTING_NAME = "mounting"
"""The file in a runtime folder that those lock who mount."""

_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_MOUNT_ATTR_NOSYMFOLLOW = 0x00200000
_MOUNT_ATTR = struct.Struct("=4Q")
"""struct mount_attr: what is set, what is cleared, propagation, a user namespace."""

_CONNECTIONS = Path("/sys/fs/fuse/connections")

MOUNT_DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""What the kernel answers when nobody holds the other end of a mount's connection any more."""

_PROBE = """if True:
    import os, sys
    try:
        os.statvfs(sys.argv[1])
    except OSError as error:
        sys.exit(error.errno)
"""
_PROBE_S = 5
"""How long a mount may take to answer until it counts as one that hangs, and so lives."""


def check_mountpoint(mountpoint: str, *, asked: str) -> str:
    """The resolved mountpoint, or `Refused` with the reason why nothing can be mounted there.

    A mount of this user that nobody serves any more is taken away first.
    """
    refuse_empty(mountpoint, what="mountpoint", asked=asked)
    entry = mount_at(mountpoint)
    if entry is not None and os.getuid() in (0, entry.owner_uid):
        entry = mount_at(mountpoint) if remove_dead_mount(mountpoint) else entry
    if entry is not None and entry.is_fpfs:
        raise Refused(
            asked=asked,
            wrong=f"fpfs is mounted at {entry.mountpoint} already",
            remedy=f"run fpfs umount {entry.mountpoint} first, or mount elsewhere",
        )
    resolved = os.path.realpath(mountpoint)
    if not os.path.lexists(resolved):
        raise Refused(
            asked=asked,
            wrong=f"the mountpoint {resolved} does not exist",
            remedy=f"run mkdir -p {resolved}",
        )
    if not os.path.isdir(resolved):
        raise Refused(
            asked=asked,
            wrong=f"the mountpoint {resolved} is not a directory",
            remedy="name a directory",
        )
    return resolved


@contextlib.contextmanager
def mounting(mountpoint: str, *, folder: str) -> Iterator[None]:
    """Keep others of this user from mounting at a resolved directory; waits until none does.

    A byte of a file in the runtime folder is locked, and not the directory: that may lie where
    nothing can be, and anybody who may read it could lock it for ever.
    """
    path = os.path.join(folder, MOUNTING_NAME)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "rb+") as file:
        # Two places of the same sum wait for each other, and nothing else comes of that.
        fcntl.lockf(file, fcntl.LOCK_EX, 1, zlib.crc32(os.fsencode(mountpoint)))
        yield


def mount(
    mountpoint: str, *, options: Sequence[str], asked: str, held_fds: Sequence[int] = ()
) -> int:
    """Mount at a resolved directory; returns the /dev/fuse descriptor (close-on-exec).

    `options` are mount options with commas in values escaped by a backslash. fusermount3 holds
    `held_fds` open: who waits for their end, after this process was killed, waits for its end too.
    Raises `Refused` with fusermount3's own words.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        try:
            process = subprocess.Popen(
                [FUSERMOUNT, "-o", ",".join(options), "--", mountpoint],
                env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno(), *held_fds],
                stderr=subprocess.PIPE,
                text=True,
            )
        except FileNotFoundError:
            raise _not_installed(asked) from None
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        _, complaint = process.communicate()
    if process.returncode == 0 and descriptors:
        os.set_inheritable(descriptors[0], False)
        return descriptors[0]
    raise _mount_refusal(asked, complaint)


def forbid_symlinks(mountpoint: str, *, asked: str) -> None:
    """Have the kernel follow no symbolic link on a mount, which fusermount3 cannot ask for.

    Raises `Refused`: only root may, and since Linux 5.14.
    """
    attributes = _MOUNT_ATTR.pack(_MOUNT_ATTR_NOSYMFOLLOW, 0, 0, 0)
    library = ctypes.CDLL(None, use_errno=True)
    path = ctypes.c_char_p(os.fsencode(mountpoint))
    size = ctypes.c_size_t(len(attributes))
    if library.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, 0, attributes, size) == 0:
        return
    raise Refused(
        asked=asked,
        wrong=f"nosymfollow cannot be set ({os.strerror(ctypes.get_errno())})",
        remedy="mount as root, on Linux 5.14 or newer, or leave nosymfollow out",
    )


def _not_installed(asked: str) -> Refused:
    return Refused(
        asked=asked, wrong=f"{FUSERMOUNT} is not installed", remedy="install the package fuse3"
    )


def _mount_refusal(asked: str, complaint: str) -> Refused:
    wrong = complaint.strip() or f"{FUSERMOUNT} failed without a word"
    if "allow_other" in wrong:
        remedy = "put user_allow_other into /etc/fuse.conf, or mount without allow_other"
    elif "/dev/fuse" in wrong:
        remedy = "load the fuse module (modprobe fuse) and open /dev/fuse to users (chmod 666)"
    else:
        remedy = "see that the mountpoint belongs to you and that mounting is allowed"
    return Refused(asked=asked, wrong=wrong, remedy=remedy)


def escape_option(value: str) -> str:
    """A value as fusermount3 reads it inside a list of options."""
    return value.replace("\\", "\\\\").replace(",", "\\,")


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Take the mount away; `lazy` detaches it now although files are open.

    Raises `Refused`: busy (files are open), not mounted, not allowed, or no fusermount3.
    """
    asked = f"unmount {mountpoint}"
    command = [FUSERMOUNT, "-u", *(["-z"] if lazy else []), "--", mountpoint]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        raise _not_installed(asked) from None
    if done.returncode != 0:
        busy = "busy" in done.stderr
        raise Refused(
            asked=asked,
            wrong="files on it are open" if busy else done.stderr.strip(),
            remedy=f"close what uses it (fuser -vm {mountpoint} names it)"
            if busy
            else "see findmnt -t fuse.fpfs for what is mounted",
        )


def is_dead(entry: MountEntry) -> bool:
    """Whether a mount is one of fpfs that nobody serves, or ever can: its connection has ended.

    Where that is not certain, the answer is False: a mount that hangs may come to itself, and one
    of another user may not be looked at.
    """
    if not entry.is_fpfs:
        return False
    # In a process of its own: what is asked of a mount that hangs may take forever, and such a
    # process may not even be killed. Nobody waits for it then.
    command = [sys.executable, "-I", "-S", "-c", _PROBE, entry.mountpoint]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return process.wait(timeout=_PROBE_S) in MOUNT_DEAD
    except subprocess.TimeoutExpired:
        process.kill()
        return False


def remove_dead_mount(mountpoint: str) -> bool:
    """Take away what a mount left whose processes were killed; False where there is none.

    Raises `Refused` when this user may not.
    """
    entry = mount_at(mountpoint)
    if entry is None or not is_dead(entry):
        return False
    unmount(entry.mountpoint, lazy=True)
    return True


class ConnectionControl:
    """Ends the connection of one mount through fusectl: every request on it fails at once.

    What is opened here stays that connection's: when it is gone, another may get its number.
    """

    def __init__(self, device: str) -> None:
        """Open that of the mount ``major:minor``.

        Nothing is open where there is none, where this user may not, and without fusectl.
        """
        self._abort_fd = -1
        if mount_fusectl():
            major, minor = (int(part) for part in device.split(":"))
            number = str(os.makedev(major, minor))
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self._abort_fd = os.open(_CONNECTIONS / number / "abort", os.O_WRONLY)

    def abort(self) -> bool:
        """End it, if it is there; False when nothing is open."""
        if self._abort_fd < 0:
            return False
        os.write(self._abort_fd, b"1")
        return True

    def close(self) -> None:
        """Let go of it."""
        if self._abort_fd >= 0:
            os.close(self._abort_fd)
            self._abort_fd = -1

    def __enter__(self) -> ConnectionControl:
        """Return it; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of it."""
        self.close()


def control_of(device: str, fuse_fd: int) -> ConnectionControl:
    """What ends the connection of a /dev/fuse descriptor, whose mount is, or was, `device`."""
    opened = ConnectionControl(device)
    poll = select.poll()
    poll.register(fuse_fd, 0)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        opened.close()  # it has ended: the number may be another's
    return opened


def abort_connection(entry: MountEntry) -> bool:
    """End the connection of a mount; False when it is not there, or this user cannot reach it."""
    with ConnectionControl(entry.device) as control:
        return mount_at(entry.mountpoint) == entry and control.abort()


def detach(entry: MountEntry) -> None:
    """Take a mount away although files are open, and end its connection. Raises `Refused`."""
    with ConnectionControl(entry.device) as control:
        if mount_at(entry.mountpoint) == entry:
            unmount(entry.mountpoint, lazy=True)
            control.abort()


def mount_fusectl() -> bool:
    """Whether fusectl is mounted; root mounts it where it is missing."""
    if any(entry.filesystem_type == "fusectl" for entry in mount_table()):
        return True
    if os.geteuid() != 0:
        return False
    done = subprocess.run(
        ["mount", "-t", "fusectl", "fusectl", str(_CONNECTIONS)],
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return done.returncode == 0


def raise_read_ahead(device: str) -> bool:
    """Raise the read-ahead of the mount ``major:minor``; False where this user may not."""
    setting = Path(f"/sys/class/bdi/{device}/read_ahead_kb")
    try:
        setting.write_text(str(READ_AHEAD_KIB))
    except (FileNotFoundError, PermissionError):
        return False
    return True
