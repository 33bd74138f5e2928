"""A file on the simulated disk: which of the operations on their way to it are there after a cut.

`tests.crash.power.disk` has the model; the grain of everything here is the sector.

Concurrency: none.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Sequence

from tests.crash.power.recording import Kind, Operation

SECTOR_BYTES = 512
_PUNCH_HOLE = 0x03
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""


class Style(enum.Enum):
    """Which of the uncertain operations on one file, or on the names of a device, are there."""

    NONE = "none"
    ALL = "all"
    PREFIX = "prefix"
    """Those before some moment."""
    ANY = "any"
    """Any of them, whole."""
    TORN = "torn"
    """Any sectors of any of them."""


class Pending:
    """An operation on its way to the disk."""

    __slots__ = ("certain", "operation")

    def __init__(self, operation: Operation) -> None:
        """It has begun."""
        self.operation = operation
        self.certain = False


class Content:
    """Bytes with zeros behind them, up to a size."""

    def __init__(self, data: bytes | bytearray = b"", size: int = 0) -> None:
        """Take a copy."""
        self.data = bytearray(data)
        self.size = size

    def put(self, offset: int, data: memoryview | bytes) -> None:
        """Write, without a change of the size."""
        missing = offset - len(self.data)
        if missing > 0:
            self.data.extend(bytes(missing))
        self.data[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        """Truncate."""
        del self.data[size:]
        self.size = size

    def zero(self, offset: int, count: int) -> None:
        """Punch a hole."""
        end = min(offset + count, len(self.data))
        if end > offset:
            self.data[offset:end] = bytes(end - offset)


class File:
    """A file: what is certainly on the disk, and what may be."""

    def __init__(self) -> None:
        """An empty file."""
        self.base = Content()
        self.pending: list[Pending] = []

    def fold(self) -> None:
        """Make what is certain, and has nothing uncertain before it, part of the base."""
        done = 0
        while done < len(self.pending) and self.pending[done].certain:
            _apply(self.base, self.pending[done].operation)
            done += 1
        del self.pending[:done]


def _size_after(operation: Operation, size: int) -> int:
    """The size of a file after an operation."""
    if operation.kind is Kind.TRUNCATE:
        return operation.offset
    if operation.kind is Kind.ALLOCATE and operation.mode == _PUNCH_HOLE:
        return size
    return max(size, operation.offset + _length(operation))


def _length(operation: Operation) -> int:
    """Bytes that a write or an allocation is about; a short write's are those written."""
    if operation.kind is Kind.WRITE and operation.end and not operation.failed:
        return operation.result
    return operation.count


def _apply(content: Content, operation: Operation) -> None:
    """Do all of an operation."""
    if operation.kind is Kind.TRUNCATE:
        content.resize(operation.offset)
        return
    if operation.kind is Kind.WRITE:
        content.put(operation.offset, operation.data[: _length(operation)])
    elif operation.mode == _PUNCH_HOLE:
        content.zero(operation.offset, operation.count)
    content.size = _size_after(operation, content.size)


