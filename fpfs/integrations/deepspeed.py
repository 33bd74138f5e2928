"""DeepSpeed by fpfs: `register`, after which an engine saves beside training.

The files are the ones that DeepSpeed's own checkpoint engine writes, so each loads what the other
has saved. DeepSpeed knows engines that write beside training ("decoupled") and has them finish
before the next step, since they write the model's own memory. This one has copied it, and nobody
waits: a thread sees to it that `latest` names a checkpoint when all ranks' files are durable.

Invariants:
  * `latest` names a checkpoint whose files are durable, of all ranks.
  * A save that was cut off, by whatever `save_checkpoint` raises, is never named.
  * What a save has failed of, on whatever rank, all ranks raise at the next call; if it is the
    checkpoints' directory that cannot be made, at that call: DeepSpeed writes there by itself.

Concurrency: DeepSpeed calls from the training thread. `_conclude` runs in a thread of its own, for
one checkpoint after the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fpfs.core.lazy import needing

with needing("fpfs.integrations.deepspeed", extra="deepspeed"):
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
        CheckpointCommitInfo,
        CheckpointEngine,
    )
    from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
    from deepspeed.runtime.engine import DeepSpeedEngine

from fpfs.client.async_saving import AsyncSaver
from fpfs.client.loading import load
from fpfs.client.paths import (
    NotLocal,
    check_flag,
    check_threads,
    default_threads,
    flush,
    make_directories,
    ranks_here,
    refuse_address,
)
from fpfs.client.peers import ALONE, Alone, Peers, RankFailed, peers_of
from fpfs.client.replacement import Replacement
from fpfs.client.restoring import MapLocation
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
    threads: how many write, for each rank. None: as many as there are processors, 2 to 8, shared
        by the ranks of a machine.
    timeout_s: seconds that a rank waits at most for another that nothing is known of, or for a file
        of which no byte is moved.

    All ranks call it. Of ``checkpoint.writer`` the key `decoupled` means the same; each file is one
    rank's, so `data_parallel` is not followed; the other keys say how DeepSpeed's writers write.

    Returns what is `engine.checkpoint_engine` from now on. Raises TypeError of what is no engine
    or no bool, ValueError of one that is registered.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"register takes the engine that deepspeed.initialize returns first, not a"
            f" {type(engine).__name__}"
        )
    check_threads(threads)
    if decoupled is not None:
        check_flag("decoupled", decoupled)
    former = engine.checkpoint_engine
    if isinstance(former, FpfsCheckpointEngine):
        raise ValueError("the engine is registered already")
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
        threads = default_threads(ranks_here())
    registered = engine.checkpoint_engine = FpfsCheckpointEngine(
        # Messages of training's groups are not mixed with these.
        group=dist.new_group(backend="gloo") if dist.get_world_size() > 1 else ALONE,
        threads=threads,
        # Who waits until all is durable needs no copy.
        copies=decoupled,
        timeout_s=timeout_s,
    )
    _replace_methods(engine, registered, decoupled=decoupled)
    return registered


def _replace_methods(
    engine: DeepSpeedEngine, registered: FpfsCheckpointEngine, *, decoupled: bool
) -> None:
    """Have `engine` tell `registered` what DeepSpeed tells no engine of checkpoints."""
    saves, loads = engine.save_checkpoint, engine.load_checkpoint
    copies_script = engine._copy_recovery_script  # noqa: SLF001

    @functools.wraps(saves)
    def save_checkpoint(*arguments: Any, **options: Any) -> Any:
        with registered.checkpoint():
            saved = saves(*arguments, **options)
        if not decoupled:
            registered.wait()
        return saved

    @functools.wraps(loads)
    def load_checkpoint(*arguments: Any, **options: Any) -> Any:
        # Ranks read `latest`, each by itself.
        registered.wait()
        return loads(*arguments, **options)

    @functools.wraps(copies_script)
    def copy_recovery_script(save_path: str) -> None:
        # Rank 0 alone does, and the others would wait for it in a barrier.
        with registered.told_by_all():
            copies_script(save_path)

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    engine._copy_recovery_script = copy_recovery_script  # noqa: SLF001


@dataclasses.dataclass
class _Checkpoint:
    """A checkpoint whose files are saved, or were and are not all durable."""

    info: CheckpointCommitInfo
    folder: str
    """Where it and `latest` are, links followed, wherever this process goes to."""
    peers: Peers
    """Entered in the training thread: in the same order on all ranks."""
    failure: Exception | None
    """What this rank has failed of already."""
    unflushed: list[str]
    """Directories in which others were made."""


class FpfsCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """What an engine saves and loads by; `register` makes one."""

    def __init__(
        self, *, group: dist.ProcessGroup | Alone, threads: int, copies: bool, timeout_s: float
    ) -> None:
        super().__init__()
        self.name = type(self).__name__
        self._group = group
        self._threads = threads
        self._copies = copies
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
        self._no_directory: OSError | NotLocal | None = None
        """What is to be told of the checkpoint that is not begun yet."""
        self._unflushed: list[str] = []

    # --- what an engine calls ---

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory. What that fails of belongs to the checkpoint: all ranks raise it."""
        del exist_ok  # True in all of DeepSpeed's calls
        # Some of these calls are one rank's, for which all wait.
        with self.told_by_all():
            refuse_address(path)
            self._unflushed += make_directories(path)

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint; raise what the one before has failed of.

        Raises on all ranks, too, that a rank could not make the directory, as rank 0 alone knows.
        """
        if self._closed:
            raise ValueError("the engine was destroyed: give fpfs another one")
        failure, self._no_directory = self._no_directory, None
        self.wait()
        # What is left is of one that was cut off: the log has what it failed of.
        with contextlib.suppress(Exception):
            self._saver.wait()
        peers = peers_of(self._group, timeout_s=self._timeout_s, call="save_checkpoint")
        folder = os.path.realpath(info.save_dir)
        self._begun = _Checkpoint(info, folder, peers.__enter__(), None, self._unflushed)
        self._unflushed = []
        try:
            if failure is not None:
                raise failure
            peers.exchange("begin", None, lambda ranks: ranks, of=type(None))
        except BaseException as error:
            self._cut_off(error)
            raise

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
            if self._copies:
                self._saver.save(state_dict, path)
            else:
                with Save(ALONE) as steps:
                    steps.agree(state_dict, path, None)
                    steps.write(durable=True, threads=self._threads)
        except Exception as error:  # noqa: BLE001 told by _conclude
            logger.error("%s was not saved: %s: %s", path, type(error).__name__, error)
            checkpoint.failure = error.with_traceback(None)

    def is_decoupled(self) -> bool:
        """An engine writes `latest` itself otherwise, when one rank's files are there."""
        return True

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """What is to be committed before the next step: nothing is."""
        return None

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return when the checkpoint is durable, of all ranks; raises as `wait` does."""
        del info
        self._conclude_begun()
        self.wait()
        return True

    def load(self, path: str, map_location: MapLocation = None) -> Any:
        """Load a file, as `fpfs.load` does."""
        return load(path, group=ALONE, map_location=map_location, weights_only=False)

    def cleanup(self) -> None:
        """As `wait`; nothing can be saved any more. An engine's `destroy` calls it."""
        try:
            self.wait()
        finally:
            self._closed = True
            self._concluding.shutdown(wait=False)
            with contextlib.suppress(Exception):  # as in create()
                self._saver.close()

    # --- what others call ---

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Within this the files of a checkpoint are saved; what it raises cuts the save off."""
        self._no_directory = None
        try:
            yield
        except BaseException as error:
            self._cut_off(error)
            raise
        self._conclude_begun()

    @contextlib.contextmanager
    def told_by_all(self) -> Iterator[None]:
        """Within this an error belongs to the checkpoint: it is not raised here, but by all."""
        try:
            yield
        except (OSError, NotLocal) as error:
            logger.error("%s", error)
            if self._begun is None:
                self._no_directory = error
            elif self._begun.failure is None:
                self._begun.failure = error

    def wait(self) -> None:
        """Return when the last checkpoint is durable, of all ranks, and `latest` names it.

        Raises what this rank has failed of, or RankFailed of what another has, once.
        """
        self._cut_off(RuntimeError("it was not saved to its end"))
        concluded = self._concluded
        if concluded is None:
            return
        concluded.exception()
        self._concluded = None
        concluded.result()

    def _conclude_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.unflushed += self._unflushed
            self._unflushed = []
            self._concluded = self._concluding.submit(_conclude, begun, self._saver)

    def _cut_off(self, error: BaseException) -> None:
        """Let the other ranks know that what is begun has no end."""
        begun, self._begun = self._begun, None
        if begun is not None:
            logger.error("checkpoint %s in %s was cut off: %s", begun.info.tag, begun.folder, error)
            self._unflushed += begun.unflushed
            begun.peers.__exit__(type(error), error, error.__traceback__)


def _conclude(checkpoint: _Checkpoint, saver: AsyncSaver) -> None:
    """Return when all ranks' files are durable, and `latest` says so.

    Nobody else uses `saver` meanwhile.
    """
    info, folder = checkpoint.info, checkpoint.folder

    def name(tags: list[str]) -> list[None]:
        for rank, tag in enumerate(tags):
            if tag != info.tag:
                raise RankFailed(rank, f"saved the tag {tag!r}, and rank 0 {info.tag!r}")
        if info.save_latest:
            with Replacement(os.path.join(folder, "latest")) as latest:
                os.write(latest.fd, info.tag.encode())
                latest.commit(durable=True)
        return [None] * len(tags)

    try:
        with contextlib.ExitStack() as stack:
            stack.push(checkpoint.peers)  # create() has entered it
            try:
                saver.wait()
            except Exception as error:  # noqa: BLE001 one of the two is raised
                raise checkpoint.failure or error from None
            if checkpoint.failure is not None:
                raise checkpoint.failure
            flush(*checkpoint.unflushed)
            checkpoint.peers.exchange("durable", info.tag, name, of=type(None))
    except BaseException as error:
        logger.error(
            "checkpoint %s in %s is not whole, so nothing names it as the latest: %s: %s",
            info.tag,
            folder,
            type(error).__name__,
            error,
        )
        raise


__all__ = ["FpfsCheckpointEngine", "register"]
