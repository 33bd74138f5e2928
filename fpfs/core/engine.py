"""The byte plane as the name plane sees it: one protocol.

Everything that carries file contents (staging, striping, device I/O, the FUSE channel) lives in the
native extension (`fpfs.core.native_engine`). The daemon talks to an `Engine`, so that the namespace
can be tested against `fpfs.testing.memory_engine.MemoryEngine`.

Invariants:
  * An inode is *loaded* before it is opened, and unloaded only when it has no handle and is clean.
  * `Engine.drain` is called by `fpfs.daemon.commit.pipeline` alone, one at a time for each inode;
    every successful drain is followed by `Engine.committed` or by another drain.

Concurrency: all methods are called from the trio thread. Plain methods never block; what may wait
for a device is a coroutine.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from fpfs import _native
from fpfs.core.statistics import EngineStatistics, Unsaved

crc32c = _native.crc32c
"""CRC32C (Castagnoli) of a bytes object, by the processor where it can."""

checksum_blocks = _native.checksum_blocks
"""CRC32C of each block of a bytes object, as contents get them. Releases the GIL."""

check_objects_directory = _native.check_objects_directory
"""Raise OSError where a device could not keep its objects in a directory. Blocks."""

CatalogFiles = _native.CatalogFiles
CatalogLeader = _native.CatalogLeader
CatalogMirror = _native.CatalogMirror
"""The catalog's copies as files; see native/src/catalog/catalog_files.h and catalog_mirror.h."""

Tracer = _native.Tracer
"""Events of one file while somebody traces it; see native/src/base/tracer.h."""

KnownDirectories = _native.KnownDirectories
"""What the channel may say of directories by itself; see native/src/fuse/known_directories.h."""

ARENA_FORMAT: int = _native.ARENA_FORMAT
"""Format of what an engine leaves in the staging arena to the one that takes over."""

BLOCK_BYTES = 64 * 1024
"""Grain of the block map, of rewrites and of checksums, in bytes."""

SEGMENT_BLOCKS = 1024
"""Blocks that one layout segment (one catalog row) describes: 64 MiB of a file."""

FIRST_OBJECT_BYTES = 8 * 1024 * 1024
"""What a file's first object on a device may hold; each further one holds as much as all before."""

RESERVE_BYTES = 8 * 1024 * 1024
"""What the engine leaves free on a device's filesystem, so that the catalog can still write."""

INLINE_BYTES_MAX = 16 * 1024
"""Contents up to this size are kept in the catalog instead of in device objects."""

QUEUED_MAX = 8192
"""More requests than the kernel keeps waiting for a server at once (4096 in the background)."""

RECEIVE_AGAIN_S = 0.0005
"""How soon is looked again whether the kernel keeps any."""


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
    `cpu_latency_path` is ``/dev/cpu_dma_latency`` where processors are to be kept out of deep idle
    states while requests come in bursts, or "". `kept_percent` is how much of each device removed
    objects of twice `first_object_bytes` and more may go on to hold, for new bytes. With
    `take_over` the arena is there already: a server that died left it, and `Engine.left` says what
    it holds. Without `checksums` contents are written without and read unchecked.
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
    reserve_bytes: int = RESERVE_BYTES
    kept_percent: int = 0
    first_object_bytes: int = FIRST_OBJECT_BYTES
    ack: str = "early"
    cpu_latency_path: str = ""
    take_over: bool = False
    checksums: bool = True


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of new chunks: chunk i goes to ``devices[(first + i) % len(devices)]``."""

    chunk_bytes: int
    devices: tuple[int, ...]
    first: int = 0


class Flow(NamedTuple):
    """How a file is written and read; see `Flow` in native/src/file/file.h.

    `ack` is ``early``, ``close`` or ``durable``. `depth` is how many chunks may be on their way to
    each device, `buffers` how many may be staged for each; 0: as many as there are.
    `read_ahead_bytes` is what is read ahead of who only reads, beyond what the kernel does.
    """

    ack: str = "early"
    depth: int = 0
    buffers: int = 0
    is_cached: bool = True
    read_ahead_bytes: int = 0


class FileAttributes(NamedTuple):
    """What a loaded inode's bytes look like now, acknowledged writes included."""

    size: int
    allocated_bytes: int
    mtime_ns: int
    ctime_ns: int
    privileges_dropped: bool
    dirty: bool
    only_longer: bool
    """Dirty, and what is committed is a beginning of it: nothing was replaced or cut off."""


