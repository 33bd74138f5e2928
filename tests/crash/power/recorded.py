"""Records programs on a fresh mount, below SQLite and the rings: what cuts are replayed from.

Concurrency: the mount is recorded with its programs side by side; one mount at a time.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fpfs.testing.mounted import REPOSITORY, check_fpfs, mounted
from tests.crash.kill import signal_server
from tests.crash.power.disk import Disk, write_image
from tests.crash.power.disk_file import Style
from tests.crash.power.image import DEVICES
from tests.crash.power.recording import Event, make_log, read_log, recording_environment

FOLDERS = 5
"""Directories that are recorded: the first `DEVICES` become devices when they are formatted."""
KILL_AFTER_S = 1.0
SMALL_OBJECTS = REPOSITORY / "tests" / "crash" / "power" / "small_objects"
LOG_NAME = "recording"
DEVICES_NAME = "device"


class Course(NamedTuple):
    """What happens in a recording beside the programs: kills of the server, new devices.

    With `small_objects` most files have some that are kept when they are removed.
    """

    kills: int = 0
    changes_devices: bool = False
    small_objects: bool = False


NOTHING = Course()


def record(
    folder: Path, *, programs: int, seed: int, steps: int, course: Course = NOTHING
) -> list[Event]:
    """Record programs on a fresh mount, from its first mount to its clean end.

    Everything replayed must be what there is.
    """
    log = folder / LOG_NAME
    make_log(log)
    devices = device_folders(folder)
    for device in devices:
        device.mkdir()
    environment = recording_environment(log, devices)
    if course.small_objects:
        environment["PYTHONPATH"] = os.pathsep.join((str(SMALL_OBJECTS), str(REPOSITORY)))
    with mounted(
        devices=devices[:DEVICES],
        options=("chunk=128K",),
        staging="16M",
        parent=folder,
        environment=environment,
    ) as mount:
        if seed % 2:
            # What is kept must not be lost either, nor the space of what is not.
            check_fpfs("policy", "set", mount.root, "versions=2", module="fpfs.cli.ctl")
        library = environment["LD_PRELOAD"]
        started = [
            _start("workload", library, log, mount.root, program, programs, seed, steps)
            for program in range(programs)
        ]
        if course.changes_devices:
            # Its input ends when the others have ended, who are waited for first.
            started += [_start("device_changer", library, log, mount.root, seed, *devices)]
        if course.kills:
            mount.allow_log(r"fpfs.keeper: server \d+ died \(signal 9\): starting another")
        for _ in range(course.kills):
            time.sleep(KILL_AFTER_S)  # any moment will do
            signal_server(mount, signal.SIGKILL)
            os.listdir(mount.root)  # the next server answers
        for program in started:
            said, _ = program.communicate()
            assert program.returncode == 0, f"a program failed (seed {seed}):\n{said}"
        if course.kills:
            mount.note_processes()
    events = read_log(log).events
    check_recording(events, devices, folder)
    for device in devices:
        shutil.rmtree(device)
    return events


def check_recording(events: Sequence[Event], devices: Sequence[Path], folder: Path) -> None:
    """All that was recorded, replayed to its end, makes the devices as they are."""
    disk = Disk(devices)
    disk.advance(events)
    replayed = folder / "replayed"
    images = [replayed / device.name for device in devices]
    for image in images:
        image.mkdir(parents=True)
    for left, image in zip(disk.lose_power(random.Random(0), style=Style.ALL), images, strict=True):
        write_image(left, image)
    for device, image in zip(devices, images, strict=True):
        found, expected = _files(image), _files(device)
        assert found.keys() == expected.keys(), f"{found.keys() ^ expected.keys()} were not seen"
        for path, content in expected.items():
            assert found[path] == content, f"not all of what was done to {path} was seen"
    shutil.rmtree(replayed)


def _files(folder: Path) -> dict[str, bytes]:
    """Everything below a folder, by path; a folder's content is empty."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def _start(module: str, library: str, log: Path, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.crash.power.{module}", library, *map(str, words)],
        env={**os.environ, "FPFS_RECORD_LOG": str(log)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
    )


def device_folders(folder: Path) -> list[Path]:
    """The directories that were recorded in a folder: devices, and what may become one."""
    return [folder / f"{DEVICES_NAME}{number}" for number in range(FOLDERS)]
