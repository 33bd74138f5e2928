"""Saves a state as one ordinary torch.save file, by several threads, with its CRC32s right.

How: torch.save lays the file out without moving a tensor's bytes (`container`), the file is sized
and its room reserved, native threads write tensors from where they lie to where they belong, and
one rename gives the file its name (`replacement`). Ranks of a group each write a share (`planning`)
and tell each other how it went (`peers`); one process is a group of one.

Concurrency: `save` may be called from several threads at once, by one of them for a group. A tensor
that changes meanwhile is saved as some mixture of what it was and what it became, with a CRC32 that
may be wrong; it must not be resized, shared or freed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from fpfs.client.agreement import Agreed, LayOut, agree
from fpfs.client.container import lay_out
from fpfs.client.gathering import Offered, Source
from fpfs.client.paths import (
    check_flag,
    default_threads,
    name_file,
    naming,
    ranks_here,
    resolve_file,
    saved_already,
)
from fpfs.client.peers import Alone, Peers, RankFailed, peers_of
from fpfs.client.plan import NO_PIECES, Plan, Share
from fpfs.client.replacement import Replacement, locked_directory, remove_left
from fpfs.client.snapshot import InPlace, Memory, Part, Uncopied, copy_rest
from fpfs.client.topology import TIMEOUT_S
from fpfs.client.updates import NOTHING_HELD, Held
from fpfs.client.writing import (
    Done,
    Located,
    Progress,
    Task,
    Written,
    put_crc32,
    write,
    write_share,
)
from fpfs.core.units import format_rate, format_size

if TYPE_CHECKING:
    import torch.distributed as dist


class Saved(NamedTuple):
    """What `save` did."""

    path: str
    """The file, links followed."""
    bytes: int
    """Of the file."""
    seconds: float
    """Of the whole call, as this rank saw it."""
    lay_out_s: float
    """Until writing began."""
    write_s: float
    """Until all ranks had written."""
    durable: bool
    """Whether it survives power loss by now."""
    written: tuple[Written, ...]
    """By rank; those that had nothing to write are left out."""

    def __str__(self) -> str:
        """One line for a log."""
        safe = "durable" if self.durable else "saved"
        rate = format_rate(self.bytes / self.seconds)
        by = f" by {len(self.written)} ranks" if len(self.written) > 1 else ""
        size = format_size(self.bytes)
        return f"{self.path}: {size} {safe} in {self.seconds:.2f} s{by}, {rate}"


def save(
    state: Any,
    path: str | bytes | os.PathLike[Any],
    *,
    group: dist.ProcessGroup | Alone | None = None,
    plan: Plan | None = None,
    durable: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Saved:
    """Save `state` as torch.save does, faster, and whole or not at all.

    What lies at `path` afterwards is what torch.save writes: torch.load and unzip read it. It takes
    the name by one rename after its last byte, so at any time the name holds the new file or the
    former one; if something fails, the former one, and nothing else. Links are followed; owner and
    mode of a former file stay. With `durable` the name may be what fails to become so: that has the
    new file then, and the error says that it was saved, but may not survive power loss.

    state: what torch.save takes. Storages on other devices have what this thread's current streams
        have to do by now.
    group: whose ranks write it together, each a part: all call `save`, with the same tensors and a
        path to the same file. What is not a tensor is rank 0's. A DTensor is saved whole, as an
        ordinary tensor in the processor's memory: each rank writes of its part. None: the default
        group of torch.distributed, if that is initialized. ALONE: this process only.
    plan: which ranks write what, the same on all ranks (`Plan.build`). If the state is another one
        by now, that is said in the log, and planned anew for the same ranks and writers. None:
        all ranks that have the same bytes divide them.
    durable: return when the file and its name survive power loss, as after fsync(2). That is so on
        all ranks if it is given on one.
    timeout_s: seconds that a rank waits at most for another that it knows nothing of.

    Elsewhere than on a mount of fpfs it works as well, says so once in the log, and flushes the
    file before the rename.

    Raises OSError as open(2) and write(2) do (ENOSPC before the first byte is written, where the
    filesystem can reserve room), TypeError of what is no path or no bool, ValueError of an address
    as s3://bucket/file, of a tensor whose parts are not a whole, or of a plan for other ranks, what
    torch.save raises of what cannot be pickled, and RankFailed of what another rank has raised.
    """
    started = time.monotonic()
    with Save(peers_of(group, timeout_s=timeout_s)) as steps:
        check_flag("durable", durable)
        steps.agree(state, path, plan)
        laid_out = time.monotonic()
        finished = steps.write(durable=durable)
    return finished.saved(
        steps.path, seconds=time.monotonic() - started, lay_out_s=laid_out - started
    )


class Finished(msgspec.Struct):
    """What rank 0 knows in the end: the fields of `Saved` that are the same on all ranks."""

    total_bytes: int
    write_s: float
    written: tuple[Written, ...]
    durable: bool

    def saved(self, path: str, *, seconds: float, lay_out_s: float) -> Saved:
        """Return it with what this rank knows."""
        return Saved(
            path=path,
            bytes=self.total_bytes,
            seconds=seconds,
            lay_out_s=lay_out_s,
            write_s=self.write_s,
            durable=self.durable,
            written=self.written,
        )


class _File:
    """A file of a save, laid out and agreed on."""

    def __init__(self, path: str, agreed: Agreed) -> None:
        self.path = path
        """Links followed."""
        self.container, self.planning, self.plan, self.offered = agreed
        self.uncopied: Uncopied | None = None
        self.in_place: frozenset[int] = frozenset()
        """Records of which a snapshot has no copy."""
        self.replacement: Replacement | None = None
        """Rank 0's, from when it is written on."""
        self.made_at_s = 0.0
        self.task: Task | None = None
        """From when the file is made."""
        self.done_in_place: Done | None = None
        """What this rank has written, if not all had a copy."""
        self.is_written = False

    def bytes_of(self, rank: int) -> int:
        """What a rank writes."""
        share = self.plan.share(rank)
        texts = [*share.texts, *(self.plan.rest if rank == 0 else ())]
        return share.bytes + sum(self.container.text_part(number).bytes for number in texts)

    def make(self, ranks: list[Located]) -> list[Task]:
        """Rank 0: make the file, with room for all of it, and tell where everything is."""
        self.replacement = Replacement(self.path)
        self.replacement.reserve(self.container.bytes)
        path = os.fsencode(self.replacement.temporary_path)
        tasks = []
        for rank in range(len(ranks)):
            sources = {}
            if self.plan.gathered:
                own = set(self.plan.share(rank).table[:, 2].tolist())
                for number in own.intersection(self.plan.gathered):
                    sources[number] = [
                        Source(holder, ranks[holder].pid, ranks[holder].addresses[number])
                        for holder in self.planning.holders(number, nearest=rank)
                    ]
            tasks.append(Task(path, sources))
        return tasks

    def write_rest(self, parts: list[Done], progress: Progress) -> tuple[Written, ...]:
        """Rank 0: write what had to wait for all CRC32s."""
        assert self.replacement is not None
        put_crc32(self.plan.rest, [part.crcs for part in parts], self.container)
        rest = Share(NO_PIECES, self.plan.rest)
        write(rest, self.container, fd=self.replacement.fd, threads=1, progress=progress)
        rest_bytes = sum(self.container.text_part(number).bytes for number in rest.texts)
        own = parts[0].written
        parts[0].written = own._replace(bytes=own.bytes + rest_bytes)
        return tuple(part.written for part in parts if part.written.bytes > 0)


