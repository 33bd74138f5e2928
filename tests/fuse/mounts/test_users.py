"""Mounts of a user without privileges, through fusermount3."""

from __future__ import annotations

import atexit
import json
import os
import pwd
import re
import resource
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fpfs import _native
from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import REPOSITORY, mounted, run_fpfs
from tests.support.refusals import with_mounts
from tests.support.waiting import one_at_a_time

USER = "nobody"
GROUP = "games"


def linked_package() -> Path:
    """A folder with the package as an installation has it: modules and extension together.

    An editable installation finds them in two places, by a hook that only its own Python runs.
    """
    folder = Path(tempfile.mkdtemp(prefix="fpfs-user-package-"))
    atexit.register(shutil.rmtree, folder)
    folder.chmod(0o755)
    package = folder / "fpfs"
    package.mkdir()
    extension = Path(_native.__file__)
    for path in [*(REPOSITORY / "fpfs").iterdir(), extension]:
        if path.suffix != ".so" or path == extension:
            (package / path.name).unlink(missing_ok=True)
            (package / path.name).symlink_to(path)
    return folder


def interpreter() -> tuple[str, str] | None:
    """A Python that the user can execute, and its path of packages; None when there is none."""
    packages = f"{linked_package()}:{sysconfig.get_path('platlib')}"
    system = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    for candidate in (sys.executable, system):
        if candidate is None:
            continue
        # setpriv itself may still reach what its child cannot: the child must find its Python too.
        code = "import fpfs._native, sys; open(sys.executable, 'rb')"
        command = ["setpriv", f"--reuid={USER}", "--clear-groups", candidate, "-c", code]
        try:
            done = subprocess.run(
                command, env={"PYTHONPATH": packages}, cwd="/", capture_output=True, check=False
            )
        except FileNotFoundError:
            return None
        if done.returncode == 0:
            return candidate, packages
    return None


PYTHON = interpreter() if os.geteuid() == 0 else None

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.skipif(
        os.geteuid() == 0 and PYTHON is None, reason=f"{USER} can execute no Python that has fpfs"
    ),
]


