"""The names of files that fpfs.save writes, until they take the name that they are for.

A temporary name ends as the name does: the mount's policy for the name is the policy for both. A
name that is too long for that lacks its begin there.
"""

from __future__ import annotations

import re
import secrets

PREFIX = b".fpfs-save-"
_TOKEN_DIGITS = 16
_NAME_BYTES_MAX = 255


def make_temporary(name: bytes) -> bytes:
    """Return a new temporary name for a name in the same directory."""
    return PREFIX + secrets.token_hex(_TOKEN_DIGITS // 2).encode() + _tail(name)


def target_of(found: bytes) -> bytes | None:
    """Return the name that `found` is a temporary one for, or its end if it is long; None: none."""
    token = rb"[0-9a-f]{%d}" % _TOKEN_DIGITS
    match = re.fullmatch(re.escape(PREFIX) + token + rb"\.(.+)", found, re.DOTALL)
    return match[1] if match else None


def is_temporary(found: bytes, name: bytes) -> bool:
    """Whether `found` is a temporary name for `name`."""
    target = target_of(found)
    return target is not None and b"." + target == _tail(name)


def _tail(name: bytes) -> bytes:
    return b"." + name[-(_NAME_BYTES_MAX - len(PREFIX) - _TOKEN_DIGITS - 1) :]


__all__ = ["PREFIX", "is_temporary", "make_temporary", "target_of"]
