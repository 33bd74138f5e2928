"""What Stager copies beside training: steps wait for it, and of other changes all ranks learn."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fpfs.client import snapshot
from fpfs.dcp import Reader, Stager, Writer
from fpfs.integrations import dcp as integration
from tests.support.processes import DEADLINE_S
from tests.support.ranks import Worlds
from tests.support.states import OPTIMIZERS, Training, hold_copies, same, when_awaited
from tests.unit.integrations.test_dcp import equal

# torch's own, of a save by one process.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def copy_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What is left to the thread, it does not copy until this is called."""
    return hold_copies(monkeypatch, integration)


def async_save(given: Any, folder: Path, stager: Stager) -> AsyncSaveResponse:
    response = dcp.async_save(
        given, storage_writer=Writer(folder), async_stager=stager, no_dist=True
    )
    assert isinstance(response, AsyncSaveResponse)
    return response


def loaded(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What was saved of such a state."""
    into = copy.deepcopy(like)
    for tensor in (*into["model"].values(), *tensors_of(into["optimizer"])):
        tensor.fill_(17)
    dcp.load(into, storage_reader=Reader(folder), no_dist=True)
    return into


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for each in state["state"].values() for tensor in each.values()]


@pytest.mark.parametrize("name", ["SGD", "fused AdamW"])
def test_a_step_waits_for_the_copy(tmp_path: Path, copy_on: Callable[[], None], name: str) -> None:
    training = Training(OPTIMIZERS[name])
    before = copy.deepcopy(training.state())
    stager = Stager(optimizers=training.optimizer)
    response = async_save(training.state(), tmp_path, stager)
    # Buffers change in here, as do gradients.
    training.forward_and_backward()
    assert not same(training.model[1].state_dict(), before["model"])
    assert not response.staging_completion.done()
    (reading,) = stager._updates.savings
    when_awaited(reading.staged, copy_on)
    training.optimizer.step()
    assert reading.staged.done()
    assert reading.update_wait_s > 0
    assert not same(training.state(), before)
    assert response.staging_completion.result(60) is None
    response.upload_completion.result(60)
    assert same(loaded(tmp_path, before), before)
    stager.close()
    assert not training.optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]


def test_tensors_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the optimizer's tensors is left, if its bytes in their order are the copy's."""
    go = threading.Event()

    def copy_rest(uncopied: snapshot.Uncopied) -> None:
        assert len(uncopied) == len(["whole", "transposed", "complex", "scalar", "other view"])
        assert go.wait(60)
        snapshot.copy_rest(uncopied)

    monkeypatch.setattr(integration, "copy_rest", copy_rest)
    whole = torch.arange(40.0).reshape(4, 10)
    parameters = {
        "whole": torch.nn.Parameter(torch.arange(30.0).reshape(5, 6)),
        "transposed": torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t()),
        "columns": torch.nn.Parameter(torch.zeros(4, 9)),
        "complex": torch.nn.Parameter(torch.arange(6.0).to(torch.complex64) * 1j),
        "empty": torch.nn.Parameter(torch.zeros(0, 3)),
        "scalar": torch.nn.Parameter(torch.tensor(5.0)),
    }
    parameters["columns"].data = whole[:, 1:]
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    given = {
        **{name: parameter.detach() for name, parameter in parameters.items()},
        "tied": parameters["whole"].detach(),
        "other view": parameters["whole"].detach()[1:3],
        "with gaps": parameters["whole"].detach()[:, 1:3],
        "conjugate": parameters["complex"].detach().conj(),
        "negative": torch._neg_view(parameters["whole"].detach()),
        "around": whole,
        "own": torch.arange(5),
        "list": [parameters["transposed"].detach(), 3],
    }
    before = copy.deepcopy(given)
    stager = Stager(optimizers=[optimizer])
    future = stager.stage(given)
    # Not counted, and not the optimizer's alone: these were copied.
    whole.add_(1)
    given["own"].add_(1)
    go.set()
    staged = future.result(60)
    assert equal(staged, before)
    assert staged["tied"].data_ptr() == staged["whole"].data_ptr()
    assert staged["transposed"].stride() == parameters["transposed"].stride()
    assert staged["list"][0].data_ptr() == staged["transposed"].data_ptr()
    stager.close()


