"""Which plan a save goes by: the one that was given, the one of the save before, or a new one."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Collection

import numpy as np

from fpfs.client.boxes import Sharding
from fpfs.client.container import Container
from fpfs.client.peers import Peers, named
from fpfs.client.plan import Plan, Records
from fpfs.client.topology import Topology, Writers
from fpfs.core.policy import CHUNK_BYTES_DEFAULT

logger = logging.getLogger(__name__)


class Planning:
    """What one rank plans by.

    Raises TypeError of what is no plan, ValueError of a plan or tensors that are not its group's.
    """

    def __init__(self, container: Container, peers: Peers, plan: Plan | None) -> None:
        check_whole(container, peers.ranks)
        self.records = container.records()
        self._given = plan
        self.digest = b""
        """Of whom and what was given; b"": nothing."""
        if plan is None:
            self._topology = Topology.regular(
                peers.size, numbers=peers.ranks, chunk_bytes=CHUNK_BYTES_DEFAULT
            )
            self._writers: Writers = "replica"
            return
        if not isinstance(plan, Plan):
            raise TypeError(f"plan is a {type(plan).__name__}: make one by Plan.build")
        self._topology, self._writers = plan.topology, plan.writers
        self.digest = hashlib.blake2b(repr((self._topology, self._writers)).encode()).digest()
        if self._topology.ranks != peers.ranks:
            raise ValueError(
                f"the plan is for {named(self._topology.ranks)}, and the group has"
                f" {named(peers.ranks)}: build it of the group's topology"
            )
        if plan.records.digest != self.records.digest:
            logger.warning(
                "the state has changed since it was planned (%d tensors then, %d now): it is"
                " planned anew",
                len(plan.records.sizes),
                len(self.records.sizes),
            )

    def plan(self, records: Records, *, gathers: bool) -> Plan:
        """Return the plan for records as they lie in the file.

        gathers: whether ranks can read each other's memory, and have to.
        """
        given = self._given
        if given is not None and (given.records, given.gathers) == (records, gathers):
            return given
        return _planned(records, self._topology, self._writers, gathers=gathers)

    def holders(self, number: int, *, nearest: int) -> list[int]:
        """Return a rank for each part of a record, by its number; `nearest` of those it has.

        Ranks by their places in the group. What has no bytes is left out.
        """
        sharding = self.records.shardings[self.records.sharding_of[number]]
        return [
            nearest if nearest in members else members[0]
            for members in _members(sharding, self._topology)
        ]


@functools.lru_cache(maxsize=1024)
def _members(sharding: Sharding, topology: Topology) -> list[list[int]]:
    """Who of a group has each part that has bytes."""
    places = {rank: place for place, rank in enumerate(topology.ranks)}
    _, sizes = sharding.boxes()
    return [
        [places[rank] for rank in row if rank in places]
        for row in sharding.holders[sizes.all(axis=1)].tolist()
    ]


@functools.lru_cache(maxsize=4)
def _planned(records: Records, topology: Topology, writers: Writers, *, gathers: bool) -> Plan:
    return Plan(records, topology, writers, gathers=gathers)


def check_whole(container: Container, ranks: Collection[int]) -> None:
    """Raise ValueError of a tensor of which no rank has some part."""
    checked = set()
    for _, sharded in container.sharded:
        sharding = sharded.sharding
        if sharding in checked:
            continue
        checked.add(sharding)
        _, sizes = sharding.boxes()
        is_held = np.isin(sharding.holders, list(ranks)).any(axis=1)
        if not (is_held | (sizes == 0).any(axis=1)).all():
            raise ValueError(
                f"the group's ranks have not all of {sharded.name!r}: it is cut into"
                f" {len(sharding.holders)} parts, and the group must have a rank of each"
            )


__all__ = ["Planning", "check_whole"]
