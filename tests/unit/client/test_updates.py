"""Parameters that are copied beside training: steps of optimizers wait, other changes are found."""

from __future__ import annotations

import copy
import gc
import os
import signal
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fpfs import client
from fpfs.client import AsyncSaver, planning, saving, snapshot, writing
from tests.support.ranks import Worlds
from tests.support.states import (
    FEATURES,
    FORMER,
    OPTIMIZERS,
    Training,
    hold_copies,
    is_as_before,
    let_go,
    same,
    when_awaited,
)
from tests.support.waiting import wait_until


def flat_model() -> torch.nn.Module:
    """Parameters and buffers are views of one tensor, and count their changes each on its own."""
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.BatchNorm1d(FEATURES))
    tensors = [*model.parameters(), *(t for t in model.buffers() if t.is_floating_point())]
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.data = part.view_as(tensor)
    return model


@pytest.fixture
def copy_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """What is left to the thread, it does not copy until this is called."""
    return hold_copies(monkeypatch, saving)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_waits_for_the_copy(path: Path, copy_on: Callable[[], None], name: str) -> None:
    training = Training(OPTIMIZERS[name])
    before = copy.deepcopy(training.state())
    with AsyncSaver(optimizers=training.optimizer) as saver:
        saving = saver.save(training.state(), path)
        # Buffers change in here, as do gradients.
        training.forward_and_backward()
        assert not same(training.model[1].state_dict(), before["model"])
        assert not saving.staged.done()
        when_awaited(saving.staged, copy_on)
        training.optimizer.step()
        assert saving.staged.done()
        assert saving.update_wait_s > 0
        assert not same(training.state(), before)
    assert saving.staged.result() is None
    assert same(torch.load(path), before)


def test_states_that_it_does_not_have_are_copied_at_once(path: Path) -> None:
    """An average of the model, which nobody's step changes."""
    training = Training(OPTIMIZERS["AdamW"])
    average = copy.deepcopy(training.model.state_dict())
    with AsyncSaver(optimizers=[training.optimizer]) as saver:
        saving = saver.save({"average": average}, path)
        before = copy.deepcopy(average)
        for tensor in average.values():
            tensor.zero_()
        saving.staged.result(60)
    assert same(torch.load(path)["average"], before)


