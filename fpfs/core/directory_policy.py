"""What can be set for a directory and holds for all below it, until something nearer differs.

The mount's own options (`core/policy.py`) say how contents are placed and answered; these say what
is kept, and when. A setting is text, as a user types it and as the catalog stores it.

Invariants:
  * `parse` accepts what `DirectoryPolicy.from_settings` understands, and nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

from fpfs.core.limits import NAME_BYTES_MAX
from fpfs.core.refusal import Refused

VERSIONS_MAX = 1000
"""Former contents of one name; each is an inode of its own."""


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


class DirectoryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a directory.

    `versions` is how many former contents of each name are kept; `commit_marker` the name whose
    appearance by rename completes a directory that commits as a group.
    """

    replace: Replace = Replace.WHOLE
    versions: int = 0
    commit: CommitPoint = CommitPoint.CLOSE
    commit_marker: str = ".metadata"

    @classmethod
    def from_settings(cls, nearest_first: Sequence[Mapping[str, str]]) -> DirectoryPolicy:
        """Return what settings of a directory and of those above it come to."""
        values: dict[str, str] = {}
        for settings in reversed(nearest_first):
            values.update(settings)
        return msgspec.convert(values, cls, strict=False)


DEFAULTS = DirectoryPolicy()

_WORDS = {
    "replace": tuple(Replace),
    "commit": tuple(CommitPoint),
}

KEYS = ("replace", "versions", "commit", "commit_marker")


def parse(word: str, *, asked: str) -> tuple[str, str]:
    """Return key and value of ``key=value``. Raises `Refused` with what is allowed."""
    key, sign, value = word.partition("=")
    if not sign:
        raise Refused(asked=asked, wrong=f"'{word}' has no value", remedy="write key=value")
    check_key(key, asked=asked)
    if key in _WORDS and value not in _WORDS[key]:
        allowed = " or ".join(_WORDS[key])
        raise Refused(asked=asked, wrong=f"{key} cannot be '{value}'", remedy=f"take {allowed}")
    if key == "versions":
        value = _parse_count(value, asked=asked)
    if key == "commit_marker":
        _check_name(value, asked=asked)
    return key, value


def check_key(key: str, *, asked: str) -> None:
    """Raise `Refused` for a key that there is not."""
    if key not in KEYS:
        raise Refused(
            asked=asked, wrong=f"there is no setting '{key}'", remedy=f"known are {', '.join(KEYS)}"
        )


def _parse_count(value: str, *, asked: str) -> str:
    is_count = value.isascii() and value.isdecimal() and len(value) <= len(str(VERSIONS_MAX))
    if not is_count or int(value) > VERSIONS_MAX:
        raise Refused(
            asked=asked,
            wrong=f"versions cannot be '{value}'",
            remedy=f"take a number from 0 to {VERSIONS_MAX}",
        )
    return str(int(value))


def _check_name(value: str, *, asked: str) -> None:
    bad = not value or "/" in value or "\0" in value or value in (".", "..")
    # What is no UTF-8 came as surrogates, and cannot be stored as text.
    bad = bad or any("\ud800" <= character <= "\udfff" for character in value)
    if bad or len(value.encode()) > NAME_BYTES_MAX:
        raise Refused(
            asked=asked,
            wrong=f"commit_marker cannot be '{value}'",
            remedy=f"take the name of a file, without '/', of at most {NAME_BYTES_MAX} bytes of"
            " UTF-8",
        )
