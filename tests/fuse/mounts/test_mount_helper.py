"""mount(8) and umount(8): an fstab line, through the helper in mount_scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import REPOSITORY
from tests.support.system import errno_of
from tests.support.waiting import one_at_a_time

HELPER = Path("/sbin/mount.fuse.fpfs")
INSTALL = REPOSITORY / "mount_scripts" / "install_mount_helper"
VENV = Path(sys.executable).parents[1]

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mount(8) and /sbin are root's"),
    pytest.mark.skipif(
        not (VENV / "bin" / "fpfs").exists(), reason="fpfs is not installed beside this Python"
    ),
]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command with its output captured, whatever comes of it."""
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def helper() -> Iterator[None]:
    """The helper in /sbin, for one test at a time; one that was there before comes back."""
    with one_at_a_time("helper"):
        before = HELPER.read_bytes() if HELPER.exists() else None
        done = run(INSTALL, VENV)
        assert done.returncode == 0, done.stderr
        yield
        if before is None:
            HELPER.unlink()
        else:
            HELPER.write_bytes(before)


@pytest.fixture
def fstab(tmp_path: Path) -> Iterator[Path]:
    """A table with one line for two devices; what it mounted is unmounted."""
    for name in ("one", "two", "mount"):
        (tmp_path / name).mkdir()
    table = tmp_path / "fstab"
    table.write_text(
        f"{tmp_path}/one:{tmp_path}/two {tmp_path}/mount fuse.fpfs"
        f" ack=close,staging=16M,nofail,log={tmp_path}/log 0 0\n"
    )
    yield table
    if mount_at(str(tmp_path / "mount")) is not None:
        run(sys.executable, "-m", "fpfs.cli.main", "umount", tmp_path / "mount")


@pytest.mark.usefixtures("helper")
def test_an_fstab_line(fstab: Path) -> None:
    mountpoint = fstab.parent / "mount"
    done = run("mount", "-T", fstab, mountpoint)
    assert done.returncode == 0, done.stderr
    entry = mount_at(str(mountpoint))
    assert entry is not None
    assert entry.filesystem_type == "fuse.fpfs"
    assert entry.source == f"{fstab.parent}/one:{fstab.parent}/two"
    (mountpoint / "file").write_bytes(b"content" * 100_000)

    done = run("mount", "-a", "-T", fstab)
    assert done.returncode == 0, done.stderr

    done = run("umount", mountpoint)
    assert done.returncode == 0, done.stderr
    assert mount_at(str(mountpoint)) is None

    # umount(8) does not wait for the drain; the next mount does.
    done = run("mount", "-T", fstab, mountpoint)
    assert done.returncode == 0, done.stderr
    assert "ended; all is durable" in (fstab.parent / "log").read_text()
    assert (mountpoint / "file").read_bytes() == b"content" * 100_000


@pytest.mark.usefixtures("helper")
def test_mount_with_a_type_and_devices_as_options(tmp_path: Path) -> None:
    for name in ("one", "mount"):
        (tmp_path / name).mkdir()
    mountpoint = tmp_path / "mount"
    options = f"device={tmp_path}/one,staging=16M,log={tmp_path}/log"
    done = run("mount", "-t", "fuse.fpfs", "-o", options, "fpfs", mountpoint)
    assert done.returncode == 0, done.stderr
    assert run("umount", "-l", mountpoint).returncode == 0
    assert mount_at(str(mountpoint)) is None


@pytest.mark.usefixtures("helper")
def test_mount_says_nothing_unless_asked(tmp_path: Path) -> None:
    """As with other filesystems: who runs mount(8) in a script reads what it says as an error."""
    for name in ("one", "mount"):
        (tmp_path / name).mkdir()
    options = f"staging=16M,log={tmp_path}/log"
    for flags, said in (((), ""), (("-v",), f"mounted at {tmp_path}/mount over {tmp_path}/one")):
        command = ("mount", *flags, "-t", "fuse.fpfs", "-o", options, tmp_path / "one")
        done = run(*command, tmp_path / "mount")
        assert run("umount", tmp_path / "mount").returncode == 0, done.stderr
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout
        assert bool(said) == bool(done.stdout)


@pytest.mark.usefixtures("helper")
def test_a_refusal_reaches_the_caller_of_mount(fstab: Path) -> None:
    (fstab.parent / "one" / "thesis.tex").touch()
    done = run("mount", "-T", fstab, fstab.parent / "mount")
    assert done.returncode != 0
    assert f"{fstab.parent}/one is not empty (thesis.tex is in it)" in done.stderr