class ObjectId(NamedTuple):
    """One object: a file named ``{id:016x}`` in folder ``{id & 0xff:02x}`` of a device."""

    device: int
    id: int


class Range(NamedTuple):
    """`count` blocks of an object, from block `block` of that object."""

    device: int
    object: int
    block: int
    count: int  # type: ignore[assignment]  # hides tuple.count


class Snapshot(NamedTuple):
    """What a drain made safe on the devices, for the catalog to make current.

    `segments` holds (index, blob) of the segments that changed since the last committed snapshot;
    an empty blob says that the segment describes nothing any more. `inline` is the whole content
    when it lives in the catalog (then there are no segments), else None. `objects` are all objects
    that the map refers to, `dead` those it no longer refers to, `garbage` superseded ranges of
    live objects; the last two may be given back after the commit is durable. `acknowledged_ns` is
    when its oldest byte was (``time.monotonic_ns()``), 0 when it has no new one.
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
    noted: int = 0
    acknowledged_ns: int = 0


class StoredRange(NamedTuple):
    """Blocks of an object, from block `block` on, and what their checksums should be."""

    device: int
    object: int
    block: int
    checksums: Sequence[int]


class CopiedRange(NamedTuple):
    """`count` blocks of an object that are to be copied; those `unwritten` only get a place.

    Without `checksums` they are copied as they are.
    """

    device: int
    object: int
    block: int
    count: int  # type: ignore[assignment]
    unwritten: bool
    checksums: Sequence[int]


class Move(NamedTuple):
    """`count` blocks of an object that lie in another one now."""

    device: int
    object: int
    block: int
    count: int  # type: ignore[assignment]
    to_device: int
    to_object: int
    to_block: int


class Damage(NamedTuple):
    """`count` blocks, from block `first` of the range at index `range`, that are not sound.

    `errno` says why they could not be read, or is 0 when their checksums differ.
    """

    range: int
    first: int
    count: int  # type: ignore[assignment]
    errno: int


class LeftHandle(NamedTuple):
    """An open file that a server that died had promised to the kernel.

    `request` is the number of the request that it is the answer to.
    """

    handle: int
    ino: int
    flags: int
    request: int


class Part(enum.IntEnum):
    """What of an inode is told, as in native/src/engine/engine.h. Of some two parts are."""

    ALL = 0
    CLOSED = 1
    """A version that was closed before somebody wrote on, if anybody did."""
    LATER = 2
    """What came after it."""


class LeftChanges(NamedTuple):
    """An inode with changes that the catalog may not know of.

    `sequence` is that of the last one, as `Snapshot.noted` counts. `killed_by` is the signal that
    ended the last writer that closed it, or 0.
    """

    ino: int
    sequence: int
    killed_by: int
    part: Part = Part.ALL


class Released(NamedTuple):
    """A handle that the kernel has released, and the signal that ended its last writer, or 0."""

    handle: int
    killed_by: int


class Left(NamedTuple):
    """What a server that died left in the arena.

    `changed` are inodes with changes that the catalog may not know of, in the order in which their
    last writers closed them (those that are open: of their last change).
    """

    handles: Sequence[LeftHandle]
    changed: Sequence[LeftChanges]
    suspects: frozenset[int] = frozenset()
    """Inodes of which a record was damaged: their changes are not whole."""
    all_suspect: bool = False
    """A record was damaged that may have been of any inode."""
    handles_damaged: bool = False
    """Handles are missing that somebody may have written through."""

    def is_suspect(self, ino: int) -> bool:
        """Whether the changes of an inode may not be whole."""
        return self.all_suspect or ino in self.suspects


class SyncWrite(NamedTuple):
    """A write on an O_SYNC or O_DSYNC handle was staged and waits to be answered."""

    ticket: int
    ino: int


class SpaceWanted(NamedTuple):
    """A write of an inode found no space: it waits for `room_made`, or was `refused`."""

    ino: int
    refused: bool


class LogRecord(NamedTuple):
    """Something the engine wants in the log; `level` is a `logging` level number."""

    level: int
    message: str
    refused: int = 0
    """Ticket of a request that is to be refused (`complete_write`) when this is in the log."""


class ChannelClosed(NamedTuple):
    """The kernel closed the connection (unmounted or aborted)."""

    errno: int


class HandlesReleased(NamedTuple):
    """`Engine.take_released` has something that no request came to take."""


class Connection(enum.StrEnum):
    """A connection to the kernel that is to be served."""

    NEW = "new"
    LEFT = "left"
    """Another server served it, and was ended."""
    LEFT_BY_FAULT = "left by fault"
    """Another server served it, and died of what it did: perhaps of a request, which the kernel is
    going to send again. One that several servers died of is answered with EIO."""


Event = SyncWrite | SpaceWanted | LogRecord | ChannelClosed | HandlesReleased


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

    def place(self, ino: int, layout: Layout) -> None:
        """Let new chunks of a loaded inode go elsewhere. EBUSY while anything is staged.

        Who takes over goes by the layout that it `load`s: what is staged must be of that.
        """

    def set_flow(self, ino: int, flow: Flow) -> None:
        """Write and read a loaded inode as a policy has it, from now on."""

    def loaded(self, ino: int) -> bool:
        """Whether `load` was called and neither `unload` nor `drop` since."""

    def unload(self, ino: int) -> None:
        """Forget a clean inode without handles. EBUSY if it has handles or unsaved bytes."""

    async def drop(self, ino: int) -> Sequence[ObjectId]:
        """Forget a deleted inode, unsaved bytes included; returns every object it held."""

    def open(self, handle: int, ino: int, *, flags: int, request: int) -> None:
        """Register an open handle with its open(2) flags before the kernel learns of it.

        `request` is the number of the request that asks for it.
        """

    def begin(self, ino: int) -> None:
        """Note of a loaded inode that its first content begins.

        How that is closed is then known to a server that takes over, also when nothing was written.
        """

    def left(self) -> Left:
        """What a server that died left, to be taken over before anything is served."""

    async def recover(self, ino: int, *, trim: bool) -> None:
        """Put what is left of a loaded inode on top of its committed content. ENOSPC.

        With `trim` what was preallocated behind it is given back: not where others refer to blocks
        of its objects. Of an inode in two parts it is what was closed.
        """

    async def recover_later(self, ino: int, *, trim: bool) -> None:
        """Put the later part on top of the other, which was drained and not `committed`. ENOSPC."""

    def abandon(self, ino: int) -> None:
        """Forget what is left of an inode that does not exist any more."""

    async def known(self, ino: int) -> bool:
        """Whether the kernel refers to an inode: True where it cannot say. After `serve`."""

    def spoil(self, ino: int) -> None:
        """Changes of a loaded inode are lost: its handles get EIO until it is emptied."""

    def held_objects(self) -> Sequence[ObjectId]:
        """Objects of all loaded inodes, whether the catalog knows of them or not."""

    def restore_handle(self, handle: int, ino: int, *, flags: int) -> None:
        """Take over a handle that was left; its inode is loaded."""

    def record(self, handle: int, ino: int, *, flags: int, request: int) -> None:
        """Keep what a successor has to know of a handle that the engine does not serve."""

    def forget(self, handle: int) -> None:
        """Forget a handle that was left or recorded."""

    def release(self, handle: int) -> bool:
        """Forget a handle that the kernel will not release any more. False when it just did."""

    def take_released(self) -> Sequence[Released]:
        """Handles that the kernel has released since the last call, in that order.

        The engine has forgotten them and has answered the kernel. Whoever acts on something that
        may have come after such a release calls this first. Those of a server that died are among
        them whose openers were killed before they got them, and of these `record`ed ones, too.
        """

    async def receive_all(self) -> None:
        """Return when the kernel has handed out what it was asked for before this call.

        Then `take_released` has what was closed before; a request needs no such wait, since it is
        handed out later itself.
        """

    def attributes(self, ino: int) -> FileAttributes:
        """Current size and times of a loaded inode."""

    def set_times(self, ino: int, *, mtime_ns: int | None, ctime_ns: int) -> None:
        """Set the modification time (None: keep) and change time of a loaded inode."""

    def drop_privileges(self, ino: int) -> None:
        """Have set-uid and set-gid dropped by the next commit, as a write by others does."""

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

    def revert(
        self,
        ino: int,
        *,
        size: int,
        mtime_ns: int,
        ctime_ns: int,
        inline: bytes | None,
        segments: Sequence[tuple[int, bytes]],
    ) -> None:
        """Begin with this content again, after a drain whose snapshot became another inode's.

        The kernel forgets what it has of the content. EBUSY if it was written to since the drain.
        """

    def invalidate(self, ino: int) -> None:
        """Let the kernel forget attributes and pages of an inode, soon."""

    def invalidate_name(self, directory: int, name: bytes) -> None:
        """Let the kernel forget that a name is, or is not, in a directory, soon."""

    async def names_invalidated(self) -> None:
        """Return when the kernel has forgotten the names that it was to forget before this call.

        It waits for who reads, or changes, their directories: a program can hold that up for ever.
        """

    async def discard(self, ranges: Sequence[Range]) -> None:
        """Give ranges of objects back to the devices (no committed layout refers to them)."""

    async def remove_objects(self, objects: Sequence[ObjectId]) -> None:
        """Delete objects (no committed layout refers to them)."""

    async def add_device(self, device: DeviceConfig, *, draining: bool) -> None:
        """Open another device. New chunks go there unless it is `draining`. EEXIST, and others."""

    def set_draining(self, number: int, *, draining: bool) -> None:
        """Let new chunks avoid a device, or not any more."""

    async def copy(self, to: int, ranges: Sequence[CopiedRange]) -> tuple[int, Sequence[Damage]]:
        """Copy ranges, one behind the other, to a fresh object of the device `to`, and flush it.

        Returns the object's id, and what could not be read, or was not what its checksums say.
        Raises OSError when it cannot be written; then there is no object.
        """

    def begin_move(self, ino: int, device: int) -> bool:
        """Keep changes of a loaded inode away from its places on a device until `end_move`.

        False: some are under way, or it is not loaded. No drain of the inode may begin in between.
        """

    def end_move(self, ino: int, moves: Sequence[Move]) -> None:
        """Follow the catalog, which has made these moves, or none."""

    async def remove_device(self, number: int) -> None:
        """Close a device that nothing refers to any more. ENODEV when there is none."""

    async def verify(self, ranges: Sequence[StoredRange]) -> Sequence[Damage]:
        """Read ranges from the devices, past every cache, and compare them with their checksums."""

    def report_damage(
        self, ino: int, block: int, *, device: int, object_: int, object_block: int
    ) -> None:
        """Count and log a damaged block of an inode as a read of it would."""

    def take_error(self, handle: int) -> int:
        """Errno of an I/O error not yet reported through this handle, or 0."""

    def complete_write(self, ticket: int, errno: int) -> None:
        """Answer a `SyncWrite`, 0 when it is durable, or a refused request of a `LogRecord`."""

    def set_gives_way(self) -> None:
        """Let writes that find no space wait and ask for it (`SpaceWanted`), instead of failing."""

    def room_made(self, *, more: bool) -> None:
        """Let writes that found no space try again: what gave way is gone from the devices.

        `more`: there is more that would, so that the next one is to wait and ask, too.
        """

    def events(self) -> AsyncIterator[Event]:
        """Everything the engine reports, in order; ends after `close`."""

    def serve(self, fuse_fd: int, directories: KnownDirectories, *, connection: Connection) -> int:
        """Start the channel on a /dev/fuse descriptor (taken over); returns the descriptor that
        pyfuse3 gets as ``/dev/fd/N``. What `directories` knows never reaches pyfuse3. Where another
        server served the connection before, the kernel is asked for what it left unanswered."""

    def unsaved(self, ino: int) -> Unsaved:
        """What of a loaded inode was acknowledged, and is not committed."""

    def tracer(self) -> Tracer:
        """What keeps the events of one file when it is told to."""

    def statistics(self) -> EngineStatistics:
        """Counters and gauges."""

    def close(self) -> None:
        """Stop threads and free the arena. Dirty bytes must have been drained."""
