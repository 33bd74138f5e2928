"""Attributes: modes, owners, times to the nanosecond, set-uid, statfs, special files, xattrs."""

from __future__ import annotations

import mmap
import os
import socket
import stat
import time
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount
from tests.support.processes import expect_line, python_child, run, tell
from tests.support.system import CAP_NET_BIND_SERVICE, errno_of, stat_from_server
from tests.support.target import Target

NANOSECONDS = (0, 1, 999_999_999, 1_234_567_890_123_456_789, 2**31 * 10**9 + 5, -1)
TIME_S_MAX = (2**63 - 1) // 10**9
CLOCK_REALTIME_COARSE = 5
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing owners needs root")


@pytest.mark.parametrize("atime_ns", NANOSECONDS)
def test_times_to_the_nanosecond(target: Target, directory: Path, atime_ns: int) -> None:
    mtime_ns = 1_600_000_000_123_456_789
    for path in (directory / "file", directory / "folder", directory / "link"):
        if path.name == "file":
            path.touch()
        elif path.name == "folder":
            path.mkdir()
        else:
            path.symlink_to("file")
        os.utime(path, ns=(atime_ns, mtime_ns), follow_symlinks=False)
    target.remount()
    for path in (directory / "file", directory / "folder", directory / "link"):
        status = path.lstat()
        assert (status.st_atime_ns, status.st_mtime_ns) == (atime_ns, mtime_ns), path.name


@pytest.mark.parametrize(
    ("asked", "kept_s"), [("2514-05-30", TIME_S_MAX), ("1200-01-01", -TIME_S_MAX)]
)
def test_times_out_of_range_become_the_nearest(
    mount: Mount, directory: Path, asked: str, kept_s: int
) -> None:
    file, folder, link = (directory / name for name in ("file", "folder", "link"))
    file.touch()
    folder.mkdir()
    link.symlink_to("file")
    paths = (file, folder, link, mount.root, directory / "pending")
    with (directory / "pending").open("wb") as pending:
        pending.write(b"not committed")
        pending.flush()
        for path in paths:
            run("touch", "-h", "-d", f"{asked} 12:00:00.5", str(path))
            status = path.lstat()
            assert (status.st_atime_ns, status.st_mtime_ns) == (kept_s * 10**9,) * 2, path
    mount.remount()
    for path in paths:
        status = path.lstat()
        assert (status.st_atime_ns, status.st_mtime_ns) == (kept_s * 10**9,) * 2, path


def moments(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_mtime_ns, status.st_ctime_ns


def tick() -> None:
    """Wait until the clock of file times has moved on."""
    before = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) - before < 10_000_000:
        os.sched_yield()


def test_what_changes_times(directory: Path) -> None:
    """Content changes mtime and ctime, attributes ctime, names the folder's."""
    path = directory / "file"
    path.write_bytes(b"x")
    os.truncate(path, 1)

    def changed(action: object, subject: Path = path) -> tuple[bool, bool]:
        before = moments(subject)
        tick()
        action()  # type: ignore[operator]
        after = moments(subject)
        return after[0] > before[0], after[1] > before[1]

    assert changed(lambda: path.write_bytes(b"more")) == (True, True)
    assert changed(lambda: os.truncate(path, 2)) == (True, True)
    assert changed(lambda: path.chmod(0o600)) == (False, True)
    assert changed(lambda: os.link(path, directory / "link")) == (False, True)
    assert changed((directory / "link").unlink) == (False, True)
    assert changed(lambda: os.setxattr(path, "user.a", b"1")) == (False, True)
    assert changed(path.read_bytes) == (False, False)
    assert changed((directory / "new").touch, directory) == (True, True)
    assert changed(lambda: (directory / "new").rename(directory / "old"), directory) == (True, True)
    assert changed((directory / "old").unlink, directory) == (True, True)
    assert changed(path.stat, directory) == (False, False)


