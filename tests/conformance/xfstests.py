"""Runs tests of a built xfstests on fpfs and on ext4, and compares how they end.

Usage: python -m tests.conformance.xfstests XFSTESTS [-g generic/quick] [--only generic/001]

XFSTESTS is a folder in which xfstests was built. Each test runs by itself, on two disks that stay
from test to test as the suite wants it; one that hangs is killed with all it mounted. What ext4
does not pass is not run on fpfs. One run at a time: two would share the suite's files in /tmp.

docs/conformance.md lists what ends otherwise on fpfs, each with its reason; an entry that is not
found any more is an error, too. What tests said is kept under build/conformance.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fpfs.daemon.devices.arena import arena_path
from fpfs.daemon.devices.label import read_stamp
from tests.conformance.differences import HANG, PASS, Result
from tests.conformance.known import named_filesystem
from tests.conformance.pairs import Pair, Side, arguments_of, conclude, outputs, run_on_pairs
from tests.conformance.sandbox import ext4_mounted, loop_device, run_alone
from tests.support.failures.faults import make_ext4
from tests.support.processes import REPOSITORY, run

SUITE = "xfstests"
GROUP = "generic/quick"
GROUP_TESTS_MIN = 600
"""The group as it is known: fewer are not the suite."""
TIMEOUT_S = 300
DISK_BYTES = 6 * 2**30
MOUNT_OPTIONS = "staging=64M"
DISKS = ("test", "scratch")

_USERS = ("fsgqa", "123456-fsgqa", "fsgqa2")
# The suite names its files in /tmp by numbers of processes, which namespaces would have in common.
_PREPARE = """
mount -t overlay overlay -o lowerdir={folder}/sbin:$(realpath /sbin) $(realpath /sbin)
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/group /etc/group
echo {first_number} > /proc/sys/kernel/ns_last_pid
"""


def _variables(folder: Path, devices: Sequence[str]) -> dict[str, str]:
    """What the suite is told of the disks; makes its mountpoints."""
    found = {"RESULT_BASE": str(folder / "results"), "DIFF_LENGTH": "20"}
    for disk, device in zip(DISKS, devices, strict=True):
        (folder / f"{disk}-mount").mkdir()
        where = "TEST_DIR" if disk == "test" else "SCRATCH_MNT"
        found |= {f"{disk.upper()}_DEV": device, where: str(folder / f"{disk}-mount")}
    return found


def forget(device: Path) -> None:
    """Remove the staging memory that a killed server of this device left."""
    stamp = read_stamp(str(device), asked="forget") if device.exists() else None
    if stamp is not None:
        Path(arena_path(stamp.filesystem_id)).unlink(missing_ok=True)


@contextlib.contextmanager
def fpfs_side(folder: Path, prepare: str) -> Iterator[Side]:
    """Two filesystems of fpfs, each over an ext4 of its own, so that space is what it is there."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        devices = [
            stack.enter_context(ext4_mounted(folder / disk, size_bytes=DISK_BYTES)) / "device"
            for disk in DISKS
        ]

        def renew() -> None:
            for device in devices:
                forget(device)
                shutil.rmtree(device, ignore_errors=True)
                device.mkdir()

        renew()
        for device in devices:
            stack.callback(forget, device)
        # umount(8) finds no mount by its source where that is the path of a directory.
        test, scratch = (f"-o {MOUNT_OPTIONS},device={device}" for device in devices)
        variables = {
            **_variables(folder, [f"fpfs-{disk}" for disk in DISKS]),
            "FSTYP": "fuse",
            "FUSE_SUBTYP": ".fpfs",
            "TEST_FS_MOUNT_OPTS": test,
            "MOUNT_OPTIONS": scratch,
        }
        yield Side("fpfs", folder, renew, variables, prepare)


