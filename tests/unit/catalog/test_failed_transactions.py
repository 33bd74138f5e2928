"""Memory stays as the catalog has it where the catalog's transaction of a change fails."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from fpfs.core.errors import CatalogError
from fpfs.core.protocol.questions import PolicyChange
from fpfs.daemon.catalog.database import Catalog
from fpfs.daemon.catalog.executor import Transaction
from fpfs.daemon.catalog.rows.attributes import Changes
from fpfs.daemon.catalog.rows.dirents import RenameMode
from tests.support.catalog.rig import ROOT, SUPERUSER, USER, Rig, rig

PATHS = ("", "file", "pending", "tool", "link", "full", "full/inner", "empty")
Change = Callable[[Rig], Awaitable[object]]


async def populate(mount: Rig) -> None:
    """Make a node of each kind; "tool" has privileges and "pending" what is not committed."""
    for name in ("file", "full/inner", "tool"):
        if name.startswith("full"):
            await mount.make_directory("full")
        await mount.write_file(name, b"content")
    await mount.make_directory("empty")
    await mount.namespace.entries.make_symlink(ROOT, b"link", target=b"file", caller=SUPERUSER)
    tool = await mount.resolve("tool")
    await mount.namespace.set_attributes(
        tool.ino, Changes(permissions=0o6755), size=None, caller=SUPERUSER
    )
    file = await mount.resolve("file")
    await mount.namespace.xattrs.set(file.ino, b"user.kept", b"value")
    mount.engine.write(await mount.create("pending"), 0, b"not committed")
    await mount.commit.wait_queued()


async def in_memory(mount: Rig) -> dict[str, tuple[object, ...]]:
    """Return what memory and the engine have of every path; their references stay."""
    found = {}
    for path in PATHS:
        inode = await mount.namespace.get_attributes((await mount.resolve(path)).ino)
        told: tuple[object, ...] = ()
        if inode.is_regular and mount.engine.loaded(inode.ino):
            told = tuple(mount.engine.attributes(inode.ino))
        slots = [
            getattr(inode, name)
            for name in inode.__slots__
            if name not in ("_lock", "lookups", "pages")
        ]
        found[path] = (*slots, told)
    counts = mount.inodes.count, mount.namespace.files.writers, mount.namespace.files.open_count
    return {**found, "counts": counts}


def attributes(path: str, changes: Changes) -> Change:
    async def change(mount: Rig) -> None:
        inode = await mount.resolve(path)
        await mount.namespace.set_attributes(inode.ino, changes, size=None, caller=SUPERUSER)

    return change


async def set_xattr(mount: Rig) -> None:
    inode = await mount.resolve("tool")
    await mount.namespace.xattrs.set(inode.ino, b"user.new", b"value")


async def remove_xattr(mount: Rig) -> None:
    inode = await mount.resolve("file")
    await mount.namespace.xattrs.remove(inode.ino, b"user.kept")


async def truncate(mount: Rig) -> None:
    inode = await mount.resolve("tool")
    await mount.namespace.set_attributes(inode.ino, Changes(), size=1, caller=USER)


async def open_truncated(mount: Rig) -> None:
    inode = await mount.resolve("tool")
    await mount.namespace.open_file(inode.ino, flags=os.O_WRONLY | os.O_TRUNC, caller=USER)


async def make_file(mount: Rig) -> None:
    await mount.create("new")


async def make_symlink(mount: Rig) -> None:
    await mount.namespace.entries.make_symlink(ROOT, b"new", target=b"x", caller=SUPERUSER)


async def make_fifo(mount: Rig) -> None:
    await mount.namespace.entries.make_node(
        ROOT, b"new", mode=stat.S_IFIFO | 0o644, rdev=0, caller=SUPERUSER
    )


async def link(mount: Rig) -> None:
    inode = await mount.resolve("file")
    await mount.namespace.entries.link(inode.ino, ROOT, b"new")


def rename(source: bytes, destination: bytes, mode: RenameMode = RenameMode.REPLACE) -> Change:
    return lambda mount: mount.namespace.entries.rename((ROOT, source), (ROOT, destination), mode)


TIMES = Changes(atime_ns=1_000_000_001, mtime_ns=2_000_000_002)
CHANGES: dict[str, Change] = {
    **{f"utimens of {path or 'the root'}": attributes(path, TIMES) for path in PATHS},
    "chmod": attributes("file", Changes(permissions=0o4711)),
    "chmod of what others wrote": attributes("pending", Changes(permissions=0o4711)),
    "chown": attributes("tool", Changes(uid=7, gid=8)),
    "setxattr": set_xattr,
    "removexattr": remove_xattr,
    "truncate": truncate,
    "open with O_TRUNC": open_truncated,
    "create": make_file,
    "symlink": make_symlink,
    "mkfifo": make_fifo,
    "mkdir": lambda mount: mount.make_directory("new"),
    "link": link,
    "unlink": lambda mount: mount.namespace.entries.unlink(ROOT, b"file"),
    "unlink of what is written": lambda mount: mount.namespace.entries.unlink(ROOT, b"pending"),
    "rmdir": lambda mount: mount.namespace.entries.remove_directory(ROOT, b"empty"),
    "rename": rename(b"file", b"new"),
    "rename over another": rename(b"file", b"tool"),
    "rename of a directory": rename(b"full", b"empty"),
    "exchange": rename(b"file", b"full", RenameMode.EXCHANGE),
    "policy": lambda mount: mount.policies.change(ROOT, PolicyChange(values={"ack": "close"})),
}


def fail_transactions(monkeypatch: pytest.MonkeyPatch, catalog: Catalog) -> None:
    """Have every transaction that changes something run, and fail at its end."""

    def failing(submit: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def run(operation: Callable[[Transaction], object], **keywords: Any) -> object:
            def fail(transaction: Transaction) -> None:
                operation(transaction)
                raise CatalogError("the device of the catalog fails")

            return await submit(fail, **keywords)

        return run

    for name in ("write", "write_urgently"):
        monkeypatch.setattr(catalog, name, failing(getattr(catalog, name)))


@pytest.mark.parametrize("what", CHANGES)
@trio.testing.trio_test
async def test_memory_is_as_before_when_the_transaction_fails(what: str, tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await populate(mount)
        pending = await mount.resolve("pending")
        mount.engine.drop_privileges(pending.ino)
        await mount.namespace.directories.open(ROOT)
        before = await in_memory(mount)
        policies_before = await mount.policies.list_all(ROOT)
        with pytest.MonkeyPatch.context() as monkeypatch:
            fail_transactions(monkeypatch, mount.catalog)
            with pytest.raises(CatalogError):
                await CHANGES[what](mount)
        assert await in_memory(mount) == before
        assert await mount.policies.list_all(ROOT) == policies_before
        assert await mount.namespace.look_up(ROOT, b"new") is None
