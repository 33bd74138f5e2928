"""The catalog: batches, errors, power cuts at the level of its files, refusals."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import trio
import trio.testing

from fpfs.core.engine import CatalogFiles
from fpfs.core.errors import (
    CatalogBusy,
    CatalogError,
    CatalogMissing,
    CatalogTooNew,
    DamagedData,
    EntryExists,
    NoSpace,
)
from fpfs.core.protocol.questions import PolicyChange
from fpfs.daemon.catalog.database import Catalog, DeviceRecord, RootOwner, Transaction
from fpfs.daemon.catalog.executor import LOG_BYTES_MAX
from fpfs.daemon.catalog.reserve import RESERVE_BYTES, Reserve
from fpfs.daemon.catalog.rows import dirents
from fpfs.daemon.catalog.rows import shared_extents as shares
from fpfs.daemon.catalog.rows.attributes import InodeRow, fetch_inode, remove_xattr, store_xattr
from fpfs.daemon.catalog.rows.dirents import NewInode
from fpfs.daemon.catalog.rows.extents import fetch_content
from fpfs.daemon.catalog.schema import FIXED_DIRECTORIES, FORMAT_VERSION, LOG_BYTES_KEPT
from tests.support.catalog.catalogs import held, make_earlier
from tests.support.catalog.rig import LARGE, rig

ROOT = 1
FIFO = stat.S_IFIFO | 0o600


def formatted(folder: Path) -> Path:
    path = folder / "catalog.db"
    Catalog.format(
        path,
        filesystem_id="test",
        devices=[DeviceRecord(number=3, device_id="a", path="/a")],
        root=RootOwner(uid=1, gid=2, permissions=0o700),
    )
    return path


def make(transaction: Transaction, name: str, *, parent: int = ROOT, mode: int = FIFO) -> int:
    return dirents.make(transaction, parent, name.encode(), NewInode(mode, 0, 0, 0, 1))


def names(transaction: Transaction) -> list[str]:
    """The names that tests made in the root."""
    found = dirents.list_names(transaction, ROOT, count=10_000)
    return sorted(name.decode() for name in found if name != b".fpfs")


@asynccontextmanager
async def busy(catalog: Catalog) -> AsyncIterator[trio.Nursery]:
    """Keep the catalog's thread busy, so that what the nursery starts is queued behind it."""
    began, end = threading.Event(), threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(catalog.write_many, lambda _t: (began.set(), end.wait()))
        await trio.to_thread.run_sync(began.wait)
        try:
            yield nursery
            await trio.testing.wait_all_tasks_blocked()
        finally:
            end.set()


@trio.testing.trio_test
async def test_a_new_catalog_has_a_root_and_knows_its_devices(tmp_path: Path) -> None:
    catalog = Catalog.open(formatted(tmp_path))
    root = await catalog.read(lambda t: fetch_inode(t, ROOT))
    assert isinstance(root, InodeRow)
    assert (root.mode, root.uid, root.gid, root.nlink) == (stat.S_IFDIR | 0o700, 1, 2, 2)
    assert catalog.devices == (DeviceRecord(number=3, device_id="a", path="/a"),)
    await catalog.close()


@trio.testing.trio_test
async def test_every_open_takes_a_fresh_object_base(tmp_path: Path) -> None:
    path = formatted(tmp_path)
    bases = []
    for _ in range(3):
        catalog = Catalog.open(path)
        bases.append(catalog.object_base)
        await catalog.close()
    assert bases == [1, 2, 3]


@trio.testing.trio_test
async def test_queued_operations_share_transactions_and_keep_their_order(tmp_path: Path) -> None:
    catalog = Catalog.open(formatted(tmp_path))
    applied: list[int] = []
    async with busy(catalog) as nursery:
        for number in range(100):

            async def run(number: int = number) -> None:
                ino = await catalog.write(
                    lambda t: make(t, f"n{number}"), apply=lambda ino: applied.append(ino) or ino
                )
                # Whoever is answered finds the effect of what was answered before.
                assert f"n{number}" in await catalog.read(names)
                assert ino in applied

            nursery.start_soon(run)
    assert applied == sorted(applied)
    assert len(applied) == 100
    assert catalog.statistics().transactions == 2
    await catalog.close()


