"""The control protocol: JSON lines over a Unix socket, and the client that speaks it.

A connection carries requests and replies in turn, one line each. Both carry the protocol's version,
so that a tool and a server of different versions can tell each other so. The socket is found from
the mountpoint: its name is the mount's device number, which mountinfo shows.

Concurrency: a `ControlClient` belongs to one thread; its calls block.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import math
import os
import re
import select
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import msgspec

from fpfs.core.mounts import MountEntry, mount_at, mount_containing
from fpfs.core.protocol.questions import PROTOCOL_VERSION, Answer, Question, WaitDurable
from fpfs.core.protocol.reports import Flushed
from fpfs.core.refusal import Refused, refuse_empty

LINE_BYTES_MAX = 16 * 1024 * 1024
"""A longer line is refused: nothing that is told is as large."""


SERVERS_MAX = 5
"""Servers that may end while they work on one request."""


class Reply(msgspec.Struct, kw_only=True, frozen=True):
    """One line from the server: `error` in words, or a `result`, which the question defines.

    `remedy` says what to do about an error, where the server knows.
    """

    error: str = ""
    remedy: str = ""
    result: msgspec.Raw = msgspec.Raw(b"null")
    version: int = PROTOCOL_VERSION


RESTART_S = 30
"""How long a client waits for a server that is being replaced."""

CONNECT_AGAIN_S = 0.05

TIMEOUT_S_MIN = 0.001
"""A socket with a timeout of 0 does not wait at all, nor say that it timed out."""


def socket_path(device: str, *, folder: str, pid: int) -> str:
    """The socket of the mount ``major:minor`` with the keeper `pid` in a runtime folder.

    The kernel gives a device number to the next mount while the server of the last one still
    drains, so the number alone would not do. A socket is as old as its mount, whichever server made
    it: the newest one of a number is that of the mount which has it now.
    """
    return os.path.join(folder, f"{device.replace(':', '-')}.{pid}.sock")


def keeper_runs(path: str) -> bool:
    """Whether the keeper of the mount with this socket lives, so that there is a server, or will
    be one."""
    return _runs(_keeper_pid(path))


def keeper_of(entry: MountEntry) -> int:
    """The living keeper of a mount, also of one whose socket's path is gone; 0 where none is seen.

    One that had the mount's device number before, and still drains, looks the same.
    """
    paths = _bound_paths(entry.device)
    known = _find_socket(entry)
    keepers = (_keeper_pid(path) for path in ([*paths, known] if known else paths))
    return next((pid for pid in keepers if _runs(pid)), 0)


def outcome_path(path: str) -> str:
    """Where the last server that listens on the socket `path` leaves what its end came to."""
    return f"{path.removesuffix('.sock')}.ended"


def _read_outcome(path: str, *, owner_uid: int) -> Flushed | None:
    """What the end of a mount came to, as its last server left it; None where it left nothing.

    Anybody can make a folder in /tmp: only the mount's owner, or root, is believed.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(outcome_path(path), flags), "rb") as stream:
            is_theirs = os.fstat(stream.fileno()).st_uid in (0, owner_uid)
            return msgspec.json.decode(stream.read(), type=Flushed) if is_theirs else None
    except (FileNotFoundError, PermissionError):
        return None


def reply_at_end(question: Question[Any], final: Flushed) -> Reply:
    """What the end left; who waits for one file is not told of others.

    Which files were below a directory nobody can tell any more: who waited for one is told of all.
    """
    if isinstance(question, WaitDurable) and not question.below:
        for failure in final.failures:
            if failure.ino in (0, question.ino):
                return Reply(error=failure.message)
        final = Flushed()
    return Reply(result=msgspec.Raw(msgspec.json.encode(final)))


