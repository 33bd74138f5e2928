"""The runners of xfstests and LTP notice what goes wrong, on small suites made for the purpose."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import mounted
from tests.conformance import ltp, pairs, xfstests
from tests.conformance.differences import HANG, LIST, PASS, Result, differences, listed, report
from tests.conformance.pairs import Side, run_on_pairs
from tests.conformance.sandbox import ext4_mounted, run_alone
from tests.support.processes import run
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _outputs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "REPOSITORY", tmp_path)


# --- the list -------------------------------------------------------------------------------


def test_listed() -> None:
    text = "- xfstests notrun `generic/012` `generic/016`: reason\n- ltp fail `open01`: why\n"
    text += "- xfstests fail `generic/017`:\n- `chmod/00.t` 1: other\n"
    assert listed(text, "xfstests") == {("generic/012", "notrun"), ("generic/016", "notrun")}
    assert listed(text, "ltp") == {("open01", "fail")}


def test_every_line_of_the_list_can_be_read() -> None:
    for line in LIST.read_text().splitlines():
        for suite in ("xfstests", "ltp"):
            if line.startswith(f"- {suite} "):
                assert listed(line, suite), f"{line!r} has no reason or cannot be read"


def test_what_is_not_listed_and_what_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    passes, fails = Result(PASS), Result("fail", "why")
    results = {
        "same": (passes, passes),
        "worse": (fails, passes),
        "fails on both": (fails, fails),
    }
    found = differences(results)
    assert found == {("worse", "fail"): "why"}
    assert report(found, {("worse", "fail")}, tried=results) == 0
    assert report(found, {("not tried", "fail"), ("worse", "fail")}, tried=results) == 0
    assert report(found, set(), tried=results) == 1
    assert "NEW worse fail: why" in capsys.readouterr().out
    assert report(found, {("worse", "hang"), ("same", "fail")}, tried=results) == 3
    said = capsys.readouterr().out
    assert "GONE worse hang" in said
    assert "GONE same fail" in said


def test_what_ext4_does_not_pass_is_not_run_on_fpfs() -> None:
    ran: list[tuple[str, str]] = []

    def run_one(side: Side, test: str) -> Result:
        ran.append((side.name, test))
        return Result("fail" if (side.name, test) in {("ext4", "b"), ("fpfs", "a")} else PASS)

    sides = (Side("fpfs", Path(), lambda: None), Side("ext4", Path(), lambda: None))
    results = run_on_pairs([sides], ["a", "b"], run_one, limit_s=60)
    assert ran == [("ext4", "a"), ("fpfs", "a"), ("ext4", "b")]
    assert set(differences(results)) == {("a", "fail")}
    assert run_on_pairs([sides], ["a"], run_one, limit_s=0) == {}


def test_a_runner_that_breaks_ends() -> None:
    def run_one(_side: Side, test: str) -> Result:
        raise RuntimeError(test)

    sides = (Side("fpfs", Path(), lambda: None), Side("ext4", Path(), lambda: None))
    with pytest.raises(RuntimeError, match="a"):
        run_on_pairs([sides], ["a", "b"], run_one, limit_s=60)


@pytest.mark.parametrize(
    ("output", "status", "outcome"),
    [
        ("Ran: generic/001\nPassed all 1 tests\n", 0, PASS),
        ("generic/001 [not run] no\nRan: generic/001\nNot run: generic/001\n", 0, "notrun"),
        ("Ran: generic/001\nFailures: generic/001\nFailed 1 of 1 tests\n", 1, "fail"),
        ("Passed all 0 tests\n", 1, "broken"),
        ("Passed all 0 tests\n", 0, "broken"),
        ("", None, HANG),
    ],
)
def test_how_a_test_of_xfstests_ended(output: str, status: int | None, outcome: str) -> None:
    assert xfstests.parse(output, status).outcome == outcome


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        *((0, PASS), (1, "fail"), (3, "brok"), (32, "conf"), (33, "fail"), (4, "warn")),
        *((None, HANG), (137, "died"), (64, "died")),
    ],
)
def test_how_a_test_of_ltp_ended(status: int | None, outcome: str) -> None:
    assert ltp.outcome_of(status) == outcome


# --- suites that hang and differ ------------------------------------------------------------

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and loop devices are root's")


@pytest.mark.root
@ROOT
def test_nothing_is_left_of_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what left its process group nor what it mounted."""
    (tmp_path / "mount").mkdir()
    os.mkfifo(tmp_path / "fifo")
    reading = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    said, wait = tmp_path / "said", subprocess.Popen.wait

    def wait_begun(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        """Let its time begin when it hangs, however long it took to come to that."""
        wait_until(lambda: said.read_text().startswith("begun\n"))
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_begun)
    command = "exec 9> fifo; mount -t tmpfs tmpfs mount; setsid sleep infinity & echo begun; wait"
    status = run_alone(
        ["sh", "-c", command],
        output=said,
        cwd=tmp_path,
        environment=os.environ,
        timeout_s=0.1,
        keep=tmp_path,
    )
    assert status is None
    assert os.read(reading, 1) == b""  # nobody has the other end
    os.close(reading)
    assert mount_at(str(tmp_path / "mount")) is None


