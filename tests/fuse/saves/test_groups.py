"""Groups: a directory with commit=group is there whole after a crash, or it is not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fpfs.core.group import commit_group
from fpfs.testing.mounted import Mount, check_fpfs, mounted, run_fpfs
from tests.crash.power.image import check_at_rest
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.crash import close_dead, crash, crash_and_mount
from tests.support.servers import wait_collected
from tests.support.system import RenameFlag, renameat2

CTL = "fpfs.cli.ctl"
SHARD = random_bytes(700_001, seed=1)
OTHER = random_bytes(300_007, seed=2)
SMALL = b"a small one"

AWAY = r"group \S+ was not committed when the last mount ended: "


@pytest.fixture
def own() -> Iterator[Mount]:
    """A mount that a test may crash, whose folder `runs` holds groups.

    In the end its catalog names all objects that there are.
    """
    with mounted() as mount:
        mount.allow_log(AWAY)
        mount.allow_log("was made and never finished when the last mount ended: it is removed")
        (mount.root / "runs").mkdir()
        set_group(mount.root / "runs")
        yield mount
        mount.flush()
        # What a crash left is looked for in the background; the rest is left to the next mount.
        wait_collected(mount)
        mount.unmount()
        check_at_rest(mount.devices)


def set_group(folder: Path, *words: str) -> None:
    """Let directories that are made in a folder be groups."""
    check_fpfs("policy", "set", folder, "commit=group", *words, module=CTL)


def save(group: Path, *, sync: bool = False) -> None:
    """Make a group with files of several sizes, and one in a directory below."""
    (group / "sub").mkdir(parents=True)
    for name, content in contents().items():
        with (group / name).open("wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())


def contents() -> dict[str, bytes]:
    """What `save` makes."""
    return {"shard0.pt": SHARD, "shard1.pt": OTHER, "sub/part": OTHER, "small": SMALL}


def make(path: Path, content: bytes) -> int:
    """Make a file, and leave it open."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    assert os.write(fd, content) == len(content)
    return fd


def check(group: Path, expected: dict[str, bytes]) -> None:
    """A group has these files, and no others."""
    found = {str(path.relative_to(group)) for path in group.rglob("*") if path.is_file()}
    assert found == set(expected)
    for name, content in expected.items():
        assert_same((group / name).read_bytes(), content)


def uncommitted(mount: Mount) -> list[Path]:
    """What crashes have taken away."""
    return sorted((mount.root / ".fpfs/uncommitted").iterdir())


def end_processes(mount: Mount) -> None:
    """Kill keeper and server, and leave what is staged for the next mount."""
    mount.kill(mount.keeper_pid, mount.server_pid)
    mount.tear_down()


def rename_itself(group: Path) -> Path:
    return group.rename(group.with_name("renamed"))


def rename_marker(group: Path) -> Path:
    (group / ".metadata.tmp").write_bytes(SMALL)
    (group / ".metadata.tmp").rename(group / ".metadata")
    return group


def command(group: Path) -> Path:
    check_fpfs("commit", group, module=CTL)
    return group


def call(group: Path) -> Path:
    commit_group(str(group))
    return group


COMMIT_POINTS = [rename_itself, rename_marker, command, call]


def test_a_committed_group_survives_a_crash_whole(own: Mount) -> None:
    """In whichever way it was committed."""
    expected = {}
    for commit in COMMIT_POINTS:
        save(own.root / "runs" / commit.__name__)
        group = commit(own.root / "runs" / commit.__name__)
        marker = {".metadata": SMALL} if commit is rename_marker else {}
        expected[group] = contents() | marker
    for _ in range(2):
        crash_and_mount(own)
        assert set((own.root / "runs").iterdir()) == set(expected)
        for group, files in expected.items():
            check(group, files)
    assert uncommitted(own) == []
    assert own.status().uncommitted == ()


