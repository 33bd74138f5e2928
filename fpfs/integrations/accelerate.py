"""Accelerate by fpfs: `register`, whose `save_state` writes models' weights as fpfs does.

The files are the ones that Accelerate writes itself, byte for byte, so its `load_state` reads them.
Optimizers and all else Accelerate saves as ever: it has no hook for them.

Concurrency: as Accelerate's own: the main process writes, and nobody waits for others in a hook,
which other hooks may have left without weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fpfs.core.lazy import needing

with needing("fpfs.integrations.accelerate", extra="accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import clean_state_dict_for_safetensors

from fpfs.client.paths import check_flag
from fpfs.client.peers import ALONE
from fpfs.client.safetensors import save_safetensors

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

METADATA = {"format": "pt"}


def register(accelerator: Accelerator, *, durable: bool = False) -> RemovableHandle:
    """Let `accelerator.save_state` write models' weights by `fpfs.save_safetensors`.

    durable: as that has it. Models that FSDP, DeepSpeed or Megatron save are left to them. Register
        it behind other hooks: it takes all weights that they have left.

    Returns a handle, whose `remove` ends it. `save_state` raises what `save_safetensors` raises.
    Raises TypeError of what is no Accelerator, or no bool.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"register is given an Accelerator, not {accelerator!r}")
    check_flag("durable", durable)

    def save(_models: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        each_node = accelerator.project_configuration.save_on_each_node
        is_first = accelerator.is_local_main_process if each_node else accelerator.is_main_process
        for number, state in enumerate(weights if is_first else ()):
            name = f"model_{number}.safetensors" if number > 0 else "model.safetensors"
            # What is tied is in the file once, as Accelerate has it.
            tensors = clean_state_dict_for_safetensors(state)
            save_safetensors(
                tensors,
                os.path.join(output_dir, name),
                metadata=METADATA,
                durable=durable,
                group=ALONE,
            )
        weights.clear()  # what is left there, Accelerate saves

    hook: Callable[..., None] = save
    return accelerator.register_save_state_pre_hook(hook)


__all__ = ["register"]
