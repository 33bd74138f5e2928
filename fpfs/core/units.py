"""Sizes and rates as people write and read them: ``64M``, ``1.5 GiB``, ``2.31 GB/s``.

Sizes are given in powers of 1024 with or without ``iB`` (as ``mount`` and ``dd`` take them); rates
are shown in powers of 1000, since device makers and fio's MB/s count so.
"""

from __future__ import annotations

import re
from fractions import Fraction

from fpfs.core.refusal import Refused

_SIZE = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([KMGTP]?)(?:i?B)?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
SIZE_BYTES_MAX = 2**63 - 1
"""What the kernel counts sizes in."""


def parse_size_bytes(text: str, *, name: str) -> int:
    """Bytes of a size such as ``4096``, ``64K``, ``1.5GiB``; `name` is the option for the message.

    Raises `Refused` for anything else, fractions of a byte and absurd numbers included.
    """
    match = _SIZE.fullmatch(text)
    if match is not None:
        size = Fraction(match[1]) * 1024 ** _POWERS[match[2].upper()]
        if size.denominator == 1 and size <= SIZE_BYTES_MAX:
            return int(size)
    raise Refused(
        asked=f"{name}={text}",
        wrong="this is not a size in whole bytes",
        remedy="write a number with K, M, G or T, such as 64M or 1.5G",
    )


def format_size(size_bytes: int) -> str:
    """A size for people, three digits: ``0 B``, ``64.0 KiB``, ``1.50 GiB``."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1023.5 or unit == "PiB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_rate(bytes_per_s: float) -> str:
    """A rate for people in powers of 1000: ``2.31 GB/s``, ``315 MB/s``."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    if bytes_per_s >= 1e6:
        return f"{bytes_per_s / 1e6:.0f} MB/s"
    return f"{bytes_per_s / 1e3:.0f} kB/s"


def format_exact(size_bytes: int) -> str:
    """A size as `parse_size_bytes` reads it back, in the largest unit that divides it: ``640K``."""
    for power, unit in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)
