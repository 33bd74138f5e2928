"""The files of a checkpoint over several nodes: shares, and the manifest (docs/multi-node.md).

A checkpoint is one torch.save file, which nobody has whole: each share has ranges of it, and says
in a header of its own which. The manifest names the shares. Whoever has it and all shares has the
checkpoint, wherever they lie.

Nothing here needs torch.
"""

from __future__ import annotations

import re
import zlib
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import numpy as np

from fpfs.client.boxes import Ints

VERSION: Final = 1
MANIFEST = "manifest.json"
ALIGNMENT = 4096
"""Of where the ranges begin in a share: the largest block that devices have."""

_NAME = re.compile(r"([0-9]{5,})-of-([0-9]{5,})\.([0-9]+)-([0-9a-f]{16})\.share")

NATURAL_MAX = 1 << 56
Natural = Annotated[int, msgspec.Meta(ge=0, le=NATURAL_MAX)]


class Damaged(ValueError):
    """A file is no manifest or share, or not the one that it should be."""


class Identity(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Which checkpoint of a directory something belongs to. A later one is greater."""

    number: Natural
    """One more than that of the checkpoint before."""
    token: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    """Random: no other checkpoint has it."""


class ShareFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest says of a share."""

    name: str
    node: str
    """The host that wrote it."""
    bytes: Natural
    header_bytes: Natural
    """With its length before it, and what fills it up to ALIGNMENT: then its ranges begin."""
    header_crc32: Natural
    """Of all these bytes."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which shares make the checkpoint. It is written when all of them are durable."""

    version: Natural
    checkpoint: Identity
    bytes: Natural
    """Of the torch.save file."""
    ranks: Natural
    """How many saved it."""
    copies: Natural
    """How many nodes have each share."""
    shares: Annotated[tuple[ShareFile, ...], msgspec.Meta(min_length=1)]


class Range(NamedTuple):
    """Bytes of the torch.save file that lie in one piece in a share."""

    offset: int
    """Of the first run in the torch.save file."""
    bytes: int
    """Of one run."""
    count: int  # type: ignore[assignment]
    """How many runs."""
    step: int
    """From the begin of one run to that of the next, in the torch.save file; 0: there is one."""
    at: int
    """In the share, counted from where its ranges begin."""
    crc32: int
    """Of all runs, in order."""


class Header(msgspec.Struct, forbid_unknown_fields=True):
    """What a share says of itself."""

    version: Literal[1]
    checkpoint: Identity
    share: Natural
    """Its number, from 0."""
    shares: Natural
    bytes: Natural
    """Of the torch.save file."""
    container: tuple[Natural, Natural]
    """Where the ranges lie that are not tensors' bytes (as `Range.at`), and how many bytes these
    are. Share 0 has them, others have (0, 0)."""
    ranges: list[tuple[Natural, Natural, Natural, Natural, Natural, Natural]]
    """As `Range`."""


def share_name(share: int, shares: int, checkpoint: Identity) -> str:
    """Return the name of a share's file."""
    return f"{share:05d}-of-{shares:05d}.{checkpoint.number}-{checkpoint.token}.share"


class ShareName(NamedTuple):
    """What a share's name says."""

    share: int
    shares: int
    checkpoint: Identity


def parse_name(name: str) -> ShareName | None:
    """Return what the name of a share's file says; None: it is no such name.

    Numbers are less than NATURAL_MAX: there is one more, of the next checkpoint.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    share, shares, number = map(int, match.groups()[:3])
    if max(share, shares, number) >= NATURAL_MAX:
        return None
    return ShareName(share, shares, Identity(number, match[4]))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the file's content."""
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


def decode_manifest(content: bytes, path: str) -> Manifest:
    """Return what a manifest says; raises `Damaged`, which names `path`."""
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != VERSION:
            raise Damaged(f"{path} is of version {version}, and this fpfs knows {VERSION}")
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} is no manifest of a checkpoint: {error}") from None
    for number, share in enumerate(manifest.shares):
        if share.name != share_name(number, len(manifest.shares), manifest.checkpoint):
            raise Damaged(f"{path} names a file that is no share of it: {share.name!r}")
        if not 8 <= share.header_bytes <= share.bytes:
            raise Damaged(
                f"{path} is no manifest of a checkpoint: of {share.name}, of {share.bytes} bytes,"
                f" {share.header_bytes} are the header"
            )
    return manifest


class _Versioned(msgspec.Struct):
    version: int


def header_room(ranges: Ints, header: Header) -> int:
    """Return how many bytes a share has before its ranges.

    header: without ranges. ranges: of shape (ranges, fields of Range), without CRC32s.
    """
    widest = ranges.copy()
    widest[:, 5] = 0xFFFFFFFF
    size = 8 + len(_encoded(header, widest))
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_header(ranges: Ints, header: Header, room: int) -> bytes:
    """Return the begin of a share, `room` bytes: the length of the header and the header."""
    content = _encoded(header, ranges)
    assert 8 + len(content) <= room
    return (room - 8).to_bytes(8, "little") + content.ljust(room - 8)


def _encoded(header: Header, ranges: Ints) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(header, ranges=ranges.tolist()))


class ShareRanges(NamedTuple):
    """What a share's header has been read to say."""

    ranges: Ints
    """Of shape (ranges, fields of Range)."""
    container: tuple[int, int]
    """As `Header.container`."""


def decode_header(content: bytes, manifest: Manifest, number: int, path: str) -> ShareRanges:
    """Return what a share of the manifest has; raises `Damaged`, which names `path`.

    content: the begin of the file, as many bytes as the manifest says.
    """
    share = manifest.shares[number]
    begin = 8 + int.from_bytes(content[:8], "little")
    if begin != share.header_bytes:
        raise Damaged(f"{path} is no share of a checkpoint")
    if len(content) != begin or zlib.crc32(content) != share.header_crc32:
        raise Damaged(f"{path} has another header than the manifest says: it is damaged")
    try:
        header = msgspec.json.decode(content[8:], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} is no share of a checkpoint: {error}") from None
    ranges = np.array(header.ranges, dtype=np.int64).reshape(-1, len(Range._fields))
    offset, size, count, step, at, _ = ranges.T
    sound = (size > 0) & (count > 0) & (size <= header.bytes) & ((count == 1) | (step >= size))
    # First without a product that may not fit.
    sound &= count - 1 <= header.bytes // np.maximum(step, 1)
    sound &= offset + (count - 1) * step + size <= header.bytes
    sound &= begin + at + size * count <= share.bytes
    is_its = (header.checkpoint, header.share, header.shares, header.bytes) == (
        manifest.checkpoint,
        number,
        len(manifest.shares),
        manifest.bytes,
    )
    is_its &= begin + sum(header.container) <= share.bytes
    if not is_its or not sound.all():
        raise Damaged(f"{path} is another share than the manifest says")
    return ShareRanges(ranges, header.container)


__all__ = [
    "MANIFEST",
    "Damaged",
    "Header",
    "Identity",
    "Manifest",
    "Range",
    "ShareFile",
    "ShareName",
    "ShareRanges",
    "decode_header",
    "decode_manifest",
    "encode_header",
    "encode_manifest",
    "header_room",
    "parse_name",
    "share_name",
]
