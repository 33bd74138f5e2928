"""The device lab: devices come up limited, and go away whatever happened in between.

Concurrency: labs live in their own temporary directories and are always taken down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from fpfs.testing import lab
from tests.support.failures.faults import make_ext4
from tests.support.waiting import wait_until

SCRIPT = Path(__file__).resolve().parents[2] / "mount_scripts" / "lab"
MIB = 1024 * 1024
SIZE_BYTES = 384 * MIB

REASON = lab.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A place for a lab, taken down at the end by the code under test or by force."""
    place = tmp_path / "lab"
    yield place
    lab.down(place)


def attached_images() -> dict[str, str]:
    """Loop device by backing file, as the kernel shows it."""
    listing = subprocess.run(
        ["losetup", "--json", "--output", "NAME,BACK-FILE"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    devices = json.loads(listing)["loopdevices"] if listing else []
    # One that others detach meanwhile has none.
    return {each["back-file"]: each["name"] for each in devices if each["back-file"]}


def attached_numbers() -> set[str]:
    """Numbers of the loop devices that have an image."""
    found = set()
    for name in attached_images().values():
        number = os.stat(name).st_rdev
        found.add(f"{os.major(number)}:{os.minor(number)}")
    return found


def kernel_limits(made: lab.Lab, device_number: str) -> set[str]:
    """What the files of all limited groups say of a device ("none": one does not name it)."""
    assert made.throttle is not None
    names = ("blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device", "io.max")
    start = f"{device_number} "
    return {
        next(
            (line for line in path.read_text().splitlines() if line.startswith(start)),
            f"{start}none",
        )
        for path in (Path(group) / name for group in made.throttle.groups for name in names)
        if path.exists()
    }


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_devices_are_mounted_limited_and_gone_after_down(directory: Path) -> None:
    made = lab.up(directory, device_count=2, mib_per_s=100, size_bytes=SIZE_BYTES)
    devices = made.devices()
    assert [d.mounted for d in devices] == [True, True]
    assert [d.limited for d in devices] == [True, True]
    limits = made.throttle
    assert limits is not None
    numbers = {d.device_number for d in devices}
    assert lab.down(directory)
    # Others may have them by now, with limits of their own.
    wait_until(lambda: not numbers & (limits.limited() - attached_numbers()))
    assert not [image for image in attached_images() if image.startswith(str(directory))]
    assert list(directory.iterdir()) == []
    assert not lab.down(directory)


def test_the_kernel_limits_each_device_by_itself(directory: Path) -> None:
    made = lab.up(directory, device_count=2, mib_per_s=100, size_bytes=SIZE_BYTES)
    numbers = {device.device_number for device in made.devices()}
    assert len(numbers) == 2
    rate = 100 * MIB
    for number in numbers:
        assert number is not None
        assert kernel_limits(made, number) in (
            {f"{number} {rate}"},
            {f"{number} rbps={rate} wbps={rate} riops=max wiops=max"},
        )


def fail_inside_a_lab(parent: Path) -> None:
    """Raise ZeroDivisionError while a lab is up."""
    with lab.lab(device_count=1, mib_per_s=100, size_bytes=SIZE_BYTES, parent=parent) as made:
        assert os.path.ismount(made.mountpoints[0])
        raise ZeroDivisionError


def test_the_context_manager_leaves_nothing_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_inside_a_lab(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not [image for image in attached_images() if image.startswith(str(tmp_path))]


def crash_after(directory: Path, *, step: str) -> None:
    """Run `up` in a process that is gone without clean-up once `step` was done for device 0."""
    program = f"""
import os
from pathlib import Path
from fpfs.testing import lab
if {step!r} == "state":
    lab._make_device = lambda *_: os._exit(9)
real = lab._run
def run(tool, *arguments):
    output = real(tool, *arguments)
    if tool == {step!r}:
        os._exit(9)
    return output
lab._run = run
lab.up(Path({str(directory)!r}), device_count=2, mib_per_s=100, size_bytes={SIZE_BYTES})
"""
    crashed = subprocess.run([sys.executable, "-c", program], cwd=SCRIPT.parents[1], check=False)
    assert crashed.returncode == 9


@pytest.mark.parametrize("step", ["state", "losetup", "mkfs.xfs", "mount"])
def test_down_cleans_up_after_a_crash_at_any_step(directory: Path, step: str) -> None:
    crash_after(directory, step=step)
    assert (directory / lab.STATE_NAME).exists()
    result = run_script("down", str(directory))
    assert result.returncode == 0, result.stderr
    assert list(directory.iterdir()) == []
    assert not [image for image in attached_images() if image.startswith(str(directory))]


def test_loop_devices_of_others_are_left_alone(directory: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "lab" / "device0.img.of-somebody-else"
    foreign.parent.mkdir()
    foreign.write_bytes(b"\0" * MIB)
    attach = ["losetup", "--find", "--show", str(foreign)]
    loop = subprocess.run(attach, capture_output=True, text=True, check=True).stdout.strip()
    try:
        lab.up(directory, device_count=1, mib_per_s=100, size_bytes=SIZE_BYTES)
        lab.down(directory)
        assert attached_images()[str(foreign)] == loop
    finally:
        subprocess.run(["losetup", "--detach", loop], check=True)


def test_loop_devices_that_others_detach_meanwhile(tmp_path: Path) -> None:
    """Of one that goes between open(2) and read(2) the kernel says ENODEV."""
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    turns = 'for _ in {1..100}; do losetup -d "$(losetup -f --show "$0")"; done'
    with subprocess.Popen(["bash", "-ec", turns, image]) as others:
        while others.poll() is None:
            assert set(lab._loops_by_image([image])) <= {image}
    assert others.returncode == 0


def test_down_of_a_busy_lab_says_so_and_can_be_repeated(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab.up(directory, device_count=1, mib_per_s=100, size_bytes=SIZE_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(lab, "BUSY_S", 0.0)
        with open(made.mountpoints[0] / "held", "w"), pytest.raises(lab.LabError, match="busy"):
            lab.down(directory)
    # Others, with mounts of their own, may still have this one.
    assert lab.down(directory)


def test_down_waits_for_a_process_that_is_going_away(directory: Path) -> None:
    made = lab.up(directory, device_count=1, mib_per_s=100, size_bytes=SIZE_BYTES)
    holder = subprocess.Popen(
        ["sh", "-c", f"exec 3>{made.mountpoints[0]}/held; echo held; exec sleep 0.5"],
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert lab.down(directory)


def leave_a_lab_in_use(parent: Path, held: list[IO[str]]) -> None:
    """Let a lab's context end while a file on it is open."""
    with lab.lab(device_count=1, mib_per_s=100, size_bytes=SIZE_BYTES, parent=parent) as made:
        held.append((made.mountpoints[0] / "held").open("w"))


def test_a_lab_left_in_use_goes_away_with_its_last_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "BUSY_S", 0.0)
    held: list[IO[str]] = []
    with pytest.raises(lab.LabError, match="busy"):
        leave_a_lab_in_use(tmp_path, held)
    assert list(tmp_path.iterdir()) == []
    held[0].close()
    # Others, with mounts of their own, may still have this one.
    wait_until(lambda: not any(each.startswith(str(tmp_path)) for each in attached_images()))


def test_the_script_shows_the_state_as_json(directory: Path) -> None:
    result = run_script(
        "up", "--devices", "1", "--mib-per-s", "150", "--size", "384M", str(directory)
    )
    assert result.returncode == 0, result.stderr
    status = json.loads(run_script("status", str(directory)).stdout)
    assert status["mib_per_s"] == 150
    assert status["size_bytes"] == SIZE_BYTES
    assert [(d["mounted"], d["limited"]) for d in status["devices"]] == [(True, True)]
    executed = run_script("exec", str(directory), "--", "echo", "inside")
    assert executed.stdout == "inside\n"
    assert run_script("down", str(directory)).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up", "--devices", "0"], "0 devices asked for; between 1 and 64 work"),
        (["up", "--size", "1M"], "XFS needs at least"),
        (["up", "--size", "900T"], "do not fit"),
        (["up", "--mib-per-s", "-5"], "0 means unlimited"),
        (["up", "--size", "8X"], "is no size: write 8G or 512M"),
        (["status"], "there is no lab in"),
    ],
)
def test_refusals_say_what_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run_script(*arguments, str(tmp_path / "lab"))
    assert result.returncode != 0
    assert message in result.stderr
    assert not (tmp_path / "lab").exists()


def test_a_second_lab_in_one_place_is_refused(directory: Path) -> None:
    lab.up(directory, device_count=1, mib_per_s=100, size_bytes=SIZE_BYTES)
    with pytest.raises(lab.LabError, match="already"):
        lab.up(directory, device_count=1, mib_per_s=100, size_bytes=SIZE_BYTES)
    assert lab.load(directory).devices()[0].mounted


def test_a_damaged_state_file_is_named(directory: Path) -> None:
    directory.mkdir()
    (directory / lab.STATE_NAME).write_text('{"format": 99}')
    with pytest.raises(lab.LabError, match="format 99"):
        lab.down(directory)
    (directory / lab.STATE_NAME).write_text("[]")
    with pytest.raises(lab.LabError, match="no state of a lab"):
        lab.down(directory)
    (directory / lab.STATE_NAME).unlink()


def test_without_root_the_lab_says_so() -> None:
    program = """
import os
from pathlib import Path
from fpfs.testing import lab
os.setuid(65534)
lab.up(Path("/tmp/never-made"), device_count=1, mib_per_s=100, size_bytes=1 << 30)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(
        command, cwd=SCRIPT.parents[1], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "LabError: the device lab needs root" in result.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "lab: exec without a command: write lab exec DIR -- COMMAND ...\n"),
        (["--"], "lab: exec without a command: write lab exec DIR -- COMMAND ...\n"),
        (["--", "/no/such"], "lab: /no/such cannot be run: No such file or directory\n"),
    ],
)
def test_exec_of_nothing(directory: Path, command: list[str], said: str) -> None:
    lab.up(directory, device_count=1, mib_per_s=0, size_bytes=SIZE_BYTES)
    done = run_script("exec", str(directory), *command)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_a_lab_goes_although_another_mountpoint_has_an_odd_name(tmp_path: Path) -> None:
    """Its name holds what ends a line elsewhere, and is no text."""
    odd = os.fsencode(tmp_path) + b"/odd \x0b\xff\xc2\x85"
    os.mkdir(odd)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", odd], check=True)
    try:
        with lab.lab(device_count=1, mib_per_s=0, size_bytes=SIZE_BYTES, parent=tmp_path) as made:
            image = str(made.images[0])
            assert image in attached_images()
        assert image not in attached_images()
    finally:
        subprocess.run(["umount", odd], check=True)


def test_a_device_is_unused_when_the_last_mount_namespace_has_left_it(tmp_path: Path) -> None:
    with lab.lab(device_count=1, mib_per_s=0, size_bytes=SIZE_BYTES, parent=tmp_path) as made:
        (device,) = made.devices()
        assert device.loop is not None
        holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", "echo ready; read -r _"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdin is not None
        assert holder.stdout is not None
        with holder:
            assert holder.stdout.readline() == "ready\n"
            subprocess.run(["umount", made.mountpoints[0]], check=True)
            with pytest.raises(OSError, match="busy"):
                os.close(os.open(device.loop, os.O_RDWR | os.O_EXCL))
            holder.stdin.write("\n")
            holder.stdin.flush()
            make_ext4(device.loop)
