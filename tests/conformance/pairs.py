"""Runs tests of a suite on pairs of filesystems, fpfs and ext4, and says what differs.

Invariants:
  * A test runs on fpfs only if it passes on ext4: else it says nothing of fpfs.

Concurrency: a thread for each pair; a pair is one thread's at a time.
"""

from __future__ import annotations

import argparse
import collections
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.differences import LIST, PASS, Result, differences, listed, report
from tests.support.processes import REPOSITORY


@dataclass(frozen=True)
class Side:
    """One filesystem under test.

    All it has mounted outside of its tests is below `folder`; `variables` is what the suite is told
    in its environment, `prepare` what a shell does before each test; `renew` makes the filesystem
    anew, `abort` frees what hangs on it.
    """

    name: str
    folder: Path
    renew: Callable[[], None]
    variables: Mapping[str, str] = field(default_factory=dict)
    prepare: str = ""
    abort: Callable[[], None] = lambda: None


Pair = tuple[Side, Side]
Results = dict[str, tuple[Result, Result]]


def outputs(suite: str, side: Side | None = None) -> Path:
    """The folder of what tests said; made if need be."""
    folder = REPOSITORY / "build" / "conformance" / suite / (side.name if side else "")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def arguments_of(description: str) -> argparse.ArgumentParser:
    """The arguments that all suites have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("built", type=Path)
    parser.add_argument("--only", action="append", default=[], help="names that begin so")
    parser.add_argument("--jobs", type=int, default=2, help="pairs of filesystems")
    parser.add_argument("--limit-s", type=float, default=4 * 3600, help="begin no test after it")
    for number in (signal.SIGINT, signal.SIGTERM):  # what was mounted is taken down, whoever asks
        signal.signal(number, signal.default_int_handler)
    return parser


def run_on_pairs(
    pairs: Sequence[Pair],
    tests: Sequence[str],
    run_one: Callable[[Side, str], Result],
    *,
    limit_s: float,
) -> Results:
    """Run tests on pairs of fpfs and ext4, as many as there is time for."""
    until_s = time.monotonic() + limit_s
    free = queue.SimpleQueue[Pair]()
    results: Results = {}
    for pair in pairs:
        free.put(pair)

    def run_on_both(test: str) -> None:
        if time.monotonic() > until_s:
            return
        ours, theirs = pair = free.get()
        try:
            expected = run_one(theirs, test)
            found = run_one(ours, test) if expected.outcome == PASS else expected
            results[test] = found, expected
            print(f"{test} {expected.outcome} {found.outcome}", flush=True)
        finally:
            free.put(pair)

    with ThreadPoolExecutor(len(pairs)) as pool:
        try:
            list(pool.map(run_on_both, tests))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


def conclude(suite: str, results: Results, tests: Sequence[str]) -> int:
    """Print counts and what differs from the list; returns the exit status."""
    for number, side in enumerate(("fpfs", "ext4")):
        counts = collections.Counter(pair[number].outcome for pair in results.values())
        words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(f"{side}: {len(results)} tests: {words}")
    print(f"{len(tests) - len(results)} tests were not reached in time")
    expected = listed(LIST.read_text(), suite)
    return 1 if report(differences(results), expected, tried=results) else 0
