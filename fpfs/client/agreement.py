"""How all ranks come to the same file, and know who writes what of it, before one writes."""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from fpfs.client.container import Container, Layout
from fpfs.client.gathering import Offered, can_gather
from fpfs.client.peers import Peers, Process, RankFailed, named
from fpfs.client.plan import Plan, Records
from fpfs.client.planning import Planning
from fpfs.core.units import format_size

SLICES = 64
"""Of tensors, at most, that a rank has digests of."""


class LayOut(Protocol):
    """What lays a file out: `lay_out`, or another format's."""

    def __call__(self, state: Any, *, whole: bool) -> Container:
        """As `lay_out`."""


class Agreed(NamedTuple):
    """What a rank knows then."""

    container: Container
    planning: Planning
    plan: Plan
    offered: Offered


class _Offer(msgspec.Struct):
    """What a rank comes with."""

    path: bytes
    tensors: int
    bytes_of_storages: int
    records: bytes
    """Their digest."""
    slices: list[bytes]
    """Digests of some tensors after the other, by which it is told where two ranks differ."""
    lies: bytes
    """Digest of how the tensors lie in memory: rank 0's file says it of all."""
    lie_slices: list[bytes]
    """As `slices`."""
    shardings: list[str]
    """Of the first tensor that is sharded in each way: name, placements and ranks."""
    layout: str
    """Its digest: what is no tensor may be longer on one rank, and move all."""
    plan: bytes
    """Of whom and what was given as a plan."""
    process: Process
    addresses: dict[int, int]
    """`Offered.addresses`."""


class _Answer(msgspec.Struct):
    """What a rank learns from all offers."""

    gathers: bool
    """Whether ranks can read each other's memory, and have to."""
    layout: Layout | None
    """How the file is laid out; None: as this rank has laid it out."""


def agree(
    peers: Peers,
    state: Any,
    plan: Plan | None,
    lay_out: LayOut,
    *,
    path: str = "",
    gathers: bool = True,
) -> Agreed:
    """Lay out a file, make sure that all ranks save the same, and know who writes what.

    path: the same on all ranks. gathers: whether ranks may read each other's memory.
    """
    container = lay_out(state, whole=peers.is_group)
    planning = Planning(container, peers, plan)
    offered = Offered(container, None if gathers else ())
    offer = _Offer(
        path=os.fsencode(path),
        tensors=len(container.tensors),
        bytes_of_storages=int(planning.records.sizes.sum()),
        records=planning.records.digest,
        slices=_slices(container.tensors),
        lies=hashlib.blake2b(repr(container.lies).encode()).digest(),
        lie_slices=_slices(container.lies),
        shardings=_shardings(container, planning.records),
        layout=container.layout_digest(),
        plan=planning.digest,
        process=Process.own(),
        addresses=offered.addresses,
    )

    def answer(offers: list[_Offer]) -> list[_Answer]:
        _compare(offers, container.tensors)
        gathers = can_gather(
            [offer.process for offer in offers], [offer.addresses for offer in offers]
        )
        layout = None
        if any(offer.layout != offers[0].layout for offer in offers):
            layout = container.layout()
        return [
            _Answer(gathers, None if offer.layout == offers[0].layout else layout)
            for offer in offers
        ]

    answered = peers.exchange("offer", offer, answer, of=_Answer)
    records = planning.records
    if answered.layout is not None:
        container = container.laid_out_as(answered.layout)
        records = container.records()
    chosen = planning.plan(records, gathers=answered.gathers)
    return Agreed(container, planning, chosen, offered)