class Account:
    """What the user has: a home folder, a device directory, a mountpoint."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.groups: tuple[str, ...] = ("--clear-groups",)
        """How the user's other groups are given to setpriv(1)."""
        self.device, self.mountpoint = home / "device", home / "mount"
        user = pwd.getpwnam(USER)
        for path in (home, self.device, self.mountpoint):
            path.mkdir(exist_ok=True)
            os.chown(path, user.pw_uid, user.pw_gid)

    def run(
        self,
        *command: str | Path,
        memory_lock_bytes: int | None = None,
        prefix: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the user, which root's `prefix` begins."""

        def limit() -> None:
            if memory_lock_bytes is not None:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (memory_lock_bytes, memory_lock_bytes))

        assert PYTHON is not None
        return subprocess.run(
            [*prefix, "setpriv", f"--reuid={USER}", f"--regid={self.gid}", *self.groups]
            + [str(word) for word in command],
            env={
                "PYTHONPATH": PYTHON[1],
                "HOME": str(self.home),
                "PATH": "/usr/bin:/bin",
                "XDG_RUNTIME_DIR": str(self.home),
            },
            cwd="/",
            preexec_fn=limit,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @property
    def gid(self) -> int:
        """The user's group."""
        return pwd.getpwnam(USER).pw_gid

    def fpfs(self, *arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run ``fpfs`` as the user."""
        return self.module("fpfs.cli.main", *arguments, **how)

    def module(
        self, module: str, *arguments: str | Path, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python module as the user."""
        assert PYTHON is not None
        return self.run(PYTHON[0], "-m", module, *arguments, **how)

    def mount(self, *options: str, memory_lock_bytes: int | None = None) -> str:
        """Mount; returns what the command said, which must have succeeded."""
        done = self.fpfs(*self.mount_arguments(options), memory_lock_bytes=memory_lock_bytes)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def mount_arguments(self, options: Sequence[str]) -> list[str | Path]:
        """The command line of a mount with these ``-o`` options."""
        words = ",".join(("staging=16M", *options))
        return ["mount", "-d", self.device, "-o", words, "--log", self.log, self.mountpoint]

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.home / "log"


@pytest.fixture(autouse=True)
def fuse_for_everybody() -> Iterator[None]:
    """Give /dev/fuse the mode that udev gives it; a machine without udev may keep it root's."""
    with one_at_a_time("fuse-mode"):
        before = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
        os.chmod("/dev/fuse", 0o666)
        yield
        os.chmod("/dev/fuse", before)


def test_a_fuse_device_that_cannot_be_opened(account: Account) -> None:
    closed = account.home / "fuse"
    closed.touch(mode=0o600)
    prefix = with_mounts(f"mount --bind {closed} /dev/fuse")
    done = account.fpfs(*account.mount_arguments([]), prefix=prefix)
    assert done.returncode == 1
    assert "failed to open /dev/fuse: Permission denied; load the fuse module" in done.stderr


@pytest.fixture
def account() -> Iterator[Account]:
    """The user's folder in a place that the user can reach; unmounted and removed at the end."""
    home = Path(tempfile.mkdtemp(prefix="fpfs-user-"))
    account = Account(home)
    yield account
    if mount_at(str(account.mountpoint)) is not None:
        done = account.fpfs("umount", account.mountpoint)
        assert done.returncode == 0, done.stderr + account.log.read_text()
    shutil.rmtree(home)


def test_a_user_mounts_writes_and_unmounts(account: Account) -> None:
    account.mount()
    entry = mount_at(str(account.mountpoint))
    assert entry is not None
    assert entry.owner_uid == pwd.getpwnam(USER).pw_uid
    done = account.run("sh", "-c", f"echo content > {account.mountpoint}/file")
    assert done.returncode == 0, done.stderr
    done = account.fpfs("umount", account.mountpoint)
    assert done.returncode == 0, done.stderr
    account.mount()
    assert account.run("cat", account.mountpoint / "file").stdout == "content\n"


def test_a_user_lets_a_group_of_his_own_ask(account: Account) -> None:
    done = account.fpfs(*account.mount_arguments([f"control_group={GROUP}"]))
    assert done.returncode == 1
    assert f"control_group={GROUP}: you are not in it; name a group of yours" in done.stderr
    assert done.stderr.count("\n") == 1
    account.groups = (f"--groups={GROUP}",)
    account.mount(f"control_group={GROUP}")
    account.groups = ("--clear-groups",)
    assert PYTHON is not None
    words = [PYTHON[0], "-m", "fpfs.cli.ctl", "device", "tag", account.mountpoint, "0", "+fast"]
    for group, status in (("nogroup", 1), (GROUP, 0)):
        done = subprocess.run(
            ["setpriv", "--reuid=daemon", f"--regid={group}", "--clear-groups", *map(str, words)],
            env={"PYTHONPATH": PYTHON[1], "PATH": "/usr/bin:/bin"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr


def test_a_users_server_that_dies_is_replaced(account: Account) -> None:
    account.mount()
    path = account.mountpoint / "file"
    script = f"exec 3>{path}; echo before >&3; kill -9 $0; echo after >&3"
    status = account.module("fpfs.cli.ctl", "status", "--json", account.mountpoint)
    server_pid = json.loads(status.stdout)["server_pid"]
    done = account.run("sh", "-c", script, str(server_pid))
    assert done.returncode == 0, done.stderr
    assert account.run("cat", path).stdout == "before\nafter\n"
    assert f"server {server_pid} died (signal 9): starting another" in account.log.read_text()


def test_the_mount_is_the_users_alone(account: Account) -> None:
    account.mount()
    with pytest.raises(PermissionError):
        os.listdir(account.mountpoint)


def test_control_by_the_user_and_by_root(account: Account) -> None:
    """Also where the user's environment alone says where the socket is."""
    account.mount()
    done = account.module("fpfs.cli.ctl", "status", "--json", account.mountpoint)
    assert done.returncode == 0, done.stderr
    assert '"server_pid"' in done.stdout
    as_root = run_fpfs("status", "--json", account.mountpoint, module="fpfs.cli.ctl")
    assert json.loads(as_root.stdout)["server_pid"] == json.loads(done.stdout)["server_pid"]
    as_root = run_fpfs("umount", account.mountpoint)
    assert (as_root.returncode, as_root.stderr) == (0, "")


def test_others_are_told_whose_mount_it_is(account: Account) -> None:
    with mounted(options=("noallow_other",)) as mount:
        done = account.module("fpfs.cli.ctl", "flush", mount.root)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"fpfs-ctl: flush of {mount.root}: {mount.root} was mounted by user root and not for"
            " others; ask as root\n"
        )


def test_somebody_elses_mount_is_not_unmounted(account: Account) -> None:
    with mounted() as mount:
        done = account.fpfs("umount", mount.root)
        assert done.returncode == 1
        assert done.stderr == (
            f"fpfs: unmount {mount.root}: it was mounted by user root; ask root to unmount it\n"
        )
        assert mount.status().server_pid == mount.server_pid


def test_allow_other_is_refused_with_the_remedy(account: Account) -> None:
    done = account.fpfs(*account.mount_arguments(["allow_other"]))
    assert done.returncode == 1
    assert re.search(r"user_allow_other.*; put user_allow_other into /etc/fuse.conf", done.stderr)
    assert mount_at(str(account.mountpoint)) is None


def test_nosymfollow_is_roots(account: Account) -> None:
    done = account.fpfs(*account.mount_arguments(["nosymfollow"]))
    assert done.returncode == 1
    assert re.search(r"nosymfollow cannot be set .*; mount as root", done.stderr)
    assert mount_at(str(account.mountpoint)) is None


def test_a_mountpoint_of_somebody_else_is_refused(account: Account) -> None:
    os.chown(account.mountpoint, 0, 0)
    done = account.fpfs(*account.mount_arguments([]))
    assert done.returncode == 1
    assert "see that the mountpoint belongs to you" in done.stderr
    assert mount_at(str(account.mountpoint)) is None


def test_a_device_of_somebody_else_is_refused(account: Account) -> None:
    os.chown(account.device, 0, 0)
    done = account.fpfs(*account.mount_arguments([]))
    assert done.returncode == 1
    assert f"the device directory {account.device} cannot be used (Permission denied)" in (
        done.stderr
    )


def test_staging_is_unpinned_where_memory_may_not_be_locked(account: Account) -> None:
    account.mount(memory_lock_bytes=65536)
    done = account.module("fpfs.cli.ctl", "status", "--json", account.mountpoint)
    assert '"pinned": false' in done.stdout, done.stderr
    warnings = [line for line in account.log.read_text().splitlines() if "pin" in line]
    assert len(warnings) == 1
    assert "WARNING" in warnings[0]
    done = account.run("dd", "if=/dev/zero", f"of={account.mountpoint}/file", "bs=1M", "count=40")
    assert done.returncode == 0, done.stderr
