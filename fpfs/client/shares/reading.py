"""Reads a checkpoint's torch.save file out of the shares that have it.

Concurrency: an object is used by one thread at a time. A save to the same directories may remove
the shares of the checkpoint before, which is found meanwhile: it is looked for anew then.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fpfs.client.boxes import Ints
from fpfs.client.parallel_file import LargeReads, Piece, start_reading
from fpfs.client.paths import DCP_METADATA, naming
from fpfs.client.shares.format import (
    MANIFEST,
    Damaged,
    Manifest,
    Range,
    ShareFile,
    decode_header,
    decode_manifest,
)
from fpfs.core.transfers import Transfer, count_moved, run_to_end

logger = logging.getLogger(__name__)

TRIES = 10
"""So often at most is a checkpoint replaced while it is opened."""
PIECES_MAX = 100_000
"""So many are read at once."""


class Missing(FileNotFoundError):
    """A share, or a checkpoint, is in none of the directories."""


def read_manifest(directory: str) -> Manifest | None:
    """Return a directory's manifest; None: it has none. Raises OSError, and `Damaged`."""
    path = os.path.join(directory, MANIFEST)
    try:
        with naming(path), open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    return decode_manifest(content, path)


def has_shares(path: str) -> bool:
    """Whether it is a directory with a manifest. IsADirectoryError: it has none."""
    if not os.path.isdir(path):
        return False
    if not os.path.exists(os.path.join(path, MANIFEST)):
        wrong = (
            "a checkpoint of torch.distributed.checkpoint, which dcp.load(state,"
            " storage_reader=fpfs.dcp.Reader(path)) loads"
            if os.path.exists(os.path.join(path, DCP_METADATA))
            else f"a directory without a {MANIFEST}: name a file, or where fpfs.save_shares has"
            " saved"
        )
        raise IsADirectoryError(errno.EISDIR, wrong, path)
    return True


def newest_manifest(directories: Sequence[str]) -> Manifest:
    """Return that of the newest checkpoint: each was written when its checkpoint was complete."""
    newest = newest_of(directories)
    if newest is None:
        raise Missing(none_in(directories))
    return newest


def newest_manifests(directories: Sequence[str]) -> Iterator[Manifest]:
    """Yield `newest_manifest`, and then that of each checkpoint that has replaced it meanwhile.

    For who has not found all shares: they are lost if there is no other.
    """
    former = None
    for _ in range(TRIES):
        manifest = newest_manifest(directories)
        if manifest == former:
            break
        yield manifest
        former = manifest


def newest_of(directories: Sequence[str]) -> Manifest | None:
    """Return that of the newest checkpoint; None: there is none.

    One that cannot be read is raised if there is no other, and said by the log otherwise.
    """
    found, failures = list[Manifest](), list[Failure]()
    for directory in directories:
        try:
            manifest = read_manifest(directory)
        except (OSError, Damaged) as failure:
            failures.append(failure)
        else:
            found += [] if manifest is None else [manifest]
    if failures and not found:
        raise failures[0]
    pass_over(failures)
    return max(found, key=lambda manifest: manifest.checkpoint, default=None)


Failure = OSError | Damaged
"""What is wrong with a file."""


def pass_over(failures: Sequence[Failure]) -> None:
    """Let the log say what is wrong with files of which others are read instead."""
    for failure in failures:
        logger.warning("%s: what another directory has is read instead", failure)


def none_in(directories: Sequence[str]) -> str:
    """What is wrong with directories without a checkpoint."""
    places = ", ".join(directories)
    return f"there is no complete checkpoint in {places}: a save writes {MANIFEST} at last"


def places_of(share: ShareFile, directories: Sequence[str]) -> list[str]:
    """Return where a share may be, each once."""
    return [os.path.join(directory, share.name) for directory in dict.fromkeys(directories)]


