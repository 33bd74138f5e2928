"""DeepSpeed's FastFileWriter as a peer: torch.save into its pinned, double-buffered direct writer.

DeepSpeed compiles what it writes with, once for a machine: that needs ninja, which is beside the
interpreter, and libaio's header.

Quiet: the accelerator is named beforehand, or DeepSpeed looks for one and warns.

Concurrency: one save at a time; the handle and its pinned buffer are made once for each process,
as DeepSpeed does.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

BLOCK_BYTES = 8 * 1024 * 1024
QUEUE_DEPTH = 32
BUFFER_BYTES = 256 * 1024 * 1024


@functools.cache
def compiled() -> Any:
    """The module that writes, which the first call on a machine compiles for minutes."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().load(verbose=False)


@functools.cache
def handle_and_buffer() -> tuple[Any, Any]:
    """What writes, and the locked memory that it writes from."""
    import torch

    handle = compiled().aio_handle(
        block_size=BLOCK_BYTES,
        queue_depth=QUEUE_DEPTH,
        single_submit=False,
        overlap_events=True,
        intra_op_parallelism=1,
    )
    buffer = handle.new_cpu_locked_tensor(BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))
    buffer.zero_()
    return handle, buffer


class UtilsOnProcessors:
    """DeepSpeed builds its utilities for accelerators only. All that the writer takes from them is
    a view of tensors as bytes.
    """

    def load(self) -> UtilsOnProcessors:
        """As DeepSpeed's builder does, but nothing is built."""
        return self

    @staticmethod
    def cast_to_byte_tensor(tensors: list[Any]) -> list[Any]:
        """Views of them as bytes."""
        import torch

        return [tensor.view(torch.uint8) for tensor in tensors]


def save(state: dict[str, Any], path: str, *, legacy: bool) -> None:
    """torch.save through the writer; returns when it has closed the file."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from deepspeed.io import FastFileWriter, FastFileWriterConfig, fast_file_writer

    handle, buffer = handle_and_buffer()
    fast_file_writer.UtilsBuilder = UtilsOnProcessors
    config = FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer, double_buffer=True)
    writer = FastFileWriter(file_path=path, config=config)
    torch.save(state, writer, _use_new_zipfile_serialization=not legacy)
    writer.close()
