"""DeepSpeed by fpfs: the files of its own, from which each resumes, beside training; what fails."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# DeepSpeed looks for an accelerator when it is imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_LOG_LEVEL", "error")
import deepspeed
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import (
    TorchCheckpointEngine,
)

from fpfs.client import RankFailed, writing
from fpfs.core import transfers
from fpfs.integrations.deepspeed import register
from tests.support.failures.calls import tell_steps, told_steps
from tests.support.ranks import Worlds
from tests.support.states import flushed_files, same
from tests.support.waiting import wait_until

# It would compile one of its collectives first; gloo has all that these tests need.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def before_forks() -> None:
    """Import what each engine would import anew, which takes seconds."""
    importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def engine_of(*, stage: int, seed: int = 1, **config: Any) -> Any:
    """An engine of DeepSpeed, as deepspeed.initialize returns it."""
    # As DeepSpeed's launcher sets them.
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), LOCAL_SIZE=str(dist.get_world_size()))
    os.environ.update(CROSS_RANK="0", CROSS_SIZE="1")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.ReLU(), torch.nn.Linear(60, 3))
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        **config,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=given
    )
    return engine


def train(engine: Any, *, steps: int) -> list[float]:
    """Some steps, of which each has rows of its own; the losses."""
    losses = []
    for _ in range(steps):
        rows = torch.randn(4, 40, generator=torch.Generator().manual_seed(engine.global_steps))
        loss = engine(rows).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def writers_held() -> Iterator[threading.Event]:
    """Files are not written before the event is set."""
    go = threading.Event()

    def write(*arguments: Any, **options: Any) -> Any:
        assert go.wait(60)
        return transfers.write_pieces(*arguments, **options)

    writing.write_pieces = write
    try:
        yield go
    finally:
        go.set()
        writing.write_pieces = transfers.write_pieces


def latest(folder: str | Path) -> str | None:
    try:
        return Path(folder, "latest").read_text()
    except FileNotFoundError:
        return None


def files_in(folder: str | Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.pt"))


def records_of(path: Path) -> dict[str, bytes]:
    """The pickled objects and the tensors of a file of torch.save, as they lie there."""
    with zipfile.ZipFile(path) as archive:
        found = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    return {name: found[name] for name in found if name == "data.pkl" or name.startswith("data/")}


def save_by_both(own: str, ours: str, stage: int) -> list[str]:
    engine = engine_of(stage=stage)
    train(engine, steps=2)
    client_state = {"lines": ["read", 7], "more": torch.arange(5)}
    engine.save_checkpoint(own, client_state=client_state)
    register(engine)
    engine.save_checkpoint(ours, client_state=client_state)
    engine.destroy()
    assert latest(ours) == latest(own) == "global_step2"
    names = files_in(own)
    assert files_in(ours) == names
    if dist.get_rank() == 0:
        for name in names:
            assert records_of(Path(ours, name)) == records_of(Path(own, name)), name
    return names


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_the_files_are_deepspeeds_own(forks: Worlds, tmp_path: Path, size: int, stage: int) -> None:
    names, *_ = forks.start(size, save_by_both, tmp_path / "own", tmp_path / "fpfs", stage).values()
    assert len(names) == (1 if stage == 0 else 1 + size if stage < 3 else 2 * size)


def go_on(folder: str, stage: int, saves: bool, loads: bool) -> list[list[float]]:
    """Train, save, load into another engine, and train both. By DeepSpeed what is not by fpfs."""
    engine = engine_of(stage=stage)
    train(engine, steps=2)
    if saves:
        register(engine)
    engine.save_checkpoint(folder, client_state={"lines": 7})
    unbroken = train(engine, steps=3)
    engine.destroy()
    other = engine_of(stage=stage, seed=2)
    if loads:
        register(other)
    _, client_state = other.load_checkpoint(folder)
    assert client_state["lines"] == 7
    resumed = train(other, steps=3)
    other.destroy()
    return [unbroken, resumed]


@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True), (True, True)])
def test_each_resumes_from_the_others(
    forks: Worlds, tmp_path: Path, saves: bool, loads: bool
) -> None:
    for unbroken, resumed in forks.start(2, go_on, tmp_path, 1, saves, loads).values():
        assert resumed == unbroken


def train_beside(folder: str) -> list[Any]:
    engine = engine_of(stage=1)
    registered = register(engine)
    train(engine, steps=1)
    os.chdir(folder)
    engine.save_checkpoint(".")
    os.chdir("/")
    registered.wait()
    assert latest(folder) == "global_step1"
    with writers_held() as go:
        train(engine, steps=1)
        before = [parameter.detach().clone() for parameter in engine.module.parameters()]
        engine.save_checkpoint(folder, tag="held")
        train(engine, steps=2)
        assert latest(folder) == "global_step1"
        # One rank's files alone do not make it whole.
        dist.barrier()
        if dist.get_rank() == 1:
            saving = registered._saver._under_way[-1].saving
            go.set()
            saving.durable.result(60)
        dist.barrier()
        found = latest(folder)
        dist.barrier()
    registered.wait()
    assert (found, latest(folder)) == ("global_step1", "held")
    weights = torch.load(Path(folder, "held", "mp_rank_00_model_states.pt"), weights_only=False)
    assert same(list(weights["module"].values()), before)
    engine.destroy()
    return [engine.global_steps]


def test_training_goes_on_while_it_saves(forks: Worlds, tmp_path: Path) -> None:
    """`latest` names a checkpoint when the last rank's files are durable, and not before."""
    assert forks.start(2, train_beside, tmp_path).values() == [[4], [4]]


