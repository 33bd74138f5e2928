"""What a mount can be told: one typed set of options, from the command line or from ``-o``.

Invariants:
  * Every option that ``fpfs mount`` has a flag for can be given with ``-o``, so that an fstab line
    can say everything; a name that nobody knows is refused with the names that are known.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from fpfs.core.addresses import parse_listen_address
from fpfs.core.engine import BLOCK_BYTES
from fpfs.core.policy import (
    CHUNK_BYTES_DEFAULT,
    CHUNK_BYTES_MIN,
    KEYS,
    WHOLE_DEFAULT,
    Acknowledge,
    parse_setting,
)
from fpfs.core.refusal import Refused
from fpfs.core.units import parse_size_bytes

CHUNK_BYTES_MAX = 16 * 1024 * 1024
SLOT_BYTES_MIN = 1024 * 1024
SLOTS_MIN = 16
STAGING_BYTES_MIN = SLOTS_MIN * SLOT_BYTES_MIN
STAGING_BYTES_DEFAULT_MAX = 1024**3
DEPTH_MAX = 1024
RECEIVERS_MAX = 64
RECEIVERS_DEFAULT_MAX = 8
REUSE_PERCENT_DEFAULT = 25
REUSE_PERCENT_MAX = 90
DIGITS_MAX = 9


class Backend(enum.StrEnum):
    """How device I/O is done."""

    AUTO = "auto"
    IO_URING = "io_uring"
    THREADS = "threads"


class Idle(enum.StrEnum):
    """How deep the processors may sleep while requests come in bursts."""

    SHALLOW = "shallow"
    DEEP = "deep"


class Checksums(enum.StrEnum):
    """Whether contents get checksums when they are written, and are checked when they are read."""

    ON = "on"
    OFF = "off"
    """To measure what they cost. What is written stays without them until it is written again."""


def default_staging_bytes() -> int:
    """Staging when none is asked for: an eighth of the memory, at most 1 GiB, in whole MiB."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    whole = min(STAGING_BYTES_DEFAULT_MAX, memory_bytes // 8) // 1024**2 * 1024**2
    return max(STAGING_BYTES_MIN, whole)