def test_save_after_save(tmp_path: Path) -> None:
    """Each has what was there, however many are under way, and memory is used again."""
    training = Training(OPTIMIZERS["AdamW"])
    stager = Stager(optimizers=training.optimizer)
    befores, responses, addresses = [], [], set()
    for step in range(6):
        befores.append(copy.deepcopy(training.state()))
        responses.append(async_save(training.state(), tmp_path / f"{step}", stager))
        training.forward_and_backward()
        training.optimizer.step()
        assert len(stager._updates.savings) <= 1
        if step >= 3:
            responses[step - 1].upload_completion.result(60)
    for step, response in enumerate(responses):
        response.upload_completion.result(60)
        assert same(loaded(tmp_path / f"{step}", befores[step]), befores[step])
    del responses, response
    kept = len(stager._spaces)
    for _ in range(3):
        staged = stager.stage(training.state()).result(60)
        addresses.add(staged["model"]["0.weight"].untyped_storage().data_ptr())
        del staged
        stager._copying.submit(int).result(60)  # it has let go of the call before
    assert len(stager._spaces) == kept
    assert len(addresses) == 1
    stager.close()


def test_what_changes_before_it_is_copied(tmp_path: Path, copy_on: Callable[[], None]) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    stager = Stager(optimizers=training.optimizer)
    former = copy.deepcopy(training.state())
    dcp.save(former, storage_writer=Writer(tmp_path), no_dist=True)
    response = async_save(training.state(), tmp_path, stager)
    with torch.no_grad():
        training.model[0].weight.add_(1)
    copy_on()
    # Nothing hangs on it.
    training.optimizer.step()
    assert response.staging_completion.result(60) is None
    with pytest.raises(CheckpointException, match=r"call wait_before_update\(\) before") as failed:
        response.upload_completion.result(60)
    assert same(loaded(tmp_path, former), former)
    response = async_save(training.state(), tmp_path, stager)
    stager.synchronize_staging()
    before = copy.deepcopy(training.state())
    with torch.no_grad():
        training.model[0].weight.add_(1)
    response.upload_completion.result(60)
    assert same(loaded(tmp_path, before), before)
    # What has failed keeps nothing.
    parameter = weakref.ref(training.model[0].weight)
    del training, stager
    gc.collect()
    assert parameter() is None
    assert failed.value.failures


def test_memory_that_is_given_back_before_it_was_copied(
    tmp_path: Path, copy_on: Callable[[], None]
) -> None:
    """As FSDP gives back whole parameters."""
    parameter = torch.nn.Parameter(torch.ones(5_000_000))
    stager = Stager(optimizers=torch.optim.SGD([parameter], lr=0.1))
    response = async_save({"parameter": parameter}, tmp_path, stager)
    # Behind so little there is nothing that could be read.
    parameter.untyped_storage().resize_(64)
    copy_on()
    with pytest.raises(CheckpointException, match="was given back, or another's, before it was"):
        response.upload_completion.result(60)
    stager.close()


