"""transformers' Trainer by fpfs: `FpfsCallback`, which saves its checkpoints beside training.

A checkpoint has the files of Trainer's own, so each resumes from what the other has saved. Large
ones, the weights and the optimizer's state, are copied and written while training goes on; all lie
in a directory of another name until the last of them is durable.

Invariants:
  * A directory `checkpoint-N` has a whole checkpoint, at any time.
  * One that another of the same step replaces is there until that is, if names are exchanged.
  * What is saved is what Trainer would have saved: when it has logged and evaluated what belongs to
    the step, and before the next batch is drawn.
  * An older checkpoint goes (`save_total_limit`) when the new one is durable.
  * Training that begins again in a process finds what that process has saved: the callback has
    its Trainer's `train` wait for it first.

Concurrency: events come in the training thread; `_finish` runs in the thread that saves.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import random
import re
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from fpfs.core.lazy import needing

with needing("fpfs.integrations.transformers", extra="transformers"):
    import numpy as np
    import torch
    from transformers import PreTrainedModel, Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.training_args import ParallelMode

from fpfs.client.async_saving import AsyncSaver, FileToSave, Saving
from fpfs.client.paths import exchange, flush, make_directories, refuse_address, remove
from fpfs.client.peers import RankFailed
from fpfs.client.safetensors import lay_out_safetensors
from fpfs.client.saving import Saved
from fpfs.client.topology import TIMEOUT_S

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

UNFINISHED = ".fpfs-unfinished-"
"""Begins the name of a directory until it has its own."""
FORMER = ".fpfs-former-"
"""Begins the name of a checkpoint that another one of the same step replaces."""
REMOVED = ".fpfs-removed-"
"""Begins the name of a checkpoint that is being removed."""
_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")
_OVERRIDDEN = (
    "_save",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_save_scaler",
    "save_model",
)
"""What subclasses save more by than Trainer does."""

_under_way: dict[str, Future[None]] = {}
"""Directories that this process is writing, whatever has become of who began it."""


class FpfsCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a Trainer's checkpoints: ``trainer.add_callback(FpfsCallback(trainer))``.

    memory_bytes, staging_bytes: of the copy, as `fpfs.AsyncSaver` has them.
    threads: how many write, for each rank. None: as many as there are processors, 2 to 8, shared
        by the ranks.
    timeout_s: a save waits for the one before, until that has moved no byte for so many seconds.

    What a save has failed of is raised by the next one, or at the end of training. The ranks of a
    machine save together. Where Trainer saves otherwise than its weights and one optimizer's state,
    as with FSDP, DeepSpeed or adapters, and in the other cases that docs/frameworks.md lists,
    Trainer goes on saving by itself, and the log says so once.

    Add it last: what other callbacks do at the same event belongs to the checkpoint. Their
    `on_save` is not called. Raises TypeError of what is no Trainer.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        memory_bytes: int = 0,
        staging_bytes: int | None = None,
        threads: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(f"FpfsCallback is made for a Trainer, not a {type(trainer).__name__}")
        refuse_address(trainer.args.output_dir)
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._saver = functools.partial(
            AsyncSaver,
            memory_bytes=memory_bytes,
            staging_bytes=staging_bytes,
            threads=threads,
            timeout_s=timeout_s,
        )
        self._opened: AsyncSaver | None = self._saver()
        """None: made by the next save."""
        self._random: dict[str, Any] | None = None
        """Of the checkpoint that is to be saved at the next event; None: none is."""
        self._saving: Saving | None = None
        """The last one."""
        self._finished: Future[None] | None = None
        """Of the last save, on the rank that gives it its name."""
        self._said = False
        train = trainer.train

        @functools.wraps(train)
        def train_when_saved(*arguments: Any, **words: Any) -> Any:
            # Trainer looks for the last checkpoint before any event.
            self._by_all(self._settle)
            return train(*arguments, **words)

        trainer.train = train_when_saved

    # --- events: the method of each is called with arguments, state and control ---

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Begin anew."""
        if args is not self._trainer.args:
            raise ValueError("this FpfsCallback was made for another Trainer: make one for this")
        self._random = None
        # A run may begin anew, as Trainer's own does with smaller batches.
        self._by_all(self.wait)

    def on_step_end(
        self, args: TrainingArguments, _: TrainerState, control: TrainerControl, **__: Any
    ) -> TrainerControl:
        """If Trainer is to save: do so when it has logged and evaluated what it is to."""
        self._save_late()
        return self._take_over(args, control)

    def on_epoch_end(
        self, args: TrainingArguments, _: TrainerState, control: TrainerControl, **__: Any
    ) -> TrainerControl:
        """As `on_step_end`."""
        self._save_late()
        return self._take_over(args, control)

    def on_log(
        self, _: TrainingArguments, __: TrainerState, control: TrainerControl, **___: Any
    ) -> None:
        """Save, unless it is still to evaluate."""
        self._save_when_due(control)

    def on_evaluate(
        self, _: TrainingArguments, __: TrainerState, control: TrainerControl, **___: Any
    ) -> None:
        """As `on_log`."""
        self._save_when_due(control)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Save, if what was to be logged was logged before."""
        self._save_late()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """As `on_step_begin`."""
        self._save_late()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Return when all is durable; raise what has failed."""
        self._save_late()
        try:
            self._by_all(self.wait)
        finally:
            saver, self._opened = self._opened, None
            if saver is not None:
                saver.close()

    def wait(self) -> None:
        """Return when the last checkpoint has its name, durably; raise what it has failed of."""
        if self._opened is None:
            return
        finished = self._finished
        try:
            self._opened.wait()
        finally:
            # What has failed is cleared away when this returns.
            if self._saving is not None and self._saving.durable.done() and finished is not None:
                self._finished = None
                finished.exception(self._timeout_s)
        if finished is not None:
            finished.result(self._timeout_s)

    def _settle(self) -> None:
        """Return when there are whole checkpoints alone, and all of them have their names.

        Whichever Trainer of this process writes one, it is waited for; what runs have left that
        were killed is cleared away.
        """
        self.wait()
        output = os.path.abspath(self._trainer.args.output_dir)
        for folder, finished in list(_under_way.items()):
            if os.path.dirname(folder) == output:
                finished.exception(self._timeout_s)
        if self._trainer.args.should_save and os.path.isdir(output):
            _clear(output)

    # --- saving ---

    def _take_over(self, args: TrainingArguments, control: TrainerControl) -> TrainerControl:
        if control.should_save:
            why = self._why_not(args)
            if why is None:
                control.should_save = False
                self._random = _random_states(args)
                if not control.should_log:
                    self._save_when_due(control)
            else:
                if not self._said:
                    self._said = True
                    logger.warning("Trainer saves by itself: %s", why)
                # It goes by what is there when it removes older ones.
                self._by_all(self.wait)
        return control

    def _save_when_due(self, control: TrainerControl) -> None:
        """Save what is to be saved, unless Trainer evaluates first: where it would save itself."""
        if self._random is not None and not control.should_evaluate:
            self._random = _random_states(self._trainer.args)
            self._save_late()

    def _by_all(self, action: Callable[[], object]) -> None:
        """Do it on all ranks; if one fails, all do, and none waits for another."""
        error: BaseException | None = None
        try:
            action()
        except BaseException as raised:  # noqa: BLE001 raised below
            error = raised
        told: list[str | None] = [None if error is None else f"{type(error).__name__}: {error}"]
        if self._trainer.args.parallel_mode == ParallelMode.DISTRIBUTED:
            own = told[0]
            told = [None] * self._trainer.args.world_size
            torch.distributed.all_gather_object(told, own)
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text is not None:
                raise RankFailed(rank, text)

    def _why_not(self, args: TrainingArguments) -> str | None:
        """Why Trainer saves by itself, if it does."""
        trainer = self._trainer
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        reasons = {
            "it looks for the best model": args.load_best_model_at_end
            or args.metric_for_best_model is not None,
            "it pushes to the hub": args.push_to_hub,
            "it searches hyperparameters": trainer.hp_search_backend is not None,
            "FSDP saves": trainer.is_fsdp_enabled,
            # All ranks save its weights, and wait for each other in save_pretrained.
            "the model was sharded when it was loaded": getattr(
                trainer, "is_distributed_loading_by_transformers", False
            ),
            "DeepSpeed saves": trainer.is_deepspeed_enabled,
            "the model has adapters": getattr(trainer.model, "peft_config", None),
            "the model is quantized": getattr(trainer.model, "hf_quantizer", None),
            "the model is compiled": hasattr(trainer.model, "_orig_mod"),
            "it evaluates several datasets": isinstance(trainer.eval_dataset, dict),
            "the learning rate follows evaluations": isinstance(
                trainer.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
            ),
            "its class has a way of its own": any(
                getattr(getattr(trainer, name, None), "__func__", None)
                is not getattr(Trainer, name, None)
                for name in _OVERRIDDEN
            ),
            "it trains on several machines": args.world_size > max(1, here),
            f"it trains on a device of type {args.device.type}": args.device.type
            not in ("cpu", "cuda"),
        }
        return next((why for why, applies in reasons.items() if applies), None)

    def _save_late(self) -> None:
        """Save, if something is still to be saved, with random numbers of when that was asked."""
        states, self._random = self._random, None
        if states is None:
            return
        trainer, args = self._trainer, self._trainer.args
        name = f"checkpoint-{trainer.state.global_step}"
        output, best = os.path.abspath(args.output_dir), trainer.state.best_model_checkpoint
        folder = os.path.join(output, UNFINISHED + name)
        trainer.store_flos()  # of all ranks

        def begin() -> None:
            # Raises what the one before has failed of, before anything is made.
            self.wait()
            # Of another run in this process, which was interrupted.
            if folder in _under_way:
                _under_way[folder].exception(self._timeout_s)
            place = os.path.join(output, name)
            if os.path.lexists(place) and not os.path.isdir(place):
                raise FileExistsError(errno.EEXIST, "it is no directory: remove it", place)
            # What is new within it, `_finish` flushes.
            flush(*make_directories(output))
            os.makedirs(folder, exist_ok=True)
            if args.should_save:
                self._save_small(folder)
            if not args.save_only_model:
                suffix = f"_{args.process_index}" if args.world_size > 1 else ""
                torch.save(states, os.path.join(folder, f"rng_state{suffix}.pth"))

        self._by_all(begin)
        weights = _untied(trainer.model.state_dict())
        for key in getattr(trainer.model, "_keys_to_ignore_on_save", None) or ():
            weights.pop(key, None)
        how = functools.partial(lay_out_safetensors, metadata={"format": "pt"})
        files = [FileToSave(weights, os.path.join(folder, "model.safetensors"), how)]
        if not args.save_only_model:
            optimizer = trainer.optimizer.state_dict()
            files.append(FileToSave(optimizer, os.path.join(folder, "optimizer.pt")))
        finished = Future[None]()
        finish = functools.partial(
            _finish,
            finished,
            folder,
            name,
            before=_checkpoints(output),
            limit=args.save_total_limit,
            best=best and os.path.abspath(best),
        )
        if self._opened is None:
            self._opened = self._saver()
        self._saving = self._opened.save_files(files)
        if args.should_save:
            self._finished = _under_way[folder] = finished
            self._saving.durable.add_done_callback(finish)

    def _save_small(self, folder: str) -> None:
        """All but weights, optimizer and random numbers: on the first rank, as Trainer does."""
        trainer = self._trainer
        if isinstance(trainer.model, PreTrainedModel):
            # Configuration and code; there are no weights.
            trainer.model.save_pretrained(folder, state_dict={})
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(trainer.args, os.path.join(folder, "training_args.bin"))
        if not trainer.args.save_only_model:
            with warnings.catch_warnings():  # torch's, that the optimizer is to be saved, too
                warnings.simplefilter("ignore")
                scheduler = trainer.lr_scheduler.state_dict()
            torch.save(scheduler, os.path.join(folder, "scheduler.pt"))
            scaler = getattr(trainer.accelerator, "scaler", None)
            if scaler is not None:
                torch.save(scaler.state_dict(), os.path.join(folder, "scaler.pt"))
        self._save_state(os.path.join(folder, "trainer_state.json"))

    def _save_state(self, path: str) -> None:
        """As it is when Trainer saves: it is to save, and the whole run is not summed up yet."""
        trainer = self._trainer
        trainer.control.should_save = True
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                known = trainer.state.stateful_callbacks
                found = known[type(callback).__name__]
                if isinstance(found, list):
                    found.append(callback.state())
                else:
                    known[type(callback).__name__] = callback.state()
        trainer.control.should_save = False
        log = trainer.state.log_history
        summary = [log.pop()] if log and "train_runtime" in log[-1] else []
        trainer.state.save_to_json(path)
        log += summary


