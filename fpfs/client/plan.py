"""How the bytes of one file are divided among ranks, before any is moved.

Of most tensors every rank has all bytes, of some (DTensors) each has a part, of which others may
have a replica. So bytes are sorted by who has them. Each set of ranks divides what only it has,
those of fewest ranks first, and then so that all ranks have written the same in the end. Shares are
cut at multiples of a block of the file; where all have all, they differ by one block at most.

Where parts of a tensor are many short runs in the file, ranks that can read each other's memory
write ranges of the whole instead, as if all had all of it.

Each rank makes the same plan from what it has itself, and so knows its share. The plan of 4,096
ranks for a million records has a row for each record and a number for each rank, and no list of all
shares.

What stands between two records, a text, belongs to who writes all of the record before it. If
several do, rank 0 writes the text in the end, since it holds the record's CRC32, as it does the
text before the first record and that behind the last one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from fpfs.client.boxes import Ints, Runs, Sharding, runs_of
from fpfs.client.topology import WRITERS, Topology, Writers
from fpfs.core.units import format_size


@dataclasses.dataclass(frozen=True, eq=False)
class Records:
    """Where the records of a file lie, and which of them are sharded. The same on all ranks."""

    offsets: Ints
    """Of each, in the file."""
    sizes: Ints
    """Bytes of each."""
    file_bytes: int
    shardings: tuple[Sharding, ...]
    """Those that there are."""
    sharding_of: Ints
    """Of each record its index in `shardings`; negative: every rank has all of it."""
    digest: bytes
    """Of sizes and shardings, and of the tensors' names; a state that changes has another one."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Records)
            and self.digest == other.digest
            and self.file_bytes == other.file_bytes
            and np.array_equal(self.offsets, other.offsets)
        )

    def __hash__(self) -> int:
        return hash(self.digest)


class Piece(NamedTuple):
    """Bytes of a record that lie in one piece in memory, in `count` runs of `bytes` each."""

    offset: int
    """Of the first run in the file."""
    bytes: int
    record: int
    """Its number."""
    start: int
    """Offset in the bytes of the record that the rank has."""
    count: int  # type: ignore[assignment]
    step: int
    """From the begin of one run to the begin of the next, in the file; 0: there is one."""

    @property
    def total_bytes(self) -> int:
        """Of all runs."""
        return self.count * self.bytes

    def runs(self) -> Iterator[tuple[int, int]]:
        """The runs' offsets, in the file and as `start`."""
        for number in range(self.count):
            yield self.offset + number * self.step, self.start + number * self.bytes


