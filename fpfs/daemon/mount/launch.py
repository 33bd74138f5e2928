"""Starting a server and ending one: what ``fpfs mount`` and ``fpfs umount`` do.

A server is a process of its own. It gets its configuration on stdin and says over a pipe, in one
JSON line, that the mount answers or why it cannot; then its starter returns.

Concurrency: plain blocking functions of a command, which has one thread.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from fpfs.core.mounts import MountEntry, check_outside, is_below, mount_at, resolve_mountpoint
from fpfs.core.options import MountOptions, ServerConfig
from fpfs.core.protocol.control import ControlClient, ServerEnded, keeper_of
from fpfs.core.protocol.questions import FlushAll, WaitForEnd
from fpfs.core.protocol.reports import Flushed
from fpfs.core.refusal import Refused, refuse_empty
from fpfs.daemon.devices.arena import ARENA_FOLDER
from fpfs.daemon.devices.directory import open_devices
from fpfs.daemon.devices.opened_set import DeviceSet
from fpfs.daemon.devices.trusted_path import check_trusted
from fpfs.daemon.mount.fusermount import (
    MOUNT_DEAD,
    check_mountpoint,
    detach,
    is_dead,
    remove_dead_mount,
    unmount,
)
from fpfs.daemon.mount.paths import (
    check_group,
    default_device,
    default_log,
    make_runtime_folder,
    remove_what_ended,
)

EXIT_S = 10
"""How long a server that has closed everything may take to leave."""


class RefusalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A `Refused` on its way between processes."""

    asked: str
    wrong: str
    remedy: str

    def exception(self) -> Refused:
        """The exception it was made of."""
        return Refused(asked=self.asked, wrong=self.wrong, remedy=self.remedy)


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """The line a starting server writes: the mount answers, or why there is none."""

    server_pid: int
    refusal: RefusalRecord | None = None
    formatted: bool = False
    notes: tuple[str, ...] = ()


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What a mount came to."""

    mountpoint: str
    devices: tuple[str, ...]
    log: str
    readiness: Readiness


def prepare(
    *,
    mountpoint: str,
    devices: Sequence[str],
    options: MountOptions,
    log: str,
    ready_fd: int,
) -> ServerConfig:
    """Check what was asked and complete it with defaults. Raises `Refused`."""
    asked = f"mount at {mountpoint}"
    resolved = check_mountpoint(mountpoint, asked=asked)
    chosen = _chosen_devices([*devices, *options.devices], asked=asked)
    log_path = os.path.realpath(log) if log else ""
    if options.control_group:
        check_group(options.control_group, asked=asked)
    runtime_folder = make_runtime_folder(asked=asked, for_group=bool(options.control_group))
    remove_what_ended(runtime_folder)
    covered = [("device directory", path) for path in chosen]
    covered += [("log", log_path)] if log_path else []
    covered += [("staging arena", ARENA_FOLDER), ("control socket", runtime_folder)]
    check_outside(resolved, covered, asked=asked)
    for path in chosen:
        if is_below(resolved, path):
            raise Refused(
                asked=asked,
                wrong=f"the mountpoint lies in the device directory {path}",
                remedy="mount outside of it",
            )
    config = ServerConfig(
        mountpoint=resolved,
        devices=tuple(chosen),
        options=options,
        log=log_path,
        runtime_folder=runtime_folder,
        ready_fd=ready_fd,
        asked=asked,
    )
    _check_text(config, asked=asked)
    return config


def _check_text(told: object, *, asked: str) -> None:
    """Refuse what is not UTF-8: it is told to the server, and noted on the devices, as text."""
    try:
        msgspec.json.encode(told)
    except UnicodeEncodeError as error:
        raise Refused(
            asked=asked, wrong=f"'{error.object}' is not UTF-8", remedy="give it another name"
        ) from None


def _chosen_devices(paths: Sequence[str], *, asked: str) -> list[str]:
    for path in paths:
        refuse_empty(path, what="device directory", asked=asked)
        if os.path.isdir(path):
            # Before its links are resolved; the server has the rest to say.
            check_trusted(path, asked=asked)
    if paths:
        return [os.path.realpath(path) for path in paths]
    default = os.path.realpath(default_device())
    before = os.umask(0o077)  # of all folders that are made: others may not write to them
    try:
        os.makedirs(default, exist_ok=True)
    except OSError as error:
        raise Refused(
            asked=asked,
            wrong=f"the default device directory {default} cannot be made ({error.strerror})",
            remedy="name one with -d",
        ) from error
    finally:
        os.umask(before)
    return [default]


def format_devices(paths: Sequence[str]) -> DeviceSet:
    """Make a filesystem of empty directories; returns it, unlocked. Raises `Refused`."""
    chosen = _chosen_devices(paths, asked="format")
    asked = f"format {', '.join(chosen)}"
    _check_text(chosen, asked=asked)
    with open_devices(chosen, mountpoint="", asked=asked) as made:
        if not made.formatted:
            raise Refused(
                asked=asked,
                wrong=f"this is filesystem {made.filesystem_id} already",
                remedy="mount it, or empty the directories first if nothing in it is needed",
            )
    return made


def start(*, mountpoint: str, devices: Sequence[str], options: MountOptions) -> Started:
    """Start a server in the background; returns when the mount answers. Raises `Refused`."""
    log = options.log or default_log(resolve_mountpoint(mountpoint))
    ready, ready_writer = os.pipe2(os.O_CLOEXEC)
    try:
        config = prepare(
            mountpoint=mountpoint, devices=devices, options=options, log=log, ready_fd=ready_writer
        )
        with open_log(config) as log_file:
            process = start_process(log_file, ready_writer)
        _configure(config, process)
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(ready_writer)
    try:
        with open(ready, "rb") as reader:
            line = reader.readline()
    except KeyboardInterrupt:
        process.wait()  # it finds nobody to tell that the mount answers, and ends
        raise
    return _started(config, line, process)


def start_process(log_file: BinaryIO, ready_fd: int) -> subprocess.Popen[bytes]:
    """Start the server's process, which waits for its `ServerConfig`."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fpfs.daemon.mount.main"],
        stdin=subprocess.PIPE,
        stdout=log_file,
        stderr=log_file,
        pass_fds=[ready_fd],
        start_new_session=True,
        cwd="/",
    )


