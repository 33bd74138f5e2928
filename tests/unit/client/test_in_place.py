"""States larger than what may be copied: the rest is written from where it lies, meanwhile held."""

from __future__ import annotations

import copy
import errno
import functools
import os
import signal
import threading
import zipfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fpfs import client
from fpfs.client import AsyncSaver, agreement, async_saving, planning, saving, updates, writing
from fpfs.client.async_saving import FileToSave
from fpfs.client.replacement import Replacement
from fpfs.client.safetensors import lay_out_safetensors
from fpfs.client.shares import saving as shares_saving
from fpfs.client.shares.gathering import verify
from fpfs.core import transfers
from tests.support.failures.calls import die, full
from tests.support.ranks import Worlds
from tests.support.states import (
    FORMER,
    PLACEMENTS,
    directories,
    hold_copies,
    is_as_before,
    large_state,
    nested_states,
    odd_state,
    own_directory,
    own_part,
    same,
    sharded,
    wholes,
)

pytestmark = [
    # torch's own, of types that it is not done with.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

MIB = 2**20
LATE_S = 0.2
"""Who does not go on waiting would have ended."""


class Writers:
    """They do not begin until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, *arguments: Any, **options: Any) -> Any:
        assert self.go.wait(60)
        return transfers.write_pieces(*arguments, **options)


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch, path: Path) -> Writers:
    client.save(FORMER, path)
    found = Writers()
    monkeypatch.setattr(writing, "write_pieces", found.write)
    return found


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when whoever changes parameters begins to wait for a save."""
    found, ends = threading.Event(), updates.ends

    def begin(future: Future[Any], **options: Any) -> bool:
        found.set()
        return ends(future, **options)

    monkeypatch.setattr(updates, "ends", begin)
    return found


def bytes_of(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_what_changes_afterwards_is_not_saved(
    path: Path, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody holds is written when the call returns."""
    returned = threading.Event()
    flush = async_saving.Save.flush

    def flush_afterwards(save: async_saving.Save) -> None:
        assert returned.wait(60)
        flush(save)

    monkeypatch.setattr(async_saving.Save, "flush", flush_afterwards)
    before = large_state(seed=1)
    total = sum(-(-tensor.nbytes // 64) * 64 for tensor in before.values())
    with AsyncSaver(staging_bytes=int(part * total)) as saver:
        for _ in range(2):
            state = copy.deepcopy(before)
            returned.clear()
            began = saver.save(state, path)
            returned.set()
            assert began.staged.done() or part == 1.0
            assert (began.in_place_bytes > 0) == (part < 1.0)
            for tensor in state.values():
                tensor.zero_()
            saver.wait()
            assert saver._spare[0].size <= part * total
            assert bytes_of(before) - began.in_place_bytes <= part * total
            assert began.bytes_written == began.bytes_to_write == path.stat().st_size
            saved = began.durable.result(0)
            assert saved.written[0].bytes == path.stat().st_size
            assert saved.lay_out_s <= began.stall_s <= saved.seconds
            assert same(torch.load(path), before)
            assert zipfile.ZipFile(path).testzip() is None
    assert os.listdir(path.parent) == [path.name]


def test_as_much_as_there_is_room_for_is_copied(path: Path) -> None:
    state = {str(size): torch.ones(size * MIB, dtype=torch.uint8) for size in (5, 1, 3, 2)}
    with AsyncSaver(staging_bytes=6 * MIB) as saver:
        assert saver.save(state, path).in_place_bytes == 5 * MIB
    with AsyncSaver(staging_bytes=6 * MIB - 1) as saver:
        assert saver.save(state, path).in_place_bytes == 8 * MIB


@settings(max_examples=60, deadline=None)
@given(state=nested_states(), staging_bytes=st.integers(0, 500))
def test_any_state(
    state: Any, staging_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "state.pt"
    with AsyncSaver(staging_bytes=staging_bytes) as saver:
        saver.save(state, path)
    assert same(torch.load(path, weights_only=False), state)
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("staging_bytes", [0, 100, 1000])
def test_all_kinds_of_tensors(path: Path, staging_bytes: int) -> None:
    state = odd_state()
    with AsyncSaver(staging_bytes=staging_bytes) as saver:
        assert saver.save(state, path).in_place_bytes > 0
    assert same(client.load(path, weights_only=False), state)


def test_several_files(tmp_path: Path) -> None:
    """Some of the first is copied, and nothing of the second."""
    large, small = large_state(seed=2), {"step": torch.ones(1000)}
    with AsyncSaver(staging_bytes=4032) as saver:
        for _ in range(2):
            files = [
                FileToSave(copy.deepcopy(small), tmp_path / "small.pt"),
                FileToSave(copy.deepcopy(large), str(tmp_path / "large"), lay_out_safetensors),
            ]
            began = saver.save_files(files)
            for file in files:
                for tensor in file.state.values():
                    tensor.zero_()
            assert began.in_place_bytes == bytes_of(large)
            saved = began.durable.result(60)
            assert saved.write_s <= saved.seconds
            assert same(torch.load(tmp_path / "small.pt"), small)
            found = load_file(tmp_path / "large")
            assert same({name: found[name] for name in large}, large)


def test_room_is_found_for_several_files_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = Replacement.reserve

    def full_at_last(self: Replacement, size: int) -> None:
        (full if self.path.endswith("1.pt") else reserve)(self, size)

    monkeypatch.setattr(Replacement, "reserve", full_at_last)
    with AsyncSaver(staging_bytes=0, strict=False) as saver:
        files = [FileToSave(torch.ones(9), tmp_path / f"{number}.pt") for number in range(2)]
        began = saver.save_files(files)
    assert began.in_place_bytes > 0
    assert "No space left" in str(began.durable.exception(60))
    assert began.bytes_written == 0
    assert os.listdir(tmp_path) == []


class Training:
    """Parameters that only a step of the optimizer changes, and something else besides."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.full((1 << 18,), float(i))) for i in range(4)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        self.other = torch.ones(1 << 18)

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "other": self.other}


def test_a_step_waits_until_all_is_written(
    path: Path, writers: Writers, waits: threading.Event
) -> None:
    """What only a step changes stays in place first; what else there is has a copy."""
    training = Training()
    with AsyncSaver(optimizers=training.optimizer, staging_bytes=2 * MIB) as saver:
        began = saver.save(training.state(), path)
        training.other.zero_()
        assert began.in_place_bytes == 3 * MIB
        assert not began.staged.done()
        stepped = threading.Thread(target=training.step)
        stepped.start()
        assert waits.wait(60)
        stepped.join(LATE_S)
        assert stepped.is_alive()
        writers.go.set()
        stepped.join(60)
        assert began.staged.done()
        assert began.update_wait_s > 0
    found = torch.load(path)
    assert [each.unique().tolist() for each in found["parameters"]] == [[0], [1], [2], [3]]
    assert found["other"].unique().tolist() == [1]
    assert training.parameters[0].unique().tolist() == [1]


def test_the_call_waits_for_what_nobody_holds(path: Path, writers: Writers) -> None:
    training = Training()
    with AsyncSaver(optimizers=training.optimizer, staging_bytes=MIB - 1) as saver:
        timer = threading.Timer(0.2, writers.go.set)
        timer.start()
        began = saver.save(training.state(), path)
        assert writers.go.is_set()
        assert began.staged.done()
        assert began.in_place_bytes == 5 * MIB
        assert began.update_wait_s == 0.0
        training.other.zero_()
        training.step()
    assert torch.load(path)["other"].unique().tolist() == [1]


@pytest.mark.parametrize("how", ["by a step", "by a call"])
def test_a_step_waits_for_all_saves(
    path: Path, writers: Writers, waits: threading.Event, how: str
) -> None:
    """Also where the last one has a copy of all that it writes."""
    training = Training()
    options: dict[str, Any] = {"optimizers": training.optimizer, "staging_bytes": 0}
    with AsyncSaver(in_flight=3, **options) as saver:
        began = saver.save({"parameters": training.parameters}, path)
        small = saver.save({}, f"{path}.small")
        small.staged.result(60)
        act = saver.wait_before_update if how == "by a call" else training.step
        acted = threading.Thread(target=act)
        acted.start()
        assert waits.wait(60)
        acted.join(LATE_S)
        assert acted.is_alive()
        writers.go.set()
        acted.join(60)
        assert began.staged.done()
        training.step()
    found = torch.load(path)["parameters"]
    assert [each.unique().tolist() for each in found] == [[0], [1], [2], [3]]


def test_what_does_not_end_is_given_up(path: Path, writers: Writers) -> None:
    """By the step, which changes nothing, and by a call, which saves nothing."""
    training = Training()
    saver = AsyncSaver(optimizers=training.optimizer, staging_bytes=0, timeout_s=0.1, in_flight=2)
    began = saver.save({"parameters": training.parameters}, path)
    for act in (training.step, saver.wait_before_update):
        with pytest.raises(TimeoutError, match=r"the save of .*state\.pt has moved no byte for"):
            act()
    assert training.parameters[0].unique().tolist() == [0]
    with pytest.raises(TimeoutError, match="still reads what is to be changed"):
        saver.save(training.state(), f"{path}.second")
    writers.go.set()
    began.durable.result(60)  # close, too, waits for timeout_s
    saver.close()
    assert same(torch.load(path)["parameters"][3], Training().parameters[3])
    assert not Path(f"{path}.second").exists()


@pytest.mark.parametrize("waits", ["the step", "the call"])
def test_training_goes_on_beside_what_hangs(path: Path, writers: Writers, waits: str) -> None:
    """What it reads is changed, so the file stays as it was."""
    training = Training()
    state = {"parameters": training.parameters} if waits == "the step" else training.state()
    saver = AsyncSaver(optimizers=training.optimizer, staging_bytes=0, timeout_s=0.1, strict=False)
    began = saver.save(state, path)
    assert began.staged.done() == (waits == "the call")
    training.step()
    assert isinstance(began.staged.exception(0), TimeoutError)
    assert not began.durable.done()
    writers.go.set()
    assert began.durable.exception(60) is began.staged.exception()
    saver.close()
    assert is_as_before(path)
    assert training.parameters[0].unique().tolist() == [1]


def test_a_copy_that_nobody_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a state that is copied in part: that is why it fails, not what has changed since."""
    client.save(FORMER, path)
    copy_on = hold_copies(monkeypatch, saving)
    training = Training()
    saver = AsyncSaver(
        optimizers=training.optimizer, staging_bytes=2 * MIB, timeout_s=0.1, strict=False
    )
    began = saver.save(training.state(), path)
    assert 0 < began.in_place_bytes < began.bytes_to_write
    training.step()
    copy_on()
    assert isinstance(began.staged.exception(0), TimeoutError)
    assert began.durable.exception(60) is began.staged.exception()
    saver.close()
    assert is_as_before(path)


def test_what_changes_them_besides(path: Path, writers: Writers) -> None:
    training = Training()
    saver = AsyncSaver(optimizers=training.optimizer, staging_bytes=2 * MIB)
    began = saver.save(training.state(), path)
    with torch.no_grad():
        training.parameters[0].add_(1)
    writers.go.set()
    for future in (began.staged, began.acknowledged, began.durable):
        assert "was changed before it was copied" in str(future.exception(60))
    with pytest.raises(RuntimeError, match=r"call wait_before_update\(\) before whatever changes"):
        saver.close()
    assert is_as_before(path)


@pytest.mark.parametrize("call", ["save", "save_shares"])
def test_memory_that_is_given_back_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """When there is room for the file: what was copied is copied by then."""
    training = Training()
    reserve = Replacement.reserve

    def reserve_and_give_back(self: Replacement, size: int) -> None:
        reserve(self, size)
        training.parameters[0].untyped_storage().resize_(0)

    monkeypatch.setattr(Replacement, "reserve", reserve_and_give_back)
    saver = AsyncSaver(optimizers=training.optimizer, staging_bytes=0)
    began = getattr(saver, call)({"parameters": training.parameters}, tmp_path / "saved")
    assert "was given back, or another's" in str(began.durable.exception(60))
    with pytest.raises(RuntimeError, match=r"call wait_before_update\(\) before that"):
        saver.close()
    assert began.staged.exception() is began.durable.exception()


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_failure_holds_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch, has_optimizer: bool
) -> None:
    client.save(FORMER, path)
    training = Training()
    optimizers = training.optimizer if has_optimizer else ()
    saver = AsyncSaver(optimizers=optimizers, staging_bytes=2 * MIB)
    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_pieces", full)
        began = saver.save(training.state(), path)
        training.step()
        for future in (began.staged, began.acknowledged, began.durable):
            assert getattr(future.exception(60), "errno", None) == errno.ENOSPC
    assert is_as_before(path)
    with pytest.raises(OSError, match="No space left on device"):
        saver.save({}, path)
    saver.save(training.state(), path)
    saver.close()
    assert [each[0].item() for each in torch.load(path)["parameters"]] == [1, 2, 3, 4]


def test_an_interrupted_call_saves_nothing(path: Path, writers: Writers) -> None:
    """Who was to wait for it may change the state now."""
    saver = AsyncSaver(staging_bytes=MIB, strict=False)
    state = Training().state()
    exception = Future.exception

    def interrupted(future: Future[Any], timeout: float | None = None) -> BaseException | None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return exception(future, timeout)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Future, "exception", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.save(state, path)
    state["other"].zero_()
    writers.go.set()
    saver.wait()
    assert is_as_before(path)
    saver.save(state, path)
    saver.close()
    assert torch.load(path)["other"].unique().tolist() == [0]


def test_it_is_said_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    for optimizers, waits in (((), "save waits"), (training.optimizer, "the next step waits")):
        caplog.clear()
        with AsyncSaver(optimizers=optimizers, staging_bytes=2 * MIB) as saver:
            for _ in range(3):
                saver.save(training.state(), path)
        (record,) = (each for each in caplog.records if each.name == "fpfs.client.async_saving")
        assert record.message == (
            "3.00 MiB of a state are written from where they lie, since staging_bytes is 2.00 MiB:"
            f" {waits} for that"
        )


@pytest.mark.parametrize("staging_bytes", ["1G", -1, 1.5])
def test_what_is_no_number_of_bytes(staging_bytes: Any) -> None:
    with pytest.raises(ValueError, match=r"staging_bytes is .*: give a number of bytes, or None"):
        AsyncSaver(staging_bytes=staging_bytes)


def test_no_more_is_taken_at_the_start() -> None:
    with pytest.raises(ValueError, match="memory_bytes is 2, and staging_bytes 1"):
        AsyncSaver(memory_bytes=2, staging_bytes=1)


# --- groups ---


def save_beside(root: str, placement: str, staging_bytes: list[int]) -> list[str]:
    """As a rank: save with room for some of what it writes, and change all when that is allowed."""
    planning.CHUNK_BYTES_DEFAULT = 4096  # type: ignore[attr-defined]
    getattr(agreement, "can_gather")  # noqa: B009 it is another module's
    agreement.can_gather = lambda *_: False  # type: ignore[attr-defined]
    said = []
    with AsyncSaver(staging_bytes=staging_bytes[dist.get_rank()]) as saver:
        for shares in (False, True):
            state = sharded(PLACEMENTS[placement])
            if shares:
                began = saver.save_shares(state, own_directory(root, 2), copies=2)
            else:
                began = saver.save(state, os.path.join(root, "state.pt"))
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    own_part(value).fill_(-1)
            began.durable.result(60)
            assert began.bytes_written == began.bytes_to_write > 0
            said.append("in place" if began.in_place_bytes else "copied")
    return said


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_with_unlike_room(forks: Worlds, tmp_path: Path, placement: str) -> None:
    """One copies nothing, one a few tensors, the others all."""
    found = forks.start(4, save_beside, str(tmp_path), placement, [0, 2000, 10**6, 10**6]).values()
    assert found == [["in place"] * 2] * 2 + [["copied"] * 2] * 2
    assert zipfile.ZipFile(tmp_path / "state.pt").testzip() is None
    _, checked = verify(directories(tmp_path, 2), progress=lambda *_: None)
    assert [each.problem for each in checked] == [None] * len(checked)
    for path in (tmp_path / "state.pt", directories(tmp_path, 2)):
        loaded = client.load(path)
        assert loaded["step"] == 7
        for key, expected in wholes().items():
            assert same(loaded[key], expected)
            assert same(loaded[f"{key} ordinary"], expected)


def save_columns(path: str, staging_bytes: list[int | None]) -> str:
    """As a rank: others read parts of its tensor, which must be copied; another one need not."""
    state = {
        "columns": sharded(PLACEMENTS["columns"])["matrix torch.float32"],
        "ordinary": torch.ones(37),
    }
    with AsyncSaver(staging_bytes=staging_bytes[dist.get_rank()], strict=False) as saver:
        try:
            began = saver.save(state, path)
            for tensor in state.values():
                own_part(tensor).fill_(-1)
            began.durable.result(60)
        except (ValueError, client.RankFailed) as error:
            return str(error)
    return ""


def test_what_others_read_must_be_copied(forks: Worlds, path: Path) -> None:
    client.save(FORMER, path)
    said = (
        "1.75 KiB must be copied (parts of tensors that other ranks read), and staging_bytes is"
        " 1775: give 1792 or more, or leave it out"
    )
    found = forks.start(2, save_columns, str(path), [None, 1775]).values()
    assert found == [f"rank 1: ValueError: {said}", said]
    assert is_as_before(path)
    for own in ([None, 1792], [1792, None]):
        assert forks.start(2, save_columns, str(path), own).values() == ["", ""]
        expected = {"columns": wholes()["matrix torch.float32"], "ordinary": torch.ones(37)}
        assert same(torch.load(path), expected)


MOMENTS: dict[str, tuple[Any, str]] = {
    "in place": (writing, "write_pieces"),
    "shares in place": (shares_saving, "write"),
}


def save_badly(root: str, moment: str, killed: bool) -> list[str]:
    """As a rank: save, what rank 1 does not come to the end of, and once more."""
    owner, function = MOMENTS[moment]
    sound = getattr(owner, function)
    if dist.get_rank() == 1:
        setattr(owner, function, die if killed else full)
    state = {"tensor": torch.ones(1 << 18)}
    said = []
    with AsyncSaver(staging_bytes=0, strict=False) as saver:
        if moment == "in place":
            save = functools.partial(saver.save, path=f"{root}/state.pt")
        else:
            save = functools.partial(saver.save_shares, directory=own_directory(root, 2))
        began = save(state)
        for future in (began.staged, began.acknowledged, began.durable):
            error = future.exception(60)
            said.append("" if error is None else f"{type(error).__name__} {error}")
        if not killed:
            setattr(owner, function, sound)
            save(state).durable.result(60)
    return said


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_fails(forks: Worlds, tmp_path: Path, moment: str, killed: bool) -> None:
    """The other one's state may change, and it learns of the failure."""
    other, failed = forks.start(2, save_badly, str(tmp_path), moment, killed).outcomes()
    cause = "its process is no more" if killed else "OSError: [Errno 28]"
    assert other.value[0] == "" or other.value[0].startswith(f"RankFailed rank 1: {cause}")
    assert other.value[1] == other.value[2]
    assert other.value[1].startswith(f"RankFailed rank 1: {cause}")
    if killed:
        assert failed.error == -signal.SIGKILL
    else:
        assert [said.partition("]")[0] for said in failed.value] == ["OSError [Errno 28"] * 3
        place = tmp_path / "state.pt" if moment == "in place" else directories(tmp_path, 2)
        assert client.load(place)["tensor"].unique().tolist() == [1]
