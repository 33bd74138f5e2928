"""transformers' Trainer by fpfs: its own files, from which each resumes; and what fails."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from fpfs.client import async_saving, writing
from fpfs.client.paths import exchange
from fpfs.integrations import transformers
from fpfs.integrations.transformers import FORMER, REMOVED, UNFINISHED, FpfsCallback
from tests.support.failures.calls import tell_steps, told_steps
from tests.support.states import same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.utils.data")


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences, the same in every run."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 128, (24, 16), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Plain(nn.Module):
    """A model that is none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(128, 32), nn.Dropout(0.1), nn.Linear(32, 128))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(input_ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def gpt() -> PreTrainedModel:
    config = GPT2Config(vocab_size=128, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config)


def trainer_of(
    folder: Path, steps: int, *, by_fpfs: bool, model: Any = gpt, **arguments: Any
) -> Trainer:
    torch.manual_seed(5)
    given: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 11,
        **arguments,
    }
    trainer = Trainer(
        model=model(),
        args=TrainingArguments(output_dir=str(folder), **given),
        train_dataset=Rows(),
        eval_dataset=Rows(),
    )
    if by_fpfs:
        trainer.add_callback(FpfsCallback(trainer))
    return trainer


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return dict(trainer.model.state_dict())


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Trainer's state, but for what is measured."""
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    for entry in state["log_history"]:
        for key in ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second"):
            entry.pop(key, None)
    return state


@pytest.mark.parametrize("model", [gpt, Plain])
def test_a_checkpoint_is_trainers_own(tmp_path: Path, model: Any) -> None:
    """With an evaluation at each step that is saved."""
    for by_fpfs in (True, False):
        trainer_of(tmp_path / str(by_fpfs), 4, by_fpfs=by_fpfs, model=model).train()
    assert checkpoints(tmp_path / "True") == checkpoints(tmp_path / "False")
    for name in ("checkpoint-2", "checkpoint-4"):
        found, expected = tmp_path / "True" / name, tmp_path / "False" / name
        assert checkpoints(found) == checkpoints(expected)
        assert state_of(found) == state_of(expected)
        assert same(
            load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
        )
        for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            one, other = (
                torch.load(folder / file, weights_only=False) for folder in (found, expected)
            )
            if file == "rng_state.pth":
                one["numpy"], other["numpy"] = str(one["numpy"]), str(other["numpy"])
            assert same(one, other), file
        if model is gpt:
            assert (found / "config.json").read_text() == (expected / "config.json").read_text()
            loaded = GPT2LMHeadModel.from_pretrained(found)
            assert torch.equal(loaded.lm_head.weight, loaded.transformer.wte.weight)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_a_resumed_run_ends_as_an_unbroken_one(tmp_path: Path, first: bool, second: bool) -> None:
    """In the middle of the second of three epochs."""
    unbroken = trainer_of(tmp_path / "unbroken", 14, by_fpfs=False)
    unbroken.train()
    trainer_of(tmp_path / "run", 8, by_fpfs=first).train()
    resumed = trainer_of(tmp_path / "run", 14, by_fpfs=second)
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed), weights(unbroken))
    assert (
        state_of(tmp_path / "run" / "checkpoint-14")["log_history"]
        == (state_of(tmp_path / "unbroken" / "checkpoint-14")["log_history"])
    )


def test_epochs(tmp_path: Path) -> None:
    """A checkpoint after each, the last of which has no step behind it."""
    for by_fpfs in (True, False):
        trainer = trainer_of(
            tmp_path / str(by_fpfs),
            -1,
            by_fpfs=by_fpfs,
            num_train_epochs=2,
            save_strategy="epoch",
            eval_strategy="epoch",
        )
        trainer.train()
    for name in ("checkpoint-6", "checkpoint-12"):
        found, expected = tmp_path / "True" / name, tmp_path / "False" / name
        assert state_of(found) == state_of(expected)
        assert same(torch.load(found / "optimizer.pt"), torch.load(expected / "optimizer.pt"))
    assert checkpoints(tmp_path / "True") == ["checkpoint-12", "checkpoint-6"]