@pytest.mark.parametrize("sync", [False, True])
def test_a_group_that_was_never_committed_is_taken_away(own: Mount, sync: bool) -> None:
    group = own.root / "runs/step_1"
    save(group, sync=sync)
    own.flush()
    assert [g.path for g in own.status().uncommitted] == ["runs/step_1"]
    crash_and_mount(own)
    assert os.listdir(own.root / "runs") == []
    (kept,) = uncommitted(own)
    check(kept, contents())
    (told,) = own.status().uncommitted
    assert (told.path, told.name) == ("runs/step_1", kept.name)
    assert f".fpfs/uncommitted/{kept.name}" in check_fpfs("status", own.root, module=CTL)
    shown = json.loads(check_fpfs("status", own.root, "--json", module=CTL))
    assert shown["uncommitted"][0]["name"] == kept.name
    own.expect_log(f"group runs/step_1 .*: it is .fpfs/uncommitted/{kept.name}")
    assert (own.root / "runs").stat().st_nlink == 2
    assert (own.root / ".fpfs/uncommitted").stat().st_nlink == 3


def test_of_what_was_never_synced_only_that_is_kept_which_is_durable(own: Mount) -> None:
    group = own.root / "runs/step_1"
    group.mkdir()
    synced, other = make(group / "synced.pt", SHARD), make(group / "other.pt", OTHER)
    os.fsync(synced)
    crash(own)
    close_dead(synced)
    close_dead(other)
    own.mount()
    assert os.listdir(own.root / "runs") == []
    check(uncommitted(own)[0], {"synced.pt": SHARD})


def test_a_group_without_durable_content_is_removed(own: Mount) -> None:
    group = own.root / "runs/step_1"
    (group / "a/b").mkdir(parents=True)
    (group / "a/empty").touch()
    (group / "link").symlink_to("a")
    os.link(group / "a/empty", own.root / "linked")
    own.flush()
    crash_and_mount(own)
    own.expect_log("group runs/step_1 .*: nothing in it was durable, and it is removed")
    assert os.listdir(own.root / "runs") == []
    assert uncommitted(own) == []
    assert (own.root / "linked").stat().st_nlink == 1
    assert (own.root / "runs").stat().st_nlink == 2
    group.mkdir()


def test_what_was_acknowledged_goes_with_its_group_when_keeper_and_server_die(own: Mount) -> None:
    """The staged bytes live on: also those of a file that somebody was writing."""
    own.allow_log("took over|server .* died")
    group = own.root / "runs/step_1"
    group.mkdir()
    (group / "closed.pt").write_bytes(SHARD)
    written = make(group / "open.pt", OTHER)
    end_processes(own)
    close_dead(written)
    own.mount()
    assert os.listdir(own.root / "runs") == []
    own.flush()
    check(uncommitted(own)[0], {"closed.pt": SHARD, "open.pt": OTHER})
    assert list((own.root / ".fpfs/partial").iterdir()) == []


def test_the_death_of_a_server_changes_nothing(own: Mount) -> None:
    own.allow_log("server .* died")
    group = own.root / "runs/step_1"
    save(group)
    own.kill(own.server_pid)
    own.note_processes()
    check(group, contents())
    rename_marker(group)
    own.kill(own.server_pid)
    own.note_processes()
    crash_and_mount(own)
    check(group, contents() | {".metadata": SMALL})


def test_an_unmount_leaves_a_group_in_place_and_uncommitted(own: Mount) -> None:
    group = own.root / "runs/step_1"
    save(group)
    own.remount()
    own.remount()
    check(group, contents())
    assert [g.path for g in own.status().uncommitted] == ["runs/step_1"]
    crash_and_mount(own)
    assert not group.exists()
    check(uncommitted(own)[0], contents())


def test_a_mount_that_is_refused_after_an_unmount_takes_nothing_away(own: Mount) -> None:
    group = own.root / "runs/step_1"
    save(group)
    own.unmount()
    for _ in range(2):
        devices = [word for device in own.devices for word in ("-d", str(device))]
        refused = run_fpfs("mount", *devices, "-o", "staging=1000T", own.root)
        assert refused.returncode != 0
    own.mount()
    check(group, contents())


