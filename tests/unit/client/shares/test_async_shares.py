"""Nodes save their shares of one checkpoint beside training."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fpfs import client
from fpfs.client import AsyncSaver, planning
from fpfs.client.replacement import Replacement
from fpfs.client.shares import saving
from tests.support.failures.calls import die, full
from tests.support.ranks import Worlds
from tests.support.states import (
    PLACEMENTS,
    directories,
    fitting,
    numbered,
    own_directory,
    own_part,
    same,
    sharded,
    wholes,
)


def save_beside(root: str, nodes: int, copies: int) -> list[Any]:
    """As a rank: save to each directory, of each placement, and change all after each call."""
    planning.CHUNK_BYTES_DEFAULT = 4096
    found = []
    with AsyncSaver() as saver:
        for name in fitting(dist.get_world_size()):
            state = sharded(PLACEMENTS[name])
            directory = own_directory(os.path.join(root, name), nodes)
            began = saver.save_shares(state, directory, copies=copies)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    own_part(value).fill_(-1)
            saver.wait()
            saved = began.durable.result(0)
            acknowledged = began.acknowledged.result(0)
            assert acknowledged == saved._replace(seconds=acknowledged.seconds)
            assert saved.durable
            assert began.bytes_written == began.bytes_to_write > 0
            found.append([began.path == saved.path == directory, len(saved.written)])
    return found


@pytest.mark.parametrize(("size", "nodes", "copies"), [(2, 2, 2), (4, 2, 1), (3, 3, 1)])
def test_what_changes_afterwards_is_not_saved(
    forks: Worlds, tmp_path: Path, size: int, nodes: int, copies: int
) -> None:
    for found in forks.start(size, save_beside, str(tmp_path), nodes, copies).values():
        assert found == [[True, size]] * len(fitting(size))
    for name in fitting(size):
        loaded = client.load(directories(tmp_path / name, nodes))
        assert loaded["step"] == 7
        for key, expected in wholes().items():
            assert same(loaded[key], expected)
            assert same(loaded[f"{key} ordinary"], expected)


def step_and_save(root: str) -> list[float]:
    """As a rank: an optimizer steps while its parameters are saved; returns what were saved."""
    planning.CHUNK_BYTES_DEFAULT = 1 << 16
    weight = torch.nn.Parameter(torch.zeros(300_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with AsyncSaver(optimizers=optimizer) as saver:
        for step in range(5):
            saver.save_shares({"step": step, "weight": weight}, own_directory(root, 2))
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
    return weight.unique().tolist()


def test_optimizers_wait_for_the_copy(forks: Worlds, tmp_path: Path) -> None:
    assert forks.start(2, step_and_save, str(tmp_path)).values() == [[5.0]] * 2
    found = client.load(directories(tmp_path, 2))
    assert (found["step"], found["weight"].unique().tolist()) == (4, [4.0])


MOMENTS: dict[str, tuple[Any, str]] = {
    "room": (Replacement, "reserve"),
    "tensors": (saving, "write"),
    "share": (Replacement, "complete"),
}
"""When rank 1 fails: instead of which function."""


def save_badly(root: str, moment: str, killed: bool) -> list[str]:
    """As a rank: save, what rank 1 does not come to the end of, and once more."""
    planning.CHUNK_BYTES_DEFAULT = 1 << 16
    owner, function = MOMENTS[moment]
    sound = getattr(owner, function)
    if dist.get_rank() == 1:
        setattr(owner, function, die if killed else full)
    said = []
    directory = own_directory(root, 2)
    with AsyncSaver(strict=False) as saver:
        began = saver.save_shares(numbered(2), directory)
        for future in (began.staged, began.acknowledged, began.durable):
            error = future.exception(60)
            said.append("" if error is None else f"{type(error).__name__} {error}")
        if not killed:
            setattr(owner, function, sound)
            saver.save_shares(numbered(3), directory).durable.result(60)
    return said


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_fails(forks: Worlds, tmp_path: Path, moment: str, killed: bool) -> None:
    places = directories(tmp_path, 2)
    for place in places:
        os.makedirs(place)
    client.save_shares(numbered(1), places[0])
    outcomes = forks.start(2, save_badly, str(tmp_path), moment, killed).outcomes()
    other = outcomes[0].value
    assert other[0] == ""
    assert other[1] == other[2]
    cause = "its process is no more" if killed else "OSError: [Errno 28]"
    assert other[1].startswith(f"RankFailed rank 1: {cause}")
    if killed:
        assert outcomes[1].error == -signal.SIGKILL
        assert same(client.load(places), numbered(1))
        assert len(os.listdir(places[0])) == 2, "nothing else is left"
    else:
        own = outcomes[1].value
        assert own[0] == ""
        assert own[1] == own[2]
        assert own[1].startswith("OSError [Errno 28]")
        assert same(client.load(places), numbered(3))


def test_a_failure_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.save_shares(numbered(1), tmp_path)
    with AsyncSaver() as saver:
        monkeypatch.setattr(saving, "write", full)
        began = saver.save_shares(numbered(2), tmp_path)
        assert isinstance(began.durable.exception(60), OSError)
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left on device") as refused:
            saver.save(numbered(3), tmp_path / "file.pt")
        assert refused.value.filename == str(tmp_path)
        assert same(client.load(tmp_path), numbered(1))
        # Files and shares take turns.
        saver.save(numbered(4), tmp_path / "file.pt")
        saver.save_shares(numbered(5), tmp_path)
    assert same(client.load(tmp_path), numbered(5))
    assert client.load(tmp_path / "file.pt")["step"] == 4


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Saves beside training write nothing until this is called."""
    go, write = threading.Event(), saving.SharesSave.write

    def write_when_let(self: saving.SharesSave, **options: Any) -> Any:
        if threading.current_thread().name == "fpfs-save":
            assert go.wait(60)
        return write(self, **options)

    monkeypatch.setattr(saving.SharesSave, "write", write_when_let)
    return go.set


