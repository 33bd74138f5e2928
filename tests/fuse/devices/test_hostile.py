"""Device directories made by somebody who means ill: nothing happens outside, and it is told."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fpfs.core.engine import crc32c
from fpfs.core.layout import Run, Segment, decode_segment, encode_segment
from fpfs.daemon.catalog.schema import row_crc
from fpfs.daemon.devices.arena import arena_path
from fpfs.testing.mounted import CommandFailed, Mount, mounted, run_fpfs
from tests.support.catalog.device_sets import SMALL, DeviceSet, fill
from tests.support.failures.crash import close_dead

SECRET = b"not yours\n"
TRAPS = ("link", "pipe", "socket", "directory")
MEMORY_MAX = 8 << 30
"""Address space that the tools may have."""


class Outside:
    """What lies outside of the device directories and must stay as it is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        folder.mkdir()
        self.secret.write_bytes(SECRET)
        (folder / "objects").mkdir()
        (folder / "objects" / "kept").write_bytes(SECRET)
        self._before = self._look()

    def _look(self) -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in sorted(self.folder.rglob("*"))
        }

    def check(self) -> None:
        """Nothing came, went or changed."""
        assert self._look() == self._before

    def put(self, path: Path, trap: str) -> None:
        """Put something in the place of a file or directory."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        if trap == "link":
            path.symlink_to(self.folder / "objects" if path.name == "objects" else self.secret)
        elif trap == "dangling":
            path.symlink_to(self.folder / "made")
        elif trap == "pipe":
            os.mkfifo(path)
        elif trap == "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                folder_fd = os.open(path.parent, os.O_RDONLY)
                listener.bind(f"/proc/self/fd/{folder_fd}/{path.name}")
                os.close(folder_fd)
        else:
            path.mkdir()


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path / "outside")


@pytest.fixture(scope="module")
def kept() -> Iterator[tuple[Mount, DeviceSet]]:
    with mounted(devices=2) as mount:
        fill(mount.root)
        mount.unmount()
        yield mount, DeviceSet(mount.folder, mount.devices)
        mount.log.unlink(
            missing_ok=True
        )  # what it says was looked at, and tests follow each other in it


@pytest.fixture
def hostile(kept: tuple[Mount, DeviceSet]) -> tuple[Mount, DeviceSet]:
    mount, devices = kept
    devices.restore()
    mount.log.unlink(missing_ok=True)
    return mount, devices


def run_tool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool with bounded memory and time; it tells one line or more, and no traceback."""
    done = run_fpfs(*words, address_space_max=MEMORY_MAX)
    assert "Traceback" not in done.stderr + done.stdout
    assert done.returncode in (0, 1, 4, 5, 8), done
    return done


def try_all(
    mount: Mount, devices: DeviceSet, outside: Outside, copy: Path, *, may_be_full: bool = False
) -> str:
    """Check, export, mount, read and change everything, unmount; returns what was told."""
    before = devices.hashes()
    told = run_tool("fsck", "--data", *devices.devices)
    assert devices.hashes() == before
    outside.check()
    exported = run_tool("export", *devices.devices, copy)
    outside.check()
    assert devices.hashes() == before
    text = told.stdout + told.stderr + exported.stderr
    try:
        mount.mount()
    except CommandFailed as refusal:
        lines = [line for line in str(refusal).splitlines()[1:] if line]
        assert len(lines) == 1, refusal
        text += lines[0]
    else:
        use(mount, may_be_full=may_be_full)
        mount.unmount()
        text += mount.log_text()
    assert "Traceback" not in mount.log_text()
    outside.check()
    return text


def use(mount: Mount, *, may_be_full: bool = False) -> None:
    """Read, overwrite and remove what is there; errors are fine.

    Without a reserve the catalog counts as full, and takes no new names.
    """
    for folder, folders, names in os.walk(mount.root):
        for name in [*names, *folders]:
            path = Path(folder, name)
            try:
                path.lstat()
                if path.is_file() and not path.is_symlink():
                    with path.open("rb") as file:
                        file.read(4 << 20)
                    with path.open("r+b") as file:
                        file.write(b"rewritten")
                    path.unlink()
            except OSError:
                continue
    try:
        (mount.root / "new").write_bytes(b"x" * 300_000)
    except OSError as error:
        assert may_be_full
        assert error.errno == errno.ENOSPC
    else:
        assert (mount.root / "new").read_bytes() == b"x" * 300_000


