"""Connections between ranks, and a store of torch.distributed that does not answer."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from fpfs.client import store
from fpfs.client.shares import network
from fpfs.client.shares.network import Address, Listener
from fpfs.client.store import Store
from tests.support.processes import python_child
from tests.support.servers import stop
from tests.support.waiting import wait_until

LIMIT_S = 0.5


def echo(connection: socket.socket) -> None:
    """Send what comes back, byte by byte."""
    while content := connection.recv(1):
        connection.sendall(content)


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None] = echo) -> Iterator[Listener]:
    made = Listener(serve, dist.HashStore())
    try:
        yield made
    finally:
        made.close()


def replaced(address: Address, **changes: Any) -> Address:
    """The address but for some fields."""
    fields = {name: getattr(address, name) for name in address.__struct_fields__}
    return Address(**{**fields, **changes})


def threads() -> list[str]:
    """Of connections and stores; what tests before have closed may still end others."""
    ours = ("fpfs-accept", "fpfs-answer", "fpfs-ask", "fpfs-store")
    return [each.name for each in threading.enumerate() if each.name.startswith(ours)]


def test_connections_end_with_who_listens() -> None:
    with listening() as listener:
        connections = [network.connect(listener.address) for _ in range(3)]
        for number, connection in enumerate(connections):
            connection.sendall(bytes([number]))
            assert connection.recv(1) == bytes([number])
    for connection in connections:
        with connection:
            assert connection.recv(1) == b""
    assert threads() == []
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: .*Connection refused"):
        network.connect(listener.address)


def test_each_end_must_say_its_secret(caplog: pytest.LogCaptureFixture) -> None:
    served = []
    with listening(served.append) as listener:
        stranger = replaced(listener.address, asks=bytes(16), hosts=["127.0.0.1"])
        with pytest.raises(ConnectionError, match="the other end is closed"):
            network.connect(stranger)
        wait_until(lambda: "a stranger has connected: " in caplog.text)
        assert not served
        # Another process may have the port at an address that several machines have.
        other = replaced(listener.address, answers=bytes(16), hosts=["127.0.0.1"])
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1: another process listens there"):
            network.connect(other)
        # The next address is tried then.
        several = replaced(listener.address, hosts=["240.0.0.1", "127.0.0.1"])
        network.connect(several).close()


def test_a_process_that_says_nothing_does_not_hold_who_listens() -> None:
    with listening() as listener:
        silent = [socket.create_connection(("127.0.0.1", listener.address.port)) for _ in range(4)]
        with network.connect(listener.address) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
    for each in silent:
        each.close()
    assert threads() == []


def test_a_stranger_holds_who_listens_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that says a byte now and then; and one line says that there are such."""
    monkeypatch.setattr(network, "CONNECT_S", 0.3)
    monkeypatch.setattr(network, "LOOK_S", 0.01)
    with listening() as listener:
        place = ("127.0.0.1", listener.address.port)
        with socket.create_connection(place) as trickling:
            trickling.settimeout(0.05)
            with contextlib.suppress(ConnectionError):
                for _ in range(network.SECRET_BYTES - 1):
                    trickling.sendall(b"x")
                    try:
                        assert trickling.recv(1) == b""
                        break
                    except TimeoutError:
                        pass
                else:
                    trickling.settimeout(60)
                    assert trickling.recv(1) == b""
        for _ in range(3):
            # It may have waited long enough before it hears a word.
            with socket.create_connection(place) as stranger, contextlib.suppress(ConnectionError):
                stranger.sendall(bytes(network.SECRET_BYTES))
                assert stranger.recv(1) == b""
    assert caplog.text.count("a stranger has connected") == 1


class Silent:
    """A process that listens and says nothing, or does not even accept."""

    def __init__(self, *, accepts: bool) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=0 if not accepts else 8)
        self.place = self._socket.getsockname()
        # One is accepted by the kernel; it does not answer the next.
        self._before = [] if accepts else [socket.create_connection(self.place)]

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._socket, *self._before):
            each.close()

    def accept(self) -> socket.socket:
        connection, _ = self._socket.accept()
        return connection


@pytest.mark.parametrize("accepts", [True, False])
def test_who_connects_can_be_interrupted(monkeypatch: pytest.MonkeyPatch, accepts: bool) -> None:
    monkeypatch.setattr(network, "LOOK_S", 0.01)
    with Silent(accepts=accepts) as silent:
        looks = 0

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks == 4:
                raise GivenUpError

        with pytest.raises(GivenUpError):
            network.connect(Address(["127.0.0.1"], silent.place[1], b"asks", b""), look=look)


def test_who_is_held_up_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CONNECT_S", 0.05)
    monkeypatch.setattr(network, "LOOK_S", 0.01)
    address = Address(["127.0.0.1"], 0, os.urandom(16), os.urandom(16))
    tries = 0
    connect = network._connect

    def count(host: str, *arguments: Any) -> socket.socket:
        nonlocal tries
        tries += host == "127.0.0.1"
        if tries == 3:
            monkeypatch.setattr(network, "CONNECT_S", 60.0)
        return connect(host, *arguments)

    monkeypatch.setattr(network, "_connect", count)
    with Silent(accepts=True) as silent:

        def answer_the_third() -> None:
            for number in range(3):
                with silent.accept() as connection:
                    assert connection.recv(16) == address.asks
                    if number == 2:
                        connection.sendall(address.answers)
                    # Until who asks has gone.
                    assert connection.recv(1) == b""

        thread = threading.Thread(target=answer_the_third)
        thread.start()
        # What refuses does not end the trying.
        found = replaced(address, hosts=["240.0.0.1", "127.0.0.1"], port=silent.place[1])
        network.connect(found).close()
        thread.join()


