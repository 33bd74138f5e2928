"""TCP connections between ranks, of which each knows that it leads to the rank that is meant.

Who listens tells the others its addresses and two secrets, through the key-value store of
torch.distributed. Both ends of a connection say one first: so it does not matter that an address
may be another machine's as well (those of bridges and loopbacks are), or that strangers connect.

Concurrency: a `Listener` has a thread that accepts, and one for each connection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from fpfs.core.transfers import count_moved

logger = logging.getLogger(__name__)

INTERFACES = "GLOO_SOCKET_IFNAME"
"""Names the network interfaces that are used, with commas, as it does to torch.distributed."""
ACCEPT_AGAIN_S = 0.05
CONNECT_S = 10.0
"""How long one address is tried at a time."""
LOOK_S = 0.2
"""How often whoever waits looks what became of the others."""
BACKLOG = 1024
SECRET_BYTES = 16
MESSAGE_BYTES_MAX = 4 * 1024 * 1024

_SIOCGIFADDR = 0x8915
_LENGTH = struct.Struct("<I")

T = TypeVar("T")


class Address(msgspec.Struct, array_like=True):
    """Where a rank listens."""

    hosts: list[str]
    """IP addresses, the best one first."""
    port: int
    asks: bytes
    """Said by who connects."""
    answers: bytes
    """Said then by who listens."""


class Listener:
    """Has each connection served by a thread until it is closed. `store`: of the ranks."""

    def __init__(self, serve: Callable[[socket.socket], None], store: dist.Store) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._closed = False
        self._has_warned = False
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        hosts = _own_hosts(store)
        two_families = socket.has_dualstack_ipv6()
        self._socket = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if two_families else socket.AF_INET,
            dualstack_ipv6=two_families,
            backlog=BACKLOG,
        )
        self.address = Address(
            hosts=hosts,
            port=self._socket.getsockname()[1],
            asks=secrets.token_bytes(SECRET_BYTES),
            answers=secrets.token_bytes(SECRET_BYTES),
        )
        self._accepting = threading.Thread(target=self._accept, name="fpfs-accept")
        self._accepting.start()

    def close(self) -> None:
        """End all connections; returns when nobody serves any more."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                shut_down(connection)
        shut_down(self._socket)
        self._accepting.join()
        self._socket.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closed:
                    return
                # Who connected has gone again, or descriptors have run out for now.
                logger.debug("a connection could not be accepted: %s", error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            thread = threading.Thread(target=self._run, args=(connection,), name="fpfs-answer")
            try:
                thread.start()
            except RuntimeError as error:
                logger.debug("a connection cannot be served: %s", error)
                self._end(connection)
                continue
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)

    def _run(self, connection: socket.socket) -> None:
        try:
            if not self._is_asked(connection):
                return
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve(connection)
        except (OSError, EOFError) as error:
            # Whoever needs it asks again, or finds out why not.
            logger.debug("a connection has ended: %s", error)
        finally:
            self._end(connection)

    def _is_asked(self, connection: socket.socket) -> bool:
        """Whether it is one of the ranks that has connected. Both have said their secrets then."""
        deadline_s = time.monotonic() + CONNECT_S

        def idle() -> None:
            if time.monotonic() > deadline_s:
                raise _SilentError

        connection.settimeout(LOOK_S)
        said = bytearray(SECRET_BYTES)
        try:
            receive(connection, memoryview(said), idle=idle)
            if not hmac.compare_digest(said, self.address.asks):
                # Many may: some machines are searched for ports all the time.
                level = logging.DEBUG if self._has_warned else logging.WARNING
                self._has_warned = True
                logger.log(level, "a stranger has connected: %s", connection.getpeername())
                return False
            send(connection, memoryview(self.address.answers), idle=idle)
        except _SilentError:
            logger.debug("who has connected says nothing: %s", connection.getpeername())
            return False
        return True

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()


def connect(address: Address, *, look: Callable[[], object] = lambda: None) -> socket.socket:
    """Return a connection whose timeout is `LOOK_S`.

    look: called every so often; what it raises ends this. An address that is silent is tried until
        then: its process may be held up.

    Raises ConnectionError that says what became of each address if none is silent, and OSError of
    what this process lacks.
    """
    while True:
        failures = []
        for host in address.hosts:
            try:
                return _connect(host, address, look)
            except _SilentError:
                pass
            except (ConnectionError, EOFError) as error:
                failures.append(f"{host}: {error}")
        if len(failures) == len(address.hosts):
            raise ConnectionError("; ".join(failures))


