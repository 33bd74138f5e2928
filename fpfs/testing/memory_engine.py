"""The perfect byte plane: an `Engine` in memory that keeps every byte, for tests of the name plane.

It behaves as the native engine is specified to, without threads, devices or a channel. `write` and
`read` stand for what programs do through the kernel. What a drain brought to `MemoryDevices`
survives the engine: another engine on the same devices is the next mount after a power cut.

Fault model: `fail_drains` lets drains of an inode fail with an errno until it is called again with
0; `hold_drains` and `let_drains_go` stop and resume drains. `calls` lists, in order, the calls that
ordering rules are about.

Concurrency: trio thread only.
"""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, NamedTuple

import trio

from fpfs.core.engine import (
    BLOCK_BYTES,
    INLINE_BYTES_MAX,
    SEGMENT_BLOCKS,
    Connection,
    CopiedRange,
    Damage,
    DeviceConfig,
    EngineConfig,
    Event,
    FileAttributes,
    Flow,
    KnownDirectories,
    Layout,
    Left,
    LeftHandle,
    Move,
    ObjectId,
    Range,
    Released,
    Snapshot,
    StoredRange,
    SyncWrite,
    Tracer,
    crc32c,
)
from fpfs.core.layout import Run, Segment, decode_segment, encode_segment
from fpfs.core.statistics import EngineStatistics, Unsaved

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Container, Sequence

ZEROS = bytes(BLOCK_BYTES)


class MemoryDevices:
    """What outlives an engine: objects, as blocks of 64 KiB by block number, and open handles."""

    def __init__(self) -> None:
        """Start empty."""
        self.objects: dict[ObjectId, dict[int, bytes]] = {}
        self.handles: dict[int, LeftHandle] = {}


class _Place(NamedTuple):
    object: ObjectId
    block: int