def test_only_the_model(tmp_path: Path) -> None:
    for by_fpfs in (True, False):
        folder = tmp_path / str(by_fpfs)
        trainer_of(folder, 2, by_fpfs=by_fpfs, save_only_model=True).train()
    own, theirs = (checkpoints(tmp_path / name / "checkpoint-2") for name in ("True", "False"))
    assert own == theirs
    assert "optimizer.pt" not in own


class Hold:
    """Lets saves write when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        write = async_saving.Save.write

        def held(save: Any, **options: Any) -> Any:
            self.began.set()
            assert self.go.wait(60)
            return write(save, **options)

        monkeypatch.setattr(async_saving.Save, "write", held)


class Watch(TrainerCallback):
    """Looks at what is there at the begin of each step; lets the save go on at one."""

    def __init__(self, folder: Path, hold: Hold, *, go_at: int) -> None:
        self.folder, self.hold, self.go_at = folder, hold, go_at
        self.seen: list[list[str]] = []

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.seen.append(checkpoints(self.folder) if self.folder.exists() else [])
        if state.global_step == self.go_at:
            self.hold.go.set()


class Steps(TrainerCallback):
    """Tells which steps are made."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.begun.append(state.global_step + 1)


def test_training_goes_on_while_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the copy is of the step that was to be saved."""
    hold = Hold(monkeypatch)
    trainer = trainer_of(tmp_path / "run", 4, by_fpfs=True, save_steps=2)
    watch = Watch(tmp_path / "run", hold, go_at=3)
    trainer.add_callback(watch)
    trainer.train()
    assert hold.began.is_set()
    assert watch.seen[3] == [f"{UNFINISHED}checkpoint-2"]
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]
    expected = trainer_of(tmp_path / "own", 2, by_fpfs=False)
    expected.train()
    found = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert torch.equal(found["transformer.wte.weight"], weights(expected)["transformer.wte.weight"])


def test_old_ones_go_when_the_next_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for by_fpfs in (True, False):
        folder = tmp_path / str(by_fpfs)
        trainer_of(folder, 10, by_fpfs=by_fpfs, save_total_limit=2).train()
    assert checkpoints(tmp_path / "True") == ["checkpoint-10", "checkpoint-8"]
    assert checkpoints(tmp_path / "False") == ["checkpoint-10", "checkpoint-8"]
    folder = tmp_path / "held"
    trainer_of(folder, 2, by_fpfs=True).train()
    trainer = trainer_of(folder, 6, by_fpfs=True, save_total_limit=1)
    watch = Watch(folder, Hold(monkeypatch), go_at=5)
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=True)
    assert watch.seen[-1] == [f"{UNFINISHED}checkpoint-4", "checkpoint-2"]
    assert checkpoints(folder) == ["checkpoint-6"]


def test_what_another_run_has_left_goes_first(tmp_path: Path) -> None:
    for by_fpfs in (True, False):
        former = tmp_path / str(by_fpfs) / "checkpoint-500"
        former.mkdir(parents=True)
        os.utime(former, (1, 1))
        trainer_of(former.parent, 4, by_fpfs=by_fpfs, save_total_limit=1).train()
        assert checkpoints(former.parent) == ["checkpoint-4"]


@pytest.mark.parametrize(
    ("limit", "gone"),
    [(None, []), (0, []), (1, [108, 2, 16]), (3, [108, 2, 16]), (4, [108, 2]), (6, []), (9, [])],
)
def test_which_ones_go(tmp_path: Path, limit: int | None, gone: list[int]) -> None:
    """The oldest, of those of an age the ones of fewer steps; not what was saved now, or later."""
    for step, age_s in ((2, 50), (4, 10), (16, 50), (108, 70), (300, 60)):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        os.utime(path, (1000 - age_s, 1000 - age_s))
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-1").touch()
    (tmp_path / "runs").mkdir()
    before = transformers._checkpoints(str(tmp_path))
    (tmp_path / "checkpoint-300" / "saved again").touch()
    (tmp_path / "checkpoint-6").mkdir()
    newest = str(tmp_path / "checkpoint-4")
    found = transformers._obsolete(before, limit, newest=newest, best=None)
    assert found == [str(tmp_path / f"checkpoint-{step}") for step in gone]
    best = tmp_path / "checkpoint-108"
    assert str(best) not in transformers._obsolete(before, limit, newest=newest, best=str(best))


class Saves(TrainerCallback):
    """Has Trainer save by itself after the third step, as it does before SIGTERM ends it."""

    def __init__(self, trainer: Trainer, hold: Hold) -> None:
        self.trainer, self.hold = trainer, hold

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            control.should_training_stop = True
            self.hold.go.set()


def test_what_trainer_saves_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even beyond the limit: it has more steps than what is saved beside training."""
    trainer_of(tmp_path, 2, by_fpfs=True, save_steps=1).train()
    trainer = trainer_of(tmp_path, 6, by_fpfs=True, save_total_limit=1)
    trainer.add_callback(Saves(trainer, Hold(monkeypatch)))
    trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert state_of(tmp_path / "checkpoint-3")["global_step"] == 3


