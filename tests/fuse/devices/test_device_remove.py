"""``fpfs-ctl device remove``: a device that was drained goes, and nothing misses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fpfs.testing.mounted import CommandFailed, Mount, check_fpfs, mounted, run_fpfs
from tests.support.contents import random_bytes
from tests.support.failures.crash import crash
from tests.support.servers import kill
from tests.support.striped import check_files, make_files

CTL = "fpfs.cli.ctl"

READER = """
import pathlib, sys
path, expected = map(pathlib.Path, sys.argv[1:])
wanted = expected.read_bytes()
while not expected.with_suffix('.end').exists():
    assert path.read_bytes() == wanted
"""


@pytest.fixture
def mount() -> Iterator[Mount]:
    """A mount of two devices, for one test: it loses one."""
    with mounted(devices=2) as made:
        yield made


def device(*words: str | Path) -> str:
    """Run ``fpfs-ctl device``, and return what it prints."""
    return check_fpfs("device", *words, module=CTL)


def refusal(*words: str | Path) -> str:
    """Run ``fpfs-ctl device``, which refuses; return what it says, one line."""
    done = run_fpfs("device", *words, module=CTL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def numbers(mount: Mount) -> list[int]:
    """The devices that the mount tells of, in each of its ways."""
    listed: list[dict[str, Any]] = json.loads(device("list", mount.root, "--json"))
    found = [each["number"] for each in listed]
    assert [each.number for each in mount.status().devices] == found
    return found


def remove(mount: Mount, number: int) -> Path:
    """Drain a device and remove it; returns its directory, which the mount is made without."""
    folder = mount.devices[number]
    device("drain", mount.root, folder)
    told = json.loads(device("remove", mount.root, folder, "--json"))
    assert told == {"number": number, "path": str(folder), "is_empty": True}
    assert os.listdir(folder) == ["lock"]
    return folder


def without(mount: Mount, *folders: Path) -> None:
    """Let the next mount do without directories."""
    mount.devices = tuple(each for each in mount.devices if each not in folders)


@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1)])
def test_with_gaps_in_the_numbers_everything_works(gone: tuple[int, ...], tmp_path: Path) -> None:
    with mounted(devices=4) as mount:
        mount.allow_log("server .* died")
        contents = make_files(mount, 7)
        folders = [remove(mount, number) for number in gone]
        left = [number for number in range(4) if number not in gone]
        assert numbers(mount) == left
        contents |= make_files(mount, 7, seed=10)
        kill(mount)
        check_files(mount, contents)
        assert numbers(mount) == left
        without(mount, *folders)
        mount.remount()
        contents |= make_files(mount, 5, seed=20)
        check_files(mount, contents)
        assert numbers(mount) == left
        assert mount.status().catalog.copies_in_service == 2
        assert "all is well" in check_fpfs("scrub", mount.root, module=CTL)
        assert "all is well" in check_fpfs("fsck", mount.root, module=CTL)
        crash(mount)
        mount.mount()
        check_files(mount, contents)
        mount.unmount()
        report = json.loads(check_fpfs("fsck", "--data", "--json", *mount.devices))
        assert report["findings"] == []
        check_fpfs("export", *mount.devices, tmp_path / "copy")
        for name, content in contents.items():
            assert (tmp_path / "copy" / name).read_bytes() == content, name


def test_a_number_is_never_used_again(mount: Mount) -> None:
    folder = remove(mount, 1)
    assert "device 1 was removed; there are devices 0" in refusal("remove", mount.root, "1")
    device("add", mount.root, folder)
    assert numbers(mount) == [0, 2]
    device("tag", mount.root, "2", "+fast")
    mount.remount()
    assert numbers(mount) == [0, 2]
    device("drain", mount.root, "fast")
    device("remove", mount.root, "fast")
    device("add", mount.root, folder)
    assert numbers(mount) == [0, 3]
    listed = json.loads(device("list", mount.root, "--json"))
    assert [each["tags"] for each in listed] == [[], []]


def test_what_is_used_is_refused(mount: Mount) -> None:
    content = random_bytes(3_000_000, seed=1)
    (mount.root / "file").write_bytes(content)
    mount.flush()
    said = refusal("remove", mount.root, "1")
    assert f"is in use; move what it holds first: fpfs-ctl device drain {mount.root} 1" in said
    with (mount.root / "open").open("wb", buffering=0) as file:
        file.write(content)
        process = subprocess.Popen(
            [sys.executable, "-m", CTL, "device", "drain", mount.root, "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        # It has moved all it could by then, and waits for what is open.
        assert process.stderr.readline() == "waiting for files that are being written\n"
        assert "holds contents of files; let fpfs-ctl device drain come to its end" in refusal(
            "remove", mount.root, "1"
        )
    assert process.wait(timeout=60) == 0
    process.communicate()
    device("remove", mount.root, "1")
    check_files(mount, {"file": content, "open": content})


def test_a_drain_is_taken_back(mount: Mount) -> None:
    contents = make_files(mount, 6)
    device("drain", mount.root, "1")
    assert "is in use" in device("drain", mount.root, "1", "--cancel")
    assert [each.state for each in mount.status().devices] == ["ok", "ok"]
    assert mount.status().catalog.copies_in_service == 2
    before = mount.status().devices[1].bytes_used
    contents |= make_files(mount, 6, seed=10)
    assert mount.status().devices[1].bytes_used > before + 1_000_000
    assert "leave --rate away" in refusal("drain", mount.root, "1", "--cancel", "--rate", "1M")
    mount.remount()
    check_files(mount, contents)


def test_a_drain_that_somebody_takes_back_ends(mount: Mount) -> None:
    contents = make_files(mount, 8)
    process = subprocess.Popen(
        [sys.executable, "-m", CTL, "device", "drain", mount.root, "1", "--rate", "200K"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while mount.status().devices[1].state != "draining":
        assert process.poll() is None
    device("drain", mount.root, "1", "--cancel")
    _out, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "device 1 does not drain any more; somebody ended it" in said
    assert said.count("\n") == 1
    check_files(mount, contents)


def test_a_mount_that_names_a_removed_device(mount: Mount) -> None:
    contents = make_files(mount, 5)
    folder = remove(mount, 1)
    mount.unmount()
    with pytest.raises(CommandFailed, match="name all directories of .* and no other"):
        mount.mount()
    mount.log.unlink()
    # As it was before its directory was emptied: a server died in between.
    without(mount, folder)
    shutil.rmtree(folder)
    mount.mount()
    check_files(mount, contents)


def test_a_device_that_is_lost_goes_when_no_file_needs_it() -> None:
    with mounted(devices=3) as mount:
        mount.allow_log("device 2 is missing|cannot be read: the device is missing")
        check_fpfs("policy", "set", mount.root, "width=1", module=CTL)
        (mount.root / "small").write_bytes(b"here")
        contents = {f"file{n}": random_bytes(300_000, seed=n) for n in range(6)}
        for name, content in contents.items():
            (mount.root / name).write_bytes(content)
        mount.unmount()
        lost = mount.devices[2]
        without(mount, lost)
        shutil.rmtree(lost)
        mount.mount("degraded")
        assert "is missing; mount with it; fpfs-ctl device remove takes a lost one out" in refusal(
            "drain", mount.root, "2"
        )
        assert (
            "holds contents of files; mount with it and drain it, or remove the files"
            in refusal("remove", mount.root, "2")
        )
        for name in list(contents):
            try:
                (mount.root / name).read_bytes()
            except OSError:
                (mount.root / name).unlink()
                del contents[name]
        assert 0 < len(contents) < 6
        mount.flush()
        assert "in which nothing is needed any more" in device("remove", mount.root, "2")
        assert numbers(mount) == [0, 1]
        mount.remount()
        check_files(mount, contents)
        assert (mount.root / "small").read_bytes() == b"here"
        mount.unmount()
        assert "all is well" in check_fpfs("fsck", "--data", *mount.devices)


def test_policies_that_name_a_removed_device_use_the_others(mount: Mount) -> None:
    check_fpfs("policy", "set", mount.root, "devices=1", "width=1", module=CTL)
    content = random_bytes(2_000_000, seed=1)
    (mount.root / "file").write_bytes(content)
    mount.flush()
    remove(mount, 1)
    (mount.root / "later").write_bytes(content)
    (mount.root / "file").write_bytes(content[::-1])
    check_files(mount, {"file": content[::-1], "later": content})
    done = run_fpfs("policy", "set", mount.root, "width=1", module=CTL)
    assert "no device has the number or tag '1'; take of 0" in done.stderr
    check_fpfs("policy", "unset", mount.root, "devices", module=CTL)


def test_a_removal_while_programs_write_and_read() -> None:
    with mounted(devices=3) as mount:
        contents = make_files(mount, 6)
        saved = random_bytes(20_000_000, seed=50)
        reader = subprocess.Popen(
            [
                sys.executable,
                "-c",
                READER,
                mount.root / "file5",
                _kept(mount, contents["file5"]),
            ]
        )
        with (mount.root / "save.pt").open("wb", buffering=0) as save:
            save.write(saved[:8_000_000])
        device("drain", mount.root, "1")
        with (mount.root / "save.pt").open("r+b", buffering=0) as save:
            save.seek(8_000_000)
            save.write(saved[8_000_000:14_000_000])
            device("remove", mount.root, "1")
            save.write(saved[14_000_000:])
        (mount.folder / "expected.end").touch()
        assert reader.wait(timeout=60) == 0
        check_files(mount, contents | {"save.pt": saved})


def _kept(mount: Mount, content: bytes) -> Path:
    path = mount.folder / "expected.bin"
    path.write_bytes(content)
    return path
