"""What fails is named in the last lines of a run, with the command that repeats it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SCREEN = 40
"""Lines that are looked at."""

FAILING = """\
import pytest

from tests.support.seeds import chosen_seed


@pytest.fixture
def never_there():
    raise OSError("not there")


def test_of_a_fixture(never_there):
    pass


@pytest.mark.long
def test_of_a_number():
    assert chosen_seed() == 0
"""


def run(folder: Path, *command: str, **environment: str) -> str:
    """What a command prints that runs tests of `folder`, of which one fails."""
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    return result.stdout


def test_a_run_tells_how_to_repeat_what_failed(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\naddopts = -p tests.conftest\n")
    (tmp_path / "test_failing.py").write_text(FAILING)
    printed = run(tmp_path, sys.executable, "-m", "pytest", "-m", "", FPFS_LONG="1")
    repeats = [
        line.removeprefix("repeat: ")
        for line in printed.splitlines()
        if line.startswith("repeat: ")
    ]
    assert len(repeats) == 2, printed
    for repeat, name in zip(repeats, ("test_of_a_number", "test_of_a_fixture"), strict=True):
        words = shlex.split(repeat)
        assert words[0] == "FPFS_LONG=1"
        assert words[-1] == f"test_failing.py::{name}"
        seeds = [word for word in words if word.startswith("FPFS_SEED=")]
        assert len(seeds) == (name == "test_of_a_number")
        again = run(tmp_path, "env", *words)
        assert f"repeat: {repeat}" in again
        assert all(f"\n{seed}\n" in again for seed in seeds)


LOGS = {
    "test-native": """\
TEST CASE:  file: a write, and the next
file.cc:12: ERROR: CHECK( 1 == 2 ) is NOT correct!
repeat: build/native/tests/fpfs_native_tests -tc='file: a write? and the next'
make: *** [Makefile:150: test-native] Error 1
""",
    "test-python": "".join(
        f"repeat: python -m pytest -m '' 'tests/test_x.py::test_{number}'\n" for number in range(25)
    )
    + "".join(f"FAILED tests/test_x.py::test_{number} - assert\n" for number in range(25)),
    "lint": """\
engine.cc:7:3: error: use nullptr [modernize-use-nullptr]
FAILED  clang-tidy: clang_tidy clang++ clang-tidy
repeat: make lint
""",
}


@pytest.fixture
def make(tmp_path: Path) -> Path:
    """A `make` each of whose targets fails with one of LOGS, if there is one."""
    for target, log in LOGS.items():
        (tmp_path / target).write_text(log)
    script = tmp_path / "make"
    script.write_text(
        f"#!/bin/bash\ncd {tmp_path}\n"
        'for target in "$@"; do [ ! -e "$target" ] || { cat "$target"; exit 2; }; done\n'
    )
    script.chmod(0o755)
    return script


def test_ci_tells_how_to_repeat_what_failed(make: Path) -> None:
    result = subprocess.run(
        [REPOSITORY / ".ci/run"],
        env=os.environ | {"PATH": f"{make.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    screen = "\n".join(result.stdout.splitlines()[-SCREEN:])
    assert "make setup test-native: exit status 2" in screen
    for text in (
        "repeat: build/native/tests/fpfs_native_tests -tc='file: a write? and the next'",
        "file.cc:12: ERROR: CHECK( 1 == 2 ) is NOT correct!",
        "repeat: python -m pytest -m '' 'tests/test_x.py::test_24'",
        "FAILED tests/test_x.py::test_24 - assert",
        "engine.cc:7:3: error: use nullptr",
        "FAILED  clang-tidy",
        "repeat: make lint",
    ):
        assert text in screen, screen
