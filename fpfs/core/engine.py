"""The byte plane as the name plane sees it: one protocol, and the native engine behind it.

Everything that carries file contents (staging, striping, device I/O, the FUSE channel) lives in the
native extension. This module is the only importer of ``fpfs._native``; the daemon talks to an
`Engine`, so that the namespace can be tested against `fpfs.testing.memory_engine.MemoryEngine`.

Invariants:
  * An inode is *loaded* before it is opened, and unloaded only when it has no handle and is clean.
  * `Engine.drain` is called by `fpfs.daemon.commit` alone, one at a time for each inode; every
    successful drain is followed by `Engine.committed` or by another drain.

Concurrency: all methods are called from the trio thread. Plain methods never block; what may wait
for a device is a coroutine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

BLOCK_BYTES = 64 * 1024
"""Grain of the block map, of rewrites and of checksums, in bytes."""

SEGMENT_BLOCKS = 1024
"""Blocks that one layout segment (one catalog row) describes: 64 MiB of a file."""

INLINE_BYTES_MAX = 16 * 1024
"""Contents up to this size are kept in the catalog instead of in device objects."""


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One device directory, as the engine opens it.

    `number` is the device's stable number in this filesystem (0..65534), written into layouts.
    `path` is the directory that holds its objects (it exists).
    """

    number: int
    path: str


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs at start.

    `backend` is ``auto``, ``io_uring`` or ``threads``. `object_base` is a number never used before
    in this filesystem; object names made by this engine start at ``object_base << 32``.
    `arena_path` names a file on tmpfs that the engine creates (mode 0600), or "" for a memfd.
    """

    devices: tuple[DeviceConfig, ...]
    arena_path: str
    filesystem_id: str
    staging_bytes: int
    slot_bytes: int = 1024 * 1024
    depth: int = 16
    backend: str = "auto"
    channel_threads: int = 1
    object_base: int = 1
    reserve_bytes: int = 8 * 1024 * 1024
    ack: str = "early"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of new chunks: chunk i goes to ``devices[(first + i) % len(devices)]``."""

    chunk_bytes: int
    devices: tuple[int, ...]
    first: int = 0


class FileAttributes(NamedTuple):
    """What a loaded inode's bytes look like now, acknowledged writes included."""

    size: int
    allocated_bytes: int
    mtime_ns: int
    ctime_ns: int
    privileges_dropped: bool
    dirty: bool


class ObjectId(NamedTuple):
    """One object: a file named ``{id:016x}`` in folder ``{id & 0xff:02x}`` of a device."""

    device: int
    id: int


class Range(NamedTuple):
    """`count` blocks of an object, from block `block` of that object."""

    device: int
    object: int
    block: int
    count: int


class Snapshot(NamedTuple):
    """What a drain made safe on the devices, for the catalog to make current.

    `segments` holds (index, blob) of the segments that changed since the last committed snapshot;
    an empty blob says that the segment describes nothing any more. `inline` is the whole content
    when it lives in the catalog (then there are no segments), else None. `objects` are all objects
    that the map refers to, `dead` those it no longer refers to, `garbage` superseded ranges of
    live objects; the last two may be given back after the commit is durable.
    """

    sequence: int
    size: int
    mtime_ns: int
    ctime_ns: int
    inline: bytes | None
    segments: Sequence[tuple[int, bytes]]
    objects: Sequence[ObjectId]
    dead: Sequence[ObjectId]
    garbage: Sequence[Range]


class SyncWrite(NamedTuple):
    """A write on an O_SYNC or O_DSYNC handle was staged and waits to be answered."""

    ticket: int
    ino: int


class LogRecord(NamedTuple):
    """Something the engine wants in the log; `level` is a `logging` level number."""

    level: int
    message: str


class ChannelClosed(NamedTuple):
    """The kernel closed the connection (unmounted or aborted)."""

    errno: int


Event = SyncWrite | LogRecord | ChannelClosed


class Engine(Protocol):
    """The byte plane. Errors are OSError with the errno that the caller should see."""

    def load(
        self,
        ino: int,
        *,
        size: int,
        mtime_ns: int,
        ctime_ns: int,
        inline: bytes | None,
        segments: Sequence[tuple[int, bytes]],
        layout: Layout,
    ) -> None:
        """Make an inode's committed content known. EIO if a segment is damaged."""

    def loaded(self, ino: int) -> bool:
        """Whether `load` was called and neither `unload` nor `drop` since."""

    def unload(self, ino: int) -> None:
        """Forget a clean inode without handles. EBUSY if it has handles or unsaved bytes."""

    async def drop(self, ino: int) -> Sequence[ObjectId]:
        """Forget a deleted inode, unsaved bytes included; returns every object it held."""

    def open(self, handle: int, ino: int, *, flags: int) -> None:
        """Register an open handle with its open(2) flags before the kernel learns of it."""

    def release(self, handle: int) -> None:
        """Forget a handle."""

    def attributes(self, ino: int) -> FileAttributes:
        """Current size and times of a loaded inode."""

    def set_times(self, ino: int, *, mtime_ns: int | None, ctime_ns: int) -> None:
        """Set the modification time (None: keep) and change time of a loaded inode."""

    def privileges_restored(self, ino: int) -> None:
        """Forget that a write dropped set-uid and set-gid: the catalog has it now."""

    async def truncate(self, ino: int, size: int) -> None:
        """Set the size; sets mtime and ctime to now, as truncate(2). EFBIG, ENOSPC, EIO."""

    async def drain(self, ino: int, *, last: bool) -> Snapshot:
        """Bring everything acknowledged so far to the devices and flush it there.

        `last` says that no writable handle is left: preallocated space is trimmed.
        Raises OSError(EIO or ENOSPC) when bytes could be kept on no device.
        """

    def committed(self, ino: int, sequence: int) -> None:
        """The catalog holds the snapshot with this sequence number."""

    async def discard(self, ranges: Sequence[Range]) -> None:
        """Give ranges of objects back to the devices (no committed layout refers to them)."""

    async def remove_objects(self, objects: Sequence[ObjectId]) -> None:
        """Delete objects (no committed layout refers to them)."""

    def take_error(self, handle: int) -> int:
        """Errno of an I/O error not yet reported through this handle, or 0."""

    def complete_write(self, ticket: int, errno: int) -> None:
        """Answer a `SyncWrite`: 0 when it is durable."""

    def events(self) -> AsyncIterator[Event]:
        """Everything the engine reports, in order; ends after `close`."""

    def serve(self, fuse_fd: int) -> int:
        """Start the channel on a /dev/fuse descriptor (taken over); returns the descriptor that
        pyfuse3 gets as ``/dev/fd/N``."""

    def statistics(self) -> Mapping[str, object]:
        """Counters and gauges: ``staging`` (bytes_used, bytes_total, pinned), ``devices`` (by
        number: bytes_written, bytes_read, in_flight, backend, direct), ``channel`` (requests)."""

    def close(self) -> None:
        """Stop threads and free the arena. Dirty bytes must have been drained."""