NO_ENDS: Ints = np.zeros(0, dtype=np.int64)
NO_PIECES: Ints = np.zeros((0, len(Piece._fields)), dtype=np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """What one rank writes."""

    table: Ints
    """Its pieces, of shape (pieces, fields of Piece), by their records."""
    texts: list[int]
    """Numbers of texts: 0 is before the first record, k + 1 behind record k."""

    @property
    def bytes(self) -> int:
        """Of all pieces."""
        return int((self.table[:, 1] * self.table[:, 4]).sum())

    def of(self, records: Collection[int]) -> tuple[Share, Share]:
        """Divide it: the pieces of some records, and the other ones with all texts."""
        if not records:
            return Share(NO_PIECES, []), self
        is_of = np.isin(self.table[:, 2], list(records))
        return Share(self.table[is_of], []), Share(self.table[~is_of], self.texts)

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """The rows of the table."""
        return list(map(Piece._make, self.table.tolist()))


class _Stream:
    """Bytes of a file in the order in which they are dealt. Positions count them from its begin."""

    def __init__(self, pieces: Ints, block_bytes: int) -> None:
        self._pieces = pieces
        """Of shape (pieces, fields of Piece)."""
        self._block_bytes = block_bytes
        self._begins = np.concatenate([[0], np.cumsum(pieces[:, 1] * pieces[:, 4])])

    def cut(self, position: int) -> int:
        """Return where a share ends that is to end there: at a run's end, or at a block's."""
        index = self._index_of(position)
        if index == len(self._pieces):
            return int(self._begins[-1])
        offset, count_bytes, _, _, count, step = self._pieces[index].tolist()
        begin = int(self._begins[index])
        room = position - begin
        if step > 0:
            taken = -(-room // count_bytes) * count_bytes
        elif room > 0:
            taken = -(-(offset + room) // self._block_bytes) * self._block_bytes - offset
        else:
            taken = 0
        return begin + int(min(taken, count * count_bytes))

    def record_within(self, position: int) -> int | None:
        """Return the record of the piece that the position is in the middle of."""
        index = self._index_of(position)
        is_between = index == len(self._pieces) or self._begins[index] == position
        return None if is_between else int(self._pieces[index, 2])

    def between(self, first: int, end: int) -> Ints:
        """Return the pieces between two positions that `cut` has returned."""
        if first >= end:
            return self._pieces[:0]
        index, last = self._index_of(first), self._index_of(end - 1)
        pieces = self._pieces[index : last + 1].copy()
        _shorten(pieces[-1], int(self._begins[last + 1]) - end)
        _skip(pieces[0], first - int(self._begins[index]))
        return pieces

    def _index_of(self, position: int) -> int:
        return int(np.searchsorted(self._begins, position, side="right")) - 1


def _shorten(piece: Ints, count_bytes: int) -> None:
    if piece[5] > 0:
        piece[4] -= count_bytes // piece[1]
    else:
        piece[1] -= count_bytes


def _skip(piece: Ints, count_bytes: int) -> None:
    piece[3] += count_bytes
    if piece[5] > 0:
        runs = count_bytes // piece[1]
        piece[0] += runs * piece[5]
        piece[4] -= runs
    else:
        piece[0] += count_bytes
        piece[1] -= count_bytes


class _Pattern(NamedTuple):
    """Shardings of which the same ranks have the same parts."""

    shardings: list[int]
    holders: list[list[int]]
    """Of each part, those that write it."""
    ends: list[Ints]
    """Of each part, where their shares of it end."""


class Plan:
    """Who writes what of a file.

    `Plan.build` makes one of a state, before training; `fpfs.save(…, plan=plan)` goes by it.
    """

    def __init__(
        self,
        records: Records,
        topology: Topology,
        writers: Writers = "replica",
        *,
        gathers: bool = False,
    ) -> None:
        self.records = records
        self.topology = topology
        self.writers = writers
        self.gathers = gathers
        """Whether ranks can read each other's memory, and have to."""
        ranks = len(topology.ranks)
        self._by_sharding = np.argsort(records.sharding_of, kind="stable")
        self._sharding_of = records.sharding_of[self._by_sharding]
        self._spans = np.diff(records.offsets, append=records.offsets[-1:] + records.sizes[-1:])
        """Of each record, with the text behind it."""
        loads = np.zeros(ranks, dtype=np.int64)
        is_divided = self._divide(loads)
        loads[0] += int((self._spans - records.sizes)[is_divided].sum())
        loads[0] += records.file_bytes - int(self._spans.sum())
        self._common = _Stream(self._extents(np.flatnonzero(~is_divided)), topology.chunk_bytes)
        self._writing = topology.writing(range(ranks), writers)
        first = int(records.offsets[np.argmin(is_divided)]) if len(is_divided) else 0
        ends = _dealt(
            int(self._spans[~is_divided].sum()),
            loads[self._writing],
            topology.chunk_bytes,
            head=-first % topology.chunk_bytes,
        )
        self._ends = [self._common.cut(int(end)) for end in ends]
        loads[self._writing] += np.diff(self._ends, prepend=0)
        self.loads: list[int] = loads.tolist()
        """Bytes of each rank, to a chunk; `ranges` is exact."""
        is_waiting = is_divided.copy()
        for end in self._ends:
            record = self._common.record_within(end)
            if record is not None:
                is_waiting[record] = True
        # What stands behind the last one holds all CRC32s.
        is_waiting[-1:] |= ranks > 1 or is_waiting.any()
        self._is_waiting = is_waiting
        self.rest: list[int] = (np.flatnonzero(is_waiting) + 1).tolist()
        """The texts that rank 0 writes in the end."""
        is_sharded = np.isin(records.sharding_of, self._gathered_shardings() if gathers else [])
        self.gathered: list[int] = np.flatnonzero(is_sharded).tolist()
        """The records of which each rank has a part, and any may write any byte."""

    @staticmethod
    def build(state: Any, topology: Topology, *, writers: Writers = "replica") -> Plan:
        """Return the plan for a state; nothing of its tensors is read, and nobody is asked.

        state: as `fpfs.save` takes it, and raises what that raises of one that cannot be saved.
        topology: of the group that will save it.
        writers: which of the ranks that have the same bytes write them: all ("replica"), one for
            each "socket" or each "node", or as many on each node as the storage has devices
            ("device").
        """
        # They need torch, which a plan does not.
        from fpfs.client.container import lay_out
        from fpfs.client.planning import check_whole

        if writers not in WRITERS:
            raise ValueError(f"writers is one of {', '.join(WRITERS)}, not {writers!r}")
        if not isinstance(topology, Topology):
            raise TypeError(f"topology is a {type(topology).__name__}: take Topology.of(path)")
        container = lay_out(state, whole=True)
        check_whole(container, topology.ranks)
        records = container.records()
        has_short_runs = any(not sharding.is_one_run for sharding in records.shardings)
        return Plan(records, topology, writers, gathers=topology.is_one_node and has_short_runs)

    def ranges(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Return what a rank writes of the file: offset, bytes, count and step of equal runs.

        What lies behind each other is one run. `rank`: in the group.
        """
        share, records = self.share(rank), self.records
        found = [(piece.offset, piece.bytes, piece.count, piece.step) for piece in share.pieces]
        ends = [0, *(records.offsets + records.sizes).tolist()]
        begins = [*records.offsets.tolist(), records.file_bytes]
        numbers = [*share.texts, *(self.rest if rank == 0 else [])]
        found += [(ends[number], begins[number] - ends[number], 1, 0) for number in numbers]
        joined: list[tuple[int, int, int, int]] = []
        for offset, count_bytes, count, step in sorted(found):
            before = joined[-1] if joined else (0, 0, 0, 0)
            if count == before[2] == 1 and offset == before[0] + before[1]:
                joined[-1] = (before[0], before[1] + count_bytes, 1, 0)
            else:
                joined.append((offset, count_bytes, count, step))
        return joined

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for JSON: docs/client.md, Plans, tells the fields."""
        ranks = []
        for rank, number in enumerate(self.topology.ranks):
            ranges = self.ranges(rank)
            ranks.append(
                {
                    "rank": number,
                    "node": self.topology.nodes[rank],
                    "socket": self.topology.sockets[rank],
                    "bytes": sum(count_bytes * count for _, count_bytes, count, _ in ranges),
                    "ranges": [list(each) for each in ranges],
                }
            )
        return {
            "writers": self.writers,
            "bytes": self.records.file_bytes,
            "records": len(self.records.sizes),
            "chunk_bytes": self.topology.chunk_bytes,
            "devices": self.topology.devices,
            "ranks": ranks,
        }

    def __str__(self) -> str:
        """One line for a log."""
        writing = [load for load in self.loads if load > 0]
        low, high = format_size(min(writing, default=0)), format_size(max(writing, default=0))
        each = low if low == high else f"{low} to {high}"
        write = f"writes {each}" if len(writing) == 1 else f"write {each} each"
        tensors = len(self.records.sizes)
        return (
            f"{format_size(self.records.file_bytes)} in {tensors} tensor{'s' * (tensors != 1)}:"
            f" {len(writing)} of {len(self.loads)} ranks {write} ({self.writers})"
        )

    def share(self, rank: int) -> Share:
        """Return what a rank writes. `rank`: in the group. ValueError: there is none."""
        if not 0 <= rank < len(self.topology.ranks):
            raise ValueError(f"rank {rank} is none of {len(self.topology.ranks)} ranks")
        tables = [self._own(pattern, rank) for pattern in self._patterns]
        texts = [0] if rank == 0 else []
        if rank in self._writing:
            number = self._writing.index(rank)
            first = self._ends[number - 1] if number > 0 else 0
            pieces = self._common.between(first, self._ends[number])
            record, start = pieces[:, 2], pieces[:, 3]
            texts += (record[~self._is_waiting[record]] + 1).tolist()
            # Of each extent that which is the record's.
            pieces[:, 1] = np.minimum(pieces[:, 1], self.records.sizes[record] - start)
            tables.append(pieces[pieces[:, 1] > 0])
        table = np.concatenate([*tables, NO_PIECES])
        table = table[np.argsort(table[:, 2], kind="stable")]
        return Share(table, texts)

    def _divide(self, loads: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Divide what not all ranks have; returns which records that are."""
        self._patterns = []
        records = self.records
        counts = np.bincount(records.sharding_of + 1, minlength=len(records.shardings) + 1)[1:]
        gathered = set(self._gathered_shardings()) if self.gathers else set()
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, sharding in enumerate(records.shardings):
            if index not in gathered:
                cutting = tuple(sorted({dim for dim, _ in sharding.cuts}))
                groups.setdefault((sharding.mesh, cutting), []).append(index)
        places = {rank: place for place, rank in enumerate(self.topology.ranks)}
        found = []
        for indices in groups.values():
            rows = records.shardings[indices[0]].holders.tolist()
            members = [sorted(places[rank] for rank in row if rank in places) for row in rows]
            if len(members) == 1 and len(members[0]) == len(places):
                continue  # all have all
            found.append((indices, [self.topology.writing(each, self.writers) for each in members]))
        for indices, holders in sorted(found, key=lambda each: max(map(len, each[1]))):
            totals = np.zeros(len(holders), dtype=np.int64)
            for index in indices:
                sharding = records.shardings[index]
                _, sizes = sharding.boxes()
                totals += counts[index] * sharding.itemsize * np.prod(sizes, axis=1)
            ends = []
            for total, ranks in zip(totals.tolist(), holders, strict=True):
                # A part without bytes may be of ranks that are not in the group.
                block_bytes = self.topology.chunk_bytes
                ends.append(_dealt(total, loads[ranks], block_bytes) if ranks else NO_ENDS)
                loads[ranks] += np.diff(ends[-1], prepend=0)
            self._patterns.append(_Pattern(indices, holders, ends))
        divided = [index for pattern in self._patterns for index in pattern.shardings]
        return np.isin(records.sharding_of, divided)

    def _gathered_shardings(self) -> list[int]:
        return [
            index
            for index, sharding in enumerate(self.records.shardings)
            if not sharding.is_one_run
        ]

    def _extents(self, indices: Ints) -> Ints:
        """Records with what stands behind them, as pieces."""
        pieces = np.zeros((len(indices), 6), dtype=np.int64)
        pieces[:, 0] = self.records.offsets[indices]
        pieces[:, 1] = self._spans[indices]
        pieces[:, 2] = indices
        pieces[:, 4] = 1
        return pieces

    def _own(self, pattern: _Pattern, rank: int) -> Ints:
        """A rank's pieces of sharded records."""
        for part, ranks in enumerate(pattern.holders):
            if rank in ranks:
                stream = _Stream(self._parts(pattern, part), self.topology.chunk_bytes)
                number = ranks.index(rank)
                first = stream.cut(int(pattern.ends[part][number - 1])) if number > 0 else 0
                return stream.between(first, stream.cut(int(pattern.ends[part][number])))
        return NO_PIECES

    def _rows(self, runs: Runs) -> Iterator[tuple[int, ...]]:
        """Runs as pieces of record 0; those that may be cut in the middle each as one."""
        if runs.count > 1 and runs.bytes < self.topology.chunk_bytes:
            yield runs.offset, runs.bytes, 0, runs.start, runs.count, runs.step
            return
        for number in range(runs.count):
            start = runs.start + number * runs.bytes
            yield runs.offset + number * runs.step, runs.bytes, 0, start, 1, 0

    def _parts(self, pattern: _Pattern, part: int) -> Ints:
        """The pieces of one part of sharded records, by their records."""
        records, tables = self.records, [NO_PIECES]
        for index in pattern.shardings:
            sharding = records.shardings[index]
            box = sharding.box(part)
            if box.elements == 0:
                continue
            runs = runs_of(box, sharding.shape, sharding.itemsize)
            of_one = np.array([row for each in runs for row in self._rows(each)], dtype=np.int64)
            first, end = np.searchsorted(self._sharding_of, [index, index + 1])
            indices = self._by_sharding[first:end]
            table = np.repeat(of_one[None], len(indices), axis=0)
            table[:, :, 0] += records.offsets[indices][:, None]
            table[:, :, 2] = indices[:, None]
            tables.append(table.reshape(-1, 6))
        whole = np.concatenate(tables)
        return whole[np.argsort(whole[:, 2], kind="stable")]


def _dealt(total: int, loads: Ints, block_bytes: int, *, head: int = 0) -> Ints:
    """Where each one's part of `total` bytes ends, so that their loads become the same.

    The first part begins with what is missing to a block (`head`), the last one ends with what is
    left of one, and between are whole blocks, of which the next goes to who has the least.
    """
    parts = np.zeros(len(loads), dtype=np.int64)
    parts[0] = head = min(head, total)
    parts[-1] += (total - head) % block_bytes
    blocks = (total - head) // block_bytes
    heights = loads + parts
    # To which level all the blocks raise the lowest, were there only one of them, or two, ...: as
    # many are raised as are below that.
    order = np.sort(heights)
    numbers = np.arange(1, len(order) + 1)
    filled = np.cumsum(order) + blocks * block_bytes
    raised = max(1, int(np.count_nonzero(order * numbers < filled)))
    counts = (filled[raised - 1] - raised * heights) // (raised * block_bytes)
    counts = np.maximum(0, counts)
    heights += counts * block_bytes
    rest = blocks - int(counts.sum())
    counts[np.argsort(heights, kind="stable")[:rest]] += 1
    return np.cumsum(parts + counts * block_bytes)


__all__ = ["NO_PIECES", "Piece", "Plan", "Records", "Share"]
