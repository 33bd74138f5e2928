"""Reads the Test Anything Protocol as far as pjdfstest speaks it.

Invariants:
  * What a plan announces and the output lacks counts as failed; so does output without a plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_PLAN = re.compile(r"1\.\.(\d+)\s*(?:#.*)?$")
_RESULT = re.compile(r"(not )?ok\b\s*(\d+)?\s*(.*)$")


@dataclass
class Outcome:
    """What one test file reported: assertions passed, and messages of those failed, by number.

    `excused` counts failed assertions that the suite itself marks TODO: it says that Linux fails
    them. As for prove, they are no failures.
    """

    passed: int = 0
    excused: int = 0
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Assertions made or announced."""
        return self.passed + self.excused + len(self.failed)


def parse(output: str) -> Outcome:
    """Read the output of one test file."""
    outcome = Outcome()
    planned: int | None = None
    number = 0
    for line in output.splitlines():
        if plan := _PLAN.match(line):
            planned = int(plan[1])
        elif result := _RESULT.match(line):
            number = int(result[2]) if result[2] else number + 1
            if result[1] and result[3].startswith("# TODO"):
                outcome.excused += 1
            elif result[1]:
                outcome.failed[number] = result[3]
            else:
                outcome.passed += 1
    if planned is None:
        outcome.failed.setdefault(0, "no plan was announced")
        return outcome
    for missing in range(outcome.total + 1, planned + 1):
        outcome.failed.setdefault(missing, "announced, but never reported")
    if outcome.total > planned:
        outcome.failed[0] = f"{outcome.total} assertions were reported, {planned} announced"
    return outcome
