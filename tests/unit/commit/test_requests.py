"""Requests that the kernel sends again after the death of a server: done once, answered always."""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio.testing

from fpfs.core.errors import EntryExists, NoAttribute, NoSuchEntry
from fpfs.daemon.catalog.rows.dirents import RenameMode
from fpfs.daemon.inodes.replay_log import RECORDS_MAX, RESENT
from fpfs.daemon.names.entries import Caller
from fpfs.testing.memory_engine import MemoryDevices
from tests.support.catalog.rig import ROOT, Rig, rig

NUMBER = 12_345


def caller(number: int) -> Caller:
    """Root, in a request."""
    return Caller(0, 0, number)


async def make_directory(mount: Rig, number: int) -> object:
    """mkdir; the inode's number."""
    mode = stat.S_IFDIR | 0o755
    return (
        await mount.namespace.entries.make_directory(
            ROOT, b"made", mode=mode, caller=caller(number)
        )
    ).ino


async def make_node(mount: Rig, number: int) -> object:
    """mkfifo; the inode's number."""
    return (
        await mount.namespace.entries.make_node(
            ROOT, b"made", mode=stat.S_IFIFO | 0o644, rdev=0, caller=caller(number)
        )
    ).ino


async def make_symlink(mount: Rig, number: int) -> object:
    """symlink; the inode's number."""
    return (
        await mount.namespace.entries.make_symlink(
            ROOT, b"made", target=b"x", caller=caller(number)
        )
    ).ino


async def create(mount: Rig, number: int) -> object:
    """open(O_CREAT | O_EXCL); the inode's number and the handle."""
    inode, opened = await mount.namespace.entries.create(
        ROOT, b"made", mode=0o644, flags=os.O_RDWR, exclusive=True, caller=caller(number)
    )
    return inode.ino, opened.handle


async def link(mount: Rig, number: int) -> object:
    """link; the inode's number and its links."""
    inode = await mount.look_up(ROOT, b"file")
    linked = await mount.namespace.entries.link(inode.ino, ROOT, b"made", request=number)
    return linked.ino, linked.nlink


async def unlink(mount: Rig, number: int) -> object:
    """unlink."""
    await mount.namespace.entries.unlink(ROOT, b"file", request=number)
    return None


async def remove_directory(mount: Rig, number: int) -> object:
    """rmdir."""
    await mount.namespace.entries.remove_directory(ROOT, b"folder", request=number)
    return None


async def rename(mount: Rig, number: int) -> object:
    """rename."""
    await mount.namespace.entries.rename(
        (ROOT, b"file"), (ROOT, b"made"), RenameMode.REPLACE, request=number
    )
    return None


async def exchange(mount: Rig, number: int) -> object:
    """rename, twice of which is none."""
    await mount.namespace.entries.rename(
        (ROOT, b"file"), (ROOT, b"folder"), RenameMode.EXCHANGE, request=number
    )
    return (await mount.look_up(ROOT, b"file")).is_directory


async def set_new_attribute(mount: Rig, number: int) -> object:
    """setxattr(XATTR_CREATE), as pyfuse3 does it: it looks first."""
    inode = await mount.look_up(ROOT, b"file")
    with pytest.raises(NoAttribute):
        await mount.namespace.xattrs.get(inode.ino, b"user.new", request=number)
    await mount.namespace.xattrs.set(inode.ino, b"user.new", b"value", request=number)
    return await mount.namespace.xattrs.get(inode.ino, b"user.new")


async def remove_attribute(mount: Rig, number: int) -> object:
    """removexattr."""
    inode = await mount.look_up(ROOT, b"file")
    await mount.namespace.xattrs.remove(inode.ino, b"user.old", request=number)
    return None


async def open_file(mount: Rig, number: int) -> object:
    """open; the handle."""
    inode = await mount.look_up(ROOT, b"file")
    opened = await mount.namespace.open_file(inode.ino, flags=os.O_RDWR, caller=caller(number))
    return opened.handle


async def open_directory(mount: Rig, number: int) -> object:
    """opendir; the handle."""
    return await mount.namespace.directories.open(ROOT, request=number)


OPERATIONS = [
    make_directory,
    make_node,
    make_symlink,
    create,
    link,
    unlink,
    remove_directory,
    rename,
    exchange,
    set_new_attribute,
    remove_attribute,
    open_file,
    open_directory,
]
Operation = Callable[[Rig, int], Awaitable[object]]


async def prepare(mount: Rig) -> None:
    """What the operations work on."""
    await mount.write_file("file", b"content")
    await mount.make_directory("folder")
    inode = await mount.look_up(ROOT, b"file")
    await mount.namespace.xattrs.set(inode.ino, b"user.old", b"value")
    await mount.commit.make_names_durable()


