"""DeepSpeed's checkpoint engines, and the one that fpfs registers.

The decoupled one has a process that writes with FastFileWriter. It is forked, so it has what
`deepspeed_writer` replaces; DeepSpeed would start it anew.

Concurrency: one save at a time.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

from benchmarks.peers import deepspeed_writer as writer


def make_decoupled() -> Any:
    """A DecoupledCheckpointEngine with the same buffers as `deepspeed_writer`."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch.multiprocessing as mp
    from deepspeed.io import fast_file_writer
    from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
        DecoupledCheckpointEngine,
    )
    from deepspeed.runtime.model_checkpointing import CheckpointWriterFactory
    from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import (
        DataParallelWriterConfig,
    )

    def set_up(factory: Any, _: Any) -> None:
        # DeepSpeed's own asks torch for pinned memory, of which there is none without accelerators.
        factory._dnvme_handle, factory._io_buffer = writer.handle_and_buffer()  # noqa: SLF001

    # Its process would do so otherwise, and DeepSpeed gives up after 5 minutes.
    writer.compiled()
    mp.set_start_method("fork")
    fast_file_writer.UtilsBuilder = writer.UtilsOnProcessors
    CheckpointWriterFactory._setup_for_aio = set_up  # noqa: SLF001
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    config = SimpleNamespace(
        checkpoint_config={
            # The legacy format, which has no CRC32.
            "checkpoint_serialization": False,
            "writer": {
                "type": "FAST",
                "io_buffer_size": writer.BUFFER_BYTES,
                "io_buffer_double": True,
                "io_multiplier": 1,
                "show_statistics": False,
            },
        },
        aio_config={"use_gds": False},
    )
    rank = DataParallelWriterConfig(world_size=1, rank=0, global_rank=0, local_rank=0, pure_dp=True)
    return DecoupledCheckpointEngine(config, rank, optimize_dp_state=False)


def make_torch() -> Any:
    """The engine that DeepSpeed has by default: torch.save."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    return TorchCheckpointEngine(
        SimpleNamespace(checkpoint_config={"checkpoint_serialization": True})
    )


def make_fpfs() -> Any:
    """The engine that fpfs registers."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from fpfs.client import ALONE
    from fpfs.client.paths import default_threads
    from fpfs.integrations.deepspeed import FpfsCheckpointEngine

    return FpfsCheckpointEngine(group=ALONE, copies=True, threads=default_threads(), timeout_s=300)


def save(engine: Any, state: dict[str, Any], path: str) -> None:
    """What save_checkpoint asks of an engine, and the next step before it updates weights."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    save_dir, tag = os.path.split(path)
    info = CheckpointCommitInfo(tag=tag, save_dir=save_dir, save_latest=False)
    with getattr(engine, "checkpoint", contextlib.nullcontext)():
        engine.create(info)
        engine.save(state, path)
    if not engine.is_decoupled() or engine.get_commit_info() is not None:
        engine.commit(info)