def test_what_cannot_be_removed_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has its name no longer, since it may have lost some of its files."""
    remove = transformers.remove

    def fail(path: str) -> None:
        if os.path.isdir(path) and transformers.REMOVED in path:
            raise PermissionError(13, os.strerror(13), path)
        remove(path)

    monkeypatch.setattr(transformers, "remove", fail)
    trainer_of(tmp_path, 6, by_fpfs=True, save_total_limit=1).train()
    assert [name for name in checkpoints(tmp_path) if name[0] != "."] == ["checkpoint-6"]
    assert "checkpoint-2 was not removed: [Errno 13]" in caplog.text
    monkeypatch.undo()
    trainer_of(tmp_path, 2, by_fpfs=True).train()
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-6"]


class Interrupts(TrainerCallback):
    """Ends training at a step, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            raise ZeroDivisionError


@pytest.mark.parametrize("is_new", [False, True])
def test_a_run_that_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """While the one before still saves: by the same Trainer, or another one of the process."""
    hold = Hold(monkeypatch)
    trainer = trainer_of(tmp_path, 4, by_fpfs=True)
    trainer.add_callback(Interrupts(2))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert hold.began.wait(60)
    threading.Timer(0.2, hold.go.set).start()
    if is_new:
        trainer = trainer_of(tmp_path, 4, by_fpfs=True)
    trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    expected = trainer_of(tmp_path / "own", 4, by_fpfs=False)
    expected.train()
    if is_new:
        found = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
        assert same(found, load_file(tmp_path / "own" / "checkpoint-4" / "model.safetensors"))


@pytest.mark.parametrize("is_new", [False, True])
def test_a_run_that_goes_on_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """It finds the checkpoint that is still being saved: nothing is written until it waits."""
    hold = Hold(monkeypatch)
    wait = FpfsCallback.wait

    def let_go_and_wait(callback: FpfsCallback) -> None:
        if hold.began.is_set():
            hold.go.set()
        wait(callback)

    monkeypatch.setattr(FpfsCallback, "wait", let_go_and_wait)
    trainer = trainer_of(tmp_path / "run", 4, by_fpfs=True)
    trainer.add_callback(Interrupts(2))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert hold.began.wait(60)
    assert checkpoints(tmp_path / "run") == [f"{UNFINISHED}checkpoint-2"]
    if is_new:
        trainer = trainer_of(tmp_path / "run", 4, by_fpfs=True)
    trainer.train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]
    expected = trainer_of(tmp_path / "own", 4, by_fpfs=False)
    expected.train()
    assert same(weights(trainer), weights(expected))


class SavesMore(Trainer):  # type: ignore[misc]
    """Has something besides."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        Path(str(output_dir), "more.txt").write_text("more")


def test_what_trainer_saves_otherwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, 2, by_fpfs=True)
    more = SavesMore(model=gpt(), args=trainer.args, train_dataset=Rows(), eval_dataset=Rows())
    more.add_callback(FpfsCallback(more))
    more.train()
    assert (tmp_path / "checkpoint-2" / "more.txt").exists()
    assert "Trainer saves by itself: its class has a way of its own" in caplog.text
    of_several = {"a": Rows(), "b": Rows()}
    several = Trainer(model=gpt(), args=trainer.args, train_dataset=Rows(), eval_dataset=of_several)
    several.add_callback(FpfsCallback(several))
    several.train()
    assert "Trainer saves by itself: it evaluates several datasets" in caplog.text
    last = state_of(tmp_path / "checkpoint-2")["log_history"]
    assert any("eval_b_loss" in entry for entry in last)


def test_a_model_that_was_sharded_when_it_was_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks save it: rank 0 would wait for ever in save_pretrained."""
    model = gpt()
    model._is_distributed_loading_by_transformers = True
    trainer = trainer_of(tmp_path, 2, by_fpfs=True, model=lambda: model, save_only_model=True)
    trainer.train()
    assert "Trainer saves by itself: the model was sharded when it was loaded" in caplog.text
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