async def describe(mount: Rig) -> object:
    """Everything that an operation may change, but for times."""
    return await mount.catalog.read(
        lambda t: [
            t.execute("SELECT parent, name, ino FROM names ORDER BY parent, name").fetchall(),
            t.execute("SELECT ino, mode, nlink FROM inodes ORDER BY ino").fetchall(),
            t.execute("SELECT ino, name, value FROM xattrs ORDER BY ino, name").fetchall(),
        ]
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@trio.testing.trio_test
async def test_a_request_that_comes_again_is_answered_and_not_done_twice(
    operation: Operation, tmp_path: Path
) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await prepare(mount)
        answer = await operation(mount, NUMBER)
        state = await describe(mount)
        handles = set(devices.handles)
    async with rig(tmp_path, devices=devices, is_successor=True) as successor:
        assert await operation(successor, NUMBER | RESENT) == answer
        assert await describe(successor) == state
        assert set(devices.handles) == handles


@trio.testing.trio_test
async def test_a_request_that_was_not_done_is_done_when_it_comes_again(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await prepare(mount)
        await unlink(mount, NUMBER)
    async with rig(tmp_path, devices=devices, is_successor=True) as successor:
        await make_directory(successor, NUMBER + 1 | RESENT)
        assert await successor.names("") == {".", "..", "folder", "made"}
        # It fails as it would have, if it has to.
        with pytest.raises(EntryExists):
            await make_directory(successor, NUMBER + 2 | RESENT)
        with pytest.raises(NoSuchEntry):
            await unlink(successor, NUMBER + 3 | RESENT)


@trio.testing.trio_test
async def test_a_number_of_another_connection_means_nothing(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await prepare(mount)
        await make_directory(mount, NUMBER)
    async with rig(tmp_path, devices=devices) as next_mount:
        with pytest.raises(EntryExists):
            await make_directory(next_mount, NUMBER | RESENT)
    async with rig(tmp_path, devices=devices, is_successor=True) as successor:
        with pytest.raises(EntryExists):
            await make_directory(successor, NUMBER | RESENT)


@trio.testing.trio_test
async def test_a_number_that_was_not_sent_again_is_a_new_request(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await prepare(mount)
        await make_directory(mount, NUMBER)
    async with rig(tmp_path, devices=devices, is_successor=True) as successor:
        with pytest.raises(EntryExists):
            await make_directory(successor, NUMBER)


@trio.testing.trio_test
async def test_records_do_not_pile_up(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        for number in range(RECORDS_MAX + 10):
            record = mount.requests.recording(number + 1, lambda _t: None)
            await mount.catalog.write(record)
        (count,) = await mount.catalog.read(
            lambda t: t.execute("SELECT count(*) FROM requests").fetchone()
        )
        assert count == RECORDS_MAX


@trio.testing.trio_test
async def test_a_successor_does_not_overwrite_the_newest_records(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        for number in range(1, 6):
            await mount.catalog.write(mount.requests.recording(number, lambda _t: None))
    async with rig(tmp_path, is_successor=True) as successor:
        await successor.catalog.write(successor.requests.recording(6, lambda _t: None))
        numbers = await successor.catalog.read(
            lambda t: t.execute("SELECT number FROM requests ORDER BY slot").fetchall()
        )
        assert numbers == [(number,) for number in range(1, 7)]


@trio.testing.trio_test
async def test_handles_that_a_server_that_died_had_released_are_not_given_out_again(
    tmp_path: Path,
) -> None:
    """Its releases may come again, and must not release what is open by then."""
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await prepare(mount)
        old = await mount.open("file"), await mount.namespace.directories.open(ROOT)
        mount.engine.kernel_releases(old[0])
        mount.namespace.catch_up()
        mount.namespace.directories.release(old[1])
    async with rig(tmp_path, devices=devices, is_successor=True) as successor:
        for _ in range(3):
            new = await successor.open("file"), await successor.namespace.directories.open(ROOT)
            assert not set(old) & set(new)


@trio.testing.trio_test
async def test_handles_of_a_server_that_died_are_not_given_out_again(tmp_path: Path) -> None:
    devices = MemoryDevices()
    async with rig(tmp_path, devices=devices) as mount:
        await prepare(mount)
        old = await mount.open("file"), await mount.namespace.directories.open(ROOT)
    async with rig(tmp_path, devices=devices, is_successor=True) as successor:
        new = await successor.open("file"), await successor.namespace.directories.open(ROOT)
        assert not set(old) & set(new)
        assert len(devices.handles) == 4
        successor.namespace.directories.release(old[1])
        successor.namespace.files.release(old[0])
        assert set(devices.handles) == set(new)
