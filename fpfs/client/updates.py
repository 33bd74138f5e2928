"""Optimizers whose next step waits until what it changes was copied.

Between two steps nobody changes parameters and an optimizer's state, so they can be copied beside
the forward and the backward pass. What else a model has, as its buffers, changes in these.

Concurrency: used by the thread that trains, but for `Held.check`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, Protocol

import torch

from fpfs.client.accelerators import has_streams
from fpfs.client.sharding import is_dtensor

logger = logging.getLogger(__name__)

_Key = tuple[torch.device, int, int]
"""Of a storage: its device, address and bytes. Others may begin at the same address."""


class Held(NamedTuple):
    """Storages that do not change until the next step."""

    storages: Mapping[_Key, torch.UntypedStorage]
    versions: Sequence[tuple[torch.Tensor, int]]
    """Of the tensors in them."""

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether this is one."""
        return bool(self.storages) and _key_of(storage) in self.storages

    def check(self) -> None:
        """Raise RuntimeError if one has changed, as far as torch counts changes, or is no more.

        It counts one when it has made it, so of one that is being made nothing is known.
        """
        for key, storage in self.storages.items():
            if _key_of(storage) != key:
                raise RuntimeError(
                    "memory of a parameter or of a state of its optimizer was given back, or"
                    " another's, before it was copied: call wait_before_update() before that"
                )
        for tensor, version in self.versions:
            if tensor._version != version:  # noqa: SLF001 torch has no other name for it
                raise RuntimeError(
                    f"a parameter or a state of its optimizer ({tensor.dtype}, shape"
                    f" {tuple(tensor.shape)}) was changed before it was copied: call"
                    " wait_before_update() before whatever changes them but step()"
                )


NOTHING_HELD = Held({}, ())


class Reading(Protocol):
    """What still reads what steps change."""

    path: str
    """What is saved."""
    update_wait_s: float
    """How long steps have waited."""

    @property
    def staged(self) -> Future[Any]:
        """Done when nothing is still to be read."""

    def moved(self) -> object:
        """Return another value than before if bytes were moved since."""


class Updates:
    """Optimizers whose steps wait, until this is closed.

    Knows nothing of whose it is: an optimizer may live longer.

    Raises TypeError of what is no torch.optim.Optimizer.
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        timeout_s: float,
        strict: bool = True,
    ) -> None:
        if not isinstance(optimizers, Iterable):
            optimizers = (optimizers,)
        self.optimizers = tuple(optimizers)
        """Whose steps wait."""
        self.savings: tuple[Reading, ...] = ()
        """What steps wait for, as long as it moves a byte within `timeout_s`."""
        self._timeout_s = timeout_s
        self._strict = strict
        self._pid = os.getpid()
        for optimizer in self.optimizers:
            # Some wrap another one, and make no hooks.
            if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(
                optimizer, "_optimizer_step_pre_hooks"
            ):
                raise TypeError(
                    f"optimizers has a {type(optimizer).__name__}: give torch.optim.Optimizer"
                    " objects (of one that wraps another, the one within), or call"
                    " wait_before_update() before what changes parameters"
                )
        self._hooks = []
        for optimizer in self.optimizers:
            hook = optimizer.register_step_pre_hook(lambda *_: self.wait())
            # Before those that are there: they may change parameters.
            optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # noqa: SLF001
            self._hooks.append(hook)

    def wait(self) -> None:
        """Return when nothing of `savings` is still to be copied, or written from where it lies.

        What moves no byte for `timeout_s` raises TimeoutError if strict, and otherwise is given up.
        """
        # A child of the process has its own copy of everything, and no thread.
        if os.getpid() != self._pid:
            return
        for saving in self.savings:
            started = time.monotonic()
            try:
                if ends(saving.staged, moved=saving.moved, silent_s=self._timeout_s):
                    continue
                error = TimeoutError(
                    f"the save of {saving.path} has moved no byte for {self._timeout_s:.0f} s, and"
                    " still reads what is to be changed"
                )
                if self._strict:
                    raise error
                if give_up(saving.staged, error):
                    logger.error("%s", error)
            finally:
                saving.update_wait_s += time.monotonic() - started

    def hold(self) -> Held:
        """What does not change from now until the next step, of devices that are copied beside.

        Of a storage that has other bytes, too, nothing: tensors that share it share a counter of
        changes, so that what changes these bytes counts as a change of all.
        """
        tensors: dict[_Key, list[torch.Tensor]] = {}
        storages: dict[_Key, torch.UntypedStorage] = {}
        ranges: dict[_Key, list[tuple[int, int]]] = {}
        for optimizer in self.optimizers:
            for tensor in _tensors_of(optimizer):
                with torch.no_grad():
                    local = tensor.to_local() if is_dtensor(tensor) else tensor
                # Of other classes torch alone knows what is saved of them.
                if type(local) not in {torch.Tensor, torch.nn.Parameter} or local.is_inference():
                    continue
                is_beside = local.device.type == "cpu" or has_streams(local.device)
                if (
                    is_beside
                    and local.layout is torch.strided
                    and torch.ops.aten.is_non_overlapping_and_dense(local)
                ):
                    storage, first = local.untyped_storage(), local.data_ptr()
                    key = _key_of(storage)
                    storages[key] = storage
                    ranges.setdefault(key, []).append((first, first + local.nbytes))
                    tensors.setdefault(key, []).extend((tensor, local))
        held = {
            key: storage
            for key, storage in storages.items()
            if _length_of(ranges[key]) == storage.nbytes()
        }
        counted = [tensor for each in held for tensor in tensors[each]]
        return Held(held, [(each, each._version) for each in counted])  # noqa: SLF001

    def close(self) -> None:
        """Let steps no longer wait, and forget the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.optimizers = [], ()


def ends(future: Future[Any], *, moved: Callable[[], object], silent_s: float) -> bool:
    """Wait until a future is done: whether it is, before `moved` stays the same for so long."""
    before, now = object(), moved()
    while now != before and not future.done():
        with contextlib.suppress(TimeoutError):
            future.exception(silent_s)
        before, now = now, moved()
    return future.done()


def give_up(future: Future[Any], error: BaseException) -> bool:
    """Have a future fail that is not done yet; return whether it was not."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        return False
    return True


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Its parameters, and what it keeps of each."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        yield from (value for value in values if isinstance(value, torch.Tensor))


def _key_of(storage: torch.UntypedStorage) -> _Key:
    return storage.device, storage.data_ptr(), storage.nbytes()


def _length_of(ranges: Iterable[tuple[int, int]]) -> int:
    """How many bytes these have, from where to where, which may overlap."""
    length, reached = 0, 0
    for first, end in sorted(ranges):
        length += max(0, end - max(first, reached))
        reached = max(reached, end)
    return length


__all__ = ["NOTHING_HELD", "Held", "Updates", "ends", "give_up"]
