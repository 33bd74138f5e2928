"""The server of one mount: makes the parts, joins them, and takes them down in order.

This is the composition root. It starts with everything that can be refused (devices, catalog,
engine, mount: `startup`), says over a pipe that it is ready, and serves until the kernel ends the
connection or a signal asks it to end (`shutdown`). What tools ask of it is in `control.handlers`.

Invariants:
  * Whatever ends the mount, everything acknowledged is drained and committed before the engine is
    closed, the catalog after it, and the devices are unlocked last.
  * pyfuse3 is told to end before the channel closes its end of the socket.
  * Nothing here, nor below, imports torch.

Concurrency: one trio loop. Everything that blocks runs in threads, or before the loop serves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import NoReturn

import pyfuse3
import trio

from fpfs.core.engine import (
    ChannelClosed,
    Connection,
    Engine,
    HandlesReleased,
    LogRecord,
    SpaceWanted,
    SyncWrite,
)
from fpfs.core.mounts import mount_at
from fpfs.core.native_engine import NativeEngine
from fpfs.core.options import ServerConfig
from fpfs.core.protocol.control import socket_path
from fpfs.core.protocol.reports import Flushed, RecoveryStatus
from fpfs.core.refusal import Refused
from fpfs.core.threads import run_alone
from fpfs.daemon.catalog.database import Catalog
from fpfs.daemon.commit.groups import Groups
from fpfs.daemon.commit.pipeline import Commit
from fpfs.daemon.commit.versions import Versions
from fpfs.daemon.control.device_handlers import DeviceControl
from fpfs.daemon.control.handlers import ControlledServer
from fpfs.daemon.control.server import ControlServer
from fpfs.daemon.devices.directory import open_devices
from fpfs.daemon.devices.keeper_link import KeeperLink
from fpfs.daemon.devices.opened_set import DeviceSet
from fpfs.daemon.inodes.policies import Policies
from fpfs.daemon.inodes.replay_log import Requests
from fpfs.daemon.inodes.table import InodeTable
from fpfs.daemon.maintenance import orphan_objects
from fpfs.daemon.maintenance.crash_resume import TakeOver
from fpfs.daemon.maintenance.evacuate import Draining
from fpfs.daemon.maintenance.membership import DeviceChanges
from fpfs.daemon.mount import fusermount
from fpfs.daemon.mount.live_upgrade import check_installed
from fpfs.daemon.mount.shutdown import Ending
from fpfs.daemon.mount.startup import (
    allows_others,
    check_identity,
    control_access,
    default_policy,
    engine_config,
    mount_facts,
    mount_options,
    open_catalog,
    open_metrics,
)
from fpfs.daemon.mount.supervisor import Inherited
from fpfs.daemon.names.fuse_ops import Operations
from fpfs.daemon.names.namespace import Namespace
from fpfs.daemon.telemetry.collector import Scrape

REQUESTS_MAX = 1000
"""Requests that pyfuse3 works on at once. Each blocked fsync holds one."""

REQUESTS_END_S = 60
"""How long requests may take to end after the kernel has forgotten them."""

ANNOUNCE_S = 5
"""How long a client that waits for the end may take to read that it came."""

EXIT_DIED = 70
"""Exit status of a server that failed while it served: another takes over."""

_log = logging.getLogger("fpfs.server")


def die(error: BaseException | None) -> NoReturn:
    """End at once and leave everything as it is: the keeper starts another server."""
    _log.critical("serving failed", exc_info=error)
    logging.shutdown()
    os._exit(EXIT_DIED)


async def run_beside(
    task: Callable[..., Awaitable[None]],
    *arguments: object,
    task_status: trio.TaskStatus[None] | None = None,
) -> None:
    """Run a task beside what serves: if it fails, another server takes over.

    Nothing is closed before: that would end the mount. `task_status` is given to those that get it.
    """
    named = {} if task_status is None else {"task_status": task_status}
    try:
        await task(*arguments, **named)
    except Exception as error:  # noqa: BLE001 (whatever it was)
        die(error)


class Server:
    """One mounted filesystem, from the first request to the last."""

    _connection_control: fusermount.ConnectionControl | None = None

    def __init__(
        self,
        *,
        config: ServerConfig,
        devices: DeviceSet,
        catalog: Catalog,
        engine: Engine,
        link: KeeperLink,
        inherited: Inherited | None,
        took_over: bool,
    ) -> None:
        """Join the parts. The server takes over the catalog and the engine and closes them.

        `took_over`: there was an arena, with everything that an earlier server had acknowledged.
        """
        self._took_over = took_over
        self._link = link
        self._inherited = inherited
        self._config = config
        self._devices = devices
        at = config.mountpoint
        self._changes = DeviceChanges(at, devices, catalog=catalog, engine=engine, link=link)
        registry = self._changes.registry
        self._catalog = catalog
        self._engine = engine
        self._inodes = inodes = InodeTable(catalog=catalog, engine=engine)
        self._policies = Policies(
            catalog,
            defaults=default_policy(config.options),
            mount=functools.partial(mount_facts, config.options, registry),
        )
        self._versions = Versions(
            catalog=catalog, engine=engine, inodes=inodes, policies=self._policies
        )
        self._commit = Commit(
            catalog=catalog,
            engine=engine,
            inodes=inodes,
            versions=self._versions,
            policies=self._policies,
        )
        self._groups = Groups(
            catalog=catalog, inodes=inodes, policies=self._policies, commit=self._commit
        )
        self._requests = Requests(catalog)
        self._namespace = Namespace(
            catalog=catalog,
            engine=engine,
            inodes=inodes,
            commit=self._commit,
            policies=self._policies,
            requests=self._requests,
            versions=self._versions,
            groups=self._groups,
            device_paths=lambda: {
                each.number: each.path for each in self._changes.registry.present
            },
        )
        self._controlled = self._make_controlled()
        self._metrics_scope = trio.CancelScope()
        self._connection_ended = trio.Event()
        self._connection_control: fusermount.ConnectionControl | None = None
        self._closed = False

    def _make_controlled(self) -> ControlledServer:
        draining = Draining(
            catalog=self._catalog,
            engine=self._engine,
            inodes=self._inodes,
            registry=self._changes.registry,
            removals_recorded=self._commit.removals_recorded,
            ask_again=self._commit.ask_again,
        )
        return ControlledServer(
            config=self._config,
            devices=DeviceControl(self._changes, draining),
            catalog=self._catalog,
            engine=self._engine,
            namespace=self._namespace,
            commit=self._commit,
            policies=self._policies,
            versions=self._versions,
            groups=self._groups,
            link=self._link,
            restarts=self._inherited.restarts if self._inherited else 0,
            check_installed=lambda: check_installed().version,
        )

    async def run(
        self, *, ready: Callable[[], None], metrics_socket: socket.socket | None
    ) -> Flushed:
        """Mount and serve until the end; `ready` is called when the mount answers.

        Returns what could not be kept, after everything was closed and the devices unlocked.
        """
        try:
            delete_forgotten = await self._take_over()
        except Exception as error:
            if self._inherited is not None:
                die(error)
            raise
        device, fuse_fd = await self._mount()
        self._connection_control = fusermount.control_of(device, fuse_fd)
        relay_fd = self._engine.serve(
            fuse_fd, self._inodes.directories, connection=self._connection()
        )
        ending = Ending(
            device=device,
            control=self._connection_control,
            mountpoint=self._config.mountpoint,
            link=self._link,
            engine=self._engine,
            commit=self._commit,
            flush=self._controlled.flush_at_end,
            connection_ended=self._connection_ended,
        )
        control = ControlServer(
            path=socket_path(device, folder=self._config.runtime_folder, pid=self._link.keeper_pid),
            controlled=self._controlled,
            access=control_access(self._config.options),
            takes_over=self._inherited is not None,
        )
        async with trio.open_nursery() as nursery:
            try:
                if self._config.options.metrics:
                    serve_metrics = self._serve_metrics
                    nursery.start_soon(
                        run_beside, serve_metrics, metrics_socket, name=serve_metrics
                    )
                for task in (control.serve, ending.watch_signals, ending.watch_keeper):
                    await nursery.start(run_beside, task, name=task)
                final = await self._serve(ready, ending, relay_fd, delete_forgotten)
                await control.end_requests()
                # Nothing that is told to be so may need another server once the keeper knows.
                await self._note_clean_end()
                control.leave_outcome(final)
                self._link.ending()
            except Exception as error:  # noqa: BLE001 (another server takes over)
                die(error)
            finally:
                with trio.CancelScope(shield=True):
                    await ending.leave_no_dead_mount()
                    await control.end_requests()
                    await ending.end_signals()
                    self._metrics_scope.cancel()
                    await self.close()
            with trio.move_on_after(ANNOUNCE_S):
                await control.announce_end(final)
            nursery.cancel_scope.cancel()
        return final

    async def _take_over(self) -> Callable[[], Awaitable[None]]:
        """Take over what a server that died left, if one did; returns what is left to do of it."""
        await self._policies.load()
        await self._versions.load()
        await self._groups.load()
        work = TakeOver(
            catalog=self._catalog,
            engine=self._engine,
            inodes=self._inodes,
            namespace=self._namespace,
            commit=self._commit,
            requests=self._requests,
            groups=self._groups,
        )
        if not self._took_over:
            # First, since they may be names in what is taken away then.
            await self._commit.put_names_back()
        if self._engine.left().changed and self._knows_all_objects:
            await orphan_objects.make_room(
                needed_bytes=self._config.options.staging_bytes,
                catalog=self._catalog,
                engine=self._engine,
                devices=self._changes.registry.present,
            )
        taken = await work.run(with_handles=self._inherited is not None)
        await self._versions.load()  # Some may have gone with what is in no group any more.
        deleted = await self._commit.recover(keep=taken.kept, took_over=self._took_over)
        self._controlled.recovered(
            RecoveryStatus(
                catalog=self._catalog.recovered,
                handles_taken_over=taken.handles,
                files_taken_over=taken.changed,
                files_lost=len(taken.lost),
                inodes_deleted=deleted,
                objects_removed=None if self._has_orphans else 0,
            )
        )
        if self._inherited is not None or taken.changed:
            _log.info(
                "took over %d open handles and %d files with changes, of which %d were closed",
                taken.handles,
                taken.changed,
                taken.closed,
            )
        return functools.partial(work.delete_forgotten, taken.kept)

    @property
    def _knows_all_objects(self) -> bool:
        """Whether what the catalog does not name is of no version.

        A copy of it that is missing with its device may be newer, and name more.
        """
        return not self._devices.missing_catalog_directories

    @property
    def _has_orphans(self) -> bool:
        """Whether an earlier server may have left objects of no version, which can be told."""
        return not self._catalog.ended_cleanly and self._knows_all_objects

    async def _collect_orphans(self) -> None:
        """Collect what an earlier server left; what fails now is the next mount's to collect."""
        with contextlib.suppress(OSError):  # it is in the log
            removed = await orphan_objects.collect(
                catalog=self._catalog, engine=self._engine, devices=self._changes.registry.present
            )
            self._controlled.collected(removed)
            # Those on a device that is missing are looked for when it is back.
            self._catalog.ended_cleanly = not self._changes.registry.missing

    async def _serve_metrics(self, listener: socket.socket | None) -> None:
        scrape = Scrape(
            config=self._config,
            registry=self._changes.registry,
            catalog=self._catalog,
            engine=self._engine,
            namespace=self._namespace,
            commit=self._commit,
            link=self._link,
            restarts=self._inherited.restarts if self._inherited else 0,
        )
        open_to_others = allows_others(self._config.options)
        with self._metrics_scope:
            await scrape.serve(listener, open_to_others=open_to_others)

    async def _serve(
        self,
        ready: Callable[[], None],
        ending: Ending,
        relay_fd: int,
        delete_forgotten: Callable[[], Awaitable[None]],
    ) -> Flushed:
        """Serve names and bytes until the connection ends, then drain."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit.run)
            nursery.start_soon(self._controlled.tracing.run)
            nursery.start_soon(self._changes.ensure_copies)
            nursery.start_soon(delete_forgotten)
            nursery.start_soon(self._relay_events, ending)
            if self._has_orphans:
                nursery.start_soon(self._collect_orphans)
            await self._serve_names(ready, relay_fd)
            self._namespace.close()
            final = await self._controlled.flush_at_end()
            nursery.cancel_scope.cancel()
        return final

    async def _mount(self) -> tuple[str, int]:
        """Mount, unless a server before did; returns the mount's ``major:minor`` and /dev/fuse."""
        if self._inherited is not None:
            return self._inherited.device, self._inherited.fuse_fd
        return await run_alone(self._mount_anew)

    def _mount_anew(self) -> tuple[str, int]:
        """Mount where nothing of fpfs is, and let the keeper hold that. Blocks."""
        mountpoint, asked = self._config.mountpoint, self._config.asked
        with fusermount.mounting(mountpoint, folder=self._config.runtime_folder):
            # Again, since another mount may have been quicker.
            fusermount.check_mountpoint(mountpoint, asked=asked)
            fuse_fd = fusermount.mount(
                mountpoint,
                options=mount_options(
                    self._config.options, filesystem_id=self._devices.filesystem_id
                ),
                asked=asked,
                held_fds=[fd for fd in (self._link.fileno(), self._config.ready_fd) if fd >= 0],
            )
            return self._hold_mount(fuse_fd), fuse_fd

    def _connection(self) -> Connection:
        if self._inherited is None:
            return Connection.NEW
        return Connection.LEFT_BY_FAULT if self._inherited.by_fault else Connection.LEFT

    def _hold_mount(self, fuse_fd: int) -> str:
        """Let the keeper hold a mount that was just made; returns its ``major:minor``."""
        try:
            entry = mount_at(self._config.mountpoint)
            assert entry is not None, "fusermount3 said that it mounted"
            if not self._config.options.follows_symlinks:
                fusermount.forbid_symlinks(entry.mountpoint, asked=self._config.asked)
            fusermount.raise_read_ahead(entry.device)
        except BaseException:
            # Nobody else knows of it, and it has not been used.
            os.close(fuse_fd)
            fusermount.unmount(self._config.mountpoint, lazy=True)
            raise
        self._link.hold(device=entry.device, fuse_fd=fuse_fd, lock_fds=self._devices.lock_fds)
        return entry.device

    async def _serve_names(self, ready: Callable[[], None], relay_fd: int) -> None:
        """Let pyfuse3 answer until the connection has ended."""
        pyfuse3.init(Operations(self._namespace), f"/dev/fd/{relay_fd}", {"fsname=fpfs"})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_pyfuse3)
            self._link.serving()
            ready()
            await self._connection_ended.wait()
            pyfuse3.terminate()
            # What still runs is for callers that the kernel has forgotten.
            nursery.cancel_scope.deadline = trio.current_time() + REQUESTS_END_S
        if nursery.cancel_scope.cancelled_caught:
            _log.warning("requests were cut off %d s after the mount ended", REQUESTS_END_S)
        pyfuse3.close(unmount=False)

    async def _run_pyfuse3(self) -> None:
        await pyfuse3.main(max_tasks=REQUESTS_MAX)
        self._connection_ended.set()

    async def _relay_events(self, ending: Ending) -> None:
        async with trio.open_nursery() as nursery:
            await self._handle_events(ending, nursery)

    async def _handle_events(self, ending: Ending, nursery: trio.Nursery) -> None:
        async for event in self._engine.events():
            self._namespace.catch_up()
            match event:
                case SyncWrite():
                    self._commit.sync_write(event)
                case SpaceWanted(ino, refused):
                    nursery.start_soon(self._make_room, ino, refused)
                case LogRecord():
                    logging.getLogger("fpfs.engine").log(event.level, "%s", event.message)
                    if event.refused:
                        self._engine.complete_write(event.refused, errno.EIO)
                case HandlesReleased():
                    pass  # the namespace has caught up
                case ChannelClosed():
                    _log.info("%s", ending.describe(event.errno))
                    self._connection_ended.set()

    async def _make_room(self, ino: int, refused: bool) -> None:
        """Give up what gives way for a write that waits, or say that it was refused."""
        if refused:
            await self._versions.say_refused(ino)
            return
        try:
            await self._commit.make_room()
        except OSError as error:
            _log.error("nothing can be given up to make room: %s", error)
            self._engine.room_made(more=False)
        else:
            self._engine.room_made(more=self._commit.gives_way)

    async def close(self) -> None:
        """Close what the server was given, and unlock the devices. Once is enough."""
        if not self._closed:
            self._closed = True
            if self._connection_control is not None:
                self._connection_control.close()
            self._namespace.close()
            devices = self._engine.statistics().devices.values()
            has_failed = any(each.failed or each.errors for each in devices)
            await run_alone(self._engine.close)
            if self._changes.registry.missing or has_failed or self._commit.statistics().failures:
                # Objects of no version may be left: the next mount looks for them.
                self._catalog.ended_cleanly = False
            await self._note_clean_end()
            await self._catalog.close()
            self._devices.close()

    async def _note_clean_end(self) -> None:
        """Note that groups stay as they are; where that fails they go, as after a crash."""
        with contextlib.suppress(OSError):
            await self._groups.note_clean_end()


