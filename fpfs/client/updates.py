"""Optimizers whose next step waits until what it changes was copied.

Between two steps nobody changes parameters and an optimizer's state, so they can be copied beside
the forward and the backward pass. What else a model has, as its buffers, changes in these.

Concurrency: used by the thread that trains, but for `Held.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from fpfs.client.sharding import is_dtensor


class Held(NamedTuple):
    """Tensors that do not change until the next step."""

    storages: frozenset[int]
    """Where these lie in memory."""
    versions: list[tuple[torch.Tensor, int]]

    def check(self) -> None:
        """Raise RuntimeError if one has changed, as far as torch counts changes."""
        for tensor, version in self.versions:
            if tensor._version != version:  # noqa: SLF001 torch has no other name for it
                raise RuntimeError(
                    "a parameter or a state of its optimizer was changed before it was copied:"
                    " call wait_before_update() before whatever changes them but step()"
                )


class Updates:
    """Optimizers that call `wait` before each step, until this is closed.

    Raises TypeError of what is no torch.optim.Optimizer.
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        wait: Callable[[], None],
    ) -> None:
        if not isinstance(optimizers, Iterable):
            optimizers = (optimizers,)
        self._optimizers = tuple(optimizers)
        for optimizer in self._optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    f"optimizers has a {type(optimizer).__name__}: give torch.optim.Optimizer"
                    " objects, or call wait_before_update() before what changes parameters"
                )
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: wait()) for optimizer in self._optimizers
        ]

    def hold(self) -> Held:
        """What does not change from now until the next step: of the processor's memory."""
        storages, versions = set(), []
        for optimizer in self._optimizers:
            for tensor in _tensors_of(optimizer):
                with torch.no_grad():
                    local = tensor.to_local() if is_dtensor(tensor) else tensor
                # Of other classes torch alone knows what is saved of them.
                if type(local) not in {torch.Tensor, torch.nn.Parameter} or local.is_inference():
                    continue
                if local.device.type == "cpu" and local.layout is torch.strided:
                    storages.add(local.untyped_storage().data_ptr())
                    versions += [(each, each._version) for each in (tensor, local)]  # noqa: SLF001
        return Held(frozenset(storages), versions)

    def close(self) -> None:
        """Let steps no longer wait."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Its parameters, and what it keeps of each."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        values = state.values() if isinstance(state, dict) else ()
        yield from (value for value in values if isinstance(value, torch.Tensor))


__all__ = ["Held", "Updates"]
