"""Where fpfs keeps things outside the device directories: sockets, logs, the default device.

Root uses /run, /var/log; a user uses the XDG base directories. All folders that are made here are
refused when they turn out to belong to somebody else, since /tmp is everybody's.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
import time
from pathlib import Path

from fpfs.core.mounts import mount_table
from fpfs.core.protocol.control import keeper_runs, runtime_folders
from fpfs.core.refusal import Refused

CPU_LATENCY = "/dev/cpu_dma_latency"
"""Who holds it open bounds the time that processors may take to wake (the kernel's PM QoS)."""

SETTLED_S = 60
"""A socket younger than this may belong to a server that does not listen yet."""


def _xdg(variable: str, default: str) -> str:
    """An XDG base directory; a relative one in the environment is to be ignored."""
    value = os.environ.get(variable, "")
    return value if os.path.isabs(value) else os.path.join(os.path.expanduser("~"), default)


def default_device() -> str:
    """The embedded default: the device directory of a mount that names none."""
    return os.path.join(_xdg("XDG_DATA_HOME", ".local/share"), "fpfs", "default")


def default_log(mountpoint: str) -> str:
    """The log of a mount that names none; the mountpoint is in its name."""
    name = mountpoint.strip("/").replace("%", "%25").replace("-", "%2d").replace("/", "-") + ".log"
    if os.geteuid() == 0:
        return os.path.join("/var/log/fpfs", name)
    return os.path.join(_xdg("XDG_STATE_HOME", ".local/state"), "fpfs", name)


def check_group(name: str, *, asked: str) -> None:
    """Refuse a group that is not there, or that this user cannot give a socket to."""
    try:
        gid = grp.getgrnam(name).gr_gid
    except KeyError:
        raise Refused(
            asked=asked,
            wrong=f"control_group={name}: there is no such group",
            remedy="getent group lists them",
        ) from None
    if os.geteuid() != 0 and gid not in {os.getegid(), *os.getgroups()}:
        raise Refused(
            asked=asked,
            wrong=f"control_group={name}: you are not in it",
            remedy="name a group of yours, which id shows, or mount as root",
        )


def make_runtime_folder(*, asked: str, for_group: bool = False) -> str:
    """The folder for this user's control sockets, made where it is missing.

    Other users can look into it (a mount may be open to them) but not write. That they reach it
    `for_group` means one in /tmp for users, whose own folder nobody else can enter.
    """
    folders = runtime_folders(os.geteuid())
    for folder in reversed(folders) if for_group else folders:
        if not os.path.isdir(os.path.dirname(folder)):
            continue
        try:
            os.makedirs(folder, mode=0o755, exist_ok=True)
            found = os.lstat(folder)
        except OSError:  # not allowed, a read-only filesystem, or no folder has the name
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            os.chmod(folder, 0o755)
            return folder
    tried = ", ".join(runtime_folders(os.geteuid()))
    raise Refused(
        asked=asked,
        wrong=f"no folder for the control socket can be made (tried {tried})",
        remedy="see that it is a folder of root's"
        if os.geteuid() == 0
        else "set XDG_RUNTIME_DIR to a folder of yours",
    )


def remove_what_ended(folder: str) -> None:
    """Remove control sockets of mounts that are gone, and what the ends of mounts came to.

    Servers that were killed left the former; of the latter everybody knows by now who waited. A
    mount that is there keeps its socket although nobody listens: it is not one of the mounts that
    had its number before.
    """
    numbers = {entry.device.replace(":", "-") for entry in mount_table()}
    for path in Path(folder).glob("*.ended"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= SETTLED_S:
                path.unlink()
    for path in Path(folder).glob("*.sock"):
        with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as probe:
            if time.time() - path.stat().st_mtime < SETTLED_S:
                continue
            if path.name.partition(".")[0] in numbers or keeper_runs(str(path)):
                continue
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            except (BlockingIOError, PermissionError):
                continue
