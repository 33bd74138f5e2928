"""The namespace beside a real directory: random operations must answer and leave the same.

Hypothesis makes sequences of operations; each is done by the namespace over the memory engine and
by the kernel in a directory. Outcomes (values or errnos) are compared after each operation, and
everything that can be seen of both trees after each sequence and again after a remount or a crash.
Names are few, so that operations meet.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fpfs.core.errors import NoSuchEntry, NotADirectory
from fpfs.daemon.catalog.rows.attributes import Changes
from fpfs.daemon.catalog.rows.dirents import RenameMode
from fpfs.daemon.catalog.schema import FIXED_DIRECTORIES
from fpfs.daemon.inodes.table import Inode
from fpfs.testing.memory_engine import MemoryDevices, MemoryEngine
from tests.support.catalog.catalogs import check_held
from tests.support.catalog.rig import SUPERUSER, Rig, rig
from tests.support.system import RenameFlag, renameat2

NAMES = ["a", "b", "c"]
SIZES = [0, 1, 16_384, 16_385, 65_536, 70_001, 200_000]


WHAT = (
    "mkdir write fifo symlink link unlink rmdir rename noreplace exchange chmod chown truncate "
    "utimens setxattr removexattr hold write mkdir rename append list drop commit"
).split()


class Operation(msgspec.Struct, frozen=True):
    """One step: what to do, the paths, and a number whose meaning depends on what is done."""

    what: str
    path: str
    other: str
    number: int


START = (
    Operation("mkdir", "a", "", 0),
    Operation("mkdir", "a/a", "", 0),
    Operation("write", "a/b", "", 1),
    Operation("write", "b", "", 5),
)
"""What every sequence starts with, so that most operations find something."""

paths = st.sampled_from([*NAMES, *(f"a/{name}" for name in NAMES), "c/a", "a/a/a"])
operations = st.builds(
    Operation,
    st.sampled_from(WHAT),
    paths,
    paths,
    st.integers(min_value=0, max_value=len(SIZES) - 1),
)


def content(number: int) -> bytes:
    """Return a content of one of the sizes that matter, different for each."""
    return bytes([65 + number]) * SIZES[number]


class Kernel:
    """The model: a directory of a kernel filesystem."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: list[int] = []

    def do(self, op: Operation) -> object:
        """Do one operation; returns what is comparable."""
        path, other = str(self.root / op.path), str(self.root / op.other)
        steps: dict[str, Callable[[], object]] = {
            "mkdir": lambda: os.mkdir(path, 0o755),
            "write": lambda: self._write(path, content(op.number), os.O_TRUNC),
            "append": lambda: self._write(path, content(op.number), os.O_APPEND),
            "fifo": lambda: os.mkfifo(path, 0o600),
            "symlink": lambda: os.symlink(op.other, path),
            "link": lambda: os.link(path, other, follow_symlinks=False),
            "unlink": lambda: os.unlink(path),
            "rmdir": lambda: os.rmdir(path),
            "rename": lambda: os.rename(path, other),
            "noreplace": lambda: renameat2(path, other, RenameFlag.NOREPLACE),
            "exchange": lambda: renameat2(path, other, RenameFlag.EXCHANGE),
            "chmod": lambda: self._nofollow(path, lambda: os.chmod(path, 0o6000 + op.number)),
            "chown": lambda: os.lchown(path, 1000 + op.number, -1),
            "truncate": lambda: self._regular(path, lambda: os.truncate(path, SIZES[op.number])),
            "utimens": lambda: os.utime(path, ns=(op.number, 7), follow_symlinks=False),
            "setxattr": lambda: self._regular(
                path, lambda: os.setxattr(path, f"user.{op.number}", op.other.encode())
            ),
            "removexattr": lambda: self._regular(
                path, lambda: os.removexattr(path, f"user.{op.number}")
            ),
            "hold": lambda: self._regular(path, lambda: self._hold(path)),
            "list": lambda: sorted(os.listdir(path)),
            "drop": self._drop,
            "commit": lambda: None,
        }
        return steps[op.what]()

    def _write(self, path: str, data: bytes, flag: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | flag, 0o644)
        os.write(fd, data)
        os.close(fd)

    def _nofollow(self, path: str, call: Callable[[], object]) -> object:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            return "link"
        return call()

    def _regular(self, path: str, call: Callable[[], object]) -> object:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return "not regular"
        return call()

    def _hold(self, path: str) -> None:
        self.held.append(os.open(path, os.O_RDWR))

    def _drop(self) -> object:
        if not self.held:
            return None
        fd = self.held.pop()
        seen = (os.fstat(fd).st_size, os.fstat(fd).st_nlink, os.pread(fd, 1 << 20, 0))
        os.pwrite(fd, b"last words", 5)
        os.close(fd)
        return seen

    def tree(self) -> dict[str, tuple[object, ...]]:
        """Return everything visible, by path."""
        seen = {}
        for folder, directories, files in os.walk(self.root):
            for name in directories + files:
                path = os.path.join(folder, name)
                seen[os.path.relpath(path, self.root)] = self._seen(path)
        return seen

    def _seen(self, path: str) -> tuple[object, ...]:
        found = os.lstat(path)
        kind = stat.S_IFMT(found.st_mode)
        data: object = None
        if kind == stat.S_IFREG:
            data = (Path(path).read_bytes(), sorted(os.listxattr(path)))
        elif kind == stat.S_IFLNK:
            data = os.readlink(path)
        size = found.st_size if kind in (stat.S_IFREG, stat.S_IFLNK) else 0
        return (found.st_mode, found.st_nlink, found.st_uid, size, data)


