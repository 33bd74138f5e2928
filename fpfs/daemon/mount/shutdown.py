"""The end of a mount: by a signal, by the kernel, by an error, or because its keeper died.

Concurrency: trio thread only. What ends the mount by a signal is a task that `end_signals` stops.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import signal
from typing import TYPE_CHECKING

import trio

from fpfs.core.mounts import mount_at
from fpfs.core.refusal import Refused
from fpfs.core.threads import run_alone
from fpfs.core.units import format_size
from fpfs.daemon.mount import fusermount

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fpfs.core.engine import Engine
    from fpfs.core.protocol.reports import Flushed
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.devices.keeper_link import KeeperLink
    from fpfs.daemon.mount.fusermount import ConnectionControl

EXIT_GAVE_UP = 3
"""Exit status after a second SIGINT."""

_log = logging.getLogger("fpfs.server")


class Ending:
    """Ends one mount, which answers when this is made."""

    def __init__(
        self,
        *,
        device: str,
        control: ConnectionControl,
        mountpoint: str,
        link: KeeperLink,
        engine: Engine,
        commit: Commit,
        flush: Callable[[], Awaitable[Flushed]],
        connection_ended: trio.Event,
    ) -> None:
        """`device` is the mount's ``major:minor``; `flush` makes durable what can be.

        `control` ends its connection; the caller closes it.
        `connection_ended` is set when nothing more will come from the kernel.
        """
        self._device = device
        self._control = control
        self._mountpoint = mountpoint
        self._link = link
        self._engine = engine
        self._commit = commit
        self._flush = flush
        self._connection_ended = connection_ended
        self._ending_by_signal = False
        self._ending = trio.CancelScope()
        self._ending_done = trio.Event()
        self._closing = False

    async def watch_keeper(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Drain and unmount when there is nobody left who would start another server."""
        task_status.started()
        await trio.lowlevel.wait_readable(self._link.fileno())
        if not self._ending_by_signal:
            self._ending_by_signal = True
            _log.critical("the keeper died: draining and unmounting")
            await self._end_by_signal()

    async def watch_signals(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """End the mount at SIGTERM or SIGINT, and at once at a second SIGINT."""
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
                        nursery.start_soon(self._end_by_signal)
                    interrupted = interrupted or number == signal.SIGINT

    async def _end_by_signal(self) -> None:
        try:
            with self._ending:
                await self._end()
        finally:
            self._ending_done.set()

    async def end_signals(self) -> None:
        """Return when no signal's work is under way; what comes from now on changes nothing."""
        self._closing = True
        if self._ending_by_signal:
            self._ending.cancel()
            await self._ending_done.wait()
        self._ending_by_signal = True

    async def _end(self) -> None:
        """Drain and unmount although programs may use the mount."""
        await self._flush()
        if self._connection_ended.is_set():
            return
        try:
            await run_alone(fusermount.unmount, self._mountpoint)
        except Refused:
            detach = functools.partial(fusermount.unmount, self._mountpoint, lazy=True)
            await run_alone(detach)
            _log.warning("files were open at the end: programs that use them get errors from now")
            await self._flush()
            if not self._control.abort():
                self._connection_ended.set()

    def _give_up(self) -> None:
        """Stop now, after saying what that may lose."""
        self._link.ending()
        if self._closing:
            _log.error("stopped by a second SIGINT while closing, after the last flush")
            logging.shutdown()
            os._exit(EXIT_GAVE_UP)
        staged = self._engine.statistics().staging.bytes_used
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

    async def leave_no_dead_mount(self) -> None:
        """Take the mount away when serving ended by an error and not by the kernel.

        Another that was made in its place by now, and has its number, is served and no dead one.
        """
        entry = mount_at(self._mountpoint)
        if entry is None or entry.device != self._device:
            return
        if await run_alone(fusermount.is_dead, entry):
            _log.error("serving ended by an error: taking the mount away")
            await run_alone(fusermount.detach, entry)

    def describe(self, number: int) -> str:
        """Why the connection ended, for the log. ENODEV says both: unmounted, and aborted."""
        if number != errno.ENODEV:
            return f"the kernel ended the connection ({os.strerror(number)})"
        return "the connection was aborted" if self._is_mounted() else "unmounted"

    def _is_mounted(self) -> bool:
        entry = mount_at(self._mountpoint)
        return entry is not None and entry.device == self._device
