"""fpfs export: everything a mount would show, without one, and the truth about what is lost."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.engine import BLOCK_BYTES, ObjectId
from fpfs.daemon.offline.export import export as export_here
from fpfs.daemon.offline.objects import Objects
from fpfs.testing.mounted import check_fpfs, mounted, run_fpfs
from tests.support.catalog.device_sets import LARGE_BYTES, SMALL, DeviceSet, fill, filled
from tests.support.contents import random_bytes
from tests.support.failures.crash import close_dead
from tests.support.failures.damage import blocks_of, flip
from tests.support.nobody import AS_NOBODY, need_nobody
from tests.support.processes import run
from tests.support.system import CAP_NET_BIND_SERVICE


def export(*words: str | Path, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``fpfs export``."""
    return run_fpfs("export", *words, prefix=prefix or [])


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything a copy should keep of each name."""
    found = {}
    for path in [root, *sorted(root.rglob("*"))]:
        status = path.lstat()
        content: object = None
        xattrs: dict[str, bytes] = {}
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        if not stat.S_ISLNK(status.st_mode):
            xattrs = {name: os.getxattr(path, name) for name in os.listxattr(path)}
        owner = (status.st_uid, status.st_gid)
        links = 0 if stat.S_ISDIR(status.st_mode) else status.st_nlink
        key = str(path.relative_to(root))
        found[key] = (status.st_mode, owner, status.st_mtime_ns, links, content, xattrs)
    return found


@pytest.fixture(scope="module")
def kept_set() -> Iterator[DeviceSet]:
    with filled() as devices:
        yield devices


@pytest.fixture
def devices(kept_set: DeviceSet) -> DeviceSet:
    """As they were filled."""
    kept_set.restore()
    return kept_set


def test_everything_is_copied_as_the_mount_shows_it(tmp_path: Path) -> None:
    with mounted(devices=3) as mount:
        fill(mount.root)
        os.mkfifo(mount.root / "pipe")
        (mount.root / "empty").touch()
        (mount.root / "folder" / "large").write_bytes(os.urandom(7_000_000))
        os.setxattr(mount.root / "folder", "user.of", b"a folder")
        name = os.fsencode(mount.root) + b"/\xff\xfe name\n"
        Path(os.fsdecode(name)).write_bytes(b"not UTF-8")
        if os.geteuid() == 0:
            os.chown(mount.root / "large", 1234, 5678)
            os.setxattr(mount.root / "large", "security.capability", CAP_NET_BIND_SERVICE)
            os.chown(mount.root / "folder" / "symlink", 12, 34, follow_symlinks=False)
        os.chmod(mount.root / "folder" / "other", 0o6755)
        expected = tree(mount.root)
        mount.unmount()
        devices = DeviceSet(mount.folder, mount.devices)
        before = devices.hashes()
        done = export(*mount.devices, tmp_path / "copy")
        assert (done.returncode, done.stderr) == (0, "")
        assert "all is whole" in done.stdout
        assert tree(tmp_path / "copy") == expected
        assert devices.hashes() == before
        sparse = (tmp_path / "copy" / "sparse").stat()
        assert sparse.st_size > 5_000_000
        assert sparse.st_blocks * 512 < 1_000_000
        assert (tmp_path / "copy" / "large").samefile(tmp_path / "copy" / "folder" / "link")


def test_a_subtree_and_a_file(devices: DeviceSet, tmp_path: Path) -> None:
    assert export("--path", "folder/deeper", *devices.devices, tmp_path / "a").returncode == 0
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["small"]
    assert (
        export("--path", "/folder/deeper/small", *devices.devices, tmp_path / "b").returncode == 0
    )
    assert (tmp_path / "b" / "small").read_bytes() == SMALL


def test_a_damaged_copy_of_the_catalog_does_not_matter(devices: DeviceSet, tmp_path: Path) -> None:
    flip(devices.devices[0] / "catalog.db", 5000)
    done = export(*devices.devices, tmp_path / "copy")
    assert done.returncode == 0
    assert "is not used: page" in done.stderr
    assert (tmp_path / "copy" / "folder" / "deeper" / "small").read_bytes() == SMALL


def test_what_is_lost_is_named_and_has_another_name(tmp_path: Path) -> None:
    with mounted(devices=2) as mount:
        fill(mount.root)
        content = (mount.root / "large").read_bytes()
        mount.flush()
        flipped = blocks_of(mount, mount.root / "large")[5]
        gone = blocks_of(mount, mount.root / "folder" / "other")[0]
        mount.unmount()
        flip(flipped.path, flipped.offset + 7)
        gone.path.unlink()
        done = export(*mount.devices, tmp_path / "copy")
        assert done.returncode == 4
        first, last = 5 * BLOCK_BYTES, 6 * BLOCK_BYTES - 1
        assert f": bytes {first} to {last} are lost: fails its checksum" in done.stderr
        assert "damaged, as its other name is" in done.stderr
        assert "fpfs: folder/other: bytes 0 to " in done.stderr
        assert " are lost: cannot be read: No such file" in done.stderr
        copy = tmp_path / "copy"
        assert not (copy / "large").exists()
        assert not (copy / "folder" / "other").exists()
        kept = (copy / "large.damaged").read_bytes()
        assert kept == content[:first] + bytes(BLOCK_BYTES) + content[last + 1 :]
        assert (copy / "large.damaged").samefile(copy / "folder" / "link.damaged")
        assert (copy / "sparse").exists()


def test_without_checksums_what_is_lost_is_named_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = random_bytes(30 * BLOCK_BYTES + 5, seed=3)
    with mounted(devices=1, options=["checksums=off"]) as mount:
        for name in ("cut", "faulty"):
            (mount.root / name).write_bytes(content)
        mount.flush()
        end = blocks_of(mount, mount.root / "cut")[20]
        faulty = blocks_of(mount, mount.root / "faulty")[7]
        mount.unmount()
        os.truncate(end.path, end.offset)
        read_blocks = Objects.read_blocks

        def failing(objects: Objects, place: ObjectId, block: int, count: int) -> bytes:
            if place.id == faulty.object and block <= faulty.object_block < block + count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read_blocks(objects, place, block, count)

        monkeypatch.setattr(Objects, "read_blocks", failing)
        words = [str(device) for device in mount.devices]
        copy = tmp_path / "copy"
        done = export_here(words, str(copy), subtree="/", progress=lambda _done, _total: None)
    first, last = 7 * BLOCK_BYTES, 8 * BLOCK_BYTES - 1
    assert set(done.problems) == {
        f"cut: bytes {20 * BLOCK_BYTES} to {len(content) - 1} are lost: the object ends before",
        f"faulty: bytes {first} to {last} are lost: cannot be read: {os.strerror(errno.EIO)}",
    }
    kept = (copy / "cut.damaged").read_bytes()
    assert kept == content[: 20 * BLOCK_BYTES] + bytes(10 * BLOCK_BYTES + 5)
    kept = (copy / "faulty.damaged").read_bytes()
    assert kept == content[:first] + bytes(BLOCK_BYTES) + content[last + 1 :]


def test_what_was_committed_before_a_crash_is_copied(tmp_path: Path) -> None:
    with mounted(devices=2) as mount:
        fill(mount.root)
        mount.flush()
        staged = os.open(mount.root / "staged", os.O_WRONLY | os.O_CREAT)
        os.write(staged, b"x" * 100_000)
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        close_dead(staged)
        done = export(*mount.devices, tmp_path / "copy")
        assert done.returncode == 0
        assert "a mount recovers it" in done.stderr
        assert (tmp_path / "copy" / "folder" / "deeper" / "small").read_bytes() == SMALL


@pytest.mark.root
def test_a_user_s_copy_is_his_and_has_no_set_user_id(devices: DeviceSet, tmp_path: Path) -> None:
    need_nobody()
    ino = devices.ino("other")
    devices.change(("UPDATE inodes SET mode = ? WHERE ino = ?", [stat.S_IFREG | 0o6755, ino]))
    for device in devices.devices:
        for path in [device, *device.rglob("*")]:
            os.chown(path, 65534, 65534)
    os.chown(tmp_path, 65534, 65534)
    reachable = subprocess.run([*AS_NOBODY, "test", "-x", tmp_path], check=False).returncode == 0
    destination = tmp_path / "copy" if reachable else devices.devices[0].parent / "copy"
    if not reachable:
        destination.mkdir()
        os.chown(destination, 65534, 65534)
    done = export(*devices.devices, destination, prefix=AS_NOBODY)
    assert (done.returncode, done.stderr) == (0, "")
    found = (destination / "folder" / "other").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (65534, 0o755)


def test_hostile_names_are_left_out(devices: DeviceSet, tmp_path: Path) -> None:
    copy = tmp_path / "a" / "b" / "copy"
    copy.parent.mkdir(parents=True)
    devices.change(
        ("UPDATE names SET name = ? WHERE name = ?", [b"../../outside", b"sparse"]),
        ("UPDATE names SET name = ? WHERE name = ?", [b"..", b"other"]),
        ("UPDATE names SET name = ? WHERE name = ?", [os.fsencode(tmp_path / "abs"), b"small"]),
    )
    done = export(*devices.devices, copy)
    assert done.returncode == 4
    assert done.stderr.count("left out: this is no name of a file") == 3
    assert {path.name for path in tmp_path.rglob("*")} == {
        *("a", "b", "copy", "large", "folder", "deeper", "link", "symlink")
    }


def test_directories_in_a_circle_are_copied_once(devices: DeviceSet, tmp_path: Path) -> None:
    folder, deeper = devices.ino("folder"), devices.ino("deeper")
    row = [900_000, deeper, b"circle", folder, 4]
    devices.change(("INSERT INTO names VALUES (?, ?, ?, ?, ?)", row))
    done = export(*devices.devices, tmp_path / "copy")
    assert done.returncode == 4
    assert "folder/deeper/circle: left out: directory inode" in done.stderr


def test_a_link_in_the_place_of_a_name_is_not_followed(devices: DeviceSet, tmp_path: Path) -> None:
    """A hostile catalog has a symbolic link and a file of one name, one after the other."""
    outside = tmp_path / "outside"
    outside.mkdir()
    ino = devices.ino("symlink")
    devices.change(
        ("UPDATE inodes SET target = ? WHERE ino = ?", [os.fsencode(outside), ino]),
        "DROP INDEX names_by_name",
        ("UPDATE names SET name = ? WHERE name = ?", [b"deeper", b"symlink"]),
        ("UPDATE names SET cookie = cookie + 100000 WHERE ino = ?", [devices.ino("deeper")]),
    )
    done = export(*devices.devices, tmp_path / "copy")
    assert done.returncode in (1, 4)
    assert list(outside.iterdir()) == []


def test_refusals(devices: DeviceSet, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for words, message in [
        ([*devices.devices, full], "is not empty"),
        ([*devices.devices, full / "file"], os.strerror(errno.ENOTDIR)),
        ([*devices.devices, tmp_path / "no" / "such"], os.strerror(errno.ENOENT)),
        ([full], "no device directory is named"),
        ([devices.devices[1], tmp_path / "new"], "device 0"),
        (["--path", "not/there", *devices.devices, tmp_path / "new"], "there is no not/there"),
    ]:
        done = export(*words)
        assert done.returncode == 1
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    with mounted(devices=1) as mount:
        done = export(mount.devices[0], tmp_path / "other")
        assert (done.returncode, done.stdout) == (1, "")
        assert "is in use at" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_export_that_is_ended_leaves_no_part_of_a_file_under_its_name(
    devices: DeviceSet, tmp_path: Path, number: signal.Signals
) -> None:
    """It ends itself when the first part of a file was copied."""
    for folder in ("images", "copy"):
        (tmp_path / folder).mkdir()
    code = """if True:
        import os, sys
        from fpfs.cli.commands import export, fsck
        number, *places = sys.argv[1:]
        fsck.ProgressBar.update = lambda bar, done, total: os.kill(os.getpid(), int(number))
        export.run_export(places, path="")
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path / "images")}
    command = [sys.executable, "-c", code, str(int(number)), *devices.words, str(tmp_path / "copy")]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode != 0
    if number is not signal.SIGKILL:
        assert list((tmp_path / "images").iterdir()) == []
    left = {path.name for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert left == {"small"} | ({"other.damaged"} if number is signal.SIGKILL else set())


def test_what_is_damaged_takes_nobody_s_name(tmp_path: Path) -> None:
    with mounted(devices=2) as mount:
        for name in ("a", "a.damaged", "b.damaged", "b"):
            (mount.root / name).write_bytes(random_bytes(200_000, seed=len(name)))
        mount.flush()
        flipped = [blocks_of(mount, mount.root / name)[0] for name in ("a", "b")]
        mount.unmount()
        for block in flipped:
            flip(block.path, block.offset + 7)
        done = export(*mount.devices, tmp_path / "copy")
    assert done.returncode == 4
    assert "left out" not in done.stderr
    copy = tmp_path / "copy"
    names = {"a.damaged", "a.damaged1", "b.damaged", "b.damaged1"}
    assert {path.name for path in copy.iterdir()} == names
    for name in ("a.damaged", "b.damaged"):
        assert (copy / name).read_bytes() == random_bytes(200_000, seed=len(name))


@pytest.mark.root
def test_a_destination_that_cannot_have_owners_gets_the_contents(
    devices: DeviceSet, tmp_path: Path
) -> None:
    ino = devices.ino("other")
    mode = stat.S_IFREG | 0o6755
    devices.change(("UPDATE inodes SET mode = ?, uid = 12, gid = 34 WHERE ino = ?", [mode, ino]))
    done = export(*devices.devices, tmp_path / "copy", prefix=["setpriv", "--bounding-set=-chown"])
    assert done.returncode == 4
    assert done.stderr == (
        f"fpfs: folder/other: its owner cannot be set: {os.strerror(errno.EPERM)}\n"
    )
    found = (tmp_path / "copy" / "folder" / "other").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o755)
    assert (tmp_path / "copy" / "folder" / "other").read_bytes() == random_bytes(
        LARGE_BYTES // 2, seed=2
    )


