"""Tables on a terminal of 80 columns: nothing is cut, and no figure goes over two lines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount, mounted, run_fpfs
from tests.support.terminal import COLUMNS, on_terminal, running

CTL = "fpfs.cli.ctl"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
RUN = "experiments/a-model-with-a-long-context/run-2026-11-23"
FILE = f"{RUN}/checkpoint-step-000100.safetensors"
WHOLE = "*.pt:*.pth:*.ckpt:*.bin:*.safetensors:*.distcp:*.metadata:*.json"
SIZE = r"\d+(?:\.\d+)? (?:B|[KMG]iB)(?= |$)"


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """A mount whose directories and files have long names."""
    base = tmp_path_factory.mktemp("mnt")
    devices = [base / f"nvme{number}n1" / "checkpoints" / "fpfs" for number in range(2)]
    for device in devices:
        device.mkdir(parents=True)
    with mounted(devices=devices) as made:
        (made.root / RUN).mkdir(parents=True)
        ctl("policy", "set", made.root / RUN, "versions=2", f"whole={WHOLE}")
        ctl("device", "tag", made.root, "1", "+fast", "+second-controller-of-the-node")
        for _ in range(2):
            (made.root / FILE).write_bytes(os.urandom(3_000_000))
            ctl("wait", made.root / FILE)
        yield made


def ctl(*words: object) -> str:
    done = run_fpfs(*words, module=CTL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def table(heading: str, *words: object) -> list[str]:
    """The lines of a command on a terminal, from those with a heading on."""
    lines = ESCAPES.sub("", on_terminal(*map(str, words))).splitlines()
    first = next(number for number, line in enumerate(lines) if line.split()[:1] == [heading])
    return lines[first:]


def cells(lines: list[str], heading: str, *, to: str) -> str:
    """What stands in a column, from its heading to the next, without the ends of lines."""
    first, behind = lines[0].index(heading), len(lines[0])
    if to:
        behind = lines[0].index(to)
    return "".join(line[first:behind].strip() for line in lines[1:])


def devices_of(mount: Mount) -> str:
    return "".join(map(str, mount.devices))


def test_status(mount: Mount) -> None:
    lines = table("dev", "status", mount.root)
    end = next(number for number, line in enumerate(lines) if line.startswith("staging: "))
    assert cells(lines[:end], "directory", to="I/O") == devices_of(mount)
    rows = [line for line in lines[:end] if re.match(r" *\d ", line)]
    assert [len(re.findall(SIZE, row)) for row in rows] == [4, 4]
    assert all(len(line) <= COLUMNS for line in lines)
    head = next(number for number, line in enumerate(lines) if number and line.startswith("dev "))
    live = lines[head + 1 : head + 3]
    assert ["nvme0n1" in live[0], "nvme1n1" in live[1]] == [True, True]


def test_device_list(mount: Mount) -> None:
    lines = table("device", "device", "list", mount.root)
    assert cells(lines, "directory", to="tags") == devices_of(mount)
    assert cells(lines, "tags", to="state") == "fastsecond-controller-of-the-node"
    rows = [line for line in lines if re.match(r" *\d ", line)]
    assert [len(re.findall(SIZE, row)) for row in rows] == [2, 2]
    assert all(len(line) <= COLUMNS for line in lines)


@pytest.mark.parametrize(
    "words",
    [("policy", "get", RUN), ("policy", "list", "."), ("policy", "explain", FILE)],
    ids=" ".join,
)
def test_policies(mount: Mount, words: tuple[str, ...]) -> None:
    *command, place = words
    first = "directory" if command[1] == "list" else "setting"
    lines = table(first, *command, mount.root / place)
    rows = [line for line in lines if not line.startswith(("it", "now"))]
    assert cells(rows, "value", to="" if first == "directory" else "from").count(WHOLE) == 1
    place = cells(rows, first, to="setting") if first == "directory" else cells(rows, "from", to="")
    assert f"/{RUN}" in place
    assert all(len(line) <= COLUMNS for line in rows)


def test_versions(mount: Mount) -> None:
    lines = table("version", "versions", mount.root / FILE)
    assert cells(lines, "version", to="    size") == f"{Path(FILE).name}@1"
    assert cells(lines, "to be read at", to="") == f".fpfs/versions/{FILE}@1"
    (row,) = [line for line in lines if "MiB" in line]
    assert len(re.findall(SIZE, row)) == 1
    assert len(re.findall(r"\d\d:\d\d:\d\d", "\n".join(lines))) == 2
    assert all(len(line) <= COLUMNS for line in lines)


def test_ranges(mount: Mount) -> None:
    lines = table("from", "stat", mount.root / FILE)
    rows = [line.split() for line in lines[1:]]
    assert [row[:2] for row in rows] == [
        ["0", "1048575"],
        ["1048576", "2097151"],
        ["2097152", "3014655"],
    ]
    assert all(len(row) == 5 for row in rows)
    assert all(len(line) <= COLUMNS for line in lines)


def test_in_a_pipe_nothing_is_folded_or_coloured(mount: Mount) -> None:
    text = ctl("status", mount.root) + ctl("device", "list", mount.root)
    text += ctl("policy", "list", mount.root) + ctl("versions", mount.root / FILE)
    assert "\x1b" not in text
    for whole in (*map(str, mount.devices), f"/{RUN} ", WHOLE, f".fpfs/versions/{FILE}@1"):
        assert whole in text


def test_an_unmount_that_takes_long_says_so_on_a_terminal() -> None:
    with mounted() as mount:
        (mount.root / "file").write_bytes(b"content")
        server = mount.server_pid
        os.kill(server, signal.SIGSTOP)
        try:
            with running("umount", str(mount.root), module="fpfs.cli.main") as command:
                command.read_until("making everything on")
                os.kill(server, signal.SIGCONT)
                command.read_all()
                assert command.status == 0
        except BaseException:
            os.kill(server, signal.SIGCONT)  # the mount is taken down in any case
            raise
        mount.mount()
        assert (mount.root / "file").read_bytes() == b"content"
