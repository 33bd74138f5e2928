"""What is mounted where, from /proc/self/mountinfo, without touching any mount.

Touching a path below a mount could wait for a server that hangs; reading mountinfo cannot.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fpfs.core.refusal import Refused

FILESYSTEM_TYPE = "fuse.fpfs"
LINKS_MAX = 40
"""Links in a row that are followed, as by the kernel."""


class MountEntry(NamedTuple):
    """One line of /proc/self/mountinfo. `device` is ``major:minor`` of the mounted filesystem."""

    mount_id: int
    device: str
    mountpoint: str
    filesystem_type: str
    source: str
    owner_uid: int
    """The user who mounted, for FUSE filesystems; else 0."""

    @property
    def is_fpfs(self) -> bool:
        """Whether fpfs is mounted here."""
        return self.filesystem_type == FILESYSTEM_TYPE

    @property
    def owner(self) -> str:
        """The name of the user who mounted, or the number of one without a name."""
        try:
            return pwd.getpwuid(self.owner_uid).pw_name
        except KeyError:
            return str(self.owner_uid)


def parse_mountinfo(text: str) -> list[MountEntry]:
    """Entries of a mountinfo text (proc_pid_mountinfo(5)), in mount order."""
    entries = []
    # Not splitlines(): a path may hold what else ends lines in Unicode.
    for line in filter(None, text.split("\n")):
        fields, _, tail = line.partition(" - ")
        mount_id, _parent, device, _root, mountpoint, *_ = fields.split(" ")
        filesystem_type, source, options, *_ = tail.split(" ")
        owner = re.search(r"(?:^|,)user_id=(\d+)", options)
        entries.append(
            MountEntry(
                mount_id=int(mount_id),
                device=device,
                mountpoint=_unescape(mountpoint),
                filesystem_type=filesystem_type,
                source=_unescape(source),
                owner_uid=int(owner[1]) if owner else 0,
            )
        )
    return entries


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mount_table() -> list[MountEntry]:
    """The mounts that this process sees, in mount order."""
    return parse_mountinfo(os.fsdecode(Path("/proc/self/mountinfo").read_bytes()))


def resolve_mountpoint(path: str) -> str:
    """Absolute path with the links of its *parents* resolved: the last part is not touched."""
    absolute = os.path.abspath(path)
    return os.path.join(os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute))


def mount_at(mountpoint: str) -> MountEntry | None:
    """What is mounted exactly at `mountpoint` (the topmost mount), or None.

    A link that leads to a mountpoint counts as the mountpoint, but is read only when nothing is
    mounted at the path itself.
    """
    topmost = {entry.mountpoint: entry for entry in mount_table()}
    path = mountpoint
    for _ in range(LINKS_MAX):
        resolved = resolve_mountpoint(path)
        if resolved in topmost:
            return topmost[resolved]
        try:
            path = os.path.join(os.path.dirname(resolved), os.readlink(resolved))
        except OSError:
            return None
    return None


def mount_containing(path: str) -> MountEntry:
    """The mount that holds `path`, which is resolved first."""
    resolved = os.path.realpath(path)
    best = None
    for entry in mount_table():
        if is_below(resolved, entry.mountpoint) and (
            best is None or len(entry.mountpoint) >= len(best.mountpoint)
        ):
            best = entry
    assert best is not None, "every path is below /"
    return best


def is_below(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or lies below it; both absolute and resolved."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def check_outside(mountpoint: str, paths: Iterable[tuple[str, str]], *, asked: str) -> None:
    """Refuse paths, given as (what it is, resolved path), that the mount would cover.

    The server would wait for itself when it touches such a path.
    """
    for what, path in paths:
        if is_below(path, mountpoint):
            raise Refused(
                asked=asked,
                wrong=f"the {what} {path} lies under the mountpoint {mountpoint}",
                remedy="put it outside, or mount elsewhere",
            )
