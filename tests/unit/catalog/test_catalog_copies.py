"""The catalog on two devices: damage to either copy, crashes, and copies that fail in use.

The states that are damaged are what a crash leaves at different moments (`states`). By default a
few hundred damages are tried; FPFS_DAMAGES=10000 tries as many.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from fpfs.core.engine import CatalogFiles
from fpfs.core.errors import CatalogBusy, CatalogError, CatalogMissing, EntryExists
from fpfs.daemon.catalog.database import Catalog, RootOwner, Transaction
from fpfs.daemon.catalog.reserve import RESERVE_BYTES
from fpfs.daemon.catalog.rows.attributes import store_xattr
from fpfs.daemon.catalog.schema import FORMAT_VERSION
from fpfs.daemon.offline.image import take_image
from tests.support.catalog.catalogs import (
    FILES,
    FILESYSTEM_ID,
    LATE,
    Damage,
    State,
    change,
    copy_state,
    make_catalog,
    make_earlier,
    make_names,
    name_plane,
    open_catalog,
    paths_of,
    random_damage,
    tables,
)
from tests.support.seeds import IS_LONG

DAMAGES = int(os.environ.get("FPFS_DAMAGES", "400" if IS_LONG else "200"))
DAMAGES_A_TEST = 20
HANG_S = 60.0
NEW = (200_000, 200_003)
"""Numbers of names that no state has: how many one has, depends on how busy the machine is."""


async def _record(catalog: Catalog, folder: Path, destination: Path, *, late: range) -> State:
    """Make everything durable, go on a little, and keep what a crash would leave now."""
    await catalog.make_durable()
    durable = await catalog.read(name_plane)
    await make_names(catalog, late, prefix=LATE)
    copy_state(folder, destination)
    return State(destination, durable, await catalog.read(name_plane))


async def _record_before_checkpoint(
    catalog: Catalog, live: Path, folder: Path, *, first: int
) -> tuple[State, int]:
    """Keep a state with so much in the logs that a checkpoint follows; and how many were before.

    On a busy machine one may come while that is made, and then none would follow: so once more.
    """
    while True:
        checkpoints = catalog.statistics().checkpoints
        await make_names(catalog, range(first, first + 340))
        first += 340
        destination = folder / f"before a checkpoint {first}"
        state = await _record(catalog, live, destination, late=range(0))
        if catalog.statistics().checkpoints == checkpoints:
            return state, checkpoints


def _half_copied(before: Path, after: Path, destination: Path) -> None:
    """Join two states as a crash in the middle of a checkpoint does: any page may be new."""
    shutil.copytree(before, destination)
    random_numbers = random.Random(1)
    for device in "ab":
        shutil.copy(after / device / "catalog.sums", destination / device)
        path = destination / device / "catalog.db"
        old, new = path.read_bytes(), (after / device / "catalog.db").read_bytes()
        pages = []
        for at in range(0, len(new), 4096):
            is_new = at >= len(old) or random_numbers.random() < 0.5
            pages.append((new if is_new else old)[at : at + 4096])
        path.write_bytes(b"".join(pages))


async def _make_states(folder: Path) -> list[State]:
    live = folder / "live"
    catalog = make_catalog(live)
    await make_names(catalog, range(60))
    states = [await _record(catalog, live, folder / "first logs", late=range(4))]
    before, checkpoints = await _record_before_checkpoint(catalog, live, folder, first=60)
    with trio.fail_after(30):
        while catalog.statistics().checkpoints == checkpoints:  # noqa: ASYNC110
            await trio.sleep(0.01)
    await catalog.make_durable()
    states += [before, await _record(catalog, live, folder / "after a checkpoint", late=range(0))]
    _half_copied(before.folder, states[-1].folder, folder / "in a checkpoint")
    states.append(before._replace(folder=folder / "in a checkpoint"))
    await make_names(catalog, range(100_000, 100_020))  # there were others, perhaps many times
    states.append(await _record(catalog, live, folder / "new logs", late=range(4, 7)))
    await catalog.close()
    copy_state(live, folder / "ended")
    states.append(states[-1]._replace(folder=folder / "ended", durable=states[-1].answered))
    return states


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """What crashes at different moments left. Not to be changed."""
    return trio.run(_make_states, tmp_path_factory.mktemp("states"))


def _durable_part(plane: dict[bytes, tuple[object, ...]]) -> dict[bytes, tuple[object, ...]]:
    return {name: entry for name, entry in plane.items() if not name.startswith(LATE)}


async def _check_opens(folder: Path, state: State) -> dict[bytes, tuple[object, ...]]:
    """Mount, compare with what was durable, end; afterwards both copies are sound and equal."""
    catalog = open_catalog(folder)
    plane = await catalog.read(name_plane)
    assert _durable_part(plane) == _durable_part(state.durable)
    assert all(state.answered[name] == entry for name, entry in plane.items())
    assert not any(status.trouble for status in catalog.copies())
    await make_names(catalog, range(*NEW))
    await catalog.close()
    _check_equal(folder)
    return plane


def _check_equal(folder: Path) -> None:
    first, second = paths_of(folder)
    for path in (first, second):
        CatalogFiles(str(path)).check()
    assert first.read_bytes() == second.read_bytes()
    assert tables(first) == tables(second)
    assert not list(folder.glob("*/catalog.alone"))
    assert not any(path.with_name("catalog.db-wal").exists() for path in (first, second))


@trio.testing.trio_test
async def test_states_open_as_they_are(states: list[State], tmp_path: Path) -> None:
    for number, state in enumerate(states):
        folder = tmp_path / str(number)
        shutil.copytree(state.folder, folder)
        plane = await _check_opens(folder, state)
        assert plane == state.answered, "the leader's log holds all that was answered"


@pytest.mark.parametrize("first", range(0, DAMAGES, DAMAGES_A_TEST))
@trio.testing.trio_test
async def test_damage_to_one_copy_loses_nothing(
    first: int, states: list[State], tmp_path: Path
) -> None:
    for seed in range(first, first + DAMAGES_A_TEST):
        state = states[seed % len(states)]
        damage = random_damage(seed)
        print(f"{state.folder.name}: {damage}")
        folder = tmp_path / str(seed)
        shutil.copytree(state.folder, folder)
        damage.apply(folder)
        plane = await _check_opens(folder, state)
        if damage.device == "b":
            assert plane == state.answered
        shutil.rmtree(folder)


@pytest.mark.parametrize("device", ["a", "b"])
@trio.testing.trio_test
async def test_a_copy_that_is_gone_is_made_anew_and_told_of(
    device: str, states: list[State], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, state in enumerate(states):
        folder = tmp_path / str(number)
        shutil.copytree(state.folder, folder)
        for name in FILES:
            (folder / device / name).unlink(missing_ok=True)
        caplog.clear()
        await _check_opens(folder, state)
        other = "b" if device == "a" else "a"
        assert (
            f"catalog {folder}/{device}/catalog.db was made anew from {folder}/{other}/catalog.db:"
            " it is missing"
        ) in caplog.messages


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("seed", range(12))
def test_both_damaged_are_refused_and_left_alone(
    seed: int, states: list[State], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(states[-1].folder, folder)
    for device in "ab":
        Damage(device, FILES[0 if seed % 2 else 2], "flip", seed + ord(device)).apply(folder)
    before = _contents(folder)
    with pytest.raises(
        CatalogError, match=r"a/catalog\.db cannot be used: .*b/catalog\.db cannot"
    ) as r:
        open_catalog(folder)
    assert "put back catalog.db and catalog.sums of one device from a backup" in r.value.remedy
    assert _contents(folder) == before


def test_both_missing_are_refused(states: list[State], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(states[-1].folder, folder)
    for path in paths_of(folder):
        path.unlink()
    with pytest.raises(CatalogMissing, match=r"no catalog at .*a/catalog\.db nor at .*b/catalog"):
        open_catalog(folder)


@trio.testing.trio_test
async def test_one_device_tells_damage_too(states: list[State], tmp_path: Path) -> None:
    path = tmp_path / "a" / "catalog.db"
    refused = 0
    for seed in range(60):
        shutil.copytree(states[seed % len(states)].folder / "a", path.parent)
        damage = random_damage(seed, device="a")
        damage.apply(tmp_path)
        try:
            catalog = Catalog.open(path, filesystem_id=FILESYSTEM_ID)
        except (CatalogMissing, CatalogError):
            refused += 1
        else:
            # Names that were taken back with the log's end, but none that are wrong.
            plane = await catalog.read(name_plane)
            answered = states[seed % len(states)].answered
            known = {name: entry for name, entry in plane.items() if name in answered}
            assert damage.file == "catalog.db-wal" or plane == answered
            assert len(known) >= len(plane) - 60
            await catalog.close()
        shutil.rmtree(path.parent)
    assert refused > 20


@trio.testing.trio_test
async def test_the_newer_copy_wins(states: list[State], tmp_path: Path) -> None:
    """Copies of different moments, both sound: the older one follows."""
    older, newer = states[0], states[-1]
    for device in "ab":
        folder = tmp_path / device
        shutil.copytree(newer.folder, folder)
        shutil.rmtree(folder / device)
        shutil.copytree(older.folder / device, folder / device)
        plane = await _check_opens(folder, newer)
        assert plane == newer.answered


@trio.testing.trio_test
async def test_a_copy_that_went_on_alone_is_newer_whatever_its_number(tmp_path: Path) -> None:
    """The lost leader had answered more transactions than were made without it."""
    folder, hidden = tmp_path / "crashed", tmp_path / "lost"
    catalog = make_catalog(tmp_path / "live")
    await make_names(catalog, range(10))
    await catalog.make_durable()
    await make_names(catalog, range(10, 60))
    copy_state(tmp_path / "live", folder)
    await catalog.close()
    leader, follower = paths_of(folder)
    leader.parent.rename(hidden)
    catalog = Catalog.open(follower, filesystem_id=FILESYSTEM_ID, absent=[leader])
    await make_names(catalog, range(150_000, 150_003))
    await catalog.make_durable()
    plane = await catalog.read(name_plane)
    await catalog.close()
    hidden.rename(leader.parent)
    image = take_image(paths_of(folder), folder=tmp_path, filesystem_id=FILESYSTEM_ID)
    assert image is not None
    assert image.source == follower
    image.close()
    assert await _check_opens(folder, State(folder, plane, plane)) == plane


@trio.testing.trio_test
async def test_copies_that_differ_are_noticed(states: list[State], tmp_path: Path) -> None:
    """Equal numbers and different pages, which should not be: the first copy is taken."""
    folder = tmp_path / "copy"
    shutil.copytree(states[-1].folder, folder)
    path = paths_of(folder)[1]
    content = bytearray(path.read_bytes())
    content[-4096:] = bytes(4096)
    path.write_bytes(content)
    CatalogFiles(str(path)).make_sums(FILESYSTEM_ID)
    await _check_opens(folder, states[-1])


def test_a_copy_that_is_made_anew_has_no_log_of_before(states: list[State], tmp_path: Path) -> None:
    """It would be replayed into the new one, should the mount die before it begins its own."""
    folder = tmp_path / "copy"
    shutil.copytree(states[-2].folder, folder)
    first, second = (CatalogFiles(str(path)) for path in paths_of(folder))
    first.check()
    first.checkpoint_log()
    second.copy_from(first)
    again = CatalogFiles(str(paths_of(folder)[1]))
    again.check()
    again.checkpoint_log()
    assert again.count_differences(first) == 0
    _check_equal(folder)


@trio.testing.trio_test
async def test_what_a_failed_operation_had_written_does_not_reach_the_other_copy(
    tmp_path: Path,
) -> None:
    """Its pages outgrow SQLite's cache, so that they are in the log before it fails."""
    folder = tmp_path / "catalog"
    catalog = make_catalog(folder)
    await make_names(catalog, range(10))
    log = Path(f"{catalog.path}-wal")

    def grow_and_fail(transaction: Transaction) -> None:
        for number in range(400):
            _store_large(transaction, number)
        assert log.stat().st_size > 2**20
        raise EntryExists("after much was written")

    for number in range(12, 15):
        with pytest.raises(EntryExists):
            await catalog.write(grow_and_fail)
        await make_names(catalog, range(number, number + 1))
        await catalog.make_durable()
    plane = await catalog.read(name_plane)
    copy_state(folder, tmp_path / "without a")
    (tmp_path / "without a" / "a" / "catalog.db").unlink()
    await catalog.close()
    for left in (folder, tmp_path / "without a"):
        assert await _check_opens(left, State(left, plane, plane)) == plane