async def reconcile_devices(
    devices: DeviceSet, catalog: Catalog, link: KeeperLink, *, is_degraded: bool, asked: str
) -> None:
    """Take the devices of the catalog where a server died while it changed them. `Refused`."""
    has_changed = devices.reconcile(catalog.devices, is_degraded=is_degraded, asked=asked)
    for lock in devices.unlock_strangers():
        link.release_lock(lock)
    if has_changed:
        await run_alone(devices.devices_changed, catalog.devices)


async def serve(
    config: ServerConfig,
    *,
    ready: Callable[[DeviceSet], None],
    link: KeeperLink,
    inherited: Inherited | None,
) -> Flushed:
    """Open everything, serve one mount, and close everything. Raises `Refused` and OSError."""
    metrics_socket = open_metrics(config) if inherited is None else None
    with open_devices(
        config.devices,
        mountpoint=config.mountpoint,
        asked=config.asked,
        adopt=config.options.adopt,
        may_format=not config.options.read_only,
        degraded=config.options.degraded,
        held_fds=inherited.lock_fds if inherited else (),
        holder_pid=link.keeper_pid,
        starter_fd=config.ready_fd,
    ) as devices:
        for missing in devices.missing:
            _log.warning(
                "device %d is missing (%s: %s): what lies there gives EIO, new chunks avoid it",
                *missing[:2],
                missing.trouble,
            )
        catalog = await run_alone(open_catalog, devices)
        try:
            is_degraded = config.options.degraded or inherited is not None
            await reconcile_devices(
                devices, catalog, link, is_degraded=is_degraded, asked=config.asked
            )
            check_identity(catalog, devices)
            how = engine_config(config, devices, object_base=catalog.object_base)
            engine = NativeEngine(how)
        except (OSError, Refused):
            await catalog.close()
            raise
        server = Server(
            config=config,
            devices=devices,
            catalog=catalog,
            engine=engine,
            link=link,
            inherited=inherited,
            took_over=how.take_over,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_beside, engine.run, name=engine.run)
            try:
                return await server.run(
                    ready=functools.partial(ready, devices), metrics_socket=metrics_socket
                )
            finally:
                with trio.CancelScope(shield=True):
                    await server.close()