@pytest.mark.root
def test_a_destination_that_is_full_is_named(devices: DeviceSet, tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", place)
    try:
        done = export(*devices.devices, place / "copy")
        left = [path.name for path in place.rglob("*") if path.is_file()]
    finally:
        run("umount", place)
    assert done.returncode == 1
    assert f"{place / 'copy'}: {os.strerror(errno.ENOSPC)}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "large" not in left


def test_nothing_is_copied_into_a_device(devices: DeviceSet) -> None:
    before = devices.hashes()
    done = export(*devices.devices, devices.devices[1] / "objects" / "copy")
    assert done.returncode == 1
    assert f"lies in the device directory {devices.devices[1]}" in done.stderr
    assert devices.hashes() == before


def test_after_a_crash_only_what_a_mount_would_show_is_copied(tmp_path: Path) -> None:
    with mounted(devices=2) as mount:
        (mount.root / "groups").mkdir()
        check_fpfs("policy", "set", mount.root / "groups", "commit=group", module="fpfs.cli.ctl")
        for name in ("whole", "part"):
            (mount.root / "groups" / name).mkdir()
            (mount.root / "groups" / name / "shard").write_bytes(b"x" * 100_000)
        check_fpfs("commit", mount.root / "groups" / "whole", module="fpfs.cli.ctl")
        unfinished = os.open(mount.root / "new.pt", os.O_WRONLY | os.O_CREAT)
        mount.flush()
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        close_dead(unfinished)
        mount.remove_arena()
        done = export(*mount.devices, tmp_path / "copy")
        taken = export("--path", ".fpfs/uncommitted", *mount.devices, tmp_path / "taken")
        mount.allow_log("was not committed|was made and never finished")
        mount.mount()
        expected = {path.relative_to(mount.root) for path in mount.root.rglob("*")}
    assert (done.returncode, taken.returncode) == (0, 0)
    found = {path.relative_to(tmp_path / "copy") for path in (tmp_path / "copy").rglob("*")}
    assert found == expected
    assert Path("groups/whole/shard") in found
    assert Path("groups/part") not in found
    assert (
        "note: group groups/part was not committed: what was written is copied with" in done.stderr
    )
    assert "note: new.pt was made and never finished: it is left out" in done.stderr
    (shard,) = (tmp_path / "taken").rglob("shard")
    assert shard.read_bytes() == b"x" * 100_000