@trio.testing.trio_test
async def test_a_copy_of_another_filesystem_is_refused(states: list[State], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(states[-1].folder, folder)
    CatalogFiles(str(paths_of(folder)[1])).make_sums("another")
    before = _contents(folder)
    with pytest.raises(CatalogError, match=r"b/catalog\.db is of filesystem another, the stamps"):
        open_catalog(folder)
    assert _contents(folder) == before


@trio.testing.trio_test
async def test_both_copies_are_taken_for_one_process_alone(tmp_path: Path) -> None:
    catalog = make_catalog(tmp_path)
    for path in paths_of(tmp_path):
        with pytest.raises(CatalogBusy, match="in use by another process"):
            Catalog.open(path)
    await catalog.close()
    await open_catalog(tmp_path).close()


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
@trio.testing.trio_test
async def test_a_catalog_of_an_earlier_format_is_brought_to_this_one(
    version: int, tmp_path: Path
) -> None:
    folder = tmp_path / "catalog"
    catalog = make_catalog(folder)
    await make_names(catalog, range(50))
    plane = await catalog.read(name_plane)
    await catalog.close()
    first, second = paths_of(folder)
    for path in (second, second.with_name("catalog.sums")):
        path.unlink()
    make_earlier(first, version=version).close()
    if version >= 3:  # which had two copies with checksums
        CatalogFiles(str(first)).make_sums(FILESYSTEM_ID)
        for name in ("catalog.db", "catalog.sums"):
            shutil.copy(first.with_name(name), second.with_name(name))
    await _check_opens(folder, State(folder, plane, plane))
    with closing(sqlite3.connect(second)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (FORMAT_VERSION,)
        assert connection.execute("SELECT count(*) FROM requests").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM withheld").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM device_tags").fetchone() == (0,)
        assert connection.execute("SELECT DISTINCT state FROM devices").fetchall() in ([], [(0,)])
        assert connection.execute("SELECT nlink FROM inodes WHERE ino = 2").fetchone() == (5,)


@trio.testing.trio_test
async def test_a_damaged_catalog_of_an_earlier_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    Catalog.format(path, filesystem_id=FILESYSTEM_ID, devices=[], root=RootOwner(uid=0, gid=0))
    (tmp_path / "catalog.sums").unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA user_version = 2")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'names_by_name'"
        ).fetchone()
    content = bytearray(path.read_bytes())
    content[(page - 1) * 4096] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(CatalogError, match=r"catalog\.db is damaged: "):
        Catalog.open(path)


