"""``python -m benchmarks``: measure, print the table, write JSON and plot.

  python -m benchmarks                      everything (about half an hour)
  python -m benchmarks --quick save lab     groups whose name contains a word, small and short
  python -m benchmarks --list               the names of the groups

Exit status 1 if a requirement was missed. Results go to benchmarks/results/local/.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.status import Status

from benchmarks import report
from benchmarks.framework import Group, GroupResult, run_group
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
        if results:
            _save(results, bench, options)
        bench.close()
    return results


def _show(status: Status, group_name: str, text: str) -> None:
    status.update(f"{group_name}: {text}")


def _save(results: list[GroupResult], bench: Bench, options: argparse.Namespace) -> None:
    machine = report.describe_machine(options.directory, arena_bytes=bench.arena_bytes)
    scale = dataclasses.asdict(bench.scale)
    options.results.mkdir(parents=True, exist_ok=True)
    document = report.as_json(results, machine=machine, scale=scale)
    report.write_json(document, options.results / "results.json")
    (options.results / "results.md").write_text(report.as_markdown(results))
    report.plot(results, options.results / "results.png")


def main() -> int:
    """Measure; 1 if a requirement was missed."""
    options = parse(sys.argv[1:])
    console = Console()
    if options.list:
        for group in GROUPS:
            console.print(f"{group.name:20} {group.title}", highlight=False)
        return 0
    if not selected(options.words):
        console.print(f"no group is called {' or '.join(options.words)}: see --list")
        return 2
    results = measure(options, console)
    report.print_verdicts(console, results)
    if results:
        report.print_machine(console, json.loads((options.results / "results.json").read_text()))
    console.print(f"JSON, tables and plot: {options.results}")
    passed = all(verdict.passed for result in results for verdict in result.verdicts)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
