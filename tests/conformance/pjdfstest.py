"""Runs a built pjdfstest as root, in a mount or any directory, and compares with what is expected.

Usage: python -m tests.conformance.pjdfstest PJD [--directory DIR] [--only chmod] [--jobs N]

PJD is a folder in which pjdfstest was built. Without --directory a filesystem is mounted for it.
The suite asks df for the type of the filesystem and leaves assertions out for types it does not
know; it is told ext4 here, so that what ext4 is held to, fpfs is held to.

docs/conformance.md lists what may fail, each with its reason; an entry that passes is an error too.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conformance.differences import LIST, report
from tests.conformance.known import named_filesystem
from tests.conformance.tap import Outcome, parse
from tests.support.target import open_target, plain_target

FILES_MIN = 238
"""The suite's test files as they are known: fewer are not the suite."""
TIMEOUT_S = 300
_EXPECTED = re.compile(r"- `(\w+/\d+\.t)` (\d+(?:, \d+)*): \S.*")


def expected_failures(text: str) -> set[tuple[str, int]]:
    """Read lines like "- `rename/24.t` 5, 6: reason"."""
    found = set()
    for line in text.splitlines():
        if match := _EXPECTED.fullmatch(line):
            found |= {(match[1], int(number)) for number in match[2].split(",")}
    return found


def run_file(test: Path, root: Path, environment: Mapping[str, str]) -> Outcome:
    """Run one .t file in a folder of its own under `root`."""
    folder = Path(tempfile.mkdtemp(prefix=f"{test.parent.name}-{test.stem}-", dir=root))
    folder.chmod(0o755)
    try:
        done = subprocess.run(
            ["/bin/sh", str(test)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(failed={0: f"did not end within {TIMEOUT_S} s"})
    shutil.rmtree(folder, ignore_errors=True)
    outcome = parse(done.stdout)
    if done.returncode != 0:
        outcome.failed.setdefault(0, f"exit status {done.returncode}: {done.stderr[-200:]}")
    return outcome


def run_suite(tests: Sequence[Path], root: Path, *, jobs: int) -> dict[str, Outcome]:
    """Run all files; keys are like chmod/00.t."""
    with (
        named_filesystem("ext4", pattern="[^ ]+") as environment,
        ThreadPoolExecutor(jobs) as pool,
    ):
        outcomes = pool.map(lambda test: run_file(test, root, environment), tests)
        return {
            f"{test.parent.name}/{test.name}": outcome
            for test, outcome in zip(tests, outcomes, strict=True)
        }


def print_counts(outcomes: Mapping[str, Outcome]) -> None:
    """A line for each folder of the suite, and the sum."""
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0, 0])
    for name, outcome in outcomes.items():
        for key in (name.split("/")[0], "all"):
            counts[key][0] += 1
            counts[key][1] += outcome.passed
            counts[key][2] += outcome.excused
            counts[key][3] += len(outcome.failed)
    print(f"{'':16}{'files':>8}{'passed':>8}{'excused':>8}{'failed':>8}")
    for folder in sorted(counts, key=lambda key: (key == "all", key)):
        print(f"{folder:16}" + "".join(f"{count:8}" for count in counts[folder]))


def compare(outcomes: Mapping[str, Outcome], expected: set[tuple[str, int]]) -> int:
    """Print what differs from the expected failures; returns how much does."""
    failed = {
        (name, number): message
        for name, outcome in outcomes.items()
        for number, message in outcome.failed.items()
    }
    return report(failed, expected, tried=outcomes)


def collect(built: Path, only: Sequence[str]) -> list[Path]:
    """The .t files of a built pjdfstest."""
    if not os.access(built / "pjdfstest", os.X_OK):
        raise SystemExit(f"{built} holds no built pjdfstest: run ./configure and make there")
    tests = sorted((built / "tests").glob("*/*.t"))
    if len(tests) < FILES_MIN:
        raise SystemExit(
            f"{built}/tests holds {len(tests)} files of the suite, {FILES_MIN} are known:"
            " fetch it whole"
        )
    if only:
        tests = [
            test for test in tests if f"{test.parent.name}/{test.name}".startswith(tuple(only))
        ]
        if not tests:
            raise SystemExit(f"no file of the suite begins with {' or '.join(only)}")
    return tests


def main() -> int:
    """Returns the exit status: 0 when all went as expected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("built", type=Path)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("pjdfstest changes owners and needs root")
    tests = collect(arguments.built.resolve(), arguments.only)
    started_s = time.monotonic()
    opened = plain_target(arguments.directory) if arguments.directory else open_target()
    with opened as target:
        outcomes = run_suite(tests, target.root, jobs=arguments.jobs)
    print_counts(outcomes)
    print(f"{time.monotonic() - started_s:.0f} s")
    expected = expected_failures(LIST.read_text())
    return 1 if compare(outcomes, expected) else 0


if __name__ == "__main__":
    sys.exit(main())
