"""The systemd unit in mount_scripts: systemd accepts it, and what it runs mounts and unmounts.

systemd itself does not run here: its words are expanded as systemd.service(5) tells and run.
"""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import REPOSITORY, run_fpfs

UNIT = REPOSITORY / "mount_scripts" / "fpfs@.service"
INSTALLED = "/usr/local/bin/fpfs"
FPFS = Path(sys.executable).with_name("fpfs")

pytestmark = pytest.mark.skipif(
    not FPFS.exists(), reason="fpfs is not installed beside this Python"
)


def installed_unit(folder: Path) -> Path:
    """The unit as an instance for /ckpt, with the path that this installation has."""
    unit = folder / "fpfs@ckpt.service"
    unit.write_text(UNIT.read_text().replace(INSTALLED, str(FPFS)))
    return unit


def service() -> configparser.SectionProxy:
    """What the unit says under [Service]."""
    unit = configparser.ConfigParser(interpolation=None, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(UNIT)
    return unit["Service"]


def run_line(
    line: str, *, mountpoint: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a line of the unit as systemd does, whatever comes of it."""
    words: list[str] = []
    for word in shlex.split(line.replace(INSTALLED, str(FPFS))):
        if word.startswith("${"):
            words.append(environment[word[2:-1]])  # one word, whatever is in it
        elif word.startswith("$"):
            words += environment[word[1:]].split()
        else:
            words.append(
                word.replace("%f", str(mountpoint)).replace("%i", "ckpt").replace("$$", "$")
            )
    return subprocess.run(
        words,
        cwd="/",
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Unknown sections and keys, values that cannot be read, and commands that are not there."""
    command = ["systemd-analyze", "verify", "--man=no", installed_unit(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_its_commands_mount_and_unmount(tmp_path: Path) -> None:
    for name in ("one", "two", "mount"):
        (tmp_path / name).mkdir()
    mountpoint = tmp_path / "mount"
    environment = {
        "FPFS_DEVICES": f"-d {tmp_path}/one -d {tmp_path}/two",
        "FPFS_OPTIONS": f"ack=close,staging=16M,log={tmp_path}/log",
    }
    unit = service()
    assert unit["Type"] == "forking", "the command returns, and its server stays"
    for name in ("ExecStartPre", "ExecStart"):
        done = run_line(unit[name], mountpoint=mountpoint, environment=environment)
        assert done.returncode == 0, done.stderr
    try:
        assert done.stdout.startswith(
            f"formatted and mounted at {mountpoint} over {tmp_path}/one, "
        )
        (mountpoint / "file").write_bytes(b"content")
        line = unit["ExecStop"].removeprefix("-")
        done = run_line(line, mountpoint=mountpoint, environment=environment)
        assert done.returncode == 0, done.stderr
        assert mount_at(str(mountpoint)) is None
        # systemd runs it also where somebody else has unmounted: that is no failure of the unit.
        assert unit["ExecStop"].startswith("-")
    finally:
        if mount_at(str(mountpoint)) is not None:
            run_fpfs("umount", mountpoint)
    assert "ended; all is durable" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("environment", [{}, {"FPFS_DEVICES": ""}, {"FPFS_DEVICE": "-d /a"}])
def test_no_devices_are_not_the_default(environment: Mapping[str, str]) -> None:
    line = service()["ExecStartPre"]
    done = run_line(line, mountpoint=Path("/ckpt"), environment=environment)
    assert done.returncode != 0
    assert done.stderr.endswith("FPFS_DEVICES: is not set in /etc/fpfs/ckpt.conf\n")


def test_nothing_cuts_the_drain_short() -> None:
    """A stop, a shutdown or a memory shortage before the last byte would lose it."""
    unit = service()
    assert unit["TimeoutStopSec"] == "infinity"
    assert unit["KillSignal"] == "SIGTERM", "at which a server drains and unmounts"
    assert unit["SendSIGKILL"] == "no"
    assert int(unit["OOMScoreAdjust"]) < 0
    assert unit["LimitMEMLOCK"] == "infinity", "staging is pinned"
