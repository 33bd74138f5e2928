"""Accelerate by fpfs: `register`, whose `save_state` writes models' weights as fpfs does.

The files are the ones that Accelerate writes itself, byte for byte, so its `load_state` reads them.
Optimizers and all else Accelerate saves as ever: it has no hook for them.

Concurrency: as `fpfs.save_safetensors`: all processes of a job call `save_state`, and write each
model together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import clean_state_dict_for_safetensors

from fpfs.client.paths import check_timeout
from fpfs.client.safetensors import save_safetensors
from fpfs.client.topology import TIMEOUT_S

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

METADATA = {"format": "pt"}


def register(
    accelerator: Accelerator, *, durable: bool = False, timeout_s: float = TIMEOUT_S
) -> RemovableHandle:
    """Let `accelerator.save_state` write models' weights by `fpfs.save_safetensors`.

    durable, timeout_s: as that has them. All processes must see the directory; models that FSDP,
        DeepSpeed or Megatron save are left to them.

    Returns a handle, whose `remove` ends it. `save_state` raises what `save_safetensors` raises.
    Raises TypeError of what is no Accelerator.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"register is given an Accelerator, not {accelerator!r}")
    check_timeout(timeout_s)

    def save(_models: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        for number, state in enumerate(weights):
            name = f"model_{number}.safetensors" if number > 0 else "model.safetensors"
            # What is tied is in the file once, as Accelerate has it.
            tensors = clean_state_dict_for_safetensors(state)
            save_safetensors(
                tensors,
                os.path.join(output_dir, name),
                metadata=METADATA,
                durable=durable,
                timeout_s=timeout_s,
            )
        weights.clear()  # what is left there, Accelerate saves

    hook: Callable[..., None] = save
    return accelerator.register_save_state_pre_hook(hook)


__all__ = ["register"]
