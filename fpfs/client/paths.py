"""What saving and loading have in common: paths, and how many threads move bytes."""

from __future__ import annotations

import os
from typing import Any

THREADS_MAX = 8


def resolve(path: str | bytes | os.PathLike[Any]) -> str:
    """Return the absolute path, links followed. TypeError, or FileNotFoundError of an empty one."""
    try:
        name = os.fsdecode(os.fspath(path))
    except TypeError:
        raise TypeError(
            f"fpfs takes a path, not {type(path).__name__}: use torch.save and torch.load for"
            " files that are open"
        ) from None
    if not name:
        raise FileNotFoundError("the path is an empty string: is a variable unset?")
    return os.path.realpath(name)


def default_threads() -> int:
    """Return how many threads move bytes: as many as there are processors, from 2 to 8."""
    return min(THREADS_MAX, max(2, len(os.sched_getaffinity(0))))