def _bound_paths(device: str) -> list[str]:
    """Sockets of such names that are bound in folders which only their user's environment names."""
    pattern = re.compile(rf"(/.*/{device.replace(':', '-')}\.\d+\.sock)(?:\.new)?$")
    text = os.fsdecode(Path("/proc/net/unix").read_bytes())
    found = (pattern.search(line) for line in text.split("\n"))
    return sorted({match[1] for match in found if match})


def _find_socket(entry: MountEntry) -> str | None:
    """Where the server of a mount listens, and the one after it will; None where it is not known.

    Anybody can make a folder in /tmp: only the mount's owner, or root, is believed.
    """
    name = f"{entry.device.replace(':', '-')}.*.sock"
    paths = set(_bound_paths(entry.device))
    for folder in runtime_folders(entry.owner_uid):
        paths.update(glob.glob(os.path.join(glob.escape(folder), name)))
    born_ns: dict[str, int] = {}
    for path in paths:
        try:
            found = os.stat(path)
        except PermissionError:
            born_ns[path] = 0  # who connects is told so
            continue
        except OSError:  # it is gone, or nothing of this mount namespace
            continue
        if found.st_uid in (0, entry.owner_uid):
            born_ns[path] = found.st_mtime_ns
    return max(born_ns, key=born_ns.__getitem__, default=None)


def _keeper_pid(path: str) -> int:
    """The keeper of the mount with this socket, by the number that it has in its own namespace."""
    pid = path.rsplit(".", 2)[1]
    return int(pid) if pid.isdecimal() else 0


def _parent_pid(pid: int) -> int:
    """The parent of a process, 0 when that is gone or cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return int(text.partition("\nPPid:")[2].split(maxsplit=1)[0])


def _wait_for_exit(process_fd: int, timeout_s: float) -> bool:
    """Whether the process of a pidfd ends within a time; true where there is none."""
    if process_fd < 0:
        return True
    ended = select.poll()
    ended.register(process_fd, select.POLLIN)
    return bool(ended.poll(timeout_s * 1000))


def _runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    process_fd = _open_process(pid)
    if process_fd < 0:
        return False
    try:
        return not _wait_for_exit(process_fd, 0)
    finally:
        os.close(process_fd)


def runtime_folders(uid: int) -> list[str]:
    """Folders where a server of user `uid` may have put its socket, the preferred one first."""
    if uid == 0:
        return ["/run/fpfs"]
    folders = [f"/run/user/{uid}/fpfs", f"/tmp/fpfs-{uid}"]
    own = os.environ.get("XDG_RUNTIME_DIR")
    if own and uid == os.getuid():
        folders.insert(0, os.path.join(own, "fpfs"))
    return folders


def find_fpfs(path: str, *, asked: str) -> MountEntry:
    """The fpfs mount that holds `path`. Raises `Refused` when another filesystem does, or none."""
    refuse_empty(path, what="path", asked=asked)
    # The mountpoint itself is found without touching it: its server may hang.
    entry = mount_at(path) or mount_containing(path)
    if not entry.is_fpfs:
        if _is_missing(path):
            raise Refused(
                asked=asked,
                wrong=f"{path} does not exist",
                remedy="findmnt -t fuse.fpfs lists the mounts",
            )
        raise Refused(
            asked=asked,
            wrong=f"{path} is not on an fpfs mount ({entry.filesystem_type} at {entry.mountpoint})",
            remedy="findmnt -t fuse.fpfs lists the mounts",
        )
    return entry


def _is_missing(path: str) -> bool:
    """Whether there is surely nothing at `path`; what cannot be looked at may be there."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


Result = TypeVar("Result")


class TimedOut(Refused, TimeoutError):
    """There was no answer in time."""


class ServerEnded(Refused):
    """The server that was asked ended before it answered; another may take over."""


