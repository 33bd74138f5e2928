"""Policy: where contents of a directory go, when writers are answered, and what is kept.

A policy is set for a directory, and holds for all below it until something nearer differs. What
nobody has set is as the mount's options have it, or a default. A setting is text, as a user types
it and as the catalog stores it.

Invariants:
  * `parse_setting` accepts what `Policy.with_settings` understands, and gives one text for each
    value; what depends on other settings, or on the mount, `policy_rules` checks.
"""

from __future__ import annotations

import enum
import fnmatch
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fpfs.core.device_names import is_number, is_tag
from fpfs.core.engine import BLOCK_BYTES
from fpfs.core.limits import NAME_BYTES_MAX
from fpfs.core.refusal import Refused
from fpfs.core.units import format_exact, parse_size_bytes

CHUNK_BYTES_DEFAULT = 1024 * 1024
CHUNK_BYTES_MIN = 128 * 1024
"""The smallest staging must hold the chunks that one request of 1 MiB touches, each in a slot."""
CHUNK_BYTES_MAX = 1024**3

WIDTH_MAX = 65_535
DEPTH_MAX = 1024
BUFFERS_MIN = 2
"""One that fills while the other is on its way."""
BUFFERS_MAX = 1024
READAHEAD_BYTES_MIN = 1024 * 1024
READAHEAD_BYTES_MAX = 16 * 1024 * 1024
"""A reader gets no more of the buffers that all reads share."""
VERSIONS_MAX = 1000
"""Former versions of one name; each is an inode of its own."""
TEXT_BYTES_MAX = 4096
"""Of one setting."""

WHOLE_DEFAULT = ("*.pt", "*.pth", "*.ckpt", "*.bin", "*.safetensors", "*.distcp")
"""Names of checkpoints, as shell patterns."""


class Acknowledge(enum.StrEnum):
    """When a caller that wrote is answered.

    EARLY: write() when the bytes are in staging, close() at once.
    CLOSE: as EARLY, but the close() of the owner that wrote waits until its bytes are durable.
    DURABLE: every write() waits until its bytes are durable, and close() too.
    """

    EARLY = "early"
    CLOSE = "close"
    DURABLE = "durable"


class First(enum.StrEnum):
    """Which device gets the first chunk of a file."""

    ROTATE = "rotate"
    """The one after the last file's."""
    LEAST_USED = "least-used"
    """The one with the most free space; a file on fewer devices than there are takes those."""
    RANK = "rank"
    """The one that the rank in the file's name counts to; without a rank they rotate."""


class Replace(enum.StrEnum):
    """What becomes of a content that is truncated to be written anew."""

    WHOLE = "whole"
    """It stays until the new one is whole; both need their space meanwhile."""
    INPLACE = "inplace"
    """It is given up at once, and its space is there for the new one."""


class CommitPoint(enum.StrEnum):
    """When what is written becomes what a crash leaves."""

    CLOSE = "close"
    """Each file by itself, when its last writer closes it."""
    GROUP = "group"
    """All files of a directory together, when the directory is said to be complete."""


class Reads(enum.StrEnum):
    """How those read who only read."""

    CACHED = "cached"
    """Through the kernel's page cache, which several readers share."""
    DIRECT = "direct"
    """From the devices into the reader's memory; the page cache stays as it is."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a directory.

    `width` is over how many devices a file is striped (0: all that `devices` names), `devices`
    which ones it may use, by number or tag (none: all). `depth` is how many chunks of a file may be
    on their way to each device (0: as many as the device's queue takes), `buffers` how many chunks
    of it may be staged for each device (0: as many as there is room for). `whole` are shell
    patterns of all-or-nothing names, which never show what a killed writer left. `versions` is how
    many former contents of each name are kept, `commit_marker` the name whose appearance by rename
    completes a directory that commits as a group. `readahead_bytes` is what is read ahead of a
    sequential reader, beyond what the kernel reads for the page cache (0: nothing).
    """

    width: int = 0
    devices: tuple[str, ...] = ()
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    first: First = First.ROTATE
    depth: int = 0
    buffers: int = 0
    ack: Acknowledge = Acknowledge.EARLY
    commit: CommitPoint = CommitPoint.CLOSE
    commit_marker: str = ".metadata"
    versions: int = 0
    replace: Replace = Replace.WHOLE
    whole: tuple[str, ...] = WHOLE_DEFAULT
    readahead_bytes: int = 0
    reads: Reads = Reads.CACHED

    def with_settings(self, nearest_first: Sequence[Mapping[str, str]]) -> Policy:
        """Return what settings of a directory and of those above it make of this policy."""
        values: dict[str, str] = {}
        for settings in reversed(nearest_first):
            values.update(settings)
        fields = {KEYS[key].field: KEYS[key].parse(text) for key, text in values.items()}
        return msgspec.structs.replace(self, **fields)

    def shown(self, key: str) -> str:
        """Return the text of a setting's value."""
        return KEYS[key].show(getattr(self, KEYS[key].field))

    def is_all_or_nothing(self, name: bytes) -> bool:
        """Whether a name shows finished contents only."""
        text = os.fsdecode(name)
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in self.whole)


class Key(NamedTuple):
    """A setting: the field of `Policy` that it is, and how its value is read and shown.

    `parse` raises ValueError for what is not `allowed`, in words.
    """

    field: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    allowed: str


def _words(kind: type[enum.StrEnum], field: str) -> Key:
    return Key(field, kind, str, " or ".join(kind))


