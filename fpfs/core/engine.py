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

import enum
import errno as errno_module
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import trio

from fpfs import _native

crc32c = _native.crc32c
"""CRC32C (Castagnoli) of a bytes object, by the processor where it can."""

checksum_blocks = _native.checksum_blocks
"""CRC32C of each block of a bytes object, as contents get them. Releases the GIL."""

CatalogFiles = _native.CatalogFiles
CatalogLeader = _native.CatalogLeader
CatalogMirror = _native.CatalogMirror
"""The catalog's copies as files; see native/src/catalog_files.h and catalog_mirror.h."""

KnownDirectories = _native.KnownDirectories
"""What the channel may say of directories by itself; see native/src/known_directories.h."""

ARENA_FORMAT: int = _native.ARENA_FORMAT
"""Format of what an engine leaves in the staging arena to the one that takes over."""

BLOCK_BYTES = 64 * 1024
"""Grain of the block map, of rewrites and of checksums, in bytes."""

SEGMENT_BLOCKS = 1024
"""Blocks that one layout segment (one catalog row) describes: 64 MiB of a file."""

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
    states while requests come in bursts, or "". With `take_over` the arena is there already: a
    server that died left it, and `Engine.left` says what it holds. Without `checksums` contents are
    written without and read unchecked.
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
    ack: str = "early"
    cpu_latency_path: str = ""
    take_over: bool = False
    checksums: bool = True


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
    noted: int = 0


class StoredRange(NamedTuple):
    """Blocks of an object, from block `block` on, and what their checksums should be."""

    device: int
    object: int
    block: int
    checksums: Sequence[int]


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
    """What of an inode is told, as in native/src/engine.h. Of some two parts are."""

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

    def adopt(self, handle: int, ino: int, *, flags: int) -> None:
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

    async def discard(self, ranges: Sequence[Range]) -> None:
        """Give ranges of objects back to the devices (no committed layout refers to them)."""

    async def remove_objects(self, objects: Sequence[ObjectId]) -> None:
        """Delete objects (no committed layout refers to them)."""

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

    def statistics(self) -> Mapping[str, object]:
        """Counters and gauges: ``staging`` (bytes_used, bytes_total, pinned), ``devices`` (by
        number: bytes_written, bytes_read, in_flight, backend, direct), ``channel`` (requests)."""

    def close(self) -> None:
        """Stop threads and free the arena. Dirty bytes must have been drained."""


