"""How users name devices: by number, by directory, or by a tag that they have given to some.

No name is two of these: a number has digits only, a directory has a slash, a tag begins with a
letter and has none.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fpfs.core.refusal import Refused

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

TAG_CHARACTERS_MAX = 32
TAGS_MAX = 32
"""Tags that one device can have."""

_TAG = re.compile(rf"[A-Za-z][A-Za-z0-9_.-]{{0,{TAG_CHARACTERS_MAX - 1}}}")
_NUMBER = re.compile(r"[0-9]{1,5}")


class Named(Protocol):
    """What a device is found by."""

    @property
    def number(self) -> int:
        """Its number in layouts."""

    @property
    def path(self) -> str:
        """Its directory."""

    @property
    def tags(self) -> Collection[str]:
        """What it was tagged with."""


class TagChange(NamedTuple):
    """Tags that a device is to get, and to lose."""

    added: tuple[str, ...]
    dropped: tuple[str, ...]


def is_tag(word: str) -> bool:
    """Whether a word can be a tag; "all" is what policies call all devices."""
    return _TAG.fullmatch(word) is not None and word != "all"


def is_number(word: str) -> bool:
    """Whether a word can be the number of a device."""
    return _NUMBER.fullmatch(word) is not None


def devices_named(name: str, devices: Sequence[Named]) -> tuple[int, ...]:
    """Return the numbers of the devices that a number, a directory or a tag names, in order.

    A directory must be absolute. None: there is no such device.
    """
    if _NUMBER.fullmatch(name):
        return tuple(each.number for each in devices if each.number == int(name))
    if os.path.isabs(name):
        wanted = os.path.normpath(name)
        return tuple(each.number for each in devices if each.path == wanted)
    return tuple(sorted(each.number for each in devices if name in each.tags))


def describe_devices(devices: Sequence[Named]) -> str:
    """Say in words by what names there are devices."""
    numbers = ", ".join(str(each.number) for each in devices)
    tags = sorted({tag for each in devices for tag in each.tags})
    return f"devices {numbers}" + (f" and tags {', '.join(tags)}" if tags else "")


def parse_tags(words: Sequence[str], *, asked: str) -> TagChange:
    """Return what ``+fast -slow`` says. Raises `Refused`."""
    added: list[str] = []
    dropped: list[str] = []
    for word in words:
        sign, tag = word[:1], word[1:]
        if sign not in ("+", "-") or not is_tag(tag):
            raise Refused(
                asked=asked,
                wrong=f"{word!r} is no change of tags",
                remedy=f"write +TAG or -TAG; a tag begins with a letter, and has letters, digits,"
                f" '_', '.' and '-', {TAG_CHARACTERS_MAX} at most",
            )
        if tag in added or tag in dropped:
            raise Refused(asked=asked, wrong=f"{tag} is named twice", remedy="leave one out")
        (added if sign == "+" else dropped).append(tag)
    if not words:
        raise Refused(asked=asked, wrong="no tag is named", remedy="write +TAG or -TAG")
    return TagChange(tuple(added), tuple(dropped))