def open_log(config: ServerConfig) -> BinaryIO:
    """The log, open for appending; `Refused` where that cannot be.

    Only the folder of the default log is made: another is more likely misspelt.
    """
    folder = os.path.dirname(config.log)
    before = os.umask(0o077)
    os.umask(before | 0o022)  # of all folders that are made, too: others may not write to them
    try:
        if not config.options.log:
            os.makedirs(folder, mode=0o755, exist_ok=True)
        return open(config.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o640))
    except OSError as error:
        make = "" if os.path.isdir(folder) else f"make the folder {folder}, or "
        raise Refused(
            asked=config.asked,
            wrong=f"the log {config.log} cannot be written ({error.strerror})",
            remedy=f"{make}name another with --log",
        ) from error
    finally:
        os.umask(before)


def _configure(config: ServerConfig, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    # A server that died at once says why in its log; that it no longer reads is no news.
    with contextlib.suppress(BrokenPipeError), process.stdin as stream:
        stream.write(msgspec.json.encode(config))


def _started(config: ServerConfig, line: bytes, process: subprocess.Popen[bytes]) -> Started:
    if not line:
        raise _ended_early(config, process)
    readiness = msgspec.json.decode(line, type=Readiness)
    if readiness.refusal is not None:
        process.wait()
        raise readiness.refusal.exception()
    try:
        os.statvfs(config.mountpoint)
    except OSError as error:
        if error.errno not in MOUNT_DEAD:
            raise
        # Before the kernel has its first answer there is nothing that another server takes over.
        raise _ended_early(config, process) from None
    return Started(
        mountpoint=config.mountpoint,
        devices=config.devices,
        log=config.log,
        readiness=readiness,
    )


def _ended_early(config: ServerConfig, process: subprocess.Popen[bytes]) -> Refused:
    """What to tell of a mount whose server died before it answered; no mount is left.

    The keeper may try others first.
    """
    status = process.wait()
    remove_dead_mount(config.mountpoint)  # the keeper was killed, too
    return Refused(
        asked=config.asked,
        wrong=f"the server ended before it was ready (exit status {status})",
        remedy=f"see the end of its log {config.log}",
    )


def _check_owner(entry: MountEntry, *, asked: str) -> None:
    """Refuse to unmount what somebody else mounted, as fusermount3 would in stranger words."""
    if os.getuid() in (0, entry.owner_uid):
        return
    owner = entry.owner
    raise Refused(
        asked=asked,
        wrong=f"it was mounted by user {owner}",
        remedy=f"ask {owner if entry.owner_uid == 0 else f'{owner} or root'} to unmount it",
    )


def stop(mountpoint: str) -> Flushed:
    """Unmount; returns when everything is durable and no process is left. Raises `Refused`.

    The flush before the unmount does most of the work while the mount is still there; what is
    written meanwhile is drained by the server after the unmount.
    """
    asked = f"unmount {mountpoint}"
    refuse_empty(mountpoint, what="mountpoint", asked=asked)
    entry = mount_at(mountpoint)
    if entry is None or not entry.is_fpfs:
        raise Refused(
            asked=asked,
            wrong="nothing is mounted there"
            if entry is None
            else f"{entry.filesystem_type} is mounted there, not fpfs",
            remedy="findmnt -t fuse.fpfs lists the mounts",
        )
    _check_owner(entry, asked=asked)
    try:
        ending = ControlClient(entry, asked=asked)
    except Refused as refused:
        if not is_dead(entry) and (keeper := keeper_of(entry)):
            raise Refused(
                asked=asked,
                wrong=f"its processes live (keeper {keeper}), and no server answers; it stays",
                remedy=f"ask again in a minute, or run umount {mountpoint} when no file on it is"
                " open: what is not durable then is written all the same, and nobody is told",
            ) from None
        detach(entry)
        raise Refused(
            asked=asked,
            wrong=f"its server was gone ({refused.wrong}); the mount is taken away",
            remedy="mount again: what was acknowledged comes back as long as the machine runs",
        ) from None
    with ending:
        # Asked before the unmount: a server with nothing left to do ends at once after it, and
        # would not wait for a question that is still to come.
        ending.send(WaitForEnd())
        # A catalog that fails refuses this; what that loses is part of the final answer.
        with contextlib.suppress(Refused), ControlClient(entry, asked=asked) as flushing:
            flushing.ask(FlushAll())
        _unmount_unless_gone(entry)
        try:
            final = ending.receive(Flushed)
        except ServerEnded:
            if ending.is_kept:
                raise
            raise _ended_untold(entry, asked=asked) from None
        ending.wait_for_end(timeout_s=EXIT_S)
        return final


def _unmount_unless_gone(entry: MountEntry) -> None:
    """Unmount; a server that ends for another reason may come before, or die with its keeper."""
    try:
        unmount(entry.mountpoint)
    except Refused:
        if mount_at(entry.mountpoint) == entry and not is_dead(entry):
            raise


def _ended_untold(entry: MountEntry, *, asked: str) -> Refused:
    """What to tell when the last server of a mount died before all was durable."""
    state = "the mount is taken away"
    if not remove_dead_mount(entry.mountpoint):
        state = "it is not mounted any more"
    return Refused(
        asked=asked,
        wrong=f"its server was gone before it said that all is durable; {state}",
        remedy="mount again: what was acknowledged comes back as long as the machine runs",
    )