def _finish(
    finished: Future[None],
    folder: str,
    name: str,
    durable: Future[Saved],
    *,
    before: list[tuple[int, int, str]],
    limit: int | None,
    best: str | None,
) -> None:
    """Give a checkpoint its name when its large files are durable, and remove older ones."""
    try:
        output = os.path.dirname(folder)
        if durable.exception() is not None:
            remove(folder)
        else:
            for inside, _, files in os.walk(folder, topdown=False):
                flush(*(os.path.join(inside, file) for file in files), inside)
            place = os.path.join(output, name)
            former = _put(folder, place)
            flush(output)
            for old in [former, *_obsolete(before, limit, newest=place, best=best)]:
                _remove_quietly(old)
    except BaseException as error:  # noqa: BLE001 who waits raises it
        logger.error("%s: %s: %s", folder, type(error).__name__, error)
        _under_way.pop(folder, None)
        finished.set_exception(error)
    else:
        _under_way.pop(folder, None)
        finished.set_result(None)


def _put(folder: str, place: str) -> str:
    """Give a checkpoint its name; return the name of the one that had it, if there was one.

    Who looks for checkpoints before there is a callback finds one of them, at any time. Where names
    are not exchanged, a process that is killed between the two renames leaves none.
    """
    output, name = os.path.split(place)
    former = os.path.join(output, FORMER + name)
    with contextlib.suppress(FileNotFoundError):
        if exchange(folder, place):
            return folder
        os.rename(place, former)
    os.rename(folder, place)
    return former


