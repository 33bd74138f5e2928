"""The benchmarks' own logic: the order of play, the verdicts, the report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import report
from benchmarks.framework import (
    Bound,
    Contender,
    Entry,
    Group,
    GroupResult,
    Missing,
    Sense,
    Spread,
    Unavailable,
    all_met,
    run_group,
)
from benchmarks.places import QUICK, Bench


def ignore(text: str) -> None:
    """No progress is shown."""


def group_of(
    *entries: Entry,
    bounds: tuple[Bound, ...] = (),
    rounds_min: int = 1,
    rounds_max: int | None = None,
) -> Group:
    """A group that is ready at once."""

    @contextlib.contextmanager
    def opened(bench: Bench) -> Iterator[Sequence[Entry]]:
        yield entries

    return Group(
        name="g",
        title="t",
        unit="GB/s",
        open=opened,
        bounds=bounds,
        rounds_min=rounds_min,
        rounds_max=rounds_max,
    )


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A stage without anything on it."""
    made = Bench(tmp_path, scale=QUICK)
    yield made
    made.close()


def play_values(bench: Bench, *, rounds: int = 5, bounds: tuple[Bound, ...]) -> GroupResult:
    """One contender that gains 1 each round, beside a constant peer."""
    own = iter(range(1, 100))
    entries = (
        Contender(name="own", play=lambda: float(next(own))),
        Contender(name="peer", play=lambda: 2.0),
    )
    return run_group(group_of(*entries, bounds=bounds), bench, rounds=rounds, progress=ignore)


def test_what_else_a_round_tells_stands_in_the_table_and_is_judged(bench: Bench) -> None:
    quiesced: list[float] = []
    group = group_of(
        Contender(
            name="own",
            play=lambda: 1.0,
            quiesce=lambda: quiesced.append(3.0 + len(quiesced)),
            also={"own, in the end": lambda: quiesced[-1]},
        ),
        bounds=(Bound(contender="own, in the end", peer="own", figure=4.5),),
    )
    result = run_group(group, bench, rounds=3, progress=ignore)
    assert result.values == {"own": [1.0] * 3, "own, in the end": [3.0, 4.0, 5.0]}
    assert [verdict.measured for verdict in result.verdicts] == [4.0]
    assert not all_met([result])


