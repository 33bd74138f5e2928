"""Loads the state of a torch.save file that is open: by torch.load, or into tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from fpfs.client.filling import fill
from fpfs.client.parallel_file import LargeReads
from fpfs.client.paths import name_file

MapLocation: TypeAlias = (
    Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | torch.device
    | str
    | Mapping[str, str]
    | None
)


def restore(
    file: LargeReads,
    name: str,
    *,
    map_location: MapLocation,
    weights_only: bool | None,
    into: Any,
    begin: float,
) -> Any:
    """Return the state; parameters and errors as `fpfs.load` has them.

    name: for errors that have none. begin: as `fill` has it.
    """
    if into is not None and map_location is not None:
        raise ValueError("into= says where tensors are: leave map_location= out")
    try:
        if into is not None:
            return fill(file, into, weights_only=weights_only, begin=begin)
        return torch.load(file, map_location=map_location, mmap=False, weights_only=weights_only)
    except BaseException as error:
        # torch loses what a read raises, and says something of its own.
        failure = error if file.failure is None else file.failure
        name_file(failure, name)
        if failure is not error:
            raise failure from error
        raise


__all__ = ["MapLocation", "restore"]