def _fail_flushes_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process's own flushes of a file fail."""
    flush = os.fdatasync

    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            raise OSError(errno.EIO, "Input/output error")
        flush(descriptor)

    monkeypatch.setattr(os, "fdatasync", fail)


@trio.testing.trio_test
async def test_a_leader_that_cannot_be_flushed_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those too that were answered after the last flush go on in the other copy."""
    folder = tmp_path / "catalog"
    catalog = make_catalog(folder)
    first, second = paths_of(folder)
    await make_names(catalog, range(10))
    await catalog.make_durable()
    await make_names(catalog, range(10, 20))
    _fail_flushes_of(Path(f"{first}-wal"), monkeypatch)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(catalog.make_durable)
        nursery.start_soon(make_names, catalog, range(20, 30))
    await catalog.make_durable()
    assert catalog.path == second
    assert [bool(status.trouble) for status in catalog.copies()] == [True, False]
    told = [line for line in caplog.messages if "is out of service" in line]
    cause = "[Errno 5] Input/output error"
    assert told == [
        f"the catalog's copy {first} is out of service ({cause}): going on with {second} alone"
    ]
    plane = await catalog.read(name_plane)
    assert sorted(plane) == sorted(b"n%06d" % number for number in range(30) if number % 5 != 4)
    copy_state(folder, tmp_path / "crashed")
    copy_state(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "b" / "catalog.db").unlink()
    await catalog.close()
    monkeypatch.undo()
    with pytest.raises(CatalogError, match="the other copy lacks what was changed") as refused:
        open_catalog(tmp_path / "damaged")
    assert "remove catalog.alone beside it" in refused.value.remedy
    for left in (folder, tmp_path / "crashed"):
        assert await _check_opens(left, State(left, plane, plane)) == plane


def _meet_an_error_of(catalog: Catalog, path: Path, transaction: Transaction) -> None:
    """Make a name; SQLite meets an error where the copy at `path` leads."""
    change(transaction, b"n000011", 11)
    _read_with_an_error_of(catalog, path, transaction)


def _read_with_an_error_of(catalog: Catalog, path: Path, _transaction: Transaction) -> None:
    if catalog.path == path:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error


@trio.testing.trio_test
async def test_a_flush_that_the_leader_fails_after_it_gave_way_is_the_new_leaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "catalog"
    catalog = make_catalog(folder)
    first, second = paths_of(folder)
    await make_names(catalog, range(10))
    flushing, gave_way = trio.Event(), threading.Event()
    flush = os.fdatasync

    def fail_late(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"{first}-wal":
            flush(descriptor)
            return
        trio.from_thread.run_sync(flushing.set)
        assert gave_way.wait(HANG_S)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail_late)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(catalog.make_durable)
        await flushing.wait()
        await catalog.write(partial(_meet_an_error_of, catalog, first))
        assert catalog.path == second
        assert not catalog.all_durable
        gave_way.set()
    await make_names(catalog, range(12, 14))
    assert not catalog.all_durable
    await catalog.make_durable()
    assert catalog.all_durable
    plane = await catalog.read(name_plane)
    kept = [*(number for number in range(10) if number % 5 != 4), 11, 12, 13]
    assert sorted(plane) == [b"n%06d" % number for number in kept]
    copy_state(folder, tmp_path / "crashed")
    await catalog.close()
    for left in (folder, tmp_path / "crashed"):
        assert await _check_opens(left, State(left, plane, plane)) == plane


@pytest.mark.parametrize("is_long", [False, True])
@trio.testing.trio_test
async def test_an_operation_that_meets_an_error_of_the_leader_is_run_on_the_other_copy(
    is_long: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "catalog"
    catalog = make_catalog(folder)
    first, second = paths_of(folder)
    await make_names(catalog, range(10))
    runs = []

    def meet_an_error(transaction: Transaction) -> None:
        change(transaction, b"n000011", 11)
        runs.append(catalog.path)
        if catalog.path == first:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    await (catalog.write_many(meet_an_error) if is_long else catalog.write(meet_an_error))
    assert (runs[0], runs[-1]) == (first, second)
    await make_names(catalog, range(12, 14))
    plane = await catalog.read(name_plane)
    kept = [*(number for number in range(10) if number % 5 != 4), 11, 12, 13]
    assert sorted(plane) == [b"n%06d" % number for number in kept]
    await catalog.close()
    assert await _check_opens(folder, State(folder, plane, plane)) == plane


@trio.testing.trio_test
async def test_what_is_asked_of_a_catalog_of_which_no_copy_is_left_gets_its_error(
    tmp_path: Path,
) -> None:
    """One of fpfs, which those who ask expect, and not SQLite's."""
    folder = tmp_path / "catalog"
    catalog = make_catalog(folder)
    first, second = paths_of(folder)
    await make_names(catalog, range(10))
    await catalog.make_durable()
    second.unlink()
    for _ in range(2):
        with pytest.raises(CatalogError) as refused:
            await catalog.read(partial(_read_with_an_error_of, catalog, first))
        assert str(refused.value).count("the catalog's device") == 1
    await catalog.close()