def test_copying_counts_as_moving(copy_on: Callable[[], None]) -> None:
    """So a step waits for it as long as it goes on."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    stager = Stager(optimizers=torch.optim.SGD([parameter], lr=0.1))
    staged = stager.stage({"parameter": parameter})
    (reading,) = stager._updates.savings
    before = reading.moved()
    assert reading.moved() == before
    copy_on()
    staged.result(60)
    assert reading.moved() != before
    stager.close()


def test_without_room_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(OPTIMIZERS["SGD"])

    def no_memory(size: int) -> None:
        raise MemoryError(f"a snapshot needs {size}")

    stager = Stager(optimizers=training.optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(integration, "TouchedMemory", no_memory)
        with pytest.raises(MemoryError, match="a snapshot needs"):
            stager.stage(training.state())
    training.optimizer.step()
    assert same(stager.stage(training.state()).result(60), training.state())
    stager.close()
    with pytest.raises(ValueError, match="make another one"):
        stager.stage(training.state())


def test_close_waits_for_copies(copy_on: Callable[[], None]) -> None:
    training = Training(OPTIMIZERS["SGD"])
    before = copy.deepcopy(training.state())
    stager = Stager(optimizers=training.optimizer)
    future = stager.stage(training.state())
    (reading,) = stager._updates.savings
    when_awaited(reading.staged, copy_on)
    assert not future.cancel()
    stager.close()
    assert reading.staged.done()
    training.optimizer.step()
    assert same(future.result(60), before)
    stager.wait_before_update()


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"optimizers has a dict: give torch.optim.Optimizer"):
        Stager(optimizers=[{}])


def test_another_process(copy_on: Callable[[], None]) -> None:
    training = Training(OPTIMIZERS["SGD"])
    before = copy.deepcopy(training.state())
    stager = Stager(optimizers=training.optimizer)
    future = stager.stage(training.state())
    if (child := os.fork()) == 0:
        signal.alarm(60)
        stager.wait_before_update()  # a step may hang: its threads of OpenMP are the parent's
        try:
            stager.stage(training.state())
        except RuntimeError as error:
            os._exit(0 if "for the process that made it: make one here" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    copy_on()
    assert same(future.result(60), before)
    stager.close()


def test_a_process_saves(tmp_path: Path) -> None:
    """torch's executor that is a process gets the state when it is copied."""
    training = Training(OPTIMIZERS["AdamW"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stager = Stager(optimizers=training.optimizer)
        before = copy.deepcopy(training.state())
        response = dcp.async_save(
            training.state(),
            storage_writer=Writer(tmp_path),
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        training.forward_and_backward()
        training.optimizer.step()
        response.upload_completion.result(DEADLINE_S)
        assert same(loaded(tmp_path, before), before)
        stager.close()
    finally:
        dist.destroy_process_group()


def rank_changes(folder: str, who: int | None) -> str:
    """As a rank: save a sharded state; one may change its part before that is copied."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(60.0).reshape(6, 10)
    parameter = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    go = threading.Event()

    def copy_rest(uncopied: snapshot.Uncopied) -> None:
        assert len(uncopied) == 1
        assert go.wait(60)
        snapshot.copy_rest(uncopied)

    assert integration.copy_rest is snapshot.copy_rest
    integration.copy_rest = copy_rest
    stager = Stager(optimizers=optimizer)
    group = dist.new_group(backend="gloo")
    response = dcp.async_save(
        {"parameter": parameter},
        storage_writer=Writer(folder),
        async_stager=stager,
        process_group=group,
    )
    if dist.get_rank() == who:
        with torch.no_grad():
            parameter.to_local().add_(1)
    parameter.sum().backward()
    go.set()
    optimizer.step()
    assert torch.equal(parameter.full_tensor()[0], whole[0] - 1 + (who == 0))
    try:
        response.upload_completion.result(60)
    except CheckpointException as error:
        return ", ".join(f"{rank}: {failure[0]}" for rank, failure in error.failures.items())
    into = {"parameter": torch.zeros_like(parameter)}
    dcp.load(into, storage_reader=Reader(folder))
    assert torch.equal(into["parameter"].full_tensor(), whole)
    return os.fspath(folder)


@pytest.mark.parametrize("who", [None, 0, 1])
def test_all_ranks_learn_of_it(forks: Worlds, tmp_path: Path, who: int | None) -> None:
    for said in forks.start(2, rank_changes, str(tmp_path), who).values():
        if who is None:
            assert said == str(tmp_path)
        else:
            assert said.startswith(f"{who}: a parameter or a state of its optimizer")
            assert "was changed before it was copied" in said