TOGETHER = [
    ["fpfs.json"],
    ["lock"],
    # A copy that is missing is made anew, by way of these.
    ["catalog.db", ".catalog.db.new", "catalog.sums.new"],
    ["catalog.db-wal", "catalog.db-journal", "catalog.db-shm"],
    ["catalog.sums"],
    [".fpfs.json.new", "catalog.alone", "reserve", "objects/.direct-probe"],
    ["objects"],
]


@pytest.mark.parametrize("trap", ["link", "dangling", "pipe", "directory"])
@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_nothing_in_a_file_s_place_leads_outside_or_hangs(
    hostile: tuple[Mount, DeviceSet], outside: Outside, tmp_path: Path, names: list[str], trap: str
) -> None:
    mount, devices = hostile
    stamp = devices.devices[0] / "fpfs.json"
    stamp.write_text(stamp.read_text().replace("/device1", "/elsewhere"))  # it is written anew
    for name in names:
        outside.put(devices.devices[0] / name, trap)
    try_all(mount, devices, outside, tmp_path / "copy", may_be_full="reserve" in names)


@pytest.mark.parametrize("trap", TRAPS)
def test_nothing_in_an_object_s_place_leads_outside_or_hangs(
    hostile: tuple[Mount, DeviceSet], outside: Outside, tmp_path: Path, trap: str
) -> None:
    mount, devices = hostile
    victim, folder = devices.objects_of(devices.ino("large"))
    outside.put(victim, trap)
    outside.put(folder.parent, trap)
    text = try_all(mount, devices, outside, tmp_path / "copy")
    assert f"object {victim.name} on device 0" in text
    assert "cannot be read: " in text


def test_both_copies_of_the_catalog_replaced(
    hostile: tuple[Mount, DeviceSet], outside: Outside, tmp_path: Path
) -> None:
    mount, devices = hostile
    for device, trap in zip(devices.devices, ("link", "pipe"), strict=True):
        outside.put(device / "catalog.db", trap)
    text = try_all(mount, devices, outside, tmp_path / "copy")
    assert "catalog.db cannot be used: " in text


def change_segment(devices: DeviceSet, name: str, change: Callable[[Run], Run]) -> None:
    """Change the first run of a file's map; checksums fit."""
    ino = devices.ino(name)
    ((index, blob),) = devices.query("SELECT segment, blob FROM segments WHERE ino = ?", ino)
    segment = decode_segment(blob)
    first, *rest = segment.runs
    made = encode_segment(Segment(segment.index, (change(first), *rest), segment.checksums))
    devices.change(
        (
            "UPDATE segments SET blob = ?, crc = ? WHERE ino = ?",
            [made, row_crc(ino, index, content=made), ino],
        )
    )


def far_device(devices: DeviceSet) -> None:
    change_segment(devices, "large", lambda run: run._replace(device=60_000))


def far_block(devices: DeviceSet) -> None:
    change_segment(devices, "large", lambda run: run._replace(object_block=2**32 - 2))


def far_object(devices: DeviceSet) -> None:
    change_segment(devices, "large", lambda run: run._replace(object=2**64 - 1))


def absurd_size(devices: DeviceSet) -> None:
    devices.change(("UPDATE inodes SET size = ? WHERE ino = ?", [2**62, devices.ino("large")]))


def negative_size(devices: DeviceSet) -> None:
    devices.change(("UPDATE inodes SET size = -5 WHERE ino = ?", [devices.ino("large")]))


def absurd_segment(devices: DeviceSet) -> None:
    ino, index = devices.ino("large"), 2**40
    blob = b"FSEG"
    row = [ino, index, blob, row_crc(ino, index, content=blob)]
    devices.change(("INSERT INTO segments VALUES (?, ?, ?, ?)", row))


def absurd_runs(devices: DeviceSet) -> None:
    ino = devices.ino("large")
    body = struct.pack("<IHHII", 0x47455346, 2, 0, 0, 2**32 - 1) + bytes(8)
    blob = body + struct.pack("<I", crc32c(body))
    values = [blob, row_crc(ino, 0, content=blob), ino]
    devices.change(("UPDATE segments SET blob = ?, crc = ? WHERE ino = ?", values))


def names_that_are_paths(devices: DeviceSet) -> None:
    devices.change(
        ("UPDATE names SET name = ? WHERE name = ?", [b"../../../outside", b"sparse"]),
        ("UPDATE names SET name = ? WHERE name = ?", [b"..", b"link"]),
    )