class _SilentError(Exception):
    """Who should have said something has not."""


def _connect(host: str, address: Address, look: Callable[[], object]) -> socket.socket:
    deadline_s = time.monotonic() + CONNECT_S

    def idle() -> None:
        look()
        if time.monotonic() > deadline_s:
            raise _SilentError

    idle()
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connection.setblocking(False)
        number = connection.connect_ex((host, address.port))
        if number == errno.EINPROGRESS:
            connecting = select.poll()
            connecting.register(connection, select.POLLOUT)
            while not connecting.poll(LOOK_S * 1000):
                idle()
            number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number != 0:
            raise ConnectionError(f"[Errno {number}] {os.strerror(number)}")
        connection.settimeout(LOOK_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(connection, memoryview(address.asks), idle=idle)
        said = bytearray(SECRET_BYTES)
        receive(connection, memoryview(said), idle=idle)
        if not hmac.compare_digest(said, address.answers):
            raise ConnectionError("another process listens there")
    except BaseException:
        connection.close()
        raise
    return connection


def shut_down(connection: socket.socket) -> None:
    """End what other threads do with a socket."""
    with contextlib.suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def receive(
    connection: socket.socket, view: memoryview, *, idle: Callable[[], None] | None = None
) -> None:
    """Fill memory. EOFError when the other end is closed.

    idle: called at least every `LOOK_S`, if the socket's timeout is not longer; what it raises ends
        this. None: the timeout is a TimeoutError.
    """
    _move(connection.recv_into, view, idle)


def send(
    connection: socket.socket, view: memoryview, *, idle: Callable[[], None] | None = None
) -> None:
    """Send memory; `idle` and TimeoutError as `receive` has them."""
    _move(connection.send, view, idle)


def _move(
    call: Callable[[memoryview], int], view: memoryview, idle: Callable[[], None] | None
) -> None:
    while view:
        try:
            count = call(view)
        except TimeoutError:
            if idle is None:
                raise
        else:
            if count == 0:
                raise EOFError("the other end is closed")
            count_moved(count)
            view = view[count:]
        # Also while bytes come, which may be few.
        if idle is not None:
            idle()


def send_message(
    connection: socket.socket, message: Any, *, idle: Callable[[], None] | None = None
) -> None:
    """Send a struct; `idle` and errors as `receive` has them."""
    content = msgspec.msgpack.encode(message)
    send(connection, memoryview(_LENGTH.pack(len(content)) + content), idle=idle)


def receive_message(
    connection: socket.socket, kind: type[T], *, idle: Callable[[], None] | None = None
) -> T:
    """Receive a struct; `idle` and errors as `receive` has them. ValueError of what is none."""
    length = bytearray(_LENGTH.size)
    receive(connection, memoryview(length), idle=idle)
    (count,) = _LENGTH.unpack(length)
    if count > MESSAGE_BYTES_MAX:
        raise ValueError(f"a message has {count} bytes")
    content = bytearray(count)
    receive(connection, memoryview(content), idle=idle)
    return msgspec.msgpack.decode(content, type=kind)


def _own_hosts(store: dist.Store) -> list[str]:
    """Return this machine's addresses: the one that the store is reached by, others, loopback."""
    wanted = [name for name in os.environ.get(INTERFACES, "").split(",") if name]
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            if not wanted or name in wanted:
                with contextlib.suppress(OSError):  # it has none
                    request = struct.pack("256s", os.fsencode(name))
                    answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
                    found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6") as file:
        for line in file:
            digits, _, _, scope, _, name = line.split()
            # Those of one link alone mean nothing elsewhere.
            if scope in ("00", "10") and (not wanted or name in wanted):
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    if wanted and not found:
        raise OSError(f"{INTERFACES} names {','.join(wanted)}, which have no addresses")
    best = _local_end(store)
    return sorted(found, key=lambda host: (host != best, host == "::1", host.startswith("127.")))


def _local_end(store: dist.Store) -> str | None:
    """The own address by which the store's machine is reached; None: nobody knows."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    try:
        ((family, kind, _, _, place), *_) = socket.getaddrinfo(
            store.host, store.port, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind) as asking:
            asking.connect(place)  # nothing is sent
            host = str(asking.getsockname()[0])
    except OSError:
        return None
    return None if host == "::1" or host.startswith("127.") else host


__all__ = [
    "Address",
    "Listener",
    "connect",
    "receive",
    "receive_message",
    "send",
    "send_message",
    "shut_down",
]