@trio.testing.trio_test
async def test_operations_on_a_catalog_at_rest_are_run_at_once(tmp_path: Path) -> None:
    catalog = Catalog.open(formatted(tmp_path))
    threads: set[int] = set()

    def run(transaction: Transaction) -> int:
        threads.add(threading.get_ident())
        return make(transaction, "name")

    applied: list[int] = []
    ino = await catalog.write(run, apply=lambda ino: applied.append(ino) or ino)
    assert applied == [ino]
    with pytest.raises(EntryExists):
        await catalog.write(run)
    assert await catalog.read(names) == ["name"]
    assert threads == {threading.get_ident()}
    await catalog.write_many(lambda t: (t.take_number(), threads.add(threading.get_ident())))
    assert len(threads) == 2
    async with busy(catalog) as nursery:
        nursery.start_soon(partial(catalog.write, lambda _t: threads.clear()))
        await trio.testing.wait_all_tasks_blocked()
        assert threads, "what is behind a running operation waits for it"
    assert not threads
    await catalog.close()


@pytest.mark.parametrize("queued", [False, True])
@trio.testing.trio_test
async def test_an_error_takes_back_its_own_operation_only(queued: bool, tmp_path: Path) -> None:
    catalog = Catalog.open(formatted(tmp_path))
    errors: list[BaseException] = []

    def fail(transaction: Transaction) -> None:
        make(transaction, "half")
        make(transaction, "half")

    async def run(number: int) -> None:
        try:
            await catalog.write(fail if number % 3 == 0 else lambda t: make(t, f"n{number:02}"))
        except EntryExists as error:
            errors.append(error)

    async with busy(catalog) if queued else trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(run, number)
    assert len(errors) == 10
    assert await catalog.read(names) == [f"n{number:02}" for number in range(30) if number % 3]
    numbers = await catalog.read(
        lambda t: [ino for (ino,) in t.execute("SELECT ino FROM inodes").fetchall()]
    )
    assert len(set(numbers)) == 21 + len(FIXED_DIRECTORIES)
    await catalog.close()


@pytest.mark.parametrize("queued", [False, True])
@trio.testing.trio_test
async def test_a_transaction_that_sqlite_undoes_is_done_one_by_one(
    queued: bool, tmp_path: Path
) -> None:
    catalog = Catalog.open(formatted(tmp_path))
    calls: list[str] = []

    def undo(transaction: Transaction) -> None:
        """Behave as SQLite when the disk is full: the whole transaction is gone."""
        calls.append("undo")
        make(transaction, "undone")
        transaction.execute("ROLLBACK")
        raise sqlite3.OperationalError("database or disk is full")

    async def run_undo() -> None:
        with pytest.raises(CatalogError, match="full"):
            await catalog.write(undo)

    async with busy(catalog) if queued else trio.open_nursery() as nursery:
        nursery.start_soon(run_undo)
        for number in range(5):
            nursery.start_soon(catalog.write, lambda t, number=number: make(t, f"n{number}"))
    assert await catalog.read(names) == [f"n{number}" for number in range(5)]
    await catalog.close()


def cut_power(folder: Path, destination: Path) -> Path:
    """Copy the catalog's files as they are now: what a power cut leaves if all was written."""
    destination.mkdir()
    for file in folder.glob("catalog.*"):
        shutil.copy(file, destination)
    return destination / "catalog.db"


async def names_after(path: Path) -> list[str]:
    catalog = Catalog.open(path)
    found = await catalog.read(names)
    await catalog.close()
    return found