class Under:
    """The namespace, walked as the kernel would walk it."""

    def __init__(self, mount: Rig) -> None:
        self.mount = mount
        self.held: list[int] = []

    async def _walk(self, path: str) -> Inode:
        """Return an inode; symbolic links in the middle of a path end the walk."""
        inode = await self.mount.look_up(1, b".")
        for name in path.split("/"):
            if stat.S_ISLNK(inode.mode):
                raise _Link
            if not inode.is_directory:
                raise NotADirectory(path)
            following = await self.mount.namespace.look_up(inode.ino, name.encode())
            self.mount.namespace.forget(inode.ino, 1)
            if following is None:
                raise NoSuchEntry(path)
            inode = following
        self.mount.namespace.forget(inode.ino, 1)
        return inode

    async def _place(self, path: str) -> tuple[int, bytes]:
        parent, _, name = path.rpartition("/")
        inode = await self._walk(parent) if parent else await self.mount.resolve("")
        if stat.S_ISLNK(inode.mode):
            raise _Link
        if not inode.is_directory:
            raise NotADirectory(path)
        return inode.ino, name.encode()

    async def do(self, op: Operation) -> object:
        """Do one operation; returns what is comparable."""
        step: Any = getattr(self, f"_{op.what}")
        return await step(op)

    async def _mkdir(self, op: Operation) -> None:
        made = await self.mount.namespace.entries.make_directory(
            *await self._place(op.path), mode=stat.S_IFDIR | 0o755, caller=SUPERUSER
        )
        self.mount.namespace.forget(made.ino, 1)

    async def _write(self, op: Operation, flag: int = os.O_TRUNC) -> None:
        parent, name = await self._place(op.path)
        existing = await self.mount.namespace.look_up(parent, name)
        if existing is not None:
            self.mount.namespace.forget(existing.ino, 1)
            if existing.is_directory:
                raise IsADirectoryError(errno.EISDIR, "a directory")
            if stat.S_ISLNK(existing.mode):
                raise OSError(errno.ELOOP, "a link")
            if not existing.is_regular:
                raise OSError(errno.ENXIO, "a fifo nobody reads")
            handle = await self.mount.open(op.path, flags=os.O_WRONLY | flag)
        else:
            handle = await self.mount.create(op.path, flags=os.O_WRONLY | flag)
        if content(op.number):
            self.mount.engine.write(handle, 0, content(op.number))
        self.mount.namespace.files.release(handle)

    async def _append(self, op: Operation) -> None:
        await self._write(op, os.O_APPEND)

    async def _fifo(self, op: Operation) -> None:
        made = await self.mount.namespace.entries.make_node(
            *await self._place(op.path), mode=stat.S_IFIFO | 0o600, rdev=0, caller=SUPERUSER
        )
        self.mount.namespace.forget(made.ino, 1)

    async def _symlink(self, op: Operation) -> None:
        made = await self.mount.namespace.entries.make_symlink(
            *await self._place(op.path), target=op.other.encode(), caller=SUPERUSER
        )
        self.mount.namespace.forget(made.ino, 1)

    async def _link(self, op: Operation) -> None:
        inode = await self._walk(op.path)
        place = await self._place(op.other)
        linked = await self.mount.namespace.entries.link(inode.ino, *place)
        self.mount.namespace.forget(linked.ino, 1)

    async def _unlink(self, op: Operation) -> None:
        await self.mount.namespace.entries.unlink(*await self._place(op.path))

    async def _rmdir(self, op: Operation) -> None:
        await self.mount.namespace.entries.remove_directory(*await self._place(op.path))

    async def _rename(self, op: Operation, mode: RenameMode = RenameMode.REPLACE) -> None:
        source, destination = await self._place(op.path), await self._place(op.other)
        if op.path.startswith(f"{op.other}/"):
            await self._answer_for_ancestor(op, mode)
        await self.mount.namespace.entries.rename(source, destination, mode)

    async def _answer_for_ancestor(self, op: Operation, mode: RenameMode) -> None:
        """Raise what the kernel answers by itself when something is to replace its ancestor."""
        await self._walk(op.path)
        if mode is RenameMode.REPLACE:
            raise OSError(errno.ENOTEMPTY, "the target is an ancestor of the source")

    async def _noreplace(self, op: Operation) -> None:
        await self._rename(op, RenameMode.NO_REPLACE)

    async def _exchange(self, op: Operation) -> None:
        await self._rename(op, RenameMode.EXCHANGE)

    async def _set(self, path: str, changes: Changes, size: int | None = None) -> None:
        inode = await self._walk(path)
        await self.mount.namespace.set_attributes(inode.ino, changes, size=size, caller=SUPERUSER)

    async def _chmod(self, op: Operation) -> object:
        if stat.S_ISLNK((await self._walk(op.path)).mode):
            return "link"
        return await self._set(op.path, Changes(permissions=0o6000 + op.number))

    async def _chown(self, op: Operation) -> None:
        await self._set(op.path, Changes(uid=1000 + op.number))

    async def _utimens(self, op: Operation) -> None:
        await self._set(op.path, Changes(atime_ns=op.number, mtime_ns=7))

    async def _truncate(self, op: Operation) -> object:
        if not (await self._walk(op.path)).is_regular:
            return "not regular"
        return await self._set(op.path, Changes(), SIZES[op.number])

    async def _setxattr(self, op: Operation) -> object:
        inode = await self._walk(op.path)
        if not inode.is_regular:
            return "not regular"
        name = f"user.{op.number}".encode()
        return await self.mount.namespace.xattrs.set(inode.ino, name, op.other.encode())

    async def _removexattr(self, op: Operation) -> object:
        inode = await self._walk(op.path)
        if not inode.is_regular:
            return "not regular"
        return await self.mount.namespace.xattrs.remove(inode.ino, f"user.{op.number}".encode())

    async def _hold(self, op: Operation) -> object:
        if not (await self._walk(op.path)).is_regular:
            return "not regular"
        self.held.append(await self.mount.open(op.path))
        return None

    async def _drop(self, _op: Operation) -> object:
        if not self.held:
            return None
        handle = self.held.pop()
        inode = self.mount.namespace.files._opened(handle).inode
        await self.mount.namespace.get_attributes(inode.ino)
        seen = (inode.size, inode.nlink, self.mount.engine.read(handle, 0, 1 << 20))
        self.mount.engine.write(handle, 5, b"last words")
        self.mount.namespace.files.release(handle)
        return seen

    async def _list(self, op: Operation) -> list[str]:
        inode = await self._walk(op.path)
        if stat.S_ISLNK(inode.mode):
            raise _Link
        if not inode.is_directory:
            raise NotADirectory(op.path)
        return sorted(await self.mount.names(op.path) - {".", ".."})

    async def _commit(self, _op: Operation) -> None:
        await self.mount.commit.flush_all()

    async def tree(self, path: str = "") -> dict[str, tuple[object, ...]]:
        """Return everything visible, by path."""
        seen = {}
        for name in await self.mount.names(path) - {".", ".."}:
            below = f"{path}/{name}".lstrip("/")
            inode = await self._walk(below)
            seen[below] = await self._seen(below, inode)
            if inode.is_directory:
                seen |= await self.tree(below)
        return seen

    async def _seen(self, path: str, inode: Inode) -> tuple[object, ...]:
        data: object = None
        size = 0
        if inode.is_regular:
            await self.mount.namespace.get_attributes(inode.ino)
            size = inode.size
            names = await self.mount.namespace.xattrs.names(inode.ino)
            data = (await self.mount.read_file(path), sorted(name.decode() for name in names))
        elif stat.S_ISLNK(inode.mode):
            data = os.fsdecode(await self.mount.namespace.read_link(inode.ino))
            size = inode.size
        return (inode.mode, inode.nlink, inode.uid, size, data)


