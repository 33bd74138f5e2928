"""The same calls on a mount and on a plain directory fail with the same errno.

The plain directory's filesystem (ext4 or tmpfs as a rule) is the authority, not a list in here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import run
from tests.support.system import FallocateMode, RenameFlag, errno_of, fallocate, renameat2

Case = Callable[[Path], str]


def prepare(root: Path) -> None:
    """What the cases use: one of each type, full and empty folders, a loop, a missing target."""
    (root / "file").write_bytes(b"content")
    (root / "other file").write_bytes(b"other")
    (root / "empty").mkdir()
    (root / "full" / "sub").mkdir(parents=True)
    (root / "full" / "file").touch()
    (root / "link").symlink_to("file")
    (root / "folder link").symlink_to("full")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop1").symlink_to("loop2")
    (root / "loop2").symlink_to("loop1")
    os.mkfifo(root / "fifo")


READ, WRITE = os.O_RDONLY, os.O_WRONLY
NEW = os.O_CREAT | os.O_WRONLY


def opened(path: Path, flags: int, call: Callable[[int], object]) -> str:
    """Errno of `call` on a descriptor of `path`, which must open."""
    fd = os.open(path, flags)
    try:
        return errno_of(call, fd)
    finally:
        os.close(fd)


CASES: dict[str, Case] = {
    "open missing": lambda r: errno_of(os.open, r / "none", READ),
    "open below a file": lambda r: errno_of(os.open, r / "file" / "x", READ),
    "open below a missing folder": lambda r: errno_of(os.open, r / "none" / "x", NEW),
    "open loop": lambda r: errno_of(os.open, r / "loop1", READ),
    "open link nofollow": lambda r: errno_of(os.open, r / "link", READ | os.O_NOFOLLOW),
    "open dangling": lambda r: errno_of(os.open, r / "dangling", READ),
    "open dangling exclusive": lambda r: errno_of(os.open, r / "dangling", NEW | os.O_EXCL),
    "open folder for writing": lambda r: errno_of(os.open, r / "full", WRITE),
    "open folder creating": lambda r: errno_of(os.open, r / "full", os.O_CREAT | READ),
    "open file as folder": lambda r: errno_of(os.open, r / "file", READ | os.O_DIRECTORY),
    "create existing": lambda r: errno_of(os.open, r / "file", NEW | os.O_EXCL),
    "create with a slash at the end": lambda r: errno_of(os.open, f"{r}/x/", NEW),
    "create a long name": lambda r: errno_of(os.open, r / ("x" * 256), NEW),
    "open a long path": lambda r: errno_of(os.open, str(r) + "/." * 2100, READ),
    "open truncating a folder": lambda r: errno_of(os.open, r / "full", WRITE | os.O_TRUNC),
    "open fifo for writing without a reader": lambda r: errno_of(
        os.open, r / "fifo", WRITE | os.O_NONBLOCK
    ),
    "mkdir existing": lambda r: errno_of(os.mkdir, r / "empty"),
    "mkdir over a file": lambda r: errno_of(os.mkdir, r / "file"),
    "mkdir over a dangling link": lambda r: errno_of(os.mkdir, r / "dangling"),
    "mkdir in a missing folder": lambda r: errno_of(os.mkdir, r / "none" / "x"),
    "mkdir dot": lambda r: errno_of(os.mkdir, f"{r}/empty/."),
    "rmdir missing": lambda r: errno_of(os.rmdir, r / "none"),
    "rmdir full": lambda r: errno_of(os.rmdir, r / "full"),
    "rmdir file": lambda r: errno_of(os.rmdir, r / "file"),
    "rmdir link to a folder": lambda r: errno_of(os.rmdir, r / "folder link"),
    "rmdir dot": lambda r: errno_of(os.rmdir, f"{r}/empty/."),
    "rmdir dot dot": lambda r: errno_of(os.rmdir, f"{r}/full/sub/.."),
    "unlink missing": lambda r: errno_of(os.unlink, r / "none"),
    "unlink folder": lambda r: errno_of(os.unlink, r / "empty"),
    "unlink with a slash at the end": lambda r: errno_of(os.unlink, f"{r}/file/"),
    "link existing": lambda r: errno_of(os.link, r / "file", r / "other file"),
    "link folder": lambda r: errno_of(os.link, r / "empty", r / "new"),
    "link missing": lambda r: errno_of(os.link, r / "none", r / "new"),
    "link into a file": lambda r: errno_of(os.link, r / "file", r / "other file" / "x"),
    "symlink existing": lambda r: errno_of(os.symlink, "x", r / "file"),
    "symlink empty target": lambda r: errno_of(os.symlink, "", r / "new"),
    "symlink long target": lambda r: errno_of(os.symlink, "x" * 4096, r / "new"),
    "readlink file": lambda r: errno_of(os.readlink, r / "file"),
    "readlink folder": lambda r: errno_of(os.readlink, r / "empty"),
    "readlink missing": lambda r: errno_of(os.readlink, r / "none"),
    "mkfifo existing": lambda r: errno_of(os.mkfifo, r / "file"),
    "rename missing": lambda r: errno_of(os.rename, r / "none", r / "new"),
    "rename folder over full folder": lambda r: errno_of(os.rename, r / "empty", r / "full"),
    "rename folder over file": lambda r: errno_of(os.rename, r / "empty", r / "file"),
    "rename file over folder": lambda r: errno_of(os.rename, r / "file", r / "empty"),
    "rename folder into itself": lambda r: errno_of(
        os.rename, r / "full", r / "full" / "sub" / "x"
    ),
    "rename folder over its parent": lambda r: errno_of(os.rename, r / "full" / "sub", r / "full"),
    "rename dot": lambda r: errno_of(os.rename, f"{r}/empty/.", r / "new"),
    "rename to dot dot": lambda r: errno_of(os.rename, r / "empty", f"{r}/full/.."),
    "rename file with a slash": lambda r: errno_of(os.rename, r / "file", f"{r}/new/"),
    "rename into a missing folder": lambda r: errno_of(os.rename, r / "file", r / "none" / "x"),
    "rename to a long name": lambda r: errno_of(os.rename, r / "file", r / ("x" * 256)),
    "renameat2 noreplace": lambda r: errno_of(
        renameat2, r / "file", r / "other file", RenameFlag.NOREPLACE
    ),
    "renameat2 exchange missing": lambda r: errno_of(
        renameat2, r / "file", r / "none", RenameFlag.EXCHANGE
    ),
    "renameat2 exchange with a child": lambda r: errno_of(
        renameat2, r / "full", r / "full" / "sub", RenameFlag.EXCHANGE
    ),
    "renameat2 exchange with the parent": lambda r: errno_of(
        renameat2, r / "full" / "sub", r / "full", RenameFlag.EXCHANGE
    ),
    "renameat2 both flags": lambda r: errno_of(
        renameat2, r / "file", r / "none", RenameFlag.NOREPLACE | RenameFlag.EXCHANGE
    ),
    "renameat2 unknown flag": lambda r: errno_of(renameat2, r / "file", r / "x", RenameFlag(64)),
    "stat missing": lambda r: errno_of(os.stat, r / "none"),
    "stat below a file": lambda r: errno_of(os.stat, r / "file" / "x"),
    "stat file with a slash": lambda r: errno_of(os.stat, f"{r}/file/"),
    "stat loop": lambda r: errno_of(os.stat, r / "loop1"),
    "chmod missing": lambda r: errno_of(os.chmod, r / "none", 0o600),
    "chdir file": lambda r: errno_of(os.chdir, r / "file"),
    "listdir file": lambda r: errno_of(os.listdir, r / "file"),
    "truncate folder": lambda r: errno_of(os.truncate, r / "full", 0),
    "truncate missing": lambda r: errno_of(os.truncate, r / "none", 0),
    "truncate negative": lambda r: errno_of(os.truncate, r / "file", -1),
    "truncate fifo": lambda r: errno_of(os.truncate, r / "fifo", 0),
    "ftruncate read only": lambda r: opened(r / "file", READ, lambda fd: os.ftruncate(fd, 0)),
    "write read only": lambda r: opened(r / "file", READ, lambda fd: os.write(fd, b"x")),
    "read write only": lambda r: opened(r / "file", WRITE, lambda fd: os.read(fd, 1)),
    "read folder": lambda r: opened(r / "full", READ, lambda fd: os.read(fd, 1)),
    "pread negative": lambda r: opened(r / "file", READ, lambda fd: os.pread(fd, 1, -1)),
    "pwrite negative": lambda r: opened(r / "file", WRITE, lambda fd: os.pwrite(fd, b"x", -1)),
    "lseek negative": lambda r: opened(r / "file", READ, lambda fd: os.lseek(fd, -1, 0)),
    "lseek unknown": lambda r: opened(r / "file", READ, lambda fd: os.lseek(fd, 0, 77)),
    "seek data at the end": lambda r: opened(
        r / "file", READ, lambda fd: os.lseek(fd, 7, os.SEEK_DATA)
    ),
    "seek hole behind the end": lambda r: opened(
        r / "file", READ, lambda fd: os.lseek(fd, 8, os.SEEK_HOLE)
    ),
    "fallocate nothing": lambda r: opened(
        r / "file",
        WRITE,
        lambda fd: fallocate(fd, mode=FallocateMode.ALLOCATE, offset=0, length=0),
    ),
    "fallocate folder": lambda r: opened(
        r / "full",
        READ,
        lambda fd: fallocate(fd, mode=FallocateMode.ALLOCATE, offset=0, length=1),
    ),
    "fallocate punch without keep": lambda r: opened(
        r / "file",
        WRITE,
        lambda fd: fallocate(fd, mode=FallocateMode.PUNCH_HOLE, offset=0, length=1),
    ),
    "fsync folder": lambda r: opened(r / "full", READ, os.fsync),
    "copy_file_range overlapping": lambda r: opened(
        r / "file", os.O_RDWR, lambda fd: os.copy_file_range(fd, fd, 5, 0, 1)
    ),
    "copy_file_range to read only": lambda r: opened(
        r / "file", READ, lambda fd: os.copy_file_range(fd, fd, 2, 0, 5)
    ),
    "setxattr create existing": lambda r: errno_of(
        lambda: (
            os.setxattr(r / "file", "user.a", b"1"),
            os.setxattr(r / "file", "user.a", b"1", os.XATTR_CREATE),
        )
    ),
    "setxattr replace missing": lambda r: errno_of(
        os.setxattr, r / "file", "user.none", b"1", os.XATTR_REPLACE
    ),
    "setxattr no namespace": lambda r: errno_of(os.setxattr, r / "file", "plain", b"1"),
    "setxattr unknown namespace": lambda r: errno_of(os.setxattr, r / "file", "what.x", b"1"),
    "setxattr empty user name": lambda r: errno_of(os.setxattr, r / "file", "user.", b"1"),
    "setxattr user on a fifo": lambda r: errno_of(os.setxattr, r / "fifo", "user.a", b"1"),
    "getxattr missing": lambda r: errno_of(os.getxattr, r / "file", "user.none"),
    "removexattr missing": lambda r: errno_of(os.removexattr, r / "file", "user.none"),
    "open direct": lambda r: errno_of(os.open, r / "file", READ | os.O_DIRECT),
    "exec without permission": lambda r: errno_of(os.execv, str(r / "file"), ["x"]),
}


@pytest.fixture
def both(directory: Path, plain: Path) -> tuple[Path, Path]:
    for root in (directory, plain):
        (root / "made").mkdir()
        prepare(root / "made")
    return directory / "made", plain / "made"


@pytest.mark.parametrize("name", CASES)
def test_same_errno(both: tuple[Path, Path], name: str) -> None:
    found, expected = (CASES[name](root) for root in both)
    assert found == expected


def test_the_cases_are_errors(plain: Path) -> None:
    """A table in which calls succeed would compare nothing."""
    succeeded = set()
    for number, (name, case) in enumerate(CASES.items()):
        root = plain / str(number)
        root.mkdir()
        prepare(root)
        if case(root) == "OK":
            succeeded.add(name)
    assert succeeded == {"fsync folder", "open direct"}


UNPRIVILEGED = (
    "cat secret", "rm kept/x", "mv kept/x kept/y", "ln kept/x kept/y", "mkdir kept/new",
    "chmod 777 kept", "chown 65534 kept/x", "touch kept/x", "ls private", "cat private/x",
    "rmdir kept", "truncate -s 0 secret", "ln -s a kept/link", "touch -d 2020-01-01 kept/x",
    "setfattr -n user.a -v 1 kept/x", "mknod node c 1 3", "echo x > secret", "sh kept/x/y",
)  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")
@pytest.mark.parametrize("command", UNPRIVILEGED)
def test_same_refusals_for_another_user(directory: Path, plain: Path, command: str) -> None:
    outcomes = []
    for root in (directory, plain):
        (root / "made").mkdir()
        base = root / "made"
        (base / "kept").mkdir()
        (base / "private").mkdir(0o700)
        for path in (base / "kept" / "x", base / "private" / "x", base / "secret"):
            path.touch(0o600)
        script = f"LC_ALL=C {command} 2>&1; echo status $?"
        user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        outcomes.append(run(*user, "sh", "-c", script, cwd=base))
    assert outcomes[0] == outcomes[1]
    assert "status 0" not in outcomes[0]