def check_found(manifest: Manifest, found: Collection[int], where: str) -> None:
    """Raise `Missing`, which names them, if shares have not been found."""
    missing = [
        f"share {number} of node {share.node!r} ({share.name})"
        for number, share in enumerate(manifest.shares)
        if number not in found
    ]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise Missing(
            f"{', '.join(missing[:3])}{more} of {len(manifest.shares)} is not in {where}: name the"
            " directories of all nodes, or copy the files there"
        )


Place = tuple[memoryview, int]
"""Memory, and what it is filled with: `Range.at`."""


class AnyShare(Protocol):
    """A share, wherever it is."""

    path: str
    """For errors."""
    begin: int
    """Of its ranges in the file."""
    ranges: Ints
    """Of shape (ranges, fields of Range)."""
    container: tuple[int, int]
    """Where the bytes lie that are not tensors', and how many these are."""

    def read(self, places: Sequence[Place]) -> None:
        """Fill memory with a few bytes."""

    def start(self, pieces: list[Piece], owners: object) -> Transfer:
        """Begin to fill memory, which `owners` keeps, with pieces of the file."""


class OpenShare:
    """A share of a manifest, open; as a context, it is closed in the end.

    Raises OSError of what cannot be read, and `Damaged`.
    """

    def __init__(self, path: str, manifest: Manifest, number: int) -> None:
        self.path = path
        self._of_node = f"{path} of node {manifest.shares[number].node!r}"
        with contextlib.ExitStack() as closing:
            closing.enter_context(naming(path))
            self._file = closing.enter_context(open(path, "rb"))
            size = os.fstat(self.fd).st_size
            expected = manifest.shares[number]
            if size != expected.bytes:
                raise Damaged(f"{self._of_node} has {size} bytes instead of {expected.bytes}")
            self.header = self._file.read(expected.header_bytes)
            self.begin = expected.header_bytes
            found = decode_header(self.header, manifest, number, self._of_node)
            self.ranges, self.container = found
            self._closing = closing.pop_all()

    def __enter__(self) -> OpenShare:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def fd(self) -> int:
        """Its descriptor."""
        return self._file.fileno()

    def read(self, places: Sequence[Place]) -> None:
        """Fill memory."""
        for view, at in places:
            rest, offset = view, self.begin + at
            while rest:
                with naming(self.path):
                    count = os.preadv(self.fd, [rest], offset)
                if count == 0:
                    raise Damaged(f"{self._of_node} has become shorter")
                count_moved(count)
                rest, offset = rest[count:], offset + count

    def start(self, pieces: list[Piece], owners: object) -> Transfer:
        """Begin to fill memory, which `owners` keeps, with pieces of the file."""
        return start_reading(pieces, fd=self.fd, owners=owners)


_CHECKED_BYTES = 16 * 1024 * 1024
"""Of the file, whose runs are looked for at a time: each takes some hundred bytes."""