class _Link(Exception):
    """The kernel would follow a symbolic link here, which this walk does not."""


def outcome_of(error: OSError) -> str:
    code = error.errno or 0
    # POSIX allows either for a directory with entries.
    return errno.errorcode[errno.ENOTEMPTY if code == errno.EEXIST else code]


async def step(op: Operation, under: Under, kernel: Kernel) -> None:
    """Do one operation on both sides and compare."""
    try:
        ours: object = await under.do(op)
    except _Link:
        return
    except OSError as error:
        ours = outcome_of(error)
    try:
        theirs = kernel.do(op)
    except OSError as error:
        theirs = outcome_of(error)
    assert ours == theirs, op


async def compare(steps: list[Operation], *, crash: bool) -> None:
    """Run both sides."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder) / "kernel")
        kernel.root.mkdir()
        ours = Path(folder) / "ours"
        ours.mkdir()
        devices = MemoryDevices()
        async with rig(ours, devices=devices) as mount:
            under = Under(mount)
            for op in (*START, *steps):
                await step(op, under, kernel)
            assert await under.tree() == kernel.tree()
            for fd in kernel.held:
                os.close(fd)
            await (mount.commit.flush_all() if crash else mount.flush())
        async with rig(ours, devices=devices) as mount:
            assert await Under(mount).tree() == kernel.tree()
            await mount.commit.flush_all()
            await check_nothing_leaks(mount, devices)


async def check_nothing_leaks(mount: Rig, devices: MemoryDevices) -> None:
    """Check that every inode has a name, and every object belongs to one of them and is counted."""
    await mount.catalog.write(check_held)
    rows = await mount.catalog.read(
        lambda t: t.execute(
            "SELECT (SELECT count(*) FROM inodes), (SELECT count(DISTINCT ino) FROM names) + 1, "
            "(SELECT count(*) FROM objects), (SELECT count(*) FROM removals), "
            "(SELECT count(*) FROM inline WHERE ino NOT IN (SELECT ino FROM inodes))"
        ).fetchone()
    )
    assert rows[0] == rows[1] == mount.inodes.count + len(FIXED_DIRECTORIES)
    assert rows[2] == len(devices.objects)
    assert rows[3:] == (0, 0)


@settings(
    max_examples=int(os.environ.get("FPFS_MODEL_EXAMPLES", "60")),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps=st.lists(operations, min_size=10, max_size=40), crash=st.booleans())
def test_the_namespace_does_what_a_kernel_filesystem_does(
    steps: list[Operation], crash: bool
) -> None:
    trio.run(lambda: compare(steps, crash=crash))


def test_the_comparison_sees_a_lost_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryEngine, "write", lambda *_arguments: None)
    with pytest.raises(ExceptionGroup):
        trio.run(lambda: compare([Operation("write", "a", "a", 1)], crash=False))
