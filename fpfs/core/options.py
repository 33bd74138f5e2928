"""What a mount can be told: one typed set of options, from the command line or from ``-o``.

Invariants:
  * Every option that ``fpfs mount`` has a flag for can be given with ``-o``, so that an fstab line
    can say everything; a name that nobody knows is refused with the names that are known.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from fpfs.core.engine import BLOCK_BYTES
from fpfs.core.policy import CHUNK_BYTES_DEFAULT, Acknowledge
from fpfs.core.refusal import Refused
from fpfs.core.units import parse_size_bytes

CHUNK_BYTES_MIN = 128 * 1024
"""The smallest staging must hold the chunks that one request of 1 MiB touches, each in a slot."""
CHUNK_BYTES_MAX = 16 * 1024 * 1024
SLOT_BYTES_MIN = 1024 * 1024
SLOTS_MIN = 16
STAGING_BYTES_MIN = SLOTS_MIN * SLOT_BYTES_MIN
STAGING_BYTES_DEFAULT_MAX = 1024**3
DEPTH_MAX = 1024
RECEIVERS_MAX = 64
RECEIVERS_DEFAULT_MAX = 8


class Backend(enum.StrEnum):
    """How device I/O is done."""

    AUTO = "auto"
    IO_URING = "io_uring"
    THREADS = "threads"


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
    mounts of users are not.
    """

    ack: Acknowledge = Acknowledge.EARLY
    backend: Backend = Backend.AUTO
    staging_bytes: int = msgspec.field(default_factory=default_staging_bytes)
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    depth: int = 16
    receivers: int = msgspec.field(default_factory=default_receivers)
    allow_other: bool | None = None
    adopt: bool = False
    source: str = ""
    log: str = ""
    devices: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that no mount could work with."""
        if self.chunk_bytes % BLOCK_BYTES or not (
            CHUNK_BYTES_MIN <= self.chunk_bytes <= CHUNK_BYTES_MAX
        ):
            raise Refused(
                asked=f"chunk={self.chunk_bytes}",
                wrong="a chunk is 128K to 16M, in steps of 64K",
                remedy="take 1M unless measured otherwise",
            )
        if self.staging_bytes < STAGING_BYTES_MIN:
            raise Refused(
                asked=f"staging={self.staging_bytes}",
                wrong="staging needs at least 16M",
                remedy="take 1G, or leave it out for an eighth of the memory up to 1G",
            )
        staging_bytes_min = SLOTS_MIN * self.slot_bytes
        if self.staging_bytes < staging_bytes_min:
            raise Refused(
                asked=f"chunk={self.chunk_bytes} and staging={self.staging_bytes}",
                wrong=f"staging needs at least {SLOTS_MIN} chunks",
                remedy=f"take staging={staging_bytes_min // 1024**2}M, or a smaller chunk",
            )
        if not 1 <= self.receivers <= RECEIVERS_MAX:
            raise Refused(
                asked=f"receivers={self.receivers}",
                wrong=f"1 to {RECEIVERS_MAX} threads receive writes",
                remedy="take 1, or more where several processes write at once and cores are idle",
            )
        if not 1 <= self.depth <= DEPTH_MAX:
            raise Refused(
                asked=f"depth={self.depth}",
                wrong=f"the depth of a device's queue is 1 to {DEPTH_MAX}",
                remedy="take 16 unless measured otherwise",
            )

    @property
    def slot_bytes(self) -> int:
        """Size of a staging slot: the largest chunk."""
        return max(SLOT_BYTES_MIN, self.chunk_bytes)


Choice = TypeVar("Choice", bound=enum.Enum)

_KERNEL = frozenset("ro rw suid nosuid dev nodev exec noexec atime noatime sync async".split(" "))
# Words of an fstab line that are meant for mount(8) and systemd; mount(8) passes some of them on.
# relatime is what the kernel does anyway, and fusermount3 does not know the word.
_IGNORED = frozenset(
    "defaults auto noauto user nouser users owner group nofail _netdev relatime".split(" ")
)
_VALUED = ("ack", "backend", "staging", "chunk", "depth", "receivers", "device", "log", "fsname")
_FLAGS = ("allow_other", "noallow_other", "adopt")


def parse_mount_options(words: Iterable[str], *, base: MountOptions | None = None) -> MountOptions:
    """Options from ``-o`` strings, each a comma-separated list; later ones win over earlier.

    Raises `Refused` for an unknown name, a missing or a bad value.
    """
    options = base or MountOptions()
    for item in ",".join(words).split(","):
        name, equals, value = item.partition("=")
        if not item or name in _IGNORED or name.startswith("x-") or name == "comment":
            continue
        if item in _KERNEL:
            options = msgspec.structs.replace(options, kernel=(*options.kernel, item))
        elif item in _FLAGS:
            options = _with_flag(options, item)
        elif name in _VALUED and equals and value:
            options = _with_value(options, name, value)
        else:
            raise _unknown(item, needs_value=name in _VALUED)
    return options


def _with_flag(options: MountOptions, flag: str) -> MountOptions:
    if flag == "adopt":
        return msgspec.structs.replace(options, adopt=True)
    return msgspec.structs.replace(options, allow_other=flag == "allow_other")


def _with_value(options: MountOptions, name: str, value: str) -> MountOptions:
    match name:
        case "ack":
            return msgspec.structs.replace(options, ack=_choice(Acknowledge, name, value))
        case "backend":
            return msgspec.structs.replace(options, backend=_choice(Backend, name, value))
        case "staging" | "chunk":
            size_bytes = parse_size_bytes(value, name=name)
            return msgspec.structs.replace(options, **{f"{name}_bytes": size_bytes})
        case "depth" | "receivers":
            return msgspec.structs.replace(options, **{name: _count(name, value)})
        case "device":
            return msgspec.structs.replace(options, devices=(*options.devices, value))
        case "log":
            return msgspec.structs.replace(options, log=value)
    return msgspec.structs.replace(options, source=value)


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
    return int(value)


def _unknown(item: str, *, needs_value: bool) -> Refused:
    valued = ", ".join(f"{name}=" for name in _VALUED)
    return Refused(
        asked=f"-o {item}",
        wrong="this option needs a value" if needs_value else "fpfs has no such option",
        remedy=f"known are {valued}, {', '.join(_FLAGS)}, {', '.join(sorted(_KERNEL))}",
    )
