"""Policy: how a mount stripes contents and when it answers its callers.

There is one such policy for the whole mount. What is kept and when, which may differ by directory,
is `directory_policy`.
"""

from __future__ import annotations

import enum
import fnmatch
import os
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from fpfs.core.engine import BLOCK_BYTES, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES_DEFAULT = 1024 * 1024

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


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Placement and acknowledgement for a mount.

    `devices` are the device numbers that new contents may use, in order; `width` is how many of
    them one file is striped over (0: all). `chunk_bytes` is a multiple of 64 KiB. `whole` are shell
    patterns of names that never show what a killed writer left.
    """

    devices: tuple[int, ...]
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    width: int = 0
    ack: Acknowledge = Acknowledge.EARLY
    whole: tuple[str, ...] = WHOLE_DEFAULT

    def __post_init__(self) -> None:
        """Refuse what no layout could follow, with a message for the user."""
        if not self.devices:
            raise ValueError("a policy needs at least one device")
        if len(set(self.devices)) != len(self.devices):
            raise ValueError(f"devices {self.devices} name one device twice")
        if self.chunk_bytes <= 0 or self.chunk_bytes % BLOCK_BYTES:
            raise ValueError(
                f"chunk size {self.chunk_bytes} is not a positive multiple of {BLOCK_BYTES} bytes"
            )
        if not 0 <= self.width <= len(self.devices):
            raise ValueError(f"width {self.width} does not fit {len(self.devices)} devices")

    def is_whole(self, name: bytes) -> bool:
        """Whether a name is to show whole contents only."""
        text = os.fsdecode(name)
        return any(fnmatch.fnmatchcase(text, pattern) for pattern in self.whole)


def rotate_layouts(policy: Policy) -> Iterator[Layout]:
    """Yield layouts for new files, without end, each starting on the device after the last one's.

    Rotation spreads first chunks, so that many small files fill all devices alike.
    """
    device_count = len(policy.devices)
    width = policy.width or device_count
    layouts = [_layout_from(policy, start, width) for start in range(device_count)]
    for number in count():
        yield layouts[number % device_count]


def _layout_from(policy: Policy, start: int, width: int) -> Layout:
    """Return the layout whose first chunk lies on the device at position `start`."""
    if width == len(policy.devices):
        return Layout(chunk_bytes=policy.chunk_bytes, devices=policy.devices, first=start)
    rotated = policy.devices[start:] + policy.devices[:start]
    return Layout(chunk_bytes=policy.chunk_bytes, devices=rotated[:width], first=0)
