"""``python -m benchmarks``: measure, print the table, write JSON and plot.

  python -m benchmarks                      everything (about an hour)
  python -m benchmarks --quick save lab     groups whose name contains a word, small and short
  python -m benchmarks --list               the names of the groups

Exit status 1 if a requirement was missed or not measured, or a group failed. Results go to
benchmarks/results/local/.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.status import Status

from benchmarks import report
from benchmarks.framework import Group, GroupResult, all_met, run_group
from benchmarks.groups import GROUPS
from benchmarks.places import FULL, QUICK, Bench

RESULTS = Path(__file__).resolve().parent / "results" / "local"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", help="only groups whose name contains one of these")
    parser.add_argument("--quick", action="store_true", help="small states, few rounds")
    parser.add_argument("--rounds", type=int, help="rounds of each group")
    parser.add_argument("--list", action="store_true", help="show the groups and stop")
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/tmp"), help="where to write (a real disk)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="for results.json, .md, .png")
    parser.add_argument("--document", type=Path, help="a document whose tables are replaced")
    return parser.parse_args(arguments)


def selected(words: list[str]) -> list[Group]:
    """The groups that a run measures. A word that is a whole name selects that group only."""
    names = {group.name for group in GROUPS}
    return [
        group
        for group in GROUPS
        if not words
        or any(word == group.name or (word not in names and word in group.name) for word in words)
    ]


def measure(options: argparse.Namespace, console: Console) -> list[GroupResult]:
    """Run the groups; whatever was finished is reported, also after an interrupt."""
    scale = QUICK if options.quick else FULL
    bench = Bench(options.directory, scale=scale)
    results: list[GroupResult] = []
    load_before = os.getloadavg()[0]
    try:
        for group in selected(options.words):
            with console.status(group.name) as status:
                result = run_group(
                    group,
                    bench,
                    rounds=options.rounds or scale.rounds,
                    progress=functools.partial(_show, status, group.name),
                )
            results.append(result)
            report.print_group(console, result)
    except KeyboardInterrupt:
        console.print("interrupted: the groups that were finished follow")
    finally:
        bench.close()
        if results:
            conditions = _save(results, bench, options, load_before=load_before)
            console.print(conditions, highlight=False)
    return results


def _show(status: Status, group_name: str, text: str) -> None:
    status.update(f"{group_name}: {text}")


def _save(
    results: list[GroupResult],
    bench: Bench,
    options: argparse.Namespace,
    *,
    load_before: float,
) -> str:
    """Write JSON, tables and plot; the sentence about the machine."""
    machine = report.describe_machine(
        options.directory, arena_bytes=bench.arena_bytes, load_before=load_before
    )
    scale = dataclasses.asdict(bench.scale)
    options.results.mkdir(parents=True, exist_ok=True)
    document = report.as_json(results, machine=machine, scale=scale)
    report.write_json(document, options.results / "results.json")
    conditions = report.conditions(machine, scale)
    tables = f"{conditions}\n\n{report.as_markdown(results)}"
    (options.results / "results.md").write_text(tables)
    if options.document:
        report.update_document(options.document, tables)
    report.plot(results, options.results / "results.png")
    return conditions


def main() -> int:
    """Measure; 1 unless every requirement was met."""
    options = parse(sys.argv[1:])
    console = Console()
    if options.list:
        for group in GROUPS:
            console.print(f"{group.name:20} {group.title}", highlight=False)
        return 0
    groups = selected(options.words)
    if not groups:
        console.print(f"no group is called {' or '.join(options.words)}: see --list")
        return 2
    results = measure(options, console)
    report.print_verdicts(console, results)
    console.print(f"JSON, tables and plot: {options.results}")
    finished = len(results) == len(groups)
    return 0 if finished and all_met(results) else 1


if __name__ == "__main__":
    sys.exit(main())