class _File:
    """One loaded inode. `blocks` is its content now; absent blocks are holes."""

    def __init__(self, layout: Layout, *, size: int, mtime_ns: int, ctime_ns: int) -> None:
        self.layout = layout
        self.flow = Flow()
        self.size = size
        self.mtime_ns = mtime_ns
        self.ctime_ns = ctime_ns
        self.blocks: dict[int, bytearray] = {}
        self.places: dict[int, _Place] = {}
        self.unplaced: set[int] = set()
        """Blocks whose content is not on a device."""
        self.segments_changed: set[int] = set()
        self.segments_drained: set[int] = set()
        self.objects_known: set[ObjectId] = set()
        self.garbage: list[Range] = []
        self.version = 0
        self.version_drained = 0
        self.version_committed = 0
        self.privileges_dropped = False
        self.draining = False
        self.size_committed = size
        self.replaced = False
        self.bytes_acknowledged = 0
        self.bytes_drained = 0
        self.bytes_committed = 0
        self.oldest_ns = 0
        self.oldest_drained_ns = 0
        """Of what was drained and is not committed."""

    def acknowledge(self, count: int) -> None:
        self.bytes_acknowledged += count
        self.oldest_ns = self.oldest_ns or time.monotonic_ns()

    def unsaved(self) -> Unsaved:
        return Unsaved(
            bytes_acknowledged=self.bytes_acknowledged,
            bytes_uncommitted=self.bytes_acknowledged - self.bytes_committed,
            oldest_ns=self.oldest_drained_ns or self.oldest_ns,
        )

    @property
    def dirty(self) -> bool:
        return self.version != self.version_committed

    def allocated_bytes(self) -> int:
        return len(self.blocks) * BLOCK_BYTES

    def touch(self) -> None:
        self.mtime_ns = self.ctime_ns = time.time_ns()
        self.version += 1

    def change_block(self, block: int) -> bytearray:
        """Return a block's bytes to change."""
        self.unplaced.add(block)
        self.segments_changed.add(block // SEGMENT_BLOCKS)
        return self.blocks.setdefault(block, bytearray(BLOCK_BYTES))

    def give_up_place(self, block: int) -> None:
        """Make a block's old place garbage."""
        place = self.places.pop(block, None)
        if place is not None:
            self.garbage.append(Range(*place.object, place.block, 1))

    def truncate(self, size: int) -> None:
        self.replaced |= size < self.size_committed
        if size < self.size:
            first_gone = -(-size // BLOCK_BYTES)
            for block in [block for block in self.blocks if block >= first_gone]:
                del self.blocks[block]
                self.unplaced.discard(block)
                self.give_up_place(block)
                self.segments_changed.add(block // SEGMENT_BLOCKS)
            last = size // BLOCK_BYTES
            if size % BLOCK_BYTES and last in self.blocks:
                start = size % BLOCK_BYTES
                self.change_block(last)[start:] = ZEROS[start:]
        self.size = size

    def content(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size)
        parts = []
        while offset < end:
            start = offset % BLOCK_BYTES
            count = min(BLOCK_BYTES - start, end - offset)
            block = self.blocks.get(offset // BLOCK_BYTES, ZEROS)
            parts.append(bytes(block[start : start + count]))
            offset += count
        return b"".join(parts)


class MemoryEngine:
    """An `fpfs.core.engine.Engine` that keeps contents in this process's memory."""

    def __init__(
        self, config: EngineConfig | None = None, *, devices: MemoryDevices | None = None
    ) -> None:
        """Serve files from `devices`; of the configuration only `object_base` matters."""
        self.devices = devices or MemoryDevices()
        self._next_object = (config.object_base if config else 1) << 32
        self._files: dict[int, _File] = {}
        self._handles: dict[int, tuple[int, int]] = {}
        self._errors: dict[int, int] = {}
        self._released: list[Released] = []
        self._drain_errors: dict[int, int] = {}
        self._drains_held: Container[int] = ()
        self._drains_changed = trio.Event()
        self._events_in, self._events_out = trio.open_memory_channel[Event](float("inf"))
        self._tickets = 0
        self._tracer = Tracer()
        self.answers: dict[int, int] = {}
        self.calls: list[tuple[object, ...]] = []

    # For tests: what programs and faults do.

    def write(self, handle: int, offset: int, data: bytes) -> None:
        """Write through a handle as a program does; O_APPEND and O_SYNC are obeyed."""
        ino, flags = self._handles[handle]
        if flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        file = self._files[ino]
        if flags & os.O_APPEND:
            offset = file.size
        file.replaced |= offset < file.size_committed
        file.size = max(file.size, offset + len(data))
        view = memoryview(data)
        while view:
            start = offset % BLOCK_BYTES
            count = min(BLOCK_BYTES - start, len(view))
            file.change_block(offset // BLOCK_BYTES)[start : start + count] = view[:count]
            view, offset = view[count:], offset + count
        file.touch()
        file.acknowledge(len(data))
        if flags & os.O_DSYNC:
            self._tickets += 1
            self._events_in.send_nowait(SyncWrite(self._tickets, ino))

    def read(self, handle: int, offset: int, length: int) -> bytes:
        """Read through a handle as a program does."""
        return self._files[self._handles[handle][0]].content(offset, length)

    def write_by_others(self, ino: int) -> None:
        """Behave as if a write by somebody without CAP_FSETID had come."""
        self.drop_privileges(ino)
        self._files[ino].touch()

    def fail_drains(self, ino: int, code: int) -> None:
        """Let drains of an inode fail with an errno, or succeed again (0)."""
        self._drain_errors[ino] = code

    def hold_drains(self, *, of: Container[int] = range(1 << 62)) -> None:
        """Let drains, or those of some inodes, wait until `let_drains_go`; others go on."""
        self._drains_held = of
        self._drains_changed.set()
        self._drains_changed = trio.Event()

    def let_drains_go(self) -> None:
        """End `hold_drains`."""
        self.hold_drains(of=())

    # The protocol.

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
        """Make an inode's committed content known."""
        assert ino not in self._files, f"inode {ino} is loaded already"
        file = _File(layout, size=size, mtime_ns=mtime_ns, ctime_ns=ctime_ns)
        if inline is not None:
            assert len(inline) == size, "inline content is the whole content"
            if inline:
                file.change_block(0)[: len(inline)] = inline
                file.segments_changed.clear()
        for index, blob in segments:
            segment = decode_segment(blob)
            assert segment.index == index, "a segment knows its place"
            for run in segment.runs:
                self._load_run(file, index, run)
        self._files[ino] = file
        self.calls.append(("load", ino))

    def _load_run(self, file: _File, index: int, run: Run) -> None:
        identity = ObjectId(run.device, run.object)
        file.objects_known.add(identity)
        held = self.devices.objects.get(identity, {})
        for number in range(run.count):
            block = index * SEGMENT_BLOCKS + run.block + number
            place = _Place(identity, run.object_block + number)
            file.places[block] = place
            file.blocks[block] = bytearray(held.get(place.block, ZEROS))

    def place(self, ino: int, layout: Layout) -> None:
        """Let new blocks go elsewhere."""
        file = self._files[ino]
        if file.unplaced:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        file.layout = layout
        self.calls.append(("place", ino))

    def set_flow(self, ino: int, flow: Flow) -> None:
        """Note how an inode is to be written and read."""
        self._files[ino].flow = flow

    def flow(self, ino: int) -> Flow:
        """What `set_flow` was last told."""
        return self._files[ino].flow

    def loaded(self, ino: int) -> bool:
        """Whether the inode is loaded."""
        return ino in self._files

    def unload(self, ino: int) -> None:
        """Forget a clean inode without handles."""
        if self._files[ino].dirty or any(held == ino for held, _ in self._handles.values()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        del self._files[ino]
        self.calls.append(("unload", ino))

    async def drop(self, ino: int) -> Sequence[ObjectId]:
        """Forget a deleted inode; returns every object it held."""
        await trio.lowlevel.checkpoint()
        assert not self._files[ino].draining, "no drain runs while an inode is dropped"
        self.calls.append(("drop", ino))
        file = self._files.pop(ino)
        return sorted(file.objects_known | {place.object for place in file.places.values()})

    def open(self, handle: int, ino: int, *, flags: int, request: int) -> None:
        """Register an open handle."""
        assert handle not in self._handles, f"handle {handle} is open already"
        assert ino in self._files, f"inode {ino} is loaded before it is opened"
        self._handles[handle] = (ino, flags)
        self.record(handle, ino, flags=flags, request=request)
        self.calls.append(("open", handle, ino))

    def begin(self, ino: int) -> None:
        """See `Engine.begin`."""
        if not self._files[ino].dirty:
            self._files[ino].version += 1

    def left(self) -> Left:
        """The handles of an engine before: contents that it had not drained ended with it."""
        return Left(list(self.devices.handles.values()), [])

    async def recover(self, ino: int, *, trim: bool) -> None:  # noqa: ARG002
        """There is nothing to recover."""
        raise AssertionError(f"inode {ino} was not left")

    async def recover_later(self, ino: int, *, trim: bool) -> None:  # noqa: ARG002
        """There is nothing to recover."""
        raise AssertionError(f"inode {ino} was not left")

    def abandon(self, ino: int) -> None:
        """There is nothing to abandon."""
        raise AssertionError(f"inode {ino} was not left")

    def spoil(self, ino: int) -> None:
        """See `Engine.spoil`."""
        self.fail_drains(ino, errno.EIO)

    def held_objects(self) -> Sequence[ObjectId]:
        """See `Engine.held_objects`."""
        return sorted({key for file in self._files.values() for key in file.objects_known})

    def restore_handle(self, handle: int, ino: int, *, flags: int) -> None:
        """Take over a handle; its inode is loaded."""
        assert ino in self._files, f"inode {ino} is loaded before its handle is restored"
        self._handles[handle] = (ino, flags)

    def record(self, handle: int, ino: int, *, flags: int, request: int) -> None:
        """See `Engine.record`."""
        self.devices.handles[handle] = LeftHandle(handle, ino, flags, request)

    def forget(self, handle: int) -> None:
        """See `Engine.forget`."""
        self.devices.handles.pop(handle, None)

    def release(self, handle: int) -> bool:
        """Forget a handle; False when `kernel_releases` was faster."""
        if handle not in self._handles:
            return False
        ino, _flags = self._handles.pop(handle)
        self._errors.pop(handle, None)
        self.forget(handle)
        self.calls.append(("release", handle, ino))
        return True

    def kernel_releases(self, handle: int, *, killed_by: int = 0) -> None:
        """Play the channel's part in a RELEASE; `killed_by` is the signal that ended the writer."""
        assert self.release(handle), "the kernel releases a handle once"
        self._released.append(Released(handle, killed_by))

    def take_released(self) -> Sequence[Released]:
        """Return what the kernel has released since the last call."""
        released, self._released = self._released, []
        return released

    async def receive_all(self) -> None:
        """Return: there is no kernel that could hold anything back."""
        await trio.lowlevel.checkpoint()

    def attributes(self, ino: int) -> FileAttributes:
        """Return current size and times of a loaded inode."""
        file = self._files[ino]
        return FileAttributes(
            file.size,
            file.allocated_bytes(),
            file.mtime_ns,
            file.ctime_ns,
            file.privileges_dropped,
            file.dirty,
            file.dirty and not file.replaced,
        )

    def set_times(self, ino: int, *, mtime_ns: int | None, ctime_ns: int) -> None:
        """Set times of a loaded inode."""
        file = self._files[ino]
        file.ctime_ns = ctime_ns
        if mtime_ns is not None:
            file.mtime_ns = mtime_ns

    def drop_privileges(self, ino: int) -> None:
        """Note that privileges were dropped."""
        self._files[ino].privileges_dropped = True

    def privileges_restored(self, ino: int) -> None:
        """Forget that a write dropped privileges."""
        self._files[ino].privileges_dropped = False

    async def truncate(self, ino: int, size: int) -> None:
        """Set the size."""
        await trio.lowlevel.checkpoint()
        file = self._files[ino]
        assert not file.draining, "truncations and drains of an inode are ordered"
        file.truncate(size)
        file.touch()
        self.calls.append(("truncate", ino, size))

    async def drain(self, ino: int, *, last: bool) -> Snapshot:
        """Write what changed to fresh objects and describe it."""
        file = self._files[ino]
        assert not file.draining, "one drain of an inode at a time"
        file.draining = True
        self.calls.append(("drain", ino, last))
        try:
            code = self._drain_errors.get(ino, 0)
            # Of what was written when the drain began: a later write is not in it.
            snapshot = None if code else self._snapshot(file)
            while ino in self._drains_held:
                await self._drains_changed.wait()
            await trio.lowlevel.checkpoint()
            if snapshot is None:
                for handle, (held, _flags) in self._handles.items():
                    if held == ino:
                        self._errors[handle] = code
                raise OSError(code, os.strerror(code))
            return snapshot
        finally:
            file.draining = False

    def _snapshot(self, file: _File) -> Snapshot:
        file.segments_drained |= file.segments_changed
        file.segments_changed.clear()
        inline = None
        if file.size <= INLINE_BYTES_MAX:
            inline = file.content(0, file.size)
            for block in list(file.places):
                file.give_up_place(block)
            file.unplaced = set(file.blocks)
        else:
            self._place_blocks(file)
        live = {place.object for place in file.places.values()}
        dead = file.objects_known - live
        file.objects_known |= live
        file.version_drained = file.version
        file.bytes_drained = file.bytes_acknowledged
        file.oldest_drained_ns = file.oldest_drained_ns or file.oldest_ns
        file.oldest_ns = 0
        return Snapshot(
            sequence=file.version,
            size=file.size,
            mtime_ns=file.mtime_ns,
            ctime_ns=file.ctime_ns,
            inline=inline,
            segments=[]
            if inline is not None
            else [(index, _blob_of(file, index)) for index in sorted(file.segments_drained)],
            objects=sorted(live),
            dead=sorted(dead),
            garbage=[old for old in file.garbage if ObjectId(old.device, old.object) in live],
            acknowledged_ns=file.oldest_drained_ns,
        )

    def _place_blocks(self, file: _File) -> None:
        """Write unplaced blocks to one fresh object on each device they belong to."""
        fresh: dict[int, ObjectId] = {}
        layout = file.layout
        for block in sorted(file.unplaced):
            chunk = block * BLOCK_BYTES // layout.chunk_bytes
            device = layout.devices[(layout.first + chunk) % len(layout.devices)]
            if device not in fresh:
                fresh[device] = ObjectId(device, self._next_object)
                self.devices.objects[fresh[device]] = {}
                self._next_object += 1
            held = self.devices.objects[fresh[device]]
            file.give_up_place(block)
            file.places[block] = _Place(fresh[device], len(held))
            held[len(held)] = bytes(file.blocks[block])
            file.segments_drained.add(block // SEGMENT_BLOCKS)
        file.unplaced.clear()

    def committed(self, ino: int, sequence: int) -> None:
        """Note that the catalog holds a snapshot."""
        file = self._files[ino]
        assert sequence == file.version_drained, "the last drain is committed"
        file.version_committed = sequence
        file.bytes_committed, file.oldest_drained_ns = file.bytes_drained, 0
        file.size_committed, file.replaced = file.size, False
        file.segments_drained.clear()
        file.garbage.clear()
        file.objects_known = {place.object for place in file.places.values()}
        self.calls.append(("committed", ino))

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
        """Begin with a committed content again."""
        file = self._files.pop(ino)
        assert not file.draining, "nobody writes to what is reverted"
        assert file.version == file.version_drained, "what is reverted was drained"
        self.load(
            ino,
            size=size,
            mtime_ns=mtime_ns,
            ctime_ns=ctime_ns,
            inline=inline,
            segments=segments,
            layout=file.layout,
        )
        self.calls[-1] = ("revert", ino)

    def invalidate(self, ino: int) -> None:
        """Note what the kernel is to forget."""
        self.calls.append(("invalidate", ino))

    async def known(self, ino: int) -> bool:  # noqa: ARG002
        """Nobody asks a kernel."""
        return True

    def invalidate_name(self, directory: int, name: bytes) -> None:
        """Note what the kernel is to forget."""
        self.calls.append(("invalidate_name", directory, name))

    async def names_invalidated(self) -> None:
        """Return: there is no kernel that could remember names."""
        await trio.lowlevel.checkpoint()

    async def discard(self, ranges: Sequence[Range]) -> None:
        """Forget blocks of objects."""
        await trio.lowlevel.checkpoint()
        self.calls.append(("discard", tuple(ranges)))
        for device, object_, block, count in ranges:
            held = self.devices.objects.get(ObjectId(device, object_), {})
            for number in range(block, block + count):
                held.pop(number, None)

    async def remove_objects(self, objects: Sequence[ObjectId]) -> None:
        """Forget objects."""
        await trio.lowlevel.checkpoint()
        self.calls.append(("remove_objects", tuple(objects)))
        for identity in objects:
            self.devices.objects.pop(identity, None)

    async def add_device(self, device: DeviceConfig, *, draining: bool) -> None:
        """See `Engine.add_device`: objects are made on any."""
        self.calls.append(("add_device", device.number, draining))

    def set_draining(self, number: int, *, draining: bool) -> None:
        """See `Engine.set_draining`."""
        self.calls.append(("set_draining", number, draining))

    async def copy(self, to: int, ranges: Sequence[CopiedRange]) -> tuple[int, Sequence[Damage]]:
        """See `Engine.copy`: no device is drained here."""
        raise AssertionError(f"{len(ranges)} ranges are copied to device {to}")

    def begin_move(self, ino: int, device: int) -> bool:
        """See `Engine.begin_move`: no device is drained here."""
        raise AssertionError(f"inode {ino} is moved from device {device}")

    def end_move(self, ino: int, moves: Sequence[Move]) -> None:
        """See `Engine.end_move`: no device is drained here."""
        raise AssertionError(f"inode {ino} was moved: {moves}")

    async def remove_device(self, number: int) -> None:
        """See `Engine.remove_device`."""
        self.calls.append(("remove_device", number))

    async def verify(self, ranges: Sequence[StoredRange]) -> Sequence[Damage]:
        """Compare blocks with their checksums; what is gone cannot be read."""
        await trio.lowlevel.checkpoint()
        self.calls.append(("verify", len(ranges)))
        damage = []
        for number, (device, object_, block, checksums) in enumerate(ranges):
            held = self.devices.objects.get(ObjectId(device, object_))
            if held is None:
                damage.append(Damage(number, 0, len(checksums), errno.ENOENT))
                continue
            for index, checksum in enumerate(checksums):
                if crc32c(held.get(block + index, ZEROS)) != checksum:
                    damage.append(Damage(number, index, 1, 0))
        return damage

    def report_damage(
        self, ino: int, block: int, *, device: int, object_: int, object_block: int
    ) -> None:
        """Note that damage was reported."""
        self.calls.append(("report_damage", ino, block, device, object_, object_block))

    def take_error(self, handle: int) -> int:
        """Return an error not reported yet."""
        return self._errors.pop(handle, 0)

    def set_gives_way(self) -> None:
        """See `Engine.set_gives_way`."""

    def room_made(self, *, more: bool) -> None:
        """See `Engine.room_made`."""
        self.calls.append(("room_made", more))

    def complete_write(self, ticket: int, errno: int) -> None:
        """Answer a synchronous write."""
        assert ticket not in self.answers, "a write is answered once"
        self.answers[ticket] = errno
        self.calls.append(("complete_write", ticket, errno))

    async def events(self) -> AsyncIterator[Event]:
        """Report synchronous writes, until `close`."""
        async for event in self._events_out:
            yield event

    def serve(
        self,
        fuse_fd: int,  # noqa: ARG002
        directories: KnownDirectories,  # noqa: ARG002
        *,
        connection: Connection,  # noqa: ARG002
    ) -> int:
        """There is no channel in memory."""
        raise OSError(errno.ENOSYS, "the memory engine serves no kernel")

    def unsaved(self, ino: int) -> Unsaved:
        """See `Engine.unsaved`."""
        return self._files[ino].unsaved()

    def tracer(self) -> Tracer:
        """Return one that nobody tells of anything."""
        return self._tracer

    def statistics(self) -> EngineStatistics:
        """Return the shape of the native engine's statistics: nothing is counted here."""
        return EngineStatistics()

    def close(self) -> None:
        """End `events`."""
        self._events_in.close()


def _blob_of(file: _File, index: int) -> bytes:
    """Return the stored form of one segment of a file, empty if nothing is in it."""
    runs: list[Run] = []
    checksums: list[int] = []
    start = index * SEGMENT_BLOCKS
    for block in sorted(b for b in file.places if start <= b < start + SEGMENT_BLOCKS):
        place = file.places[block]
        checksums.append(crc32c(bytes(file.blocks[block])))
        last = runs[-1] if runs else None
        if (
            last is not None
            and (last.device, last.object) == place.object
            and last.block + last.count == block - start
            and last.object_block + last.count == place.block
        ):
            runs[-1] = last._replace(count=last.count + 1)
        else:
            runs.append(Run(block - start, 1, place.block, place.object.device, 0, place.object.id))
    return encode_segment(Segment(index, tuple(runs), tuple(checksums))) if runs else b""
