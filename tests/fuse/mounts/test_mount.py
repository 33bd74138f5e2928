"""Mounting and unmounting with the real commands: what works, and every refusal's message."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_at, mount_table
from fpfs.core.options import MountOptions, ServerConfig
from fpfs.core.protocol import control
from fpfs.core.refusal import Refused
from fpfs.daemon.mount import launch
from fpfs.daemon.mount.fusermount import (
    MAX_READ_BYTES,
    MOUNTING_NAME,
    READ_AHEAD_KIB,
    mounting,
)
from fpfs.daemon.mount.paths import make_runtime_folder
from fpfs.testing.mounted import (
    REPOSITORY,
    Mount,
    check_fpfs,
    mounted,
    run_fpfs,
)
from tests.support.contents import random_bytes
from tests.support.refusals import refusal
from tests.support.servers import stop
from tests.support.waiting import wait_until

CTL = "fpfs.cli.ctl"


def is_running(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_server(pid: int) -> bool:
    """Whether a process has started a server."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"fpfs.daemon.mount.main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return True
    return False


def test_mount_returns_when_the_mount_answers_and_umount_when_all_is_durable() -> None:
    with mounted(devices=3) as mount:
        entry = mount.entry()
        assert entry is not None
        assert entry.is_fpfs
        assert os.listdir(mount.root) == []
        content = os.urandom(5_000_001)
        (mount.root / "file").write_bytes(content)
        mount.unmount()
        assert mount.entry() is None
        assert os.listdir(mount.root) == []
        assert not is_running(mount.server_pid)
        mount.mount()
        assert (mount.root / "file").read_bytes() == content


def test_what_mount_says() -> None:
    with mounted(devices=2) as mount:
        mount.unmount()
        arguments = ["-d", mount.devices[0], "-d", mount.devices[1], "--log", mount.log]
        said = check_fpfs("mount", *arguments, "--staging", "16M", mount.root)
        first, second = mount.devices
        mounted_line, note = said.splitlines()
        assert mounted_line == f"mounted at {mount.root} over {first}, {second} (log {mount.log})"
        assert note.startswith(f"note: {first} and {second} lie on one filesystem: they share")
        check_fpfs("umount", mount.root)


def test_status_as_json_and_as_a_table() -> None:
    with mounted(devices=2) as mount:
        (mount.root / "file").write_bytes(os.urandom(4_000_000))
        check_fpfs("flush", mount.root, module=CTL)
        status = json.loads(check_fpfs("status", "--json", mount.root, module=CTL))
        assert status["server_pid"] == mount.server_pid
        assert status["version"]
        assert [device["path"] for device in status["devices"]] == [str(d) for d in mount.devices]
        assert sum(device["bytes_used"] for device in status["devices"]) >= 4_000_000
        assert sum(device["bytes_written"] for device in status["devices"]) >= 4_000_000
        assert status["staging"]["bytes_total"] == 32 * 1024**2
        assert 0 <= status["staging"]["bytes_used"] <= status["staging"]["bytes_total"]
        assert status["commit"]["pending"] == 0
        table = check_fpfs("status", mount.root, module=CTL)
        assert str(mount.root) in table
        assert "32.0 MiB" in table


def test_status_of_a_path_inside() -> None:
    with mounted() as mount:
        (mount.root / "folder").mkdir()
        status = json.loads(check_fpfs("status", "--json", mount.root / "folder", module=CTL))
        assert status["mountpoint"] == str(mount.root)


def test_wait_returns_when_durable(tmp_path: Path) -> None:
    with mounted() as mount:
        path = mount.root / "file"
        path.write_bytes(os.urandom(8_000_000))
        check_fpfs("wait", path, module=CTL)
        assert mount.status().commit.pending == 0
        done = run_fpfs("wait", mount.root / "missing", module=CTL)
        assert (done.returncode, done.stdout) == (1, "")
        assert "No such file or directory; name a file on the mount" in done.stderr
    done = run_fpfs("wait", tmp_path, module=CTL)
    assert done.returncode == 1
    assert f"{tmp_path} is not on an fpfs mount" in done.stderr