def no_mode(devices: DeviceSet) -> None:
    devices.change(("UPDATE inodes SET mode = 0 WHERE ino = ?", [devices.ino("other")]))


def negative_mode(devices: DeviceSet) -> None:
    devices.change(("UPDATE inodes SET mode = -1 WHERE ino = ?", [devices.ino("other")]))


def far_mode(devices: DeviceSet) -> None:
    mode = stat.S_IFREG + 2**40
    devices.change(("UPDATE inodes SET mode = ? WHERE ino = ?", [mode, devices.ino("small")]))


def a_circle(devices: DeviceSet) -> None:
    folder, deeper = devices.ino("folder"), devices.ino("deeper")
    devices.change(
        ("UPDATE names SET parent = ? WHERE ino = ?", [deeper, folder]),
        ("UPDATE inodes SET parent = ? WHERE ino = ?", [deeper, folder]),
    )


def an_unfinished_file_in_a_circle(devices: DeviceSet) -> None:
    a_circle(devices)
    devices.change(("UPDATE inodes SET unfinished = 1 WHERE ino = ?", [devices.ino("small")]))


def a_group_in_a_circle(devices: DeviceSet) -> None:
    a_circle(devices)
    devices.change(("INSERT INTO groups VALUES (?, 0, 0, x'', 0)", [devices.ino("folder")]))


def a_group_of_nothing(devices: DeviceSet) -> None:
    devices.change(("INSERT INTO groups VALUES (?, 0, 0, x'', 0)", [devices.ino("folder")]))
    devices.change(("DELETE FROM inodes WHERE ino = ?", [devices.ino("other")]))


def a_trigger(devices: DeviceSet) -> None:
    devices.change(
        "CREATE TRIGGER t AFTER UPDATE ON inodes BEGIN DELETE FROM names; END",
    )


def a_view(devices: DeviceSet) -> None:
    devices.change("ALTER TABLE xattrs RENAME TO x", "CREATE VIEW xattrs AS SELECT * FROM x")


def no_table(devices: DeviceSet) -> None:
    devices.change("DROP TABLE segments")


def foreign_layout(devices: DeviceSet) -> None:
    ino = devices.ino("large")
    devices.change(("UPDATE inodes SET layout = ? WHERE ino = ?", [b"\x93\x01\x02\x03", ino]))


def absurd_objects(devices: DeviceSet) -> None:
    path = devices.objects_of(devices.ino("large"))[0]
    os.truncate(path, 2**42)


def absurd_counts(devices: DeviceSet) -> None:
    devices.change(("UPDATE objects SET bytes = ?", [2**63 - 1]))
    devices.change(("UPDATE devices SET bytes = ?", [-(2**63)]))


def absurd_catalog(devices: DeviceSet) -> None:
    os.truncate(devices.devices[0] / "catalog.db", 2**42)
    os.truncate(devices.devices[1] / "catalog.sums", 2**42)
    with (devices.devices[0] / "catalog.db-wal").open("wb") as log:
        log.truncate(2**42)


def absurd_sums(devices: DeviceSet) -> None:
    path = devices.devices[0] / "catalog.sums"
    header = bytearray(path.read_bytes()[:512])
    header[40:44] = struct.pack("<I", 2**32 - 1)
    header[508:512] = struct.pack("<I", crc32c(bytes(header[:508])))
    with path.open("r+b") as sums:
        sums.write(header)
        sums.truncate(2**36)


@pytest.mark.parametrize(
    "damage",
    [
        far_device,
        far_block,
        far_object,
        absurd_size,
        negative_size,
        absurd_segment,
        absurd_runs,
        names_that_are_paths,
        no_mode,
        negative_mode,
        far_mode,
        a_circle,
        an_unfinished_file_in_a_circle,
        a_group_in_a_circle,
        a_group_of_nothing,
        a_trigger,
        a_view,
        no_table,
        foreign_layout,
        absurd_objects,
        absurd_counts,
        pytest.param(absurd_catalog, marks=pytest.mark.long),
        absurd_sums,
    ],
)
def test_absurd_values_do_nothing(
    hostile: tuple[Mount, DeviceSet],
    outside: Outside,
    tmp_path: Path,
    damage: Callable[[DeviceSet], None],
) -> None:
    mount, devices = hostile
    damage(devices)
    text = try_all(mount, devices, outside, tmp_path / "copy")
    assert text, "it is told"
    assert not (tmp_path / "outside.made").exists()