@trio.testing.trio_test
async def test_numbers_are_not_used_twice_after_an_operation_that_was_run_again(
    tmp_path: Path,
) -> None:
    """The first time there is no room for it, and SQLite takes back what it had stored."""
    folder = tmp_path / "catalog"
    catalog = make_catalog(folder)
    taken: list[int] = []

    def take(transaction: Transaction) -> None:
        pages = 1 if not taken else 1_000_000
        transaction.execute(f"PRAGMA max_page_count = {pages}").fetchone()
        taken.append(transaction.take_number())
        store_xattr(transaction, 1, b"user.large", bytes(60_000), ctime_ns=1)

    await catalog.write(take)
    assert len(taken) == 2
    copy_state(folder, tmp_path / "crashed")
    await catalog.close()
    catalog = open_catalog(tmp_path / "crashed")
    assert await catalog.write(lambda t: t.take_number()) > max(taken)
    await catalog.close()


@trio.testing.trio_test
async def test_numbers_are_not_used_twice_after_a_change_of_the_leader(tmp_path: Path) -> None:
    folder = tmp_path / "catalog"
    catalog = make_catalog(folder)
    first = catalog.path
    taken: list[int] = []

    def take(transaction: Transaction) -> None:
        taken.append(transaction.take_number())
        if catalog.path == first:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    for _ in range(3):
        await catalog.write(take)
    copy_state(folder, tmp_path / "crashed")
    await catalog.close()
    for left in (folder, tmp_path / "crashed"):
        catalog = open_catalog(left)
        assert await catalog.write(lambda t: t.take_number()) > max(taken)
        await catalog.close()
    assert len(set(taken)) == len(taken)