def fail(folder: str, how: str, call: str) -> list[str]:
    """Rank 1 fails: what each rank is told by the next call, and what its log has before."""
    logged: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fpfs").addHandler(handler)
    engine = engine_of(stage=1)
    registered = register(engine, timeout_s=60)
    train(engine, steps=1)
    engine.save_checkpoint(folder)
    registered.wait()
    is_rank_1 = dist.get_rank() == 1
    client_state: dict[str, Any] = {}
    if how == "device" and is_rank_1:

        def failing(*_: object, **__: object) -> None:
            raise OSError(28, os.strerror(28))

        writing.write_pieces = failing  # type: ignore[assignment]
    if how == "state" and not is_rank_1:
        client_state["lock"] = threading.Lock()
    script = Path(folder, "zero_to_fp32.py")
    if how == "script" and not is_rank_1:
        script.unlink()
        script.mkdir()
    train(engine, steps=1)
    engine.save_checkpoint(folder, client_state=client_state)
    train(engine, steps=1)
    said = []
    if how == "device" and is_rank_1:
        wait_until(lambda: bool(logged))
    writing.write_pieces = transfers.write_pieces
    if script.is_dir() and not is_rank_1:
        script.rmdir()
    said_before = "No space left" in str(logged)
    calls = {
        "save": lambda: engine.save_checkpoint(folder),
        "load": lambda: engine.load_checkpoint(folder),
        "destroy": engine.destroy,
    }
    try:
        calls[call]()
    except (OSError, TypeError, RankFailed) as error:
        said.append(f"{type(error).__name__}: {error}")
    said += [str(said_before), str(latest(folder))]
    dist.barrier()
    if call != "destroy":
        engine.save_checkpoint(folder)
        engine.destroy()
        said.append(str(latest(folder)))
    return said


@pytest.mark.parametrize(
    ("how", "call"),
    [
        ("device", "save"),
        ("state", "save"),
        ("script", "save"),
        ("device", "load"),
        ("device", "destroy"),
    ],
)
def test_what_one_rank_fails_of_all_ranks_raise_at_the_next_call(
    forks: Worlds, tmp_path: Path, how: str, call: str
) -> None:
    """No rank waits for ever, `latest` stays, and the save after that succeeds."""
    ranks = forks.start(2, fail, tmp_path, how, call).values()
    named = ["global_step1", "global_step3"][: 1 if call == "destroy" else 2]
    assert [each[2:] for each in ranks] == [named] * 2
    assert ranks[1][1] == str(how == "device"), "its log says it before"
    if how == "device":
        optimizer = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        cause = (
            f"OSError: [Errno 28] No space left on device: '{tmp_path}/global_step2/{optimizer}'"
        )
        assert [each[0] for each in ranks] == [f"RankFailed: rank 1: {cause}", cause]
    else:
        cause = "TypeError: cannot pickle '_thread.lock' object"
        if how == "script":
            cause = f"IsADirectoryError: [Errno 21] Is a directory: '{tmp_path}/zero_to_fp32.py'"
        assert [each[0] for each in ranks] == [cause, f"RankFailed: rank 0: {cause}"]