def test_without_optimizers_all_is_copied(path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    with AsyncSaver() as saver:
        before = copy.deepcopy(training.state())
        saver.save(training.state(), path)
        training.forward_and_backward()
        training.optimizer.step()
        saver.wait_before_update()
    assert same(torch.load(path), before)


def test_what_shares_memory_with_others_is_copied_at_once(
    path: Path, copy_on: Callable[[], None]
) -> None:
    model = flat_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameter = torch.nn.Parameter(torch.ones(2 * FEATURES))
    optimizer.add_param_group({"params": parameter})
    state = {"model": model.state_dict(), "parameter": parameter}
    before = copy.deepcopy(state)
    with AsyncSaver(optimizers=optimizer) as saver:
        saver.save(state, path)
        model(torch.randn(8, FEATURES))
        copy_on()
    assert same(torch.load(path), before)


@pytest.mark.parametrize("is_saved", [True, False])
def test_what_counts_changes_with_others_is_copied_at_once(
    path: Path, copy_on: Callable[[], None], is_saved: bool
) -> None:
    """A buffer that shares a tensor with parameters: what changes it changes no parameter."""
    flat = torch.ones(3 * FEATURES)
    parameter, buffer = torch.nn.Parameter(flat[: 2 * FEATURES]), flat[2 * FEATURES :]
    other = torch.nn.Parameter(torch.ones(FEATURES))
    optimizer = torch.optim.SGD([parameter, other], lr=0.1)
    state = {"parameter": parameter, "other": other} if is_saved else {"other": other}
    before = copy.deepcopy(state)
    with AsyncSaver(optimizers=optimizer) as saver:
        saving = saver.save(state, path)
        buffer.add_(1)
        copy_on()
        assert saving.durable.result(60)
    assert same(torch.load(path), before)


def test_gaps_between_elements_are_copied_at_once(path: Path, copy_on: Callable[[], None]) -> None:
    whole = torch.zeros(4, FEATURES)
    parameters = [torch.nn.Parameter(torch.zeros(3, FEATURES).T), torch.nn.Parameter(whole[:, 1:])]
    parameters[1].data = whole[:, 1:]
    assert not parameters[1].is_contiguous()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with AsyncSaver(optimizers=optimizer) as saver:
        saver.save(parameters, path)
        whole.add_(1)  # which is not counted, and was copied
        copy_on()
    assert [tensor.unique().tolist() for tensor in torch.load(path)] == [[0], [0]]


def test_several_optimizers_and_groups_save_after_save(path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    model = torch.nn.Linear(FEATURES, FEATURES)
    other = torch.optim.SGD(
        [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}], momentum=0.9
    )
    befores = []

    def slowly(uncopied: snapshot.Uncopied) -> None:
        # All of both: six parameters with three states each, and two that have momentum later.
        assert len(uncopied) == 6 * 4 + (2 if len(befores) == 1 else 4)
        assert awaited.wait(60)
        awaited.clear()
        snapshot.copy_rest(uncopied)

    awaited = threading.Event()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saving, "copy_rest", slowly)
        with AsyncSaver(optimizers=[training.optimizer, other]) as saver:
            for step in range(4):
                state = {
                    **training.state(),
                    "other": model.state_dict(),
                    "more": other.state_dict(),
                }
                befores.append(copy.deepcopy(state))
                when_awaited(saver.save(state, f"{path}.{step}").staged, awaited.set)
                training.forward_and_backward()
                model(torch.randn(4, FEATURES)).sum().backward()
                for optimizer in (training.optimizer, other)[:: 1 if step % 2 else -1]:
                    optimizer.step()
    for step, before in enumerate(befores):
        assert same(torch.load(f"{path}.{step}"), before)


