"""``fpfs-ctl tune`` on a real mount: what it measures, proposes, sets and leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fpfs.testing.mounted import IN_MEMORY, Mount, check_fpfs, mounted, run_fpfs
from tests.unit.server.test_control_server import pid_of_nobody

CTL = "fpfs.cli.ctl"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def striped() -> Iterator[Mount]:
    """A mount over two devices. Samples are many, and each is durable."""
    with mounted(devices=2, parent=IN_MEMORY) as made:
        yield made


@pytest.fixture
def place(striped: Mount) -> Path:
    """A directory of its own on it."""
    return Path(tempfile.mkdtemp(dir=striped.root))


def tune(directory: Path, *words: str) -> dict[str, Any]:
    """Run ``fpfs-ctl tune`` with small samples; return its report."""
    small = ("--sample", "16M", "--bytes", "2G", "--time", "600", "--json")
    return dict(json.loads(check_fpfs("tune", directory, *small, *words, module=CTL)))


def settings_of(directory: Path) -> dict[str, str]:
    shown = json.loads(check_fpfs("policy", "get", directory, "--json", module=CTL))
    return {each["key"]: each["value"] for each in shown["settings"]}


def test_what_was_measured_is_reported_and_nothing_is_left(striped: Mount, place: Path) -> None:
    before = settings_of(place)
    written = sum(device.bytes_written for device in striped.status().devices)
    report = tune(place)
    samples = report["samples"]
    assert len({(s["chunk_bytes"], s["depth"], s["width"]) for s in samples}) == len(samples)
    assert len(samples) <= 12  # a tenth of all
    assert samples[0]["width"] == 2
    assert {sample["width"] for sample in samples} == {1, 2}
    assert all(sample["bytes_per_s"] > 0 for sample in samples)
    assert report["bytes_written"] == (len(samples) + 1) * 16 * MIB
    since = sum(device.bytes_written for device in striped.status().devices) - written
    assert since >= report["bytes_written"]
    assert os.listdir(place) == []
    assert settings_of(place) == before
    assert report["applied"] is False


def test_what_is_proposed_is_set_on_demand(striped: Mount, place: Path) -> None:
    report = tune(place, "--apply")
    proposed = report["proposed"]
    assert proposed.keys() == {"width", "chunk", "depth"}
    assert proposed.items() <= settings_of(place).items()
    assert settings_of(striped.root)["width"] == "all"


def test_the_table_names_the_best(place: Path) -> None:
    words = ("--sample", "16M", "--bytes", "2G", "--time", "600")
    lines = check_fpfs("tune", place, *words, module=CTL).splitlines()
    assert any("width" in line and "durable" in line for line in lines)
    assert sum("100%" in line for line in lines) == 1
    assert lines[-1].startswith(f"proposed: fpfs-ctl policy set {place} width=")


def test_all_combinations_on_demand_as_far_as_the_bytes_go(place: Path) -> None:
    words = ("--exhaustive", "--sample", "16M", "--bytes", "320M", "--time", "600", "--json")
    report = json.loads(check_fpfs("tune", place, *words, module=CTL))
    assert len(report["samples"]) == 19  # and a first one, by which nothing is judged
    assert report["bytes_written"] == 320 * MIB


def test_an_interrupted_one_leaves_nothing(place: Path) -> None:
    command = [sys.executable, "-m", CTL, "tune", str(place), "--sample", "64M"]
    # So much that it has not come to its end when it is seen to have begun.
    command += ["--exhaustive", "--bytes", "64G", "--time", "600"]
    for number, status, said in (
        (signal.SIGINT, 130, "fpfs-ctl: interrupted\n"),
        (signal.SIGTERM, 143, ""),
    ):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            while not any(place.glob(".fpfs-tune-*/sample")):
                assert process.poll() is None
            process.send_signal(number)
            assert process.stderr is not None
            assert process.stderr.read() == said
            assert process.wait() == status
        assert os.listdir(place) == []


def test_what_a_killed_one_left_is_removed(place: Path) -> None:
    left = place / f".fpfs-tune-{pid_of_nobody()}"
    other = place / f".fpfs-tune-{os.getpid()}"
    for folder in (left, other):
        folder.mkdir()
        (folder / "sample").write_bytes(b"left")
    tune(place)
    assert os.listdir(place) == [other.name]
    (other / "sample").unlink()
    other.rmdir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--bytes", "1M"), "this is too little, or too much, to measure anything; take 256M or"),
        (("--time", "0"), "this is too little, or too much, to measure anything; take 256M or"),
        (("--bytes", "x"), "--bytes=x: this is not a size in whole bytes"),
        (("--sample", "1G", "--bytes", "1G"), "60 s and 1.00 GiB were not enough; allow more"),
    ],
)
def test_a_budget_that_is_none_is_refused(place: Path, words: tuple[str, ...], said: str) -> None:
    done = run_fpfs("tune", place, *words, module=CTL)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(place) == []


def test_a_place_that_cannot_be_written_is_refused(striped: Mount, tmp_path: Path) -> None:
    for where, said in (
        (tmp_path, "is not on an fpfs mount"),
        (striped.root / "none", "No such file or directory; name a directory"),
        (striped.root / ".fpfs" / "versions", "name a directory on the mount that you can write"),
    ):
        done = run_fpfs("tune", where, module=CTL)
        assert done.returncode == 1
        assert said in done.stderr
        assert done.stderr.count("\n") == 1
