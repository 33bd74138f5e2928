"""The runner of pjdfstest notices what goes wrong, on small suites made for the purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.differences import LIST
from tests.conformance.pjdfstest import (
    FILES_MIN,
    collect,
    compare,
    expected_failures,
    run_suite,
)
from tests.conformance.tap import parse


@pytest.mark.parametrize(
    ("output", "passed", "excused", "failed"),
    [
        ("1..2\nok 1\nok 2\n", 2, 0, []),
        ("1..2\nok 1\nnot ok 2 - tried 'open x', expected 0, got EIO\n", 1, 0, [2]),
        ("1..3\nok 1\n", 1, 0, [2, 3]),
        ("1..1\nok 1\nok 2\n", 2, 0, [0]),
        ("ok 1\n", 1, 0, [0]),
        ("", 0, 0, [0]),
        ("1..2\nok 1 # TODO known\nnot ok 2 # TODO known\n", 1, 1, []),
    ],
)
def test_parse(output: str, passed: int, excused: int, failed: list[int]) -> None:
    outcome = parse(output)
    assert (outcome.passed, outcome.excused) == (passed, excused)
    assert sorted(outcome.failed) == failed


def make_suite(folder: Path, **bodies: str) -> list[Path]:
    paths = []
    for name, body in bodies.items():
        path = folder / "tests" / "made" / f"{name}.t"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
        paths.append(path)
    return paths


def test_run_suite(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    tests = make_suite(
        tmp_path,
        good="echo 1..1; touch x; test $(ls | wc -l) = 1 && echo ok 1",
        bad="echo 1..1; echo 'not ok 1 - broken'",
        dies="echo 1..1; echo ok 1; kill -9 $$",
        type="echo 1..1; df -PT . | tail -1 | awk '{print $2}' | grep -qx ext4 && echo ok 1",
    )
    outcomes = run_suite(tests, root, jobs=2)
    assert {name: sorted(outcome.failed) for name, outcome in outcomes.items()} == {
        "made/good.t": [],
        "made/bad.t": [1],
        "made/dies.t": [0],
        "made/type.t": [],
    }
    assert list(root.iterdir()) == []


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {"chmod/00.t": parse("1..2\nok 1\nnot ok 2 - why\n")}
    assert compare(outcomes, set()) == 1
    assert "NEW chmod/00.t 2: - why" in capsys.readouterr().out
    assert compare(outcomes, {("chmod/00.t", 2)}) == 0
    assert compare(outcomes, {("chmod/00.t", 1), ("chmod/00.t", 2)}) == 1
    assert "GONE chmod/00.t 1" in capsys.readouterr().out
    assert compare(outcomes, {("chmod/00.t", 2), ("link/00.t", 1)}) == 0


def test_expected_failures_carry_reasons() -> None:
    text = "# x\n- `open/03.t` 4, 5: paths are shorter\n- `open/04.t` 1:\n- no\n"
    assert expected_failures(text) == {("open/03.t", 4), ("open/03.t", 5)}
    for line in LIST.read_text().splitlines():
        if line.startswith("- `"):
            assert expected_failures(line), f"{line!r} has no reason or cannot be read"


def test_a_choice_of_nothing_is_refused(tmp_path: Path) -> None:
    """No file, no failure: that must not look like success."""
    make_suite(tmp_path, **{f"t{number}": "" for number in range(FILES_MIN)})
    (tmp_path / "pjdfstest").touch(mode=0o755)
    assert len(collect(tmp_path, ["made/t1"])) > 1
    with pytest.raises(SystemExit, match="no file of the suite begins with mad/"):
        collect(tmp_path, ["mad/"])
