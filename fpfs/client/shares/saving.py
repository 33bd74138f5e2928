"""Saves a state over several nodes: each node's ranks write one share, to the storage they see.

The state is laid out as one torch.save file, as `fpfs.save` does, and planned likewise; what a rank
would write of that file goes to its node's share instead, without gaps. Rank 0's share has what is
not tensors' bytes, too. When all shares are durable, rank 0 writes the manifest, and then a copy of
it goes beside each share. So whoever finds a manifest anywhere knows that its checkpoint is
complete.

Ranks of one machine are of one node if they see the same directory. The first of a node's makes its
files.

Concurrency: as `fpfs.save`. Two groups may save to one directory at once: one of the checkpoints is
the newest.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import time
import zlib
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fpfs.client.agreement import Agreed, agree
from fpfs.client.boxes import Ints
from fpfs.client.container import Container, Text, lay_out
from fpfs.client.paths import (
    default_threads,
    flush,
    make_directories,
    name_file,
    resolve,
    saved_already,
)
from fpfs.client.peers import Alone, Peers, Process, RankFailed, Ranks, cause_of, peers_of
from fpfs.client.plan import Plan, Share
from fpfs.client.replacement import (
    Replacement,
    is_unlocked,
    locked_directory,
    remove_left,
)
from fpfs.client.saving import Finished, Saved
from fpfs.client.shares.copying import Copies, holders
from fpfs.client.shares.format import (
    MANIFEST,
    VERSION,
    Damaged,
    Header,
    Identity,
    Manifest,
    Range,
    ShareFile,
    decode_manifest,
    encode_header,
    encode_manifest,
    header_room,
    parse_name,
    share_name,
)
from fpfs.client.shares.reading import Failure, OpenShare, read_manifest
from fpfs.client.shares.serving import Serving
from fpfs.client.snapshot import InPlace, Memory, Part, Uncopied, copy_rest
from fpfs.client.topology import TIMEOUT_S
from fpfs.client.updates import NOTHING_HELD, Held
from fpfs.client.writing import Progress, Written, crc32_parts, put_crc32, write
from fpfs.core.temporary_names import target_of
from fpfs.core.transfers import combine_crc32

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)


def save_shares(
    state: Any,
    directory: str | bytes | os.PathLike[Any],
    *,
    group: dist.ProcessGroup | Alone | None = None,
    plan: Plan | None = None,
    copies: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> Saved:
    """Save `state` over several nodes, each of which has storage of its own, durably.

    Each node's ranks write a file to `directory`, the node's share, and beside it lies a manifest.
    `fpfs.load` loads the checkpoint where it sees all shares, and ``fpfs-ctl gather`` makes the
    ordinary torch.save file of them.

    The checkpoint is complete, and replaces one that the directories had before, when rank 0 has
    written the manifest, which is when all shares survive power loss. Until then the former one
    stays, whatever fails. A failure leaves nothing else, unless it falls into the moment between:
    shares may stay then that belong to no checkpoint. The next save to the directories removes
    them.

    state, group, plan, timeout_s: as `fpfs.save` has them.
    directory: on each node; it is made if it is not there. Ranks of one machine that see the same
        one are of one node.
    copies: how many nodes keep each share; with 2 a node may be lost. What is copied is sent from
        rank to rank, and the call returns when it is durable as well.

    Returns what was saved; `path` is the directory on this node, `bytes` those of the torch.save
    file.

    Raises what `fpfs.save` raises; NotADirectoryError of a file, ValueError of more copies than
    there are nodes, or of nodes that have one directory, and `Damaged` (a ValueError) of a
    directory whose manifest is none, unless another one has one: then it is replaced.
    """
    started = time.monotonic()
    peers = peers_of(group, timeout_s=timeout_s, call="save_shares")
    with SharesSave(peers, copies=copies, timeout_s=timeout_s) as steps:
        steps.agree(state, directory, plan)
        laid_out = time.monotonic()
        finished = steps.write()
    return finished.saved(
        steps.path, seconds=time.monotonic() - started, lay_out_s=laid_out - started
    )


class _Site(msgspec.Struct, array_like=True):
    """Where a rank saves."""

    kernel: str
    device: int
    inode: int
    former: _Former
    copies: int


class _Former(msgspec.Struct, array_like=True):
    """What a directory has of checkpoints before."""

    number: int
    """The greatest of a checkpoint, or of shares of none; 0: nothing is there."""
    never_complete: list[Identity]
    """Of which a killed save has left a share, and that cannot become complete."""
    has_manifest: bool
    failure: str
    """What is wrong with a manifest that cannot be read; "": nothing."""


class _Nodes(msgspec.Struct):
    """What a rank learns from all sites."""

    of_ranks: list[int]
    """Each one's node."""
    checkpoint: Identity
    never_complete: list[Identity]
    """Former ones, of which killed saves have left shares."""


