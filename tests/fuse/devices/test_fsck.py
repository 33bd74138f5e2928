"""fpfs fsck: finds what was damaged and nothing else, and repairs what it can when asked to."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fpfs.core.engine import BLOCK_BYTES
from fpfs.core.fsck import CheckReport, Kind
from fpfs.daemon.catalog.schema import row_crc
from fpfs.daemon.offline.fsck import Wishes, check_devices
from fpfs.testing.mounted import Mount, check_fpfs, mounted, run_fpfs
from tests.support.catalog.catalogs import LEFT_BY_A_CATALOG, LEFT_BY_NO_CATALOG, leave
from tests.support.catalog.device_sets import SMALL, DeviceSet, fill, filled
from tests.support.contents import random_bytes
from tests.support.failures.crash import close_dead, crash
from tests.support.failures.damage import blocks_of, flip
from tests.support.files_changing import keep_changing
from tests.support.processes import run

ROOT = 1


def fsck(*words: str | Path, command: str = "main") -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return run_fpfs("fsck", *words, module=f"fpfs.cli.{command}")


def check(devices: DeviceSet, *, repair: bool = False, data: bool = False) -> CheckReport:
    """Check in this process."""
    return check_devices(devices.words, Wishes(repair, data, lambda _done, _total: None))


@pytest.fixture(scope="module")
def kept_set() -> Iterator[DeviceSet]:
    with filled() as devices:
        yield devices


@pytest.fixture
def devices(kept_set: DeviceSet) -> DeviceSet:
    """As they were filled."""
    kept_set.restore()
    return kept_set


def test_a_sound_filesystem_has_no_findings_and_stays_as_it_is(devices: DeviceSet) -> None:
    before = devices.hashes()
    done = fsck("--data", *devices.words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "all is well" in done.stdout
    assert devices.hashes() == before
    report = json.loads(fsck("--json", *devices.words).stdout)
    assert (report["findings"], report["notes"], report["ended_cleanly"]) == ([], [], True)
    assert devices.hashes() == before


def lose_inode(devices: DeviceSet) -> None:
    devices.change(("DELETE FROM inodes WHERE ino = ?", [devices.ino("small")]))


def lose_inode_of_two_names(devices: DeviceSet) -> None:
    devices.change(("DELETE FROM inodes WHERE ino = ?", [devices.ino("large")]))


def lose_inode_and_name(devices: DeviceSet) -> None:
    devices.change(("DELETE FROM inodes WHERE ino = ?", [devices.ino("other")]))
    lose_name(devices)


def lose_inode_without_content(devices: DeviceSet) -> None:
    devices.change(("DELETE FROM inodes WHERE ino = ?", [devices.ino("symlink")]))


def lose_name(devices: DeviceSet) -> None:
    devices.change(("DELETE FROM names WHERE name = ?", [b"other"]))


def lose_directory_name(devices: DeviceSet) -> None:
    devices.change(("DELETE FROM names WHERE name = ?", [b"folder"]))


def lose_directory(devices: DeviceSet) -> None:
    devices.change(("DELETE FROM inodes WHERE ino = ?", [devices.ino("deeper")]))


def count_links_wrong(devices: DeviceSet) -> None:
    devices.change(("UPDATE inodes SET nlink = 7 WHERE ino = ?", [devices.ino("large")]))


def count_folders_wrong(devices: DeviceSet) -> None:
    devices.change("UPDATE inodes SET nlink = 9 WHERE ino = 1")


def close_a_circle(devices: DeviceSet) -> None:
    folder, deeper = devices.ino("folder"), devices.ino("deeper")
    devices.change(
        ("UPDATE names SET parent = ? WHERE ino = ?", [deeper, folder]),
        ("UPDATE inodes SET parent = ? WHERE ino = ?", [deeper, folder]),
    )


def name_a_directory_twice(devices: DeviceSet) -> None:
    row = [900_000, ROOT, b"again", devices.ino("deeper"), stat.S_IFDIR >> 12]
    devices.change(
        ("INSERT INTO names VALUES (?, ?, ?, ?, ?)", row),
        "UPDATE filesystem SET value = 1000000 WHERE name = 'next_number'",
    )


def misname(devices: DeviceSet) -> None:
    devices.change(("UPDATE names SET name = ? WHERE name = ?", [b"../../x", b"other"]))


def mistype(devices: DeviceSet) -> None:
    devices.change(("UPDATE names SET type = 4 WHERE name = ?", [b"other"]))


def forget_parent(devices: DeviceSet) -> None:
    devices.change(("UPDATE inodes SET parent = 1 WHERE ino = ?", [devices.ino("deeper")]))


def set_the_counter_back(devices: DeviceSet) -> None:
    devices.change("UPDATE filesystem SET value = 17 WHERE name = 'next_number'")


def set_the_counter_back_to_a_version(devices: DeviceSet) -> None:
    devices.change(
        "UPDATE filesystem SET value = (SELECT max(version) FROM inodes) WHERE name = 'next_number'"
    )


def forget_an_object(devices: DeviceSet) -> None:
    devices.change(("DELETE FROM objects WHERE ino = ?", [devices.ino("other")]))


def give_an_object_away(devices: DeviceSet) -> None:
    sparse, other = devices.ino("sparse"), devices.ino("other")
    ((device, id_),) = devices.query("SELECT device, id FROM objects WHERE ino = ? LIMIT 1", other)
    row = [sparse, row_crc(device, id_, sparse), device, id_]
    devices.change(("UPDATE objects SET ino = ?, crc = ? WHERE device = ? AND id = ?", row))


def damage_an_object_row(devices: DeviceSet) -> None:
    devices.change(("UPDATE objects SET crc = crc + 1 WHERE ino = ?", [devices.ino("other")]))


def miscount_an_object(devices: DeviceSet) -> None:
    devices.change(("UPDATE objects SET bytes = bytes + 1 WHERE ino = ?", [devices.ino("other")]))


def miscount_a_device(devices: DeviceSet) -> None:
    devices.change("UPDATE devices SET bytes = bytes - 1 WHERE number = 1")


def share_wrongly(devices: DeviceSet) -> None:
    ((device, id_),) = devices.query(
        "SELECT device, id FROM objects WHERE ino = ? LIMIT 1", devices.ino("other")
    )
    row = (device, id_, devices.ino("large"), 0, 2)
    devices.change(("INSERT INTO shares VALUES (?, ?, ?, ?, ?, ?)", [*row, row_crc(*row)]))


def remove_what_is_needed(devices: DeviceSet) -> None:
    ((device, id_),) = devices.query(
        "SELECT device, id FROM objects WHERE ino = ? LIMIT 1", devices.ino("other")
    )
    row = (16, device, id_, 0, 0)
    devices.change(("INSERT INTO removals VALUES (?, ?, ?, ?, ?, ?)", [*row, row_crc(*row)]))


def leave_attributes(devices: DeviceSet) -> None:
    devices.change("INSERT INTO xattrs VALUES (77777, x'61', x'62')")


def leave_an_object(devices: DeviceSet) -> None:
    path = devices.object_path(1, 0x12AB)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * 100)


CORRECTED = [
    (lose_inode, Kind.INODE),
    (lose_inode_of_two_names, Kind.INODE),
    (lose_inode_and_name, Kind.INODE),
    (lose_inode_without_content, Kind.NAME),
    (lose_name, Kind.UNNAMED),
    (lose_directory_name, Kind.UNNAMED),
    (lose_directory, Kind.NAME),
    (count_links_wrong, Kind.LINKS),
    (count_folders_wrong, Kind.LINKS),
    (close_a_circle, Kind.UNNAMED),
    (name_a_directory_twice, Kind.NAME),
    (misname, Kind.NAME),
    (mistype, Kind.NAME),
    (forget_parent, Kind.LINKS),
    (set_the_counter_back, Kind.STRUCTURE),
    (set_the_counter_back_to_a_version, Kind.STRUCTURE),
    (forget_an_object, Kind.OBJECTS),
    (give_an_object_away, Kind.OBJECTS),
    (damage_an_object_row, Kind.OBJECTS),
    (miscount_an_object, Kind.OBJECTS),
    (miscount_a_device, Kind.OBJECTS),
    (share_wrongly, Kind.SHARES),
    (remove_what_is_needed, Kind.OBJECTS),
    (leave_attributes, Kind.INODE),
    (leave_an_object, Kind.ORPHAN),
]


@pytest.mark.parametrize(
    ("damage", "kind"), CORRECTED, ids=lambda each: getattr(each, "__name__", each)
)
def test_what_can_be_corrected_is(
    devices: DeviceSet, damage: Callable[[DeviceSet], None], kind: Kind
) -> None:
    damage(devices)
    before = devices.hashes()
    found = check(devices)
    assert kind in {finding.kind for finding in found.findings}
    assert not any(finding.corrected for finding in found.findings)
    assert found.exit_status == 4
    assert devices.hashes() == before
    repaired = check(devices, repair=True)
    assert kind in {finding.kind for finding in repaired.findings}
    assert repaired.exit_status == 1
    again = check(devices, data=True)
    assert (again.findings, again.exit_status) == ((), 0)
    assert all(path.exists() for path in devices.objects_of(devices.ino("large")))


def test_what_was_repaired_is_mounted() -> None:
    """Everything wrong at once; what is left of the files is there and right."""
    with mounted(devices=2) as mount:
        fill(mount.root)
        other = (mount.root / "folder" / "other").read_bytes()
        mount.unmount()
        devices = DeviceSet(mount.folder, mount.devices)
        for damage in (lose_directory_name, count_links_wrong, forget_an_object, lose_inode):
            damage(devices)
        leave_an_object(devices)
        ino = devices.ino("other")
        done = fsck("--repair", *devices.words)
        assert (done.returncode, done.stderr) == (1, "")
        mount.mount()
        (found,) = (mount.root / "lost+found").iterdir()
        assert (found / "other").read_bytes() == other
        assert (found / "other").stat().st_ino == ino
        assert (found / "deeper" / "small").read_bytes() == SMALL
        (found / "deeper" / "small").unlink()
        assert (mount.root / "large").stat().st_nlink == 2
        (found / "deeper").rmdir()
        assert fsck("--data", mount.root).returncode == 0
        mount.unmount()
        assert check(devices).exit_status == 0


def test_contents_whose_inodes_are_lost_stay() -> None:
    """Under their names, or in lost+found, for the owner of the root directory alone."""
    with mounted(devices=2) as mount:
        fill(mount.root)
        contents = {name: (mount.root / name).read_bytes() for name in ("large", "folder/other")}
        mount.unmount()
        devices = DeviceSet(mount.folder, mount.devices)
        kept = [
            *devices.objects_of(devices.ino("large")),
            *devices.objects_of(devices.ino("other")),
        ]
        lost = f"lost+found/#{devices.ino('other')}"
        lose_inode_of_two_names(devices)
        lose_inode_and_name(devices)
        assert check(devices, repair=True).exit_status == 1
        assert all(path.exists() for path in kept)
        assert check(devices, data=True).findings == ()
        mount.mount()
        for name, before in (("large", "large"), (lost, "folder/other")):
            content = (mount.root / name).read_bytes()
            assert content.rstrip(b"\0") == contents[before].rstrip(b"\0")
            assert len(content) == -(-len(contents[before]) // BLOCK_BYTES) * BLOCK_BYTES
        status = (mount.root / "large").stat()
        assert (status.st_mode, status.st_nlink) == (stat.S_IFREG | 0o600, 2)
        assert status.st_uid == mount.root.stat().st_uid
        assert os.getxattr(mount.root / "large", "user.note") == b"value"
        assert (mount.root / "large").samefile(mount.root / "folder" / "link")


def test_lost_contents_are_named_and_left() -> None:
    with mounted(devices=2) as mount:
        fill(mount.root)
        mount.flush()
        cut = blocks_of(mount, mount.root / "folder" / "other")[-1]
        flipped = blocks_of(mount, mount.root / "sparse")[0]
        mount.unmount()
        devices = DeviceSet(mount.folder, mount.devices)
        gone = devices.objects_of(devices.ino("large"))[0]
        gone.unlink()
        os.truncate(cut.path, cut.offset)
        flip(flipped.path, flipped.offset)
        for repair in (False, True):
            report = check(devices, repair=repair, data=True)
            kinds = {(each.kind, each.path) for each in report.findings}
            assert (Kind.LOST, "large") in kinds or (Kind.LOST, "folder/link") in kinds
            assert {(Kind.LOST, "folder/other"), (Kind.DAMAGED, "sparse")} < kinds
            assert report.exit_status == 4
        mount.allow_log("is damaged|cannot be read|No such file")
        mount.mount()
        with pytest.raises(OSError, match="Input/output error"):
            (mount.root / "large").read_bytes()


def test_strays_are_named_and_left(devices: DeviceSet) -> None:
    stray = devices.devices[0] / "objects" / "README"
    stray.write_text("hello")
    report = check(devices, repair=True)
    assert [finding.kind for finding in report.findings] == [Kind.STRAY]
    assert report.exit_status == 4
    assert stray.read_text() == "hello"


def test_a_number_without_a_next_one_is_named_and_left(devices: DeviceSet) -> None:
    devices.change(
        ("UPDATE inodes SET version = ? WHERE ino = ?", [2**63 - 1, devices.ino("large")])
    )
    for repair in (False, True):
        report = check(devices, repair=repair)
        assert [finding.kind for finding in report.findings] == [Kind.STRUCTURE]
        assert report.exit_status == 4


@pytest.mark.parametrize("parts", [1, 2, 3], ids=["objects", "a folder", "an object"])
def test_what_cannot_be_listed_is_named(
    devices: DeviceSet, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """The rest is checked, and nothing is taken for an orphan."""
    lost = devices.objects_of(devices.ino("other"))[0]
    device = devices.devices.index(lost.parents[2])
    unreadable = devices.devices[device].joinpath(*lost.parts[-3:][:parts])
    listdir, look = os.listdir, os.stat

    def failing(path: str) -> None:
        if path == str(unreadable):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing_listdir(folder: int | str) -> list[str]:
        failing(os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) else folder)
        return listdir(folder)

    def failing_stat(path: Any, *, dir_fd: int | None = None, **options: Any) -> os.stat_result:
        if dir_fd is not None:
            failing(os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path))
        return look(path, dir_fd=dir_fd, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", failing_listdir)
        patched.setattr(os, "stat", failing_stat)
        report = check(devices)
    shown = unreadable.relative_to(devices.devices[device])
    text = f"{shown} on device {device} cannot be read: {os.strerror(errno.EIO)}: it is left alone"
    assert [each.text for each in report.findings if each.kind is Kind.STRAY] == [text]
    assert {each.kind for each in report.findings} == {Kind.STRAY, Kind.LOST}
    assert report.exit_status == 4


@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_copy_of_the_catalog_is_remade(devices: DeviceSet, number: int) -> None:
    path = devices.devices[number] / "catalog.db"
    flip(path, 5000)
    before = devices.hashes()
    report = check(devices)
    assert [(finding.kind, finding.corrected) for finding in report.findings] == [
        (Kind.COPY, False)
    ]
    assert devices.hashes() == before
    assert check(devices, repair=True).exit_status == 1
    assert check(devices).exit_status == 0


def test_both_copies_damaged_cannot_be_checked(devices: DeviceSet) -> None:
    for device in devices.devices:
        flip(device / "catalog.db", 5000)
    before = devices.hashes()
    done = fsck("--repair", *devices.words)
    assert (done.returncode, done.stdout) == (8, "")
    assert "fails its checksum" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert devices.hashes() == before


@pytest.mark.parametrize("left", ["", *LEFT_BY_NO_CATALOG])
def test_one_that_was_never_mounted(tmp_path: Path, left: str) -> None:
    device, copy = tmp_path / "a", tmp_path / "copy"
    device.mkdir()
    check_fpfs("format", "-d", device)
    if left:
        leave(device / left)
    done = fsck(device)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing was ever stored" in done.stdout
    done = run_fpfs("export", device, copy)
    assert (done.returncode, os.listdir(copy)) == (0, [])
    assert "nothing was ever stored" in done.stderr


@pytest.mark.parametrize("left", LEFT_BY_A_CATALOG)
def test_a_catalog_that_is_lost_is_told_of(tmp_path: Path, left: str) -> None:
    device, copy = tmp_path / "a", tmp_path / "copy"
    device.mkdir()
    check_fpfs("format", "-d", device)
    leave(device / left)
    for words, status in (
        (("fsck", device), 8),
        (("fsck", "--repair", device), 8),
        (("export", device, copy), 1),
    ):
        done = run_fpfs(*words)
        assert (done.returncode, done.stdout) == (status, "")
        assert f"there is none at {device}/catalog.db; put it back from a backup" in done.stderr
    assert not copy.exists()


def test_objects_that_an_open_file_has_emptied_are_gone_from_both_sides() -> None:
    with mounted(devices=2) as mount:
        file = mount.root / "file"
        with file.open("wb", buffering=0) as stream:
            stream.write(random_bytes(2 << 20, seed=1))
            os.fsync(stream.fileno())
            stream.truncate(1 << 20)
            os.fsync(stream.fileno())
        mount.unmount()
        devices = DeviceSet(mount.folder, mount.devices)
        report = check(devices, data=True)
        assert (report.exit_status, report.findings) == (0, ())
        assert len(devices.objects_of(devices.ino("file"))) == 1


def test_after_a_crash_the_truth_is_told_and_nothing_is_repaired() -> None:
    with mounted(devices=2) as mount:
        fill(mount.root)
        mount.flush()
        staged = os.open(mount.root / "staged", os.O_WRONLY | os.O_CREAT)
        os.write(staged, b"x" * 100_000)
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        close_dead(staged)
        devices = DeviceSet(mount.folder, mount.devices)
        before = devices.hashes()
        report = check(devices)
        assert report.exit_status == 0
        assert not report.ended_cleanly
        assert "a mount recovers what was acknowledged" in report.notes[0]
        done = fsck("--repair", *devices.words)
        assert done.returncode == 8
        assert "mount it once" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert devices.hashes() == before
        mount.allow_log("recovered|takes over")
        mount.mount()
        assert (mount.root / "staged").stat().st_size == 100_000


def test_after_a_loss_of_power_only_what_is_damage_is_called_so() -> None:
    with mounted(devices=2) as mount:
        fill(mount.root)
        mount.flush()
        crash(mount)
        devices = DeviceSet(mount.folder, mount.devices)
        before = devices.hashes()
        report = check(devices, data=True)
        assert (report.findings, report.exit_status) == ((), 0)
        assert any("not ended cleanly" in note for note in report.notes)
        assert devices.hashes() == before
        assert check(devices, repair=True).exit_status in (0, 1)
        assert check(devices).findings == ()
        mount.mount()


def test_a_busy_filesystem_has_no_false_findings() -> None:
    with mounted(staging="16M") as mount:
        fill(mount.root)
        ended = threading.Event()
        writers = [
            threading.Thread(target=keep_changing, args=(mount.root, seed, ended))
            for seed in range(3)
        ]
        for writer in writers:
            writer.start()
        try:
            for number in range(10):
                done = fsck(*["--data"] * (number % 2), mount.root, command="ctl")
                assert (done.returncode, done.stderr) == (0, ""), done.stdout
        finally:
            ended.set()
            for writer in writers:
                writer.join()


def test_damage_under_a_mounted_filesystem_is_found() -> None:
    with mounted() as mount:
        mount.allow_log("is damaged|cannot be read|No such file")
        fill(mount.root)
        mount.flush()
        block = blocks_of(mount, mount.root / "large")[3]
        gone = blocks_of(mount, mount.root / "folder" / "other")[0]
        flip(block.path, block.offset)
        gone.path.rename(gone.path.with_name("elsewhere"))
        done = fsck("--data", "--json", mount.root, command="ctl")
        assert done.returncode == 4
        found = {(each["kind"], each["path"]) for each in json.loads(done.stdout)["findings"]}
        assert ("lost", "folder/other") in found
        assert found & {("damaged", "large"), ("damaged", "folder/link")}
        gone.path.with_name("elsewhere").rename(gone.path)


def test_a_server_that_is_killed_meanwhile_does_not_matter(mount_kept: Mount) -> None:
    os.kill(mount_kept.server_pid, signal.SIGKILL)
    assert fsck(mount_kept.root, command="ctl").returncode == 0
    mount_kept.note_processes()


@pytest.fixture
def mount_kept() -> Iterator[Mount]:
    with mounted() as mount:
        mount.allow_log("another takes over|server .* ended|died|killed")
        fill(mount.root)
        yield mount


def test_refusals(tmp_path: Path) -> None:
    with mounted(devices=2) as mount:
        (mount.root / "file").write_bytes(random_bytes(1000, seed=1))
        (tmp_path / "empty").mkdir()
        for words, message in [
            ([], "no device directory is named"),
            ([""], "the device directory is an empty string"),
            ([mount.devices[0], mount.devices[1]], "is in use at"),
            ([tmp_path / "empty"], "holds no fpfs device"),
            ([tmp_path / "absent"], "does not exist"),
            (["--repair", mount.root], "a mounted filesystem cannot be repaired"),
        ]:
            done = fsck(*words)
            assert done.returncode == 8
            assert message in done.stderr
            assert len(done.stderr.splitlines()) == 1
        for place, message in [("/proc", "is not on an fpfs mount"), ("", "is an empty string")]:
            done = fsck(place, command="ctl")
            assert (done.returncode, done.stdout) == (8, "")
            assert done.stderr.startswith("fpfs-ctl: fsck of")
            assert message in done.stderr
        assert fsck(mount.root / "file", command="ctl").returncode == 0
        mount.unmount()
        done = fsck(mount.devices[1])
        assert done.returncode == 8
        assert "device 0" in done.stderr


@pytest.fixture(scope="module")
def history_set() -> Iterator[DeviceSet]:
    """A filesystem with former versions, a quarantined save, and groups in all states."""
    with mounted(devices=2) as mount:
        mount.expect_log("the writer of model.pt was cut off by SIGKILL")
        root = mount.root
        check_fpfs("policy", "set", root, "versions=3", module="fpfs.cli.ctl")
        for seed in range(4):
            (root / "model.pt").write_bytes(random_bytes(700_000, seed=seed))
            mount.flush()
        with (root / "model.pt").open("r+b") as file:
            file.seek(300_000)
            file.write(b"a rewrite in place")
        mount.flush()
        writer = "import os, signal; f = open('model.pt', 'r+b', 0); f.write(b'x' * 200_000);"
        writer += "os.kill(os.getpid(), signal.SIGKILL)"
        subprocess.run([sys.executable, "-c", writer], cwd=root, check=False)
        mount.flush()
        (root / "runs").mkdir()
        check_fpfs("policy", "set", root / "runs", "commit=group", module="fpfs.cli.ctl")
        for name in ("done", "again", "open"):
            group = root / "runs" / name
            group.mkdir()
            (group / "shard").write_bytes(random_bytes(300_000, seed=9))
            if name != "open":
                (group / ".metadata.tmp").write_bytes(b"all")
                (group / ".metadata.tmp").rename(group / ".metadata")
        (root / "runs" / "again" / "shard").write_bytes(random_bytes(300_000, seed=10))
        (root / "runs" / "again" / ".metadata").unlink()
        mount.unmount()
        yield DeviceSet(mount.folder, mount.devices)


@pytest.fixture
def history(history_set: DeviceSet) -> DeviceSet:
    history_set.restore()
    return history_set


def test_what_is_kept_beside_the_files_is_sound(history: DeviceSet) -> None:
    for table in ("former", "partials", "groups", "group_members", "shares"):
        assert history.query(f"SELECT count(*) FROM {table}") != [(0,)], table
    report = check(history, data=True)
    assert (report.findings, report.notes, report.exit_status) == ((), (), 0)


def lose_a_former_version_s_directory(devices: DeviceSet) -> None:
    devices.change("UPDATE former SET parent = 77777 WHERE number = 2")


def let_a_former_version_change(devices: DeviceSet) -> None:
    devices.change("UPDATE inodes SET kept = 0 WHERE kept = 1")


def lose_a_former_version_s_row(devices: DeviceSet) -> None:
    devices.change("DELETE FROM former WHERE number = 2")


def lose_a_former_version_s_inode(devices: DeviceSet) -> None:
    devices.change("DELETE FROM inodes WHERE ino IN (SELECT ino FROM former WHERE number = 2)")


def leave_a_policy(devices: DeviceSet) -> None:
    devices.change("INSERT INTO policies VALUES (77777, 'versions', '3')")


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_former_version_s_directory,
        let_a_former_version_change,
        lose_a_former_version_s_row,
        lose_a_former_version_s_inode,
        leave_a_policy,
    ],
)
def test_what_is_kept_beside_the_files_is_repaired(
    history: DeviceSet, damage: Callable[[DeviceSet], None]
) -> None:
    damage(history)
    assert check(history).exit_status == 4
    assert check(history, repair=True).exit_status == 1
    again = check(history, data=True)
    assert (again.findings, again.exit_status) == ((), 0)


def test_a_mount_whose_catalogs_were_removed_cannot_be_checked() -> None:
    with mounted(devices=2) as mount:
        mount.allow_log("catalog")
        for device in mount.devices:
            (device / "catalog.db").unlink()
        done = fsck(mount.root)
        assert (done.returncode, done.stdout) == (8, "")
        assert "it was removed" in done.stderr
        assert len(done.stderr.splitlines()) == 1


@contextlib.contextmanager
def small_folder(place: Path, size_kib: int) -> Iterator[dict[str, str]]:
    """What lets temporary files lie on a tmpfs of a size."""
    place.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={size_kib}K", "tmpfs", place)
    try:
        yield {"TMPDIR": str(place)}
    finally:
        run("umount", place)


@pytest.mark.root
@pytest.mark.parametrize("command", ["fsck", "fsck --repair", "export"])
def test_a_full_temporary_folder_is_named_and_nothing_changes(
    devices: DeviceSet, tmp_path: Path, command: str
) -> None:
    place, destination = tmp_path / "small", tmp_path / "copy"
    words = [*command.split(), *devices.words, *([destination] if command == "export" else [])]
    before = devices.hashes()
    refused = 0
    for size_kib in (4 * 2**step for step in range(12)):
        with small_folder(place, size_kib) as environment:
            done = run_fpfs(*words, environment=environment)
            if done.returncode == 0:
                break
        assert done.returncode == (1 if command == "export" else 8)
        assert done.stderr.count("\n") == 1, done.stderr
        assert f"the temporary folder {place} has no room" in done.stderr
        assert "TMPDIR" in done.stderr
        assert "backup" not in done.stderr
        assert not destination.exists()
        assert devices.hashes() == before
        refused += 1
    assert done.returncode == 0, done.stderr
    assert refused