class Shares:
    """The torch.save file that shares have together.

    opened: yields each share at one place after the other, open. When it cannot be read at one,
        the next one is asked for, and read from then on.
    """

    def __init__(self, manifest: Manifest, opened: Sequence[Iterable[AnyShare]]) -> None:
        self.manifest = manifest
        self._others = [iter(each) for each in opened]
        self._shares = [next(each) for each in self._others]
        self._index = Index([share.ranges for share in self._shares], manifest.bytes)

    def check_whole(self) -> None:
        """Raise `Damaged` if the shares have not all of the file, each byte once."""
        for offset in range(0, self.manifest.bytes, _CHECKED_BYTES):
            self._index.find(offset, min(_CHECKED_BYTES, self.manifest.bytes - offset))

    def read(self, view: memoryview, offset: int) -> int:
        """Fill `view` from the file's `offset` on; returns how many bytes, at least one if any.

        What is read ahead of texts, which are here, would be tensors that nobody may ask for.
        """
        places: dict[int, list[Place]] = {}
        found = self._index.find(offset, len(view)).tolist()
        if found and self._is_text(found[0]):
            found = found[:1]
        for share, at, begin, count in found:
            places.setdefault(share, []).append((view[begin : begin + count], at))
        for share, some in places.items():
            self._read_share(share, some)
        return sum(count for _, _, _, count in found)

    def _read_share(self, number: int, places: Sequence[Place]) -> None:
        while True:
            try:
                self._shares[number].read(places)
            except (OSError, Damaged) as failure:
                if not self._is_elsewhere(number, failure):
                    raise
            else:
                return

    def _is_elsewhere(self, number: int, failure: Failure) -> bool:
        """Whether a share is at another place, where it is read from now on."""
        other = next(self._others[number], None)
        if other is not None:
            pass_over([failure])
            self._shares[number] = other
        return other is not None

    def _is_text(self, found: list[int]) -> bool:
        share, at, _, _ = found
        first, size = self._shares[share].container
        return first <= at < first + size

    def read_pieces(self, pieces: Sequence[Piece], owners: object) -> None:
        """Fill memory, which `owners` keeps, from all shares at once."""
        found: list[list[Piece]] = [[] for _ in self._shares]
        count_pieces = 0
        for address, count, offset in pieces:
            for share, at, begin, length in self._index.find(offset, count).tolist():
                found[share].append((address + begin, length, self._shares[share].begin + at))
                count_pieces += 1
            if count_pieces > PIECES_MAX:
                self._read(found, owners)
                found, count_pieces = [[] for _ in self._shares], 0
        self._read(found, owners)

    def _read(self, found: list[list[Piece]], owners: object) -> None:
        wanted = [number for number, pieces in enumerate(found) if pieces]
        while wanted:
            with contextlib.ExitStack() as closing:
                transfers = []
                for number in wanted:
                    transfer = self._shares[number].start(found[number], owners)
                    closing.callback(transfer.close)
                    transfers.append((number, transfer))
                wanted = []
                for number, transfer in transfers:
                    try:
                        with naming(self._shares[number].path):
                            run_to_end(transfer)
                    except (OSError, Damaged) as failure:
                        if not self._is_elsewhere(number, failure):
                            raise
                        wanted.append(number)


def open_each(
    manifest: Manifest,
    number: int,
    directories: Sequence[str],
    failures: list[Failure],
    *,
    after: str = "",
) -> Iterator[OpenShare]:
    """Open a share in one directory after the other, of those that have it.

    failures: takes what is wrong with it in those where it cannot be opened. after: a path; those
        behind it are opened.
    """
    places = places_of(manifest.shares[number], directories)
    for path in places[places.index(after) + 1 if after else 0 :]:
        try:
            share = OpenShare(path, manifest, number)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, Damaged) as failure:
            failures.append(failure)
        else:
            yield share


def open_share(manifest: Manifest, number: int, directories: Sequence[str]) -> OpenShare | None:
    """Open a share in the first directory where it is sound; None: none has it.

    Raises what is wrong with it if it is sound in none.
    """
    failures = list[Failure]()
    share = next(open_each(manifest, number, directories, failures), None)
    if share is not None:
        pass_over(failures)
    elif failures:
        raise failures[0]
    return share


def open_others(
    manifest: Manifest,
    number: int,
    share: OpenShare,
    directories: Sequence[str],
    closing: contextlib.ExitStack,
) -> Iterator[OpenShare]:
    """Yield a share, and then what the directories behind its own have of it, open.

    closing: closes these.
    """
    yield share
    failures = list[Failure]()
    for other in open_each(manifest, number, directories, failures, after=share.path):
        pass_over(failures)
        failures.clear()
        yield closing.enter_context(other)


@contextlib.contextmanager
def opened_shares(directories: Sequence[str]) -> Iterator[tuple[Manifest, list[OpenShare]]]:
    """Open all shares of the newest checkpoint of directories, which are absolute.

    Raises OSError of what is not there or cannot be read, `Missing` among them, and `Damaged`.
    """
    with contextlib.ExitStack() as closing:
        for manifest in newest_manifests(directories):
            found = dict[int, OpenShare]()
            for number in range(len(manifest.shares)):
                share = open_share(manifest, number, directories)
                if share is not None:
                    found[number] = closing.enter_context(share)
            if len(found) == len(manifest.shares):
                break
        check_found(manifest, found, ", ".join(directories))
        yield manifest, list(found.values())