class Opened(msgspec.Struct, array_like=True):
    """A node's share."""

    name: bytes
    """Its temporary one."""
    begin: int
    """Of its ranges."""
    file_bytes: int


class _Shares(msgspec.Struct, array_like=True):
    """What a rank learns of the shares that have been made."""

    own: Opened
    """Its node's."""
    kept: dict[int, Opened]
    """To the first rank of a node: those of others that it keeps, by their numbers."""


class Closed(msgspec.Struct):
    """What the first rank of a node has finished."""

    share: ShareFile | None


class PartWritten(msgspec.Struct):
    """What a rank has written."""

    written: Written
    of_records: dict[int, int]
    """What its bytes of each record are of that one's CRC32."""
    crcs: list[int]
    """Of each of its ranges."""


class _Started(NamedTuple):
    """A save that is being written."""

    at_s: float
    ranges: Ints
    """Of the node's share, if this rank is the first."""
    opened: Opened
    in_place: PartWritten | None
    """What this rank has written, if not all had a copy."""


class _Described(msgspec.Struct):
    """What rank 0 tells all when all shares are durable."""

    manifest: bytes
    written: list[Written]


class _Node(NamedTuple):
    """What a rank's node writes."""

    number: int
    nodes: int
    members: list[int]
    """Its ranks. The first one makes the files."""
    bases: list[int]
    """Where each member's ranges begin in the share, counted from the first one's."""
    container: tuple[int, int]
    """As `Header.container`."""
    bytes: int

    @staticmethod
    def of(of_ranks: list[int], rank: int, plan: Plan, text_bytes: int) -> _Node:
        number = of_ranks[rank]
        members = [other for other, node in enumerate(of_ranks) if node == number]
        block_bytes = plan.topology.chunk_bytes
        bases, end = [], 0
        for member in members:
            bases.append(-(-end // block_bytes) * block_bytes)
            end = bases[-1] + plan.share(member).bytes
        container = (0, 0)
        if members[0] == 0:
            container = (-(-end // block_bytes) * block_bytes, text_bytes)
            end = sum(container)
        return _Node(number, max(of_ranks) + 1, members, bases, container, end)

    def ranges(self, plan: Plan, member: int) -> Ints:
        """A member's ranges, without CRC32s."""
        pieces = plan.share(member).table
        found = np.zeros((len(pieces), len(Range._fields)), dtype=np.int64)
        found[:, [0, 1, 2, 3]] = pieces[:, [0, 1, 4, 5]]
        sizes = pieces[:, 1] * pieces[:, 4]
        found[:, 4] = self.bases[self.members.index(member)] + np.cumsum(sizes) - sizes
        return found

    def text_ranges(self, container: Container) -> Ints:
        """What is not tensors' bytes, which rank 0 writes."""
        rows = [
            (text.offset, text.bytes, 1, 0, self.container[0] + text.start, 0)
            for text in container.parts
            if isinstance(text, Text) and text.bytes > 0
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, len(Range._fields))


class SharesSave:
    """A save over nodes, step by step. As a context: what is begun and not finished is undone.

    All ranks of the group do each step, which raises as `save_shares`.
    """

    def __init__(self, peers: Peers, *, copies: int, timeout_s: float) -> None:
        self._peers = peers
        self._copies = copies
        self._timeout_s = timeout_s
        self.path = ""
        """The directory, links followed."""
        self.progress = Progress(peers)
        """Of this rank: of what tensors have."""
        self._held = NOTHING_HELD
        """What a snapshot has left."""
        self._uncopied: Uncopied | None = None
        self._in_place: frozenset[int] = frozenset()
        """Records of which the snapshot has no copy."""
        self._started: _Started | None = None
        self._made: list[str] = []
        """Directories, from outer to inner."""
        self._share_path = ""
        self._share: Replacement | None = None
        """The first rank's of the node."""
        self._has_name = False
        self._of_others: Copies | None = None
        self._stays: bool | None = False
        """Whether the checkpoint is complete. None: rank 0 knows."""

    def __enter__(self) -> SharesSave:
        self._peers.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        name_file(error, self.path)
        with contextlib.ExitStack() as stack:
            stack.callback(self._peers.__exit__, kind, error, trace)
            if self._uncopied is not None:
                # The memory may be the next snapshot's.
                stack.callback(self._uncopied.copies.wait)
            removing = stack.enter_context(contextlib.ExitStack())
            for files in (self._share, self._of_others):
                if files is not None:
                    stack.callback(files.discard)
            if error is not None:
                # Before anything is undone. An interrupt may come while the store does not answer.
                self._peers.tell(error)
                stays = self._stays
                if self._peers.rank == 0 or stays is None:
                    stays = self._peers.verdict(bool(stays))
                # If nobody knows, it may be complete.
                if stays is False:
                    removing.callback(self._remove)

    def _remove(self) -> None:
        # What fails here is garbage that the next save removes.
        if self._has_name:
            with contextlib.suppress(OSError):
                os.unlink(self._share_path)
        if self._of_others is not None:
            self._of_others.remove()
        if self._share is None and self._share_path:
            # The rank that made it may have been killed.
            with contextlib.suppress(OSError):
                remove_left(self._share_path)
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def agree(
        self, state: Any, directory: str | bytes | os.PathLike[Any], plan: Plan | None
    ) -> None:
        """Lay out the file, make sure that all ranks save the same, and know who writes what.

        The node's share is made, and empty: so saves that begin later count from it.
        """
        if type(self._copies) is not int or self._copies < 1:
            raise ValueError(f"copies is {self._copies!r}: give how many nodes keep each share")
        self._agreed: Agreed = agree(self._peers, state, plan, lay_out, gathers=False)
        self.progress.total_bytes = self._agreed.plan.share(self._peers.rank).bytes
        self.path = resolve(directory)
        # What is there and is no directory, os.listdir refuses.
        if not os.path.exists(self.path):
            flush(*make_directories(self.path, made=self._made))
        status = os.stat(self.path)
        former, failure = _look_for_former(self.path)
        kernel = Process.own().kernel
        site = _Site(kernel, status.st_dev, status.st_ino, former, self._copies)

        def answer(sites: list[_Site]) -> list[_Nodes]:
            has_manifest = any(site.former.has_manifest for site in sites)
            for other, site in enumerate(sites):
                if site.former.failure and not has_manifest:
                    # It may be another program's.
                    raise RankFailed(other, site.former.failure)
                if site.copies != self._copies:
                    raise RankFailed(
                        other,
                        f"keeps {site.copies} copies, and rank 0 {self._copies}: all ranks give"
                        " the same",
                    )
            places = [(site.kernel, site.device, site.inode) for site in sites]
            numbers = {place: node for node, place in enumerate(dict.fromkeys(places))}
            of_ranks = [numbers[place] for place in places]
            if len(numbers) < self._copies:
                nodes = f"{len(numbers)} node{'s' * (len(numbers) != 1)}"
                raise ValueError(
                    f"{self._copies} copies are to be kept, and there is {nodes}: ranks of one"
                    " directory are one node"
                )
            latest = max(site.former.number for site in sites)
            checkpoint = Identity(latest + 1, secrets.token_hex(8))
            never = sorted({each for site in sites for each in site.former.never_complete})
            return [_Nodes(of_ranks, checkpoint, never)] * len(sites)

        try:
            found = self._peers.exchange("node", site, answer, of=_Nodes)
        except RankFailed as failed:
            if failure is not None and failed.cause == former.failure:
                raise failure from None
            raise
        if failure is not None:
            logger.warning("%s: it is replaced, since another directory has one", failure)
        self._checkpoint, self._of_ranks = found.checkpoint, found.of_ranks
        self._never_complete = frozenset(found.never_complete)
        rank, text_bytes = self._peers.rank, len(self._agreed.container.text)
        self._node = _Node.of(found.of_ranks, rank, self._agreed.plan, text_bytes)
        self._is_first = self._node.members[0] == rank
        name = share_name(self._node.number, self._node.nodes, self._checkpoint)
        self._share_path = os.path.join(self.path, name)
        if self._is_first:
            self._share = Replacement(self._share_path)

    def snapshot(self, memory: Memory, *, later: Held = NOTHING_HELD) -> InPlace:
        """Copy what this rank writes: so the tensors may change.

        later: what `finish_snapshot` is to copy. Returns what has no copy: `start` writes it. Both
            raise RuntimeError if that has changed.
        """
        part = Part(self._agreed.container, self._agreed.plan.share(self._peers.rank), ())
        self._held = later
        (copied,), in_place = memory.copy([part], later=later)
        container, self._uncopied, self._in_place = copied
        self._agreed = self._agreed._replace(container=container)
        return in_place

    def finish_snapshot(self) -> None:
        """Copy what `snapshot` has left."""
        assert self._uncopied is not None
        copy_rest(self._uncopied)

    def start(self, *, threads: int | None = None) -> _Started:
        """Have room for the node's file; returns when all that has no copy is written.

        threads: as `write` has them.
        """
        at_s = time.monotonic()
        ranges, opened = self._open()
        if self._copies > 1:
            self._peers.exchange("room", None, lambda ranks: ranks, of=type(None))
        in_place = None
        if self._in_place:
            self._held.check()
            in_place = self._write_part(opened, self._threads(threads), in_place=True)
            self._held.check()
        self._started = _Started(at_s, ranges, opened, in_place)
        return self._started

    def write(self, *, threads: int | None = None) -> Finished:
        """Write what was agreed on; returns when the checkpoint is complete, and durable.

        threads: how many write. None: this rank's share of as many as there are processors.
        """
        started = self._started or self.start(threads=threads)
        threads, ranges, opened = self._threads(threads), started.ranges, started.opened
        part = self._write_part(opened, threads, in_place=False)
        if started.in_place is not None:
            part = self._both(started.in_place, part)
        # The first rank of a node is told those of its node's ranges, but for those of texts.
        crcs = self._peers.exchange("part", part, self._join, of=list[int])
        own = Closed(None)
        if self._share is not None:
            own = Closed(self._finish_share(ranges, opened.begin, crcs))
        described = self._peers.exchange("closed", own, self._describe, of=_Described)
        if self._copies > 1:
            self._copy(described.manifest, threads)
        if self._peers.rank != 0:
            self._stays = None

        self.progress.check()

        def commit(ranks: list[None]) -> list[None]:
            self._write_manifest(described.manifest)
            return ranks

        # All that it names is durable.
        self._peers.exchange("durable", None, commit, of=type(None))
        self._stays = True
        if self._is_first:
            if self._peers.rank != 0:
                self._write_manifest(described.manifest)
            self._remove_former()
        self._peers.exchange("end", None, lambda ranks: ranks, of=type(None))
        write_s = time.monotonic() - started.at_s
        total_bytes = self._agreed.container.bytes
        return Finished(total_bytes, write_s, tuple(described.written), durable=True)

    def flush(self) -> None:
        """Nothing: a checkpoint that is complete survives power loss."""

    def _open(self) -> tuple[Ints, Opened]:
        """Have room for the node's share, if this rank is the first: its ranges, where it is."""
        node, plan = self._node, self._agreed.plan
        ranges = np.zeros((0, len(Range._fields)), dtype=np.int64)
        opened = Opened(b"", 0, 0)
        if self._share is not None:
            found = [node.ranges(plan, member) for member in node.members]
            if node.number == 0:
                found.append(node.text_ranges(self._agreed.container))
            ranges = np.concatenate(found)
            self._begin = begin = header_room(ranges, self._header)
            # Or there may be no room.
            former = _readable_manifest(self.path)
            self._remove_left(before=0 if former is None else former.checkpoint.number)
            self._share.reserve(begin + node.bytes)
            name = os.fsencode(os.path.basename(self._share.temporary_path))
            opened = Opened(name, begin, begin + node.bytes)

        def answer(opened: list[Opened]) -> list[_Shares]:
            firsts = self._firsts
            own = [opened[rank] for rank in firsts]
            kept: list[dict[int, Opened]] = [{} for _ in own]
            for share, each in enumerate(own):
                for keeper in holders(share, len(own), self._copies)[1:]:
                    kept[keeper][share] = each
            return [
                _Shares(own[number], kept[number] if rank == firsts[number] else {})
                for rank, number in enumerate(self._of_ranks)
            ]

        shares = self._peers.exchange("share", opened, answer, of=_Shares)
        if self._copies > 1 and self._is_first:
            self._check_apart(shares.kept)
            sizes = {share: each.file_bytes for share, each in shares.kept.items()}
            self._of_others = Copies(self.path, self._checkpoint, node.nodes, sizes)
        return ranges, shares.own

    def _check_apart(self, kept: dict[int, Opened]) -> None:
        """Raise ValueError if a share is here that is to be copied here."""
        for share, opened in kept.items():
            if os.path.exists(os.path.join(self.path, os.fsdecode(opened.name))):
                raise ValueError(
                    f"{self._copies} copies are to be kept, and nodes {share} and"
                    f" {self._node.number} both save to {self.path}: give each node a directory on"
                    " drives of its own, or keep 1 copy"
                )

    @property
    def _firsts(self) -> list[int]:
        """The first rank of each node."""
        found: dict[int, int] = {}
        for rank, number in enumerate(self._of_ranks):
            found.setdefault(number, rank)
        return [found[number] for number in sorted(found)]

    @property
    def _header(self) -> Header:
        return Header(
            version=VERSION,
            checkpoint=self._checkpoint,
            share=self._node.number,
            shares=self._node.nodes,
            bytes=self._agreed.container.bytes,
            container=self._node.container,
            ranges=[],
        )

    def _threads(self, threads: int | None) -> int:
        return threads or default_threads(len(self._node.members))

    def _write_part(self, opened: Opened, threads: int, *, in_place: bool) -> PartWritten:
        """Write this rank's ranges, those without a copy or the other ones."""
        started = time.monotonic()
        container, rank = self._agreed.container, self._peers.rank
        rows = self._rows(in_place=in_place)
        share = Share(self._agreed.plan.share(rank).table[rows], [])
        copied_bytes, of_pieces = 0, list[list[int]]()
        if share.pieces:
            moved = share.table.copy()
            moved[:, 0] = opened.begin + self._node.ranges(self._agreed.plan, rank)[rows, 4]
            moved[:, 5] = moved[:, 1]  # run behind run
            path = os.path.join(self.path, os.fsdecode(opened.name))
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    copied_bytes, of_pieces = write(
                        Share(moved, []),
                        container,
                        fd=fd,
                        threads=threads,
                        progress=self.progress,
                        check=self._peers.check,
                    )
                finally:
                    os.close(fd)
            except OSError:
                self._peers.check()  # Who failed had it removed.
                raise
        crcs = []
        for piece, of_runs in zip(share.pieces, of_pieces, strict=True):
            crc = 0
            for of_run in of_runs:
                crc = combine_crc32(crc, of_run, piece.bytes)
            crcs.append(crc)
        seconds = time.monotonic() - started
        written = Written(rank, share.bytes, seconds, copied_bytes, threads)
        return PartWritten(written, crc32_parts(share.pieces, of_pieces, container), crcs)

    def _rows(self, *, in_place: bool) -> Ints:
        """The numbers of this rank's pieces that have no copy, or have one."""
        records = self._agreed.plan.share(self._peers.rank).table[:, 2]
        return np.flatnonzero(np.isin(records, list(self._in_place)) == in_place)

    def _both(self, in_place: PartWritten, others: PartWritten) -> PartWritten:
        """What this rank has written in all."""
        crcs = np.zeros(len(in_place.crcs) + len(others.crcs), dtype=np.int64)
        crcs[self._rows(in_place=True)] = in_place.crcs
        crcs[self._rows(in_place=False)] = others.crcs
        return PartWritten(
            in_place.written.and_then(others.written),
            in_place.of_records | others.of_records,
            crcs.tolist(),
        )

    def _join(self, parts: list[PartWritten]) -> list[list[int]]:
        """Rank 0: write what is not tensors' bytes, with their CRC32s."""
        assert self._share is not None
        container = self._agreed.container
        put_crc32(
            range(len(container.parts) // 2 + 1), [part.of_records for part in parts], container
        )
        text = container.text
        _write_all(self._share.fd, text, at=self._begin + self._node.container[0])
        first = parts[0].written
        parts[0].written = first._replace(
            bytes=first.bytes + len(text), copied_bytes=first.copied_bytes + len(text)
        )
        self._written = [part.written for part in parts if part.written.bytes > 0]
        crcs: dict[int, list[int]] = {}
        for part, number in zip(parts, self._of_ranks, strict=True):
            crcs.setdefault(number, []).extend(part.crcs)
        # Each node's first rank takes them.
        return [crcs.pop(number, []) for number in self._of_ranks]

    def _finish_share(self, ranges: Ints, begin: int, crcs: list[int]) -> ShareFile:
        """Write the header; what the manifest says of the share, which is durable."""
        assert self._share is not None
        if self._node.number == 0:
            text = memoryview(self._agreed.container.text)
            for text_range in ranges[len(crcs) :].tolist():
                start = text_range[4] - self._node.container[0]
                crcs.append(zlib.crc32(text[start : start + text_range[1]]))
        ranges[:, 5] = crcs
        header = encode_header(ranges, self._header, begin)
        _write_all(self._share.fd, header, at=0)
        size = os.fstat(self._share.fd).st_size
        self._share.complete(durable=True)
        self._share.take_name()
        self._has_name = True
        self._share.flush_name()
        name = os.path.basename(self._share_path)
        return ShareFile(name, socket.gethostname(), size, begin, zlib.crc32(header))

    def _describe(self, closed: list[Closed]) -> list[_Described]:
        """Rank 0: the manifest, of shares that are durable."""
        found = [each.share for each in closed if each.share is not None]
        manifest = Manifest(
            version=VERSION,
            checkpoint=self._checkpoint,
            bytes=self._agreed.container.bytes,
            ranks=self._peers.size,
            copies=self._copies,
            shares=tuple(sorted(found, key=lambda share: (len(share.name), share.name))),
        )
        return [_Described(encode_manifest(manifest), self._written)] * len(closed)

    def _copy(self, content: bytes, threads: int) -> None:
        """Copy shares to other nodes; returns when all copies are durable."""
        assert isinstance(self._peers, Ranks)
        with contextlib.ExitStack() as stack:
            manifest = decode_manifest(content, MANIFEST)
            near = {}
            if self._is_first:
                own = OpenShare(self._share_path, manifest, self._node.number)
                near[self._node.number] = stack.enter_context(own)
            serving = stack.enter_context(Serving(self._peers, near, timeout_s=self._timeout_s))
            if self._of_others is not None:
                self._of_others.fetch(serving, dict(enumerate(self._firsts)), manifest, threads)
            self._peers.exchange("copied", None, lambda ranks: ranks, of=type(None))

    def _write_manifest(self, content: bytes) -> None:
        """Write the manifest, unless that of a later checkpoint is there, of another group."""
        path = os.path.join(self.path, MANIFEST)
        with locked_directory(self.path):
            former = _readable_manifest(self.path)
            if former is not None and former.checkpoint > self._checkpoint:
                self._stays = True
                return
            with Replacement(path) as replacement:
                _write_all(replacement.fd, content, at=0)
                replacement.complete(durable=True)
                if not self._stays:
                    self.progress.check()
                # From here on it may be there.
                self._stays = True
                replacement.take_name()
                with saved_already():
                    replacement.flush_name()

    def _remove_former(self) -> None:
        """Remove shares of former checkpoints, and what killed saves have left."""
        with locked_directory(self.path):
            newest = _readable_manifest(self.path)
            # Without locks an earlier one may have been written since, of another group: its shares
            # stay.
            first = self._checkpoint if newest is None else min(newest.checkpoint, self._checkpoint)
            self._remove_left(before=first.number)

    def _remove_left(self, *, before: int) -> None:
        """Remove what killed saves have left, and shares of checkpoints before a number."""

        def is_left(found: bytes) -> bool:
            target = target_of(found)
            if target is not None:
                name = os.fsdecode(target)
                return name == MANIFEST or parse_name(name) is not None
            share = parse_name(os.fsdecode(found))
            return share is not None and (
                share.checkpoint.number < before or share.checkpoint in self._never_complete
            )

        remove_left(os.path.join(self.path, MANIFEST), of=is_left)


def _look_for_former(directory: str) -> tuple[_Former, Failure | None]:
    """Return what a directory has of checkpoints before, and what is wrong with its manifest.

    Raises OSError of a manifest that could not be replaced either.
    """
    files = [os.fsencode(name) for name in os.listdir(directory)]
    # Shares that have no name yet are of saves under way, which have begun before.
    names = [os.fsdecode(target_of(file) or file) for file in files]
    numbers = [share.checkpoint.number for share in map(parse_name, names) if share is not None]
    left = _left_by_rank_0(directory, files)
    manifest, failure = None, None
    try:
        # Only now: who had a share locked may have been about to write it.
        manifest = read_manifest(directory)
    except (OSError, Damaged) as wrong:
        if isinstance(wrong, OSError) and wrong.errno != errno.EIO:
            raise
        failure, left = wrong, []
    complete = 0 if manifest is None else manifest.checkpoint.number
    former = _Former(
        max([complete, *numbers]),
        [checkpoint for checkpoint in left if checkpoint.number > complete],
        manifest is not None,
        "" if failure is None else cause_of(failure),
    )
    return former, failure


def _left_by_rank_0(directory: str, files: list[bytes]) -> list[Identity]:
    """Return checkpoints whose rank 0 has saved to a directory, and is no more.

    It writes the manifest there before anywhere else. That share 0 alone is there tells the
    directory: one that has a copy of it has a share of its own as well.
    """
    found: dict[Identity, list[tuple[int, str]]] = {}
    for name in map(os.fsdecode, files):
        share = parse_name(name)
        if share is not None:
            found.setdefault(share.checkpoint, []).append((share.share, name))
    return [
        checkpoint
        for checkpoint, ((share, name), *others) in found.items()
        if share == 0 and not others and is_unlocked(os.path.join(directory, name))
    ]


def _readable_manifest(directory: str) -> Manifest | None:
    """Return a directory's manifest; None: it has none, or one that another save has to replace."""
    try:
        return read_manifest(directory)
    except (OSError, Damaged):
        return None


def _write_all(fd: int, content: bytes | bytearray, *, at: int) -> None:
    rest = memoryview(content)
    while rest:
        count = os.pwrite(fd, rest, at)
        rest, at = rest[count:], at + count


__all__ = ["SharesSave", "save_shares"]
