"""Saves one checkpoint after the other with torch.distributed.checkpoint, and says when each is.

Usage: distributed_saves.py FOLDER COUNT [NAME [fpfs]]: to FOLDER/stepN, or always to FOLDER/NAME;
by torch's writer, or by fpfs.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

SHAPE = (700, 1009)
TENSORS = 4


def state(step: int) -> dict[str, object]:
    """What is saved in a step: it tells the step."""
    tensors = {f"layer{i}": torch.full(SHAPE, float(step * TENSORS + i)) for i in range(TENSORS)}
    return {"model": tensors, "step": step}


def main() -> None:
    warnings.simplefilter("ignore")
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    for step in range(1, count + 1):
        name = sys.argv[3] if len(sys.argv) > 3 else f"step{step}"
        if sys.argv[4:] == ["fpfs"]:
            from fpfs.dcp import Writer

            writer = Writer(folder / name)
        else:
            writer = dcp.FileSystemWriter(folder / name, thread_count=3, overwrite=True)
        dcp.save(state(step), storage_writer=writer, no_dist=True)
        print(step, flush=True)


if __name__ == "__main__":
    main()
