"""The path of a device directory: only root and the server's user can make it lead elsewhere.

The objects of a device hold what is in all files, and a server writes them with its user's rights.
Whoever may write to a folder of the path can put another directory in its place. OpenSSH asks the
same of the paths of its keys (sshd_config(5), StrictModes).

Concurrency: plain blocking functions.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Sequence
from typing import NamedTuple

from fpfs.core.mounts import LINKS_MAX, mount_table
from fpfs.core.refusal import Refused
from fpfs.daemon.devices.label import refusing

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_trusted(path: str, *, asked: str) -> None:
    """Refuse an existing directory if others than root and this process's user can redirect its
    path, or write to it.

    These two own every folder and every link on the way. Nobody else may write to any of the
    folders, but to sticky ones above the last: nobody moves what belongs to another there. What
    was checked stays as it is, since the check begins at the root. Raises `Refused`.
    """
    check = _Check(path, asked)
    with refusing(path, asked=asked):
        passed = check.walk(os.path.join(os.getcwd(), path))
        check.writers(passed[-1], os.lstat(passed[-1]).st_mode, is_device=True)
        for entry in mount_table():
            if entry.mountpoint in passed:
                check.owner(entry.mountpoint, entry.owner_uid, of="what is mounted at ")


class _Check(NamedTuple):
    """Looks at what the path of a device directory leads through."""

    device: str
    asked: str

    def walk(self, path: str) -> Sequence[str]:
        """Return the folders that an absolute path leads through. Raises OSError."""
        passed, links, ahead = ["/"], 0, path.split("/")[::-1]
        while ahead:
            # The folder is resolved, so that ".." needs no look at the filesystem.
            place = os.path.normpath(os.path.join(passed[-1], ahead.pop()))
            found = os.lstat(place)
            self.owner(place, found.st_uid)
            if stat.S_ISLNK(found.st_mode):
                links += 1
                if links > LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                target = os.readlink(place)
                ahead += target.split("/")[::-1]
                if target.startswith("/"):
                    passed.append("/")
            else:
                self.writers(place, found.st_mode)
                passed.append(place)
        return passed

    def owner(self, place: str, uid: int, *, of: str = "") -> None:
        """Refuse what belongs to neither root nor this user."""
        if uid in (0, os.geteuid()):
            return
        us = "root" if os.geteuid() == 0 else f"{_user(os.geteuid())} or root"
        self._refuse(
            f"{of}{place} belongs to {_user(uid)}, who may change what is there",
            f"name a directory of which the whole path belongs to {us}",
        )

    def writers(self, place: str, mode: int, *, is_device: bool = False) -> None:
        """Refuse a folder that others may write to."""
        others = mode & _OTHERS_WRITE
        if others and (is_device or not mode & stat.S_ISVTX):
            who = "everybody" if others & stat.S_IWOTH else "its group"
            self._refuse(
                f"{who} may write to {place} (mode {stat.S_IMODE(mode):04o})",
                f"run chmod go-w {place}, or name a directory elsewhere",
            )

    def _refuse(self, wrong: str, remedy: str) -> None:
        raise Refused(
            asked=self.asked,
            wrong=f"the device directory {self.device} is not safe from others: {wrong}",
            remedy=remedy,
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
