"""How long acknowledged bytes take to be durable, and what commits do on the way.

A version is durable when the catalog's log was flushed after the transaction that made it current.
So each waits here, from that transaction on, for the next flush that covers it, whoever asked for
that. How long it took is counted from the acknowledgement of its oldest byte.

Invariants:
  * What waits is in the order of transactions, so that a flush covers a beginning of it.

Concurrency: trio thread only.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.statistics import DurationHistogram, Durations

if TYPE_CHECKING:
    from fpfs.daemon.catalog.database import Catalog

STEPS_MAX = 10_000
"""Steps of a traced file that are kept until somebody takes them."""


class StepKind(enum.StrEnum):
    """What a commit does for one version."""

    DRAIN = "drain"
    """All its chunks are written, and their objects flushed."""
    TRANSACTION = "transaction"
    """The catalog makes it current."""
    QUARANTINED = "quarantined"
    """The catalog stores it as what a killed writer left."""
    LOG_FLUSH = "log flush"
    """The catalog's log is flushed, which makes it durable."""


class Step(NamedTuple):
    """One step of a version of the traced file, by ``time.monotonic_ns()``."""

    kind: StepKind
    began_ns: int
    ended_ns: int


class CommitSteps:
    """What commits did for one inode, while somebody traces it."""

    def __init__(self) -> None:
        """Keep nothing."""
        self._ino = 0
        self._steps: deque[Step] = deque()
        self.lost = 0
        """Steps that were not taken in time, since `watch`."""
        self.last: StepKind | None = None
        """The last step since `watch`."""

    def watch(self, ino: int) -> None:
        """Keep the steps of an inode from now on; 0: of none."""
        self._ino = ino
        self._steps.clear()
        self.lost = 0
        self.last = None

    def add(self, kind: StepKind, ino: int, began_ns: int) -> None:
        """Note a step that ends now."""
        if ino != self._ino:
            return
        self.last = kind
        if len(self._steps) == STEPS_MAX:
            self.lost += 1
        else:
            self._steps.append(Step(kind, began_ns, time.monotonic_ns()))

    def take(self) -> list[Step]:
        """Return what was noted since the last call."""
        steps = list(self._steps)
        self._steps.clear()
        return steps


class _Waiting(NamedTuple):
    written: int
    """What `Catalog.written` was when it was current."""
    ino: int
    acknowledged_ns: int


class Durability:
    """Versions that are current and not durable yet, and how long those before them took."""

    def __init__(self, catalog: Catalog, steps: CommitSteps) -> None:
        """Follow the flushes of a catalog from now on."""
        self._catalog = catalog
        self._steps = steps
        self._waiting: deque[_Waiting] = deque()
        self._ack_to_durable = DurationHistogram()
        catalog.on_flushed(self._flushed)

    def current(self, ino: int, acknowledged_ns: int) -> None:
        """Wait for the flush of a version that a transaction has just made current.

        `acknowledged_ns` is as in `fpfs.core.engine.Snapshot`.
        """
        self._waiting.append(_Waiting(self._catalog.written, ino, acknowledged_ns))

    def _flushed(self, covered: int, began_ns: int) -> None:
        now_ns = time.monotonic_ns()
        while self._waiting and self._waiting[0].written <= covered:
            version = self._waiting.popleft()
            if version.acknowledged_ns:
                self._ack_to_durable.record(now_ns - version.acknowledged_ns)
            self._steps.add(StepKind.LOG_FLUSH, version.ino, began_ns)

    def ack_to_durable(self) -> Durations:
        """Return how long versions took, from the acknowledgement of their oldest byte."""
        return self._ack_to_durable.read()

    def is_waiting(self, ino: int) -> bool:
        """Whether a version of an inode is current and not durable."""
        return any(version.ino == ino for version in self._waiting)

    @property
    def waiting(self) -> int:
        """How many versions are current and not durable."""
        return len(self._waiting)

    def oldest_s(self) -> float:
        """How long ago the oldest byte of the waiting versions was acknowledged; 0: none waits."""
        oldest_ns = self.oldest_ns()
        return (time.monotonic_ns() - oldest_ns) / 1e9 if oldest_ns else 0.0

    def oldest_ns(self) -> int:
        """When the oldest byte of a waiting version was acknowledged; 0: there is none."""
        return min(self.oldest_ns_by_ino().values(), default=0)

    def oldest_ns_by_ino(self) -> dict[int, int]:
        """When the oldest byte of the waiting versions of each inode was acknowledged."""
        oldest: dict[int, int] = {}
        for version in self._waiting:
            if version.acknowledged_ns:
                known_ns = oldest.get(version.ino, version.acknowledged_ns)
                oldest[version.ino] = min(known_ns, version.acknowledged_ns)
        return oldest