def test_access_times_are_set_but_not_by_reads(
    target: Target, mount: Mount, directory: Path
) -> None:
    """Neither the kernel's copy nor the server's follows a read."""
    file, folder, link = (directory / name for name in ("file", "folder", "link"))
    before_ns = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    file.write_bytes(b"content" * 10_000)
    folder.mkdir()
    link.symlink_to("file")
    created = {path: stat_from_server(path).atime_ns for path in (file, folder, link)}
    assert all(before_ns <= atime_ns <= time.time_ns() for atime_ns in created.values())
    os.utime(folder, ns=(5, 1_000_000_007))
    expected = {**created, folder: 5}
    mount.remount()  # so that nothing is cached
    tick()
    assert file.read_bytes() == b"content" * 10_000
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:7] == b"content"
    assert os.listdir(folder) == []
    assert link.readlink() == Path("file")
    for _ in range(2):
        assert {path: path.lstat().st_atime_ns for path in expected} == expected
        assert {path: stat_from_server(path).atime_ns for path in expected} == expected
        target.remount()


def test_times_set_while_open_survive_the_close(target: Target, directory: Path) -> None:
    """tar and rsync set times on a handle that wrote; the commit must not set them again."""
    path = directory / "file"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"x" * 100_000)
    os.utime(fd, ns=(5, 1_000_000_007))
    os.close(fd)
    assert path.stat().st_mtime_ns == 1_000_000_007
    target.remount()
    assert path.stat().st_mtime_ns == 1_000_000_007


def test_modes(target: Target, directory: Path) -> None:
    previous = os.umask(0)
    try:
        for mode in (0o000, 0o4755, 0o2755, 0o1777, 0o7777, 0o640):
            path = directory / f"{mode:o}"
            fd = os.open(path, os.O_CREAT | os.O_WRONLY, mode)
            os.close(fd)
            path.chmod(mode)
            os.mkdir(f"{path}.d", mode)
    finally:
        os.umask(previous)
    target.remount()
    for mode in (0o000, 0o4755, 0o2755, 0o1777, 0o7777, 0o640):
        assert stat.S_IMODE((directory / f"{mode:o}").stat().st_mode) == mode
        assert stat.S_IMODE((directory / f"{mode:o}.d").stat().st_mode) == mode & 0o1777


