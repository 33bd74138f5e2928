"""The disk that loses power: what it must keep, and that it does lose the rest.

Each test tells a disk of a few operations and collects what many power cuts leave of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tests.crash.power.disk import WRITEBACK_S, Disk, Names
from tests.crash.power.disk_file import Content
from tests.crash.power.recording import Event, Kind, Operation

TRIES = 300
OLD, NEW = b"o" * 1024, b"n" * 1024


class Told:
    """Operations on one device, told as a recording tells them. Paths are relative to it."""

    def __init__(self, device: Path) -> None:
        """Nothing has happened."""
        self.device = device
        self.events: list[Event] = []
        self.now_s = 0.0
        self._inodes = count(100)
        self.file_of: dict[str, int] = {}

    def begin(self, kind: Kind, path: str = "", **fields: object) -> Operation:
        """An operation begins."""
        time_ns = int(self.now_s * 1e9)
        operation = Operation(kind, begin=len(self.events), file=0, time_ns=time_ns)
        operation.path = str(self.device / path) if path else str(self.device)
        for name, value in fields.items():
            setattr(operation, name, value)
        self.events.append(Event(operation, False, time_ns))
        return operation

    def end(self, operation: Operation, result: int = 0) -> None:
        """It has returned."""
        operation.end = len(self.events)
        operation.result = result
        self.events.append(Event(operation, True, int(self.now_s * 1e9)))

    def do(self, kind: Kind, path: str = "", **fields: object) -> None:
        """An operation from begin to end."""
        self.end(self.begin(kind, path, **fields))

    def create(self, path: str) -> None:
        """A new file."""
        self.file_of[path] = next(self._inodes)
        operation = self.begin(Kind.CREATE, path)
        operation.file = self.file_of[path]
        self.end(operation, 3)

    def begin_write(self, path: str, data: bytes, offset: int = 0, mode: int = 0) -> Operation:
        """A write begins."""
        return self.begin(
            Kind.WRITE, path, file=self.file_of[path], offset=offset, count=len(data),
            data=memoryview(data), mode=mode,
        )  # fmt: skip

    def write(self, path: str, data: bytes, offset: int = 0) -> None:
        """A whole write."""
        self.end(self.begin_write(path, data, offset), len(data))

    def truncate(self, path: str, size: int) -> None:
        """A change of size."""
        self.do(Kind.TRUNCATE, path, file=self.file_of[path], offset=size)

    def sync(self, path: str) -> None:
        """fsync of a file."""
        self.do(Kind.SYNC_FILE, path, file=self.file_of[path])

    def sync_folder(self, path: str = "") -> None:
        """fsync of a folder."""
        self.do(Kind.SYNC_FOLDER, path)


@pytest.fixture
def told() -> Told:
    """A device with a file that is safe, and whose content is OLD."""
    told = Told(Path("/device"))
    told.create("file")
    told.write("file", OLD)
    told.sync("file")
    told.sync_folder()
    return told


Left = dict[str, bytes]


def leftovers(
    told: Told,
    *,
    order: Names = Names.POSIX,
    forgets: Callable[[Operation], bool] = lambda _: False,
) -> list[Left]:
    """What many power cuts leave, each as the contents of files by path."""
    disk = Disk([told.device], order=order, forgets=forgets)
    disk.advance(told.events)
    found = []
    for choice in range(TRIES):
        (left,) = disk.lose_power(random.Random(choice))
        found.append({path: _bytes(content) for path, content in left.items() if content})
    return found


def _bytes(content: Content) -> bytes:
    return bytes(content.data) + bytes(content.size - len(content.data))


def contents(told: Told, path: str = "file", **how: object) -> set[bytes | None]:
    """The contents that a file may have; None where it may be missing."""
    return {left.get(path) for left in leftovers(told, **how)}  # type: ignore[arg-type]


def test_what_was_flushed_is_there(told: Told) -> None:
    assert contents(told) == {OLD}


def test_what_was_not_flushed_is_there_or_not_or_torn_at_sectors(told: Told) -> None:
    told.write("file", NEW)
    half = 512
    assert contents(told) == {OLD, NEW, OLD[:half] + NEW[half:], NEW[:half] + OLD[half:]}


def test_a_flush_covers_writes_that_had_ended_when_it_began(told: Told) -> None:
    sync = told.begin(Kind.SYNC_FILE, "file", file=told.file_of["file"])
    told.write("file", NEW)
    told.end(sync)
    assert {OLD, NEW} <= contents(told)
    write = told.begin_write("file", b"x" * 1024)
    told.sync("file")
    told.end(write, 1024)
    assert {NEW, b"x" * 1024} <= contents(told)
    assert OLD not in contents(told)


def test_a_flush_that_has_not_ended_or_failed_covers_nothing(told: Told) -> None:
    told.write("file", NEW)
    sync = told.begin(Kind.SYNC_FILE, "file", file=told.file_of["file"])
    assert OLD in contents(told)
    told.end(sync, -5)
    assert OLD in contents(told)


def test_a_flush_of_another_file_covers_nothing(told: Told) -> None:
    told.create("other")
    told.write("file", NEW)
    told.sync("other")
    assert OLD in contents(told)


def test_a_synchronous_write_is_there_when_it_has_ended(told: Told) -> None:
    write = told.begin_write("file", NEW, mode=1)
    assert OLD in contents(told)
    told.end(write, len(NEW))
    assert contents(told) == {NEW}


def test_a_write_that_fails_may_have_come_far(told: Told) -> None:
    told.end(told.begin_write("file", NEW), -5)
    told.sync("file")
    assert {OLD, NEW} <= contents(told)


def test_of_a_short_write_only_the_beginning_was_written(told: Told) -> None:
    told.end(told.begin_write("file", NEW), 512)
    told.sync("file")
    assert contents(told) == {NEW[:512] + OLD[512:]}


def test_writes_are_reordered_but_not_within_a_sector(told: Told) -> None:
    told.write("file", b"a" * 100)
    told.write("file", b"b" * 100, offset=50)
    told.write("file", b"c" * 100, offset=600)
    found = contents(told)
    first, second, third = b"a" * 100 + OLD[100:], b"a" * 50 + b"b" * 100 + OLD[150:], b"c" * 100
    starts = [OLD[:512], first[:512], second[:512]]
    ends = [OLD[512:], OLD[:88] + third + OLD[:324]]
    assert found == {start + end for start in starts for end in ends}


def test_sizes_come_without_data_and_data_without_sizes(told: Told) -> None:
    told.write("file", NEW, offset=1024)
    found = contents(told)
    assert {OLD, OLD + NEW, OLD + bytes(1024)} <= found
    assert {len(content or b"") for content in found} == {1024, 2048}


def test_bytes_cut_off_come_back_only_with_their_size(told: Told) -> None:
    told.truncate("file", 0)
    told.write("file", NEW[:512])
    found = contents(told)
    assert {OLD, b"", NEW[:512], bytes(512)} <= found
    assert found <= {OLD, NEW[:512] + OLD[512:], b"", NEW[:512], bytes(512)}
    told.sync("file")
    assert contents(told) == {NEW[:512]}


def test_a_hole_is_there_or_not(told: Told) -> None:
    hole = {"offset": 0, "count": 512, "mode": 3}
    told.do(Kind.ALLOCATE, "file", file=told.file_of["file"], **hole)
    assert contents(told) == {OLD, bytes(512) + OLD[512:]}


def test_a_new_name_needs_a_flush_of_its_folder(told: Told) -> None:
    told.create("new")
    told.write("new", NEW)
    told.sync("new")
    assert contents(told, "new") == {None, NEW}
    told.sync_folder()
    assert contents(told, "new") == {NEW}


def test_a_name_in_a_folder_is_reached_with_the_folder_alone(told: Told) -> None:
    told.do(Kind.MAKE_FOLDER, "sub")
    told.do(Kind.MAKE_FOLDER, "sub/deep")
    told.create("sub/deep/new")
    told.sync_folder("sub")
    told.sync_folder("sub/deep")
    assert contents(told, "sub/deep/new") == {None, b""}
    told.sync_folder()
    assert contents(told, "sub/deep/new") == {b""}


def test_a_rename_happens_to_both_names_or_to_none(told: Told) -> None:
    told.create("new")
    told.write("new", NEW)
    told.sync("new")
    told.sync_folder()
    told.do(Kind.RENAME, "new", other=str(told.device / "file"))
    found = leftovers(told)
    assert {"file": OLD, "new": NEW} in found
    assert {"file": NEW} in found
    assert len({tuple(left.items()) for left in found}) == 2


def test_a_removal_may_be_undone_until_its_folder_is_flushed(told: Told) -> None:
    told.do(Kind.REMOVE, "file")
    assert contents(told) == {None, OLD}
    told.sync_folder()
    assert contents(told) == {None}


@pytest.mark.parametrize(("order", "may_differ"), [(Names.POSIX, True), (Names.ORDERED, False)])
def test_names_keep_their_order_where_the_filesystem_says_so(
    told: Told, order: Names, may_differ: bool
) -> None:
    told.create("first")
    told.create("second")
    found = [left.keys() - {"file"} for left in leftovers(told, order=order)]
    for names in (set(), {"first"}, {"first", "second"}):
        assert names in found
    assert ({"second"} in found) is may_differ


def test_changes_of_one_name_keep_their_order(told: Told) -> None:
    told.do(Kind.REMOVE, "file")
    told.create("file")
    told.write("file", NEW)
    told.sync("file")
    assert contents(told) == {OLD, None, NEW}


def test_everything_is_written_back_in_the_end(told: Told) -> None:
    told.write("file", NEW)
    told.now_s += WRITEBACK_S + 1
    told.create("new")
    assert contents(told) == {NEW}
    assert contents(told, "new") == {None, b""}


def test_flushes_can_be_forgotten(told: Told) -> None:
    told.write("file", NEW)
    told.sync("file")
    assert contents(told) == {NEW}
    assert OLD in contents(told, forgets=lambda sync: sync.kind is Kind.SYNC_FILE)
