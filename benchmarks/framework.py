"""Groups of contenders that are measured in one run, alternating, and judged by ratios.

Invariants:
  * Every contender of a group plays once in every round; the order turns from round to round, so
    that nobody always follows the same neighbour, and drift of the machine meets all alike.
  * A round that was played is never dropped from the result.

Concurrency: one round at a time; a contender may use several processes within its round.
"""

from __future__ import annotations

import statistics
import subprocess
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.places import Bench


class Unavailable(RuntimeError):
    """Something cannot be measured on this machine; the message says why."""


def nothing() -> None:
    """No preparation."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the job. `play` does it once and returns the value in the group's unit.

    `prepare` (before) and `quiesce` (after) are not timed: caches are dropped, dirty data written.
    `also`: what else is known then, by the name under which it stands in the table.
    """

    name: str
    play: Callable[[], float]
    prepare: Callable[[], object] = nothing
    quiesce: Callable[[], object] = nothing
    also: Mapping[str, Callable[[], float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A contender that cannot take part here."""

    name: str
    reason: str


class Sense(Enum):
    """Which side of the figure is the good one."""

    AT_LEAST = "≥"
    AT_MOST = "≤"


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What is required: `contender` over `peer_factor` x `peer` (or alone) against `figure`."""

    contender: str
    figure: float
    peer: str | None = None
    peer_factor: float = 1.0
    sense: Sense = Sense.AT_LEAST

    @property
    def text(self) -> str:
        """The requirement in one line."""
        factor = "" if self.peer_factor == 1 else f"{self.peer_factor:g} x "
        against = f" / ({factor}{self.peer})" if self.peer else ""
        return f"{self.contender}{against} {self.sense.value} {self.figure:g}"


Entry = Contender | Missing
Opener = Callable[["Bench"], AbstractContextManager[Sequence[Entry]]]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Contenders for one job. `open` sets the stage and clears it away."""

    name: str
    title: str
    unit: str
    open: Opener
    bounds: tuple[Bound, ...] = ()
    rounds_min: int = 1
    rounds_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and quartiles of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=median, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A bound and what was measured: the ratio of medians, and the spread of paired ratios."""

    bound: Bound
    measured: float
    paired: Spread
    passed: bool


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """Everything that a group's run left."""

    group: Group
    values: dict[str, list[float]]
    missing: tuple[Missing, ...]
    verdicts: tuple[Verdict, ...]
    unavailable: str | None = None
    failed: bool = False

    @property
    def unjudged(self) -> tuple[Bound, ...]:
        """Requirements that were not measured, because somebody was missing or all was."""
        judged = {verdict.bound for verdict in self.verdicts}
        return tuple(bound for bound in self.group.bounds if bound not in judged)


def all_met(results: Sequence[GroupResult]) -> bool:
    """Whether every requirement of every group was measured and met, and no group failed."""
    return all(
        not result.failed
        and not result.unjudged
        and all(verdict.passed for verdict in result.verdicts)
        for result in results
    )


def run_group(
    group: Group, bench: Bench, *, rounds: int, progress: Callable[[str], None]
) -> GroupResult:
    """Play all rounds of a group."""
    rounds = max(group.rounds_min, min(rounds, group.rounds_max or rounds))
    try:
        with group.open(bench) as entries:
            contenders = [entry for entry in entries if isinstance(entry, Contender)]
            missing = tuple(entry for entry in entries if isinstance(entry, Missing))
            names = {entry.name for entry in entries}
            _check_names(group, names.union(*(contender.also for contender in contenders)))
            values = _play(contenders, rounds=rounds, progress=progress)
    except Unavailable as error:
        return _unmeasured(group, str(error), failed=False)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        traceback.print_exc()  # the other groups are still worth measuring
        return _unmeasured(group, f"failed: {error}", failed=True)
    verdicts = tuple(_judge(bound, values) for bound in group.bounds if _present(bound, values))
    return GroupResult(group=group, values=values, missing=missing, verdicts=verdicts)


def _check_names(group: Group, names: set[str]) -> None:
    """A bound on nobody would be skipped in silence, and could not fail."""
    for bound in group.bounds:
        unknown = {bound.contender, bound.peer} - names - {None}
        assert not unknown, f"group {group.name}: nobody is called {sorted(map(str, unknown))}"


def _unmeasured(group: Group, reason: str, *, failed: bool) -> GroupResult:
    return GroupResult(
        group=group, values={}, missing=(), verdicts=(), unavailable=reason, failed=failed
    )


def _play(
    contenders: Sequence[Contender], *, rounds: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {
        name: [] for contender in contenders for name in (contender.name, *contender.also)
    }
    for index in range(rounds):
        for contender in _order(contenders, round_index=index):
            progress(f"round {index + 1}/{rounds}: {contender.name}")
            contender.prepare()
            value = contender.play()
            contender.quiesce()
            values[contender.name].append(value)
            for name, known in contender.also.items():
                values[name].append(known())
    return values


def _order(contenders: Sequence[Contender], *, round_index: int) -> Iterator[Contender]:
    """Each order is played forwards and then backwards, and turned by one after that.

    So of two neither is always the one that meets what the other left in the machine's memory.
    """
    turn = round_index // 2 % max(1, len(contenders))
    turned = [*contenders[turn:], *contenders[:turn]]
    yield from turned if round_index % 2 == 0 else reversed(turned)


def _present(bound: Bound, values: dict[str, list[float]]) -> bool:
    return bound.contender in values and (bound.peer is None or bound.peer in values)


def _judge(bound: Bound, values: dict[str, list[float]]) -> Verdict:
    own = values[bound.contender]
    if bound.peer is None:
        measured, paired = Spread.of(own).median, Spread.of(own)
    else:
        peer = [bound.peer_factor * value for value in values[bound.peer]]
        measured = Spread.of(own).median / Spread.of(peer).median
        paired = Spread.of([a / b for a, b in zip(own, peer, strict=True)])
    passed = measured >= bound.figure if bound.sense is Sense.AT_LEAST else measured <= bound.figure
    return Verdict(bound=bound, measured=measured, paired=paired, passed=passed)
