"""Runs the filesystem tests of an installed LTP on fpfs and on ext4, and compares how they end.

Usage: python -m tests.conformance.ltp LTP [--only open0]

LTP is the folder that LTP was installed to. Of its lists of tests those are run whose files are in
TMPDIR, which lies on a mount of fpfs and on one of ext4; not those that make filesystems of their
own, or change the machine. What ext4 does not pass is not run on fpfs.

docs/conformance.md lists what ends otherwise on fpfs, each with its reason; an entry that is not
found any more is an error, too. What tests said is kept under build/conformance.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fpfs.daemon.mount.fusermount import abort_connection
from fpfs.testing.mounted import mounted
from tests.conformance.differences import HANG, PASS, Result
from tests.conformance.pairs import Pair, Side, arguments_of, conclude, outputs, run_on_pairs
from tests.conformance.sandbox import ext4_mounted, run_alone

SUITE = "ltp"
LISTS = ("syscalls", "fs_perms_simple", "fcntl-locktests", "smoketest", "fs")
TESTS_MIN = 450
"""The tests as they are known: fewer are not the suite."""
TIMEOUT_S = 300
DISK_BYTES = 6 * 2**30

_ELSEWHERE = re.compile(
    r"acct|binfmt|dirty|finit_module|ioctl_loop|isofs|macsec|ping|proc01|quota|read_all|squashfs"
)
"""Tests of other things than the files in TMPDIR."""
_OWN_FILESYSTEM = frozenset(
    "all_filesystems filesystems format_device mount_device needs_device needs_hugetlbfs"
    " needs_overlay needs_rofs".split()
)
_OF_THE_MACHINE = frozenset("needs_cgroup_ctrls restore_wallclock save_restore".split())
_OUTCOMES = ((2, "brok"), (1, "fail"), (4, "warn"), (32, "conf"))
"""Bits of exit statuses, the worst first (LTP's include/tst_res_flags.h)."""


def outcome_of(status: int | None) -> str:
    """LTP's word for an exit status."""
    if status is None:
        return HANG
    if status == 0:
        return PASS
    known = sum(bit for bit, _ in _OUTCOMES)
    words = [word for bit, word in _OUTCOMES if status & bit and not status & ~known]
    return words[0] if words else "died"


def uses_its_folder(about: Mapping[str, object]) -> bool:
    """Whether a test works on files in TMPDIR and nothing else, as LTP's metadata describes it."""
    return "needs_tmpdir" in about and not about.keys() & (_OWN_FILESYSTEM | _OF_THE_MACHINE)


def collect(installed: Path, only: Sequence[str]) -> dict[str, str]:
    """Commands of tests by name."""
    programs = installed / "testcases" / "bin"
    if not programs.is_dir():
        raise SystemExit(f"{installed} holds no installed LTP: run make install, with this prefix")
    described = json.loads((installed / "metadata" / "ltp.json").read_text())["tests"]
    tests: dict[str, str] = {}
    for name in LISTS:
        for line in (installed / "runtest" / name).read_text().splitlines():
            test, _, command = line.partition("#")[0].expandtabs().strip().partition(" ")
            if not command or test in tests or _ELSEWHERE.match(test):
                continue
            # Nothing describes the older tests: of the list of system calls they are left out.
            about = described.get(command.split()[0], {} if name == "syscalls" else None)
            if about is None or uses_its_folder(about):
                tests[test] = command.replace("/tmp/", "$TMPDIR/")
    if not only and len(tests) < TESTS_MIN:
        raise SystemExit(
            f"{installed} has {len(tests)} tests, {TESTS_MIN} are known: install it whole"
        )
    tests = {name: tests[name] for name in tests if not only or name.startswith(tuple(only))}
    if not tests:
        raise SystemExit(f"no test of the suite begins with {' or '.join(only)}")
    return tests


@contextlib.contextmanager
def fpfs_side(folder: Path) -> Iterator[Side]:
    """A mount of fpfs over an ext4 of its own."""
    with (
        ext4_mounted(made(folder) / "disk", size_bytes=DISK_BYTES) as disk,
        mounted(devices=[made(disk / "device")], parent=folder) as mount,
    ):
        mount.allow_log("")  # tests kill what they start

        def renew() -> None:
            mount.tear_down()
            mount.remove_arena()
            shutil.rmtree(disk / "device")
            made(disk / "device")
            mount.mount()

        def abort() -> None:
            entry = mount.entry()
            if entry is not None:
                abort_connection(entry)

        yield Side("fpfs", folder, renew, {"ROOT": str(mount.root)}, abort=abort)
        shutil.copy(mount.log, outputs(SUITE) / f"{folder.name}.log")


@contextlib.contextmanager
def ext4_side(folder: Path) -> Iterator[Side]:
    """A directory of an ext4; what hangs on it is killed, and nothing is left of a test."""
    with ext4_mounted(made(folder) / "disk", size_bytes=DISK_BYTES) as disk:
        yield Side("ext4", folder, lambda: None, {"ROOT": str(disk)})


def made(folder: Path) -> Path:
    """A new directory."""
    folder.mkdir()
    return folder


def run_test(installed: Path, commands: Mapping[str, str], side: Side, test: str) -> Result:
    """Run one test by itself, in a folder of its own."""
    output = outputs(SUITE, side) / f"{test}.txt"
    folder = Path(tempfile.mkdtemp(prefix=f"{test}-", dir=side.variables["ROOT"]))
    folder.chmod(0o777)
    status = run_alone(
        ["sh", "-c", commands[test]],
        output=output,
        cwd=folder,
        environment={
            **os.environ,
            "PATH": f"{installed}/testcases/bin:{os.environ['PATH']}",
            "LTPROOT": str(installed),
            "TMPDIR": str(folder),
            "TMP": str(folder),
        },
        timeout_s=TIMEOUT_S,
        keep=side.folder,
        abort=side.abort,
    )
    if status is None:
        side.renew()
    else:
        shutil.rmtree(folder, ignore_errors=True)
    said = [
        line.strip()
        for line in output.read_text(errors="replace").splitlines()
        if re.search(r"TFAIL|TBROK|TCONF|TWARN", line)
    ]
    return Result(outcome_of(status), " | ".join(said)[:400] or f"exit status {status}")


def open_pairs(stack: contextlib.ExitStack, folder: Path, jobs: int) -> list[Pair]:
    """A pair of fpfs and ext4 for each of `jobs`, taken down with `stack`."""
    return [
        (
            stack.enter_context(fpfs_side(folder / f"fpfs{job}")),
            stack.enter_context(ext4_side(folder / f"ext4{job}")),
        )
        for job in range(jobs)
    ]


def main() -> int:
    """Returns the exit status: 0 when all went as listed."""
    arguments = arguments_of(__doc__.splitlines()[0]).parse_args()
    if os.geteuid() != 0:
        raise SystemExit("LTP's tests change owners and need root")
    installed = arguments.built.resolve()
    commands = collect(installed, arguments.only)
    folder = Path(tempfile.mkdtemp(prefix="fpfs-ltp-"))
    folder.chmod(0o755)
    try:
        with contextlib.ExitStack() as stack:
            results = run_on_pairs(
                open_pairs(stack, folder, arguments.jobs),
                list(commands),
                functools.partial(run_test, installed, commands),
                limit_s=arguments.limit_s,
            )
    finally:
        shutil.rmtree(folder)
    return conclude(SUITE, results, list(commands))


if __name__ == "__main__":
    sys.exit(main())
