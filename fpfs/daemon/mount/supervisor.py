"""The keeper: the process that outlives servers, so that a mount outlives them too.

It holds the descriptors that must not be closed while the mount lives (/dev/fuse: closing it fails
every request; the devices' locks), and starts a server. When that dies, whatever the reason, it
starts another, which takes over what the dead one left in the staging arena and asks the kernel for
the requests that nobody has answered. Programs wait for that fraction of a second, and see nothing.

The keeper has everything imported that a server needs, so another one is there as fast as fork(2).
It has one thread and does nothing else: what it does not do cannot kill it. To go on with the
program that is installed by now (``fpfs-ctl restart``) it executes that in its own place.

Invariants:
  * A server tells the keeper of the mount before the kernel's first request is answered, and that
    it ends in good order before it gives up what the next mount needs.
  * A server that sees its keeper gone drains and ends the mount.
  * A mount whose server died before it told of it is taken away. fusermount3 holds the server's end
    of the connection open, so that the keeper waits for its end, too.

Concurrency: one thread, which waits for signals, for the server's end and for its messages.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import msgspec

from fpfs.daemon.devices.keeper_link import DESCRIPTORS_MAX, KeeperLink, Message, Notice

_log = logging.getLogger("fpfs.keeper")

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals to the keeper that are meant for the mount. A terminal that hangs up ends it."""

FAILURES_MAX = 5
"""Servers in a row that do not come so far as to answer, after which the mount is given up."""

FAULTS_MAX = 100
FAULTS_S = 300
"""Servers that die of what they do within this time, after which the mount is given up.

Five die of one request before it is refused (native/src/staging/requests.cc), so that this allows
for twenty."""

RETRY_S = 1.0
"""Time between such servers: what they fail for may pass."""

_MESSAGE_BYTES_MAX = 64 * 1024
"""More than a path takes as JSON."""

FAULTS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)
"""Signals that a server gets for what it does itself. Others are sent: by an operator, or by the
kernel when it needs the memory."""


STATE_FORMAT = 1
"""Of `KeeperState`: what a keeper and the program that it executes have to agree upon."""


