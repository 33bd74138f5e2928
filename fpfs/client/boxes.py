"""Parts of tensors as boxes: where they belong in the whole, and which ranks have which.

A part is a box, as the placements of a DTensor make it. In the file lies the whole, as an ordinary
tensor in the order of its elements, so a box is runs of bytes at equal distances. Any rank can tell
each other's boxes, since all know the tensor's shape, its mesh and how that cuts it.

Nothing here needs torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class Box(msgspec.Struct, array_like=True, frozen=True):
    """A part of a tensor: where it begins in each dimension, and its shape. In elements."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    def is_within(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of `shape` has all of it."""
        if not len(self.offsets) == len(self.shape) == len(shape):
            return False
        spans = zip(self.offsets, self.shape, shape, strict=True)
        return all(0 <= at <= at + count <= size for at, count, size in spans)


NOTHING = Box((0,), (0,))
"""What a rank has that is not in the tensor's mesh."""


class Runs(msgspec.Struct, frozen=True):
    """Bytes of a tensor in `count` runs of `bytes` each; the part has them in one piece."""

    offset: int
    """Of the first run in the whole."""
    bytes: int
    count: int
    step: int
    """From the begin of one run to the begin of the next, in the whole."""
    start: int
    """Of the first run in the part."""


def _spans(box: Box, shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Begin, length and size of the dimensions, of which the box has a part, from outer to inner.

    A dimension of which the box has all is one with the dimension before it.
    """
    spans = [(0, 1, 1)]
    for offset, count, size in zip(box.offsets, box.shape, shape, strict=True):
        if count == size:
            spans[-1] = (spans[-1][0] * size, spans[-1][1] * size, spans[-1][2] * size)
        else:
            spans.append((offset, count, size))
    return spans


def runs_of(box: Box, shape: Sequence[int], itemsize: int) -> list[Runs]:
    """The bytes of a box that has elements, in order, where the whole has `shape`."""
    spans = _spans(box, shape)
    *outer, (first, length, step) = spans
    strides = [math.prod(size for _, _, size in spans[dim + 1 :]) for dim in range(len(outer))]
    base = first + sum(span[0] * stride for span, stride in zip(outer, strides, strict=True))
    count = outer[-1][1] if outer else 1
    found = []
    for number, index in enumerate(itertools.product(*(range(span[1]) for span in outer[:-1]))):
        offset = base + sum(at * stride for at, stride in zip(index, strides, strict=False))
        start = number * count * length
        found.append(
            Runs(offset * itemsize, length * itemsize, count, step * itemsize, start * itemsize)
        )
    return found


class Mesh:
    """Ranks in a grid, as a DeviceMesh has them. Equal if shape and ranks are."""

    def __init__(self, shape: Sequence[int], ranks: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.ranks = tuple(ranks)
        """Those of the default group, in the order of the grid."""
        # Made once: a mesh may have thousands of ranks, and a state a million tensors.
        self._hash = hash((self.shape, self.ranks))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh) and (self.shape, self.ranks) == (other.shape, other.ranks)
        )

    def with_replicas(self, root: Mesh) -> Mesh:
        """This slice of `root` with all others that lie in it alike, along a last dimension more.

        All ranks of `root` come to the same. A mesh that is not one of several slices stays as it
        is.
        """
        places = {rank: place for place, rank in enumerate(root.ranks)}
        own = [places[rank] for rank in self.ranks]
        slices: list[list[int]] = []
        free = set(places.values())
        for first in range(len(root.ranks)):
            if first in free:
                slices.append([first + place - min(own) for place in own])
                if not free.issuperset(slices[-1]):
                    return self
                free.difference_update(slices[-1])
        if own not in slices or len(slices) == 1:
            return self
        places_of_each = itertools.chain.from_iterable(zip(*slices, strict=True))
        return Mesh((*self.shape, len(slices)), [root.ranks[place] for place in places_of_each])


class Sharding(NamedTuple):
    """How a mesh cuts a tensor. Of tensors of one shape and type it is the same."""

    shape: tuple[int, ...]
    """Of the whole."""
    itemsize: int
    mesh: Mesh
    cuts: tuple[tuple[int, int], ...]
    """Each a dimension of the mesh and one of the tensor that it cuts, in the order of cutting."""

    @property
    def holders(self) -> Ints:
        """Ranks that have the same part: of shape (parts, ranks that have it)."""
        cutting = self._cutting
        others = [dim for dim in range(len(self.mesh.shape)) if dim not in cutting]
        ranks = np.array(self.mesh.ranks, dtype=np.int64).reshape(self.mesh.shape)
        parts = math.prod(self.mesh.shape[dim] for dim in cutting)
        return ranks.transpose(*cutting, *others).reshape(parts, -1)

    def boxes(self) -> tuple[Ints, Ints]:
        """Offsets and shapes of the parts, each of shape (parts, dimensions of the tensor).

        As torch.chunk cuts: all parts but the last ones are of one size.
        """
        cutting = self._cutting
        counts = [self.mesh.shape[dim] for dim in cutting]
        parts = math.prod(counts)
        places = np.indices(counts, dtype=np.int64).reshape(len(cutting), parts)
        offsets = np.zeros((parts, len(self.shape)), dtype=np.int64)
        sizes = np.tile(np.array(self.shape, dtype=np.int64), (parts, 1))
        for mesh_dim, dim in self.cuts:
            size = sizes[:, dim]
            step = -(-size // self.mesh.shape[mesh_dim])
            begin = np.minimum(places[cutting.index(mesh_dim)] * step, size)
            offsets[:, dim] += begin
            sizes[:, dim] = np.minimum(begin + step, size) - begin
        return offsets, sizes

    def box(self, part: int) -> Box:
        """One of the parts."""
        offsets, sizes = self.boxes()
        return Box(tuple(offsets[part].tolist()), tuple(sizes[part].tolist()))

    @property
    def is_one_run(self) -> bool:
        """Whether each part lies in one piece in the whole."""
        cut = [
            dim
            for mesh_dim, dim in self.cuts
            if self.mesh.shape[mesh_dim] > 1 and self.shape[dim] > 1
        ]
        return not cut or math.prod(self.shape[: max(cut)]) <= 1

    @property
    def _cutting(self) -> list[int]:
        """The dimensions of the mesh that cut."""
        return sorted({mesh_dim for mesh_dim, _ in self.cuts})


@functools.lru_cache(maxsize=65536)
def box_of(sharding: Sharding, rank: int) -> Box:
    """What a rank has; NOTHING: it is not in the mesh."""
    (found,) = np.nonzero((sharding.holders == rank).any(axis=1))
    return sharding.box(found[0]) if len(found) else NOTHING


def order_of_cuts(placements: Sequence[Any], mesh: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """`Sharding.cuts` of a DTensor's placements. The mesh may have dimensions of replicas behind.

    Dimensions of the mesh cut in order; a _StridedShard, which FSDP2 makes of what another
    dimension of the mesh has cut before, cuts after those behind it. Raises ValueError of one whose
    parts are no boxes.
    """
    cuts, late = [], []
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = placement.dim
        if type(placement).__name__ != "_StridedShard":
            cuts.append((mesh_dim, dim))
            continue
        behind = [
            mesh[other]
            for other in range(mesh_dim + 1, len(placements))
            if not placements[other].is_replicate() and placements[other].dim == dim
        ]
        if placement.split_factor != math.prod(behind):
            raise ValueError("it lies in several pieces: redistribute() it")
        late.append((mesh_dim, dim))
    return (*cuts, *reversed(late))


__all__ = [
    "NOTHING",
    "Box",
    "Ints",
    "Mesh",
    "Runs",
    "Sharding",
    "box_of",
    "order_of_cuts",
    "runs_of",
]