def _checkpoints(output: str) -> list[tuple[int, int, str]]:
    """When each changed, its step, and its path: the oldest first. Steps may be another run's."""
    found = []
    for each in os.scandir(output):
        match = _CHECKPOINT.fullmatch(each.name)
        with contextlib.suppress(FileNotFoundError):  # somebody removes it
            if match is not None and each.is_dir():
                found.append((each.stat().st_mtime_ns, int(match[1]), each.path))
    return sorted(found)


def _obsolete(
    before: list[tuple[int, int, str]], limit: int | None, *, newest: str, best: str | None
) -> list[str]:
    """The checkpoints that go: the oldest beyond `limit`.

    before: were there when the save of `newest` began. What Trainer has saved by itself since then
        stays: it is of more steps. best: Trainer knows it as that.
    """
    if limit is None or limit <= 0:
        return []
    found = _checkpoints(os.path.dirname(newest))
    kept = {os.path.realpath(newest), best and os.path.realpath(best)}
    older = [each[2] for each in before if each in found and os.path.realpath(each[2]) not in kept]
    return older[: max(0, len(found) - limit)]


def _clear(output: str) -> None:
    """Remove what a killed run has left unfinished, and give back what it was about to replace."""
    for name in os.listdir(output):
        path = os.path.join(output, name)
        if os.path.abspath(path) in _under_way:
            continue
        for prefix in (UNFINISHED, FORMER, REMOVED):
            own = name.removeprefix(prefix)
            if own == name or not _CHECKPOINT.fullmatch(own):
                continue
            if prefix != FORMER or os.path.lexists(os.path.join(output, own)):
                remove(path)
            else:
                os.rename(path, os.path.join(output, own))


def _remove_quietly(path: str) -> None:
    """Remove a checkpoint, which is nobody's from the first moment on; the log says if it fails."""
    output, name = os.path.split(path)
    removed = os.path.join(output, REMOVED + name.removeprefix(FORMER).removeprefix(UNFINISHED))
    try:
        remove(removed)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, removed)
        remove(removed)
    except OSError as error:
        logger.error("%s was not removed: %s", path, error)


def _untied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without those that are another one under a second name."""
    kept: dict[Any, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        kept.setdefault(place if tensor.numel() > 0 else name, name)
    return {name: tensors[name] for name in kept.values()}


def _random_states(args: TrainingArguments) -> dict[str, Any]:
    """As Trainer saves them."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        if args.parallel_mode == ParallelMode.DISTRIBUTED:
            states["cuda"] = torch.cuda.random.get_rng_state_all()
        else:
            states["cuda"] = torch.cuda.random.get_rng_state()
    return states


__all__ = ["FpfsCallback"]
