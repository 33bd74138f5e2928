"""Nodes as network namespaces, each of which has a link to a switch that can be slow, or cut.

Concurrency: one process makes and removes them; any may cut a link.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.processes import run

PORT_OF = "port{}"
"""The switch's end of a node's link."""


def why_not() -> str | None:
    """Why there can be no networks here; None: there can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name, path=_PATH) is None]
    return f"iproute2 is not installed ({', '.join(missing)})" if missing else None


_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Network(NamedTuple):
    """Nodes, by their numbers. It goes through JSON."""

    name: str
    nodes: int

    def namespace(self, node: int) -> str:
        """Of the node; what runs in it sees its interfaces alone."""
        return f"/run/netns/{self.name}-{node}"

    def address(self, node: int) -> str:
        """Of the node."""
        return f"10.77.0.{node + 1}"

    def cut(self, node: int) -> None:
        """Let nothing come through a node's link any more, which nobody is told of."""
        _ip("-n", self._switch, "link", "set", PORT_OF.format(node), "nomaster")

    def join(self, node: int) -> None:
        """Undo `cut`."""
        _ip("-n", self._switch, "link", "set", PORT_OF.format(node), "master", "switch")

    def slow(self, node: int, *, mbit_per_s: int) -> None:
        """Limit what a node gets."""
        words = ("rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "50ms")
        port = PORT_OF.format(node)
        run(_found("tc"), "-n", self._switch, "qdisc", "add", "dev", port, "root", "tbf", *words)

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"


@contextlib.contextmanager
def network(nodes: int) -> Iterator[Network]:
    """Nodes that see each other, until it is left."""
    made = Network(f"fpfs-{os.getpid()}", nodes)
    with contextlib.ExitStack() as closing:
        for name in ("switch", *map(str, range(nodes))):
            _ip("netns", "add", f"{made.name}-{name}")
            closing.callback(_ip, "netns", "del", f"{made.name}-{name}")
        switch = f"{made.name}-switch"
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for node in range(nodes):
            own, port = f"{made.name}-{node}", PORT_OF.format(node)
            peer = ("peer", "name", port, "netns", switch)
            _ip("link", "add", "eth0", "netns", own, "type", "veth", *peer)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", own, "addr", "add", f"{made.address(node)}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")
            _ip("-n", own, "link", "set", "lo", "up")
        yield made


def enter(namespace: str) -> None:
    """Have the calling thread, and what it starts, be in a network namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if library.setns(fd, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(fd)


_CLONE_NEWNET = 0x40000000


def _ip(*words: str) -> None:
    run(_found("ip"), *words)


def _found(program: str) -> str:
    found = shutil.which(program, path=_PATH)
    assert found is not None
    return found
