"""Tensors of which each rank has a part: what that is, and what stands for the whole.

Part and whole are what torch.distributed.checkpoint takes them for.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from fpfs.client.boxes import Box, Mesh, Sharding, box_of, order_of_cuts

_ADDRESSES_BYTES = 1 << 40


class Sharded(NamedTuple):
    """What a rank has of a tensor."""

    name: str
    """Of the tensor, if it has one."""
    sharding: Sharding
    box: Box
    local: torch.Tensor
    """The part, without gaps."""


def sharded_of(tensor: torch.Tensor, name: str) -> Sharded | None:
    """What this rank has of `tensor`; None: it is an ordinary tensor.

    Raises ValueError of those whose part cannot be told.
    """
    found = part_of(tensor, name)
    if found is None:
        return None
    sharding, box, local = found
    return Sharded(name, sharding, box, local.resolve_conj().resolve_neg().contiguous())


def part_of(tensor: torch.Tensor, name: str) -> tuple[Sharding, Box, torch.Tensor] | None:
    """This rank's part of `tensor` and where that lies; None: it is an ordinary tensor.

    Raises ValueError as `sharded_of` does.
    """
    if not is_dtensor(tensor):
        if any(base.__name__ == "ShardedTensor" for base in type(tensor).__mro__):
            _refuse(name, "it is a ShardedTensor, the predecessor of DTensor")
        return None
    given: Any = tensor
    if any(placement.is_partial() for placement in given.placements):
        _refuse(name, "its sum is still to be made: redistribute() it")
    with torch.no_grad():
        local = given.to_local()
    if type(local) is not torch.Tensor or local.layout is not torch.strided or local.is_quantized:
        _refuse(name, f"its parts are {type(local).__name__}s of layout {local.layout}")
    mesh = _mesh_of(given.device_mesh)
    try:
        cuts = _cuts_of(tuple(given.placements), mesh.shape)
    except ValueError as error:
        _refuse(name, str(error))
    sharding = Sharding(tuple(given.shape), local.element_size(), mesh, cuts)
    box = box_of(sharding, dist.get_rank())
    if box.elements != local.numel() or (local.numel() > 0 and box.shape != tuple(local.shape)):
        _refuse(name, f"a part of shape {tuple(local.shape)} is said to have {box.shape}")
    return sharding, box, local


_meshes: weakref.WeakKeyDictionary[Any, Mesh] = weakref.WeakKeyDictionary()


def _mesh_of(mesh: Any) -> Mesh:
    """The mesh of a DTensor, with the other slices of the mesh that it is a slice of.

    What tensor parallelism leaves whole and FSDP2 shards has a replica on each slice, and each rank
    a DTensor of its own slice. torch.distributed.checkpoint takes them for replicas, too.
    """
    found = _meshes.get(mesh)
    if found is None:
        found, root = (
            Mesh(each.mesh.shape, each.mesh.flatten().tolist()) for each in (mesh, _root_of(mesh))
        )
        found = _meshes[mesh] = found.with_replicas(root)
    return found


def _root_of(mesh: Any) -> Any:
    """The mesh that this one is a slice of, or the mesh itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()  # noqa: SLF001
    # Older versions of torch know only what a slice of a slice was sliced from.
    root = dist.device_mesh._mesh_resources.get_root_mesh(mesh)  # noqa: SLF001
    return root if root == mesh else _root_of(root)


_cuts_of = functools.lru_cache(maxsize=4096)(order_of_cuts)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    # Importing it takes a second, so who has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(f"fpfs cannot tell what this rank has of the sharded tensor {name!r}: {why}")


class StandIns:
    """Ordinary tensors, as large as wholes, of which only the addresses exist.

    Nothing may read them. They may not be used when this object is gone.
    """

    def __init__(self) -> None:
        self._mappings: list[mmap.mmap] = []
        self._free = memoryview(b"")

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return one."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if size > len(self._free):
            try:
                self._free = self._addresses(max(size, _ADDRESSES_BYTES))
            except OSError:  # a limit on addresses (ulimit -v)
                self._free = self._addresses(size)
        # Each has an address of its own, by which torch.save tells storages apart.
        storage = torch.frombuffer(self._free[:size], dtype=torch.uint8).untyped_storage()
        self._free = self._free[size:]
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))

    def _addresses(self, count: int) -> memoryview:
        # Private and not to be written: the kernel promises no memory for it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, count, flags=flags, prot=mmap.PROT_READ)
        self._mappings.append(mapping)
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        # torch.frombuffer warns of buffers that are not to be written.
        return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


__all__ = ["Sharded", "StandIns", "is_dtensor", "part_of", "sharded_of"]