def _compare(offers: list[_Offer], tensors: list[str]) -> None:
    """Raise RankFailed of a rank that saves something else than rank 0, whose `tensors` are."""
    for rank, offer in enumerate(offers):
        if offer.path != offers[0].path:
            path, own = os.fsdecode(offer.path), os.fsdecode(offers[0].path)
            raise RankFailed(
                rank,
                f"saves to {path!r}, and rank 0 to {own!r}: a group saves one file; for a file of"
                " each rank, give group=fpfs.ALONE",
            )
        if offer.plan != offers[0].plan:
            raise RankFailed(
                rank,
                "was given another plan than rank 0: all ranks save by plans of the same topology"
                " and writers, or none",
            )
        if offer.slices == offers[0].slices:
            _compare_shardings(rank, offer.shardings, offers[0].shardings)
        if offer.records != offers[0].records:
            raise RankFailed(
                rank,
                f"saves {_described(offer)}, and rank 0 {_described(offers[0])}"
                f"{_where_they_differ(offer, offers[0], tensors)}: all ranks save tensors of the"
                " same names, types and shapes, in the same order, sharded alike",
            )
        if offer.lies != offers[0].lies:
            raise RankFailed(rank, _lying_otherwise(offer, offers[0], tensors))


def _compare_shardings(rank: int, own: list[str], first: list[str]) -> None:
    for mine, its in itertools.zip_longest(own, first, fillvalue="none in this way"):
        if mine != its:
            raise RankFailed(
                rank,
                f"has {mine}, and rank 0 has {its}: all ranks shard a tensor alike, over one"
                " DeviceMesh or over slices of one",
            )


def _shardings(container: Container, records: Records) -> list[str]:
    found: dict[tuple[object, ...], str] = {}
    for index, sharding in enumerate(records.shardings):
        mesh, cuts = sharding.mesh, sharding.cuts
        if (mesh, cuts) not in found:
            sharded = container.record(int(np.argmax(records.sharding_of == index))).sharded
            assert sharded is not None
            placements = ["Replicate()"] * len(mesh.shape)
            for mesh_dim, dim in cuts:
                placements[mesh_dim] = f"Shard({dim})"
            found[mesh, cuts] = (
                f"{sharded.name!r} as {', '.join(placements)} on a mesh of shape"
                f" {mesh.shape} with {named(mesh.ranks)}"
            )
    return list(found.values())


def _slice_length(count: int) -> int:
    """Of so many tensors: a power of two, so that ranks with some more or less have the same."""
    return 1 << max(0, (count - 1) // SLICES).bit_length()


def _slices(tensors: list[str]) -> list[bytes]:
    length = _slice_length(len(tensors))
    parts = (tensors[start : start + length] for start in range(0, len(tensors), length))
    return [
        hashlib.blake2b(repr(part).encode(errors="surrogatepass"), digest_size=4).digest()
        for part in parts
    ]


def _where_they_differ(offer: _Offer, first: _Offer, tensors: list[str]) -> str:
    if _slice_length(offer.tensors) != _slice_length(first.tensors):
        return ""
    found = _differing(offer.slices, first.slices, tensors)
    if len(found) == 1:
        return f", whose {found[0]!r} it has not"
    return f", of whose {len(found)} tensors {_from_to(found)} it has others" if found else ""


def _lying_otherwise(offer: _Offer, first: _Offer, tensors: list[str]) -> str:
    found = _differing(offer.lie_slices, first.lie_slices, tensors) or tensors
    if len(found) == 1:
        what = f"saves {found[0]!r}, which lies"
    else:
        what = f"saves {len(found)} tensors {_from_to(found)}, of which some lie"
    return (
        f"{what} in memory otherwise than rank 0's (strides, offset, storage or conj bit): all"
        " ranks save tensors that lie alike, as resolve_conj() and"
        " clone(memory_format=torch.contiguous_format) make them"
    )


def _differing(slices: list[bytes], first: list[bytes], tensors: list[str]) -> list[str]:
    """Return the first slice of rank 0's `tensors` that is another one."""
    pairs = zip(first, slices, strict=False)
    number = next((number for number, (own, other) in enumerate(pairs) if own != other), None)
    if number is None:
        return []
    length = _slice_length(len(tensors))
    return tensors[number * length : (number + 1) * length]


def _from_to(tensors: list[str]) -> str:
    return f"from {tensors[0]!r} to {tensors[-1]!r}"


def _described(offer: _Offer) -> str:
    plural = "s" * (offer.tensors != 1)
    return f"{offer.tensors} tensor{plural} in {format_size(offer.bytes_of_storages)}"


__all__ = ["Agreed", "LayOut", "agree"]
