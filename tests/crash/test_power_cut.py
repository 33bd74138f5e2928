"""Power cuts: no promise is broken, and a disk that ignores flushes is noticed.

`make crash` does the same with thousands of cuts.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.power.cuts import (
    FORGETTABLE,
    Changes,
    Run,
    Totals,
    cut_again_and_again,
    images_folder,
)
from tests.crash.power.disk import Names
from tests.crash.power.recorded import check_recording
from tests.crash.power.recording import (
    FIRST_RECORD,
    BadRecording,
    make_log,
    read_log,
    recording_environment,
)
from tests.support.seeds import IS_LONG, chosen_seed

CUTS = 40 if IS_LONG else 6
CUTS_TO_FIND = 200
STEPS = 40
LONG_STEPS = 150
FOUND_SOON = "folders"
FOUND_LATE = [each for each in FORGETTABLE if each != FOUND_SOON]
WRITTEN_OFFSET = 6
"""Of the flag in a record (native/recorder/log.h)."""

CALLS = """
import os, sys, pathlib
folder = sys.argv[1]
os.chdir(folder)
first = os.open(folder + "/first", os.O_RDWR | os.O_CREAT, 0o600)
os.write(first, b"one")
os.writev(first, [b"two", b"three"])
os.pwrite(first, b"four", 5000)
os.pwritev(first, [b"five", b"six"], 9000)
os.ftruncate(first, 9003)
os.posix_fallocate(first, 0, 20_000)
os.fdatasync(first)
added = os.open("first", os.O_WRONLY | os.O_APPEND)
os.write(added, b"at the end")
pathlib.Path("second").write_bytes(b"replaced")
pathlib.Path("second").write_bytes(b"by this")
os.mkdir("sub")
os.rename("second", "sub/moved")
os.link("sub/moved", "linked")
sub = os.open("sub", os.O_RDONLY)
os.unlink("moved", dir_fd=sub)
os.fsync(sub)
os.truncate("linked", 3)
os.mkdir("gone")
os.rmdir("gone")
"""


@pytest.fixture
def run() -> Iterator[Run]:
    """How cuts are replayed."""
    folder = images_folder()
    yield Run(Names.POSIX, "", folder)
    shutil.rmtree(folder)


def test_no_promise_is_broken_by_power_cuts(run: Run) -> None:
    totals = Totals()
    broken = cut_again_and_again(cuts=CUTS, seed=chosen_seed(), steps=STEPS, run=run, totals=totals)
    assert not broken, broken
    assert totals.cuts == CUTS
    # Where fpfs keeps removed objects at all, some were: it is what most may go wrong with.
    show_type = ["stat", "-f", "-c", "%T", tempfile.gettempdir()]
    filesystem = subprocess.check_output(show_type, text=True).strip()
    assert (totals.kept > 0) == (filesystem in ("ext2/ext3", "xfs")), (filesystem, totals.kept)
    # Few cuts tear few writes, and perhaps none: 2 to 73 of 2,000 in runs of 6 cuts.
    kinds = ("kept", "dropped", "reordered", *(["torn"] if IS_LONG else []))
    assert all(totals.tally.counts[what] for what in kinds), totals.tally.counts


def test_no_promise_is_broken_while_devices_change(run: Run) -> None:
    totals = Totals()
    changing = run._replace(changes=Changes.ALWAYS)
    broken = cut_again_and_again(
        cuts=CUTS, seed=chosen_seed(), steps=STEPS, run=changing, totals=totals
    )
    assert not broken, broken
    assert totals.cuts == CUTS
    assert totals.devices.keys() >= {"added", "drained"}, totals.devices


@pytest.mark.parametrize(
    "forget", [FOUND_SOON, *(pytest.param(each, marks=pytest.mark.long) for each in FOUND_LATE)]
)
def test_a_flush_that_does_nothing_is_noticed(run: Run, forget: str) -> None:
    totals = Totals()
    forgetful = run._replace(forget=forget)
    # The database itself is flushed when the log has become long.
    steps = LONG_STEPS if forget == "catalog" else STEPS
    broken = cut_again_and_again(
        cuts=CUTS_TO_FIND, seed=1, steps=steps, run=forgetful, totals=totals
    )
    assert broken, f"{totals.cuts} cuts without the flushes of {forget}: {totals.report()}"
    recording = Path(broken.split("--replay ")[1].split()[0])
    shutil.rmtree(recording)


def record_calls(folder: Path, code: str) -> Path:
    """Run a program below the recorder; returns the log of what it did in `folder`."""
    log = folder.with_name("log")
    make_log(log)
    environment = {**os.environ, **recording_environment(log, [folder])}
    subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, check=True)
    return log


def test_the_recorder_sees_what_changes_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "device0"
    folder.mkdir()
    events = read_log(record_calls(folder, CALLS)).events
    assert all(event.operation.end for event in events)
    check_recording(events, [folder], tmp_path)


def test_what_cannot_be_replayed_fails_the_recording(tmp_path: Path) -> None:
    folder = tmp_path / "device0"
    folder.mkdir()
    code = """
import mmap, os, sys
file = os.open(sys.argv[1] + "/mapped", os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 4096)
mmap.mmap(file, 4096)
"""
    with pytest.raises(BadRecording, match="mmap of .*/mapped cannot be replayed"):
        read_log(record_calls(folder, code))


def test_files_outside_are_not_recorded(tmp_path: Path) -> None:
    folder = tmp_path / "device0"
    folder.mkdir()
    code = """
import os, pathlib, sys
pathlib.Path(sys.argv[1] + "-not").write_bytes(b"beside")
pathlib.Path(sys.argv[1] + "/../elsewhere").write_bytes(b"above")
"""
    assert read_log(record_calls(folder, code)).events == []


def test_a_record_that_a_killed_process_did_not_finish_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "device0"
    folder.mkdir()
    code = "import pathlib, sys; [pathlib.Path(sys.argv[1], name).touch() for name in 'abc']"
    log = record_calls(folder, code)
    names = [Path(event.operation.path).name for event in read_log(log).events]
    assert names == ["a", "a", "b", "b", "c", "c"]
    with log.open("r+b") as file:
        (length,) = struct.unpack("<I", os.pread(file.fileno(), 4, FIRST_RECORD))
        flag = FIRST_RECORD + length + WRITTEN_OFFSET
        assert os.pread(file.fileno(), 2, flag) == b"\x01\x00"
        os.pwrite(file.fileno(), b"\x00\x00", flag)
    events = read_log(log).events
    assert [Path(event.operation.path).name for event in events] == ["a", "b", "b", "c", "c"]
    assert not events[0].operation.end, "whether it was made cannot be known"


def test_a_full_log_fails_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.crash.power.recording.LOG_BYTES", 8192)
    folder = tmp_path / "device0"
    folder.mkdir()
    code = "import pathlib, sys; pathlib.Path(sys.argv[1], 'large').write_bytes(bytes(10_000))"
    with pytest.raises(BadRecording, match="the log was full"):
        read_log(record_calls(folder, code))