def _number(field: str, *, least: int, most: int, word: str = "") -> Key:
    """Return a key of a number; `word` stands for 0, which says that there is no such number."""

    def parse(text: str) -> int:
        if word and text == word:
            return 0
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
            raise ValueError(text)
        if not least <= int(text) <= most:
            raise ValueError(text)
        return int(text)

    def show(value: int) -> str:
        return word if word and value == 0 else str(value)

    allowed = f"a number from {least} to {most}" + (f", or {word}" if word else "")
    return Key(field, parse, show, allowed)


def _parse_devices(text: str) -> tuple[str, ...]:
    if text == "all":
        return ()
    words = text.split(",")
    if len(set(words)) != len(words) or not all(is_number(each) or is_tag(each) for each in words):
        raise ValueError(text)
    return tuple(words)


def _parse_size(text: str) -> int:
    try:
        return parse_size_bytes(text, name="")
    except Refused:
        raise ValueError(text) from None


def _parse_chunk(text: str) -> int:
    size_bytes = _parse_size(text)
    if size_bytes % BLOCK_BYTES or not CHUNK_BYTES_MIN <= size_bytes <= CHUNK_BYTES_MAX:
        raise ValueError(text)
    return size_bytes


def _parse_readahead(text: str) -> int:
    if text == "auto":
        return 0
    size_bytes = _parse_size(text)
    if size_bytes % READAHEAD_BYTES_MIN:
        raise ValueError(text)
    if not READAHEAD_BYTES_MIN <= size_bytes <= READAHEAD_BYTES_MAX:
        raise ValueError(text)
    return size_bytes


def _parse_name(text: str) -> str:
    if not text or "/" in text or "\0" in text or text in (".", ".."):
        raise ValueError(text)
    if len(text.encode()) > NAME_BYTES_MAX:  # of what is no UTF-8 this is a ValueError, too
        raise ValueError(text)
    return text


def _parse_patterns(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    patterns = text.split(":")
    if not all(patterns) or any("/" in each or "\0" in each for each in patterns):
        raise ValueError(text)
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise ValueError(text)
    return tuple(patterns)


KEYS: Mapping[str, Key] = {
    "width": _number("width", least=1, most=WIDTH_MAX, word="all"),
    "devices": Key(
        "devices",
        _parse_devices,
        lambda words: ",".join(words) or "all",
        "numbers or tags of devices, separated by commas (see fpfs-ctl device list), or all",
    ),
    "chunk": Key(
        "chunk_bytes", _parse_chunk, format_exact, "a size from 128K to 1G, a multiple of 64K"
    ),
    "first": _words(First, "first"),
    "depth": _number("depth", least=1, most=DEPTH_MAX, word="auto"),
    "buffers": _number("buffers", least=BUFFERS_MIN, most=BUFFERS_MAX, word="auto"),
    "ack": _words(Acknowledge, "ack"),
    "commit": _words(CommitPoint, "commit"),
    "commit_marker": Key(
        "commit_marker",
        _parse_name,
        str,
        f"the name of a file, without '/', of at most {NAME_BYTES_MAX} bytes of UTF-8",
    ),
    "versions": _number("versions", least=0, most=VERSIONS_MAX),
    "replace": _words(Replace, "replace"),
    "whole": Key(
        "whole",
        _parse_patterns,
        lambda patterns: ":".join(patterns) or "none",
        "shell patterns of names (without /), separated by colons, or none",
    ),
    "readahead": Key(
        "readahead_bytes",
        _parse_readahead,
        lambda size_bytes: format_exact(size_bytes) if size_bytes else "auto",
        "a size from 1M to 16M, a multiple of 1M, or auto",
    ),
    "reads": _words(Reads, "reads"),
}
"""All settings, in the order in which they are shown."""

PROFILES: Mapping[str, Mapping[str, str]] = {
    "throughput": {"width": "all", "devices": "all", "first": "rotate", "ack": "early"},
    "safe": {"ack": "close", "replace": "whole", "versions": "2"},
    "small-files": {"width": "1", "chunk": "128K", "first": "rotate", "ack": "early"},
    "archive": {"first": "least-used", "depth": "2", "buffers": "4", "reads": "direct"},
}
"""Settings that go together.

throughput: one large file at a time gets all devices. safe: what close() has returned of is
durable, and the two contents before it are kept. small-files: each file on one device, all devices
alike. archive: what nobody waits for leaves the devices' queues, staging and the page cache to
others.
"""


def parse_setting(key: str, text: str, *, asked: str) -> str:
    """Return the one text of a setting's value. Raises `Refused` with what is allowed."""
    check_key(key, asked=asked)
    try:
        return KEYS[key].show(KEYS[key].parse(text))
    except ValueError:
        raise Refused(
            asked=asked, wrong=f"{key} cannot be '{text}'", remedy=f"take {KEYS[key].allowed}"
        ) from None


def check_key(key: str, *, asked: str) -> None:
    """Raise `Refused` for a setting that there is not."""
    if key not in KEYS:
        raise Refused(
            asked=asked, wrong=f"there is no setting '{key}'", remedy=f"known are {', '.join(KEYS)}"
        )


def split_setting(word: str, *, asked: str) -> tuple[str, str]:
    """Return key and value of ``key=value``. Raises `Refused`."""
    key, sign, value = word.partition("=")
    if not sign:
        raise Refused(asked=asked, wrong=f"'{word}' has no value", remedy="write key=value")
    return key, parse_setting(key, value, asked=asked)