@pytest.fixture
def small_device(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A catalog's folder; the device that the test names is a filesystem of 32 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    folder = tmp_path / "catalog"
    small = folder / request.param
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", small], check=True)
    yield folder
    subprocess.run(["umount", "-l", small], check=True)


def _fill(device: Path, *, leave_pages: int) -> Path:
    """Take the space of a device; returns the file that has it."""
    filler = device / "filler"
    with filler.open("wb") as file:
        free = os.statvfs(device).f_bavail
        os.posix_fallocate(file.fileno(), 0, (free - leave_pages) * 4096)
    return filler


@pytest.mark.root
@pytest.mark.parametrize("small_device", ["a"], indirect=True)
@trio.testing.trio_test
async def test_a_log_that_cannot_be_copied_gives_way_to_the_other_copy(
    small_device: Path, states: list[State]
) -> None:
    folder, state = small_device, states[1]
    for device in "ab":
        shutil.copytree(state.folder / device, folder / device, dirs_exist_ok=True)
    _fill(folder / "a", leave_pages=0)
    catalog = open_catalog(folder)
    assert "it cannot be made: " in catalog.copies()[0].trouble
    assert await catalog.read(name_plane) == state.answered
    await make_names(catalog, range(150_000, 150_003))
    plane = await catalog.read(name_plane)
    await catalog.close()
    (folder / "a" / "filler").unlink()
    await _check_opens(folder, State(folder, plane, plane))


@pytest.mark.root
@pytest.mark.parametrize("small_device", ["b"], indirect=True)
@trio.testing.trio_test
async def test_a_full_second_device_costs_its_copy_and_nothing_else(
    small_device: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reserve is used first. With room again, the next mount makes the copy anew."""
    folder = small_device
    catalog = make_catalog(folder)
    filler = _fill(folder / "b", leave_pages=8)
    durable = 0
    while catalog.copies()[1].trouble == "":
        await catalog.write(partial(_store_large, number=durable))
        await catalog.make_durable()
        durable += 1
    assert "its reserve is in use" in caplog.text
    assert f"copy {folder}/b/catalog.db is out of service ([Errno 28]" in caplog.text
    assert durable * 65536 > RESERVE_BYTES // 2
    await catalog.write(partial(_store_large, number=durable))
    await make_names(catalog, range(20))
    plane = await catalog.read(name_plane)
    await catalog.close()
    filler.unlink()
    catalog = open_catalog(folder)
    assert [status.trouble for status in catalog.copies()] == ["", ""] or durable > 100
    assert await catalog.read(name_plane) == plane
    await catalog.close()


def _store_large(transaction: Transaction, number: int) -> None:
    store_xattr(transaction, 1, b"user.%d" % number, bytes([number % 256]) * 65536, ctime_ns=1)
