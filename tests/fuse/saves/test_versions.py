"""Former versions: what a policy keeps when contents are replaced."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fpfs.testing.mounted import Mount, check_fpfs, mounted, run_fpfs
from tests.support.failures.crash import crash_and_mount
from tests.support.system import errno_of

pytestmark = pytest.mark.usefixtures("mount")  # only fpfs keeps versions

CTL = "fpfs.cli.ctl"
SIZES = (10, 40_000, 3_000_000)
"""In the catalog, in one block, in several chunks."""


@pytest.fixture
def kept(directory: Path) -> Path:
    """A directory in which two former versions of each name are kept."""
    keep(directory, 2)
    return directory


def keep(directory: Path, count: int, *more: str) -> None:
    check_fpfs("policy", "set", directory, f"versions={count}", *more, module=CTL)


def content(letter: str, size: int) -> bytes:
    return letter.encode() * size


def versions(path: Path) -> list[dict[str, Any]]:
    shown = json.loads(check_fpfs("versions", path, "--json", module=CTL))
    found: list[dict[str, Any]] = shown["versions"]
    return found


def former(mount: Mount, path: Path) -> list[bytes]:
    """The former versions of a file, as they are read in the view."""
    return [(mount.root / each["path"]).read_bytes() for each in versions(path)]


def overwrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def replace(path: Path, data: bytes) -> None:
    """As safetensors and careful programs do."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def change_in_place(path: Path, data: bytes) -> None:
    """Write over all of a content, without cutting it first."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("write", [overwrite, replace, change_in_place])
def test_the_last_contents_are_kept(mount: Mount, kept: Path, size: int, write: Any) -> None:
    path = kept / "model.pt"
    path.write_bytes(content("a", size))
    for letter in "bcd":
        write(path, content(letter, size + 1))
        check_fpfs("wait", path, module=CTL)
    assert path.read_bytes() == content("d", size + 1)
    assert former(mount, path) == [content("b", size + 1), content("c", size + 1)]
    assert [each["number"] for each in versions(path)] == [2, 3]
    assert [each["size"] for each in versions(path)] == [size + 1] * 2


def test_a_part_that_is_rewritten_leaves_the_rest_shared(mount: Mount, kept: Path) -> None:
    path = kept / "model.pt"
    size = 3_000_000
    path.write_bytes(content("a", size))
    for letter, offset in (("b", 0), ("c", 1_500_000), ("d", size - 10)):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(content(letter, 10))
        check_fpfs("wait", path, module=CTL)
    first = content("b", 10) + content("a", size - 10)
    second = first[:1_500_000] + content("c", 10) + first[1_500_010:]
    assert former(mount, path) == [first, second]
    assert path.read_bytes() == second[:-10] + content("d", 10)
    path.unlink()
    check_fpfs("flush", mount.root, module=CTL)


def test_a_sync_in_the_middle_makes_no_version(mount: Mount, kept: Path) -> None:
    path = kept / "model.pt"
    path.write_bytes(b"before")
    check_fpfs("wait", path, module=CTL)
    with path.open("wb") as file:
        for piece in (b"one", b"two", b"three"):
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    check_fpfs("wait", path, module=CTL)
    assert former(mount, path) == [b"before"]
    overwrite(path, b"after")
    check_fpfs("wait", path, module=CTL)
    assert former(mount, path) == [b"before", b"onetwothree"]


def test_every_name_of_a_file_keeps_its_own(mount: Mount, kept: Path) -> None:
    first, second = kept / "first", kept / "second"
    first.write_bytes(b"before")
    second.hardlink_to(first)
    overwrite(first, b"after")
    check_fpfs("wait", first, module=CTL)
    assert former(mount, first) == former(mount, second) == [b"before"]
    first.unlink()
    assert former(mount, second) == [b"before"]


def test_former_versions_follow_a_name_and_go_with_it(mount: Mount, kept: Path) -> None:
    path, moved, gone = kept / "model.pt", kept / "sub" / "moved.pt", kept / "sub" / "moved.pt@1"
    moved.parent.mkdir()
    for letter in "ab":
        path.write_bytes(content(letter, 40_000))
        check_fpfs("wait", path, module=CTL)
    path.rename(moved)
    assert former(mount, moved) == [content("a", 40_000)]
    view = mount.root / ".fpfs" / "versions" / gone.relative_to(mount.root)
    assert view.exists()
    kept.rename(kept.with_name("renamed"))
    try:
        again = kept.with_name("renamed") / "sub" / "moved.pt"
        assert former(mount, again) == [content("a", 40_000)]
    finally:
        kept.with_name("renamed").rename(kept)
    moved.unlink()
    assert not view.exists()
    moved.write_bytes(b"new")
    assert versions(moved) == []


def test_nothing_is_kept_where_no_policy_says_so(mount: Mount, directory: Path) -> None:
    path = directory / "model.pt"
    for letter in "ab":
        replace(path, content(letter, 40_000))
        overwrite(path, content(letter, 40_000))
    check_fpfs("wait", path, module=CTL)
    assert versions(path) == []


def test_with_replace_inplace_only_renames_leave_versions(mount: Mount, directory: Path) -> None:
    keep(directory, 3, "replace=inplace")
    path = directory / "model.pt"
    overwrite(path, b"one")
    overwrite(path, b"two")
    replace(path, b"three")
    check_fpfs("wait", path, module=CTL)
    assert former(mount, path) == [b"two"]


# The view.


def test_the_view_lists_former_versions_beside_directories(mount: Mount, kept: Path) -> None:
    (kept / "sub").mkdir()
    for letter in "abc":
        (kept / "model.pt").write_bytes(content(letter, 10))
        (kept / "sub" / "part@1").write_bytes(content(letter, 10))
        check_fpfs("flush", mount.root, module=CTL)
    view = mount.root / ".fpfs" / "versions" / kept.name
    assert sorted(os.listdir(view)) == ["model.pt@1", "model.pt@2", "sub"]
    assert sorted(os.listdir(view / "sub")) == ["part@1@1", "part@1@2"]
    assert (view / "sub" / "part@1@2").read_bytes() == content("b", 10)
    assert (view / ".." / kept.name / "sub" / "..").samefile(view)
    assert view.stat().st_mode & 0o777 == 0o555
    assert kept.name in os.listdir(view.parent)
    assert ".fpfs" not in os.listdir(view.parent)
    for name in ("model.pt@3", "model.pt@0", "model.pt@01", "model.pt", "part@1", "x"):
        assert not (view / name).exists(), name
    overwrite(kept / "model.pt", b"d")
    check_fpfs("wait", kept / "model.pt", module=CTL)
    assert not (view / "model.pt@1").exists(), "the kernel must not remember it"
    assert (view / "model.pt@3").read_bytes() == content("c", 10)


def test_the_view_is_read_only(mount: Mount, kept: Path) -> None:
    for letter in "ab":
        (kept / "model.pt").write_bytes(content(letter, 10))
    check_fpfs("flush", mount.root, module=CTL)
    view = mount.root / ".fpfs" / "versions" / kept.name
    former_path = view / "model.pt@1"
    attempts = [
        lambda: os.open(former_path, os.O_WRONLY),
        lambda: os.open(former_path, os.O_RDONLY | os.O_TRUNC),
        lambda: os.truncate(former_path, 0),
        lambda: former_path.chmod(0o600),
        lambda: os.utime(former_path, (1, 1)),
        lambda: os.setxattr(former_path, "user.x", b"y"),
        former_path.unlink,
        lambda: former_path.rename(kept / "stolen"),
        lambda: (kept / "model.pt").rename(view / "new"),
        lambda: os.link(former_path, kept / "stolen"),
        (view / "new").mkdir,
        (view / "new").touch,
        lambda: (view / "new").symlink_to("x"),
        view.rmdir,
        lambda: view.chmod(0o700),
        lambda: (mount.root / ".fpfs" / "versions" / "new").mkdir(),
    ]
    for number, attempt in enumerate(attempts):
        assert errno_of(attempt) in ("EROFS", "EPERM"), number
    assert former_path.read_bytes() == content("a", 10)
    assert (kept / "model.pt").read_bytes() == content("b", 10)


# Restoring.


def restore(version: str) -> str:
    return check_fpfs("restore", version, module=CTL)


@pytest.mark.parametrize("size", SIZES)
def test_a_former_version_is_put_back(mount: Mount, kept: Path, size: int) -> None:
    path = kept / "model.pt"
    for letter in "abc":
        path.write_bytes(content(letter, size))
        check_fpfs("wait", path, module=CTL)
    path.chmod(0o640)
    reader = path.open("rb")
    assert "model.pt@2 again; what it held is model.pt@3" in restore(f"{path}@2")
    assert path.read_bytes() == content("b", size)
    assert former(mount, path) == [content("b", size), content("c", size)]
    assert reader.read() == content("c", size)
    reader.close()
    assert sorted(os.listdir(kept)) == ["model.pt"]
    restore(f"{path}@3")
    assert path.read_bytes() == content("c", size)
    assert path.stat().st_mode & 0o777 == 0o640
    with path.open("r+b") as file:
        file.write(b"x")
    assert path.read_bytes() == b"x" + content("c", size)[1:]


def test_allocated_blocks_that_another_version_has_filled_are_not_overwritten(
    mount: Mount, kept: Path
) -> None:
    path = kept / "model.pt"
    size = 3_000_000
    first = content("1", 100)
    with path.open("wb") as file:
        file.write(first)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, size)
    second = content("2", size)
    with path.open("r+b") as file:
        file.write(second)
    restore(f"{path}@1")
    assert path.read_bytes() == first.ljust(size, b"\0")
    third = content("3", size)
    with path.open("r+b") as file:
        file.write(third)
    mount.remount()
    assert former(mount, path) == [second, first.ljust(size, b"\0")]
    assert path.read_bytes() == third


def test_what_cannot_be_restored_is_refused(mount: Mount, kept: Path) -> None:
    path = kept / "model.pt"
    for letter in "ab":
        path.write_bytes(content(letter, 10))
    check_fpfs("flush", mount.root, module=CTL)

    def said(version: str) -> str:
        done = run_fpfs("restore", version, module=CTL)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert said(f"{path}@7").endswith(
        ": no version 7 of it is kept; see fpfs-ctl versions for those that are\n"
    )
    assert "this names no version" in said(f"{path}")
    assert "this names no version" in said(f"{path}@x")
    assert "does not exist" in said(f"{path}x@1")
    with path.open("r+b"):
        assert "somebody is writing to it" in said(f"{path}@1")
    assert path.read_bytes() == content("b", 10)
    done = run_fpfs("versions", kept, module=CTL)
    assert (done.returncode, "this is a directory; name a file in it" in done.stderr) == (1, True)
    (kept / "single").write_bytes(b"x")
    assert "no former version is kept" in check_fpfs("versions", kept / "single", module=CTL)


def test_versions_and_restored_contents_survive_a_crash() -> None:
    with mounted() as mount:
        keep(mount.root, 2)
        path = mount.root / "model.pt"
        for letter in "abc":
            path.write_bytes(content(letter, 3_000_000))
            check_fpfs("wait", path, module=CTL)
        restore(f"{path}@1")
        crash_and_mount(mount)
        assert path.read_bytes() == content("a", 3_000_000)
        assert former(mount, path) == [content("b", 3_000_000), content("c", 3_000_000)]
        mount.expect_log(r"server \d+ died \(signal 9\): starting another")
        mount.kill(mount.server_pid)
        assert former(mount, path) == [content("b", 3_000_000), content("c", 3_000_000)]
        mount.note_processes()


def bytes_used(mount: Mount) -> int:
    """What objects take when everything is durable."""
    check_fpfs("flush", mount.root, module=CTL)
    return mount.stored_bytes()


def test_all_space_comes_back() -> None:
    with mounted() as mount:
        keep(mount.root, 5)
        path = mount.root / "model.pt"
        empty = bytes_used(mount)
        for letter in "abcd":
            overwrite(path, content(letter, 2_000_000))
            replace(path, content(letter, 2_000_000))
            with path.open("r+b") as file:
                file.seek(1_000_000)
                file.write(b"changed")
            check_fpfs("wait", path, module=CTL)
        restore(f"{path}@9")
        used = os.statvfs(mount.root)
        assert used.f_files - used.f_ffree >= 7
        before = bytes_used(mount)
        path.unlink()
        check_fpfs("flush", mount.root, module=CTL)
        assert before - bytes_used(mount) > 5_000_000
        assert bytes_used(mount) == empty
        assert "all is well" in check_fpfs("scrub", mount.root, module=CTL)


def test_errno_of_a_former_version_that_is_gone(mount: Mount, kept: Path) -> None:
    path = kept / "model.pt"
    for letter in "ab":
        path.write_bytes(content(letter, 40_000))
        check_fpfs("wait", path, module=CTL)
    view = mount.root / ".fpfs" / "versions" / kept.name / "model.pt@1"
    with view.open("rb") as reader:
        path.unlink()
        assert errno_of(view.stat) == errno.errorcode[errno.ENOENT]
        assert reader.read() == content("a", 40_000), "who has it open keeps it"


def test_what_a_rename_replaces_is_newer_than_what_comes_with_the_name(
    mount: Mount, directory: Path
) -> None:
    keep(directory, 1)
    path, temporary = directory / "model.pt", directory / "model.tmp"
    path.write_bytes(b"before")
    for data in (b"first try", b"second try"):
        temporary.write_bytes(data)
        check_fpfs("wait", temporary, module=CTL)
    temporary.rename(path)
    assert former(mount, path) == [b"before"]
