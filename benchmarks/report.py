"""Results as a table on the terminal, as JSON, and as a plot.

Concurrency: none.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.framework import GroupResult, Spread, Verdict

MARK_BEGIN = "<!-- measured: begin -->"
MARK_END = "<!-- measured: end -->"


def print_group(console: Console, result: GroupResult) -> None:
    """The contenders of a group and its verdicts."""
    table = Table(title=f"{result.group.name}: {result.group.title}", title_justify="left")
    for heading in ("contender", result.group.unit, "quartiles", "rounds"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    if result.unavailable is not None:
        table.add_row(f"not measured: {result.unavailable}")
    for name, values in result.values.items():
        spread = Spread.of(values)
        table.add_row(name, _number(spread.median), _quartiles(spread), str(len(values)))
    for missing in result.missing:
        table.add_row(f"{missing.name}: {missing.reason}")
    console.print(table)
    for verdict in result.verdicts:
        console.print(_verdict_line(verdict))
    console.print()


def print_verdicts(console: Console, results: Sequence[GroupResult]) -> None:
    """Every requirement of the run in one table."""
    table = Table(title="requirements", title_justify="left")
    for heading in ("group", "required", "measured", "quartiles of the rounds", ""):
        table.add_column(heading)
    for result in results:
        if result.unavailable is not None:
            table.add_row(result.group.name, f"not measured: {result.unavailable}")
        for verdict in result.verdicts:
            table.add_row(
                result.group.name,
                verdict.bound.text,
                _number(verdict.measured),
                _quartiles(verdict.paired),
                _mark(verdict),
            )
        for bound in result.unjudged:
            table.add_row(result.group.name, bound.text, "", "", "[red]not measured[/red]")
    console.print(table)


def conditions(machine: dict[str, Any], scale: dict[str, Any]) -> str:
    """The machine and the scale in one sentence."""
    arena = machine["arena_bytes"]
    return (
        f"{machine['processors']} processors, {machine['memory_kib'] / 2**20:.0f} GiB, kernel"
        f" {machine['kernel']}, {machine['filesystem']}, {machine['date']},"
        f" load {machine['load_before']:.1f} before the run;"
        f" arena {'unknown' if arena is None else f'{arena / 2**20:.0f} MiB'};"
        f" states of {scale['tensors']}, {scale['tensors_large']} (large) and"
        f" {scale['tensors_lab']} (lab) tensors of 64 MiB."
    )


def as_json(
    results: Sequence[GroupResult], *, machine: dict[str, Any], scale: dict[str, Any]
) -> dict[str, Any]:
    """Everything measured, with the machine it was measured on."""
    return {
        "machine": machine,
        "scale": scale,
        "groups": [_group_as_json(result) for result in results],
    }


def _group_as_json(result: GroupResult) -> dict[str, Any]:
    return {
        "name": result.group.name,
        "title": result.group.title,
        "unit": result.group.unit,
        "unavailable": result.unavailable,
        "values": result.values,
        "medians": {name: statistics.median(v) for name, v in result.values.items()},
        "missing": {missing.name: missing.reason for missing in result.missing},
        "requirements": [
            {
                "text": verdict.bound.text,
                "measured": verdict.measured,
                "paired": dataclasses.asdict(verdict.paired),
                "passed": verdict.passed,
            }
            for verdict in result.verdicts
        ],
    }


def describe_machine(
    directory: Path, *, arena_bytes: int | None, load_before: float
) -> dict[str, Any]:
    """What a reader needs in order to judge the figures."""
    meminfo = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    return {
        "kernel": platform.release(),
        "processors": os.cpu_count(),
        "memory_kib": int(meminfo["MemTotal"].split()[0]),
        "filesystem": _filesystem_of(directory),
        "arena_bytes": arena_bytes,
        "load_before": load_before,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "python": platform.python_version(),
    }


def plot(results: Sequence[GroupResult], path: Path) -> None:
    """One row of bars for each group, with quartiles. Needs matplotlib (the bench extra)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn = [result for result in results if result.values]
    if not drawn:
        return
    heights = [0.8 + 0.35 * len(result.values) for result in drawn]
    figure, axes = plt.subplots(
        len(drawn),
        1,
        figsize=(9, sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis, result in zip(axes[:, 0], drawn, strict=True):
        _draw(axis, result)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axis: Any, result: GroupResult) -> None:
    names = list(result.values)
    spreads = [Spread.of(values) for values in result.values.values()]
    medians = [spread.median for spread in spreads]
    errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    colours = ["tab:blue" if name.startswith(("fpfs", "two")) else "lightgray" for name in names]
    axis.barh(names, medians, xerr=errors, color=colours, ecolor="black", capsize=2)
    axis.invert_yaxis()
    axis.set_title(f"{result.group.title} [{result.group.unit}]", loc="left", fontsize=9)
    axis.tick_params(labelsize=8)


def as_markdown(results: Sequence[GroupResult]) -> str:
    """Medians and verdicts as two tables for the documentation."""
    lines = ["| group | contender | median | quartiles | unit |", "|---|---|---:|---:|---|"]
    for result in results:
        for name, values in result.values.items():
            spread = Spread.of(values)
            lines.append(
                f"| {result.group.name} | {name} | {_number(spread.median)}"
                f" | {_quartiles(spread)} | {result.group.unit} |"
            )
    lines += ["", "| group | required | measured | quartiles of the rounds | |"]
    lines += ["|---|---|---:|---:|---|"]
    for result in results:
        for verdict in result.verdicts:
            lines.append(
                f"| {result.group.name} | {verdict.bound.text} | {_number(verdict.measured)}"
                f" | {_quartiles(verdict.paired)} | {'pass' if verdict.passed else '**missed**'} |"
            )
        for bound in result.unjudged:
            lines.append(f"| {result.group.name} | {bound.text} | | | **not measured** |")
    return "\n".join(lines) + "\n"


def update_document(path: Path, text: str) -> None:
    """Replace what a document says between its marks. ValueError if it has none."""
    document = path.read_text()
    before, begin, rest = document.partition(MARK_BEGIN)
    _, end, after = rest.partition(MARK_END)
    if not end:
        raise ValueError(f"{path} has no lines '{MARK_BEGIN}' and '{MARK_END}'")
    path.write_text(f"{before}{begin}\n{text}{end}{after}")


def write_json(document: dict[str, Any], path: Path) -> None:
    """Write a document for programs and for comparing runs."""
    path.write_text(json.dumps(document, indent=1) + "\n")


def _filesystem_of(directory: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mountpoint, kind, *_ = line.split(" ")
        inside = directory.is_relative_to(mountpoint)
        if inside and len(mountpoint) >= len(best[0]):
            best = (mountpoint, f"{kind} on {device}")
    return best[1]


def _verdict_line(verdict: Verdict) -> str:
    return (
        f"  {_mark(verdict)} {verdict.bound.text}: {_number(verdict.measured)}"
        f" ({_quartiles(verdict.paired)})"
    )


def _mark(verdict: Verdict) -> str:
    return "[green]pass[/green]" if verdict.passed else "[red]FAIL[/red]"


def _quartiles(spread: Spread) -> str:
    return f"{_number(spread.low)} … {_number(spread.high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