def interrupted_mount(*arguments: str | Path) -> tuple[int, str]:
    """Interrupt a mount once its server runs; its exit status and what it said to stderr."""
    command = [sys.executable, "-m", "fpfs.cli.main", "mount", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as mounting:
        while mounting.poll() is None and not has_server(mounting.pid):
            pass
        mounting.send_signal(signal.SIGINT)
        _, message = mounting.communicate()
    return mounting.returncode, message


def test_an_interrupted_mount_leaves_none(places: tuple[Path, Path]) -> None:
    """By the time of the interrupt the mount may be there, or be on its way."""
    device, mountpoint = places
    for _ in range(10):
        status, message = interrupted_mount("-d", device, mountpoint)
        if status != 0:
            break
        check_fpfs("umount", mountpoint)  # the interrupt came after its end
    assert (status, message) == (130, "fpfs: interrupted\n")
    assert mount_at(str(mountpoint)) is None
    # Nothing holds the devices either.
    check_fpfs("mount", "-d", device, mountpoint)
    check_fpfs("umount", mountpoint)


def test_umount_drains_what_is_dirty() -> None:
    with mounted(staging="64M") as mount:
        content = os.urandom(200_000_003)
        digest = hashlib.sha256(content).digest()
        (mount.root / "large").write_bytes(content)
        with contextlib.ExitStack() as closing:
            processes = [os.pidfd_open(pid) for pid in (mount.server_pid, mount.keeper_pid)]
            for process in processes:
                closing.callback(os.close, process)
            mount.unmount()
            # The next mount would wait for those that still drain.
            assert select.select(processes, [], [], 0)[0] == processes
        mount.mount()
        assert hashlib.sha256((mount.root / "large").read_bytes()).digest() == digest


def test_umount_of_a_busy_mount_is_refused_and_changes_nothing() -> None:
    with mounted() as mount:
        path = mount.root / "file"
        with path.open("wb") as stream:
            stream.write(b"first")
            stream.flush()
            message = run_fpfs("umount", mount.root).stderr
            assert f"unmount {mount.root}: files on it are open; close what uses it" in message
            stream.write(b" second")
        assert path.read_bytes() == b"first second"


def test_umount_of_what_is_not_mounted(places: tuple[Path, Path]) -> None:
    _, mountpoint = places
    assert f"unmount {mountpoint}: nothing is mounted there; findmnt" in refusal(
        "umount", mountpoint
    )
    assert "unmount /proc: proc is mounted there, not fpfs" in refusal("umount", "/proc")


def test_the_embedded_default(places: tuple[Path, Path], tmp_path: Path) -> None:
    _, mountpoint = places
    environment = {"XDG_DATA_HOME": str(tmp_path / "data")}
    command = ("mount", "--staging", "16M", "--log", tmp_path / "log", mountpoint)
    done = run_fpfs(*command, environment=environment)
    assert done.returncode == 0, done.stderr
    assert f"formatted and mounted at {mountpoint} over {tmp_path}/data/fpfs/default" in done.stdout
    check_fpfs("umount", mountpoint)
    assert (tmp_path / "data/fpfs/default/fpfs.json").exists()


def test_format_and_then_mount(places: tuple[Path, Path], tmp_path: Path) -> None:
    device, mountpoint = places
    assert str(device) in check_fpfs("format", "-d", device)
    assert "is filesystem" in refusal("format", "-d", device)
    check_fpfs("mount", "-d", device, "--log", tmp_path / "log", "--staging", "16M", mountpoint)
    check_fpfs("umount", mountpoint)


def test_a_read_only_mount_does_not_format(places: tuple[Path, Path], tmp_path: Path) -> None:
    device, mountpoint = places
    log = ("--log", tmp_path / "log")
    assert f"{device} is empty, and a read-only mount does not format; mount it writable" in (
        refusal("mount", "-d", device, "-o", "ro", *log, mountpoint)
    )
    assert os.listdir(device) == []
    check_fpfs("format", "-d", device)
    check_fpfs("mount", "-d", device, "-o", "ro,staging=16M", *log, mountpoint)
    check_fpfs("umount", mountpoint)


def test_a_second_mount_of_the_same_devices(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with mounted(devices=1) as mount:
        message = refusal("mount", "-d", mount.devices[0], "--log", tmp_path / "log", other)
        where = f"{mount.devices[0]} is in use at {mount.root} (process {mount.keeper_pid})"
        assert f"mount at {other}: {where}; unmount it there first" in message


def test_a_second_mount_at_the_same_place(places: tuple[Path, Path]) -> None:
    with mounted() as mount:
        message = refusal("mount", "-d", places[0], mount.root)
        assert f"fpfs is mounted at {mount.root} already; run fpfs umount" in message
    assert os.listdir(places[0]) == []


def test_of_two_mounts_at_the_same_place_at_once_one_is_made(tmp_path: Path) -> None:
    """Both found nothing there, and come to mount at the same time."""
    root = tmp_path / "mount"
    names = ("first", "second")
    for path in (root, *(tmp_path / name for name in names)):
        path.mkdir()
    folder = make_runtime_folder(asked="test")
    with ThreadPoolExecutor() as pool:
        with mounting(str(root), folder=folder):
            inode = Path(folder, MOUNTING_NAME).stat().st_ino
            place = f":{inode} {zlib.crc32(os.fsencode(root))} "
            commands = [
                pool.submit(
                    run_fpfs,
                    *("mount", "-d", tmp_path / name, "--log", tmp_path / f"{name}.log"),
                    *("--staging", "16M", root),
                )
                for name in names
            ]

            def have_come() -> bool:
                locks = Path("/proc/locks").read_text().splitlines()
                waiting = [lock for lock in locks if " -> " in lock and place in lock]
                return len(waiting) == 2 or all(command.done() for command in commands)

            wait_until(have_come)
            early = [command.done() for command in commands]
        done = [command.result() for command in commands]
    mounts = [entry for entry in mount_table() if entry.mountpoint == str(root)]
    for _ in mounts:
        check_fpfs("umount", root)
    assert len(mounts) == 1
    assert not any(early)
    (made,) = (each for each in done if each.returncode == 0)
    (refused,) = (each for each in done if each.returncode != 0)
    assert f"mounted at {root} over" in made.stdout
    assert refused.stderr == (
        f"fpfs: mount at {root}: fpfs is mounted at {root} already; run fpfs umount {root} first,"
        " or mount elsewhere\n"
    )


def test_a_mountpoint_that_is_missing_or_no_directory(places: tuple[Path, Path]) -> None:
    device, mountpoint = places
    missing = mountpoint / "missing"
    assert f"the mountpoint {missing} does not exist; run mkdir -p {missing}" in refusal(
        "mount", "-d", device, missing
    )
    file = mountpoint / "file"
    file.touch()
    assert f"the mountpoint {file} is not a directory" in refusal("mount", "-d", device, file)


def test_what_the_mount_would_cover(places: tuple[Path, Path]) -> None:
    device, mountpoint = places
    inner = mountpoint / "device"
    inner.mkdir()
    assert f"the device directory {inner} lies under the mountpoint {mountpoint}" in refusal(
        "mount", "-d", inner, mountpoint
    )
    log = mountpoint / "log"
    assert f"the log {log} lies under the mountpoint" in refusal(
        "mount", "-d", device, "--log", log, mountpoint
    )
    assert "the staging arena /dev/shm lies under the mountpoint /dev/shm" in refusal(
        "mount", "-d", device, "/dev/shm"
    )
    below = device / "mount"
    below.mkdir()
    assert f"the mountpoint lies in the device directory {device}" in refusal(
        "mount", "-d", device, below
    )


def test_a_link_does_not_hide_what_the_mount_would_cover(places: tuple[Path, Path]) -> None:
    device, mountpoint = places
    (mountpoint / "device").mkdir()
    link = device / "link"
    link.symlink_to(mountpoint / "device")
    assert "lies under the mountpoint" in refusal("mount", "-d", link, mountpoint)


def test_devices_are_checked(places: tuple[Path, Path], tmp_path: Path) -> None:
    device, mountpoint = places
    (device / "thesis.tex").touch()
    log = ("--log", tmp_path / "log")
    assert f"{device} is not empty (thesis.tex is in it)" in refusal(
        "mount", "-d", device, *log, mountpoint
    )
    assert os.listdir(device) == ["thesis.tex"]
    missing = tmp_path / "missing"
    assert f"the device directory {missing} does not exist" in refusal(
        "mount", "-d", missing, *log, mountpoint
    )


def test_a_log_that_cannot_be_written(places: tuple[Path, Path]) -> None:
    device, mountpoint = places
    assert "the log /proc/no/log cannot be written" in refusal(
        "mount", "-d", device, "--log", "/proc/no/log", mountpoint
    )
    assert f"the log {device} cannot be written (Is a directory); name another with --log" in (
        refusal("mount", "-d", device, "--log", device, mountpoint)
    )


@pytest.mark.parametrize("named", [True, False], ids=["named", "default"])
def test_nobody_else_may_write_to_a_log(tmp_path: Path, *, named: bool) -> None:
    """Whatever the umask is."""
    log = tmp_path / "state" / "fpfs" / "log"
    if named:
        log.parent.mkdir(parents=True)
    config = ServerConfig(
        mountpoint="/ckpt",
        devices=(),
        options=MountOptions(log=str(log) if named else ""),
        log=str(log),
        runtime_folder="",
        ready_fd=-1,
        asked="",
    )
    before = os.umask(0)
    try:
        launch.open_log(config).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(log.stat().st_mode) == 0o640
    if not named:
        folders = (log.parent, log.parent.parent)
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o755] * 2


@pytest.mark.parametrize("where", [[], ["--foreground"]], ids=["background", "foreground"])
def test_the_folder_of_a_named_log_is_not_made(
    places: tuple[Path, Path], tmp_path: Path, where: list[str]
) -> None:
    device, mountpoint = places
    folder = tmp_path / "missing"
    # Twice, so that nothing would be mounted if the log were taken.
    devices = ("-d", device, "-d", device)
    message = refusal("mount", *devices, *where, "-o", f"log={folder}/log", mountpoint)
    assert f"cannot be written (No such file or directory); make the folder {folder}, or" in message
    assert not folder.exists()
    assert os.listdir(device) == []


def test_options_are_checked(places: tuple[Path, Path]) -> None:
    device, mountpoint = places
    message = refusal("mount", "-d", device, "-o", "ack=never", mountpoint)
    assert "ack=never: ack has no such setting; take one of early, close, durable" in message
    assert "fpfs has no such option; known are ack=" in refusal(
        "mount", "-d", device, "-o", "bogus", mountpoint
    )
    assert "depth=many: this is not a number" in refusal(
        "mount", "-d", device, "--depth", "many", mountpoint
    )


def test_arguments_that_cannot_be_read() -> None:
    done = run_fpfs("mount")
    assert done.returncode == 2
    assert re.fullmatch(r"fpfs: .*MOUNTPOINT.*[^.]; see --help\n", done.stderr)


def test_more_staging_than_there_is_memory(places: tuple[Path, Path], tmp_path: Path) -> None:
    device, mountpoint = places
    message = refusal(
        "mount", "-d", device, "--staging", "900T", "--log", tmp_path / "log", mountpoint
    )
    assert "ask for less staging" in message


def test_options_reach_the_mount() -> None:
    with mounted() as mount:
        mount.remount("ack=close,backend=threads,ro,staging=16M", "fsname=/my/devices")
        status = mount.status()
        assert status.ack == "close"
        assert {device.backend for device in status.devices} == {"threads"}
        entry = mount.entry()
        assert entry is not None
        assert entry.source == "/my/devices"
        with pytest.raises(OSError, match="Read-only"):
            (mount.root / "file").touch()


def test_reads_are_asked_for_by_half_a_chunk_and_well_ahead() -> None:
    with mounted() as mount:
        entry = mount.entry()
        assert entry is not None
        line = next(
            line
            for line in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")
            if f" {entry.device} " in line
        )
        assert f"max_read={MAX_READ_BYTES}" in line.split(" - ")[1].split(",")
        read_ahead = Path(f"/sys/class/bdi/{entry.device}/read_ahead_kb").read_text()
        assert int(read_ahead) == (READ_AHEAD_KIB if os.geteuid() == 0 else 128)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can raise the read-ahead")
def test_reads_are_large_however_many_the_server_is_behind() -> None:
    """The kernel drops what it reads ahead when there are more than it is told to have."""
    readers, window = 16, READ_AHEAD_KIB * 1024
    reads = readers * window // MAX_READ_BYTES
    with mounted() as mount, contextlib.ExitStack() as stack:
        contents = [random_bytes(window, seed=number) for number in range(readers)]
        for number, content in enumerate(contents):
            (mount.root / str(number)).write_bytes(content)
        mount.remount()
        entry = mount.entry()
        assert entry is not None
        minor = entry.device.partition(":")[2]
        waiting = Path("/sys/fs/fuse/connections", minor, "waiting")
        paths = [mount.root / str(number) for number in range(readers)]
        fds = [stack.enter_context(path.open("rb")).fileno() for path in paths]
        threads = stack.enter_context(ThreadPoolExecutor(readers))
        stop(mount.server_pid)
        try:
            found = [threads.submit(os.pread, fd, window, 0) for fd in fds]
            wait_until(lambda: int(waiting.read_text()) >= reads)
        finally:
            os.kill(mount.server_pid, signal.SIGCONT)
        assert [each.result() for each in found] == contents
        assert mount.status().channel["reads"] == reads


def test_a_mount_without_server_and_keeper_is_unmounted_and_mounted_again() -> None:
    with mounted() as mount:
        (mount.root / "kept").write_bytes(b"durable")
        mount.flush()
        mount.kill(mount.keeper_pid, mount.server_pid)
        with pytest.raises(OSError, match=r"endpoint|abort"):
            os.listdir(mount.root)
        for verb in ("status", "wait", "flush"):
            dead = run_fpfs(verb, mount.root, module=CTL)
            assert dead.returncode == 1
            assert f"answers for {mount.root}; if it died, run fpfs umount" in dead.stderr
        message = refusal_of_dead_umount(mount)
        assert "its server was gone" in message
        assert mount.entry() is None
        mount.mount()
        assert (mount.root / "kept").read_bytes() == b"durable"


def test_a_mount_whose_socket_is_gone_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its user logged out, with the folder of the session, and came again."""
    with mounted() as mount:
        (mount.root / "kept").write_bytes(b"kept")
        entry = mount.entry()
        with monkeypatch.context() as patched:
            patched.setattr(control, "_find_socket", lambda _entry: None)
            with pytest.raises(Refused, match=r"its processes live \(keeper \d+\), and no server"):
                launch.stop(str(mount.root))
        assert mount.entry() == entry
        assert (mount.root / "kept").read_bytes() == b"kept"


def refusal_of_dead_umount(mount: Mount) -> str:
    """Unmount a mount whose server died; the command says so and fails."""
    done = run_fpfs("umount", mount.root)
    assert done.returncode == 1
    mount.forget()
    return done.stderr


def test_in_the_foreground_until_unmounted(places: tuple[Path, Path]) -> None:
    device, mountpoint = places
    with subprocess.Popen(
        f"{sys.executable} -m fpfs.cli.main mount -d {device} --foreground"
        f" --staging 16M {mountpoint}".split(),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if "mounted at" in line:
                break
        assert mount_at(str(mountpoint)) is not None, lines
        (mountpoint / "file").write_bytes(b"content")
        check_fpfs("umount", mountpoint)
        assert server.wait(timeout=60) == 0
        log = server.stderr.read()
        assert " INFO fpfs.server: unmounted\n" in log
        assert "ended; all is durable" in log


def test_a_restart_in_the_foreground_loads_nothing_from_where_it_was_started(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its paths are relative to there all the same."""
    device, mountpoint = places
    (tmp_path / "msgspec.py").write_text("raise SystemExit('theirs')\n")
    where = [os.path.relpath(path, tmp_path) for path in (device, mountpoint)]
    with subprocess.Popen(
        f"{sys.executable} -P -m fpfs.cli.main mount -d {where[0]} --foreground"
        f" --staging 16M --log log {where[1]}".split(),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    ) as server:
        log = tmp_path / "log"
        wait_until(lambda: log.exists() and "mounted at" in log.read_text())
        (mountpoint / "file").write_bytes(b"content")
        try:
            said = run_fpfs("restart", mountpoint, module=CTL)
            assert "was replaced by" in said.stdout, said.stderr
            assert (mountpoint / "file").read_bytes() == b"content"
            assert os.readlink(f"/proc/{server.pid}/cwd") == "/"
        finally:
            check_fpfs("umount", mountpoint)
        assert server.wait(timeout=60) == 0


def test_staging_that_does_not_fit_leaves_nothing(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    device, mountpoint = places
    before = set(os.listdir("/dev/shm"))
    log = tmp_path / "log"
    assert re.search(
        r"the server failed \(staging arena /dev/shm/\S+: cannot allocate \d+ bytes: No space left"
        r" on device\); ask for less staging \(it is memory\), or enlarge /dev/shm\n",
        refusal("mount", "-d", device, "--log", log, "--staging", "1000T", mountpoint),
    )
    assert "Traceback" not in log.read_text()
    made = {name for name in os.listdir("/dev/shm") if name not in before}
    identity = json.loads((device / "fpfs.json").read_bytes())["filesystem_id"]
    assert not [name for name in made if identity in name]
    assert not (device / "catalog.db-wal").exists()


def test_a_link_to_the_mountpoint_is_the_mountpoint(tmp_path: Path) -> None:
    with mounted() as mount:
        link, second = tmp_path / "link", tmp_path / "second"
        link.symlink_to(mount.root)
        second.symlink_to("link")
        device = tmp_path / "device"
        device.mkdir()
        assert f"fpfs is mounted at {mount.root} already" in refusal("mount", "-d", device, second)
        check_fpfs("umount", second)
        assert mount.entry() is None
        mount.forget()
        assert "nothing is mounted there" in refusal("umount", link)
        mount.mount()


def test_names_that_are_odd_but_text(tmp_path: Path) -> None:
    """What ends lines elsewhere, and what a terminal's library would take for its own."""
    odd = tmp_path / "a\r\x0c\u2028 [bold] :smile:\n"
    odd.mkdir()
    with mounted(parent=odd) as mount:
        (mount.root / "file").write_bytes(b"content")
        shown = check_fpfs("status", mount.root, module=CTL)
        escaped = "/a\\x0d\\x0c\\u2028 [bold] :smile:\\x0a/"
        assert shown.startswith(str(tmp_path) + escaped)
        mount.remount()
        assert (mount.root / "file").read_bytes() == b"content"


@pytest.mark.parametrize("part", ["device", "mountpoint", "log"])
def test_names_that_are_no_text(places: tuple[Path, Path], tmp_path: Path, part: str) -> None:
    """They are told to the server, and stored, as text."""
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    device, mountpoint = places
    chosen = {"device": device, "mountpoint": mountpoint, "log": tmp_path / "log", part: odd}
    words = ["mount", "-d", chosen["device"], "--log", chosen["log"], chosen["mountpoint"]]
    assert f"'{tmp_path}/\\udcff' is not UTF-8; give it another name" in refusal(*words)
    if part == "device":
        assert "is not UTF-8; give it another name" in refusal("format", "-d", odd)
    assert os.listdir(device) == os.listdir(odd) == []


def test_the_default_device_cannot_be_made(places: tuple[Path, Path], tmp_path: Path) -> None:
    _, mountpoint = places
    file = tmp_path / "file"
    file.touch()
    assert refusal("mount", mountpoint, environment={"XDG_DATA_HOME": str(file)}) == (
        f"fpfs: mount at {mountpoint}: the default device directory {file}/fpfs/default cannot be"
        " made (Not a directory); name one with -d\n"
    )