def test_what_was_taken_away_can_be_taken_back_or_removed(own: Mount) -> None:
    for name in ("step_1", "step_2"):
        save(own.root / "runs" / name)
    own.flush()
    crash_and_mount(own)
    first, second = uncommitted(own)
    refused = run_fpfs("commit", first, module=CTL)
    assert "it was taken away by a crash: move it back" in refused.stderr
    first.rename(own.root / "runs/back")
    crash_and_mount(own)
    check(own.root / "runs/back", contents())
    assert uncommitted(own) == [second]
    check_fpfs("flush", own.root, module=CTL)
    for path in sorted(second.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    second.rmdir()
    assert own.status().uncommitted == ()


def test_only_what_is_made_directly_in_the_place_is_a_group(own: Mount) -> None:
    """What is below a group belongs to it: a marker or a rename inside commits nothing."""
    group = own.root / "runs/step_1"
    (group / "inner").mkdir(parents=True)
    (group / "inner/.x").write_bytes(SMALL)
    (group / "inner/.x").rename(group / "inner/.metadata")
    (group / "inner").rename(group / "moved")
    (group / ".metadata").write_bytes(SMALL)  # it is no rename that this appears by
    refused = run_fpfs("commit", group / "moved", module=CTL)
    assert "it is no group: commit=group has to hold in the directory above it" in refused.stderr
    own.flush()
    crash_and_mount(own)
    assert os.listdir(own.root / "runs") == []
    check(uncommitted(own)[0], {"moved/.metadata": SMALL, ".metadata": SMALL})


def test_a_directory_that_was_there_before_becomes_a_group_with_its_commit_point(
    own: Mount,
) -> None:
    place = own.root / "late"
    (place / "old").mkdir(parents=True)
    (place / "old/file").write_bytes(SMALL)
    set_group(place)
    own.flush()
    crash_and_mount(own)
    check(place / "old", {"file": SMALL})
    rename_marker(place / "old")
    assert own.status().uncommitted == ()


def test_a_directory_below_one_that_was_there_before_is_a_group(own: Mount) -> None:
    (own.root / "later/run").mkdir(parents=True)
    set_group(own.root / "later")
    save(own.root / "later/run/step_1")
    own.flush()
    crash_and_mount(own)
    assert os.listdir(own.root / "later/run") == []


def test_the_marker_can_be_chosen(own: Mount) -> None:
    set_group(own.root / "runs", "commit_marker=DONE")
    for name in ("one", "two"):
        save(own.root / "runs" / name)
        rename_marker(own.root / "runs" / name)
    (own.root / "runs/two/.metadata").rename(own.root / "runs/two/DONE")
    own.flush()
    crash_and_mount(own)
    assert os.listdir(own.root / "runs") == ["two"]


def test_a_directory_that_is_moved_away_is_no_group_any_more(own: Mount) -> None:
    save(own.root / "runs/tmp")
    group = (own.root / "runs/tmp").rename(own.root / "elsewhere")
    (group / "later").write_bytes(SMALL)
    own.flush()
    crash_and_mount(own)
    check(group, contents() | {"later": SMALL})
    save(own.root / "plain")
    moved = (own.root / "plain").rename(own.root / "runs/moved")
    crash_and_mount(own)
    check(moved, contents())


def test_exchanged_directories_are_both_committed(own: Mount) -> None:
    for name in ("new", "current"):
        (own.root / "runs" / name).mkdir()
        (own.root / "runs" / name / "file").write_bytes(name.encode())
    renameat2(own.root / "runs/new", own.root / "runs/current", RenameFlag.EXCHANGE)
    crash_and_mount(own)
    check(own.root / "runs/current", {"file": b"new"})
    check(own.root / "runs/new", {"file": b"current"})


def test_a_group_that_is_removed_leaves_nothing(own: Mount) -> None:
    group = own.root / "runs/step_1"
    group.mkdir()
    group.rmdir()
    assert own.status().uncommitted == ()
    crash_and_mount(own)
    assert uncommitted(own) == []


def test_what_is_no_group_is_refused(own: Mount) -> None:
    (own.root / "file").write_bytes(b"x")
    for path, said in (
        (own.root, "it is no group: commit=group has to hold in the directory above it"),
        (own.root / "runs", "it is no group"),
        (own.root / "file", "this is not a directory; name the directory that holds it"),
        (own.root / "none", "No such file or directory; name a directory on the mount"),
    ):
        refused = run_fpfs("commit", path, module=CTL)
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 1
        assert said in refused.stderr


# A group that was committed before.

CHANGED = r"group \S+ was changed and not committed again when the last mount ended: "
NEW = random_bytes(500_003, seed=3)


@pytest.fixture
def committed(own: Mount) -> Path:
    """A committed group."""
    own.allow_log(CHANGED)
    group = own.root / "runs/step_1"
    save(group)
    rename_marker(group)
    return group


BEFORE = contents() | {".metadata": SMALL}


def overwrite(group: Path) -> None:
    """Overwrite shards, as a save to the same directory does."""
    (group / "shard0.pt").write_bytes(NEW)
    (group / "small").write_bytes(b"another")


def overwrite_in_place(group: Path) -> None:
    with (group / "shard0.pt").open("r+b") as file:
        file.seek(70_000)
        file.write(OTHER)
        file.flush()
        os.fsync(file.fileno())
        file.truncate(400_000)


def replace(group: Path) -> None:
    (group / "shard0.tmp").write_bytes(NEW)
    (group / "shard0.tmp").rename(group / "shard0.pt")


def remove(group: Path) -> None:
    (group / "shard0.pt").unlink()
    (group / "sub/part").unlink()
    (group / "sub").rmdir()


def add(group: Path) -> None:
    (group / "more/below").mkdir(parents=True)
    (group / "more/below/file").write_bytes(NEW)
    (group / "file").write_bytes(NEW)
    (group / "link").symlink_to("file")
    (group / "none").touch()


def move(group: Path) -> None:
    (group / "shard0.pt").rename(group / "moved.pt")
    (group / "sub").rename(group / "sub2")
    (group / "sub2/part").rename(group / "part")
    (group / "more").mkdir()
    (group / "sub2").rename(group / "more/sub3")
    (group / "small").rename(group.parent.parent / "taken")


def swap(group: Path) -> None:
    renameat2(group / "shard0.pt", group / "shard1.pt", RenameFlag.EXCHANGE)
    renameat2(group / "sub", group / "small", RenameFlag.EXCHANGE)


def link(group: Path) -> None:
    os.link(group / "shard0.pt", group / "second.pt")
    (group / "shard0.pt").unlink()
    (group / "second.pt").write_bytes(NEW)


def rotate(group: Path) -> None:
    """Several things have one name in turn, all of them with something new."""
    (group / "sub/new").write_bytes(NEW)
    (group / "sub").rename(group / "older")
    (group / "sub").mkdir()
    (group / "sub/new").write_bytes(OTHER)


def rotate_files(group: Path) -> None:
    (group / "sub/new").write_bytes(NEW)
    (group / "sub").rename(group / "older")
    (group / "sub").write_bytes(OTHER)


CHANGES = [
    overwrite, overwrite_in_place, replace, remove, add, move, swap, link, rotate, rotate_files,
]  # fmt: skip


def committed_groups(mount: Mount) -> dict[Path, Callable[[Path], None]]:
    """Committed groups, and what is to change each."""
    mount.allow_log(CHANGED)
    groups = {mount.root / "runs" / change.__name__: change for change in CHANGES}
    for group in groups:
        save(group)
        rename_marker(group)
    return groups


def test_a_crash_takes_back_what_changed_since_the_last_commit_point(own: Mount) -> None:
    groups = committed_groups(own)
    modes = {path: path.stat().st_mode for path in (own.root / "runs").rglob("*")}
    for group, change in groups.items():
        change(group)
    own.flush()
    told = {f"runs/{group.name}" for group in groups}
    assert {group.path for group in own.status().uncommitted} == told
    for _ in range(2):
        crash_and_mount(own)
        for group in groups:
            check(group, BEFORE)
        assert {path: path.stat().st_mode for path in (own.root / "runs").rglob("*")} == modes
        assert_counts_of_names(own.root)
    assert own.status().commit.failures == ()


def assert_counts_of_names(root: Path) -> None:
    """The counts of names are those of what is there, .fpfs included."""
    names: dict[int, int] = {}
    folders = [root, root / ".fpfs/partial", root / ".fpfs/uncommitted"]
    while folders:
        folder = folders.pop()
        children = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        assert folder.lstat().st_nlink == 2 + len(children), folder
        folders += children
        for path in folder.iterdir():
            names[path.lstat().st_ino] = names.get(path.lstat().st_ino, 0) + 1
    for path in root.rglob("*"):
        if not path.is_dir() or path.is_symlink():
            assert path.lstat().st_nlink == names[path.lstat().st_ino], path


def test_a_commit_point_keeps_what_has_changed_and_gives_space_back(own: Mount) -> None:
    groups = committed_groups(own)
    for group, change in groups.items():
        change(group)
        check_fpfs("commit", group, module=CTL)
    found = {path: path.read_bytes() for path in own.root.rglob("*") if path.is_file()}
    for _ in range(2):
        crash_and_mount(own)
        assert {path for path in own.root.rglob("*") if path.is_file()} == set(found)
        for path, content in found.items():
            assert_same(path.read_bytes(), content)
        assert_counts_of_names(own.root)
    assert uncommitted(own) == []
    shutil.rmtree(own.root / "runs")
    (own.root / "taken").unlink()
    own.flush()
    assert own.stored_bytes() == 0


def test_what_was_durable_of_the_new_content_is_kept(own: Mount, committed: Path) -> None:
    overwrite(committed)
    (committed / "sub/new").write_bytes(OTHER)
    (committed / "sub/folder").mkdir()
    (committed / "sub/folder/x").write_bytes(SMALL)
    (committed / "nothing").mkdir()
    own.flush()
    crash_and_mount(own)
    check(committed, BEFORE)
    (kept,) = uncommitted(own)
    new = {"shard0.pt": NEW, "small": b"another", "sub/new": OTHER, "sub/folder/x": SMALL}
    check(kept, new)
    assert not (kept / "nothing").exists()
    own.expect_log(rf"{CHANGED}what was written is .fpfs/uncommitted/{kept.name}, and it is")
    (told,) = own.status().uncommitted
    assert (told.path, told.name) == ("runs/step_1", kept.name)
    kept.rename(own.root / "runs/new")
    crash_and_mount(own)
    check(own.root / "runs/new", new)
    for group in (committed, own.root / "runs/new"):
        shutil.rmtree(group)
    own.flush()
    assert own.stored_bytes() == 0


def test_what_was_acknowledged_of_the_new_content_is_kept_when_keeper_and_server_die(
    own: Mount, committed: Path
) -> None:
    own.allow_log("took over|server .* died")
    own.flush()
    fd = os.open(committed / "shard0.pt", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, NEW)
    end_processes(own)
    close_dead(fd)
    own.mount()
    own.flush()
    check(committed, BEFORE)
    check(uncommitted(own)[0], {"shard0.pt": NEW})
    assert list((own.root / ".fpfs/partial").iterdir()) == []


def test_programs_see_plain_posix_while_a_group_changes(own: Mount, committed: Path) -> None:
    own.allow_log("server .* died")
    fd = os.open(committed / "shard1.pt", os.O_RDWR)
    os.unlink(committed / "shard1.pt")
    assert os.fstat(fd).st_nlink == 0
    os.write(fd, NEW)
    os.fsync(fd)
    own.kill(own.server_pid)
    own.note_processes()
    assert os.pread(fd, len(NEW), 0) == NEW
    os.close(fd)
    os.unlink(committed / "sub/part")
    os.rmdir(committed / "sub")
    own.remount()
    assert sorted(os.listdir(committed)) == [".metadata", "shard0.pt", "small"]
    crash_and_mount(own)
    check(committed, BEFORE)


def test_the_removal_of_a_group_is_all_or_nothing(own: Mount, committed: Path) -> None:
    for name in ("shard0.pt", "sub/part", ".metadata"):
        (committed / name).unlink()
    own.flush()
    crash_and_mount(own)
    check(committed, BEFORE)
    shutil.rmtree(committed)
    own.flush()
    assert own.stored_bytes() == 0
    crash_and_mount(own)
    assert os.listdir(own.root / "runs") == []
    assert uncommitted(own) == []


def test_a_directory_that_leaves_a_group_commits_it(own: Mount, committed: Path) -> None:
    overwrite(committed)
    (committed / "sub").rename(own.root / "sub")
    crash_and_mount(own)
    expected = BEFORE | {"shard0.pt": NEW, "small": b"another"}
    del expected["sub/part"]
    check(committed, expected)
    check(own.root / "sub", {"part": OTHER})


def test_what_somebody_still_makes_at_the_commit_point_is_no_part_of_it(
    own: Mount, committed: Path
) -> None:
    fd = make(committed / "open.pt", NEW)
    check_fpfs("commit", committed, module=CTL)
    os.close(fd)
    own.flush()
    crash_and_mount(own)
    check(committed, BEFORE)
    check(uncommitted(own)[0], {"open.pt": NEW})


def test_what_is_restored_in_a_group_is_a_change_of_it(own: Mount, committed: Path) -> None:
    check_fpfs("policy", "set", committed, "versions=9", module=CTL)
    path = committed / "shard0.pt"
    for content in (NEW, OTHER):
        path.write_bytes(content)
        check_fpfs("commit", committed, module=CTL)
    check_fpfs("restore", f"{path}@1", module=CTL)
    assert_same(path.read_bytes(), SHARD)
    assert [group.path for group in own.status().uncommitted] == ["runs/step_1"]
    crash_and_mount(own)
    check(committed, BEFORE | {"shard0.pt": OTHER})
    path.write_bytes(NEW)
    check_fpfs("wait", path, module=CTL)
    check_fpfs("restore", f"{path}@1", module=CTL)
    crash_and_mount(own)
    check(committed, BEFORE | {"shard0.pt": OTHER})
    check_fpfs("restore", f"{path}@1", module=CTL)
    check_fpfs("commit", committed, module=CTL)
    crash_and_mount(own)
    check(committed, BEFORE)


def test_what_somebody_still_makes_is_no_part_of_it_when_keeper_and_server_die(
    own: Mount, committed: Path
) -> None:
    own.allow_log("took over|server .* died")
    fd = make(committed / "open.pt", NEW)
    check_fpfs("commit", committed, module=CTL)
    end_processes(own)
    close_dead(fd)
    own.mount()
    own.flush()
    check(committed, BEFORE)
    check(uncommitted(own)[0], {"open.pt": NEW})


def test_former_versions_go_with_what_a_crash_takes_away(own: Mount, committed: Path) -> None:
    check_fpfs("policy", "set", own.root / "runs", "versions=2", module=CTL)
    (committed / "small").write_bytes(OTHER)
    check_fpfs("commit", committed, module=CTL)
    (committed / "small").rename(committed / "moved")
    (committed.parent / "other").mkdir()
    for folder in (committed, committed / "more", committed.parent / "other"):
        folder.mkdir(exist_ok=True)
        for content in (NEW, OTHER, b""):
            (folder / "new").write_bytes(content)
            own.flush()
    crash_and_mount(own)
    check(committed, BEFORE | {"small": OTHER})
    (group,) = (own.root / ".fpfs/versions/runs").iterdir()
    assert sorted(os.listdir(group)) == ["small@1", "sub"]
    assert (group / "small@1").read_bytes() == SMALL
    shutil.rmtree(own.root / "runs")
    own.flush()
    assert own.stored_bytes() == 0
    own.unmount()
    check_fpfs("fsck", *own.devices)
    own.mount()


def test_groups_in_what_becomes_a_group_are_part_of_it(own: Mount) -> None:
    save(own.root / "runs/step_1")
    set_group(own.root)
    check_fpfs("commit", own.root / "runs", module=CTL)
    assert own.status().uncommitted == ()
    crash_and_mount(own)
    check(own.root / "runs/step_1", contents())