def run_script(source: str, *words: str, fpfs: str) -> subprocess.CompletedProcess[str]:
    """Run the helper itself, with a program in the place of fpfs."""
    script = REPOSITORY / "mount_scripts" / "mount.fpfs"
    return run("env", f"FPFS={fpfs}", script, source, "/ckpt", *words)


@pytest.mark.parametrize("source", ["", ":", "::"])
def test_a_source_without_a_device_is_refused(source: str) -> None:
    """The embedded default, in root's home, is nobody's wish that a variable is empty."""
    done = run_script(source, "-o", "ack=close", fpfs="/bin/false")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"mount.fpfs: the source '{source}' names no device directory; write none for the default\n"
    )


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("none", "ro", "mount -o fsname=none,ro /ckpt\n"),
        ("fpfs", "ro,device=/a", "mount -o fsname=fpfs,ro,device=/a /ckpt\n"),
        (":/a::/none", "ro", "mount -d /a -d /none -o fsname=:/a::/none,ro /ckpt\n"),
    ],
)
def test_what_is_mounted(source: str, options: str, said: str) -> None:
    assert run_script(source, "-v", "-o", options, fpfs="/bin/echo").stdout == said


@pytest.mark.usefixtures("helper")
@pytest.mark.parametrize("name", ["one,two", "with,none"])
def test_a_device_with_a_comma_in_its_path(tmp_path: Path, name: str) -> None:
    device, mountpoint = tmp_path / name, tmp_path / "mount"
    device.mkdir()
    mountpoint.mkdir()
    options = f"staging=16M,log={tmp_path}/log"
    done = run("mount", "-v", "-t", "fuse.fpfs", "-o", options, device, mountpoint)
    assert done.returncode == 0, done.stderr
    assert f"mounted at {mountpoint} over {device} " in done.stdout
    assert run(sys.executable, "-m", "fpfs.cli.main", "umount", mountpoint).returncode == 0


PLAIN = (
    "rw suid dev exec atime relatime norelatime strictatime nostrictatime diratime nodiratime async"
    " lazytime nolazytime symfollow iversion noiversion mand nomand silent loud default_permissions"
).split(" ")
SHOWN = {"ro", "nosuid", "nodev", "noexec", "noatime", "sync", "dirsync", "nosymfollow"}
"""What the mount table shows. Those without effect are not in it."""


def shown_options(mountpoint: Path) -> set[str]:
    """Return the options that the kernel shows of the mount and of its filesystem."""
    done = run("findmnt", "--noheadings", "--output", "VFS-OPTIONS,FS-OPTIONS", mountpoint)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.replace(",", " ").split())


@pytest.mark.usefixtures("helper")
@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("-o", PLAIN),
        ("-o", ["ro"]),
        ("-o", ["nosuid", "nodev", "noexec", "noatime", "sync", "dirsync", "nosymfollow"]),
        ("fstab", ["nosymfollow", "dirsync", "strictatime", "lazytime"]),
    ],
)
def test_options_that_every_filesystem_takes(tmp_path: Path, how: str, options: list[str]) -> None:
    device, mountpoint, table = tmp_path / "device", tmp_path / "mount", tmp_path / "fstab"
    device.mkdir()
    mountpoint.mkdir()
    formatted = run(sys.executable, "-m", "fpfs.cli.main", "format", "-d", device)
    assert formatted.returncode == 0, formatted.stderr
    words = ",".join(["staging=16M", f"log={tmp_path}/log", *options])
    table.write_text(f"{device} {mountpoint} fuse.fpfs {words} 0 0\n")
    command: tuple[str | Path, ...] = ("mount", "-T", table, mountpoint)
    if how == "-o":
        command = ("mount", "-t", "fuse.fpfs", "-o", words, device, mountpoint)
    done = run(*command)
    assert done.returncode == 0, done.stderr
    try:
        assert shown_options(mountpoint) & SHOWN == set(options) & SHOWN
        program = mountpoint / "program"
        if "ro" in options:
            assert errno_of(program.touch) == "EROFS"
            return
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert errno_of(run, program) == ("EACCES" if "noexec" in options else "OK")
        (mountpoint / "link").symlink_to("program")
        outcome = errno_of((mountpoint / "link").read_text)
        assert outcome == ("ELOOP" if "nosymfollow" in options else "OK")
    finally:
        assert run(sys.executable, "-m", "fpfs.cli.main", "umount", mountpoint).returncode == 0
