"""Threads for calls that block.

trio lends 40 threads to all who name no limiter, so that enough calls of one kind that hang keep
those of all others from running. Here nobody uses these: a kind of call that many may make at once
has a limiter of its own, and any other a thread of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


async def run_alone(call: Callable[..., Result], *arguments: object) -> Result:
    """Return what `call` returns, or raise what it raises, from a thread that nobody waits for.

    For calls of which there are few at a time, whatever clients do.
    """
    return await trio.to_thread.run_sync(call, *arguments, limiter=trio.CapacityLimiter(1))