def test_umask(directory: Path) -> None:
    previous = os.umask(0o027)
    try:
        (directory / "file").touch(0o666)
        (directory / "folder").mkdir(0o777)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((directory / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE((directory / "folder").stat().st_mode) == 0o750


AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


WRITE_AS_NOBODY = """if True:
    import os, sys
    fd = os.open(sys.argv[1], os.O_WRONLY)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    for _line in sys.stdin:
        os.write(fd, b"x")
        print("written", flush=True)
"""


def as_nobody(script: str, directory: Path) -> str:
    """Run a shell script in `directory` as a user without privileges; returns its output."""
    return run(*AS_NOBODY, "sh", "-c", script, cwd=directory).strip()


@needs_root
def test_permissions_of_another_user(directory: Path) -> None:
    (directory / "secret").write_text("secret")
    (directory / "secret").chmod(0o600)
    (directory / "public").write_text("public")
    directory.chmod(0o755)
    assert as_nobody("cat public", directory) == "public"
    refused = "2>&1 >/dev/null | grep -c 'Permission denied' || true"
    for command in ("cat secret", "touch new", "rm public", "mv public other", "mkdir folder"):
        assert as_nobody(f"LC_ALL=C {command} {refused}", directory) == "1", command


@needs_root
def test_owner_of_what_another_user_makes(target: Target, directory: Path) -> None:
    directory.chmod(0o777)
    as_nobody("touch file; mkdir folder; ln -s x link; mkfifo fifo; echo x > written", directory)
    target.remount()
    for name in ("file", "folder", "link", "fifo", "written"):
        status = (directory / name).lstat()
        assert (status.st_uid, status.st_gid) == (65534, 65534), name


@needs_root
def test_group_comes_from_a_setgid_folder(directory: Path) -> None:
    os.chown(directory, 0, 1234)
    directory.chmod(0o2777)
    as_nobody("touch file; mkdir folder", directory)
    assert (directory / "file").stat().st_gid == 1234
    assert (directory / "folder").stat().st_gid == 1234
    assert (directory / "folder").stat().st_mode & stat.S_ISGID


@needs_root
def test_sticky_folder(directory: Path) -> None:
    directory.chmod(0o1777)
    (directory / "of root").touch()
    denied = as_nobody(
        "rm -f 'of root' 2>/dev/null; echo $?; touch mine; rm mine; echo $?", directory
    )
    assert denied.split() == ["1", "0"]
    assert (directory / "of root").exists()


@needs_root
@pytest.mark.parametrize(
    "how",
    [
        "echo x >> file",
        "truncate -s 0 file",
        "dd if=/dev/zero of=file bs=4096 count=1 conv=notrunc oflag=direct status=none",
    ],
)
def test_setuid_and_setgid_are_dropped_by_a_write_of_another_user(
    target: Target, directory: Path, how: str
) -> None:
    path = directory / "file"
    path.write_bytes(b"x" * 10_000)
    path.chmod(0o6777)
    assert stat.S_IMODE(path.stat().st_mode) == 0o6777
    as_nobody(how, directory)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777
    target.remount()
    assert stat.S_IMODE(path.stat().st_mode) == 0o777


@needs_root
@pytest.mark.parametrize(
    "how",
    [
        "echo x >&3",
        "dd if=/dev/zero of=file bs=4096 count=1 conv=notrunc oflag=direct status=none",
        "truncate -s 5 file",
        "truncate -s 50000 file",
        "echo x > file",
        "fallocate -l 50000 file",
    ],
)
@pytest.mark.parametrize("mode", [0o6777, 0o4777, 0o2777])
def test_what_the_kernel_knows_of_setuid_is_dropped_with_it(
    directory: Path, how: str, mode: int
) -> None:
    path = directory / "file"
    path.write_bytes(b"x" * 10_000)
    path.chmod(mode)
    # Of the mode alone: with the times, which a write has changed, the kernel asks for all again.
    known = "stat -c %a file"
    assert as_nobody(f"exec 3>> file; {known}; {how}; {known}", directory).split() == [
        f"{mode:o}",
        "777",
    ]


@needs_root
def test_setuid_that_comes_back_is_dropped_again(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"x" * 10_000)
    path.chmod(0o666)
    with python_child(WRITE_AS_NOBODY, path) as writer:
        for mode in (0o4777, 0o6777):
            path.chmod(mode)
            assert run("stat", "-c", "%a", path) == f"{mode:o}\n"
            tell(writer)
            expect_line(writer, "written")
            assert run("stat", "-c", "%a", path) == "777\n"


@needs_root
def test_capabilities_go_with_a_write_of_another_user(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"x")
    path.chmod(0o777)
    with python_child(WRITE_AS_NOBODY, path) as writer:
        for _time in range(2):
            os.setxattr(path, "security.capability", CAP_NET_BIND_SERVICE)
            assert os.getxattr(path, "security.capability") == CAP_NET_BIND_SERVICE
            tell(writer)
            expect_line(writer, "written")
            assert errno_of(os.getxattr, path, "security.capability") == "ENODATA"
            assert "security.capability" not in os.listxattr(path)


@needs_root
def test_setuid_stays_for_root_and_goes_with_the_owner(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"x")
    path.chmod(0o6755)
    os.chown(path, 1, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@needs_root
def test_chown(target: Target, directory: Path) -> None:
    path = directory / "file"
    path.touch()
    for uid, gid, expected in ((7, 8, (7, 8)), (-1, 9, (7, 9)), (10, -1, (10, 9))):
        os.chown(path, uid, gid)
        assert (path.stat().st_uid, path.stat().st_gid) == expected
    os.chown(path, 2**32 - 2, 2**32 - 2)
    target.remount()
    assert (path.stat().st_uid, path.stat().st_gid) == (2**32 - 2, 2**32 - 2)


@needs_root
def test_special_files(target: Target, directory: Path) -> None:
    os.mkfifo(directory / "fifo")
    os.mknod(directory / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(directory / "block", 0o600 | stat.S_IFBLK, os.makedev(259, 1_000_000))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "socket"))
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(directory / "socket"))
    target.remount()
    assert stat.S_ISFIFO((directory / "fifo").stat().st_mode)
    assert stat.S_ISSOCK((directory / "socket").stat().st_mode)
    assert (directory / "block").stat().st_rdev == os.makedev(259, 1_000_000)
    assert stat.S_ISBLK((directory / "block").stat().st_mode)
    assert (directory / "null").read_bytes() == b""
    (directory / "null").write_bytes(b"discarded")
    assert run("sh", "-c", "echo through > fifo & cat fifo", cwd=directory) == "through\n"


def test_statfs(mount: Mount, directory: Path) -> None:
    """Figures of the devices; `test_no_space.py` has devices of its own, and sees what is taken."""
    before = os.statvfs(directory)
    assert before.f_namemax == 255
    assert 0 < before.f_bavail <= before.f_bfree < before.f_blocks
    assert before.f_ffree > 0
    device = os.statvfs(mount.devices[0])
    assert before.f_blocks * before.f_frsize >= 0.9 * device.f_blocks * device.f_frsize
    assert run("df", "--output=fstype", directory).split()[-1] == "fuse.fpfs"


def test_extended_attributes(target: Target, directory: Path) -> None:
    path = directory / "file"
    path.touch()
    values = {"user.empty": b"", "user.bytes": bytes(range(256)), "user.large": b"x" * 60_000}
    if not target.is_fpfs:
        values.pop("user.large")  # more than ext4 keeps
    for name, value in values.items():
        os.setxattr(path, name, value)
    os.setxattr(directory, "user.of a folder", b"folder")
    target.remount()
    assert sorted(os.listxattr(path)) == sorted(values)
    for name, value in values.items():
        assert os.getxattr(path, name) == value
    assert os.getxattr(directory, "user.of a folder") == b"folder"
    os.removexattr(path, "user.bytes")
    assert "user.bytes" not in os.listxattr(path)


def test_extended_attribute_refusals(directory: Path) -> None:
    path = directory / "file"
    path.touch()
    os.setxattr(path, "user.a", b"1")
    assert errno_of(os.setxattr, path, "user.a", b"2", os.XATTR_CREATE) == "EEXIST"
    assert errno_of(os.setxattr, path, "user.b", b"2", os.XATTR_REPLACE) == "ENODATA"
    assert errno_of(os.getxattr, path, "user.b") == "ENODATA"
    assert errno_of(os.removexattr, path, "user.b") == "ENODATA"
    assert os.getxattr(path, "user.a") == b"1"
    assert errno_of(os.setxattr, path, "user." + "x" * 251, b"") == "ERANGE"
    assert errno_of(os.setxattr, path, "user.a", b"x" * 65_537) == "E2BIG"
    (directory / "link").symlink_to("file")
    refused = errno_of(os.setxattr, directory / "link", "user.a", b"1", follow_symlinks=False)
    assert refused == "EPERM"


def test_attributes_of_all_links_change_together(directory: Path) -> None:
    (directory / "one").touch()
    os.link(directory / "one", directory / "other")
    (directory / "one").chmod(0o604)
    os.setxattr(directory / "one", "user.a", b"1")
    assert stat.S_IMODE((directory / "other").stat().st_mode) == 0o604
    assert os.getxattr(directory / "other", "user.a") == b"1"
    assert (directory / "one").stat() == (directory / "other").stat()


def test_blocks_tell_the_space(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"x" * 3_000_000)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert 3_000_000 <= path.stat().st_blocks * 512 <= 3_500_000


def test_access(directory: Path) -> None:
    path = directory / "file"
    path.touch()
    path.chmod(0o400)
    assert os.access(path, os.R_OK)
    assert not os.access(path, os.X_OK)
