"""What docs/conformance.md lists, against what was found; outcomes on two filesystems compared.

Invariants:
  * A finding that is not listed counts, and so does a listed one that is not found where it was
    looked for: the list is what is true.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from tests.support.processes import REPOSITORY

LIST = REPOSITORY / "docs" / "conformance.md"
PASS = "pass"
HANG = "hang"
"""Did not end within its time, and was killed."""

What = TypeVar("What", int, str)
_LISTED = re.compile(r"- (?P<suite>\w+) (?P<outcome>\w+) (?P<tests>`[^:]+`): \S.*")


@dataclass(frozen=True)
class Result:
    """How one test of a suite ended, in the suite's own word, and what it said."""

    outcome: str
    detail: str = ""


def listed(text: str, suite: str) -> set[tuple[str, str]]:
    """Read lines like "- xfstests notrun `generic/012` `generic/016`: reason"."""
    found = set()
    for line in text.splitlines():
        match = _LISTED.fullmatch(line)
        if match and match["suite"] == suite:
            tests = re.findall(r"`([^`]+)`", match["tests"])
            found |= {(test, match["outcome"]) for test in tests}
    return found


def differences(results: Mapping[str, tuple[Result, Result]]) -> dict[tuple[str, str], str]:
    """Of results on fpfs and another filesystem, what passes there and does not on fpfs."""
    return {
        (test, ours.outcome): ours.detail
        for test, (ours, theirs) in results.items()
        if theirs.outcome == PASS != ours.outcome
    }


def report(
    found: Mapping[tuple[str, What], str],
    expected: Set[tuple[str, What]],
    *,
    tried: Collection[str],
) -> int:
    """Print what is found and not listed, and listed and not found; returns how much."""
    unlisted = sorted(found.keys() - expected)
    gone = sorted(entry for entry in expected - found.keys() if entry[0] in tried)
    for name, what in unlisted:
        print(f"NEW {name} {what}: {found[name, what]}")
    for name, what in gone:
        print(f"GONE {name} {what}, which {LIST.name} lists")
    return len(unlisted) + len(gone)