def test_every_contender_plays_once_a_round_and_nobody_always_follows_the_same(
    bench: Bench,
) -> None:
    played: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(
            name=name,
            prepare=lambda: played.append(f"{name}-prepared"),
            play=lambda: played.append(name) or 1.0,
            quiesce=lambda: played.append(f"{name}-quiesced"),
        )

    group = group_of(contender("a"), contender("b"), contender("c"))
    run_group(group, bench, rounds=4, progress=ignore)
    assert played[:3] == ["a-prepared", "a", "a-quiesced"]
    names = [name for name in played if "-" not in name]
    rounds = [names[index : index + 3] for index in range(0, 12, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len({tuple(order) for order in rounds}) == 4


def test_of_two_contenders_neither_always_follows_the_other(bench: Bench) -> None:
    played: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(name=name, play=lambda: played.append(name) or 1.0)

    run_group(group_of(contender("a"), contender("b")), bench, rounds=4, progress=ignore)
    assert "".join(played) == "abbabaab"


def test_a_ratio_is_of_medians_and_its_spread_of_pairs(bench: Bench) -> None:
    bound = Bound(contender="own", peer="peer", peer_factor=0.5, figure=3.0)
    (verdict,) = play_values(bench, bounds=(bound,)).verdicts
    assert verdict.measured == 3.0
    assert verdict.paired == Spread(median=3.0, low=2.0, high=4.0)
    assert verdict.passed


def test_bounds_fail_on_the_wrong_side(bench: Bench) -> None:
    bounds = (
        Bound(contender="own", figure=3.1),
        Bound(contender="own", figure=2.9, sense=Sense.AT_MOST),
        Bound(contender="own", figure=3.0, sense=Sense.AT_MOST),
    )
    result = play_values(bench, bounds=bounds)
    assert [verdict.passed for verdict in result.verdicts] == [False, False, True]
    assert not all_met([result])
    assert all_met([play_values(bench, bounds=bounds[2:])])


def test_what_is_missing_is_said_and_not_judged(bench: Bench) -> None:
    group = group_of(
        Contender(name="own", play=lambda: 1.0),
        Missing(name="peer", reason="not installed"),
        bounds=(Bound(contender="own", peer="peer", figure=1),),
    )
    result = run_group(group, bench, rounds=2, progress=ignore)
    assert result.verdicts == ()
    assert [missing.reason for missing in result.missing] == ["not installed"]
    assert not all_met([result])
    assert "| g | own / (peer) ≥ 1 | | | **not measured** |" in report.as_markdown([result])


def test_a_bound_on_nobody_is_an_error(bench: Bench) -> None:
    for bound in (
        Bound(contender="onw", figure=1),
        Bound(contender="own", peer="pere", figure=1),
    ):
        with pytest.raises(AssertionError, match="nobody is called"):
            play_values(bench, bounds=(bound,))


def test_a_group_that_cannot_be_measured_says_why(bench: Bench) -> None:
    def play() -> float:
        raise Unavailable("needs root")

    group = group_of(Contender(name="own", play=play), bounds=(Bound(contender="own", figure=1),))
    result = run_group(group, bench, rounds=2, progress=ignore)
    assert result.unavailable == "needs root"
    assert not all_met([result])
    console = Console(record=True, width=120)
    report.print_verdicts(console, [result])
    assert "not measured: needs root" in console.export_text()


def test_a_group_that_fails_is_reported_and_stops_nothing(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def play() -> float:
        raise OSError(28, "No space left on device")

    result = run_group(group_of(Contender(name="own", play=play)), bench, rounds=2, progress=ignore)
    assert result.failed
    assert not all_met([result])
    assert result.unavailable == "failed: [Errno 28] No space left on device"
    assert "Traceback" in capsys.readouterr().err


def test_a_group_may_play_more_rounds(bench: Bench) -> None:
    group = group_of(Contender(name="own", play=lambda: 1.0), rounds_min=3)
    assert run_group(group, bench, rounds=2, progress=ignore).values == {"own": [1.0] * 3}


def test_a_group_may_play_fewer_rounds(bench: Bench) -> None:
    group = group_of(Contender(name="own", play=lambda: 1.0), rounds_max=1)
    assert run_group(group, bench, rounds=5, progress=ignore).values == {"own": [1.0]}


def test_the_report_has_every_value_and_a_plot(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = play_values(bench, bounds=(Bound(contender="own", peer="peer", figure=9),))
    machine = report.describe_machine(tmp_path, arena_bytes=1024, load_before=0.5)
    document = report.as_json([result], machine=machine, scale={})
    report.write_json(document, tmp_path / "results.json")
    report.plot([result], tmp_path / "results.png")
    read = json.loads((tmp_path / "results.json").read_text())
    assert read["groups"][0]["values"]["own"] == [1, 2, 3, 4, 5]
    assert read["groups"][0]["requirements"][0]["passed"] is False
    assert read["machine"]["filesystem"] != "unknown"
    assert (tmp_path / "results.png").stat().st_size > 1000
    scale = {"tensors": 1, "tensors_large": 2, "tensors_lab": 3}
    assert "load 0.5 before the run; arena 0 MiB" in report.conditions(machine, scale)
    assert "| g | own | 3.00 | 2.00 … 4.00 | GB/s |" in report.as_markdown([result])
    console = Console(record=True, width=120)
    report.print_group(console, result)
    assert "FAIL own / (peer) ≥ 9: 1.50" in console.export_text()


def test_the_document_keeps_what_is_outside_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(f"head\n{report.MARK_BEGIN}\nold\n{report.MARK_END}\ntail\n")
    for text in ("first\n", "new\n"):
        report.update_document(document, text)
    expected = f"head\n{report.MARK_BEGIN}\nnew\n{report.MARK_END}\ntail\n"
    assert document.read_text() == expected
    document.write_text("no marks")
    with pytest.raises(ValueError, match="has no lines"):
        report.update_document(document, "new\n")
