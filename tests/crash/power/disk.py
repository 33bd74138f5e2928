"""A disk that loses power: from recorded operations to what may be found on it afterwards.

The model. POSIX says little of what a crash may leave; papers that looked at real filesystems
(ALICE, Pillai et al., OSDI 2014; FERRITE, Bornholt et al., ASPLOS 2016; CrashMonkey, Mohan et al.,
OSDI 2018) show how much of it does happen. The disk here does all of it:

  * What was written to a file is *certain* when a flush of that file (fsync, fdatasync, one of the
    ring's) that began after the write had ended has itself ended before the cut, or when the write
    was a synchronous one and has ended. So is a change of the file's size.
  * Every other write that has begun may be there, be missing, or be there in part, at the grain of
    sectors of 512 bytes, independently of all others and in any order. A sector holds what some
    moment's page cache held: with one write, everything that was written to this sector before.
  * The size of a file is one that it had at some moment since the last certain change, whatever
    of the data is there. What was never written below it reads as zeros: no filesystem of today
    shows what others left on the disk.
  * What lies behind a size that is on the disk is gone: bytes cut off by a truncation come back
    only with the size that they had.
  * A name (create, link, rename, remove, mkdir, rmdir) is certain when a flush of its folder that
    began after it had ended has ended before the cut. Flushing a file does nothing for its name.
  * Every other change of a name may be there or be missing. Changes of one name keep their order;
    a rename happens to both names or to none. Of different names, POSIX promises no order
    (`Names.POSIX`); ext4, XFS and btrfs keep the order of all of them (`Names.ORDERED`; D. Chinner,
    "Re: metadata operation reordering regards to crash", linux-fsdevel, 14 September 2018).
  * A name whose folder is not there is not there either.
  * The kernel and the disk write everything back in the end: what ended more than `WRITEBACK_S`
    before the cut is certain. (A bound for the size of images. What relies on it is found, as long
    as it happens within that time.)

What the disk does not do: turn bits, lose what was flushed, write to a wrong place, leave a sector
torn. Those are other tests' business.

Concurrency: one thread.
"""

from __future__ import annotations

import enum
import os
import random
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.crash.power.disk_file import Content, File, Pending, Style, Tally, resolve
from tests.crash.power.recording import Event, Kind, Operation

WRITEBACK_S = 3.0

_NAMES = frozenset(
    {Kind.CREATE, Kind.MAKE_FOLDER, Kind.LINK, Kind.RENAME, Kind.REMOVE, Kind.REMOVE_FOLDER}
)
_CONTENTS = frozenset({Kind.WRITE, Kind.TRUNCATE, Kind.ALLOCATE})
_SYNCS = frozenset({Kind.SYNC_FILE, Kind.SYNC_FOLDER})


class Names(enum.StrEnum):
    """What the filesystem keeps of the order of changes of different names."""

    POSIX = "posix"
    ORDERED = "ordered"


Tree = dict[str, "File | None"]
"""Files by path; None is a folder."""


class FolderNames:
    """The names on one device: what is certainly on the disk, and what may be."""

    def __init__(self, root: str) -> None:
        """An empty device directory."""
        self.root = root
        self.base: Tree = {root: None}
        self.pending: list[Pending] = []
        self.created: dict[Operation, File] = {}
        """The file that each creation made."""

    def fold(self) -> None:
        """Make what is certain, and has nothing uncertain before it, part of the base."""
        done = 0
        while done < len(self.pending) and self.pending[done].certain:
            operation = self.pending[done].operation
            self.apply(self.base, operation)
            self.created.pop(operation, None)
            done += 1
        del self.pending[:done]

    def apply(self, tree: Tree, operation: Operation) -> None:
        """Do an operation."""
        match operation.kind:
            case Kind.CREATE:
                tree[operation.path] = self.created.get(operation) or File()
            case Kind.MAKE_FOLDER:
                tree[operation.path] = None
            case Kind.LINK:
                tree[operation.other] = tree[operation.path]
            case Kind.RENAME:
                tree[operation.other] = tree.pop(operation.path)
            case Kind.REMOVE | Kind.REMOVE_FOLDER:
                tree.pop(operation.path, None)

    def resolve(self, *, style: Style, order: Names, chance: random.Random, tally: Tally) -> Tree:
        """One of the sets of names that may be there after the cut."""
        tree = dict(self.base)
        present = self._choose(style=style, order=order, chance=chance)
        tally.note([float(is_present) for is_present in present])
        for pending, is_present in zip(self.pending, present, strict=True):
            if is_present:
                self.apply(tree, pending.operation)
        return tree

    def _choose(self, *, style: Style, order: Names, chance: random.Random) -> list[bool]:
        count = len(self.pending)
        least = max((n + 1 for n, pending in enumerate(self.pending) if pending.certain), default=0)
        if order is Names.ORDERED:
            kept = {Style.NONE: least, Style.ALL: count}.get(style, chance.randint(least, count))
            return [number < kept for number in range(count)]
        kept = chance.randint(0, count) if style is Style.PREFIX else 0
        likely = chance.random()
        held: set[str] = set()
        present = []
        for number, pending in enumerate(self.pending):
            is_wanted = pending.certain or style is Style.ALL
            is_wanted = is_wanted or (style is Style.PREFIX and number < kept)
            is_wanted = is_wanted or (style in (Style.ANY, Style.TORN) and chance.random() < likely)
            keys = _keys(pending.operation)
            is_present = pending.certain or (is_wanted and held.isdisjoint(keys))
            if not is_present:
                held.update(keys)
            present.append(is_present)
        return present