def test_what_this_process_lacks_is_its_own_error() -> None:
    """It is not the other rank that cannot be reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening() as listener:
        next_one = os.dup(0)
        os.close(next_one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
        try:
            with pytest.raises(OSError, match="Too many open files") as failure:
                network.connect(listener.address)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failure.value.errno == errno.EMFILE


def test_a_connection_that_has_gone_again_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = socket.socket.accept
    failures = [errno.ECONNABORTED, errno.EMFILE]

    def fail_at_first(listening: socket.socket) -> Any:
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    with listening() as listener:
        network.connect(listener.address).close()
    assert not failures


def test_a_connection_without_a_thread_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as listener:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", without_threads)
            with pytest.raises(ConnectionError, match="the other end is closed|reset by peer"):
                network.connect(listener.address)
        network.connect(listener.address).close()
    assert threads() == []


def without_threads(self: threading.Thread) -> None:
    """As Thread.start where a process may have no more."""
    raise RuntimeError("can't start new thread")


class GivenUpError(Exception):
    """What who waits is told."""


def give_up() -> None:
    raise GivenUpError


def test_who_waits_for_another_can_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LOOK_S", 0.01)
    with pytest.raises(GivenUpError):
        network.connect(Address(["240.0.0.1"], 1, b"", b""), look=give_up)
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(0.01)
        idle = iter([None, None, GivenUpError])

        def look() -> None:
            if next(idle) is GivenUpError:
                raise GivenUpError

        with pytest.raises(GivenUpError):
            network.receive(near, memoryview(bytearray(1)), idle=look)

        # Also while bytes come.
        def come() -> None:
            with contextlib.suppress(OSError):  # who receives has given up
                while True:
                    far.sendall(b"x")

        coming = threading.Thread(target=come)
        coming.start()
        # Only as much of it is memory as comes.
        with mmap.mmap(-1, 1 << 30) as room, pytest.raises(GivenUpError):
            network.receive(near, memoryview(room), idle=give_up)
        near.shutdown(socket.SHUT_RDWR)
        coming.join()
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(0.01)
        # Until it has said so, what is sent is sent in as many parts as there is room for.
        message = os.urandom(4 * 1024 * 1024)
        received = bytearray()

        def take_some() -> None:
            received.extend(far.recv(1 << 20))

        network.send(near, memoryview(message), idle=take_some)
        near.close()
        while content := far.recv(1 << 20):
            received += content
        assert received == message


def test_interfaces_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(network.INTERFACES, "lo")
    with listening() as listener:
        assert listener.address.hosts[0] == "127.0.0.1"
        assert set(listener.address.hosts) <= {"127.0.0.1", "::1"}
        network.connect(listener.address).close()
    monkeypatch.setenv(network.INTERFACES, "none0,none1")
    with pytest.raises(OSError, match=r"GLOO_SOCKET_IFNAME names none0,none1, which have no addre"):
        Listener(echo, dist.HashStore())
    assert threads() == []


_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_that_hangs_or_ends() -> None:
    with python_child(_SERVER) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        raw = dist.TCPStore("127.0.0.1", port, None, False)
        found = Store(raw, prefix="test", timeout_s=60.0)
        found.open()
        found.set("key", b"value")
        assert (found.check(["key"]), found.check(["key", "other"])) == (True, False)
        assert found.get("key") == b"value"
        found.set("binary", bytes(range(256)))
        assert [found.find(key) for key in ("key", "none", "binary")] == [
            b"value",
            None,
            bytes(range(256)),
        ]
        assert not found.check(["none"])
        assert [found.add("number", amount) for amount in (1, 0, 2)] == [1, 1, 3]
        found.delete_key("key")
        assert not found.check(["key"])
        found.close()
        assert threads() == []

        hanging = Store(raw, prefix="test", timeout_s=LIMIT_S)
        hanging.open()
        stop(server.pid)
        with pytest.raises(dist.DistError, match=r"it has not answered for 0 s|for 1 s"):
            hanging.check(["key"])
        with pytest.raises(dist.DistError):
            hanging.set("key", b"value")
        hanging.close()
        os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: threads() == [])

        ended = Store(raw, prefix="test", timeout_s=60.0)
        ended.open()
        server.kill()
        server.wait()
        with pytest.raises(dist.DistError):
            ended.check(["key"])
        ended.close()
        assert threads() == []


def test_who_is_interrupted_leaves_the_store_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way is nobody's answer."""

    class Interrupted(store._Call):
        def __init__(self, function: Callable[[], Any]) -> None:
            super().__init__(function)
            monkeypatch.undo()
            self.is_done = self  # type: ignore[assignment]

        def acquire(self, timeout: float) -> bool:
            raise KeyboardInterrupt

        def release(self) -> None:
            pass

    opened = Store(dist.HashStore(), prefix="test", timeout_s=60.0)
    opened.open()
    opened.set("key", b"value")
    monkeypatch.setattr(store, "_Call", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened.add("number", 7)
    assert opened.get("key") == b"value"
    assert opened.add("number", 1) == 8
    opened.close()
