"""What a user names on a mount, looked at before a server is asked about it."""

from __future__ import annotations

import os
import stat

from fpfs.core.refusal import Refused


def inode_of_directory(path: str, *, asked: str) -> int:
    """Return the inode number of a directory. Raises `Refused` for what is none."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise Refused(
            asked=asked, wrong=f"{error.strerror}", remedy="name a directory on the mount"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise Refused(
            asked=asked, wrong="this is not a directory", remedy="name the directory that holds it"
        )
    return found.st_ino