def _keys(operation: Operation) -> set[str]:
    """The names that an operation changes."""
    if operation.kind is Kind.RENAME:
        return {operation.path, operation.other}
    return {operation.other if operation.kind is Kind.LINK else operation.path}


class Disk:
    """The devices, brought from event to event; `lose_power` tells what may be left of them.

    `forgets` says which flushes the disk is to take no notice of: the test of the test.
    """

    def __init__(
        self,
        folders: Iterable[Path],
        *,
        order: Names = Names.POSIX,
        forgets: Callable[[Operation], bool] = lambda _: False,
        tally: Tally | None = None,
    ) -> None:
        """Empty device directories."""
        self.names = [FolderNames(os.path.realpath(folder)) for folder in folders]
        self.tally = tally or Tally()
        self._order = order
        self._forgets = forgets
        self._files: dict[int, File] = {}
        """By inode number, which is used again when its file is gone."""
        self._covered: dict[Operation, list[Pending]] = {}
        self._open: dict[Operation, tuple[Pending, File | FolderNames]] = {}
        self._ended: deque[tuple[int, Pending, File | FolderNames]] = deque()
        self._now_ns = 0

    def advance(self, events: Iterable[Event]) -> None:
        """Let events happen."""
        for event in events:
            self._now_ns = event.time_ns
            operation = event.operation
            if event.is_end:
                self._end(operation, event.time_ns)
            elif operation.kind in _SYNCS:
                self._covered[operation] = self._covers(operation)
            elif operation.kind in _NAMES:
                self._begin(operation, self._device(operation.path))
            elif operation.kind in _CONTENTS:
                self._begin(operation, self._files.setdefault(operation.file, File()))
        self._write_back()

    def _device(self, path: str) -> FolderNames:
        for names in self.names:
            if path == names.root or path.startswith(names.root + "/"):
                return names
        raise AssertionError(f"{path} is on no recorded device")

    def _begin(self, operation: Operation, where: File | FolderNames) -> None:
        pending = Pending(operation)
        where.pending.append(pending)
        self._open[operation] = (pending, where)

    def _end(self, operation: Operation, time_ns: int) -> None:
        if operation.kind in _SYNCS:
            self._flushed(operation)
            return
        if operation not in self._open:
            return  # a mark
        pending, where = self._open.pop(operation)
        if operation.kind is Kind.CREATE and not operation.failed:
            assert isinstance(where, FolderNames)
            file = self._files[operation.file] = File()
            where.created[operation] = file
        if operation.failed and operation.kind is not Kind.WRITE:
            where.pending.remove(pending)
            return
        if not operation.failed:
            self._ended.append((time_ns, pending, where))
        if operation.kind is Kind.WRITE and operation.mode and not operation.failed:
            pending.certain = True
            where.fold()

    def _covers(self, sync: Operation) -> list[Pending]:
        """What a flush that begins now makes certain when it ends."""
        if sync.kind is Kind.SYNC_FILE:
            pending = self._files[sync.file].pending if sync.file in self._files else []
        else:
            pending = [
                pending
                for pending in self._device(sync.path).pending
                if any(os.path.dirname(key) == sync.path for key in _keys(pending.operation))
            ]
        return [p for p in pending if p.operation not in self._open and not p.operation.failed]

    def _flushed(self, sync: Operation) -> None:
        covered = self._covered.pop(sync)
        if sync.failed or self._forgets(sync):
            return
        for pending in covered:
            pending.certain = True
        if sync.kind is Kind.SYNC_FOLDER:
            self._device(sync.path).fold()
        elif sync.file in self._files:
            self._files[sync.file].fold()

    def _write_back(self) -> None:
        """Make certain what ended long ago."""
        limit_ns = self._now_ns - int(WRITEBACK_S * 1e9)
        touched: set[File | FolderNames] = set()
        while self._ended and self._ended[0][0] < limit_ns:
            _, pending, where = self._ended.popleft()
            if not pending.certain:
                pending.certain = True
                touched.add(where)
        for where in touched:
            where.fold()

    def lose_power(self, chance: random.Random, *, style: Style | None = None) -> list[Left]:
        """What may be left of each device.

        Without a `style`, half of the time each file and device gets its own.
        """
        whole = style or chance.choice([*Style, None, None, None, None, None])
        contents: dict[File, Content] = {}
        return [self._leave(names, whole, contents, chance) for names in self.names]

    def _leave(
        self,
        names: FolderNames,
        whole: Style | None,
        contents: dict[File, Content],
        chance: random.Random,
    ) -> Left:
        style = whole or chance.choice(list(Style))
        tree = names.resolve(style=style, order=self._order, chance=chance, tally=self.tally)
        left: Left = {}
        for path in sorted(tree):
            relative = os.path.relpath(path, names.root)
            parent = os.path.dirname(relative)
            node = tree[path]
            is_reached = not parent or left.get(parent, Content()) is None
            if path == names.root or not is_reached:
                continue
            if node is not None and node not in contents:
                style = whole or chance.choice(list(Style))
                contents[node] = resolve(node, style=style, chance=chance, tally=self.tally)
            left[relative] = None if node is None else contents[node]
        return left


Left = dict[str, "Content | None"]
"""What is on a device, by path from its directory, folders before what is in them: None."""


def write_image(left: Left, image: Path) -> None:
    """Make an empty folder into what is left of a device."""
    written: dict[int, Path] = {}
    for relative, content in left.items():
        path = image / relative
        if content is None:
            path.mkdir()
        elif id(content) in written:
            os.link(written[id(content)], path)
        else:
            with path.open("xb") as file:
                file.write(content.data)
                file.truncate(content.size)
            written[id(content)] = path