def test_what_has_begun_later_is_the_newest(tmp_path: Path, held: Callable[[], None]) -> None:
    """Also if it has ended before the earlier one writes its first byte."""
    with AsyncSaver() as saver:
        saver.save_shares(numbered(1), tmp_path)
        client.save_shares(numbered(2), tmp_path)
        held()
    assert json.loads((tmp_path / "manifest.json").read_text())["checkpoint"]["number"] == 2
    assert same(client.load(tmp_path), numbered(2))
    client.save_shares(numbered(3), tmp_path)
    assert len(os.listdir(tmp_path)) == 2


def test_a_save_that_fails_leaves_the_next_one_its_directory(
    tmp_path: Path, held: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, write = tmp_path / "new" / "step", saving.write
    with AsyncSaver(in_flight=2, strict=False) as saver:
        began = [saver.save_shares(numbered(step), place) for step in (1, 2)]

        def fail_once(*_: Any, **__: Any) -> Any:
            monkeypatch.setattr(saving, "write", write)
            full()

        monkeypatch.setattr(saving, "write", fail_once)
        held()
        assert isinstance(began[0].durable.exception(60), OSError)
        began[1].durable.result(60)
    assert same(client.load(place), numbered(2))


def test_what_cannot_be_saved_is_raised_at_once(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        with pytest.raises(ValueError, match="copies is 0"):
            saver.save_shares({}, tmp_path, copies=0)
        with pytest.raises(ValueError, match="2 copies are to be kept, and there is 1 node"):
            saver.save_shares({}, tmp_path / "new", copies=2)
        with pytest.raises(AttributeError):
            saver.save_shares({"bad": lambda: None}, tmp_path / "new")
    assert os.listdir(tmp_path) == [], "what was made is removed"
