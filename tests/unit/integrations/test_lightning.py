"""`FpfsCheckpointIO` on a plain directory, called as Lightning calls it."""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fpfs.client import async_saving
from fpfs.client.saving import Save
from fpfs.integrations import lightning
from fpfs.integrations.lightning import FpfsCheckpointIO
from tests.support.failures.calls import full, tell_steps, told_steps
from tests.support.states import flushed_files

WITHIN = {"fit_loop": {"epoch_progress": {"current": {"ready": 2, "completed": 1}}}}
"""What the loops of a Trainer are in its second epoch."""
BEHIND = {"fit_loop": {"epoch_progress": {"current": {"ready": 2, "completed": 2}}}}


def checkpoint(seed: int) -> dict[str, Any]:
    weight = torch.randn(700, 501, generator=torch.Generator().manual_seed(seed))
    return {"epoch": seed, "state_dict": {"weight": weight}, "loops": WITHIN}


def assert_is(loaded: dict[str, Any], seed: int) -> None:
    assert loaded["epoch"] == seed
    assert torch.equal(loaded["state_dict"]["weight"], checkpoint(seed)["state_dict"]["weight"])


@pytest.fixture
def plugin() -> Iterator[FpfsCheckpointIO]:
    made = FpfsCheckpointIO()
    yield made
    made.teardown()


class Held:
    """Saves that do not go on until they may, and fail then if they shall."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        self.error: BaseException | None = None
        write = Save.write

        def held(*arguments: Any, **words: Any) -> Any:
            assert self.may_go_on.wait(60)
            if self.error is not None:
                raise self.error
            return write(*arguments, **words)

        monkeypatch.setattr(async_saving.Save, "write", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    holding = Held(monkeypatch)
    yield holding
    holding.may_go_on.set()


def test_names_of_new_folders_are_flushed(
    plugin: FpfsCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_steps(tmp_path / "log", monkeypatch)
    plugin.save_checkpoint(checkpoint(1), tmp_path / "new" / "deeper" / "a.ckpt")
    plugin.wait()
    assert told_steps(tmp_path / "log", tmp_path)[:2] == ["flush new", "flush ."]


def test_save_load_remove(plugin: FpfsCheckpointIO, tmp_path: Path) -> None:
    path = tmp_path / "made/for/it/epoch=1.ckpt"
    saved = checkpoint(1)
    plugin.save_checkpoint(saved, path)
    saved["state_dict"]["weight"].zero_()
    assert_is(plugin.load_checkpoint(path), 1)
    assert_is(torch.load(path), 1)
    plugin.remove_checkpoint(path)
    assert list(path.parent.iterdir()) == []
    plugin.remove_checkpoint(path)


def test_what_torch_saved_is_loaded(plugin: FpfsCheckpointIO, tmp_path: Path) -> None:
    torch.save(checkpoint(2), tmp_path / "torch.ckpt")
    assert_is(plugin.load_checkpoint(tmp_path / "torch.ckpt"), 2)
    assert_is(plugin.load_checkpoint(f"file://{tmp_path}/torch.ckpt", weights_only=True), 2)
    torch.save({"object": Held}, tmp_path / "object.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        plugin.load_checkpoint(tmp_path / "object.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "object.ckpt", weights_only=False)
    assert loaded == {"object": Held}
    assert plugin.load_checkpoint(tmp_path / "torch.ckpt", "meta")["state_dict"]["weight"].is_meta


def test_training_goes_on_while_it_saves(
    plugin: FpfsCheckpointIO, tmp_path: Path, held: Held
) -> None:
    path = tmp_path / "a.ckpt"
    plugin.save_checkpoint(checkpoint(1), path)
    assert not path.exists()
    held.may_go_on.set()
    plugin.wait()
    assert_is(torch.load(path), 1)


def test_a_file_that_gets_its_name_while_it_is_asked_for_exists(
    plugin: FpfsCheckpointIO, tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks for the file before the save ends, and then for the save, sees neither."""
    path = tmp_path / "a.ckpt"
    plugin.save_checkpoint(checkpoint(1), path)
    exists = os.path.exists

    def exists_before_the_end(name: Any) -> bool:
        found = exists(name)
        if os.fspath(name) == str(path) and plugin._saving is not None:
            held.may_go_on.set()
            plugin._saving.durable.result(60)
        return found

    monkeypatch.setattr(os.path, "exists", exists_before_the_end)
    assert plugin.exists(path)


def test_a_former_checkpoint_stays_until_the_next_is_durable(
    plugin: FpfsCheckpointIO, tmp_path: Path, held: Held
) -> None:
    """ModelCheckpoint removes it as soon as the next save has returned."""
    former, path = tmp_path / "former.ckpt", tmp_path / "next.ckpt"
    torch.save(checkpoint(1), former)
    plugin.save_checkpoint(checkpoint(2), path)
    plugin.remove_checkpoint(former)
    assert former.exists()
    held.may_go_on.set()
    plugin.wait()
    assert list(tmp_path.iterdir()) == [path]


