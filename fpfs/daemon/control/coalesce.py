"""Answers that many ask for at once: worked out once for all who ask meanwhile, and not too often.

Invariants:
  * Who asks gets an answer that was begun after he asked.
  * Working out answers takes at most a `SHARE` of the time, as long as it takes no longer than
    before: programs that use the mount are not to feel how many ask.

Concurrency: trio thread only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, cast

import trio

SHARE = 0.05

Answer = TypeVar("Answer")


class Paced(Generic[Answer]):
    """One kind of answer."""

    def __init__(self, work: Callable[[], Awaitable[Answer]]) -> None:
        """Work answers out by calling `work`."""
        self._work = work
        self._next: _Run[Answer] | None = None
        self._lock = trio.Lock()
        self._not_before_s = 0.0

    async def ask(self) -> Answer:
        """Return an answer, or raise the exception that working it out raised."""
        if self._next is None:
            self._next = _Run()
        run = self._next
        async with self._lock:
            # Who has waited for the lock may find that the one before him did it for both.
            if not run.is_done:
                await trio.sleep_until(self._not_before_s)
                self._next = None
                await self._work_out(run)
        if run.error is not None:
            raise run.error
        return cast("Answer", run.answer)

    async def _work_out(self, run: _Run[Answer]) -> None:
        began_s = trio.current_time()
        try:
            run.answer = await self._work()
        except Exception as error:  # noqa: BLE001 (everybody who waits for it gets it)
            run.error = error
        run.is_done = True
        now_s = trio.current_time()
        self._not_before_s = now_s + (now_s - began_s) * (1 / SHARE - 1)


class _Run(Generic[Answer]):
    """An answer that is being worked out, or will be."""

    def __init__(self) -> None:
        self.is_done = False
        self.answer: Answer | None = None
        self.error: Exception | None = None
