"""The server's connection to its keeper, which holds what must outlive the server.

Concurrency: trio thread; messages are small, and the keeper reads them at once.
"""

from __future__ import annotations

import contextlib
import enum
import socket
from collections.abc import Sequence

import msgspec

DESCRIPTORS_MAX = 253
"""What one message over a Unix socket can carry (SCM_MAX_FD)."""


class Notice(enum.StrEnum):
    """What a server tells its keeper.

    Here is what to hold; locks need not be held any more; requests are answered; it ends; it leaves
    its place to the program that is installed by now.
    """

    HOLD = "hold"
    RELEASE_LOCK = "let go"
    SERVING = "serving"
    ENDING = "ending"
    RENEWING = "renewing"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message; descriptors come beside it. `device` is the mount's ``major:minor``.

    `lock` is the path of a device's.
    """

    notice: Notice
    device: str = ""
    lock: str = ""


class KeeperLink:
    """The server's end of its connection to the keeper.

    A keeper that is gone is not told of the mount, nor of its end: who watches the connection ends
    the mount.
    """

    def __init__(self, link: socket.socket, *, keeper_pid: int, started_unix_s: float) -> None:
        """Take the socket over; the first server was started at `started_unix_s`."""
        self._socket = link
        self.keeper_pid = keeper_pid
        self.started_unix_s = started_unix_s

    def fileno(self) -> int:
        """The descriptor, which becomes readable when the keeper is gone."""
        return self._socket.fileno()

    def hold(self, *, device: str, fuse_fd: int, lock_fds: Sequence[int]) -> None:
        """Give the keeper its own hold of what must not be closed."""
        descriptors = [fuse_fd, *lock_fds]
        message = msgspec.json.encode(Message(notice=Notice.HOLD, device=device))
        for first in range(0, len(descriptors), DESCRIPTORS_MAX):
            now = descriptors[first : first + DESCRIPTORS_MAX]
            with contextlib.suppress(ConnectionError):
                socket.send_fds(self._socket, [message], now)

    def hold_lock(self, lock_fd: int) -> None:
        """Give the keeper its own hold of the lock of a device that is being added."""
        message = msgspec.json.encode(Message(notice=Notice.HOLD))
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._socket, [message], [lock_fd])

    def release_lock(self, lock: str) -> None:
        """Have the keeper close the lock of a device, whose path is `lock`."""
        with contextlib.suppress(ConnectionError):
            self._socket.send(msgspec.json.encode(Message(notice=Notice.RELEASE_LOCK, lock=lock)))

    def serving(self) -> None:
        """Tell the keeper that this server has come so far that it answers."""
        self._tell(Notice.SERVING)

    def renewing(self) -> None:
        """Tell the keeper that this server makes room for the program that is installed by now.

        Raises ConnectionError when it is gone: nobody would execute that.
        """
        self._socket.send(msgspec.json.encode(Message(notice=Notice.RENEWING)))

    def ending(self) -> None:
        """Tell the keeper that this server ends in good order and needs no successor."""
        self._tell(Notice.ENDING)

    def _tell(self, notice: Notice) -> None:
        with contextlib.suppress(ConnectionError):
            self._socket.send(msgspec.json.encode(Message(notice=notice)))
