"""Where new chunks of a file go: devices, their order, and which is the first.

Pure functions, and one counter for those that take turns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import count

import msgspec

from fpfs.core.engine import Layout
from fpfs.core.errors import DamagedData
from fpfs.core.policy import First, Policy
from fpfs.core.policy_rules import DeviceFacts, choose_devices

ALIKE_SHARE = 64
"""Devices whose free space differs by less than this part of the largest one's are alike: files
that are made in quick succession, and fill later, do not all go to one."""

_RANKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"__(\d{1,9})_\d+\.distcp",  # torch.distributed.checkpoint
        r"rank[_-]?(\d{1,9})",  # DeepSpeed's mp_rank_00 and zero_pp_rank_0, and many others
        r"(?:shard|part)[_-]?(\d{1,9})",
        r"-(\d{1,9})-of-\d+",  # transformers
    )
)

_layout_decoder = msgspec.msgpack.Decoder(Layout)


def encode_layout(layout: Layout) -> bytes:
    """Return the stored form of a layout."""
    return msgspec.msgpack.encode(layout)


def decode_layout(stored: bytes | None) -> Layout:
    """Return the layout of a stored regular file; `DamagedData` when it is none."""
    try:
        return _layout_decoder.decode(stored or b"")
    except msgspec.MsgspecError as error:
        raise DamagedData(f"the layout of a file cannot be read: {error}") from error


def rank_of(name: bytes) -> int | None:
    """Return the rank that a file's name says it is of, or None.

    The first of these that it has: ``__N_M.distcp``, ``rankN``, ``shardN`` or ``partN``,
    ``-N-of-M``.
    """
    text = os.fsdecode(name)
    for pattern in _RANKS:
        if match := pattern.search(text):
            return int(match[1])
    return None


def conforms(layout: Layout, policy: Policy, devices: Sequence[DeviceFacts]) -> bool:
    """Whether a layout is one that a policy could have led to."""
    allowed = choose_devices(policy, devices)
    width = min(policy.width or len(allowed), len(allowed))
    return (
        layout.chunk_bytes == policy.chunk_bytes
        and len(layout.devices) == width
        and set(layout.devices) <= set(allowed)
    )


class Placer:
    """Chooses layouts of new files."""

    def __init__(self) -> None:
        """Start with the first device."""
        self._turns = count()

    def layout(
        self,
        policy: Policy,
        name: bytes,
        devices: Sequence[DeviceFacts],
        bytes_free: Mapping[int, int] | None = None,
    ) -> Layout:
        """Return the layout of a new file; `bytes_free` by device is for `First.LEAST_USED`."""
        allowed = choose_devices(policy, devices)
        width = min(policy.width or len(allowed), len(allowed))
        rank = rank_of(name) if policy.first is First.RANK else None
        start = (next(self._turns) if rank is None else rank) % len(allowed)
        ordered = allowed[start:] + allowed[:start]
        if policy.first is First.LEAST_USED and bytes_free is not None:
            ordered = _emptiest_first(ordered, bytes_free)
        elif width == len(allowed):
            return Layout(chunk_bytes=policy.chunk_bytes, devices=allowed, first=start)
        return Layout(chunk_bytes=policy.chunk_bytes, devices=ordered[:width], first=0)


def _emptiest_first(numbers: Sequence[int], bytes_free: Mapping[int, int]) -> tuple[int, ...]:
    """Order devices by free space; those that are alike stay in the order that they are in."""
    most = max(bytes_free.values(), default=0)
    grain = max(most // ALIKE_SHARE, 1)
    return tuple(sorted(numbers, key=lambda number: (most - bytes_free.get(number, 0)) // grain))