def save_where_nobody_may(folder: str, stage: int) -> list[str]:
    """What each save fails of, whether at once, and what `latest` is behind the next one."""
    engine = engine_of(stage=stage)
    registered = register(engine, timeout_s=60)
    said = []
    for save in (
        lambda: engine.save_checkpoint(f"{folder}/file"),
        lambda: engine.save_checkpoint(f"{folder}/file/run"),
        lambda: engine.save_checkpoint(folder, tag="file"),
        lambda: engine.save_16bit_model(f"{folder}/file/run"),
        lambda: engine.save_checkpoint("s3://bucket/run"),
    ):
        when = "at once"
        try:
            save()
            when = "later"
            registered.wait()
        except (OSError, ValueError, RankFailed) as error:
            said.append(f"{when}: {error}")
        engine.save_checkpoint(folder, tag=f"good{len(said)}")
        registered.wait()
        said.append(str(latest(folder)))
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 1])
def test_a_directory_that_cannot_be_made(forks: Worlds, tmp_path: Path, stage: int) -> None:
    """The save fails of it, on all ranks at the same call, and the next one does not."""
    (tmp_path / "file").write_text("")
    own, other = forks.start(2, save_where_nobody_may, tmp_path, stage).values()
    is_file = f"[Errno 17] File exists: '{tmp_path}/file'"
    no_run = f"[Errno 20] Not a directory: '{tmp_path}/file/run'"
    elsewhere = "s3://bucket/run is not on a filesystem of this machine"
    assert own.pop(8).startswith(f"at once: {elsewhere}")
    assert other.pop(8).startswith(f"at once: rank 0: NotLocal: {elsewhere}")
    assert own.pop() == other.pop() == "good9"
    assert own[::2] == [
        f"at once: {is_file}",
        f"at once: {no_run}",
        f"later: {is_file}",
        f"at once: {no_run}",
    ]
    assert other[::2] == [
        f"at once: rank 0: FileExistsError: {is_file}",
        f"at once: rank 0: NotADirectoryError: {no_run}",
        f"later: {is_file}",
        f"at once: rank 0: NotADirectoryError: {no_run}",
    ]
    assert own[1::2] == other[1::2] == ["good1", "good3", "good5", "good7"]


def save_cut_off(folder: str, how: str) -> list[str]:
    """A save is left by an exception, on all ranks; what `latest` is then, and behind the next."""
    checks = {"checkpoint": {"tag_validation": "FAIL"}}
    engine = engine_of(stage=0, **checks)
    registered = register(engine)
    engine.save_checkpoint(folder, tag="whole")

    def interrupted() -> None:
        raise KeyboardInterrupt

    states = engine.lr_scheduler.state_dict
    if how == "interrupt":
        engine.lr_scheduler.state_dict = interrupted
    said = []
    try:
        engine.save_checkpoint(folder, tag=f"tag{dist.get_rank()}")
    except (AssertionError, KeyboardInterrupt) as error:
        said.append(type(error).__name__)
    engine.lr_scheduler.state_dict = states
    dist.barrier()
    train(engine, steps=1)
    registered.wait()
    said.append(str(latest(folder)))
    engine.save_checkpoint(folder)
    engine.destroy()
    return [*said, str(latest(folder))]


@pytest.mark.parametrize(
    ("how", "size", "error"), [("interrupt", 1, "KeyboardInterrupt"), ("tags", 2, "AssertionError")]
)
def test_a_save_that_is_cut_off_is_never_named(
    forks: Worlds, tmp_path: Path, how: str, size: int, error: str
) -> None:
    ranks = forks.start(size, save_cut_off, tmp_path, how).values()
    assert ranks == [[error, "whole", "global_step1"]] * size


