"""The ranks of a group, and where they run: what decides which of them write."""

from __future__ import annotations

import collections
import contextlib
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from fpfs.client.paths import resolve
from fpfs.core.mounts import mount_containing
from fpfs.core.policy import CHUNK_BYTES_DEFAULT
from fpfs.core.protocol.reports import Status
from fpfs.core.protocol.whereabouts import status

if TYPE_CHECKING:
    import torch.distributed as dist

    from fpfs.client.peers import Alone

TIMEOUT_S = 300.0
RANKS_MAX = 1 << 20
DEVICES_MAX = 1 << 16
CHUNK_BYTES_MAX = 1 << 40

Writers: TypeAlias = Literal["replica", "socket", "node", "device"]
"""Which of the ranks that have the same bytes write them: all of them, one for each socket, one for
each node, or as many on each node as its mount has devices."""
WRITERS: tuple[Writers, ...] = get_args(Writers)


class Topology(msgspec.Struct, frozen=True):
    """Where the ranks of a group run. All by their place in the group."""

    ranks: tuple[int, ...]
    """Their numbers in the default group, by which device meshes know them."""
    nodes: tuple[int, ...]
    """The number of each one's machine."""
    sockets: tuple[int, ...]
    """The number of each one's socket, on its machine."""
    devices: int = 1
    """Of the storage, as each machine sees it."""
    chunk_bytes: int = CHUNK_BYTES_DEFAULT
    """Of the storage: shares are cut at its multiples in the file."""

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "sockets"):
            # Numbers of other kinds would make the plans of two ranks differ.
            numbers = tuple(operator.index(number) for number in getattr(self, name))
            msgspec.structs.force_setattr(self, name, numbers)
        if not len(self.ranks) == len(self.nodes) == len(self.sockets) > 0:
            raise ValueError(
                f"a topology has a node and a socket for each rank, and one rank at least: not"
                f" {len(self.ranks)} ranks, {len(self.nodes)} nodes and {len(self.sockets)} sockets"
            )
        if len(set(self.ranks)) < len(self.ranks) or min(self.ranks) < 0:
            raise ValueError("the ranks of a topology are different numbers from 0 on")
        for name, most in (("devices", DEVICES_MAX), ("chunk_bytes", CHUNK_BYTES_MAX)):
            number = operator.index(getattr(self, name))
            if not 1 <= number <= most:
                raise ValueError(f"{name} of a topology is from 1 to {most}, not {number}")

    @staticmethod
    def of(
        path: str | bytes | os.PathLike[Any] | None = None,
        *,
        group: dist.ProcessGroup | Alone | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Topology:
        """Return the topology of a group, all of whose ranks call this.

        path: where it will save; on a mount of fpfs the topology has its devices and chunks.
        group, timeout_s: as `fpfs.save` has them, and raises RankFailed as that does; of `path`
            TypeError, ValueError, and `Refused` (`TimedOut`) if the mount's server does not tell.
        """
        from fpfs.client.peers import peers_of

        with peers_of(group, timeout_s=timeout_s, call="Topology.of") as peers:
            mine = _Site.own(path)

            def answer(sites: list[_Site]) -> list[Topology]:
                return [_joined(sites, peers.ranks)] * len(sites)

            return peers.exchange("topology", mine, answer, of=Topology)

    @staticmethod
    def regular(
        ranks: int,
        *,
        ranks_per_node: int | None = None,
        sockets_per_node: int = 1,
        devices: int = 1,
        chunk_bytes: int = CHUNK_BYTES_DEFAULT,
        numbers: Sequence[int] | None = None,
    ) -> Topology:
        """Return one of machines that are all the same, filled by rank.

        ranks_per_node: None: all ranks are on one. numbers: `ranks`; None: counted from 0.
        """
        on_each = ranks if ranks_per_node is None else ranks_per_node
        for what, count in (
            ("ranks", ranks),
            ("ranks_per_node", on_each),
            ("sockets_per_node", sockets_per_node),
        ):
            if not 1 <= operator.index(count) <= RANKS_MAX:
                raise ValueError(f"{what} of a topology is from 1 to {RANKS_MAX}, not {count}")
        return Topology(
            ranks=tuple(range(ranks) if numbers is None else numbers),
            nodes=tuple(rank // on_each for rank in range(ranks)),
            sockets=tuple(rank % on_each * sockets_per_node // on_each for rank in range(ranks)),
            devices=devices,
            chunk_bytes=chunk_bytes,
        )

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks are on one machine, and several."""
        return len(self.ranks) > 1 and len(set(self.nodes)) == 1

    def writing(self, members: Sequence[int], writers: Writers) -> list[int]:
        """Return those of `members`, who have the same bytes, that write them."""
        if writers == "replica":
            return list(members)
        places: dict[tuple[int, ...], list[int]] = {}
        for rank in members:
            socket = (self.sockets[rank],) if writers == "socket" else ()
            places.setdefault((self.nodes[rank], *socket), []).append(rank)
        of_each = self.devices if writers == "device" else 1
        found = []
        for ranks in places.values():
            count = min(of_each, len(ranks))
            found += [ranks[number * len(ranks) // count] for number in range(count)]
        return sorted(found)


class _Site(msgspec.Struct):
    """What a rank knows of where it is."""

    machine: str
    sockets: list[int]
    """On whose processors it may run."""
    devices: int
    chunk_bytes: int

    @staticmethod
    def own(path: str | bytes | os.PathLike[Any] | None) -> _Site:
        from fpfs.client.peers import Process

        devices, chunk_bytes = 1, CHUNK_BYTES_DEFAULT
        if path is not None:
            entry = mount_containing(resolve(path))
            if entry.is_fpfs:
                mount = status(entry.mountpoint)
                assert isinstance(mount, Status)
                devices, chunk_bytes = len(mount.devices), mount.chunk_bytes
        return _Site(Process.own().kernel, own_sockets(), devices, chunk_bytes)


def own_sockets(sysfs: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return the sockets on whose processors this process may run, by the kernel's numbers.

    One, where the kernel does not tell, as in some sandboxes.
    """
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for cpu in os.sched_getaffinity(0):
            found.add(int((sysfs / f"cpu{cpu}/topology/physical_package_id").read_text()))
    return sorted(found) or [0]


def _joined(sites: Sequence[_Site], ranks: Sequence[int]) -> Topology:
    numbers: dict[str, int] = {}
    nodes = [numbers.setdefault(site.machine, len(numbers)) for site in sites]
    totals = collections.Counter(nodes)
    before = collections.Counter[int]()
    sockets = []
    for node, site in zip(nodes, sites, strict=True):
        # Ranks that may run on several are spread over these, in their order.
        sockets.append(site.sockets[before[node] * len(site.sockets) // totals[node]])
        before[node] += 1
    return Topology(
        ranks=tuple(ranks),
        nodes=tuple(nodes),
        sockets=tuple(sockets),
        devices=sites[0].devices,
        chunk_bytes=sites[0].chunk_bytes,
    )


__all__ = ["WRITERS", "Topology", "Writers", "own_sockets"]
