"""What names and attributes mean: errors, link counts, times, privileges, listing."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from fpfs.core.limits import FILE_BYTES_MAX, LINK_COUNT_MAX, NAME_BYTES_MAX
from fpfs.daemon.catalog.rows.attributes import Changes
from fpfs.daemon.catalog.rows.dirents import RenameMode
from fpfs.daemon.inodes.table import Inode
from fpfs.daemon.names.open_dirs import Listed
from tests.support.catalog.rig import LARGE, ROOT, SUPERUSER, USER, Rig, rig

LONG = b"n" * (NAME_BYTES_MAX + 1)
REPLACE, NO_REPLACE, EXCHANGE = RenameMode.REPLACE, RenameMode.NO_REPLACE, RenameMode.EXCHANGE


async def populate(mount: Rig) -> None:
    """Make what the table of errors speaks of: file, link, dir/inner, empty, dir/deep/deeper."""
    await mount.write_file("file", b"content")
    await mount.make_directory("dir")
    await mount.make_directory("empty")
    await mount.make_directory("dir/deep")
    await mount.make_directory("dir/deep/deeper")
    await mount.write_file("dir/inner", b"inner")


Refused = Callable[[Rig], Awaitable[object]]


def rename(source: str, destination: str, mode: RenameMode = REPLACE) -> Refused:
    """Return a call that renames one path to another."""

    async def call(mount: Rig) -> None:
        origin = await mount.resolve(str(Path(source).parent))
        target = await mount.resolve(str(Path(destination).parent))
        await mount.namespace.entries.rename(
            (origin.ino, os.fsencode(Path(source).name)),
            (target.ino, os.fsencode(Path(destination).name)),
            mode,
        )

    return call


def make(name: bytes, *, mode: int) -> Refused:
    return lambda mount: mount.namespace.entries.make_node(
        ROOT, name, mode=mode, rdev=0, caller=SUPERUSER
    )


async def link_directory(mount: Rig) -> None:
    directory = await mount.resolve("dir")
    await mount.namespace.entries.link(directory.ino, ROOT, b"second")


async def link_over(mount: Rig) -> None:
    inode = await mount.resolve("file")
    await mount.namespace.entries.link(inode.ino, ROOT, b"dir")


async def link_removed(mount: Rig) -> None:
    inode = await mount.resolve("file")
    await mount.namespace.entries.unlink(ROOT, b"file")
    await mount.namespace.entries.link(inode.ino, ROOT, b"second")


async def make_in_removed(mount: Rig) -> None:
    directory = await mount.resolve("empty")
    await mount.namespace.entries.remove_directory(ROOT, b"empty")
    await mount.namespace.entries.make_node(
        directory.ino, b"x", mode=stat.S_IFIFO, rdev=0, caller=SUPERUSER
    )


async def truncate_too_far(mount: Rig) -> None:
    inode = await mount.resolve("file")
    await mount.namespace.set_attributes(
        inode.ino, Changes(), size=FILE_BYTES_MAX + 1, caller=SUPERUSER
    )


async def truncate_directory(mount: Rig) -> None:
    inode = await mount.resolve("dir")
    await mount.namespace.set_attributes(inode.ino, Changes(), size=0, caller=SUPERUSER)


async def get_acl(mount: Rig) -> None:
    await mount.namespace.xattrs.get(ROOT, b"system.posix_acl_access")


async def too_many_links(mount: Rig) -> None:
    inode = await mount.resolve("file")
    await mount.catalog.write(
        lambda t: t.execute("UPDATE inodes SET nlink = ?", (LINK_COUNT_MAX,)).rowcount
    )
    await mount.namespace.entries.link(inode.ino, ROOT, b"one more")


def unlink(name: bytes) -> Refused:
    return lambda mount: mount.namespace.entries.unlink(ROOT, name)


def remove_directory(name: bytes) -> Refused:
    return lambda mount: mount.namespace.entries.remove_directory(ROOT, name)


REFUSALS: dict[str, tuple[int, Refused]] = {
    "look up a long name": (errno.ENAMETOOLONG, lambda m: m.namespace.look_up(ROOT, LONG)),
    "make what exists": (errno.EEXIST, make(b"file", mode=stat.S_IFREG)),
    "make a fifo that exists": (errno.EEXIST, make(b"dir", mode=stat.S_IFIFO)),
    "make a long name": (errno.ENAMETOOLONG, make(LONG, mode=stat.S_IFREG)),
    "make in a removed directory": (errno.ENOENT, make_in_removed),
    "unlink nothing": (errno.ENOENT, unlink(b"nothing")),
    "unlink a directory": (errno.EISDIR, unlink(b"dir")),
    "unlink a long name": (errno.ENAMETOOLONG, unlink(LONG)),
    "rmdir nothing": (errno.ENOENT, remove_directory(b"nothing")),
    "rmdir a file": (errno.ENOTDIR, remove_directory(b"file")),
    "rmdir with entries": (errno.ENOTEMPTY, remove_directory(b"dir")),
    "link a directory": (errno.EPERM, link_directory),
    "link over a name": (errno.EEXIST, link_over),
    "link what was removed": (errno.ENOENT, link_removed),
    "link too often": (errno.EMLINK, too_many_links),
    "rename nothing": (errno.ENOENT, rename("nothing", "new")),
    "rename below itself": (errno.EINVAL, rename("dir", "dir/deep/x")),
    "rename onto its own parent": (errno.EINVAL, rename("dir", "dir/deep/deeper")),
    "exchange with its own parent": (errno.EINVAL, rename("dir/deep", "dir", EXCHANGE)),
    "rename a file over a directory": (errno.EISDIR, rename("file", "empty")),
    "rename a directory over a file": (errno.ENOTDIR, rename("empty", "file")),
    "rename over a full directory": (errno.ENOTEMPTY, rename("empty", "dir")),
    "rename without replacing": (errno.EEXIST, rename("file", "empty", NO_REPLACE)),
    "exchange with nothing": (errno.ENOENT, rename("file", "nothing", EXCHANGE)),
    "truncate beyond the limit": (errno.EFBIG, truncate_too_far),
    "truncate a directory": (errno.EINVAL, truncate_directory),
    "read a missing attribute": (errno.ENODATA, lambda m: m.namespace.xattrs.get(ROOT, b"user.x")),
    "remove a missing attribute": (
        errno.ENODATA,
        lambda m: m.namespace.xattrs.remove(ROOT, b"user.x"),
    ),
    "read an access control list": (errno.EOPNOTSUPP, get_acl),
    "set a huge attribute": (
        errno.E2BIG,
        lambda m: m.namespace.xattrs.set(ROOT, b"user.x", bytes(65537)),
    ),
    "get attributes of nothing": (errno.ENOENT, lambda m: m.namespace.get_attributes(4242)),
}


async def tree(mount: Rig) -> set[tuple[object, ...]]:
    """Return every name and stored inode, for comparing before and after."""
    rows = await mount.catalog.read(
        lambda t: t.execute(
            "SELECT n.parent, n.name, i.ino, i.nlink, i.parent FROM names n JOIN inodes i "
            "ON i.ino = n.ino UNION ALL SELECT 0, x'', ino, nlink, parent FROM inodes"
        ).fetchall()
    )
    return set(rows)


@pytest.mark.parametrize("what", REFUSALS)
@trio.testing.trio_test
async def test_refusals_have_the_errno_of_ext4(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code, call = REFUSALS[what]
    async with rig(tmp_path) as mount:
        await populate(mount)
        with pytest.raises(OSError, match=r".") as raised:
            await call(mount)
        assert errno.errorcode[raised.value.errno or 0] == errno.errorcode[code]
    # An error that left a statement unfinished would keep the log from being copied at the end.
    assert caplog.text == ""


@pytest.mark.parametrize(
    "what",
    [
        what
        for what in REFUSALS
        if what.startswith(("rename", "exchange", "make", "rmdir")) and "removed" not in what
    ],
)
@trio.testing.trio_test
async def test_a_refused_change_changes_nothing(what: str, tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await populate(mount)
        before = await tree(mount)
        with pytest.raises(OSError, match=r"."):
            await REFUSALS[what][1](mount)
        assert await tree(mount) == before


async def nlinks(mount: Rig, *paths: str) -> list[int]:
    """Return link counts in memory, after checking that the catalog has the same."""
    counts = []
    for path in paths:
        inode = await mount.resolve(path)
        (stored,) = await mount.catalog.read(
            lambda t, ino=inode.ino: t.execute(
                "SELECT nlink FROM inodes WHERE ino = ?", (ino,)
            ).fetchone()
        )
        assert inode.nlink == stored, path
        counts.append(inode.nlink)
        mount.namespace.forget(inode.ino, 1)
    return counts


@trio.testing.trio_test
async def test_link_counts_follow_directories_that_move(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await populate(mount)
        assert await nlinks(mount, "", "dir", "empty", "dir/deep") == [4, 3, 2, 3]
        await rename("dir/deep", "empty/moved")(mount)
        assert await nlinks(mount, "", "dir", "empty", "empty/moved") == [4, 2, 3, 3]
        await rename("dir", "empty/moved", EXCHANGE)(mount)
        assert await nlinks(mount, "", "dir", "empty", "empty/moved") == [4, 3, 3, 2]
        await mount.make_directory("empty/target")
        await rename("dir/deeper", "empty/target")(mount)
        assert await nlinks(mount, "", "dir", "empty", "empty/target") == [4, 2, 4, 2]
        parent = await mount.look_up((await mount.resolve("empty/target")).ino, b"..")
        assert parent is await mount.resolve("empty")


@trio.testing.trio_test
async def test_a_name_replaced_by_its_own_link_stays(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await populate(mount)
        inode = await mount.resolve("file")
        await mount.namespace.entries.link(inode.ino, ROOT, b"twin")
        await rename("file", "twin")(mount)
        assert await mount.names("") == {".", "..", "file", "twin", "dir", "empty"}
        assert await nlinks(mount, "file", "twin") == [2, 2]


@pytest.mark.parametrize(
    ("mode", "child_mode", "expected"),
    [
        (0o2775, stat.S_IFDIR | 0o755, (4242, True)),
        (0o2775, stat.S_IFREG | 0o644, (4242, False)),
        (0o775, stat.S_IFDIR | 0o755, (1000, False)),
    ],
)
@trio.testing.trio_test
async def test_setgid_directories_pass_their_group_on(
    mode: int, child_mode: int, expected: tuple[int, bool], tmp_path: Path
) -> None:
    async with rig(tmp_path) as mount:
        await mount.make_directory("shared")
        shared = await mount.resolve("shared")
        await mount.namespace.set_attributes(
            shared.ino, Changes(permissions=mode, gid=4242), size=None, caller=SUPERUSER
        )
        child = await mount.namespace.entries.make_node(
            shared.ino, b"child", mode=child_mode, rdev=0, caller=USER
        )
        assert (child.gid, bool(child.mode & stat.S_ISGID)) == expected


async def privileged(mount: Rig) -> Inode:
    """Make a set-uid, set-gid file with a file capability."""
    await mount.write_file("tool", bytes(LARGE))
    inode = await mount.resolve("tool")
    await mount.namespace.set_attributes(
        inode.ino, Changes(permissions=0o6755), size=None, caller=SUPERUSER
    )
    await mount.namespace.xattrs.set(inode.ino, b"security.capability", b"cap")
    return inode


async def assert_unprivileged(mount: Rig, inode: Inode) -> None:
    """Check the mode in memory, and mode and capability in the catalog."""
    assert stat.S_IMODE((await mount.namespace.get_attributes(inode.ino)).mode) == 0o755
    (mode,) = await mount.catalog.read(
        lambda t: t.execute("SELECT mode FROM inodes WHERE ino = ?", (inode.ino,)).fetchone()
    )
    assert stat.S_IMODE(mode) == 0o755
    assert await mount.namespace.xattrs.names(inode.ino) == []


@trio.testing.trio_test
async def test_chown_ends_privileges(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        inode = await privileged(mount)
        await mount.namespace.set_attributes(
            inode.ino, Changes(uid=1000), size=None, caller=SUPERUSER
        )
        await assert_unprivileged(mount, inode)
        assert (inode.uid, inode.gid) == (1000, 0)


@trio.testing.trio_test
async def test_truncation_by_others_ends_privileges(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        inode = await privileged(mount)
        await mount.namespace.set_attributes(inode.ino, Changes(), size=9, caller=SUPERUSER)
        assert stat.S_IMODE(inode.mode) == 0o6755
        await mount.namespace.set_attributes(inode.ino, Changes(), size=8, caller=USER)
        await assert_unprivileged(mount, inode)


@trio.testing.trio_test
async def test_a_write_by_others_ends_privileges(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        inode = await privileged(mount)
        handle = await mount.open("tool")
        mount.engine.write_by_others(inode.ino)
        attributes = await mount.namespace.get_attributes(inode.ino)
        assert stat.S_IMODE(attributes.mode) == 0o755
        await mount.namespace.files.sync(handle)
        await assert_unprivileged(mount, inode)


@trio.testing.trio_test
async def test_privileges_set_after_a_write_stay(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        inode = await privileged(mount)
        handle = await mount.open("tool")
        mount.engine.write_by_others(inode.ino)
        await mount.namespace.set_attributes(
            inode.ino, Changes(permissions=0o4711), size=None, caller=SUPERUSER
        )
        await mount.namespace.files.sync(handle)
        assert stat.S_IMODE((await mount.namespace.get_attributes(inode.ino)).mode) == 0o4711


@trio.testing.trio_test
async def test_times_have_nanoseconds_and_survive_the_commit(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        handle = await mount.create("file")
        mount.engine.write(handle, 0, b"x")
        inode = await mount.resolve("file")
        changes = Changes(atime_ns=1_234_567_891, mtime_ns=-5_000_000_001)
        await mount.namespace.set_attributes(inode.ino, changes, size=None, caller=SUPERUSER)
        mount.namespace.files.release(handle)
        mount.namespace.forget(inode.ino, 1)
        await mount.flush()
    async with rig(tmp_path) as mount:
        inode = await mount.resolve("file")
        assert (inode.atime_ns, inode.mtime_ns) == (1_234_567_891, -5_000_000_001)


@trio.testing.trio_test
async def test_changes_of_names_show_in_times(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await populate(mount)
        directory, inode = await mount.resolve("dir"), await mount.resolve("dir/inner")
        for change in (
            lambda: mount.namespace.entries.link(inode.ino, directory.ino, b"second"),
            lambda: rename("dir/inner", "dir/renamed")(mount),
            lambda: mount.namespace.entries.unlink(directory.ino, b"renamed"),
        ):
            before = (directory.mtime_ns, directory.ctime_ns, inode.ctime_ns)
            content_before = inode.mtime_ns
            await change()
            after = (directory.mtime_ns, directory.ctime_ns, inode.ctime_ns)
            assert all(new > old for new, old in zip(after, before, strict=True))
            assert inode.mtime_ns == content_before


@trio.testing.trio_test
async def test_special_files_and_links_come_back_after_a_crash(tmp_path: Path) -> None:
    kinds = {"fifo": stat.S_IFIFO, "sock": stat.S_IFSOCK, "char": stat.S_IFCHR, "b": stat.S_IFBLK}
    async with rig(tmp_path) as mount:
        for name, kind in kinds.items():
            await make_special(mount, name, kind)
        await mount.namespace.entries.make_symlink(
            ROOT, b"link", target=b"t" * 4095, caller=SUPERUSER
        )
        await mount.namespace.xattrs.set(ROOT, b"user.note", b"\0" * 65536)
    async with rig(tmp_path) as mount:
        for name, kind in kinds.items():
            inode = await mount.resolve(name)
            assert (stat.S_IFMT(inode.mode), inode.rdev) == (kind, os.makedev(7, 300))
        link = await mount.resolve("link")
        assert link.size == 4095
        assert await mount.namespace.read_link(link.ino) == b"t" * 4095
        assert await mount.namespace.xattrs.get(ROOT, b"user.note") == b"\0" * 65536


async def make_special(mount: Rig, name: str, kind: int) -> None:
    await mount.namespace.entries.make_node(
        ROOT, name.encode(), mode=kind | 0o600, rdev=os.makedev(7, 300), caller=SUPERUSER
    )


@trio.testing.trio_test
async def test_an_unlinked_file_lives_until_it_is_closed(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", bytes(LARGE))
        handle = await mount.open("file")
        inode = await mount.resolve("file")
        await mount.namespace.entries.unlink(ROOT, b"file")
        mount.namespace.forget(inode.ino, 1)
        mount.engine.write(handle, LARGE, b"more")
        assert (await mount.namespace.get_attributes(inode.ino)).nlink == 0
        assert mount.engine.read(handle, LARGE, 9) == b"more"
        mount.namespace.files.release(handle)
        await mount.commit.flush_all()
        assert mount.inodes.cached(inode.ino) is None
        assert mount.engine.devices.objects == {}
        assert mount.inodes.count == 1


@trio.testing.trio_test
async def test_numbers_of_removed_inodes_are_not_used_again(tmp_path: Path) -> None:
    seen: set[int] = set()
    for _ in range(3):
        async with rig(tmp_path) as mount:
            for _ in range(3):
                await mount.write_file("file", b"")
                inode = await mount.resolve("file")
                assert inode.ino not in seen
                seen.add(inode.ino)
                await mount.namespace.entries.unlink(ROOT, b"file")
                mount.namespace.forget(inode.ino, 1)
            await mount.flush()


@trio.testing.trio_test
async def test_listing_is_stable_while_names_change(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        for number in range(200):
            await mount.make_directory(f"d{number:03}")
        handle = await mount.namespace.directories.open(ROOT)
        listed: list[str] = []
        offset = 0
        for step in range(300):
            page: list[Listed] = []

            def emit(entry: Listed, page: list[Listed] = page) -> bool:
                page.append(entry)
                return len(page) <= 7  # The eighth does not fit the reply.

            await mount.namespace.directories.read(handle, offset, emit)
            taken = page[:7]
            listed += [entry.name.decode() for entry in taken]
            if len(page) < 8:
                break
            offset = taken[-1].offset
            await mount.namespace.entries.remove_directory(ROOT, f"d{step:03}".encode())
            await mount.make_directory(f"new{step:03}")
            await rename(f"d{199 - step:03}", f"renamed{step:03}")(mount)
    assert len(listed) == len(set(listed))
    untouched = {f"d{number:03}" for number in range(60, 140)}
    assert untouched <= set(listed)
    assert listed[:2] == [".", ".."]


@trio.testing.trio_test
async def test_a_listing_ends_although_entries_are_added(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.make_directory("first")
        handle = await mount.namespace.directories.open(ROOT)
        listed: list[bytes] = []

        async def page(offset: int) -> int:
            """Read one entry; return its offset, or the old one at the end."""
            taken: list[Listed] = []

            def emit(entry: Listed) -> bool:
                taken.append(entry)
                return len(taken) < 2

            await mount.namespace.directories.read(handle, offset, emit)
            listed.extend(entry.name for entry in taken[:1])
            return taken[0].offset if taken else offset

        offset = 0
        for number in range(10):
            offset = await page(offset)
            await mount.make_directory(f"d{number}")
        assert listed == [b".", b"..", b"first"]
        assert await page(0) == 1
        for _ in range(5):
            offset = await page(offset)
        assert listed[3:] == [b".", b"d0", b"d1", b"d2", b"d3", b"d4"]


@trio.testing.trio_test
async def test_references_of_a_listing_are_counted(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await populate(mount)
        await mount.commit.flush_all()  # Pending commits keep inodes in memory.
        handle = await mount.namespace.directories.open(ROOT)
        taken: list[Listed] = []

        def emit(entry: Listed) -> bool:
            if len(taken) == 3:
                return False
            taken.append(entry)
            return True

        await mount.namespace.directories.read(handle, 0, emit)
        mount.namespace.directories.release(handle)
        assert taken[2].inode.lookups == 1
        # What was not taken is not kept in memory.
        assert len(mount.inodes) == 2
        mount.namespace.forget(taken[2].inode.ino, 1)
        assert len(mount.inodes) == 1


@trio.testing.trio_test
async def test_the_page_cache_is_kept_until_the_content_may_have_changed(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"content")
        inode = await mount.resolve("file")
        files = mount.namespace.files

        async def keeps(flags: int = os.O_RDONLY) -> bool:
            opened = await files.open(inode, flags=flags)
            files.release(opened.handle)
            return opened.keep_cache

        # What it drops may be what another one has just read: it has none of a new content.
        assert [await keeps(), await keeps(), await keeps()] == [True, True, True]
        assert not await keeps(os.O_WRONLY)  # drops all
        assert [await keeps(), await keeps()] == [True, True]
        # Pages that were read while somebody wrote are not to be trusted.
        writer = await mount.open("file")
        assert not await keeps()
        files.release(writer)
        assert [await keeps(), await keeps()] == [False, True]
        reader = (await files.open(inode, flags=os.O_RDONLY)).handle
        assert not await keeps(os.O_WRONLY)
        files.release(reader)
        assert [await keeps(), await keeps()] == [False, True]
        # Who may read by its own handle may map it, and another one writes.
        assert not await keeps(os.O_RDWR)
        assert [await keeps(), await keeps()] == [False, True]
        await mount.namespace.set_attributes(inode.ino, Changes(), size=3, caller=SUPERUSER)
        assert [await keeps(), await keeps()] == [False, True]


@trio.testing.trio_test
async def test_pages_of_a_mount_that_another_server_had_are_not_kept(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"content")
        await mount.commit.flush_all()
        former = await mount.resolve("file")
        mount.namespace.forget(former.ino, former.lookups)
        assert mount.inodes.cached(former.ino) is None
        mount.inodes.lookups_known = False
        inode = await mount.resolve("file")
        kept = []
        for _ in range(2):
            opened = await mount.namespace.files.open(inode, flags=os.O_RDONLY)
            mount.namespace.files.release(opened.handle)
            kept.append(opened.keep_cache)
        assert kept == [False, True]


@trio.testing.trio_test
async def test_space_counts_a_backing_filesystem_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await populate(mount)
        space = await mount.namespace.measure_space()
        backing = os.statvfs(tmp_path)
        assert space.blocks * space.block_bytes == backing.f_blocks * backing.f_frsize
        assert space.inodes - space.inodes_free == 7
        assert space.name_bytes_max == 255


@trio.testing.trio_test
async def test_on_a_full_device_unlink_waits_for_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fpfs.daemon.devices.free_space.TIGHT_BYTES", 1 << 62)
    async with rig(tmp_path) as mount:
        for remove in (unlink(b"file"), rename("new", "file")):
            await mount.write_file("file", bytes(LARGE))
            await mount.write_file("new", b"")
            await mount.commit.flush_all()
            inode = await mount.resolve("file")
            await remove(mount)
            assert mount.engine.devices.objects == {}
            mount.namespace.forget(inode.ino, 1)
        handle = await mount.create("open")
        mount.engine.write(handle, 0, bytes(LARGE))
        await mount.namespace.files.sync(handle)
        await mount.namespace.entries.unlink(ROOT, b"open")
        assert mount.engine.read(handle, 0, 1 << 20) == bytes(LARGE)


@trio.testing.trio_test
async def test_on_a_full_device_unlink_waits_for_what_was_closed_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fpfs.daemon.devices.free_space.TIGHT_BYTES", 1 << 62)
    async with rig(tmp_path) as mount:
        mount.engine.hold_drains()
        await mount.write_file("file", bytes(LARGE))
        inode = await mount.resolve("file")
        await mount.commit.wait_drain_begun(inode)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mount.namespace.entries.unlink, ROOT, b"file")
            await trio.testing.wait_all_tasks_blocked(0.01)
            mount.engine.let_drains_go()
        assert mount.engine.devices.objects == {}
