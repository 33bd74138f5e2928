"""Bandwidth limits on block devices through the block cgroup, version 1 or 2.

Limits belong to (cgroup, device) pairs, so they act only on I/O of processes in the limited cgroup:

* Version 1 is flat in practice: every group has its own limits. The limit is set on the root group
  (it has the kernel's own writeback and everything that was never moved) and, if that is another
  one, on the caller's group.
* Version 2 has no limits on the true root. The limit is set on the outermost ancestor of the
  caller's group below the mount, so that it holds for everything under it. A caller in the true
  root must move into a group first (`join`).

Invariants:
  * Only limits of the device numbers asked for are changed.

Concurrency: the kernel applies each write atomically; nothing is kept in memory. Standard library
only: the lab must run before anything is installed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
OWN_CGROUPS = Path("/proc/self/cgroup")
LAB_GROUP = "fpfs-lab"


class ThrottleError(RuntimeError):
    """The block cgroup cannot be used; the message says why and what would help."""


class CgroupVersion(Enum):
    """Which interface a group speaks."""

    V1 = 1
    V2 = 2


@dataclass(frozen=True, kw_only=True)
class Throttle:
    """The groups in which limits are set; made by `find_throttle`, or again from a state file."""

    version: CgroupVersion
    groups: tuple[str, ...]
    join_group: str | None = None

    def limit(self, device_number: str, *, bytes_per_s: int) -> None:
        """Limit reads and writes of a block device (``major:minor``) to `bytes_per_s` each."""
        for group in self.groups:
            for name, text in self._settings(device_number, str(bytes_per_s), "0"):
                _write(Path(group) / name, text)

    def clear(self, device_number: str) -> None:
        """Remove the limits of a block device. A group that is gone has none."""
        for group in self.groups:
            if not Path(group).is_dir():
                continue
            for name, text in self._settings(device_number, "0", "max"):
                if device_number in self._limited(Path(group) / name):
                    _write(Path(group) / name, text)

    def limited(self) -> set[str]:
        """Device numbers that have a limit in any of the groups."""
        found: set[str] = set()
        for group in self.groups:
            for name, _ in self._settings("0:0", "0", "max"):
                found |= self._limited(Path(group) / name)
        return found

    def join(self) -> None:
        """Move this process into the limited group, where its own is out of reach (see above)."""
        if self.join_group is not None:
            _write(Path(self.join_group) / "cgroup.procs", str(os.getpid()))

    def _settings(
        self, device_number: str, version_1: str, version_2_none: str
    ) -> tuple[tuple[str, str], ...]:
        """Files and texts that set a limit: `version_1` is a number, 0 meaning none."""
        if self.version is CgroupVersion.V1:
            return (
                ("blkio.throttle.read_bps_device", f"{device_number} {version_1}"),
                ("blkio.throttle.write_bps_device", f"{device_number} {version_1}"),
            )
        value = version_2_none if version_1 == "0" else version_1
        return (("io.max", f"{device_number} rbps={value} wbps={value}"),)

    @staticmethod
    def _limited(path: Path) -> set[str]:
        if not path.exists():
            return set()
        return {line.split()[0] for line in path.read_text().splitlines() if line.strip()}


def find_throttle(*, mountinfo: Path = MOUNTINFO, own_cgroups: Path = OWN_CGROUPS) -> Throttle:
    """The throttle of this machine. ThrottleError if there is none or it cannot be written."""
    mount = controller_mount(mountinfo, filesystem="cgroup", option="blkio")
    if mount is not None:
        return _version_1(mount, own_cgroups)
    mount = controller_mount(mountinfo, filesystem="cgroup2", option=None)
    if mount is not None and "io" in _words(mount / "cgroup.controllers"):
        return _version_2(mount, own_cgroups)
    raise ThrottleError(
        "no block cgroup: neither a cgroup v1 mount with 'blkio' nor a cgroup v2 mount that offers"
        " 'io' was found; mount one, or run without a bandwidth limit (--mib-per-s 0)"
    )


def _version_1(mount: Path, own_cgroups: Path) -> Throttle:
    groups = [mount]
    for line in own_cgroups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own = mount / path.lstrip("/")
        if "blkio" in controllers.split(",") and own != mount and own.is_dir():
            groups.append(own)
    for group in groups:
        _require_writable(group / "blkio.throttle.write_bps_device")
    return Throttle(version=CgroupVersion.V1, groups=tuple(str(group) for group in groups))


def _version_2(mount: Path, own_cgroups: Path) -> Throttle:
    own = next(
        line[3:].strip("/") for line in own_cgroups.read_text().splitlines() if line[:3] == "0::"
    )
    outermost = own.split("/", 1)[0]
    group = mount / outermost if outermost else mount
    if (mount / "io.max").exists():
        group = mount  # a cgroup namespace: what looks like the root is not the true one
    elif not outermost:
        group = mount / LAB_GROUP
        group.mkdir(exist_ok=True)
    if not (group / "io.max").exists():
        _write(mount / "cgroup.subtree_control", "+io")
    _require_writable(group / "io.max")
    return Throttle(
        version=CgroupVersion.V2,
        groups=(str(group),),
        join_group=str(group) if group.name == LAB_GROUP else None,
    )


def controller_mount(mountinfo: Path, *, filesystem: str, option: str | None) -> Path | None:
    """Where a hierarchy is mounted: ``cgroup2``, or ``cgroup`` with a controller `option`."""
    # Not splitlines(), nor text: another mountpoint may hold any bytes.
    for line in filter(None, os.fsdecode(mountinfo.read_bytes()).split("\n")):
        before, after = line.split(" - ", 1)
        kind, _, super_options = after.split(" ", 2)
        if kind == filesystem and (option is None or option in super_options.split(",")):
            return Path(before.split(" ")[4])
    return None


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _require_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise ThrottleError(f"{path} cannot be written: run as root, with the cgroup mounted rw")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ThrottleError(f"writing '{text}' to {path} failed: {error.strerror}") from error