class Index:
    """Where each byte of the torch.save file is."""

    def __init__(self, of_shares: Sequence[Ints], file_bytes: int) -> None:
        width = len(Range._fields)
        rows = np.concatenate([np.zeros((0, width), dtype=np.int64), *of_shares])
        share = np.repeat(np.arange(len(of_shares)), [len(ranges) for ranges in of_shares])
        order = np.argsort(rows[:, 0], kind="stable")
        self._rows, self._share = rows[order], share[order]
        spans = (self._rows[:, 2] - 1) * self._rows[:, 3] + self._rows[:, 1]
        reached = np.maximum.accumulate(self._rows[:, 0] + spans)
        # Ranges of several runs reach into each other: they are looked at together.
        is_first = np.ones(len(rows), dtype=bool)
        is_first[1:] = self._rows[1:, 0] >= reached[:-1]
        self._first_rows = np.append(np.flatnonzero(is_first), len(rows))
        self._begins = self._rows[self._first_rows[:-1], 0]
        self._file_bytes = file_bytes

    def find(self, offset: int, count: int) -> Ints:
        """Return where bytes are: rows of share, `Range.at`, begin in what is asked for, bytes.

        In order. Raises `Damaged` of what no share has.
        """
        end = offset + count
        first = max(0, int(np.searchsorted(self._begins, offset, side="right")) - 1)
        last = int(np.searchsorted(self._begins, end, side="left"))
        chosen = slice(int(self._first_rows[first]), int(self._first_rows[last]))
        begin, size, runs, step, at, _ = self._rows[chosen].T
        step = np.where(runs == 1, size, step)
        # The runs of each range that reach into what is asked for.
        low = np.maximum(0, (offset - begin - size) // step + 1)
        high = np.minimum(runs, -((begin - end) // step))
        wanted = np.maximum(0, high - low)
        index = np.repeat(np.arange(len(wanted)), wanted)
        before = np.cumsum(wanted) - wanted
        run = np.arange(len(index)) - before[index] + low[index]
        run_begin = begin[index] + run * step[index]
        from_ = np.maximum(run_begin, offset)
        to = np.minimum(run_begin + size[index], end)
        found: npt.NDArray[Any] = np.stack(
            [
                self._share[chosen][index],
                at[index] + run * size[index] + (from_ - run_begin),
                from_ - offset,
                to - from_,
            ],
            axis=1,
        )
        found = found[np.argsort(found[:, 2], kind="stable")]
        ends = np.append(0, np.cumsum(found[:, 3]))
        if ends[-1] != count or (found[:, 2] != ends[:-1]).any():
            raise Damaged(
                f"the shares have not all of the file's bytes {offset} to {end} (of"
                f" {self._file_bytes}), or some twice"
            )
        return found


class _Raw(io.RawIOBase):
    """The torch.save file, as Python reads files."""

    def __init__(self, shares: Shares) -> None:
        super().__init__()
        self._shares = shares
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._shares.manifest.bytes}
        self._at = max(0, base[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as wanted:
            count = max(0, min(len(wanted), self._shares.manifest.bytes - self._at))
            count = self._shares.read(wanted[:count], self._at)
        self._at += count
        return count


class SharesFile(LargeReads):
    """The torch.save file that shares have, as a file to read."""

    def __init__(self, shares: Shares, *, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE) -> None:
        super().__init__(_Raw(shares), shares.manifest.bytes, buffer_bytes)
        self._shares = shares

    def read_pieces(self, pieces: list[Piece], owners: object) -> None:
        """Fill memory, which `owners` keeps."""
        self._shares.read_pieces(pieces, owners)


__all__ = [
    "AnyShare",
    "Failure",
    "Index",
    "Missing",
    "OpenShare",
    "Place",
    "Shares",
    "SharesFile",
    "check_found",
    "has_shares",
    "newest_manifests",
    "newest_of",
    "none_in",
    "open_each",
    "open_others",
    "open_share",
    "opened_shares",
    "pass_over",
    "places_of",
    "read_manifest",
]
