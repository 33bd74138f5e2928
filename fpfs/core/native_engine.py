"""The native byte plane, as an `Engine`.

Concurrency: as `Engine`. The extension releases the GIL where it may wait, and never calls Python.
"""

from __future__ import annotations

import errno as errno_module
import os
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import msgspec
import trio

from fpfs import _native
from fpfs.core.engine import (
    QUEUED_MAX,
    RECEIVE_AGAIN_S,
    ChannelClosed,
    Connection,
    CopiedRange,
    Damage,
    DeviceConfig,
    EngineConfig,
    Event,
    FileAttributes,
    Flow,
    HandlesReleased,
    KnownDirectories,
    Layout,
    Left,
    LeftChanges,
    LeftHandle,
    LogRecord,
    Move,
    ObjectId,
    Part,
    Range,
    Released,
    Snapshot,
    SpaceWanted,
    StoredRange,
    SyncWrite,
    Tracer,
)
from fpfs.core.statistics import EngineStatistics, Unsaved
from fpfs.core.threads import run_alone


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
            kept_percent=config.kept_percent,
            first_object_bytes=config.first_object_bytes,
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

    def place(self, ino: int, layout: Layout) -> None:
        """See `Engine.place`."""
        self._native.place(ino, layout.chunk_bytes, list(layout.devices), layout.first)

    def set_flow(self, ino: int, flow: Flow) -> None:
        """See `Engine.set_flow`."""
        self._native.set_flow(
            ino,
            ack=flow.ack,
            depth=flow.depth,
            buffers=flow.buffers,
            cached=flow.is_cached,
            read_ahead=flow.read_ahead_bytes,
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

    def restore_handle(self, handle: int, ino: int, *, flags: int) -> None:
        """See `Engine.restore_handle`."""
        self._native.restore_handle(handle, ino, flags)

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

    def drop_privileges(self, ino: int) -> None:
        """See `Engine.drop_privileges`."""
        self._native.drop_privileges(ino)

    def privileges_restored(self, ino: int) -> None:
        """See `Engine.privileges_restored`."""
        self._native.privileges_restored(ino)

    async def truncate(self, ino: int, size: int) -> None:
        """See `Engine.truncate`."""
        await self._completion(self._native.truncate(ino, size))

    async def drain(self, ino: int, *, last: bool) -> Snapshot:
        """See `Engine.drain`."""
        fields = await self._completion(self._native.drain(ino, last))
        sequence, size, mtime_ns, ctime_ns, inline, segments, *places, noted, ack_ns = fields
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
            ack_ns,
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

    async def names_invalidated(self) -> None:
        """See `Engine.names_invalidated`."""
        await self._completion(self._native.names_invalidated())

    async def discard(self, ranges: Sequence[Range]) -> None:
        """See `Engine.discard`."""
        plain = [(entry.device, entry.object, entry.block, entry.count) for entry in ranges]
        await self._completion(self._native.discard(plain))

    async def remove_objects(self, objects: Sequence[ObjectId]) -> None:
        """See `Engine.remove_objects`."""
        plain = [(key.device, key.id) for key in objects]
        await self._completion(self._native.remove_objects(plain))

    async def add_device(self, device: DeviceConfig, *, draining: bool) -> None:
        """See `Engine.add_device`."""
        add = partial(self._native.add_device, device.number, device.path, draining)
        await run_alone(add)

    def set_draining(self, number: int, *, draining: bool) -> None:
        """See `Engine.set_draining`."""
        self._native.set_draining(number, draining)

    async def copy(self, to: int, ranges: Sequence[CopiedRange]) -> tuple[int, Sequence[Damage]]:
        """See `Engine.copy`."""
        plain = [(*entry[:5], list(entry.checksums)) for entry in ranges]
        id_, damage = await self._completion(self._native.copy(to, plain))
        return id_, [Damage(*fields) for fields in damage]

    def begin_move(self, ino: int, device: int) -> bool:
        """See `Engine.begin_move`."""
        return self._native.begin_move(ino, device)

    def end_move(self, ino: int, moves: Sequence[Move]) -> None:
        """See `Engine.end_move`."""
        self._native.end_move(ino, list(moves))

    async def remove_device(self, number: int) -> None:
        """See `Engine.remove_device`."""
        await self._completion(self._native.remove_device(number))

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

    def unsaved(self, ino: int) -> Unsaved:
        """See `Engine.unsaved`."""
        acknowledged, uncommitted, staged, oldest_ns = self._native.unsaved(ino)
        return Unsaved(
            bytes_acknowledged=acknowledged,
            bytes_uncommitted=uncommitted,
            bytes_staged=staged,
            oldest_ns=oldest_ns,
        )

    def tracer(self) -> Tracer:
        """See `Engine.tracer`."""
        return self._native.tracer()

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        return msgspec.convert(self._native.statistics(), EngineStatistics)

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
