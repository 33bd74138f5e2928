"""DeepSpeed by fpfs: `register`, after which an engine saves beside training.

The files are the ones that DeepSpeed's own checkpoint engine writes, so each loads what the other
has saved. DeepSpeed knows engines that write beside training ("decoupled") and has them finish
before the next step, since they write the model's own memory. This one has copied it, and nobody
waits: a thread sees to it that `latest` names a checkpoint when all ranks' files are durable.

Invariants:
  * `latest` names a checkpoint whose files are durable, of all ranks.
  * What a save has failed of, on whatever rank, all ranks raise at the next call.

Concurrency: DeepSpeed calls from the training thread. `_conclude` runs in a thread of its own, for
one checkpoint after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from fpfs.client.async_saving import AsyncSaver
from fpfs.client.loading import MapLocation, load
from fpfs.client.paths import check_threads, default_threads, flush, ranks_here
from fpfs.client.peers import ALONE, Alone, Peers, peers_of
from fpfs.client.replacement import Replacement
from fpfs.client.saving import Save
from fpfs.client.topology import TIMEOUT_S

logger = logging.getLogger(__name__)

FILES_MAX = 1_000_000
"""Of a rank's checkpoint: none of them waits for another."""


def register(
    engine: DeepSpeedEngine,
    *,
    decoupled: bool | None = None,
    threads: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> FpfsCheckpointEngine:
    """Let `engine`, of deepspeed.initialize, save and load checkpoints by fpfs.

    decoupled: `save_checkpoint` returns when all is copied; otherwise when it is durable, on all
        ranks. None: as the configuration says in ``checkpoint.writer``, and True if it has none.
    threads: how many write, for each rank. None: as many as there are processors, at most 8, shared
        by the ranks of a machine.
    timeout_s: seconds that a rank waits at most for another, or for the save before.

    All ranks call it. Of ``checkpoint.writer`` the key `decoupled` means the same; each file is one
    rank's, so `data_parallel` is not followed; the other keys say how DeepSpeed's writers write.

    Returns what is `engine.checkpoint_engine` from now on. Raises TypeError of what is no engine.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"register takes the engine that deepspeed.initialize returns first, not a"
            f" {type(engine).__name__}"
        )
    check_threads(threads)
    former = engine.checkpoint_engine
    if decoupled is None:
        decoupled = not isinstance(former, FastCheckpointEngine)
    former.cleanup()
    if not engine.zero_optimization_partition_weights():
        # The configuration may have had several ranks write one file.
        rank = dist.get_rank(engine.seq_data_parallel_group)
        if engine.use_node_local_storage():
            rank = engine.local_rank
        engine.save_non_zero_checkpoint = rank == 0
    if threads is None:
        threads = max(1, default_threads() // ranks_here())
    registered = engine.checkpoint_engine = FpfsCheckpointEngine(
        # Messages of training's groups are not mixed with these.
        group=dist.new_group(backend="gloo") if dist.get_world_size() > 1 else ALONE,
        decoupled=decoupled,
        threads=threads,
        timeout_s=timeout_s,
    )
    return registered


@dataclasses.dataclass
class _Checkpoint:
    """A checkpoint whose files are saved, or were and are not all durable."""

    info: CheckpointCommitInfo
    peers: Peers
    failure: Exception | None
    """What this rank has failed of already."""


class FpfsCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """What an engine saves and loads by; `register` makes one."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | Alone,
        decoupled: bool,
        threads: int,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._group = group
        self._decoupled = decoupled
        self._threads = threads
        self._timeout_s = timeout_s
        self._saver = AsyncSaver(
            group=ALONE, in_flight=FILES_MAX, threads=threads, timeout_s=timeout_s
        )
        self._concluding = ThreadPoolExecutor(1, thread_name_prefix="fpfs-conclude")
        self._closed = False
        self._begun: _Checkpoint | None = None
        """The one whose files are being saved."""
        self._concluded: Future[None] | None = None
        """Of the last one, until somebody has waited for it."""
        self._no_directory: OSError | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory; `commit` raises what that fails of, on all ranks."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            # One rank calls this, and all wait for it.
            logger.error("%s", error)
            self._no_directory = error

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint; raise what the one before has failed of."""
        if self._closed:
            raise ValueError("the engine was destroyed: give fpfs another one")
        self.wait()
        failure, self._no_directory = self._no_directory, None
        peers = peers_of(self._group, timeout_s=self._timeout_s, call="save_checkpoint")
        self._begun = _Checkpoint(info, peers.__enter__(), failure)

    def save(self, state_dict: Any, path: str) -> None:
        """Save a file of the checkpoint: when this returns, the state may change.

        What it fails of, all ranks raise: this one alone would leave the others waiting for it.
        """
        checkpoint = self._begun
        if checkpoint is None:
            raise RuntimeError("create() comes before save()")
        if checkpoint.failure is not None:
            return
        try:
            if self._decoupled:
                self._saver.save(state_dict, path)
            else:
                with Save(ALONE) as steps:
                    steps.agree(state_dict, path, None)
                    steps.write(durable=True, threads=self._threads)
        except Exception as error:  # noqa: BLE001 told by _conclude
            logger.error("%s was not saved: %s: %s", path, type(error).__name__, error)
            checkpoint.failure = error.with_traceback(None)

    def is_decoupled(self) -> bool:
        """Whether nobody commits. An engine asks when it has saved all files of a checkpoint."""
        self._end_of_files()
        return self._decoupled

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """What is to be committed before the next step: nothing is."""
        return None

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return when the checkpoint is durable, of all ranks; raises as `wait` does."""
        del info
        self.wait()
        return True

    def load(self, path: str, map_location: MapLocation = None) -> Any:
        """Load a file, when the last checkpoint is durable; as `fpfs.load` does."""
        self.wait()
        return load(path, group=ALONE, map_location=map_location, weights_only=False)

    def wait(self) -> None:
        """Return when the last checkpoint is durable, of all ranks, and `latest` names it.

        Raises what this rank has failed of, or RankFailed of what another has, once.
        """
        self._end_of_files()
        concluded = self._concluded
        if concluded is None:
            return
        concluded.exception()
        self._concluded = None
        concluded.result()

    def cleanup(self) -> None:
        """As `wait`; nothing can be saved any more. An engine's `destroy` calls it."""
        try:
            self.wait()
        finally:
            self._closed = True
            self._concluding.shutdown(wait=False)
            self._saver.close()

    def _end_of_files(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            self._concluded = self._concluding.submit(_conclude, begun, self._saver)


def _conclude(checkpoint: _Checkpoint, saver: AsyncSaver) -> None:
    """Return when all ranks' files are durable, and `latest` says so.

    Nobody else uses `saver` meanwhile.
    """
    info = checkpoint.info

    def name(ranks: list[None]) -> list[None]:
        if info.save_latest:
            with Replacement(os.path.join(os.path.realpath(info.save_dir), "latest")) as latest:
                os.write(latest.fd, info.tag.encode())
                latest.commit(durable=True)
        return ranks

    try:
        with checkpoint.peers as peers:
            if checkpoint.failure is not None:
                raise checkpoint.failure
            saver.wait()
            for folder in (info.save_dir, os.path.join(info.save_dir, os.pardir)):
                with contextlib.suppress(FileNotFoundError):  # this rank has saved no file
                    flush(folder)
            peers.exchange("durable", None, name, of=type(None))
    except BaseException as error:
        logger.error(
            "checkpoint %s in %s is not whole, so nothing names it as the latest: %s: %s",
            info.tag,
            info.save_dir,
            type(error).__name__,
            error,
        )
        raise


__all__ = ["FpfsCheckpointEngine", "register"]