@trio.testing.trio_test
async def test_what_was_answered_is_in_the_log(tmp_path: Path) -> None:
    path = formatted(tmp_path)
    catalog = Catalog.open(path)
    for number in range(10):
        await catalog.write(lambda t, number=number: make(t, f"n{number}"))
        copy = cut_power(tmp_path, tmp_path / f"cut{number}")
        assert await names_after(copy) == [f"n{earlier}" for earlier in range(number + 1)]
    await catalog.close()


@trio.testing.trio_test
async def test_a_torn_log_leaves_whole_transactions(tmp_path: Path) -> None:
    path = formatted(tmp_path)
    catalog = Catalog.open(path)
    sizes = []
    for number in range(8):
        # Two names in one transaction: both are there, or none.
        await catalog.write(lambda t, number=number: (make(t, f"a{number}"), make(t, f"b{number}")))
        sizes.append(os.stat(f"{path}-wal").st_size)
    copy = cut_power(tmp_path, tmp_path / "cut")
    await catalog.close()
    for torn in range(sizes[-1], sizes[0], -4099):
        attempt = tmp_path / f"torn{torn}"
        shutil.copytree(copy.parent, attempt)
        os.truncate(attempt / "catalog.db-wal", torn)
        found = await names_after(attempt / "catalog.db")
        whole = sum(size <= torn for size in sizes)
        assert found == sorted(f"{letter}{n}" for n in range(whole) for letter in "ab"), torn


def spoil(path: Path, *, offset: int) -> None:
    """Overwrite a sector of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * 512)


@trio.testing.trio_test
async def test_garbage_at_the_end_of_the_log_is_not_followed(tmp_path: Path) -> None:
    path = formatted(tmp_path)
    catalog = Catalog.open(path)
    await catalog.write(lambda t: make(t, "kept"))
    size = os.stat(f"{path}-wal").st_size
    await catalog.write(lambda t: make(t, "torn"))
    copy = cut_power(tmp_path, tmp_path / "cut")
    await catalog.close()
    spoil(Path(f"{copy}-wal"), offset=size + 100)
    assert await names_after(copy) == ["kept"]


@trio.testing.trio_test
async def test_an_idle_catalog_copies_its_log_and_loses_nothing(tmp_path: Path) -> None:
    path = formatted(tmp_path)
    catalog = Catalog.open(path)
    for number in range(300):
        await catalog.write(lambda t, number=number: make(t, f"n{number:03}"))
    with trio.fail_after(30):
        # The thread does it by itself and tells nobody, so this looks until it is done.
        while catalog.statistics().checkpoints == 0:  # noqa: ASYNC110
            await trio.sleep(0.01)
    await catalog.write(lambda t: make(t, "z"))
    copy = cut_power(tmp_path, tmp_path / "cut")
    await catalog.close()
    assert await names_after(copy) == [*(f"n{number:03}" for number in range(300)), "z"]


@trio.testing.trio_test
async def test_make_durable_flushes_once_for_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog.open(formatted(tmp_path))
    flushed = flushes_of(monkeypatch)
    await catalog.write(lambda t: make(t, "a"))
    assert not catalog.all_durable
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(catalog.make_durable)
    assert catalog.all_durable
    await catalog.make_durable()
    assert flushed == [f"{catalog.path}-wal"]
    await catalog.close()


@trio.testing.trio_test
async def test_a_long_log_starts_over_and_shrinks(tmp_path: Path) -> None:
    path = formatted(tmp_path)
    catalog = Catalog.open(path)
    largest = 0
    for number in range(30):
        await catalog.write(
            lambda t, number=number: [store_value(t, number, row) for row in range(200)]
        )
        largest = max(largest, os.stat(f"{path}-wal").st_size)
    assert catalog.statistics().checkpoints > 1
    assert largest < 2 * LOG_BYTES_MAX
    # The thread looks at the log after it, before it lets go of the connection.
    await catalog.write_many(lambda t: make(t, "before the last checkpoint"))
    await catalog.write(lambda t: make(t, "after the last checkpoint"))
    assert os.stat(f"{path}-wal").st_size < LOG_BYTES_MAX
    copy = cut_power(tmp_path, tmp_path / "cut")
    await catalog.close()
    catalog = Catalog.open(copy)
    stored = await catalog.read(
        lambda t: t.execute("SELECT count(*), min(value) FROM xattrs").fetchone()
    )
    assert stored == (200, bytes([29]) * 65536)
    await catalog.close()


@trio.testing.trio_test
async def test_what_was_committed_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the device does not tell afterwards whether the log has room on it."""
    catalog = Catalog.open(formatted(tmp_path))
    runs = []

    def refuse(_descriptor: int) -> NoReturn:
        monkeypatch.undo()
        raise OSError(errno.EIO, "as the test asked for")

    def count(transaction: Transaction) -> None:
        runs.append(store_value(transaction, 1, 201))

    await catalog.write(lambda t: [store_value(t, 1, row) for row in range(200)])
    assert os.stat(f"{catalog.path}-wal").st_size > LOG_BYTES_KEPT
    monkeypatch.setattr(os, "fstatvfs", refuse)
    await catalog.write(count)
    assert os.fstatvfs is not refuse, "it was asked"
    assert len(runs) == 1
    await catalog.close()