def cut_off_by_one(folder: str) -> list[str]:
    """Rank 1 is interrupted behind its first file, which fails when that is over."""
    engine = engine_of(stage=0)
    registered = register(engine)
    began, go = threading.Event(), threading.Event()

    def failing(*_: object, **__: object) -> None:
        began.set()
        assert go.wait(60)
        raise OSError(28, os.strerror(28))

    said = []
    if dist.get_rank() == 1:
        writing.write_pieces = failing  # type: ignore[assignment]
        with contextlib.suppress(KeyboardInterrupt), registered.checkpoint():
            registered.create(CheckpointCommitInfo("first", folder, True))
            registered.save({"rank": 1}, f"{folder}/1.pt")
            assert began.wait(60)
            raise KeyboardInterrupt
    else:
        with registered.checkpoint():
            registered.create(CheckpointCommitInfo("first", folder, True))
            registered.save({"rank": 0}, f"{folder}/0.pt")
        with pytest.raises(RankFailed, match="rank 1: KeyboardInterrupt"):
            registered.wait()
    dist.barrier()
    writing.write_pieces = transfers.write_pieces
    threading.Timer(0.2, go.set).start()
    said.append(str(latest(folder)))
    engine.save_checkpoint(folder, tag="next")
    registered.wait()
    said.append(str(latest(folder)))
    # As save_16bit_model, if an exception leaves it.
    registered.create(CheckpointCommitInfo("never", folder, True))
    registered.wait()
    engine.destroy()
    return [*said, str(latest(folder))]


def test_a_rank_that_is_interrupted_tells_the_others(forks: Worlds, tmp_path: Path) -> None:
    """At once; and what it has begun to save fails by itself."""
    ranks = forks.start(2, cut_off_by_one, tmp_path).values()
    assert ranks == [["None", "next", "next"]] * 2


def save_tags_that_differ(folder: str) -> list[str]:
    engine = engine_of(stage=0, checkpoint={"tag_validation": "IGNORE"})
    registered = register(engine)
    engine.save_checkpoint(folder, tag=f"tag{dist.get_rank()}")
    try:
        registered.wait()
    except RankFailed as error:
        return [str(error), str(latest(folder))]
    return []


def test_tags_that_differ(forks: Worlds, tmp_path: Path) -> None:
    said = "rank 1: saved the tag 'tag1', and rank 0 'tag0'"
    ranks = forks.start(2, save_tags_that_differ, tmp_path).values()
    assert ranks == [[said, "None"]] * 2


def fail_late(folder: str) -> list[Any]:
    """The second file fails at once, and the first when that is known."""
    engine = engine_of(stage=1)
    registered = register(engine)
    go = threading.Event()
    saves = registered._saver.save

    def failing(*_: object, **__: object) -> None:
        assert go.wait(60)
        raise OSError(28, os.strerror(28))

    def save(state: Any, path: str) -> Any:
        if "optim" in path:
            threading.Timer(0.2, go.set).start()
            raise MemoryError("none is left")
        return saves(state, path)

    writing.write_pieces = failing  # type: ignore[assignment]
    registered._saver.save = save  # type: ignore[method-assign]
    engine.save_checkpoint(folder, tag="first")
    said = []
    try:
        registered.wait()
    except MemoryError as error:
        said.append(str(error))
    assert go.is_set()
    writing.write_pieces = transfers.write_pieces
    registered._saver.save = saves  # type: ignore[method-assign]
    engine.save_checkpoint(folder, tag="second")
    engine.destroy()
    return [*said, latest(folder), files_in(f"{folder}/first")]


def test_all_that_a_save_fails_of_is_its_own(forks: Worlds, tmp_path: Path) -> None:
    """Also what fails of it later; the next one is saved."""
    assert forks.start(1, fail_late, tmp_path).values() == [["none is left", "second", []]]


def load_at_once(folder: str) -> list[str]:
    engine = engine_of(stage=1)
    registered = register(engine)
    engine.save_checkpoint(folder, tag="old")
    registered.wait()  # or its writers would be held, too, and the next save waits for them
    train(engine, steps=1)
    with writers_held() as go:
        engine.save_checkpoint(folder, tag="new")
        threading.Timer(0.2 if dist.get_rank() == 0 else 0.0, go.set).start()
        loaded, _ = engine.load_checkpoint(folder)
    engine.destroy()
    return [str(Path(loaded).parent.name)]


def test_what_was_saved_a_moment_ago_is_loaded_by_all_ranks(forks: Worlds, tmp_path: Path) -> None:
    assert forks.start(2, load_at_once, tmp_path).values() == [["new"], ["new"]]