def test_tensors_may_be_resized_afterwards(path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    with AsyncSaver(optimizers=torch.optim.SGD([parameter], lr=0.1)) as saver:
        saver.save({"parameter": parameter}, path)
    parameter.untyped_storage().resize_(0)


def test_memory_that_is_given_back_before_it_was_copied(
    path: Path, copy_on: Callable[[], None]
) -> None:
    """As FSDP gives back whole parameters."""
    client.save(FORMER, path)
    parameter = torch.nn.Parameter(torch.ones(10_000_000))
    saver = AsyncSaver(optimizers=torch.optim.SGD([parameter], lr=0.1))
    saving = saver.save({"parameter": parameter}, path)
    parameter.untyped_storage().resize_(0)
    copy_on()
    with pytest.raises(RuntimeError, match="was given back, or another's, before it was copied"):
        saver.close()
    assert saving.staged.exception(0) is saving.durable.exception(0)
    assert is_as_before(path)


def test_copying_counts_as_moving(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what waits for a copy waits as long as it goes on."""
    copyto, block = np.copyto, threading.Semaphore(0)

    def copy_one(*arguments: Any) -> None:
        assert block.acquire(timeout=60)
        copyto(*arguments)

    monkeypatch.setattr(snapshot, "_BLOCK_BYTES", 1000 * 1000)
    monkeypatch.setattr(np, "copyto", copy_one)
    parameter = torch.nn.Parameter(torch.ones(1_000_000))
    with AsyncSaver(optimizers=torch.optim.SGD([parameter])) as saver:
        saving = saver.save({"parameter": parameter}, path)
        for _ in range(parameter.nbytes // snapshot._BLOCK_BYTES):
            before = saving.moved()
            assert not saving.staged.done()
            block.release()
            wait_until(lambda before=before: saving.moved() != before, "no byte is moved")


def test_what_begins_at_the_same_address_is_another_storage(
    path: Path, copy_on: Callable[[], None]
) -> None:
    flat = np.ones(2 * FEATURES, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(flat[:FEATURES]))
    saver = AsyncSaver(optimizers=torch.optim.SGD([parameter], lr=0.1))
    saver.save({"flat": torch.from_numpy(flat), "parameter": parameter}, path)
    flat[FEATURES:] = 2
    copy_on()
    saver.close()
    assert torch.load(path)["flat"].tolist() == [1.0] * 2 * FEATURES


def test_a_hook_of_a_step_waits_too(path: Path, copy_on: Callable[[], None]) -> None:
    """One that changes parameters, and was there before."""
    training = Training(OPTIMIZERS["AdamW"])

    def clamp(*_: object) -> None:
        for parameter in training.model.parameters():
            parameter.data.clamp_(-1e-3, 1e-3)

    training.optimizer.register_step_pre_hook(clamp)
    before = copy.deepcopy(training.state())
    with AsyncSaver(optimizers=training.optimizer) as saver:
        saving = saver.save(training.state(), path)
        when_awaited(saving.staged, copy_on)
        training.optimizer.step()
    assert same(torch.load(path), before)


def test_one_that_is_dropped_leaves_no_memory(path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    saver = AsyncSaver(optimizers=training.optimizer)
    saver.save(training.state(), path).durable.result(60)
    memory = weakref.ref(saver._under_way[0].memory._bytes.untyped_storage())
    let_go(saver)
    del saver
    gc.collect()
    assert memory() is None
    training.optimizer.step()


def test_a_close_that_gives_up_leaves_steps_waiting(
    path: Path, copy_on: Callable[[], None]
) -> None:
    training = Training(OPTIMIZERS["fused SGD"])
    before = copy.deepcopy(training.state())
    saver = AsyncSaver(optimizers=training.optimizer, timeout_s=0.1)
    saving = saver.save(training.state(), path)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="has not ended"):
            saver.close()

    def copy_in_time() -> None:
        copy_on()
        futures.wait([saving.staged], 60)  # a step, too, waits for timeout_s

    when_awaited(saving.staged, copy_in_time)
    training.optimizer.step()
    saving.durable.result(60)
    saver.close()
    assert same(torch.load(path), before)
    assert not training.optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]


def test_a_second_interrupt_holds_no_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    with AsyncSaver(optimizers=training.optimizer) as saver:
        with monkeypatch.context() as patched:
            exit_ = saving.Save.__exit__

            def interrupted(*arguments: Any) -> None:
                raise KeyboardInterrupt

            def exit_interrupted(*arguments: Any) -> None:
                exit_(*arguments)
                raise KeyboardInterrupt

            patched.setattr(saver._writing, "submit", interrupted)
            patched.setattr(saving.Save, "__exit__", exit_interrupted)
            with pytest.raises(KeyboardInterrupt):
                saver.save(training.state(), path)
        training.optimizer.step()
        assert not path.exists()


def add(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight.add_(1)


def load_state(training: Training) -> None:
    training.model.load_state_dict(training.model.state_dict())


def load_into(training: Training) -> None:
    state = training.model.state_dict()
    with tempfile.NamedTemporaryFile() as file:
        torch.save(state, file.name)
        client.load(file.name, into=state)


def change_state(training: Training) -> None:
    next(iter(training.optimizer.state.values()))["exp_avg"].mul_(2)


@pytest.mark.parametrize("change", [add, load_state, load_into, change_state])
@pytest.mark.parametrize("waits", [True, False])
def test_what_changes_them_besides(
    path: Path, copy_on: Callable[[], None], change: Callable[[Training], None], waits: bool
) -> None:
    client.save(FORMER, path)
    training = Training(OPTIMIZERS["AdamW"])
    before = copy.deepcopy(training.state())
    saver = AsyncSaver(optimizers=training.optimizer)
    saving = saver.save(training.state(), path)
    if waits:
        copy_on()
        saver.wait_before_update()
        change(training)
        saver.close()
        assert same(torch.load(path), before)
        return
    change(training)
    copy_on()
    # Nothing hangs on it.
    training.optimizer.step()
    for future in (saving.staged, saving.acknowledged, saving.durable):
        assert "was changed before it was copied" in str(future.exception(60))
    let_go(saver)
    with pytest.raises(RuntimeError, match=r"call wait_before_update\(\) before whatever changes"):
        saver.close()
    assert is_as_before(path)
    # What has failed keeps nothing.
    parameter = weakref.ref(training.model[0].weight)
    del training, saver
    gc.collect()
    assert parameter() is None
    assert saving.durable.exception() is not None


def test_a_copy_that_fails_holds_no_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client.save(FORMER, path)
    training = Training(OPTIMIZERS["SGD"])

    def fail(_: snapshot.Uncopied) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(saving, "copy_rest", fail)
    saver = AsyncSaver(optimizers=training.optimizer, strict=False)
    began = saver.save(training.state(), path)
    training.optimizer.step()
    assert isinstance(began.staged.exception(), MemoryError)
    saver.close()
    assert is_as_before(path)


def test_a_closed_one_holds_nobody(path: Path) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    with AsyncSaver(optimizers=training.optimizer) as saver:
        saver.save(training.state(), path)
        hooks = training.optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
        assert len(hooks) == 1
    assert not hooks
    saver.wait_before_update()


def test_a_child_does_not_wait(path: Path, copy_on: Callable[[], None]) -> None:
    training = Training(OPTIMIZERS["AdamW"])
    with AsyncSaver(optimizers=training.optimizer) as saver:
        saver.save(training.state(), path)
        if (child := os.fork()) == 0:
            signal.alarm(60)
            saver.wait_before_update()  # a step may hang: its threads of OpenMP are the parent's
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        copy_on()


def test_tensors_of_inference_mode_are_copied_at_once(path: Path) -> None:
    with torch.inference_mode():
        weight = torch.ones(1000)
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["of inference"] = weight
    with AsyncSaver(optimizers=optimizer) as saver:
        saver.save({"weight": weight, "parameter": parameter}, path)
        with torch.inference_mode():
            weight.zero_()
    assert torch.load(path)["weight"].unique().tolist() == [1]


class Named(torch.Tensor):
    """Of another class."""


def test_tensors_of_other_kinds_are_copied_at_once(path: Path, copy_on: Callable[[], None]) -> None:
    """Those of a subclass, and sparse ones, with which an optimizer makes steps."""
    named = torch.nn.Parameter(torch.ones(1000).as_subclass(Named))
    assert type(named) is Named
    embedding = torch.nn.Embedding(100, 10, sparse=True)
    optimizer = torch.optim.SGD([named, *embedding.parameters()], lr=0.1)
    sparse = torch.eye(100).to_sparse()
    optimizer.state[named]["sparse"] = sparse
    state = {"named": named.detach(), "sparse": sparse, "embedding": embedding.state_dict()}
    before = {"sparse": sparse.clone(), "embedding": copy.deepcopy(embedding.state_dict())}
    with AsyncSaver(optimizers=optimizer) as saver:
        saving = saver.save(state, path)
        with torch.no_grad():
            named.zero_()
        sparse._values().zero_()
        (named.sum() + embedding(torch.arange(50)).sum()).backward()
        when_awaited(saving.staged, copy_on)
        optimizer.step()
        assert saving.durable.exception(60) is None
    assert not same(embedding.state_dict(), before["embedding"])
    found = torch.load(path, weights_only=False)
    assert same(found["embedding"], before["embedding"])
    assert same(found["sparse"].to_dense(), before["sparse"].to_dense())
    assert type(found["named"]) is Named
    assert found["named"].tolist() == [1.0] * 1000


@pytest.mark.parametrize("optimizers", [5, [5], ["adam"], torch.nn.Linear(1, 1)])
def test_what_is_no_optimizer(optimizers: Any) -> None:
    with pytest.raises(TypeError, match=r"give torch\.optim\.Optimizer objects"):
        AsyncSaver(optimizers=optimizers)


class Wrapping(torch.optim.Optimizer):
    """As some do that wrap another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_an_optimizer_that_makes_no_hooks() -> None:
    wrapping = Wrapping(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(
        TypeError, match=r"has a Wrapping: .*of one that wraps another, the one wit"
    ):
        AsyncSaver(optimizers=wrapping)


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2"])
def test_threads_that_are_no_number(threads: Any) -> None:
    with pytest.raises(ValueError, match=r"threads is .*: give a number from 1, or None"):
        AsyncSaver(threads=threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_threads_as_said(path: Path, threads: int) -> None:
    with AsyncSaver(threads=threads) as saver:
        saved = saver.save({"step": torch.ones(10**6)}, path).durable.result(60)
    assert [part.threads for part in saved.written] == [threads]


def train(path: str, dim: int) -> None:
    """As a rank: steps of a model that is sharded along `dim`, each saved and compared."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, FEATURES), torch.nn.Linear(FEATURES, FEATURES)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(min(dim, p.ndim - 1)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    inputs = torch.randn(4, FEATURES)
    with AsyncSaver(optimizers=optimizer) as saver:
        for step in range(4):
            model(inputs).sum().backward()
            optimizer.step()
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            saver.save(parts, f"{path}.{step}")
            options = StateDictOptions(full_state_dict=True)
            model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
            if dist.get_rank() == 0:
                full = {"model": OrderedDict(model_state), "optimizer": optimizer_state}
                torch.save(full, f"{path}.{step}x")


@pytest.mark.parametrize("dim", [0, 1])
def test_a_group(forks: Worlds, path: Path, dim: int) -> None:
    forks.start(2, train, path, dim).values()
    for step in range(4):
        assert same(torch.load(f"{path}.{step}"), torch.load(f"{path}.{step}x"))


def change_too_early(path: str) -> None:
    """As a rank: 1 changes a parameter that is not copied."""
    training = Training(OPTIMIZERS["AdamW"])
    released = threading.Event()

    def copy_rest(uncopied: snapshot.Uncopied) -> None:
        assert released.wait(60)
        snapshot.copy_rest(uncopied)

    saving.copy_rest = copy_rest
    with AsyncSaver(optimizers=training.optimizer) as saver:
        saver.save(training.state(), path)
        if dist.get_rank() == 1:
            add(training)
        released.set()


def test_a_rank_that_changes_too_early(forks: Worlds, path: Path) -> None:
    client.save(FORMER, path)
    outcomes = forks.start(3, change_too_early, path).outcomes()
    errors = [str(outcome.error) for outcome in outcomes]
    assert errors[0] == errors[2]
    assert errors[0].startswith("RankFailed: rank 1: RuntimeError: a parameter or a state")
    assert errors[1].startswith("RuntimeError: a parameter or a state")
    assert is_as_before(path)


LATE_S = 0.5
"""How much later a rank copies: without the wait for it, the other one would have written."""


def copy_late(path: str) -> None:
    """As a rank: save a tensor of which others read parts; 1 copies it late."""
    whole = torch.arange(64.0 * 64).view(64, 64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
    written = threading.Event()
    write_pieces, copy_rest = writing.write_pieces, saving.copy_rest

    def write(*arguments: Any, **options: Any) -> Any:
        written.set()
        return write_pieces(*arguments, **options)

    def copy_it(uncopied: snapshot.Uncopied) -> None:
        assert uncopied
        # No rank writes before all have copied: not this one, either.
        assert not written.wait(LATE_S if dist.get_rank() == 1 else 0)
        copy_rest(uncopied)

    writing.write_pieces, saving.copy_rest = write, copy_it
    planning.CHUNK_BYTES_DEFAULT = 4096  # type: ignore[attr-defined]
    with AsyncSaver(optimizers=torch.optim.SGD([parameter], lr=0.1)) as saver:
        saver.save(parameter, path)


def test_no_rank_reads_what_is_not_copied_yet(forks: Worlds, path: Path) -> None:
    forks.start(2, copy_late, path).values()
    assert torch.equal(torch.load(path).detach(), torch.arange(64.0 * 64).view(64, 64))