class ControlClient:
    """A connection to the server of one mount, and to the one after it when that dies."""

    def __init__(self, entry: MountEntry, *, asked: str) -> None:
        """Connect; raises `Refused` when no server of the mount's owner listens, or lets us."""
        self._asked = asked
        self._entry = entry
        self._mountpoint = entry.mountpoint
        self._question: Question[Any] | None = None
        self._path: str | None = None
        """Where the first server listened, and so will the next ones. What else has the mount's
        device number by then is another mount."""
        self._use(self._connect(entry, deadline_s=time.monotonic() + RESTART_S))

    def _use(self, connection: socket.socket) -> None:
        assert self._path is not None
        self._socket = connection
        self._lines = connection.makefile("rb")
        server_pid, keeper_pid = peer(connection).pid, _keeper_pid(self._path)
        self._server_fd = _open_process(server_pid)
        # One of another pid namespace has another number here.
        is_seen = _parent_pid(server_pid) == keeper_pid
        self._keeper_fd = _open_process(keeper_pid if is_seen else 0)

    def _connect(self, entry: MountEntry, *, deadline_s: float) -> socket.socket:
        """Connect; waits for a server that is being replaced."""
        while True:
            path = self._path or _find_socket(entry)
            connection = path and self._try_connect(entry, path)
            if connection:
                self._path = path
                return connection
            if time.monotonic() > deadline_s or not (path and keeper_runs(path)):
                raise Refused(
                    asked=self._asked,
                    wrong=f"no server of user {entry.owner_uid} answers for {self._mountpoint}",
                    remedy=f"if it died, run fpfs umount {self._mountpoint} and mount again",
                )
            time.sleep(CONNECT_AGAIN_S)

    def _try_connect(self, entry: MountEntry, path: str) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except PermissionError:
            connection.close()
            raise Refused(
                asked=self._asked,
                wrong=f"{self._mountpoint} was mounted by user {entry.owner} and not for others",
                remedy=f"ask as {'' if entry.owner_uid == 0 else f'{entry.owner} or '}root",
            ) from None
        if peer(connection).uid not in (0, entry.owner_uid):
            connection.close()
            return None
        return connection

    def ask(self, question: Question[Answer], *, timeout_s: float | None = None) -> Answer:
        """Send a question and wait for its answer.

        Raises `Refused` with the server's words, on timeout, and when the mount ends without a
        reply. A server that dies is none to give up for: what is `asked_again` the next one is
        asked.
        """
        self.send(question)
        answer: Answer = self.receive(question.answer, timeout_s=timeout_s)
        return answer

    def send(self, question: Question[Any]) -> None:
        """Send a question without waiting; `receive` gets its answer, or learns that it failed."""
        self._question = question
        self._send(question)

    def _send(self, question: Question[Any]) -> None:
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(msgspec.json.encode(question) + b"\n")

    def receive(self, kind: type[Result], *, timeout_s: float | None = None) -> Result:
        """Wait for the result of what was sent. Raises as `ask` does.

        Where the last server ended in good order before it could be asked, what it left answers.
        """
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for _ in range(SERVERS_MAX - 1):
            try:
                return self._receive(kind, timeout_s, deadline_s=deadline_s)
            except ServerEnded:
                if not self._ask_next(deadline_s):
                    reply = self._left_reply()
                    if reply is None:
                        raise
                    return self._result_of(reply, kind)
        return self._receive(kind, timeout_s, deadline_s=deadline_s)

    def _left_reply(self) -> Reply | None:
        """The reply that the end of the mount is to what was asked, if that ended in good order."""
        if self._question is None or not self._question.ended_well or self.is_kept:
            return None
        assert self._path is not None
        final = _read_outcome(self._path, owner_uid=self._entry.owner_uid)
        return None if final is None else reply_at_end(self._question, final)

    @property
    def is_kept(self) -> bool:
        """Whether the mount's keeper runs, so that there is a server, or will be one."""
        return self._path is not None and keeper_runs(self._path)

    def _ask_next(self, deadline_s: float) -> bool:
        """Ask the next server again; False where there is none, or it must not be."""
        if self._question is None or not self._question.asked_again:
            return False
        restart_s = time.monotonic() + RESTART_S
        try:
            connection = self._connect(self._entry, deadline_s=min(deadline_s, restart_s))
        except Refused:
            return False
        self.close()
        self._use(connection)
        self._send(self._question)
        return True

    def _receive(self, kind: type[Result], timeout_s: float | None, *, deadline_s: float) -> Result:
        self._socket.settimeout(
            None if timeout_s is None else max(deadline_s - time.monotonic(), TIMEOUT_S_MIN)
        )
        try:
            line = self._lines.readline(LINE_BYTES_MAX)
        except TimeoutError:
            raise TimedOut(
                asked=self._asked,
                wrong=f"no answer within {timeout_s:g} s",
                remedy="wait longer with --timeout, or see fpfs-ctl status",
            ) from None
        except ConnectionError:
            line = b""
        return self._result(line, kind)

    def _result(self, line: bytes, kind: type[Result]) -> Result:
        if not line.endswith(b"\n"):
            raise ServerEnded(
                asked=self._asked,
                wrong=f"the server of {self._mountpoint} ended without an answer",
                remedy="its log says why",
            )
        return self._result_of(msgspec.json.decode(line, type=Reply), kind)

    def _result_of(self, reply: Reply, kind: type[Result]) -> Result:
        if reply.error:
            raise Refused(
                asked=self._asked,
                wrong=reply.error,
                remedy=reply.remedy or "the server's log may say more",
            )
        return msgspec.json.decode(reply.result, type=kind)

    def wait_for_exit(self, *, timeout_s: float) -> bool:
        """Wait until the server's process is gone; False when it is not within the time.

        True at once where the process cannot be seen (another pid namespace).
        """
        return _wait_for_exit(self._server_fd, timeout_s)

    def wait_for_end(self, *, timeout_s: float) -> bool:
        """Wait until the keeper is gone, too, which holds files on the devices until it is."""
        deadline_s = time.monotonic() + timeout_s
        return self.wait_for_exit(timeout_s=timeout_s) and _wait_for_exit(
            self._keeper_fd, max(deadline_s - time.monotonic(), 0)
        )

    def close(self) -> None:
        """Close the connection."""
        for process_fd in (self._server_fd, self._keeper_fd):
            if process_fd >= 0:
                os.close(process_fd)
        self._server_fd = self._keeper_fd = -1
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> ControlClient:
        """Return the client; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self.close()


class Peer(NamedTuple):
    """Who is at the other end of a socket. `pid` is 0 for a process of another pid namespace.

    `gids` are its group and its supplementary groups, as they were when it connected.
    """

    pid: int
    uid: int
    gids: frozenset[int]


_SO_PEERGROUPS = 59
"""From asm-generic/socket.h; Python does not name it."""

_OPTION_BYTES_MAX = 1024
"""The longest answer that Python's getsockopt(2) takes."""

_GROUPS_MAX = 65_536
"""Supplementary groups that a process can have (the kernel's NGROUPS_MAX)."""


def peer(connection: socket.socket) -> Peer:
    """The process at the other end of a Unix socket, as the kernel knows it."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")
    )
    pid, uid, gid = struct.unpack("iII", credentials)
    return Peer(pid, uid, frozenset((gid, *_peer_groups(connection))))


def _peer_groups(connection: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of the process at the other end."""
    try:
        groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _OPTION_BYTES_MAX)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return _many_peer_groups(connection)
    return struct.unpack(f"{len(groups) // 4}I", groups)


def _many_peer_groups(connection: socket.socket) -> tuple[int, ...]:
    """The same for a process with more groups than Python can ask for."""
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    groups = (ctypes.c_uint32 * _GROUPS_MAX)()
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    place = (connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS)
    if library.getsockopt(*place, groups, ctypes.byref(size)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return tuple(groups[: size.value // 4])


def _open_process(pid: int) -> int:
    """A descriptor of a process, or -1 when it is gone or cannot be seen."""
    if pid == 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