class Save:
    """A save, step by step. As a context: what is begun and not finished is undone.

    All ranks of the group do each step, which raises as `save`. A step may be another thread's than
    the one before. Several files may be agreed on, before the first is written or later; they get
    their names together.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._files: list[_File] = []
        self._held = NOTHING_HELD
        """What a snapshot has left."""
        self.progress = Progress(peers)
        """Of this rank."""

    @property
    def path(self) -> str:
        """The last file that was agreed on; "": there is none."""
        return self._files[-1].path if self._files else ""

    def __enter__(self) -> Save:
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
            for file in self._files:
                if file.uncopied is not None:
                    # The memory may be the next snapshot's.
                    stack.callback(file.uncopied.copies.wait)
            for replacement in self._replacements:
                stack.callback(replacement.discard)
            if error is not None:
                # Before that, or ranks that come late would only find that there is no file.
                self._peers.tell(error)
            if isinstance(error, RankFailed) and error.rank == 0 and error.gone:
                # It made the files, and would have removed them. The mount may have gone with it.
                for file in self._files:
                    with contextlib.suppress(OSError):
                        remove_left(file.path)

    def agree(
        self,
        state: Any,
        path: str | bytes | os.PathLike[Any],
        plan: Plan | None,
        *,
        lay_out: LayOut = lay_out,
        follow: bool = True,
    ) -> None:
        """Lay out a file, make sure that all ranks save the same, and know who writes what.

        follow: links; otherwise `path` is absolute, and what is there is replaced itself.
        """
        name = resolve_file(path) if follow else os.fsdecode(path)
        file = _File(name, agree(self._peers, state, plan, lay_out, path=name))
        self._files.append(file)
        self.progress.total_bytes += file.bytes_of(self._peers.rank)

    def snapshot(self, memory: Memory, *, later: Held = NOTHING_HELD) -> InPlace:
        """Copy what this rank writes, and what others read of it: so the tensors may change.

        later: what `finish_snapshot` is to copy. Returns what has no copy: `start` writes it. Both
            raise RuntimeError if that has changed.
        """
        parts = [
            Part(file.container, file.plan.share(self._peers.rank), file.plan.gathered)
            for file in self._files
        ]
        self._held = later
        copies, in_place = memory.copy(parts, later=later)
        for file, copied in zip(self._files, copies, strict=True):
            file.container, file.uncopied, file.in_place = copied
            file.offered = Offered(file.container, file.plan.gathered)
        return in_place

    def finish_snapshot(self) -> None:
        """Copy what `snapshot` has left."""
        for file in self._files:
            assert file.uncopied is not None
            copy_rest(file.uncopied)

    def start(self, *, threads: int | None = None) -> None:
        """Make the files of what was agreed on; returns when all that has no copy is written.

        threads: as `write` has them.
        """
        made = [file for file in self._unwritten if file.task is None]
        # All first: if there is no room for one, nothing is written.
        for file in made:
            self._make(file)
        for file in made:
            if file.in_place:
                self._held.check()
                self._write_in_place(file, threads)
                self._held.check()

    def write(
        self,
        *,
        durable: bool = False,
        threads: int | None = None,
        commit: bool = True,
        then: Callable[[], object] | None = None,
    ) -> Finished:
        """Write this rank's share of what was agreed on; returns when all ranks have written.

        threads: how many write. None: this rank's share of as many as there are processors.
        commit: give all files their names, too, also those that were written before.
        then: what rank 0 does when they have their names, before other saves that have a `then`
            give names in this directory.
        """
        self.start(threads=threads)
        finished, unwritten = list[Finished](), self._unwritten
        since_s = unwritten[0].made_at_s
        for file in unwritten:
            is_last = file is unwritten[-1]
            commits = functools.partial(self._commit, then=then)
            last = commits if commit and is_last else None
            finished.append(self._write(file, durable, threads=threads, since_s=since_s, then=last))
        return Finished(
            total_bytes=sum(each.total_bytes for each in finished),
            write_s=finished[-1].write_s,
            written=_together(each for every in finished for each in every.written),
            durable=finished[-1].durable,
        )

    def flush(self) -> None:
        """Return when the files and their names survive power loss."""

        def flush(ranks: list[None]) -> list[None]:
            for replacement in self._replacements:
                replacement.flush()
            return ranks

        self._peers.exchange("flush", None, flush, of=type(None))

    def commit(self, *, durable: bool) -> None:
        """Give the files, which have been written, their names."""

        def commit(wanted: list[bool]) -> list[None]:
            self._commit(any(wanted), then=None)
            return [None] * len(wanted)

        self._peers.exchange("commit", durable, commit, of=type(None))

    @property
    def _unwritten(self) -> list[_File]:
        return [file for file in self._files if not file.is_written]

    @property
    def _replacements(self) -> list[Replacement]:
        """Rank 0's."""
        return [file.replacement for file in self._files if file.replacement is not None]

    def _make(self, file: _File) -> None:
        """Have rank 0 make one."""
        file.made_at_s = time.monotonic()
        addresses = {number: file.offered.addresses[number] for number in file.plan.gathered}
        located = Located(os.getpid(), addresses)
        with naming(file.path):
            file.task = self._peers.exchange("share", located, file.make, of=Task)

    def _write_in_place(self, file: _File, threads: int | None) -> None:
        """Write what has no copy."""
        assert file.task is not None
        share, _ = file.plan.share(self._peers.rank).of(file.in_place)
        # No other rank reads these.
        own = Task(file.task.temporary_path, {})
        file.done_in_place = self._write_share(file, share, own, threads)

    def _write(
        self,
        file: _File,
        durable: bool,
        *,
        threads: int | None,
        since_s: float,
        then: Callable[[bool], object] | None,
    ) -> Finished:
        """Write this rank's share of one; `then` rank 0 does something before anybody returns.

        since_s: when the first of several was made. then: told whether a rank wants `durable`.
        """
        assert file.task is not None
        _, share = file.plan.share(self._peers.rank).of(file.in_place)
        if file.done_in_place is not None:
            put_crc32(share.texts, [file.done_in_place.crcs], file.container)
        done = self._write_share(file, share, file.task, threads)
        if file.done_in_place is not None:
            done = file.done_in_place.and_then(done)
        done.durable = durable
        self.progress.check()

        def finish(parts: list[Done]) -> list[Finished]:
            written = file.write_rest(parts, self.progress)
            seconds = time.monotonic() - since_s
            is_wanted = any(part.durable for part in parts)
            if then is not None:
                then(is_wanted)
            is_durable = is_wanted and then is not None
            finished = Finished(file.container.bytes, seconds, written, is_durable)
            return [finished] * len(parts)

        finished = self._peers.exchange("part", done, finish, of=Finished)
        file.is_written = True
        return finished

    def _write_share(self, file: _File, share: Share, task: Task, threads: int | None) -> Done:
        if threads is None:
            threads = default_threads(min(self._peers.size, ranks_here()))
        own_fd = -1 if file.replacement is None else file.replacement.fd
        with naming(file.path):
            return write_share(
                share, task, file.container, self._peers, own_fd, threads, self.progress
            )

    def _commit(self, durable: bool, *, then: Callable[[], object] | None) -> None:
        """Rank 0: give all files their names, when all are as safe as they must be."""
        for replacement in self._replacements:
            replacement.complete(durable=durable)
        with contextlib.ExitStack() as stack:
            if then is not None:
                stack.enter_context(locked_directory(os.path.dirname(self.path)))
            self.progress.check()
            for replacement in self._replacements:
                replacement.take_name()
            if then is not None:
                then()
            if durable:
                with saved_already():
                    for replacement in self._replacements:
                        replacement.flush_name()


def _together(written: Iterable[Written]) -> tuple[Written, ...]:
    """What each rank has written of all files."""
    found: dict[int, Written] = {}
    for each in written:
        found[each.rank] = found[each.rank].and_then(each) if each.rank in found else each
    return tuple(found[rank] for rank in sorted(found))
