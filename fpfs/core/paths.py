"""Paths on a mount: what a user names, and how they are shown.

A name may hold any byte but "/" and 0, also such that would move a terminal's cursor or look like
the next line of a log. So people are shown escapes in place of what is not printable.
"""

from __future__ import annotations

import os
import stat

from fpfs.core.refusal import Refused


def show_text(text: str) -> str:
    """A path, as printable characters."""
    return "".join(c if c.isprintable() else _escape(ord(c)) for c in text)


def encodable(path: str) -> str:
    """A path as text that can be written as UTF-8: bytes that are none become escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def show_name(name: bytes) -> str:
    """A name, or a path, as printable characters."""
    return show_text(name.decode(errors="backslashreplace"))


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
