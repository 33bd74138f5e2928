"""Saves that training waits for no longer than a copy of its tensors takes.

`AsyncSaver.save` lays out the file, agrees with the other ranks on who writes what, and copies what
this rank writes. A thread writes the copy while training goes on (`saving`, `snapshot`).

Concurrency: an `AsyncSaver` is used by one thread, and by the process that made it. It has one save
under way: the next one waits for it, since both use the same memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from fpfs.client.container import lay_out
from fpfs.client.paths import check_threads
from fpfs.client.peers import Alone, peers_of
from fpfs.client.plan import Plan
from fpfs.client.safetensors import lay_out_safetensors
from fpfs.client.saving import LayOut, Save, Saved
from fpfs.client.snapshot import Memory
from fpfs.client.topology import TIMEOUT_S
from fpfs.client.updates import Held, Updates

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

logger = logging.getLogger(__name__)


class Saving:
    """A save that is under way."""

    def __init__(self, path: str, *, stall_s: float) -> None:
        self.path = path
        """The file, links followed."""
        self.stall_s = stall_s
        """How long `AsyncSaver.save` took: training waited so long."""
        self.update_wait_s = 0.0
        """How long steps of optimizers waited besides."""
        self.staged: Future[None] = Future()
        """Done when all is copied: the state may change."""
        self.acknowledged: Future[Saved] = Future()
        """Done when the name has the new file, whatever process dies."""
        self.durable: Future[Saved] = Future()
        """Done when file and name survive power loss."""
        for future in (self.staged, self.acknowledged, self.durable):
            # Who gives up waiting for one, as asyncio does, cannot cancel it.
            future.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        state = "under way"
        if self.durable.done():
            state = "failed" if self.durable.exception() else "durable"
        elif self.acknowledged.done():
            state = "acknowledged"
        elif self.staged.done():
            state = "staged"
        return f"<Saving {self.path}: {state}>"


class FileToSave(NamedTuple):
    """A file, of several that are saved together."""

    state: Any
    path: str | bytes | os.PathLike[Any]
    lay_out: LayOut = lay_out


class AsyncSaver:
    """Saves beside training, one checkpoint after the other.

    group, plan, timeout_s: as `save` has them.
    memory_bytes: taken and touched now, for what this rank writes of a state; what is missing, the
        first save adds, which takes ten times as long then.
    optimizers: their parameters and states in the processor's memory are copied after `save` has
        returned, and their next step waits for that. What else changes them must do so after
        `wait_before_update`. `save` is called between steps, not within one.
    threads: how many write, for each rank. None: as many as there are processors, at most 8, shared
        by the ranks.
    strict: what a save has failed of is raised by the next call; otherwise the log alone says it.

    A context, which is closed at its end. The end of the process waits for what is under way.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | Alone | None = None,
        plan: Plan | None = None,
        memory_bytes: int = 0,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
        threads: int | None = None,
        strict: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if not isinstance(memory_bytes, int) or memory_bytes < 0:
            raise ValueError(f"memory_bytes is {memory_bytes!r}: give a number of bytes, or 0")
        check_threads(threads)
        self._group = group
        self._plan = plan
        self._threads = threads
        self._strict = strict
        self._timeout_s = timeout_s
        self._memory = Memory()
        self._memory.reserve(memory_bytes)
        self._executor: ThreadPoolExecutor | None = ThreadPoolExecutor(
            1, thread_name_prefix="fpfs-save"
        )
        """None: closed."""
        self._last: Saving | None = None
        self._pid = os.getpid()
        self._updates = Updates(optimizers)

    def save(self, state: Any, path: str | bytes | os.PathLike[Any]) -> Saving:
        """Begin to save `state`, as `fpfs.save` does; return when it may change again.

        What `optimizers` have may change at their next step, or after `wait_before_update`.

        Waits for the save before. Raises what that has failed of, once and if strict; TimeoutError
        if it does not end within `timeout_s`; RuntimeError in another process; ValueError if this
        is closed; and what `fpfs.save` raises before it writes. What it raises later is in
        `Saving`.
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
        if self._executor is None:
            raise ValueError("the AsyncSaver is closed: make another one")
        started = time.monotonic()
        self.wait()
        held = self._updates.hold()
        steps = Save(peers_of(self._group, timeout_s=self._timeout_s))
        steps.__enter__()
        # Whoever takes it out leaves the context: an interrupt may come when the thread has it.
        entered = [(steps, held)]
        try:
            for file in files:
                steps.agree(file.state, file.path, self._plan, lay_out=file.lay_out)
            steps.snapshot(self._memory, later=held)
            self._last = Saving(steps.path, stall_s=time.monotonic() - started)
            self._updates.saving = self._last
            self._executor.submit(_write, self._last, entered, self._threads)
        except BaseException as error:
            with contextlib.suppress(IndexError):
                entered.pop()
                self._last = self._updates.saving = None
                steps.__exit__(type(error), error, error.__traceback__)
            raise
        return self._last

    def wait_before_update(self) -> None:
        """Return when all of the last save is copied, or it has failed: the state may change."""
        self._updates.wait()

    def wait(self) -> None:
        """Return when the last save is durable, or has failed; raises as `save` does."""
        if os.getpid() != self._pid:
            raise RuntimeError("an AsyncSaver is for the process that made it: make one here")
        last = self._last
        if last is None:
            return
        try:
            last.durable.exception(self._timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"the save of {last.path} has not ended for {self._timeout_s:.0f} s"
            ) from None
        self._last = None
        if self._strict:
            last.durable.result()

    def close(self) -> None:
        """Wait as `wait` does; nothing can be saved any more."""
        executor, self._executor = self._executor, None
        if os.getpid() != self._pid:
            return
        try:
            self.wait()
        finally:
            if executor is not None:
                executor.shutdown(wait=False)
            self._memory = Memory()
            if self._last is None:
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


def _write(saving: Saving, entered: list[tuple[Save, Held]], threads: int | None) -> None:
    """What the thread does with a save that is entered; nothing, if that has been left."""
    try:
        _write_and_tell(saving, entered, threads)
    except BaseException as error:  # noqa: BLE001 told by the futures
        # The error would keep the copy.
        traceback.clear_frames(error.__traceback__)
        is_there = saving.acknowledged.done()
        # Said now: there may be no next call.
        logger.error(
            "%s was %s: %s: %s",
            saving.path,
            "saved, but may not survive power loss" if is_there else "not saved",
            type(error).__name__,
            error,
        )
        for future in (saving.staged, saving.acknowledged, saving.durable):
            if not future.done():
                future.set_exception(error)


def _write_and_tell(saving: Saving, entered: list[tuple[Save, Held]], threads: int | None) -> None:
    started = time.monotonic()
    try:
        steps, held = entered.pop()
    except IndexError:
        return
    with contextlib.ExitStack() as stack:
        stack.push(steps)
        steps.finish_snapshot()
        held.check()
        saving.staged.set_result(None)
        finished = steps.write(durable=False, threads=threads)
        saved = Saved(
            path=steps.path,
            bytes=finished.total_bytes,
            seconds=saving.stall_s + time.monotonic() - started,
            lay_out_s=saving.stall_s,
            write_s=finished.write_s,
            durable=False,
            written=finished.written,
        )
        saving.acknowledged.set_result(saved)
        steps.flush()
    seconds = saving.stall_s + time.monotonic() - started
    saving.durable.set_result(saved._replace(seconds=seconds, durable=True))


__all__ = ["AsyncSaver", "FileToSave", "Saving"]
