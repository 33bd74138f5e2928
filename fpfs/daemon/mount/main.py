"""Keeper and server as processes: their log, limits, readiness, exit status.

``python -m fpfs.daemon.mount.main`` reads a `ServerConfig` from stdin; ``fpfs mount --foreground``
calls `run` with one. The process becomes the keeper, which starts the server. ``--check`` says what
this program is, ``--renewed FD`` goes on where a keeper of another version was (`live_upgrade`).
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import trio

from fpfs.core.mounts import mount_at
from fpfs.core.options import ServerConfig
from fpfs.core.protocol.reports import Flushed
from fpfs.core.refusal import Refused
from fpfs.daemon.devices.arena import ARENA_FOLDER
from fpfs.daemon.devices.keeper_link import KeeperLink
from fpfs.daemon.devices.opened_set import DeviceSet
from fpfs.daemon.mount import fusermount, live_upgrade
from fpfs.daemon.mount.launch import Readiness, RefusalRecord
from fpfs.daemon.mount.server import die, serve
from fpfs.daemon.mount.supervisor import Inherited, Keeper, KeeperState

_log = logging.getLogger("fpfs.server")


class _UtcFormatter(logging.Formatter):
    """``2026-11-21T01:02:03.456Z WARNING fpfs.engine: message``."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


def start_log(log: str) -> None:
    """Log to a file, or to stderr when `log` is empty; uncaught errors and stack dumps go there."""
    # Names that are no text are logged as escapes, as they are to stderr.
    handler = (
        logging.FileHandler(log, errors="backslashreplace") if log else logging.StreamHandler()
    )
    handler.setFormatter(_UtcFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    faulthandler.enable(all_threads=True)
    # A server that hangs shows its stacks: kill -USR1.
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def raise_limits() -> None:
    """As many open files as this user may have: every object in use is one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(config: ServerConfig, state: KeeperState | None = None) -> int:
    """Keep a mount until it ends; returns the exit status.

    `state` is what a keeper left that executed this program in its place.
    """
    os.chdir("/")  # in the foreground it was the starter's, which may be removed or unmounted
    start_log(config.log)
    raise_limits()
    os.umask(0o077)
    keeper = Keeper(
        serve=functools.partial(run_server, config),
        give_up=functools.partial(give_up, config.mountpoint),
        clean_up=functools.partial(clean_up, config.mountpoint),
        started=functools.partial(_close_readiness, config),
        renew=functools.partial(live_upgrade.execute, config),
        state=state,
    )
    return keeper.run()


def _close_readiness(config: ServerConfig) -> None:
    """Leave it to the server alone to say that it is ready: its end ends the wait for that."""
    if config.ready_fd >= 0:
        os.close(config.ready_fd)


def give_up(mountpoint: str) -> None:
    """Take away a mount that nobody serves any more."""
    entry = mount_at(mountpoint)
    if entry is None or not entry.is_fpfs:
        return
    with contextlib.suppress(Refused):
        fusermount.detach(entry)


def clean_up(mountpoint: str) -> None:
    """Take away a mount whose connection nobody holds any more."""
    try:
        if fusermount.remove_dead_mount(mountpoint):
            _log.warning("the server died where nobody else held the mount: it is taken away")
    except Refused as refused:
        _log.error("%s", refused)


def run_server(config: ServerConfig, link: KeeperLink, inherited: Inherited | None) -> int:
    """Serve a mount in this process until it ends; returns the exit status."""
    # Whoever waits for a thread that ended would wait for ever.
    threading.excepthook = lambda failed: die(failed.exc_value)
    ready = _Readiness(config, is_first=inherited is None)
    serving = functools.partial(serve, config, ready=ready.announce, link=link, inherited=inherited)
    try:
        return _report(trio.run(serving))
    except Exception as error:  # noqa: BLE001 (whatever failed, the starter must be told)
        cause = _only_cause(error)
        if not isinstance(cause, Refused):
            if ready.pending and isinstance(cause, OSError):
                _log.debug("the server could not start", exc_info=error)
            else:
                _log.exception("the server failed")
            cause = _unexpected(config, cause)
        ready.refuse(cause)
        return 1


def _only_cause(error: BaseException) -> BaseException:
    """The exception inside trio's groups, while each holds one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _report(final: Flushed) -> int:
    for failure in final.failures:
        _log.error("not kept: %s", failure.message)
    _log.info("ended; %s", "some files were not kept" if final.failures else "all is durable")
    return 1 if final.failures else 0


def _unexpected(config: ServerConfig, error: BaseException) -> Refused:
    remedies = {
        errno.ENOSPC: "make room on the devices",
        errno.ENOMEM: "ask for less staging, or raise the memory lock limit (ulimit -l)",
        errno.EROFS: "mount the device's filesystem writable",
        errno.EMFILE: "let it open more files (ulimit -n)",
    }
    if str(getattr(error, "strerror", None)).startswith("staging arena"):
        remedies[errno.ENOSPC] = f"ask for less staging (it is memory), or enlarge {ARENA_FOLDER}"
        remedies[errno.ENOMEM] = (
            "ask for less staging: it must be free memory, within the limit of the memory cgroup"
        )
        remedies[errno.EROFS] = f"mount {ARENA_FOLDER} writable"
        remedies[errno.ESTALE] = (
            "mount with the fpfs that made it, or remove it: what was not committed is lost then"
        )
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.strerror and not error.filename:
        what = error.strerror
    return Refused(
        asked=config.asked,
        wrong=f"the server failed ({what})",
        remedy=getattr(error, "remedy", "")
        or remedies.get(getattr(error, "errno", 0), "its log says more"),
    )


class _Readiness:
    """Tells the starter, once, that the mount answers or why not."""

    def __init__(self, config: ServerConfig, *, is_first: bool) -> None:
        self._fd = config.ready_fd if is_first else -1
        self._mountpoint = config.mountpoint
        self.pending = True
        """Whether nothing was told yet."""

    def announce(self, devices: DeviceSet) -> None:
        """The mount answers."""
        _log.info("mounted at %s", self._mountpoint)
        absent = [
            f"device {device.number} ({device.path}) is missing: what lies there gives EIO"
            for device in devices.missing
        ]
        notes = (*devices.notes, *absent)
        told = self._tell(
            Readiness(server_pid=os.getpid(), formatted=devices.formatted, notes=notes)
        )
        if not told:
            # Interrupted or killed: who gave up a mount does not expect to find one.
            _log.warning("whoever started this server did not wait for it")
            os.kill(os.getpid(), signal.SIGTERM)

    def refuse(self, refused: Refused) -> None:
        """There is no mount."""
        _log.error("%s", refused)
        record = RefusalRecord(asked=refused.asked, wrong=refused.wrong, remedy=refused.remedy)
        self._tell(Readiness(server_pid=os.getpid(), refusal=record))

    def _tell(self, readiness: Readiness) -> bool:
        """Whether somebody was there to be told, where anybody asked."""
        self.pending = False
        if self._fd < 0:
            return True
        try:
            os.write(self._fd, msgspec.json.encode(readiness) + b"\n")
        except BrokenPipeError:
            return False
        finally:
            os.close(self._fd)
            self._fd = -1
        return True


def main() -> int:
    """Entry of the background server, and of the program that a keeper executes in its place."""
    match sys.argv[1:]:
        case ["--check"]:
            sys.stdout.write(msgspec.json.encode(live_upgrade.this_program()).decode() + "\n")
            return 0
        case ["--renewed", descriptor]:
            config, state = live_upgrade.take_state(int(descriptor))
            return run(config, state)
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ServerConfig)
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
