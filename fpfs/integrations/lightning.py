"""Lightning by fpfs: `FpfsCheckpointIO`, for ``Trainer(plugins=[FpfsCheckpointIO()])``.

A checkpoint is a file of torch.save, as Lightning's own TorchCheckpointIO writes it: each loads
what the other has saved. Lightning saves on rank 0 alone, and so does this.

Invariants:
  * A file that Lightning wants removed is there until the checkpoint that is being saved is
    durable; if that fails, it stays.
  * What a save has failed of is raised by the next call, at the latest when the run ends. The next
    save is made all the same.
  * For ModelCheckpoint, which gives a file a name that does not exist yet, a file that is being
    saved exists, and one that waits to be removed does not: names and files are those of
    Lightning's own plugin. Otherwise another callback's file, or a worse model's, would replace one
    that is being saved. Lightning asks the filesystem, and no plugin: so `file_exists`, a public
    method of ModelCheckpoint, is replaced when this is imported, or a plugin made.

Concurrency: as Lightning uses it: one thread, also in a handler of a signal that interrupts it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from concurrent.futures import Future
from typing import Any

from fpfs.core.lazy import needing

with needing("fpfs.integrations.lightning", extra="lightning"):
    from fpfs.client.async_saving import AsyncSaver, Saving
    from fpfs.client.loading import load
    from fpfs.client.paths import (
        check_flag,
        flush,
        make_directories,
        refuse_address,
        remove,
        resolve,
    )
    from fpfs.client.peers import ALONE
    from fpfs.client.restoring import MapLocation
    from fpfs.client.saving import Saved, save
    from fpfs.client.topology import TIMEOUT_S

logger = logging.getLogger(__name__)

BASES = ("lightning.fabric", "lightning_fabric")
"""Two packages have the same classes: `lightning`, and what `pytorch_lightning` is made of."""
TRAINERS = ("lightning.pytorch", "pytorch_lightning")

_asking: set[type] = set()
"""Classes of ModelCheckpoint that ask the plugin what exists."""


class FpfsCheckpointIO:
    """Saves and loads a Trainer's checkpoints by fpfs, beside training.

    asynchronous: a Trainer's save returns when the checkpoint is copied (`fpfs.AsyncSaver`). What
        Fabric saves, what processes hand to each other, what a SLURM job saves before it is queued
        again, and what is saved after the end of a run, is durable when it returns.
    memory_bytes, staging_bytes: of the copy, as `fpfs.AsyncSaver` has them.
    threads: how many write. None: as many as there are processors, 2 to 8.
    timeout_s: a call waits for the save before, until that has moved no byte for so many seconds.

    Copies of it, also in other processes, are new ones with the same arguments.
    """

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        memory_bytes: int = 0,
        staging_bytes: int | None = None,
        threads: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_flag("asynchronous", asynchronous)
        self._asynchronous = asynchronous
        self._options: dict[str, Any] = {
            "memory_bytes": memory_bytes,
            "staging_bytes": staging_bytes,
            "threads": threads,
            "timeout_s": timeout_s,
        }
        self._pid = os.getpid()
        self._saver: AsyncSaver | None = None
        """None: made by the next save."""
        self._opened()
        self._saving: Saving | None = None
        """The last one, until somebody has waited for it."""
        self._obsolete: list[str] = []
        """Removed when the last save has succeeded."""
        self._removing = threading.RLock()
        self._has_broken_off = False
        """Whether an exception has ended the last run, and no other one is known."""
        self._broke_at: int | None = None
        """The step of what was saved first since then."""
        _make_known()

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(type(self), asynchronous=self._asynchronous, **self._options)
        return make, ()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save `checkpoint` to `path`, whole or not at all; its folder is made.

        Raises what the save before has failed of, when this one has begun or is done, but for the
        last one of a SLURM job, and what `fpfs.save` raises; TypeError of `storage_options`.
        """
        if storage_options is not None:
            raise TypeError("FpfsCheckpointIO has no storage_options: leave them out")
        name = _local(path)
        failed: Exception | None = None
        try:
            self.wait()
        except Exception as error:
            if self._saving is not None:  # It has not ended.
                raise
            # This one may be the last of the run: it is not lost for that.
            failed = error.with_traceback(None)
        flush(*make_directories(os.path.dirname(resolve(name))))
        # A Trainer says when its run ends, and nobody else does. SLURM ends it without.
        has_an_end = _is_within_run(checkpoint) and not _is_last_of_job(name)
        if self._asynchronous and has_an_end and not self._is_behind_exception(checkpoint):
            self._saving = self._opened().save(checkpoint, name)
            self._saving.durable.add_done_callback(self._remove_obsolete)
        else:
            save(checkpoint, name, group=ALONE, durable=True)
        # The log has said it; a job whose last checkpoint is durable is to be queued again.
        if failed is not None and not _is_last_of_job(name):
            raise failed

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: MapLocation = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the checkpoint at `path`, when the last save is durable; as `fpfs.load` does."""
        name = _local(path)
        self.wait()
        loaded: dict[str, Any] = load(
            name, group=ALONE, map_location=map_location, weights_only=weights_only
        )
        return loaded

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether a file is there, or is being saved; not of one that waits to be removed."""
        name = _local(path)
        self._forget_of_parent()
        file = os.path.realpath(name)
        with self._removing:
            if not {os.path.abspath(name), file}.isdisjoint(self._obsolete):
                return False
        # It is asked first, since the file may appear now.
        saving = self._saving
        is_being_saved = saving is not None and saving.path == file and not saving.durable.done()
        return is_being_saved or os.path.exists(name)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or a directory, if it is there: after the save that is under way."""
        # Of a link, the link.
        name = os.path.abspath(_local(path))
        self._forget_of_parent()
        with self._removing:
            if self._saving is not None and not _has_succeeded(self._saving.durable):
                self._obsolete.append(name)
                return
        remove(name)

    def wait(self) -> None:
        """Return when the last save is durable; raise what it has failed of."""
        self._forget_of_parent()
        if self._saver is None:
            return
        try:
            self._saver.wait()
        except BaseException:
            # Unless it has not ended: nobody waits for ever.
            if self._saving is not None and self._saving.durable.done():
                self._saving = None
                self._keep_obsolete()
            raise
        if self._saving is not None:
            self._remove_obsolete(self._saving.durable)
            self._saving = None

    def teardown(self) -> None:
        """Lightning's run ends: wait, and give the memory back; the next save takes it again."""
        # Lightning calls it where it handles what has ended a run, if it was an exception.
        self._has_broken_off, self._broke_at = sys.exc_info()[1] is not None, None
        try:
            self.wait()
        finally:
            saver, self._saver = self._saver, None
            if saver is not None:
                saver.close()

    def _is_behind_exception(self, checkpoint: dict[str, Any]) -> bool:
        """Whether no run is known since an exception has ended one, whose loops say nothing of it.

        Until steps are made: what the next run saves first is taken for what belongs to the last.
        """
        step = checkpoint.get("global_step")
        if self._broke_at is None:
            self._broke_at = step
        self._has_broken_off = self._has_broken_off and step == self._broke_at
        return self._has_broken_off

    def _opened(self) -> AsyncSaver:
        if self._saver is None:
            self._saver = AsyncSaver(group=ALONE, **self._options)
        return self._saver

    def _forget_of_parent(self) -> None:
        """Whoever forked this process goes on with what it has under way."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._saver = self._saving = None
            self._obsolete = []
            self._removing = threading.RLock()

    def _remove_obsolete(self, durable: Future[Saved]) -> None:
        """Remove what waits for this save; the thread of the save calls it, too."""
        if not _has_succeeded(durable):
            return
        with self._removing:
            while self._obsolete:
                name = self._obsolete.pop(0)
                try:
                    remove(name)
                except OSError as error:
                    logger.error("%s was not removed: %s", name, error)

    def _keep_obsolete(self) -> None:
        with self._removing:
            for name in self._obsolete:
                logger.warning("%s stays, since the checkpoint after it was not saved", name)
            self._obsolete = []


def _make_known() -> None:
    """Tell the packages of Lightning that are imported by now."""
    for base in BASES:
        module = sys.modules.get(f"{base}.plugins.io.checkpoint_io")
        if module is not None:
            module.CheckpointIO.register(FpfsCheckpointIO)
    for trainer in TRAINERS:
        module = sys.modules.get(f"{trainer}.callbacks.model_checkpoint")
        if module is not None:
            _have_it_ask(module.ModelCheckpoint)


def _have_it_ask(model_checkpoint: Any) -> None:
    """Make a class's `file_exists`, whose answer names files, that of a Trainer's plugin."""
    if model_checkpoint in _asking:
        return
    _asking.add(model_checkpoint)
    by_itself = model_checkpoint.file_exists

    @functools.wraps(by_itself)
    def file_exists(callback: Any, filepath: str | os.PathLike[str], trainer: Any) -> bool:
        strategy = trainer.strategy
        plugin = strategy.checkpoint_io
        if not isinstance(plugin, FpfsCheckpointIO):
            return bool(by_itself(callback, filepath, trainer))
        name = _local(filepath)  # raises on all ranks
        # Rank 0 saves.
        return bool(strategy.broadcast(strategy.is_global_zero and plugin.exists(name)))

    model_checkpoint.file_exists = file_exists


def _is_within_run(checkpoint: dict[str, Any]) -> bool:
    """Whether a Trainer is within an epoch, as its loops say: it ends the run later."""
    try:
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        return bool(epochs["completed"] < epochs["ready"])
    except (KeyError, TypeError):
        return False


def _is_last_of_job(name: str) -> bool:
    """Whether Lightning saves it in a handler of SLURM's signal, then has the job queued again."""
    return os.path.basename(name).startswith("hpc_ckpt_")


def _has_succeeded(durable: Future[Saved]) -> bool:
    return durable.done() and durable.exception() is None


def _local(path: str | os.PathLike[str]) -> str:
    """Return the path on this machine. ValueError of an address of another one."""
    name = os.fspath(path)
    for here in ("file://", "local://"):  # Lightning's own plugin takes them
        if name.startswith(here):
            return name.removeprefix(here)
    refuse_address(name)
    return name


# LightningCLI looks at the class before it makes a plugin.
_make_known()

__all__ = ["FpfsCheckpointIO"]