@pytest.mark.root
@ROOT
def test_what_others_take_down_meanwhile_is_gone(tmp_path: Path) -> None:
    """A mount that was there when a test began neither keeps its device nor its server."""
    fifo, kept = tmp_path / "fifo", tmp_path / "kept"
    os.mkfifo(fifo)
    command = f"echo begun > {fifo}; read -r end < {fifo}; test -d disk/lost+found"
    kept.mkdir()
    with (
        contextlib.ExitStack() as others,
        ext4_mounted(kept / "disk", size_bytes=64 * 2**20),
        ThreadPoolExecutor(1) as pool,
    ):
        others.enter_context(ext4_mounted(tmp_path / "others", size_bytes=64 * 2**20))
        mount = others.enter_context(mounted(devices=1))
        running = pool.submit(
            run_alone,
            ["sh", "-c", command],
            output=tmp_path / "said",
            cwd=kept,
            environment=os.environ,
            timeout_s=120,
            keep=kept,
        )
        assert fifo.read_text() == "begun\n"
        others.close()
        served = Path(f"/proc/{mount.server_pid}")
        wait_until(lambda: not served.exists())  # it has ended; the keeper has to learn of it
        # Others, with mounts of their own, may still have it.
        wait_until(lambda: f"{tmp_path}/others" not in run("losetup", "--list", "-O", "BACK-FILE"))
        fifo.write_text("end\n")
        assert running.result() == 0, (tmp_path / "said").read_text()


def limited(
    monkeypatch: pytest.MonkeyPatch,
    suite: ModuleType,
    run_test: Callable[[Side, str], Result],
    *,
    hangs: str,
    limit_s: float,
) -> Callable[[Side, str], Result]:
    """Run tests of a suite, one after the other; what hangs on fpfs alone has less time."""
    patient_s = suite.TIMEOUT_S

    def run_one(side: Side, test: str) -> Result:
        is_hang = test == hangs and side.name == "fpfs"
        monkeypatch.setattr(suite, "TIMEOUT_S", limit_s if is_hang else patient_s)
        return run_test(side, test)

    return run_one


@pytest.mark.root
@ROOT
def test_a_suite_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LTP's way: a test that differs, one that hangs on the mount, and the next one."""
    (tmp_path / "testcases/bin").mkdir(parents=True)
    (tmp_path / "runtest").mkdir()
    (tmp_path / "metadata").mkdir()
    for name in ltp.LISTS:
        (tmp_path / "runtest" / name).write_text("# none\n")
    (tmp_path / "runtest/fs").write_text(
        "made1 echo x > $TMPDIR/file && ls $TMPDIR/file\n"
        "made2 test $(stat -f -c %T $TMPDIR) != fuseblk || { echo TFAIL: it is fuse; exit 1; }\n"
        "made3 test $(stat -f -c %T $TMPDIR) != fuseblk || sleep infinity > $TMPDIR/file\n"
        "made4 exit 32\n"
        "made5 echo x > $TMPDIR/file && test $(ls | wc -l) = 1\n"
        "own_device own\n"
    )
    about = {"own": {"needs_tmpdir": True, "needs_device": True}}
    (tmp_path / "metadata/ltp.json").write_text(json.dumps({"tests": about}))
    commands = ltp.collect(tmp_path, ["made", "own"])
    assert "own_device" not in commands
    run_test = functools.partial(ltp.run_test, tmp_path, commands)
    with contextlib.ExitStack() as stack:
        results = run_on_pairs(
            ltp.open_pairs(stack, tmp_path, 1),
            list(commands),
            limited(monkeypatch, ltp, run_test, hangs="made3", limit_s=5),
            limit_s=600,
        )
    assert {test: ours.outcome for test, (ours, _) in results.items()} == {
        "made1": PASS,
        "made2": "fail",
        "made3": HANG,
        "made4": "conf",
        "made5": PASS,
    }
    assert set(differences(results)) == {("made2", "fail"), ("made3", HANG)}


CHECK = """#!/bin/sh
mount -t $FSTYP$FUSE_SUBTYP $TEST_FS_MOUNT_OPTS $TEST_DEV $TEST_DIR || exit 3
df -T $TEST_DIR | grep -q " $FSTYP " || exit 4
grep -q fsgqa2 /etc/passwd || exit 5
echo x >> $TEST_DIR/file
case $FSTYP,$1 in
  fuse,made/2) echo "$1 differs" ; words=Failures ;;
  fuse,made/3) exec sleep infinity > $TEST_DIR/held ;;
  *,made/4) [ $(wc -l < $TEST_DIR/file) = 1 ] || exit 6 ;;
esac
umount $TEST_DEV
echo "Ran: $1"
if [ "$words" ]; then echo "$words: $1"; exit 1; fi
echo "Passed all 1 tests"
"""


@pytest.mark.root
@ROOT
@pytest.mark.skipif(
    not (Path(sys.executable).parent / "fpfs").exists(), reason="fpfs is not beside this Python"
)
def test_a_suite_on_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of xfstests, which mounts by itself; after a hang its disks are new."""
    (tmp_path / "check").write_text(CHECK)
    (tmp_path / "check").chmod(0o755)
    with contextlib.ExitStack() as stack:
        (pair,) = xfstests.open_pairs(stack, tmp_path, 1)
        tests = ["made/1", "made/2", "made/3"]
        run_test = functools.partial(xfstests.run_test, tmp_path)
        run_one = limited(monkeypatch, xfstests, run_test, hangs="made/3", limit_s=15)
        results = run_on_pairs([pair], tests, run_one, limit_s=600)
        assert set(differences(results)) == {("made/2", "fail"), ("made/3", HANG)}, results
        assert run_one(pair[0], "made/4") == Result(PASS)
        assert run_one(pair[1], "made/4").outcome == "broken"  # its disk has been used
    assert "fsgqa2" not in Path("/etc/passwd").read_text()