class NativeEngine:
    """`Engine` over the native extension; `run` carries its events to whoever waits for them."""

    def __init__(self, config: EngineConfig) -> None:
        self._native = _native.open_engine(
            devices=[(device.number, device.path) for device in config.devices],
            arena_path=config.arena_path,
            filesystem_id=config.filesystem_id,
            staging_bytes=config.staging_bytes,
            slot_bytes=config.slot_bytes,
            depth=config.depth,
            backend=config.backend,
            channel_threads=config.channel_threads,
            object_base=config.object_base,
            reserve_bytes=config.reserve_bytes,
            ack=config.ack,
            cpu_latency_path=config.cpu_latency_path,
            take_over=config.take_over,
            checksums=config.checksums,
        )
        self._waiting: dict[int, _Completion] = {}
        self._send, self._receive = trio.open_memory_channel[Event](65536)
        self._closed = False

    async def run(self) -> None:
        """Deliver completions and events until `close`; one task runs this."""
        native = self._native
        with self._send:
            while not self._closed:
                await trio.lowlevel.wait_readable(native.event_fd)
                for event in native.take_events():
                    self._deliver(event)

    def _deliver(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("drained" | "done", ticket, error, *payload):
                self._complete(ticket, error, payload[0] if payload else None)
            case ("dropped", ticket, objects):
                self._complete(ticket, 0, objects)
            case ("sync_write", ticket, ino):
                self._send.send_nowait(SyncWrite(ticket, ino))
            case ("space", ino, refused):
                self._send.send_nowait(SpaceWanted(ino, refused))
            case ("log", level, message, refused):
                self._send.send_nowait(LogRecord(level, message, refused))
            case ("closed", error):
                self._send.send_nowait(ChannelClosed(error))
            case ("released",):
                self._send.send_nowait(HandlesReleased())

    def _complete(self, ticket: int, error: int, payload: Any) -> None:
        """Wake the waiter; `close`, which lets operations end, has woken all that were left."""
        completion = self._waiting.pop(ticket, None)
        if completion is not None:
            completion.set(error, payload)
        else:
            assert self._closed, f"nobody ever waited for operation {ticket}"

    async def _completion(self, ticket: int) -> Any:
        """Wait for the event of `ticket`; its result is kept even when the waiter is cancelled."""
        completion = _Completion()
        self._waiting[ticket] = completion
        await completion.event.wait()
        if completion.error:
            raise OSError(completion.error, os.strerror(completion.error))
        return completion.payload

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
        """See `Engine.load`."""
        self._native.load(
            ino,
            size,
            mtime_ns,
            ctime_ns,
            inline,
            list(segments),
            layout.chunk_bytes,
            list(layout.devices),
            layout.first,
        )

    def loaded(self, ino: int) -> bool:
        """See `Engine.loaded`."""
        return self._native.loaded(ino)

    def unload(self, ino: int) -> None:
        """See `Engine.unload`."""
        self._native.unload(ino)

    async def drop(self, ino: int) -> Sequence[ObjectId]:
        """See `Engine.drop`."""
        objects = await self._completion(self._native.drop(ino))
        return [ObjectId(*key) for key in objects]

    def open(self, handle: int, ino: int, *, flags: int, request: int) -> None:
        """See `Engine.open`."""
        self._native.open(handle, ino, flags, request)

    def begin(self, ino: int) -> None:
        """See `Engine.begin`."""
        self._native.begin(ino)

    def left(self) -> Left:
        """See `Engine.left`."""
        handles, changed, suspects, all_suspect, handles_damaged = self._native.left()
        return Left(
            [LeftHandle(*fields) for fields in handles],
            [
                LeftChanges(ino, sequence, killed_by, Part(part))
                for ino, sequence, killed_by, part in changed
            ],
            frozenset(suspects),
            all_suspect,
            handles_damaged,
        )

    async def recover(self, ino: int, *, trim: bool) -> None:
        """See `Engine.recover`."""
        await self._completion(self._native.recover(ino, trim))

    async def recover_later(self, ino: int, *, trim: bool) -> None:
        """See `Engine.recover_later`."""
        await self._completion(self._native.recover_later(ino, trim))

    def abandon(self, ino: int) -> None:
        """See `Engine.abandon`."""
        self._native.abandon(ino)

    async def known(self, ino: int) -> bool:
        """See `Engine.known`."""
        try:
            await self._completion(self._native.find_out_known(ino))
        except FileNotFoundError:
            return False
        return True

    def spoil(self, ino: int) -> None:
        """See `Engine.spoil`."""
        self._native.spoil(ino)

    def held_objects(self) -> Sequence[ObjectId]:
        """See `Engine.held_objects`."""
        return [ObjectId(*key) for key in self._native.held_objects()]

    def adopt(self, handle: int, ino: int, *, flags: int) -> None:
        """See `Engine.adopt`."""
        self._native.adopt(handle, ino, flags)

    def record(self, handle: int, ino: int, *, flags: int, request: int) -> None:
        """See `Engine.record`."""
        self._native.record_handle(handle, ino, flags, request)

    def forget(self, handle: int) -> None:
        """See `Engine.forget`."""
        self._native.forget_handle(handle)

    def release(self, handle: int) -> bool:
        """See `Engine.release`."""
        return self._native.release(handle)

    def take_released(self) -> Sequence[Released]:
        """See `Engine.take_released`."""
        return [Released(*fields) for fields in self._native.take_released()]

    async def receive_all(self) -> None:
        """See `Engine.receive_all`."""
        enough = self._native.requests_received() + QUEUED_MAX
        # The kernel tells nobody when it has no more.
        while not self._native.has_received(enough):  # noqa: ASYNC110
            await trio.sleep(RECEIVE_AGAIN_S)

    def attributes(self, ino: int) -> FileAttributes:
        """See `Engine.attributes`."""
        return FileAttributes(*self._native.attributes(ino))

    def set_times(self, ino: int, *, mtime_ns: int | None, ctime_ns: int) -> None:
        """See `Engine.set_times`."""
        self._native.set_times(ino, mtime_ns, ctime_ns)

    def privileges_restored(self, ino: int) -> None:
        """See `Engine.privileges_restored`."""
        self._native.privileges_restored(ino)

    async def truncate(self, ino: int, size: int) -> None:
        """See `Engine.truncate`."""
        await self._completion(self._native.truncate(ino, size))

    async def drain(self, ino: int, *, last: bool) -> Snapshot:
        """See `Engine.drain`."""
        fields = await self._completion(self._native.drain(ino, last))
        sequence, size, mtime_ns, ctime_ns, inline, segments, *places, noted = fields
        objects, dead, garbage = places
        return Snapshot(
            sequence,
            size,
            mtime_ns,
            ctime_ns,
            inline,
            segments,
            [ObjectId(*key) for key in objects],
            [ObjectId(*key) for key in dead],
            [Range(*entry) for entry in garbage],
            noted,
        )

    def committed(self, ino: int, sequence: int) -> None:
        """See `Engine.committed`."""
        self._native.committed(ino, sequence)

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
        """See `Engine.revert`."""
        self._native.revert(ino, size, mtime_ns, ctime_ns, inline, list(segments))

    def invalidate(self, ino: int) -> None:
        """See `Engine.invalidate`."""
        self._native.invalidate(ino)

    def invalidate_name(self, directory: int, name: bytes) -> None:
        """See `Engine.invalidate_name`."""
        self._native.invalidate_name(directory, name)

    async def discard(self, ranges: Sequence[Range]) -> None:
        """See `Engine.discard`."""
        plain = [(entry.device, entry.object, entry.block, entry.count) for entry in ranges]
        await self._completion(self._native.discard(plain))

    async def remove_objects(self, objects: Sequence[ObjectId]) -> None:
        """See `Engine.remove_objects`."""
        plain = [(key.device, key.id) for key in objects]
        await self._completion(self._native.remove_objects(plain))

    async def verify(self, ranges: Sequence[StoredRange]) -> Sequence[Damage]:
        """See `Engine.verify`."""
        plain = [(r.device, r.object, r.block, list(r.checksums)) for r in ranges]
        return [Damage(*fields) for fields in await self._completion(self._native.verify(plain))]

    def report_damage(
        self, ino: int, block: int, *, device: int, object_: int, object_block: int
    ) -> None:
        """See `Engine.report_damage`."""
        self._native.report_damage(ino, block, device, object_, object_block)

    def take_error(self, handle: int) -> int:
        """See `Engine.take_error`."""
        return self._native.take_error(handle)

    def complete_write(self, ticket: int, errno: int) -> None:
        """See `Engine.complete_write`."""
        self._native.complete_write(ticket, errno)

    def set_gives_way(self) -> None:
        """See `Engine.set_gives_way`."""
        self._native.set_gives_way()

    def room_made(self, *, more: bool) -> None:
        """See `Engine.room_made`."""
        self._native.room_made(more)

    async def events(self) -> AsyncIterator[Event]:
        """See `Engine.events`."""
        async for event in self._receive:
            yield event

    def serve(self, fuse_fd: int, directories: KnownDirectories, *, connection: Connection) -> int:
        """See `Engine.serve`."""
        return self._native.serve(fuse_fd, directories, connection.value)

    def statistics(self) -> Mapping[str, object]:
        """See `Engine.statistics`."""
        return self._native.statistics()

    def close(self) -> None:
        """See `Engine.close`; blocks until the device threads have ended."""
        if self._closed:
            return
        self._closed = True
        if self._waiting:
            for completion in self._waiting.values():
                completion.set(errno_module.ESHUTDOWN, None)
            self._waiting.clear()
        self._native.close()
        # pyfuse3 keeps its operations, and through them this object, until the process ends: the
        # extension would take its own engine for leaked.
        del self._native


class _Completion:
    """The end of one native operation, for the task that waits for it."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.error = 0
        self.payload: Any = None

    def set(self, error: int, payload: Any) -> None:
        """Store the result and wake the waiter."""
        self.error = error
        self.payload = payload
        self.event.set()