def _sectors(operation: Operation) -> range:
    """The sectors that an operation changes the bytes of."""
    is_punch = operation.kind is Kind.ALLOCATE and operation.mode == _PUNCH_HOLE
    if operation.kind is not Kind.WRITE and not is_punch:
        return range(0)
    end = operation.offset + _length(operation)
    return range(operation.offset // SECTOR_BYTES, -(-end // SECTOR_BYTES))


def _apply_sector(content: Content, operation: Operation, sector: int) -> None:
    """Do the part of an operation that lies in one sector."""
    start = max(sector * SECTOR_BYTES, operation.offset)
    end = min((sector + 1) * SECTOR_BYTES, operation.offset + _length(operation))
    if operation.kind is Kind.WRITE:
        content.put(start, operation.data[start - operation.offset : end - operation.offset])
    else:
        content.zero(start, end - start)


class Tally:
    """What cuts did to uncertain operations, for the report."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.counts: Counter[str] = Counter()

    def note(self, present: Sequence[float]) -> None:
        """Count operations of one file: 1 is there, 0 is missing, between is torn."""
        missing_before = False
        for share in present:
            if share == 0:
                self.counts["dropped"] += 1
                missing_before = True
            else:
                self.counts["torn" if share < 1 else "kept"] += 1
                self.counts["reordered"] += missing_before


def resolve(file: File, *, style: Style, chance: random.Random, tally: Tally) -> Content:
    """One of the contents that a file may have after the cut."""
    content = Content(file.base.data, file.base.size)
    operations = [pending.operation for pending in file.pending]
    if not operations:
        return content
    certain = [pending.certain for pending in file.pending]
    chosen = _choose(operations, certain, style=style, chance=chance)
    sized = _choose_size(certain, chosen, style=style, chance=chance)
    tally.note(
        [_share(operation, sectors) for operation, sectors in zip(operations, chosen, strict=True)]
    )
    _apply_chosen(content, operations, chosen, sized)
    return content


Chosen = Sequence["frozenset[int] | range"]
"""The sectors of each operation that are there."""


def _share(operation: Operation, sectors: frozenset[int] | range) -> float:
    whole = _sectors(operation)
    return len(sectors) / len(whole) if whole else 1.0


def _choose(
    operations: Sequence[Operation],
    certain: Sequence[bool],
    *,
    style: Style,
    chance: random.Random,
) -> Chosen:
    """Which sectors of each operation are there, for their own part."""
    nothing: frozenset[int] = frozenset()
    kept = chance.randint(0, len(operations)) if style is Style.PREFIX else 0
    likely = chance.random()
    chosen: list[frozenset[int] | range] = []
    for number, operation in enumerate(operations):
        sectors = _sectors(operation)
        is_whole = certain[number] or style is Style.ALL
        is_whole = is_whole or (style is Style.PREFIX and number < kept)
        is_whole = is_whole or (style is Style.ANY and chance.random() < likely)
        if is_whole:
            chosen.append(sectors)
        elif style is Style.TORN or (style is Style.PREFIX and number == kept):
            chosen.append(_torn(sectors, chance))
        else:
            chosen.append(nothing)
    return chosen


def _torn(sectors: range, chance: random.Random) -> frozenset[int] | range:
    """Some of the sectors: the first ones, the last ones, or any."""
    if not sectors:
        return sectors
    place = chance.choice(sectors)
    match chance.randrange(4):
        case 0:
            return range(sectors.start, place)
        case 1:
            return range(place, sectors.stop)
        case 2:
            return sectors if chance.random() < 0.5 else frozenset()
    likely = chance.random()
    return frozenset(sector for sector in sectors if chance.random() < likely)


def _choose_size(
    certain: Sequence[bool], chosen: Chosen, *, style: Style, chance: random.Random
) -> int:
    """How many of the operations have had their effect on the size."""
    least = max((number + 1 for number, is_certain in enumerate(certain) if is_certain), default=0)
    if style is Style.NONE:
        return least
    if style is Style.ALL:
        return len(certain)
    if chance.random() < 0.5:
        present = max((number + 1 for number, sectors in enumerate(chosen) if sectors), default=0)
        return max(least, present)
    return chance.randint(least, len(certain))


def _apply_chosen(
    content: Content, operations: Sequence[Operation], chosen: Chosen, sized: int
) -> None:
    """Do what was chosen, between one truncation that is there and the next."""
    size = content.size
    first = 0
    limit: int | None = None
    for number, operation in enumerate(operations):
        if number < sized:
            size = _size_after(operation, size)
        if operation.kind is not Kind.TRUNCATE:
            continue
        _apply_between(content, operations, chosen, range(first, number), limit)
        first = number + 1
        if number < sized:
            content.resize(operation.offset)
        elif limit is None or operation.offset < limit:
            # The size on the disk is an older one: nothing behind this one was written since.
            limit = operation.offset
    _apply_between(content, operations, chosen, range(first, len(operations)), limit)
    del content.data[size:]
    content.size = size


def _apply_between(
    content: Content,
    operations: Sequence[Operation],
    chosen: Chosen,
    numbers: range,
    limit: int | None,
) -> None:
    """Bring each sector to its moment: with a write everything before it in the same sector."""
    last: dict[int, int] = {}
    for number in numbers:
        last.update(dict.fromkeys(chosen[number], number))
    for number in numbers:
        operation = operations[number]
        sectors = _sectors(operation)
        if limit is None and len(chosen[number]) == len(sectors):
            if sectors:
                size = content.size
                _apply(content, operation)
                content.size = size
            continue
        for sector in sectors:
            below = limit is None or (sector + 1) * SECTOR_BYTES <= limit
            if below and last.get(sector, -1) >= number:
                _apply_sector(content, operation, sector)