def default_receivers() -> int:
    """Threads that receive writes when no number is asked for: one for four cores, 1 to 8."""
    cores = os.cpu_count() or 1
    return max(1, min(RECEIVERS_DEFAULT_MAX, cores // 4))


class MountOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to mount. `kernel` holds options handed on to mount(2), such as ``nosuid`` or ``ro``.

    `allow_other` is None where nobody chose: then root's mounts are open to other users and the
    mounts of users are not. Members of `control_group` may ask the server what its owner may,
    but not add, drain or remove devices.
    """

    ack: Acknowledge = Acknowledge.EARLY
    backend: Backend = Backend.AUTO
    staging_bytes: int = msgspec.field(default_factory=default_staging_bytes)
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    depth: int = 16
    receivers: int = msgspec.field(default_factory=default_receivers)
    reuse: int = REUSE_PERCENT_DEFAULT
    """Per cent of each device that removed files may go on to hold for new ones."""
    idle: Idle = Idle.SHALLOW
    whole: tuple[str, ...] = WHOLE_DEFAULT
    checksums: Checksums = Checksums.ON
    allow_other: bool | None = None
    control_group: str = ""
    adopt: bool = False
    degraded: bool = False
    source: str = ""
    log: str = ""
    metrics: str = ""
    """Where metrics are served (`fpfs.core.addresses`); nowhere without."""
    devices: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()

    @property
    def read_only(self) -> bool:
        """Whether nothing may be written: the last of ``ro`` and ``rw`` decides."""
        return [word for word in self.kernel if word in ("ro", "rw")][-1:] == ["ro"]

    @property
    def follows_symlinks(self) -> bool:
        """Whether the kernel follows symbolic links: the last of these two words decides."""
        return [word for word in self.kernel if word in _SYMLINKS][-1:] != ["nosymfollow"]

    @property
    def for_fusermount(self) -> tuple[str, ...]:
        """The kernel's options that fusermount3 knows."""
        return tuple(word for word in self.kernel if word not in _SYMLINKS)

    @property
    def slot_bytes(self) -> int:
        """Size of a staging slot: the largest chunk."""
        return max(SLOT_BYTES_MIN, self.chunk_bytes)


Choice = TypeVar("Choice", bound=enum.Enum)

_SYMLINKS = ("symfollow", "nosymfollow")
_KERNEL = frozenset(
    "ro rw suid nosuid dev nodev exec noexec atime noatime sync async dirsync".split(" ")
).union(_SYMLINKS)
# Words of an fstab line that are meant for mount(8) and systemd; mount(8) passes some of them on.
_FOR_OTHERS = frozenset(
    "defaults auto noauto user nouser users owner group nofail _netdev".split(" ")
)
# What any mount takes, and what changes nothing here: reads set no access times, times are stored
# with what they belong to, and the kernel checks permissions anyway.
_WITHOUT_EFFECT = frozenset(
    "relatime norelatime strictatime nostrictatime diratime nodiratime lazytime nolazytime"
    " iversion noiversion mand nomand silent loud default_permissions".split(" ")
)
_IGNORED = _FOR_OTHERS | _WITHOUT_EFFECT
_EXAMPLES = {
    "ack": "close",
    "backend": "threads",
    "staging": "1G",
    "chunk": "1M",
    "depth": "16",
    "receivers": "4",
    "reuse": "25",
    "idle": "deep",
    "whole": "*.pt:*.safetensors",
    "checksums": "off",
    "control_group": "ml-ops",
    "device": "/nvme0/fpfs",
    "log": "/var/log/fpfs.log",
    "metrics": "127.0.0.1:9464",
    "fsname": "/nvme0/fpfs",
}
"""The options that have a value, and what one looks like."""
_FLAGS = ("allow_other", "noallow_other", "adopt", "degraded")


def parse_mount_options(words: Iterable[str]) -> MountOptions:
    """Options from ``-o`` strings, each a comma-separated list.

    As with mount(8), the last of ``ro,rw`` and other opposites wins, and the last fsname. Raises
    `Refused` for an unknown name, a missing or a bad value, and for two values of one option.
    """
    values: dict[str, object] = {}
    typed: dict[str, str] = {}
    kernel, devices = [], []
    for item in ",".join(words).split(","):
        name, _, value = item.partition("=")
        if not item or name in _IGNORED or name.startswith("x-") or name == "comment":
            continue
        if item in _KERNEL:
            kernel.append(item)
        elif item in ("adopt", "degraded"):
            values[item] = True
        elif item in _FLAGS:
            values["allow_other"] = item == "allow_other"
        elif name == "device" and value:
            devices.append(value)
        elif name in _EXAMPLES and value:
            field, parsed = _parse_value(name, value)
            if name != "fsname" and values.get(field, parsed) != parsed:
                raise _conflicting(f"{name}={typed[name]}", f"{name}={value}")
            values[field], typed[name] = parsed, value
        else:
            raise _unreadable(item, name)
    options = msgspec.structs.replace(
        MountOptions(), **values, devices=tuple(devices), kernel=tuple(kernel)
    )
    _check(options, typed)
    return options


def _parse_value(name: str, value: str) -> tuple[str, object]:
    """The field of `MountOptions` that an option sets, and to what."""
    match name:
        case "ack":
            return name, _choice(Acknowledge, name, value)
        case "backend":
            return name, _choice(Backend, name, value)
        case "staging" | "chunk":
            return f"{name}_bytes", parse_size_bytes(value, name=name)
        case "depth" | "receivers" | "reuse":
            return name, _count(name, value)
        case "idle":
            return name, _choice(Idle, name, value)
        case "whole":
            parse_setting(name, value, asked=f"{name}={value}")
            return name, KEYS[name].parse(value)
        case "checksums":
            return name, _choice(Checksums, name, value)
        case "log" | "control_group":
            return name, value
        case "metrics":
            parse_listen_address(value, name=name)
            return name, value
    return "source", value


def _choice(kind: type[Choice], name: str, value: str) -> Choice:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise Refused(
            asked=f"{name}={value}",
            wrong=f"{name} has no such setting",
            remedy=f"take one of {known}",
        ) from None


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise Refused(asked=f"{name}={value}", wrong="this is not a number", remedy="write digits")
    if len(value) > DIGITS_MAX:
        raise Refused(
            asked=f"{name}={value}",
            wrong="this number is far too large",
            remedy=f"write at most {DIGITS_MAX} digits",
        )
    return int(value)


def _unreadable(item: str, name: str) -> Refused:
    asked = f"-o {item}"
    if name in _EXAMPLES:
        return Refused(
            asked=asked, wrong=f"{name} needs a value", remedy=f"write {name}={_EXAMPLES[name]}"
        )
    if name in _FLAGS or name in _KERNEL:
        return Refused(asked=asked, wrong=f"{name} takes no value", remedy=f"write {name}")
    if name == "remount":
        return Refused(
            asked=asked,
            wrong="the options of a mount cannot be changed while it is mounted",
            remedy="unmount it and mount it again with the new ones",
        )
    valued = ", ".join(f"{name}=" for name in _EXAMPLES)
    return Refused(
        asked=asked,
        wrong="fpfs has no such option",
        remedy=f"known are {valued}, {', '.join(_FLAGS)}, {', '.join(sorted(_KERNEL))}",
    )


def _conflicting(first: str, second: str) -> Refused:
    return Refused(
        asked=f"{first} and {second}",
        wrong="one option is given twice with different values",
        remedy="leave one out",
    )


def _check(options: MountOptions, typed: Mapping[str, str]) -> None:
    """Refuse values that no mount could work with, in the words that were `typed`."""
    chunk = f"chunk={typed.get('chunk', _mebibytes(options.chunk_bytes))}"
    staging = f"staging={typed.get('staging', _mebibytes(options.staging_bytes))}"
    if options.chunk_bytes % BLOCK_BYTES or not (
        CHUNK_BYTES_MIN <= options.chunk_bytes <= CHUNK_BYTES_MAX
    ):
        raise Refused(
            asked=chunk,
            wrong="a chunk is 128K to 16M, in steps of 64K",
            remedy="take 1M unless measured otherwise",
        )
    if options.staging_bytes < STAGING_BYTES_MIN:
        raise Refused(
            asked=staging,
            wrong="staging needs at least 16M",
            remedy="take 1G, or leave it out for an eighth of the memory up to 1G",
        )
    staging_bytes_min = SLOTS_MIN * options.slot_bytes
    if options.staging_bytes < staging_bytes_min:
        raise Refused(
            asked=f"{chunk} and {staging}",
            wrong=f"staging needs at least {SLOTS_MIN} chunks",
            remedy=f"take staging={_mebibytes(staging_bytes_min)}, or a smaller chunk",
        )
    if not 1 <= options.receivers <= RECEIVERS_MAX:
        raise Refused(
            asked=f"receivers={options.receivers}",
            wrong=f"1 to {RECEIVERS_MAX} threads receive writes",
            remedy="take 1, or more where several processes write at once and cores are idle",
        )
    if not 1 <= options.depth <= DEPTH_MAX:
        raise Refused(
            asked=f"depth={options.depth}",
            wrong=f"the depth of a device's queue is 1 to {DEPTH_MAX}",
            remedy="take 16 unless measured otherwise",
        )
    if options.reuse > REUSE_PERCENT_MAX:
        raise Refused(
            asked=f"reuse={options.reuse}",
            wrong=f"removed files go on to hold 0 to {REUSE_PERCENT_MAX} per cent of a device",
            remedy=f"take {REUSE_PERCENT_DEFAULT}, or 0 to give everything back at once",
        )


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes // 1024**2}M"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a server is told, on its stdin. All paths are absolute.

    `ready_fd` is where it says that it is ready. `log` is empty where it logs to stderr.
    """

    mountpoint: str
    devices: tuple[str, ...]
    options: MountOptions
    log: str
    runtime_folder: str
    ready_fd: int
    asked: str