def test_a_journal_beside_the_catalog_removes_nothing(
    hostile: tuple[Mount, DeviceSet], outside: Outside, tmp_path: Path
) -> None:
    """SQLite would remove the file that a rollback journal names as its super-journal."""
    mount, devices = hostile
    magic = bytes.fromhex("d9d505f920a163d7")
    name = os.fsencode(outside.secret)
    tail = struct.pack(">I", 2**31 // 4096 + 1) + name
    tail += struct.pack(">II", len(name), sum(name)) + magic
    header = magic + struct.pack(">IIIII", 0, 0, 100, 512, 4096)
    for device in devices.devices:
        (device / "catalog.db-journal").write_bytes(header.ljust(512, b"\0") + tail)
    try_all(mount, devices, outside, tmp_path / "copy")


SLOTS_AT, SLOT_RECORD_BYTES = 4096, 128


def change_slots(arena: Path, change: Callable[[bytearray], None]) -> int:
    """Change all slots in use; their checksums fit. Returns how many there are."""
    changed = 0
    with arena.open("r+b") as file:
        (slots,) = struct.unpack("<Q", file.read(160)[152:])
        for number in range(2 * slots):
            at = SLOTS_AT + number * SLOT_RECORD_BYTES
            file.seek(at)
            record = bytearray(file.read(SLOT_RECORD_BYTES))
            if struct.unpack_from("<I", record, 48) == (0,):
                continue
            change(record)
            struct.pack_into("<I", record, 124, crc32c(bytes(record[:124])))
            file.seek(at)
            file.write(record)
            changed += 1
    return changed


def put(format_: str, at: int, *values: int) -> Callable[[bytearray], None]:
    """Write values into a record."""
    return lambda record: struct.pack_into(format_, record, at, *values)


@pytest.mark.parametrize(
    "change",
    [
        put("<Q", 8, 2**63 + 5),  # inode
        put("<Q", 16, 2**64 - 1),  # chunk
        put("<Q", 24, 0),  # size of a chunk
        put("<Q", 24, 65536 * 3),
        put("<Q", 32, 2**64 - 1),  # size of the file
        put("<I", 48, 77),  # state
        put("<I", 52, 2**32 - 1),  # ranges
        put("<II", 56, 0, 2**32 - 1),
    ],
)
def test_wild_values_in_the_arena(change: Callable[[bytearray], None]) -> None:
    with mounted(devices=2) as mount:
        mount.allow_log("impossible|left out|cannot be|is gone|takes over|took over|died|failed")
        fill(mount.root)
        mount.flush()
        staged = os.open(mount.root / "staged", os.O_WRONLY | os.O_CREAT)
        os.write(staged, b"x" * 100_000)
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        close_dead(staged)
        filesystem_id = DeviceSet(mount.folder, mount.devices).filesystem_id
        assert change_slots(Path(arena_path(filesystem_id)), change) > 0
        mount.mount()
        assert (mount.root / "folder" / "deeper" / "small").read_bytes() == SMALL
        (mount.root / "new").write_bytes(b"y" * 500_000)
        assert (mount.root / "new").read_bytes() == b"y" * 500_000
        use(mount)


def test_an_absurd_arena_is_refused(tmp_path: Path) -> None:
    with mounted(devices=2) as mount:
        mount.allow_log("the server failed .staging arena")
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        arena = Path(arena_path(DeviceSet(mount.folder, mount.devices).filesystem_id))
        with arena.open("rb") as file:
            kept = file.read(4096)
        size = arena.stat().st_size
        arena.unlink()
        with arena.open("xb") as file:
            file.write(kept)
            file.truncate(size)
        with pytest.raises(CommandFailed, match="its size is wrong"):
            mount.mount()
        arena.unlink()
        os.mkfifo(arena)
        with pytest.raises(CommandFailed, match="staging arena"):
            mount.mount()
        arena.unlink()
        arena.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_bytes(kept)
        with pytest.raises(CommandFailed, match="staging arena"):
            mount.mount()
        assert (tmp_path / "elsewhere").read_bytes() == kept
        arena.unlink()
        mount.mount()


@pytest.mark.root
def test_another_user_s_arena_is_refused() -> None:
    with mounted(devices=2) as mount:
        mount.allow_log("cannot be taken over")
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        arena = Path(arena_path(DeviceSet(mount.folder, mount.devices).filesystem_id))
        os.chown(arena, 65534, 65534)
        with pytest.raises(CommandFailed, match="it belongs to user 65534"):
            mount.mount()
        os.chown(arena, 0, 0)
        mount.mount()
