"""Nodes as network namespaces, each of which has a link to a switch that can be slow, or cut.

A node's processes have monotonic clocks of their own, too.

Concurrency: one process makes and removes them; any may cut a link.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.processes import run

PORT_OF = "port{}"
"""The switch's end of a node's link."""
UP_LONGER_S = 1_000_000
"""By how much each node is up longer than the one before, by its clocks."""


def why_not() -> str | None:
    """Why there can be no networks here; None: there can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [name for name in ("ip", "tc") if shutil.which(name, path=_PATH) is None]
    return f"iproute2 is not installed ({', '.join(missing)})" if missing else None


_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Slowed(NamedTuple):
    """What came through a link that is slow."""

    bytes: int
    held_back: int
    """How often something waited."""


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

    def slowed(self, node: int) -> Slowed:
        """What came through a link since it is slow."""
        words = ("-n", self._switch, "-j", "-s", "qdisc", "show", "dev", PORT_OF.format(node))
        (found,) = json.loads(run(_found("tc"), *words))
        return Slowed(found["bytes"], found["overlimits"])

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


def enter(made: Network, node: int) -> None:
    """Have the calling process, which has one thread, and what it starts, be on a node."""
    _call("unshare", _CLONE_NEWTIME)
    clocks = f"{UP_LONGER_S * node} 0"
    Path("/proc/self/timens_offsets").write_text(f"monotonic {clocks}\nboottime {clocks}\n")
    for path, kind in (
        (made.namespace(node), _CLONE_NEWNET),
        ("/proc/self/ns/time_for_children", _CLONE_NEWTIME),
    ):
        with open(path, "rb") as namespace:
            _call("setns", namespace.fileno(), kind)


_CLONE_NEWNET = 0x40000000
_CLONE_NEWTIME = 0x00000080


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _ip(*words: str) -> None:
    run(_found("ip"), *words)


def _found(program: str) -> str:
    found = shutil.which(program, path=_PATH)
    assert found is not None
    return found