@contextlib.contextmanager
def ext4_side(folder: Path, prepare: str) -> Iterator[Side]:
    """Two block devices for ext4."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        devices = [
            stack.enter_context(loop_device(folder / f"{disk}.image", size_bytes=DISK_BYTES))
            for disk in DISKS
        ]

        def renew() -> None:
            for device in devices:
                make_ext4(device)

        renew()
        variables = {**_variables(folder, devices), "FSTYP": "ext4"}
        yield Side("ext4", folder, renew, variables, prepare)


def write_what_is_shown(folder: Path) -> None:
    """Write what the suite has to see in /etc and /sbin."""
    (folder / "sbin").mkdir()
    install = REPOSITORY / "mount_scripts" / "install_mount_helper"
    run(install, Path(sys.executable).parents[1], folder / "sbin")
    for name in ("passwd", "group"):
        text = Path(f"/etc/{name}").read_text()
        for number, user in enumerate(_USERS, start=61_001):
            rest = f"{number}::/tmp:/bin/bash" if name == "passwd" else ""
            text += f"{user}:*:{number}:{rest}\n"
        (folder / name).write_text(text)


def open_pairs(stack: contextlib.ExitStack, folder: Path, jobs: int) -> list[Pair]:
    """A pair of fpfs and ext4 for each of `jobs`, taken down with `stack`."""
    write_what_is_shown(folder)
    pairs = []
    for job in range(jobs):
        ours, theirs = (
            _PREPARE.format(folder=folder, first_number=number)
            for number in (1000 + 8000 * job, 5000 + 8000 * job)
        )
        pairs.append(
            (
                stack.enter_context(fpfs_side(folder / f"fpfs{job}", ours)),
                stack.enter_context(ext4_side(folder / f"ext4{job}", theirs)),
            )
        )
    return pairs


def parse(output: str, status: int | None) -> Result:
    """How ``check`` of one test ended, as its last lines say."""
    if status is None:
        return Result(HANG, f"did not end within {TIMEOUT_S} s")
    said = " ".join(output.partition("MOUNT_OPTIONS")[2].split())[-400:]
    for word, outcome in (("Not run:", "notrun"), ("Failures:", "fail")):
        if re.search(rf"^{word} \S", output, re.MULTILINE):
            reason = re.search(r"\[not run\] (.*)", output)
            return Result(outcome, reason[1] if reason else said)
    if status == 0 and re.search(r"^Passed all 1 tests$", output, re.MULTILINE):
        return Result(PASS)
    return Result("broken", f"exit status {status}: {output[-400:]}")


def run_test(built: Path, side: Side, test: str) -> Result:
    """Run one test by itself; a side that did not pass gets fresh disks."""
    output = outputs(SUITE, side) / f"{test.replace('/', '-')}.txt"
    with named_filesystem("fuse") as environment:
        status = run_alone(
            ["./check", test],
            output=output,
            cwd=built,
            environment={**environment, **side.variables},
            timeout_s=TIMEOUT_S,
            keep=side.folder,
            prepare=side.prepare,
        )
    result = parse(output.read_text(errors="replace"), status)
    if result.outcome not in (PASS, "notrun"):
        side.renew()
    return result


def collect(built: Path, group: str, only: Sequence[str]) -> list[str]:
    """Names of the tests of a group, or of those of it that begin as `only` says."""
    if not (built / "ltp" / "fsstress").exists():
        raise SystemExit(f"{built} holds no built xfstests: run make there")
    folder, _, name = group.partition("/")
    lines = (built / "tests" / folder / "group.list").read_text().splitlines()
    named = [line.split() for line in lines if line and not line.startswith("#")]
    tests = [f"{folder}/{words[0]}" for words in named if name in words[1:]]
    if group == GROUP and not only and len(tests) < GROUP_TESTS_MIN:
        raise SystemExit(
            f"{built} has {len(tests)} tests in {group}, {GROUP_TESTS_MIN} are known:"
            " fetch it whole"
        )
    if only:
        tests = [test for test in tests if test.startswith(tuple(only))]
    if not tests:
        raise SystemExit(f"no test of the suite begins with {' or '.join(only) or group}")
    return tests


def main() -> int:
    """Returns the exit status: 0 when all went as listed."""
    parser = arguments_of(__doc__.splitlines()[0])
    parser.add_argument("-g", "--group", default=GROUP)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("xfstests mounts filesystems and needs root")
    built = arguments.built.resolve()
    tests = collect(built, arguments.group, arguments.only)
    folder = Path(tempfile.mkdtemp(prefix="fpfs-xfstests-"))
    folder.chmod(0o755)
    try:
        with contextlib.ExitStack() as stack:
            results = run_on_pairs(
                open_pairs(stack, folder, arguments.jobs),
                tests,
                functools.partial(run_test, built),
                limit_s=arguments.limit_s,
            )
    finally:
        shutil.rmtree(folder)
    return conclude(SUITE, results, tests)


if __name__ == "__main__":
    sys.exit(main())