class KeeperState(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper that executes another program leaves to it, beside the open descriptors."""

    device: str
    descriptors: tuple[int, ...]
    restarts: int
    started_unix_s: float
    signals: tuple[int, ...]


class Inherited(NamedTuple):
    """What a server gets from one that died."""

    device: str
    fuse_fd: int
    lock_fds: tuple[int, ...]
    restarts: int
    by_fault: bool
    """Whether that one died of what it did, and was not ended."""


def died_of_fault(status: int) -> bool:
    """Whether a server ended by a fault of its own: an exit status, or -N for signal N."""
    return status > 0 or -status in FAULTS


Serve = Callable[[KeeperLink, Inherited | None], int]
"""Runs a server in a process of its own; returns its exit status."""


class Keeper:
    """Runs servers of one mount, one after the other, until one ends in good order."""

    def __init__(
        self,
        *,
        serve: Serve,
        give_up: Callable[[], None],
        clean_up: Callable[[], None],
        started: Callable[[], None],
        renew: Callable[[KeeperState], NoReturn],
        state: KeeperState | None,
    ) -> None:
        """`give_up` takes the mount away when servers die again and again.

        `clean_up` takes away what is left of a mount that nobody holds any more. `started` is
        called once, when the first server runs. `renew` executes the program that is installed by
        now, or raises OSError. `state` is what a keeper left that did so.
        """
        self._serve = serve
        self._give_up = give_up
        self._clean_up = clean_up
        self._started = started
        self._renew = renew
        self._descriptors = list(state.descriptors) if state else []
        self._device = state.device if state else ""
        self._serving = False
        self._ending = False
        self._renewing = False
        self._failures = 0
        self._fault_times_s: collections.deque[float] = collections.deque(maxlen=FAULTS_MAX)
        """When the last servers died of what they did, by the monotonic clock."""
        self._signals = list(state.signals) if state else []
        """Signals that no server has got yet."""
        self._passed_on = 0
        """The last one that a server got."""
        self._restarts = state.restarts if state else 0
        self._started_unix_s = state.started_unix_s if state else time.time()
        self._pid = 0
        self._last_status = 0
        """How the last server ended: its exit status, -N for signal N."""

    def run(self) -> int:
        """Keep the mount until it ends; returns the exit status of the last server."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in FORWARDED:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        # What is imported stays shared with the servers.
        gc.collect()
        gc.freeze()
        while True:
            status = self._last_status = self._run_server(wake_reader)
            if self._ending or not self._descriptors:
                if status != 0:
                    self._remove_mount()
                return status
            self._restarts += 1
            if self._passed_on and not self._signals:
                self._signals.append(self._passed_on)  # the next one is to end, too
            if self._renewing:
                self._execute()
            hopeless = self._count(status)
            if hopeless:
                _log.critical(
                    "%s: the mount is given up; what was acknowledged is in the staging arena, for"
                    " the next mount of this boot",
                    hopeless,
                )
                self._give_up()
                return 1
            if self._failures > 1:
                time.sleep(RETRY_S)

    def _count(self, status: int) -> str:
        """Count a death; returns why there is no use in another server, if there is none."""
        self._failures = 0 if self._serving else self._failures + 1
        if self._failures == FAILURES_MAX:
            return f"{FAILURES_MAX} servers in a row did not come to answer"
        if died_of_fault(status):
            now_s = time.monotonic()
            self._fault_times_s.append(now_s)
            if len(self._fault_times_s) == FAULTS_MAX and now_s - self._fault_times_s[0] < FAULTS_S:
                return f"{FAULTS_MAX} servers within {FAULTS_S} s died of what they did"
        return ""

    def _close_lock(self, lock: str) -> None:
        """Close what a server has unlocked. The first descriptor is that of /dev/fuse.

        By name, since a filesystem that failed tells nothing else of an open file.
        """
        for lock_fd in self._descriptors[1:]:
            if os.readlink(f"/proc/self/fd/{lock_fd}").removesuffix(" (deleted)") == lock:
                self._descriptors.remove(lock_fd)
                os.close(lock_fd)

    def _remove_mount(self) -> None:
        """Leave no mount: the last server died before it told of it, or while it ended it."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._clean_up()

    def _execute(self) -> None:
        """Go on as the program that is installed by now; signals wait until it can take them.

        Returns when that program cannot be executed: another server of this one takes over, for
        which signals wait.
        """
        self._renewing = False
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            self._renew(
                KeeperState(
                    device=self._device,
                    descriptors=tuple(self._descriptors),
                    restarts=self._restarts,
                    started_unix_s=self._started_unix_s,
                    signals=tuple(self._signals),
                )
            )
        except OSError as error:
            _log.error("the installed program cannot be executed (%s): this one goes on", error)

    def _forward(self, number: int, _frame: object) -> None:
        """Pass a signal on: now, or to the server that is about to start."""
        self._signals.append(signal.SIGTERM if number == signal.SIGHUP else number)
        # One that takes over would die of it; the first one is to. Between two there is none.
        if self._pid and (self._serving or not self._descriptors):
            self._pass_signals_on()

    def _pass_signals_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._passed_on = number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _run_server(self, wake_fd: int) -> int:
        """Start a server and wait for its end; returns its exit status, -N for signal N."""
        inherited = None
        if self._descriptors:
            inherited = Inherited(
                self._device,
                self._descriptors[0],
                tuple(self._descriptors[1:]),
                self._restarts,
                died_of_fault(self._last_status),
            )
        keeper_pid = os.getpid()
        self._serving = False
        ours, theirs = self._fork()
        if self._pid == 0:
            ours.close()
            link = KeeperLink(theirs, keeper_pid=keeper_pid, started_unix_s=self._started_unix_s)
            self._be_server(link, inherited)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        theirs.close()
        if not self._restarts:
            self._started()
        pid = self._pid
        with ours:
            status = self._wait(ours, wake_fd)
        if self._renewing:
            _log.info("server %d made room for the program that is installed now", pid)
        elif not self._ending and self._descriptors:
            cause = f"signal {-status}" if status < 0 else f"exit status {status}"
            _log.warning("server %d died (%s): starting another", pid, cause)
        return status

    def _fork(self) -> tuple[socket.socket, socket.socket]:
        """Make a process of a server; returns the keeper's end of their link, and the server's.

        What the system has no room for now it may have later: what has killed the last server, as
        a limit of memory, may keep the next one from starting. Who uses the mount waits.
        """
        has_warned = False
        while True:
            try:
                return self._try_to_fork()
            except OSError as error:
                if not self._descriptors:
                    raise
                if not has_warned:
                    _log.error("no server can be started (%s): trying again", error)
                has_warned = True
                time.sleep(RETRY_S)

    def _try_to_fork(self) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A server's signals are its own from the beginning, and the keeper knows whose they are.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            self._pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            ours.close()
            theirs.close()
            raise
        return ours, theirs

    def _be_server(self, link: KeeperLink, inherited: Inherited | None) -> None:
        """Become a server: never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in FORWARDED:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            # The terminal's Ctrl-C is for the keeper, which passes it on.
            os.setpgid(0, 0)
            status = self._serve(link, inherited)
        finally:
            logging.shutdown()
            os._exit(status)

    def _wait(self, link: socket.socket, wake_fd: int) -> int:
        process_fd = os.pidfd_open(self._pid)
        poll = select.poll()
        for descriptor in (process_fd, link.fileno(), wake_fd):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                ready = {descriptor for descriptor, _ in poll.poll()}
                if wake_fd in ready:
                    os.read(wake_fd, 4096)  # the handlers have run
                if link.fileno() in ready and not self._take_notice(link):
                    poll.unregister(link)
                if process_fd in ready:
                    while self._take_notice(link):
                        pass
                    pid, self._pid = self._pid, 0  # may be another's number from now on
                    _, status = os.waitpid(pid, 0)
                    return os.waitstatus_to_exitcode(status)
        finally:
            os.close(process_fd)

    def _take_notice(self, link: socket.socket) -> bool:
        """Take one message; False when there will be no more."""
        data, descriptors, _, _ = socket.recv_fds(link, _MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
        if not data:
            return False
        message = msgspec.json.decode(data, type=Message)
        match message.notice:
            case Notice.HOLD:
                self._device = message.device or self._device
                self._descriptors += descriptors
            case Notice.RELEASE_LOCK:
                self._close_lock(message.lock)
            case Notice.SERVING:
                self._serving = True
                self._pass_signals_on()
            case Notice.ENDING:
                self._ending = True
            case Notice.RENEWING:
                self._renewing = True
        return True
