"""The server of one mount: makes the parts, joins them, and takes them down in order.

This is the composition root. It starts with everything that can be refused (devices, catalog,
engine, mount), says over a pipe that it is ready, and serves until the kernel ends the connection
or a signal asks it to end.

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
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import pyfuse3
import trio

import fpfs
from fpfs.core.control import (
    Failure,
    Flushed,
    RecoveryStatus,
    Renewing,
    Scrubbed,
    ScrubStep,
    Status,
    socket_path,
)
from fpfs.core.engine import (
    ChannelClosed,
    DeviceConfig,
    Engine,
    EngineConfig,
    HandlesReleased,
    LogRecord,
    NativeEngine,
    SyncWrite,
)
from fpfs.core.errors import CatalogError
from fpfs.core.mounts import mount_at
from fpfs.core.options import Checksums, Idle, MountOptions
from fpfs.core.policy import Policy
from fpfs.core.refusal import Refused
from fpfs.core.units import format_size
from fpfs.daemon import metrics, mounting, orphans, renewal
from fpfs.daemon.catalog import Catalog, DeviceRecord, RootOwner
from fpfs.daemon.catalog_aside import Partial, list_partials
from fpfs.daemon.commit import Commit
from fpfs.daemon.control import ControlServer
from fpfs.daemon.devices import DeviceSet, open_devices
from fpfs.daemon.inodes import InodeTable
from fpfs.daemon.keeper import Inherited, KeeperLink
from fpfs.daemon.launch import ServerConfig
from fpfs.daemon.namespace import Namespace
from fpfs.daemon.operations import Operations
from fpfs.daemon.places import CPU_LATENCY, arena_path
from fpfs.daemon.requests import Requests
from fpfs.daemon.scrub import Scrub
from fpfs.daemon.takeover import TakeOver

REQUESTS_MAX = 1000
"""Requests that pyfuse3 works on at once. Each blocked fsync holds one."""

REQUESTS_END_S = 60
"""How long requests may take to end after the kernel has forgotten them."""

ANNOUNCE_S = 5
"""How long a client that waits for the end may take to read that it came."""

EXIT_GAVE_UP = 3
"""Exit status after a second SIGINT."""

EXIT_RENEWED = 4
"""Exit status of a server that made room for another program."""

EXIT_DIED = 70
"""Exit status of a server that failed while it served: another takes over."""

CATALOG_NAME = "catalog.db"

_log = logging.getLogger("fpfs.server")


class Server:
    """One mounted filesystem, from the first request to the last."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        devices: DeviceSet,
        catalog: Catalog,
        engine: Engine,
        link: KeeperLink,
        inherited: Inherited | None,
    ) -> None:
        """Join the parts. The server takes over the catalog and the engine and closes them."""
        options = config.options
        self._link = link
        self._inherited = inherited
        policy = Policy(
            devices=devices.numbers,
            chunk_bytes=options.chunk_bytes,
            ack=options.ack,
            whole=options.whole,
        )
        self._config = config
        self._devices = devices
        self._catalog = catalog
        self._engine = engine
        inodes = InodeTable(catalog=catalog, engine=engine)
        self._inodes = inodes
        self._directories = inodes.directories
        self._commit = Commit(
            catalog=catalog,
            engine=engine,
            inodes=inodes,
            ack=policy.ack,
            is_whole=policy.is_whole,
        )
        self._requests = Requests(catalog)
        self._scrub = Scrub(
            catalog=catalog,
            engine=engine,
            device_paths={device.number: device.path for device in devices.devices},
        )
        self._namespace = Namespace(
            catalog=catalog,
            engine=engine,
            inodes=inodes,
            commit=self._commit,
            policy=policy,
            requests=self._requests,
            device_paths={device.number: Path(device.path) for device in devices.devices},
        )
        self._recovery = RecoveryStatus()
        self._connection_ended = trio.Event()
        self._ending_by_signal = False
        self._ending = trio.CancelScope()
        self._ending_done = trio.Event()
        self._closing = False
        self._closed = False

    async def run(self, *, ready: Callable[[], None]) -> Flushed:
        """Mount and serve until the end; `ready` is called when the mount answers.

        Returns what could not be kept, after everything was closed and the devices unlocked.
        """
        await self._take_over()
        device, relay_fd = await self._mount()
        control = ControlServer(
            path=socket_path(device, folder=self._config.runtime_folder, pid=self._link.keeper_pid),
            controlled=self,
            open_to_others=allows_others(self._config.options),
        )
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(control.serve)
                await nursery.start(self._watch_signals, device)
                nursery.start_soon(self._watch_keeper, device)
                final = await self._serve(ready, device, relay_fd)
                self._link.ending()
            except Exception as error:  # noqa: BLE001 (another server takes over)
                self._die(error)
            finally:
                with trio.CancelScope(shield=True):
                    await self._leave_no_dead_mount(device)
                    await control.end_requests()
                    await self._end_signals()
                    await self.close()
            with trio.move_on_after(ANNOUNCE_S):
                await control.announce_end(final)
            nursery.cancel_scope.cancel()
        return final

    async def _take_over(self) -> None:
        """Take over what a server that died left, if one did."""
        work = TakeOver(
            catalog=self._catalog,
            engine=self._engine,
            inodes=self._inodes,
            namespace=self._namespace,
            commit=self._commit,
            requests=self._requests,
        )
        taken = await work.run(with_handles=self._inherited is not None)
        deleted = await self._commit.recover(keep=taken.kept)
        self._recovery = RecoveryStatus(
            catalog=self._catalog.recovered,
            handles_taken_over=taken.handles,
            files_taken_over=taken.changed,
            files_lost=len(taken.lost),
            inodes_deleted=deleted,
            objects_removed=0 if self._catalog.ended_cleanly else None,
        )
        if self._inherited is not None or taken.changed:
            _log.info(
                "took over %d open handles and %d files with changes, of which %d were closed",
                taken.handles,
                taken.changed,
                taken.closed,
            )

    async def _collect_orphans(self) -> None:
        """Collect what an earlier server left; what fails now is the next mount's to collect."""
        with contextlib.suppress(OSError):  # it is in the log
            removed = await orphans.collect(
                catalog=self._catalog, engine=self._engine, devices=self._devices.devices
            )
            self._recovery = msgspec.structs.replace(self._recovery, objects_removed=removed)
            # Those on a device that is missing are looked for when it is back.
            self._catalog.ended_cleanly = not self._devices.missing

    def _die(self, error: Exception) -> NoReturn:
        """End at once and leave everything as it is: the keeper starts another server."""
        _log.critical("serving failed", exc_info=error)
        logging.shutdown()
        os._exit(EXIT_DIED)

    async def _watch_keeper(self, device: str) -> None:
        """Drain and unmount when there is nobody left who would start another server."""
        await trio.lowlevel.wait_readable(self._link.fileno())
        if not self._ending_by_signal:
            self._ending_by_signal = True
            _log.critical("the keeper died: draining and unmounting")
            await self._end_by_signal(device)

    async def _serve(self, ready: Callable[[], None], device: str, relay_fd: int) -> Flushed:
        """Serve names and bytes until the connection ends, then drain."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit.run)
            nursery.start_soon(self._relay_events, device)
            if not self._catalog.ended_cleanly:
                nursery.start_soon(self._collect_orphans)
            await self._serve_names(ready, relay_fd)
            self._namespace.files.close()
            final = await self._flush_at_end()
            nursery.cancel_scope.cancel()
        return final

    async def status(self) -> Status:
        """Figures of now, for the control protocol."""
        self._namespace.catch_up()
        statistics = self._engine.statistics()
        devices = await trio.to_thread.run_sync(
            metrics.device_statuses, self._devices.devices, self._devices.missing, statistics
        )
        return Status(
            version=fpfs.__version__,
            server_pid=os.getpid(),
            keeper_pid=self._link.keeper_pid,
            restarts=self._inherited.restarts if self._inherited else 0,
            filesystem_id=self._devices.filesystem_id,
            mountpoint=self._config.mountpoint,
            started_unix_s=self._link.started_unix_s,
            ack=self._config.options.ack,
            chunk_bytes=self._config.options.chunk_bytes,
            log=self._config.log,
            devices=devices,
            staging=metrics.staging_status(statistics),
            commit=metrics.commit_status(self._commit.statistics()),
            partials=metrics.partial_status(await self._partials()),
            catalog=metrics.catalog_status(self._catalog),
            recovery=self._recovery,
            channel=metrics.channel_counters(statistics),
        )

    async def _partials(self) -> Sequence[Partial]:
        """What killed writers left. A catalog that cannot be read does not keep the rest back."""
        try:
            return await self._catalog.read(list_partials)
        except OSError as error:
            _log.debug("what killed writers left cannot be told: %s", error)
            return ()

    async def prepare_renewal(self) -> Renewing:
        """Return when the installed program has said that it can take over. OSError otherwise."""
        installed = await trio.to_thread.run_sync(renewal.check_installed)
        return Renewing(version=installed.version)

    def renew(self) -> NoReturn:
        """End at once and leave everything to the program that is installed by now."""
        self._link.renewing()
        logging.shutdown()
        os._exit(EXIT_RENEWED)

    async def wait_durable(self, ino: int) -> Flushed:
        """Return when an inode's content and names are durable. OSError when they cannot be."""
        self._namespace.catch_up()
        await self._commit.wait_durable(ino)
        return Flushed()

    async def flush(self, *, written_to: bool = True) -> Flushed:
        """Return when everything is durable but for the failures in the answer.

        Without `written_to` files that somebody writes are left out.
        """
        self._namespace.catch_up()
        failed = await self._commit.flush_all(written_to=written_to)
        return Flushed(failures=metrics.failures(failed))

    async def scrub(self, step: ScrubStep, *, ino: int) -> Scrubbed:
        """Compare some committed contents with their checksums, for the control protocol."""
        return await self._scrub.step(step, ino=ino)

    async def _flush_at_end(self) -> Flushed:
        """Flush; when the catalog itself is what failed, that is one of the failures.

        What somebody writes waits until it is certain that it cannot be finished.
        """
        try:
            return await self.flush(written_to=False)
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"names and versions since the last flush may be lost: {reason}"
            _log.critical("%s", message)
            failed = metrics.failures(self._commit.statistics().failures)
            whole = Failure(ino=0, errno=error.errno or errno.EIO, message=message)
            return Flushed(failures=(*failed, whole))

    async def _mount(self) -> tuple[str, int]:
        """Mount and start the channel; returns the mount's ``major:minor`` and pyfuse3's end."""
        config = self._config
        if self._inherited is not None:
            fuse_fd = self._inherited.fuse_fd
            relay_fd = self._engine.serve(fuse_fd, self._directories, resume=True)
            return self._inherited.device, relay_fd
        mount = functools.partial(
            mounting.mount,
            config.mountpoint,
            options=mount_options(config.options, filesystem_id=self._devices.filesystem_id),
            asked=config.asked,
        )
        fuse_fd = await trio.to_thread.run_sync(mount)
        entry = mount_at(config.mountpoint)
        assert entry is not None, "fusermount3 said that it mounted"
        mounting.raise_read_ahead(entry.device)
        self._link.hold(device=entry.device, fuse_fd=fuse_fd, lock_fds=self._devices.lock_fds)
        return entry.device, self._engine.serve(fuse_fd, self._directories, resume=False)

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

    async def _relay_events(self, device: str) -> None:
        async for event in self._engine.events():
            self._namespace.catch_up()
            match event:
                case SyncWrite():
                    self._commit.sync_write(event)
                case LogRecord():
                    logging.getLogger("fpfs.engine").log(event.level, "%s", event.message)
                case HandlesReleased():
                    pass  # the namespace has caught up
                case ChannelClosed():
                    _log.info("%s", self._describe_end(device, event.errno))
                    self._connection_ended.set()

    def _describe_end(self, device: str, number: int) -> str:
        """Why the connection ended, for the log. ENODEV says both: unmounted, and aborted."""
        if number != errno.ENODEV:
            return f"the kernel ended the connection ({os.strerror(number)})"
        return "the connection was aborted" if self._is_mounted(device) else "unmounted"

    def _is_mounted(self, device: str) -> bool:
        entry = mount_at(self._config.mountpoint)
        return entry is not None and entry.device == device

    async def _watch_signals(
        self, device: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            task_status.started()
            interrupted = False
            async with trio.open_nursery() as nursery:
                async for number in received:
                    name = signal.Signals(number).name
                    if number == signal.SIGINT and interrupted:
                        self._give_up()
                    elif self._ending_by_signal:
                        _log.info("%s: draining already", name)
                    else:
                        self._ending_by_signal = True
                        _log.info("%s: draining and unmounting", name)
                        nursery.start_soon(self._end_by_signal, device)
                    interrupted = interrupted or number == signal.SIGINT

    async def _end_by_signal(self, device: str) -> None:
        try:
            with self._ending:
                await self._end(device)
        finally:
            self._ending_done.set()

    async def _end_signals(self) -> None:
        """Return when no signal's work is under way; what comes from now on changes nothing."""
        self._closing = True
        if self._ending_by_signal:
            self._ending.cancel()
            await self._ending_done.wait()
        self._ending_by_signal = True

    async def _end(self, device: str) -> None:
        """Drain and unmount although programs may use the mount."""
        await self._flush_at_end()
        if self._connection_ended.is_set():
            return
        try:
            await trio.to_thread.run_sync(mounting.unmount, self._config.mountpoint)
        except Refused:
            await trio.to_thread.run_sync(self._detach)
            _log.warning("files were open at the end: programs that use them get errors from now")
            await self._flush_at_end()
            if not mounting.abort_connection(device):
                self._connection_ended.set()

    def _give_up(self) -> None:
        """Stop now, after saying what that may lose."""
        self._link.ending()
        if self._closing:
            _log.error("stopped by a second SIGINT while closing, after the last flush")
            logging.shutdown()
            os._exit(EXIT_GAVE_UP)
        staged = self._engine.statistics()["staging"]["bytes_used"]  # type: ignore[index]
        pending = self._commit.statistics().pending
        _log.error(
            "stopped by a second SIGINT: %s in staging and %d uncommitted files are left to the"
            " next mount; if the machine ends before, they are lost and previous versions stay",
            format_size(staged),
            pending,
        )
        logging.shutdown()
        # Threads may wait for a device that does not answer: nothing may be waited for here.
        os._exit(EXIT_GAVE_UP)

    async def _leave_no_dead_mount(self, device: str) -> None:
        """Take the mount away when serving ended by an error and not by the kernel."""
        if self._is_mounted(device):
            _log.error("serving ended by an error: taking the mount away")
            await trio.to_thread.run_sync(self._detach)
            mounting.abort_connection(device)

    def _detach(self) -> None:
        mounting.unmount(self._config.mountpoint, lazy=True)

    async def close(self) -> None:
        """Close what the server was given, and unlock the devices. Once is enough."""
        if not self._closed:
            self._closed = True
            self._namespace.close()
            await trio.to_thread.run_sync(self._engine.close)
            if self._devices.missing or self._commit.statistics().failures:
                # Objects of no version may be left: the next mount looks for them.
                self._catalog.ended_cleanly = False
            await self._catalog.close()
            self._devices.close()


def mount_options(options: MountOptions, *, filesystem_id: str) -> list[str]:
    """Options for fusermount3; what the user chose comes last and so wins."""
    source = options.source or f"fpfs-{filesystem_id}"
    chosen = [
        f"fsname={mounting.escape_option(source)}",
        "subtype=fpfs",
        "default_permissions",
        f"max_read={mounting.MAX_READ_BYTES}",
    ]
    if allows_others(options):
        chosen.append("allow_other")
    if os.geteuid() == 0:
        # Root's own filesystems honour set-user-id and device files; fusermount3 would not.
        chosen += ["suid", "dev"]
    return [*chosen, *options.kernel]


def allows_others(options: MountOptions) -> bool:
    """Whether other users may use the mount: as chosen, else for root's mounts."""
    return os.geteuid() == 0 if options.allow_other is None else options.allow_other


def open_catalog(devices: DeviceSet) -> Catalog:
    """The catalog of a set of devices, made first where nothing was ever mounted. Blocks.

    Raises `CatalogMissing` where there are objects without the catalog that names them.
    """
    paths = [Path(folder, CATALOG_NAME) for folder in devices.catalog_directories]
    absent = [Path(folder, CATALOG_NAME) for folder in devices.missing_catalog_directories]
    unused = not any(any(os.scandir(device.objects_path)) for device in devices.devices)
    is_new = unused and not devices.missing and not any(path.exists() for path in paths)
    if is_new:
        Catalog.format(
            paths[0],
            filesystem_id=devices.filesystem_id,
            devices=[
                DeviceRecord(number=device.number, device_id=device.device_id, path=device.path)
                for device in devices.devices
            ],
            root=RootOwner(uid=os.geteuid(), gid=os.getegid()),
        )
    return Catalog.open(*paths, filesystem_id=devices.filesystem_id, is_new=is_new, absent=absent)


def check_identity(catalog: Catalog, devices: DeviceSet) -> None:
    """Raise `CatalogError` unless the catalog is that of the devices, as their stamps have them."""
    missing = {device.number for device in devices.missing}
    known = {
        device.number: device.device_id
        for device in catalog.devices
        if device.number not in missing
    }
    found = {device.number: device.device_id for device in devices.devices}
    if catalog.filesystem_id != devices.filesystem_id:
        ours, theirs = f"filesystem {catalog.filesystem_id}", f"filesystem {devices.filesystem_id}"
    elif known != found:
        ours, theirs = f"devices {known}", f"devices {found}"
    else:
        return
    raise CatalogError(
        f"catalog {catalog.path} is of {ours}, the stamps of the devices are of {theirs}",
        remedy="put back the catalog and the stamps that belong together",
    )


def engine_config(config: ServerConfig, devices: DeviceSet, *, object_base: int) -> EngineConfig:
    """How the engine of this mount starts."""
    options = config.options
    arena = arena_path(devices.filesystem_id)
    return EngineConfig(
        devices=tuple(
            DeviceConfig(number=device.number, path=device.objects_path)
            for device in devices.devices
        ),
        arena_path=arena,
        take_over=os.path.exists(arena),
        filesystem_id=devices.filesystem_id,
        staging_bytes=options.staging_bytes,
        slot_bytes=options.slot_bytes,
        depth=options.depth,
        channel_threads=options.receivers,
        backend=options.backend,
        object_base=object_base,
        ack=options.ack,
        cpu_latency_path=CPU_LATENCY if options.idle is Idle.SHALLOW else "",
        checksums=options.checksums is Checksums.ON,
    )


async def serve(
    config: ServerConfig,
    *,
    ready: Callable[[DeviceSet], None],
    link: KeeperLink,
    inherited: Inherited | None,
) -> Flushed:
    """Open everything, serve one mount, and close everything. Raises `Refused` and OSError."""
    with open_devices(
        config.devices,
        mountpoint=config.mountpoint,
        asked=config.asked,
        adopt=config.options.adopt,
        may_format=not config.options.read_only,
        degraded=config.options.degraded,
        held_fds=inherited.lock_fds if inherited else (),
        holder_pid=link.keeper_pid,
    ) as devices:
        for note in devices.notes:
            _log.info("%s", note)
        for missing in devices.missing:
            _log.warning(
                "device %d is missing (%s: %s): what lies there gives EIO, new chunks avoid it",
                *missing[:2],
                missing.trouble,
            )
        catalog = await trio.to_thread.run_sync(open_catalog, devices)
        try:
            check_identity(catalog, devices)
            engine = NativeEngine(engine_config(config, devices, object_base=catalog.object_base))
        except OSError:
            await catalog.close()
            raise
        server = Server(
            config=config,
            devices=devices,
            catalog=catalog,
            engine=engine,
            link=link,
            inherited=inherited,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            try:
                return await server.run(ready=functools.partial(ready, devices))
            finally:
                with trio.CancelScope(shield=True):
                    await server.close()
