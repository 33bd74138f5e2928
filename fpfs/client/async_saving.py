"""Saves that training waits for no longer than a copy of its tensors takes.

`AsyncSaver.save` lays out the file, agrees with the other ranks on who writes what, and copies what
this rank writes. While training goes on one thread copies what was left, and another writes the
copies, one save after the other (`saving`, `snapshot`).

Concurrency: an `AsyncSaver` is used by one thread, and by the process that made it. It has a
bounded number of saves under way: the next one waits for the oldest, and uses its memory.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from fpfs.client.agreement import LayOut
from fpfs.client.container import lay_out
from fpfs.client.paths import MAY_BE_LOST, check_threads, check_timeout
from fpfs.client.peers import Alone, Peers, RankFailed, peers_of
from fpfs.client.plan import Plan
from fpfs.client.safetensors import lay_out_safetensors
from fpfs.client.saving import Finished, Save, Saved
from fpfs.client.shares.saving import SharesSave
from fpfs.client.snapshot import InPlace, Memory
from fpfs.client.topology import TIMEOUT_S
from fpfs.client.updates import Held, Updates, ends, give_up
from fpfs.client.writing import Progress
from fpfs.core.units import format_size

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

logger = logging.getLogger(__name__)

SAY_AFTER_S = 5.0
"""The end of the process says what it waits for when it has waited so long."""


class Saving:
    """A save that is under way."""

    def __init__(
        self, path: str, *, began_s: float, progress: Progress, in_place_bytes: int
    ) -> None:
        self.path = path
        """The file, or directory of shares, links followed."""
        self.began_s = began_s
        """When the call began: of time.monotonic()."""
        self.stall_s = time.monotonic() - began_s
        """How long `AsyncSaver.save` took: training waited so long."""
        self.update_wait_s = 0.0
        """How long steps of optimizers waited besides."""
        self.staged: Future[None] = Future()
        """Done when all is copied, or written: the state may change."""
        self.acknowledged: Future[Saved] = Future()
        """Done when the name has the new file, whatever process dies."""
        self.durable: Future[Saved] = Future()
        """Done when file and name survive power loss."""
        self.in_place_bytes = in_place_bytes
        """What this rank writes from where it lies, since `staging_bytes` has no room for a copy.
        `staged` waits for that."""
        self._progress = progress
        for future in (self.staged, self.acknowledged, self.durable):
            # Who gives up waiting for one, as asyncio does, cannot cancel it.
            future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Say of what is not done yet that it has failed: for who makes it."""
        for future in (self.staged, self.acknowledged, self.durable):
            give_up(future, error)

    def give_up(self, error: BaseException) -> None:
        """Wait for it no longer: what still writes it may not give the file its name."""
        self._progress.given_up = error
        self.fail(error)

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for it any more, though it may still be written."""
        return self._progress.given_up is not None

    def moved(self) -> object:
        """Return another value than before if any rank is known to have moved bytes since."""
        return self._progress.moved()

    @property
    def bytes_to_write(self) -> int:
        """What this rank writes in all."""
        return self._progress.total_bytes

    @property
    def bytes_written(self) -> int:
        """What this rank has written by now. They are not durable yet."""
        return self._progress.bytes_written

    def __repr__(self) -> str:
        state = f"under way, {self.bytes_written} of {self.bytes_to_write} bytes written"
        if self.durable.done():
            state = "failed" if self.durable.exception() else "durable"
        elif self.acknowledged.done():
            state = "acknowledged"
        elif self.staged.done():
            state = state.replace("under way", "staged")
        return f"<Saving {self.path}: {state}>"


class FileToSave(NamedTuple):
    """A file, of several that are saved together."""

    state: Any
    path: str | bytes | os.PathLike[Any]
    lay_out: LayOut = lay_out


class _Steps(contextlib.AbstractContextManager[object], Protocol):
    """Of a save: `Save`, `SharesSave`."""

    progress: Progress

    @property
    def path(self) -> str: ...
    def snapshot(self, memory: Memory, *, later: Held) -> InPlace: ...
    def finish_snapshot(self) -> None: ...
    def start(self, *, threads: int | None) -> object: ...
    def write(self, *, threads: int | None) -> Finished: ...
    def flush(self) -> None: ...


S = TypeVar("S", bound=_Steps)
T = TypeVar("T")


class _UnderWay(NamedTuple):
    """A save that nobody has waited for, and where its copy lies."""

    saving: Saving
    memory: Memory


class AsyncSaver:
    """Saves beside training, one checkpoint after the other.

    group, plan, timeout_s: as `save` has them.
    in_flight: how many saves are under way at most, each with a copy of its own.
    memory_bytes: taken and touched now, for each copy of what this rank writes of a state; what is
        missing, the first saves add, which take ten times as long then.
    staging_bytes: what each copy may take at most. What has no room is written from where it lies,
        before the rest, and who may change it waits for that: the next step, or `save` itself, if
        there is more than that of what `optimizers` do not have. None: what states need.
    optimizers: their parameters and states are copied after `save` has returned, and their next
        step waits for that. What else changes them must do so after `wait_before_update`. `save` is
        called between steps, not within one.
    threads: how many write, for each rank. None: as many as there are processors, 2 to 8, shared
        by the ranks.
    strict: what a save has failed of is raised by the next call. Otherwise training goes on
        whatever becomes of its saves: what they fail of, and that one hangs, which is to move no
        byte for `timeout_s`, the log says, and the futures of `Saving`.

    A context, which is closed at its end. The end of the process waits for what is under way, and
    gives up a save that moves no byte for twice `timeout_s`; the log says both.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | Alone | None = None,
        plan: Plan | None = None,
        in_flight: int = 1,
        memory_bytes: int = 0,
        staging_bytes: int | None = None,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        threads: int | None = None,
        strict: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if not isinstance(memory_bytes, int) or memory_bytes < 0:
            raise ValueError(f"memory_bytes is {memory_bytes!r}: give a number of bytes, or 0")
        if staging_bytes is not None:
            if not isinstance(staging_bytes, int) or staging_bytes < 0:
                raise ValueError(
                    f"staging_bytes is {staging_bytes!r}: give a number of bytes, or None"
                )
            if memory_bytes > staging_bytes:
                raise ValueError(
                    f"memory_bytes is {memory_bytes}, and staging_bytes {staging_bytes}: take no"
                    " more than that"
                )
        if not isinstance(in_flight, int) or in_flight < 1:
            raise ValueError(f"in_flight is {in_flight!r}: give a number of saves, 1 or more")
        check_threads(threads)
        check_timeout(timeout_s)
        self._group = group
        self._plan = plan
        self._threads = threads
        self._strict = strict
        self._timeout_s = timeout_s
        self._in_flight = in_flight
        self._staging_bytes = staging_bytes
        self._has_said = False
        """That a state was larger."""
        self._spare: list[Memory] = []
        """What no save has."""
        if memory_bytes > 0:
            for _ in range(in_flight):
                self._spare.append(Memory(max_bytes=staging_bytes))
                self._spare[-1].reserve(memory_bytes)
        self._copying = _Thread("fpfs-copy")
        self._writing = _Thread("fpfs-save")
        self._closed = False
        self._under_way: deque[_UnderWay] = deque()
        """The oldest first."""
        self._hanging: tuple[Saving, object] | None = None
        """What was waited for as long as anything is, and what it had moved by then."""
        self._pid = os.getpid()
        self._updates = Updates(optimizers, timeout_s=timeout_s, strict=strict)

    def save(self, state: Any, path: str | bytes | os.PathLike[Any]) -> Saving:
        """Begin to save `state`, as `fpfs.save` does; return when it may change again.

        What `optimizers` have may change at their next step, or after `wait_before_update`; what
        else other devices have, by what this thread's current streams are given from now on.

        Waits for the oldest save if `in_flight` are under way. Raises RuntimeError in another
        process; ValueError if this is closed; and if strict, what a save before has failed of,
        once; TimeoutError if the oldest moves no byte for `timeout_s`, which is waited once; and
        what `fpfs.save` raises before it writes. What it raises later is in `Saving`.
        """
        return self.save_files([FileToSave(state, path)])

    def save_safetensors(
        self,
        tensors: Mapping[str, torch.Tensor],
        path: str | bytes | os.PathLike[Any],
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> Saving:
        """Begin to save `tensors`, as `fpfs.save_safetensors` does into one file.

        Otherwise as `save`. Tensors that are not contiguous are copied once more, by this call.
        """
        how = functools.partial(lay_out_safetensors, metadata=metadata)
        return self.save_files([FileToSave(tensors, path, how)])

    def save_files(self, files: Sequence[FileToSave]) -> Saving:
        """Begin to save several files, one or more, which get their names together, in order.

        Otherwise as `save`. `Saving` has the last one's path, and the bytes of all.
        """
        if not files:
            raise ValueError("there is no file to save")

        def agree(steps: Save) -> None:
            for file in files:
                steps.agree(file.state, file.path, self._plan, lay_out=file.lay_out)

        return self._begin("save", files[-1].path, Save, agree)

    def save_shares(
        self, state: Any, directory: str | bytes | os.PathLike[Any], *, copies: int = 1
    ) -> Saving:
        """Begin to save `state` over several nodes, as `fpfs.save_shares` does.

        Otherwise as `save`. `Saving.acknowledged` is done with `durable`, when the checkpoint is
        complete.
        """

        def steps_of(peers: Peers) -> SharesSave:
            return SharesSave(peers, copies=copies, timeout_s=self._timeout_s)

        def agree(steps: SharesSave) -> None:
            steps.agree(state, directory, self._plan)

        return self._begin("save_shares", directory, steps_of, agree)

    def _begin(
        self,
        call: str,
        path: str | bytes | os.PathLike[Any],
        steps_of: Callable[[Peers], S],
        agree: Callable[[S], None],
    ) -> Saving:
        """Begin to save what `agree` makes the ranks agree on; a failure is raised if strict."""
        self._check_process()
        started = time.monotonic()
        try:
            return self._begin_or_fail(call, started, steps_of, agree)
        except Exception as error:
            if self._strict or self._closed:
                raise
            # The frames that it was raised through have much.
            failed = error.with_traceback(None)
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else repr(path)
        logger.error("%s was not saved: %s: %s", name, type(failed).__name__, failed)
        saving = Saving(name, began_s=started, progress=Progress(), in_place_bytes=0)
        saving.fail(failed)
        return saving

    def _begin_or_fail(
        self,
        call: str,
        started: float,
        steps_of: Callable[[Peers], S],
        agree: Callable[[S], None],
    ) -> Saving:
        peers = peers_of(self._group, timeout_s=self._timeout_s, call=call)
        try:
            if self._closed:
                raise ValueError("the AsyncSaver is closed: make another one")
            self._make_room(peers)
            held = self._updates.hold()
        except Exception as failure:
            # The other ranks may know of another failure or of none: they come to this call, and
            # are told, but not that it fails for want of the rank that the former save failed of.
            with contextlib.suppress(RankFailed), steps_of(peers):
                if isinstance(failure, RankFailed):
                    why = f"its save before has failed: {failure}"
                    raise RankFailed(peers.rank, why) from None
                raise
            raise
        before = self._updates.savings
        steps = steps_of(peers)
        steps.__enter__()
        # Whoever takes it out leaves it. An interrupt may come when the thread has.
        entered: list[_Steps] = [steps]
        memory: Memory | None = None
        saving: Saving | None = None
        try:
            agree(steps)
            memory = self._take_memory(steps.progress.total_bytes)
            in_place = steps.snapshot(memory, later=held)
            saving = Saving(
                steps.path,
                began_s=started,
                progress=steps.progress,
                in_place_bytes=in_place.bytes,
            )
            self._updates.savings = (*(each.saving for each in self._under_way), saving)
            copied = self._copying.submit(_copy, saving, steps)
            self._under_way.append(_UnderWay(saving, memory))
            written = self._writing.submit(_write, saving, entered, copied, self._threads)
            _at_exit.add(saving, written, timeout_s=self._timeout_s)
            self._say(in_place)
            if not in_place.is_held:
                self._updates.wait()
                # That was the call's wait, and no step's.
                saving.stall_s, saving.update_wait_s = time.monotonic() - started, 0.0
        except BaseException as error:
            if saving is not None and saving.in_place_bytes > 0:
                why = "save was interrupted before it had written what may change"
                give_up(saving.staged, RuntimeError(why))
            with contextlib.suppress(IndexError):
                entered.pop()
                if memory is not None and self._updates.savings is before:
                    self._spare.append(memory)
                elif self._under_way and self._under_way[-1].memory is memory:
                    self._under_way.pop()
                self._updates.savings = before
                steps.__exit__(type(error), error, error.__traceback__)
            raise
        return saving

    def _say(self, in_place: InPlace) -> None:
        """Say once that a state is larger than what may be copied."""
        if in_place.bytes == 0 or self._has_said:
            return
        self._has_said = True
        assert self._staging_bytes is not None
        logger.warning(
            "%s of a state are written from where they lie, since staging_bytes is %s: %s for that",
            format_size(in_place.bytes),
            format_size(self._staging_bytes),
            "the next step waits" if in_place.is_held else "save waits",
        )

    def _take_memory(self, size: int) -> Memory:
        """Return that of a copy of so many bytes: the smallest that has room, or the largest.

        So files that take turns do not all come to have memory for the largest of them.
        """
        if not self._spare:
            return Memory(max_bytes=self._staging_bytes)
        fits = [each for each in self._spare if each.size >= size]
        found = min(fits or self._spare, key=lambda each: each.size if fits else -each.size)
        self._spare.remove(found)
        return found

    def _make_room(self, peers: Peers) -> None:
        """Return when another save may begin."""
        while self._under_way and (
            len(self._under_way) >= self._in_flight
            # Ranks of a group learn of a failure at the same call.
            or (peers.size == 1 and self._under_way[0].saving.durable.done())
        ):
            self._await_oldest()

    def _await_oldest(self) -> None:
        saving = self._under_way[0].saving
        silent_s = 0 if self._hanging == (saving, saving.moved()) else self._timeout_s
        if not ends(saving.durable, moved=saving.moved, silent_s=silent_s):
            self._hanging = saving, saving.moved()
            raise TimeoutError(
                f"the save of {saving.path} has not ended, and moved no byte for"
                f" {self._timeout_s:.0f} s"
            )
        # No frame that the failure is raised through has the memory.
        if saving.is_given_up:  # It may still be read.
            self._under_way.popleft()
        else:
            self._spare.append(self._under_way.popleft().memory)
        if self._strict:
            saving.durable.result()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("an AsyncSaver is for the process that made it: make one here")

    def wait_before_update(self) -> None:
        """Return when the state may change: all saves have it, or have failed.

        If one moves no byte for `timeout_s`, raises TimeoutError if strict, as do steps of
        `optimizers`; otherwise the save that still reads is given up: its file stays as it was.
        """
        self._updates.wait()

    def wait(self) -> None:
        """Return when all saves are durable, or have failed; raises as `save` does.

        If not strict, returns also if one moves no byte for `timeout_s`, which the log says.
        """
        self._check_process()
        failures = []
        while self._under_way:
            count = len(self._under_way)
            try:
                self._await_oldest()
            except Exception as error:
                if len(self._under_way) == count:  # It has not ended.
                    if self._strict:
                        raise
                    logger.error("%s", error)
                    return
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Wait as `wait` does; nothing can be saved any more."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        try:
            self.wait()
        finally:
            self._copying.end()
            self._writing.end()
            self._spare.clear()
            if not self._under_way:
                self._updates.close()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Thread:
    """A thread that makes one call after the other.

    Unlike concurrent.futures' one the process may end without it (`_AtExit`).
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._name = name
        self._is_started = False
        self._end = weakref.finalize(self, self._calls.put, None)
        self._end.atexit = False

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Make a call, after those before. RuntimeError if there can be no thread for it."""
        if not self._is_started:
            threading.Thread(
                target=_make_calls, args=(self._calls, self._turn), name=self._name, daemon=True
            ).start()
            # An interrupt that comes before this makes another thread begin, beside this one.
            self._is_started = True
        future: Future[T] = Future()
        self._calls.put(functools.partial(_make, future, call, arguments))
        return future

    def end(self) -> None:
        """End the thread when it has made its calls."""
        self._end()


def _make_calls(calls: queue.SimpleQueue[Callable[[], None] | None], turn: threading.Lock) -> None:
    while True:
        with turn:
            if (call := calls.get()) is None:
                calls.put(None)  # for a thread beside this one
                return
            call()
            del call  # It has what is saved.


def _make(future: Future[T], call: Callable[..., T], arguments: Sequence[Any]) -> None:
    try:
        future.set_result(call(*arguments))
    except BaseException as error:  # noqa: BLE001 raised to who waits
        future.set_exception(error)


class _AtExit:
    """What is finished before the process ends."""

    def __init__(self) -> None:
        self._under_way: dict[Future[None], tuple[Saving, float]] = {}
        """What writes a save, and calls who waits for it; with `timeout_s`."""
        self._has_ended = False
        # The first is called before other threads are waited for, which may save until they end;
        # what multiprocessing forks calls no other.
        try:
            threading._register_atexit(self._finish)  # type: ignore[attr-defined]  # noqa: SLF001
        except RuntimeError:  # The main thread has ended, or calls such a function just now.
            self._has_ended = threading.current_thread() is threading.main_thread()
        atexit.register(self._end)
        # A child has no threads that would finish anything.
        os.register_at_fork(after_in_child=self._under_way.clear)

    def add(self, saving: Saving, written: Future[None], *, timeout_s: float) -> None:
        """Finish a save: at once, if nothing else is called before the process ends."""
        self._under_way[written] = (saving, timeout_s)
        written.add_done_callback(lambda _: self._under_way.pop(written, None))
        if self._has_ended:
            self._finish()

    def _end(self) -> None:
        self._has_ended = True
        self._finish()

    def _finish(self) -> None:
        try:
            for written, (saving, timeout_s) in tuple(self._under_way.items()):
                with contextlib.suppress(TimeoutError):
                    written.exception(min(SAY_AFTER_S, timeout_s))
                    continue
                logger.warning("the process ends when this save has: %r", saving)
                silent_s = 2 * timeout_s  # as long as a rank waits for others
                if not ends(written, moved=saving.moved, silent_s=silent_s):
                    self._give_up(written, TimeoutError(f"no byte was moved for {silent_s:.0f} s"))
        except BaseException:
            for written in tuple(self._under_way):
                self._give_up(written, InterruptedError("interrupted"))
            raise

    def _give_up(self, written: Future[None], error: OSError) -> None:
        found = self._under_way.pop(written, None)
        if found is not None:
            saving, _ = found
            logger.error("%s is given up: %s, and the process ends", saving.path, error)
            saving.give_up(error)


_at_exit = _AtExit()


def _copy(saving: Saving, steps: _Steps) -> None:
    """What the one thread does with a save: what its optimizers' next step waits for."""
    with _staging(saving, is_last=saving.in_place_bytes == 0):
        steps.finish_snapshot()


@contextlib.contextmanager
def _staging(saving: Saving, *, is_last: bool) -> Iterator[None]:
    """Read a state, which may change when the last of it is read."""
    try:
        yield
        if is_last:
            saving.staged.set_result(None)
    except BaseException as error:
        if is_last:
            give_up(saving.staged, error)
        first = saving.staged.exception() if saving.staged.done() else None
        if first is None or first is error:
            raise
        # Nobody waited for it any more: that is why it failed, not what has changed since.
        error.__traceback__ = None  # Its frames have the copy.
        raise first from None


def _write(
    saving: Saving,
    entered: list[_Steps],
    copied: Future[None],
    threads: int | None,
) -> None:
    """What the other one does with a save that is entered; nothing, if that has been left."""
    try:
        _write_and_tell(saving, entered, copied, threads)
    except BaseException as error:  # noqa: BLE001 told by the futures
        # The error would keep the copy.
        traceback.clear_frames(error.__traceback__)
        if saving.is_given_up:  # That was said.
            return
        # Of shares the error says it, or that of the rank that failed.
        is_there = saving.acknowledged.done() or MAY_BE_LOST in str(error)
        # Said now: there may be no next call.
        logger.error(
            "%s was %s: %s: %s",
            saving.path,
            MAY_BE_LOST if is_there else "not saved",
            type(error).__name__,
            error,
        )
        saving.fail(error)


def _write_and_tell(
    saving: Saving,
    entered: list[_Steps],
    copied: Future[None],
    threads: int | None,
) -> None:
    try:
        steps = entered.pop()
    except IndexError:
        return
    # `save` adds the time that it waits for the first part of this.
    lay_out_s = saving.stall_s
    with contextlib.ExitStack() as stack:
        stack.push(steps)
        # Ranks that have begun may read what others have copied.
        copied.result()
        with _staging(saving, is_last=saving.in_place_bytes > 0):
            steps.start(threads=threads)
        finished = steps.write(threads=threads)
        saved = finished.saved(
            steps.path,
            seconds=time.monotonic() - saving.began_s,
            lay_out_s=lay_out_s,
        )
        saving.acknowledged.set_result(saved)
        steps.flush()
    seconds = time.monotonic() - saving.began_s
    saving.durable.set_result(saved._replace(seconds=seconds, durable=True))


__all__ = ["AsyncSaver", "FileToSave", "Saving"]