def store_value(transaction: Transaction, number: int, row: int) -> None:
    store_xattr(transaction, ROOT, b"user.%d" % row, bytes([number]) * 65536, ctime_ns=1)


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 32 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> None:
    """Take all the space there is, as somebody else may."""
    with (folder / "filler").open("ab", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(65536))
        except OSError as error:
            assert error.errno == errno.ENOSPC  # how many writes fit is not known


def test_a_reserve_that_was_lent_is_taken_back_or_said_to_be_in_use(
    small_device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reserve = Reserve(small_device / "reserve")
    assert reserve.restore()
    with reserve.lent() as was_held:
        assert was_held
        assert (small_device / "reserve").stat().st_blocks == 0
    assert reserve.held
    assert caplog.text == ""
    with pytest.raises(OSError, match="as the test asked for"), reserve.lent():
        fill(small_device)
        raise OSError(errno.EIO, "as the test asked for")
    assert not reserve.held
    assert caplog.text.count("its reserve is in use") == 1


async def store_until_full(catalog: Catalog, *, first: int) -> int:
    """Store large values until there is no space; returns the number of the one that failed."""
    for number in range(first, 1000):
        try:
            await catalog.write(partial(store_value, number=1, row=number))
        except NoSpace:
            return number
    raise AssertionError("a device of 32 MiB holds 64 MiB")


@pytest.mark.root
@trio.testing.trio_test
async def test_a_full_device_still_takes_removals(
    small_device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog.open(formatted(small_device))
    for number in range(50):
        await catalog.write(partial(store_value, number=0, row=number))
    fill(small_device)
    made = await store_until_full(catalog, first=50)
    assert "its reserve is in use" not in caplog.text
    for number in range(made):
        name = b"user.%d" % number
        await catalog.write_urgently(partial(remove_xattr, ino=ROOT, name=name, ctime_ns=1))
    assert "its reserve is in use" in caplog.text
    with pytest.raises(NoSpace, match="its reserve is for removals"):
        await catalog.write(lambda t: make(t, "too early"))
    (small_device / "filler").unlink()
    await catalog.write(lambda t: make(t, "there is room again"))
    assert (small_device / "reserve").stat().st_size == RESERVE_BYTES
    await catalog.close()
    assert await names_after(small_device / "catalog.db") == ["there is room again"]


def flushes_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which files are flushed by this process's own calls."""
    flushed: list[str] = []
    fdatasync = os.fdatasync

    def record(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", record)
    return flushed


@trio.testing.trio_test
async def test_a_failed_flush_stops_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = Catalog.open(formatted(tmp_path))
    await catalog.write(lambda t: make(t, "a"))

    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(CatalogError, match="cannot be flushed"):
        await catalog.make_durable()
    monkeypatch.undo()
    with pytest.raises(CatalogError, match="cannot be flushed"):
        await catalog.make_durable()
    with pytest.raises(CatalogError, match="stopped by a failed flush"):
        await catalog.write(lambda t: make(t, "b"))
    assert await catalog.read(names) == ["a"]
    await catalog.close()


@trio.testing.trio_test
async def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = formatted(tmp_path)
    catalog = Catalog.open(path)
    with pytest.raises(CatalogBusy, match="in use by another process"):
        Catalog.open(path)
    await catalog.close()
    await Catalog.open(path).close()


@trio.testing.trio_test
async def test_what_a_format_that_died_left_is_no_catalog(tmp_path: Path) -> None:
    for name in (".catalog.db.new", ".catalog.db.new-journal"):
        (tmp_path / name).write_bytes(b"half of something")
    path = formatted(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [path.name, "catalog.sums"]
    await Catalog.open(path).close()


@trio.testing.trio_test
async def test_a_new_catalog_does_not_take_over_the_log_of_one_that_is_gone(tmp_path: Path) -> None:
    path = formatted(tmp_path)
    catalog = Catalog.open(path)
    await catalog.write(lambda t: t.execute("INSERT INTO names VALUES (99, 1, x'61', 7, 8)"))
    shutil.copy(f"{path}-wal", tmp_path / "left")
    await catalog.close()
    path.unlink()
    os.rename(tmp_path / "left", f"{path}-wal")
    formatted(tmp_path)
    catalog = Catalog.open(path)
    count = await catalog.read(lambda t: t.execute("SELECT count(*) FROM names").fetchone())
    assert count == (len(FIXED_DIRECTORIES),)
    assert catalog.object_base == 1
    await catalog.close()


@trio.testing.trio_test
async def test_refusals_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CatalogMissing, match="there is no catalog at"):
        Catalog.open(tmp_path / "catalog.db")
    path = formatted(tmp_path)
    with pytest.raises(FileExistsError):
        formatted(tmp_path)
    catalog = Catalog.open(path)
    await catalog.write_many(
        lambda t: (make(t, "new"), t.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}"))
    )
    await catalog.close()
    with pytest.raises(CatalogTooNew, match=f"has format {FORMAT_VERSION + 1}") as refused:
        Catalog.open(path)
    assert "newer fpfs" in refused.value.remedy
    path.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(CatalogError, match="cannot be used: page 1 of") as damaged:
        Catalog.open(path)
    assert "from a backup" in damaged.value.remedy
    path.unlink()
    (tmp_path / "catalog.sums").unlink()
    sqlite3.connect(path).execute("CREATE TABLE other (x)").connection.close()
    with pytest.raises(CatalogError, match="is not a catalog of fpfs"):
        Catalog.open(path)


def shape(path: Path) -> list[tuple[str, str]]:
    """Tables and indices of a catalog, with all that they begin with."""
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT type, name FROM sqlite_schema").fetchall()
    for kind, name in sorted(found):
        if kind == "table":
            columns = connection.execute(f"SELECT * FROM pragma_table_info('{name}')").fetchall()
            found.append((name, str([(column[1], column[2]) for column in columns])))
    for table in ("names", "inodes"):
        rows = connection.execute(f"SELECT ino FROM {table} ORDER BY ino").fetchall()
        found.append((table, str(rows)))
    connection.close()
    return sorted(found)


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
@trio.testing.trio_test
async def test_an_earlier_format_is_brought_up_to_date(tmp_path: Path, version: int) -> None:
    path = formatted(tmp_path)
    today = shape(path)
    make_earlier(path, version=version).close()
    if version >= 3:  # which had page checksums
        CatalogFiles(str(path)).make_sums("test")
    for _ in range(2):
        catalog = Catalog.open(path)
        assert (await catalog.read(lambda t: fetch_inode(t, 3))).uid == 1
        assert catalog.inode_count_at_open == 1
        await catalog.close()
        assert shape(path) == today


@trio.testing.trio_test
async def test_what_an_earlier_format_did_not_count_is_counted(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.policies.change(1, PolicyChange(values={"commit": "group"}))
        await mount.make_directory("group")
        for path in ("group/shared", "alone", "cut"):
            await mount.write_file(path, b"x" * LARGE)
        await mount.commit.flush_all()
        await mount.groups.commit((await mount.resolve("group")).ino)
        handle = await mount.open("group/shared")
        mount.engine.write(handle, 70_000, b"y" * 100)
        mount.namespace.files.release(handle)
        await mount.commit.flush_all()
        counted = await mount.catalog.read(held)
        assert await mount.catalog.read(shares.are_there)
        path = mount.catalog.path
    assert all(row[-1] > 0 for rows in counted.values() for row in rows)
    make_earlier(path, version=5).close()
    CatalogFiles(str(path)).make_sums("test")
    catalog = Catalog.open(path)
    assert await catalog.read(held) == counted
    await catalog.write(lambda t: t.execute("UPDATE shares SET crc = crc + 1").rowcount)
    await catalog.close()
    make_earlier(path, version=5).close()
    CatalogFiles(str(path)).make_sums("test")
    catalog = Catalog.open(path)  # what is damaged does not keep it from being opened
    assert sum(row[-1] for row in (await catalog.read(held))["devices"]) > 2 * LARGE
    await catalog.close()


def test_a_name_that_is_taken_keeps_a_catalog_from_being_brought_up_to_date(
    tmp_path: Path,
) -> None:
    path = formatted(tmp_path)
    connection = make_earlier(path, version=2)
    connection.execute("INSERT INTO names VALUES (99, 1, x'2e66706673', 77, 8)")
    connection.close()
    before = shape(path)
    with pytest.raises(CatalogError, match=r"there is a file or directory \.fpfs") as refused:
        Catalog.open(path)
    assert "rename" in refused.value.remedy
    assert shape(path) == before


@pytest.mark.parametrize(
    ("size", "damage"),
    [
        (10, "UPDATE inline SET content = CAST('y' || substr(content, 2) AS BLOB)"),
        (10, "UPDATE inline SET crc = crc + 1"),
        (LARGE, "UPDATE segments SET blob = CAST('y' || substr(blob, 2) AS BLOB)"),
        (LARGE, "UPDATE segments SET segment = segment + 1"),
        (LARGE, "UPDATE segments SET ino = 1"),
    ],
)
@trio.testing.trio_test
async def test_damaged_rows_are_not_followed(size: int, damage: str, tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"x" * size)
        await mount.commit.flush_all()
        inode = await mount.resolve("file")
        await mount.catalog.write(lambda t: t.execute(damage).rowcount)
        ino = 1 if damage.endswith("ino = 1") else inode.ino
        with pytest.raises(DamagedData, match=f"of inode {ino} fails its checksum"):
            await mount.catalog.read(lambda t: fetch_content(t, ino))


@trio.testing.trio_test
async def test_a_damaged_object_row_keeps_the_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", bytes(LARGE))
        await mount.write_file("other", b"o" * LARGE)
        await mount.commit.flush_all()
        inode = await mount.resolve("file")
        other = await mount.resolve("other")
        # Its rows now claim the other file's objects.
        await mount.catalog.write(
            lambda t: (
                t.execute(
                    "UPDATE objects SET ino = CASE ino WHEN ? THEN ? ELSE ? END",
                    (inode.ino, other.ino, inode.ino),
                ).rowcount
            )
        )
        await mount.namespace.entries.unlink(1, b"file")
        mount.namespace.forget(inode.ino, 1)
        await mount.commit.flush_all()
        assert await mount.read_file("other") == b"o" * LARGE
        assert "is damaged: left" in caplog.text
