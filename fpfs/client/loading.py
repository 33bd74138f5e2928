"""Loads a torch.save file: what is large in it is read side by side, straight to where it stays.

torch.load does the loading, from an object that it reads as a file. It asks for each tensor's bytes
by one `readinto` of the tensor's own memory, which several native threads fill. Tensors that are
there already are filled by `filling`.

Concurrency: `load` may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fpfs.client.parallel_file import ParallelFile
from fpfs.client.paths import Path, is_on_fpfs, resolve_all
from fpfs.client.peers import Alone, place_in
from fpfs.client.restoring import MapLocation, restore
from fpfs.client.shares.loading import load_shares
from fpfs.client.shares.reading import has_shares

if TYPE_CHECKING:
    import torch.distributed as dist


def load(
    path: Path | Sequence[Path],
    *,
    group: dist.ProcessGroup | Alone | None = None,
    map_location: MapLocation = None,
    mmap: bool = False,
    weights_only: bool | None = True,
    into: Any = None,
) -> Any:
    """Load what torch.save, `fpfs.save` or `fpfs.save_shares` has saved, as torch.load does.

    path: a file; or the directory in which shares are, or several of one checkpoint, of which each
        has some. The newest checkpoint of these is loaded. A group loads shares together, by
        `load_shares`, which see.
    group: whose ranks load the file at about the same time, on a mount of fpfs: each byte is read
        from a device once, for all ranks of a machine. They do not wait for each other. None: the
        default group of torch.distributed, if that is initialized. ALONE: this process only.
    map_location, weights_only: as torch.load has them. None: what it takes when they are left out.
    mmap: map the file instead of reading it, which is left to torch.load.
    into: a state like the saved one, whose tensors are filled where they are, and returned; what
        is no tensor is as the file has it, also lists and dictionaries in which neither the file
        nor `into` has a tensor. Of those with tensors, `into` says which names are loaded, and
        lists are of one length. Of a DTensor only this rank's part is read, and of the file only
        the tensors that `into` has. Types are converted as `Tensor.copy_` does. Tensors that share
        memory, as tied weights, are filled in their order: what the file has of the last one stays.
        After a failure some tensors may be filled and others not.

    Raises OSError as open(2) and read(2) do (EIO of damaged bytes on a mount of fpfs), TypeError of
    what is no path, ValueError of an address as s3://bucket/file, of an `into` that the file does
    not fit, and of a file that does not have the bytes that a tensor of `into` takes, before `into`
    is changed, and what torch.load raises.
    """
    names = resolve_all(path)
    of_shares = len(names) > 1 or has_shares(names[0])
    if mmap:
        if into is not None:
            raise ValueError("into= says where tensors are: leave mmap= out")
        if of_shares:
            raise ValueError("no file has all shares to map it: fpfs-ctl gather makes one")
        return torch.load(names[0], map_location=map_location, mmap=True, weights_only=weights_only)
    if of_shares:
        return load_shares(
            names, group=group, map_location=map_location, weights_only=weights_only, into=into
        )
    rank, size = place_in(group)
    # One rank tells where it is.
    on_fpfs = rank == 0 and is_on_fpfs(names[0])
    with ParallelFile(names[0], past_cache=on_fpfs and size == 1) as file:
        return restore(
            file,
            names[0],
            map_location=map_location,
            weights_only=weights_only,
            into=into,
            begin=rank / size,
        )