class Breaks(Rows):
    """The thirteenth row that is drawn, of the fourth step, breaks."""

    drawn = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.drawn += 1
        if self.drawn == 13:
            raise ZeroDivisionError
        return super().__getitem__(index)


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("logs", [1, 100])
def test_what_breaks_the_next_step_loses_no_checkpoint(
    tmp_path: Path, evaluates: bool, logs: int
) -> None:
    for by_fpfs in (True, False):
        folder = tmp_path / str(by_fpfs)
        strategy = {"eval_strategy": "steps" if evaluates else "no", "logging_steps": logs}
        trainer = trainer_of(folder, 6, by_fpfs=by_fpfs, **strategy)
        trainer.train_dataset = Breaks()
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, FpfsCallback):
                callback.wait()
        assert checkpoints(folder) == ["checkpoint-2"]


class Counts(TrainerCallback, ExportableState):
    """Counts events, and draws random numbers when it has evaluated."""

    def __init__(self) -> None:
        self.events = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"events": self.events}}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.events += 1

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.events += 100

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.events += int(torch.randint(10_000, 20_000, ()))


def test_other_callbacks(tmp_path: Path) -> None:
    """Their states are of the moment at which Trainer saves; so are random numbers."""
    for by_fpfs in (True, False):
        trainer = trainer_of(tmp_path / str(by_fpfs), 8, by_fpfs=False)
        trainer.add_callback(Counts())
        if by_fpfs:
            trainer.add_callback(FpfsCallback(trainer))
        trainer.train()
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"):
        found, expected = tmp_path / "True" / name, tmp_path / "False" / name
        assert state_of(found) == state_of(expected)
        assert state_of(found)["stateful_callbacks"]["Counts"]["attributes"]["events"] > 10_000
        one, other = (
            torch.load(folder / "rng_state.pth", weights_only=False) for folder in (found, expected)
        )
        assert torch.equal(one["cpu"], other["cpu"])


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_directory(tmp_path: Path, kind: str) -> None:
    """A link is replaced, and what it leads to stays; a file is refused."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    if kind == "link":
        (folder / "checkpoint-2").symlink_to(elsewhere)
        trainer_of(folder, 2, by_fpfs=True).train()
        assert not (folder / "checkpoint-2").is_symlink()
    else:
        (folder / "checkpoint-2").write_text("a user's")
        with pytest.raises(FileExistsError, match="checkpoint-2"):
            trainer_of(folder, 2, by_fpfs=True).train()
        assert (folder / "checkpoint-2").read_text() == "a user's"
    assert checkpoints(folder) == ["checkpoint-2"]
    assert checkpoints(elsewhere) == ["kept"]


def test_misuse(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is made for a Trainer, not a NoneType"):
        FpfsCallback(None)
    one, other = (trainer_of(tmp_path, 2, by_fpfs=False) for _ in range(2))
    one.add_callback(FpfsCallback(other))
    with pytest.raises(ValueError, match="made for another Trainer"):
        one.train()
    other.args.output_dir = "s3://bucket/run"
    with pytest.raises(ValueError, match="s3://bucket/run is not on a filesystem"):
        FpfsCallback(other)


@pytest.mark.parametrize("what", ["first", "last"])
def test_a_failure_is_raised_and_the_former_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """By the next save, or at the end; nothing that is not whole has a checkpoint's name."""
    trainer_of(tmp_path, 2, by_fpfs=True).train()

    def write_nothing(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing, "write_pieces", write_nothing)
    steps = 8 if what == "first" else 4
    trainer = trainer_of(tmp_path, steps, by_fpfs=True, save_total_limit=1)
    with pytest.raises(OSError, match=r"No space left on device: .*checkpoint-4"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == (6 if what == "first" else 4)
    assert checkpoints(tmp_path) == ["checkpoint-2"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    trainer_of(tmp_path, 2, by_fpfs=True).train()
    (tmp_path / "checkpoint-2" / "of before").touch()
    trainer_of(tmp_path, 2, by_fpfs=True).train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert not (tmp_path / "checkpoint-2" / "of before").exists()


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_checkpoint_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """All of its files, and their names; and its own name before the one that it replaces goes.

    Where the filesystem exchanges names, one of the two has the name at any time.
    """
    run, log = tmp_path / "run", tmp_path / "log"
    trainer_of(run, 2, by_fpfs=True).train()
    save_small = FpfsCallback._save_small

    def save_templates(self: FpfsCallback, folder: str) -> None:
        """As a tokenizer with several does."""
        save_small(self, folder)
        Path(folder, "templates").mkdir()
        Path(folder, "templates", "chat").touch()

    def exchange_and_tell(one: str, other: str) -> bool:
        with log.open("a") as file:
            file.write(f"exchange {other}\n" if exchanges else "")
        return exchanges and exchange(one, other)

    monkeypatch.setattr(FpfsCallback, "_save_small", save_templates)
    monkeypatch.setattr(transformers, "exchange", exchange_and_tell)
    tell_steps(log, monkeypatch)
    trainer_of(run, 2, by_fpfs=True).train()
    steps = told_steps(log, run)
    names = ["exchange checkpoint-2"]
    if not exchanges:
        names = [f"name {FORMER}checkpoint-2", "name checkpoint-2"]
    replaced = steps.index(names[0])
    unfinished = f"{UNFINISHED}checkpoint-2"
    files = checkpoints(run / "checkpoint-2")
    assert "templates" in files
    files.append("templates/chat")
    assert {f"flush {unfinished}/{name}" for name in files} <= set(steps[:replaced])
    assert steps[replaced - 1] == f"flush {unfinished}"
    rest = [*names, "flush .", f"name {REMOVED}checkpoint-2"]
    assert steps[replaced:][: len(rest)] == rest
    assert checkpoints(run) == ["checkpoint-2"]


def test_names_of_new_directories_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the one that Trainer has made is gone when its first checkpoint is saved."""
    trainer = trainer_of(tmp_path / "new" / "run", 2, by_fpfs=True)
    shutil.rmtree(tmp_path / "new")
    tell_steps(tmp_path / "log", monkeypatch)
    trainer.train()
    assert told_steps(tmp_path / "log", tmp_path)[:2] == ["flush new", "flush ."]


def test_what_killed_runs_have_left_goes(tmp_path: Path) -> None:
    for name in (f"{UNFINISHED}checkpoint-1", f"{FORMER}checkpoint-1", f"{FORMER}checkpoint-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "checkpoint-1").mkdir()
    trainer_of(tmp_path, 2, by_fpfs=True).train()
    assert checkpoints(tmp_path) == ["checkpoint-0", "checkpoint-1", "checkpoint-2"]


def test_a_run_that_was_killed_while_it_replaced_one_goes_on_from_that(tmp_path: Path) -> None:
    """Before the new one had the name: the former one is back when Trainer looks for the last."""
    trainer_of(tmp_path, 4, by_fpfs=True).train()
    (tmp_path / "checkpoint-4").rename(tmp_path / f"{FORMER}checkpoint-4")
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / f"{UNFINISHED}checkpoint-4")
    trainer, steps = trainer_of(tmp_path, 6, by_fpfs=True), Steps()
    trainer.add_callback(steps)
    trainer.train(resume_from_checkpoint=True)
    assert steps.begun == [5, 6]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize(
    "arguments", [{"load_best_model_at_end": True}, {"metric_for_best_model": "eval_loss"}]
)
def test_where_trainer_saves_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any]
) -> None:
    """It is said once, and it does."""
    trainer = trainer_of(tmp_path, 6, by_fpfs=True, **arguments)
    with caplog.at_level(logging.WARNING, "fpfs"):
        trainer.train()
    said = [message for message in caplog.messages if "saves by itself" in message]
    assert said == ["Trainer saves by itself: it looks for the best model"]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert Path(trainer.state.best_model_checkpoint).exists()


def test_a_second_training(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 2, by_fpfs=True)
    trainer.train()
    trainer.args.max_steps = 4
    trainer.train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]