def test_a_former_checkpoint_goes_without_another_call(
    plugin: FpfsCheckpointIO, tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = tmp_path / "former.ckpt"
    torch.save(checkpoint(1), former)
    plugin.save_checkpoint(checkpoint(2), tmp_path / "next.ckpt")
    plugin.remove_checkpoint(former)
    is_gone = threading.Event()
    unlink = os.unlink

    def told(name: str, **words: Any) -> None:
        unlink(name, **words)
        if name == str(former):
            is_gone.set()

    monkeypatch.setattr(os, "unlink", told)
    held.may_go_on.set()
    assert is_gone.wait(60)


def test_a_former_checkpoint_stays_when_the_next_fails(
    plugin: FpfsCheckpointIO, tmp_path: Path, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    former = tmp_path / "former.ckpt"
    torch.save(checkpoint(1), former)
    plugin.save_checkpoint(checkpoint(2), tmp_path / "next.ckpt")
    plugin.remove_checkpoint(former)
    held.error = OSError(28, "No space left on device", "next.ckpt")
    held.may_go_on.set()
    with pytest.raises(OSError, match="No space left"):
        plugin.wait()
    assert list(tmp_path.iterdir()) == [former]
    assert f"{former} stays" in caplog.text
    held.error = None
    plugin.save_checkpoint(checkpoint(3), tmp_path / "third.ckpt")
    assert_is(plugin.load_checkpoint(tmp_path / "third.ckpt"), 3)
    plugin.remove_checkpoint(former)
    assert not former.exists()


def test_a_failure_that_is_known_already_keeps_the_former_checkpoint(
    plugin: FpfsCheckpointIO, tmp_path: Path, held: Held
) -> None:
    former = tmp_path / "former.ckpt"
    torch.save(checkpoint(1), former)
    held.error = OSError(5, "Input/output error")
    held.may_go_on.set()
    plugin.save_checkpoint(checkpoint(2), tmp_path / "next.ckpt")
    assert plugin._saving is not None
    assert plugin._saving.durable.exception(60) is held.error
    plugin.remove_checkpoint(former)
    assert former.exists()
    with pytest.raises(OSError, match="Input/output"):
        plugin.load_checkpoint(former)
    assert former.exists()


def test_the_end_of_a_run_raises_what_failed(tmp_path: Path, held: Held) -> None:
    plugin = FpfsCheckpointIO()
    held.error = OSError(5, "Input/output error")
    held.may_go_on.set()
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    with pytest.raises(OSError, match="Input/output"):
        plugin.teardown()
    plugin.teardown()


def test_a_save_that_does_not_end_is_named(tmp_path: Path, held: Held) -> None:
    plugin = FpfsCheckpointIO(timeout_s=0.01)
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    with pytest.raises(TimeoutError, match=r"a\.ckpt has not ended"):
        plugin.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")
    former = tmp_path / "former.ckpt"
    former.touch()
    plugin.remove_checkpoint(former)
    assert former.exists()
    assert plugin._saving is not None
    saving = plugin._saving
    held.may_go_on.set()
    saving.durable.result(60)
    plugin.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_run_after_the_end_of_another(plugin: FpfsCheckpointIO, tmp_path: Path) -> None:
    """What is saved behind an end, for which nobody waits, is durable when the call returns."""
    for seed in (1, 2):
        plugin.save_checkpoint(checkpoint(seed), tmp_path / "last.ckpt")
        saving = plugin._saving
        plugin.teardown()
        assert saving is not None
        assert saving.durable.result(0).durable
        assert_is(torch.load(tmp_path / "last.ckpt"), seed)
        with flushed_files() as flushed:
            plugin.save_checkpoint(checkpoint(seed) | {"loops": BEHIND}, tmp_path / "behind.ckpt")
        assert flushed == ["behind.ckpt"]
        assert_is(torch.load(tmp_path / "behind.ckpt"), seed)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_save_after_one_that_failed_is_made(
    plugin: FpfsCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    """It may be the last of the run, or of a job, which is queued again behind it."""
    name = "hpc_ckpt_1.ckpt" if is_last else "b.ckpt"
    monkeypatch.setattr("fpfs.client.writing.write_pieces", full)
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    assert plugin._saving is not None
    assert isinstance(plugin._saving.durable.exception(60), OSError)
    monkeypatch.undo()
    raised = pytest.raises(OSError, match=r"No space left on device.*a\.ckpt")
    with contextlib.nullcontext() if is_last else raised:
        plugin.save_checkpoint(checkpoint(2), tmp_path / name)
    plugin.teardown()
    assert_is(torch.load(tmp_path / name), 2)


@pytest.mark.parametrize(
    ("key", "name", "asynchronous"),
    [
        ("loops", "a.ckpt", False),
        ("of Fabric", "a.ckpt", True),
        ("loops", "hpc_ckpt_1.ckpt", True),
    ],
)
def test_what_nobody_waits_for_is_there_at_once(
    tmp_path: Path, key: str, name: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fabric has no end, a Trainer's processes hand each other files, SLURM ends a job."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("beside training")

    monkeypatch.setattr(async_saving.AsyncSaver, "save", never)
    plugin = FpfsCheckpointIO(asynchronous=asynchronous)
    with flushed_files() as flushed:
        plugin.save_checkpoint({key: WITHIN, "weight": torch.ones(5)}, tmp_path / name)
    assert flushed == [name]
    assert torch.equal(torch.load(tmp_path / name)["weight"], torch.ones(5))


def test_a_signal_that_comes_while_a_checkpoint_is_removed(
    plugin: FpfsCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's handler saves, in the middle of whatever the training thread does."""
    handled: list[int] = []

    def save(number: int, _frame: object) -> None:
        handled.append(number)
        plugin.save_checkpoint(checkpoint(2), tmp_path / "hpc_ckpt_1.ckpt")

    former = tmp_path / "former.ckpt"
    former.touch()
    has_succeeded = lightning._has_succeeded

    def interrupted(durable: Any) -> bool:
        if not handled:
            os.kill(os.getpid(), signal.SIGUSR1)
        return has_succeeded(durable)

    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    assert plugin._saving is not None
    plugin._saving.durable.result(60)
    monkeypatch.setattr(lightning, "_has_succeeded", interrupted)
    before = signal.signal(signal.SIGUSR1, save)
    try:
        plugin.remove_checkpoint(former)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [signal.SIGUSR1]
    assert_is(torch.load(tmp_path / "hpc_ckpt_1.ckpt"), 2)
    assert not former.exists()


def test_links_and_directories_are_removed(plugin: FpfsCheckpointIO, tmp_path: Path) -> None:
    kept, link, folder = tmp_path / "kept.ckpt", tmp_path / "last.ckpt", tmp_path / "sharded"
    kept.touch()
    link.symlink_to(kept)
    (folder / "of").mkdir(parents=True)
    (folder / "of/ranks").touch()
    linked = tmp_path / "linked"
    linked.symlink_to(folder)
    for path in (link, linked):
        plugin.remove_checkpoint(path)
    assert sorted(tmp_path.iterdir()) == [kept, folder]
    assert (folder / "of/ranks").exists()
    plugin.remove_checkpoint(folder)
    assert list(tmp_path.iterdir()) == [kept]


def test_what_cannot_be_removed_is_told(
    plugin: FpfsCheckpointIO,
    tmp_path: Path,
    held: Held,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    former = tmp_path / "former.ckpt"
    former.touch()
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    plugin.remove_checkpoint(former)

    def refused(name: str, **_: Any) -> None:
        raise PermissionError(1, "Operation not permitted", name)

    held_unlink = os.unlink
    monkeypatch.setattr(
        os, "unlink", lambda name, **words: (refused if name == str(former) else held_unlink)(name)
    )
    held.may_go_on.set()
    plugin.wait()
    assert f"{former} was not removed" in caplog.text


def test_copies_are_new_ones(plugin: FpfsCheckpointIO, tmp_path: Path) -> None:
    """Lightning's launchers send it to other processes."""
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    options = {"memory_bytes": 1 << 20, "staging_bytes": 1 << 21, "threads": 3, "timeout_s": 7}
    asked = FpfsCheckpointIO(asynchronous=False, **options)
    for other in (pickle.loads(pickle.dumps(asked)), copy.deepcopy(asked)):
        assert (other._asynchronous, other._options) == (False, options)
        other.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")
        other.teardown()
    assert_is(plugin.load_checkpoint(tmp_path / "b.ckpt"), 2)
    assert_is(torch.load(tmp_path / "a.ckpt"), 1)


def test_a_forked_process_has_its_own(plugin: FpfsCheckpointIO, tmp_path: Path, held: Held) -> None:
    former = tmp_path / "former.ckpt"
    former.touch()
    plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
    plugin.remove_checkpoint(former)

    of_child = {"loops": WITHIN, "weight": torch.ones(5)}  # no work for threads, which it lacks

    def child() -> None:
        held.may_go_on = threading.Event()  # a thread may have had its lock
        held.may_go_on.set()
        plugin.save_checkpoint(of_child, tmp_path / "b.ckpt")
        plugin.teardown()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert torch.equal(torch.load(tmp_path / "b.ckpt")["weight"], torch.ones(5))
    assert former.exists()
    held.may_go_on.set()
    plugin.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt"]


def test_what_is_refused(
    plugin: FpfsCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with pytest.raises(TypeError, match="storage_options: leave"):
        plugin.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt", storage_options={})
    for call in (plugin.load_checkpoint, plugin.remove_checkpoint):
        with pytest.raises(ValueError, match=r"s3://bucket/a\.ckpt is not on a filesystem"):
            call("s3://bucket/a.ckpt")
    with pytest.raises(TypeError, match="asynchronous is 'no': give True or False"):
        FpfsCheckpointIO(asynchronous="no")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"a\.ckpt"):
        plugin.load_checkpoint(tmp_path / "a.ckpt")
    for words in ({"threads": 0}, {"memory_bytes": -1}, {"staging_bytes": -1}):
        with pytest.raises(ValueError, match="give a number"):
            FpfsCheckpointIO(**words)
    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""