def save_at_once(folder: str, writer: dict[str, Any] | None) -> list[Any]:
    """Save as the configuration says, or durably."""
    checkpoint = {} if writer is None else {"checkpoint": {"writer": writer}}
    engine = engine_of(stage=0, **checkpoint)
    registered = register(engine, **({"decoupled": False} if writer is None else {}))
    train(engine, steps=1)
    # DeepSpeed would write it in place, where a crash may leave it empty.
    Path(folder, "latest").write_text("former")
    dist.barrier()
    former = os.stat(f"{folder}/latest")
    with flushed_files() as flushed:
        engine.save_checkpoint(folder)
    assert flushed == ["mp_rank_00_model_states.pt", "latest"][: 2 if dist.get_rank() == 0 else 0]
    assert registered._concluded is None
    assert not registered._saver._spare
    said = [latest(folder), files_in(folder), engine.save_non_zero_checkpoint]
    assert os.stat(f"{folder}/latest").st_ino != former.st_ino
    engine.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        engine.save_checkpoint(folder)
    return said


@pytest.mark.parametrize("writer", [None, {"type": "python", "data_parallel": "replica"}])
def test_a_save_that_ends_when_it_is_durable(
    forks: Worlds, tmp_path: Path, writer: dict[str, Any] | None
) -> None:
    """Nothing is copied. Of what the configuration has several ranks write, one writes all."""
    ranks = forks.start(2, save_at_once, tmp_path, writer).values()
    expected = ["global_step1", ["global_step1/mp_rank_00_model_states.pt"]]
    assert ranks == [[*expected, True], [*expected, False]]


def save_in_new_directories(folder: str, log: str) -> None:
    engine = engine_of(stage=0)
    registered = register(engine)
    tell_steps(Path(log), pytest.MonkeyPatch())
    engine.save_checkpoint(f"{folder}/new/run", tag="a/b")
    registered.wait()
    engine.destroy()


def test_names_are_flushed(forks: Worlds, tmp_path: Path) -> None:
    """Of all directories that are made: a checkpoint that `latest` names survives power loss."""
    log = tmp_path / "log"
    forks.start(1, save_in_new_directories, tmp_path, log).values()
    steps = told_steps(log, tmp_path)
    at = steps.index("name new/run/latest")
    parents = ["new", ".", "new/run/a", "new/run"]
    assert steps[at - 5 : at - 1] == [f"flush {each}" for each in parents]


def save_weights(folder: str) -> list[Any]:
    engine = engine_of(stage=1)
    register(engine)
    train(engine, steps=1)
    with writers_held() as go:
        engine.save_checkpoint(f"{folder}/run")
        threading.Timer(0.2, go.set).start()
        engine.save_16bit_model(folder)
        # The checkpoint before it was waited for.
        assert latest(f"{folder}/run") == "global_step1"
    found = torch.load(Path(folder, "pytorch_model.bin"))
    assert same(list(found.values()), list(engine.module.state_dict().values()))
    engine.destroy()
    return [latest(folder)]


def test_weights_alone(forks: Worlds, tmp_path: Path) -> None:
    assert forks.start(2, save_weights, tmp_path).values() == [[None], [None]]


def misuse(folder: str) -> list[str]:
    said = []
    engine = engine_of(stage=0)
    with pytest.raises(TypeError, match="engine that deepspeed.initialize returns first"):
        register(engine.module)
    with pytest.raises(ValueError, match="threads is 0"):
        register(engine, threads=0)
    with pytest.raises(TypeError, match="decoupled is 'no': give True or False"):
        register(engine, decoupled="no")  # type: ignore[arg-type]
    assert isinstance(engine.checkpoint_engine, TorchCheckpointEngine)
    registered = register(engine, threads=1)
    assert engine.checkpoint_engine is registered
    with pytest.raises(ValueError, match="registered already"):
        register(engine)
    with pytest.raises(RuntimeError, match="create"):
        registered.save({}, f"{folder}/state.pt")
    engine.save_checkpoint(folder)
    engine.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        engine.save_checkpoint(folder)
    said.append(str(latest(folder)))
    return said


def test_misuse(forks: Worlds, tmp_path: Path) -> None:
    assert forks.start(1, misuse, tmp_path).values() == [["global_step0"]]
