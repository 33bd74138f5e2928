"""What is saved from a GPU, and loaded to it, on a mount; on the simulated accelerator, too.

test_accelerators.py has what only that one can show: what waits for what.
"""

from __future__ import annotations

import copy
import itertools
import zipfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import fpfs
from fpfs import client
from fpfs.client import AsyncSaver, snapshot, writing
from fpfs.testing.mounted import Mount
from tests.support import accelerator
from tests.support.ranks import Worlds
from tests.support.states import (
    OPTIMIZERS,
    Training,
    directories,
    each_tensor,
    large_state,
    only_value,
    own_directory,
    placed_state,
    same,
    to_cpu,
)

MIB = 2**20
SIMULATED = "simulated:0"
# (To ask whether there is one begins nothing that a process of fork could not go on with.)
NO_GPU = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="torch has no GPU here")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.parametrize(
        "device", [SIMULATED, pytest.param("cuda:0", marks=[pytest.mark.gpu, NO_GPU])]
    ),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    accelerator.build()


def begin(device: str) -> torch.device:
    """As a rank: the device that is used."""
    if device == SIMULATED:
        accelerator.use()
    found = torch.device(device)
    torch.accelerator.set_device_index(found.index)
    return found


def save_and_load(device: str, path: str) -> list[bool]:
    """As a rank: save, load to where it was, and into tensors that are there."""
    at = begin(device)
    writing.WAVE_BYTES = 3 * MIB
    client.save(placed_state(lambda tensor: tensor.to(at)), path)
    loaded = client.load(path)
    filled = client.load(
        path, into=each_tensor(placed_state(lambda tensor: tensor.to(at)), torch.zeros_like)
    )
    expected = to_cpu(placed_state(lambda tensor: tensor))
    return [
        loaded["half"].device == at,
        same(to_cpu(loaded), expected),
        filled["half"].device == at,
        same(to_cpu(filled), expected),
    ]


def test_what_is_saved_is_loaded(forks: Worlds, mount: Mount, device: str) -> None:
    path = mount.root / "state.pt"
    assert forks.start(1, save_and_load, device, path).values() == [[True] * 4]
    assert same(
        to_cpu(torch.load(path, map_location="cpu")), to_cpu(placed_state(lambda tensor: tensor))
    )
    assert zipfile.ZipFile(path).testzip() is None


def save_what_changes(device: str, path: str, snapshots: bool, staging_bytes: int | None) -> None:
    """As a rank: what is queued after `save` has returned changes what was saved."""
    at = begin(device)
    if not snapshots:
        snapshot.free_bytes = lambda _: 0
    tensors = [torch.zeros(n * MIB + 3, dtype=torch.uint8, device=at) for n in range(1, 6)]
    # Copies alone are queued on the simulated one.
    later = [[torch.full_like(tensor, step) for tensor in tensors] for step in range(7)]
    torch.accelerator.synchronize(at)
    with AsyncSaver(staging_bytes=staging_bytes) as saver:
        for step in range(1, 6):
            for tensor, value in zip(tensors, later[step], strict=True):
                tensor.copy_(value, non_blocking=True)
            saver.save(tensors, f"{path}.{step}")
            for tensor, value in zip(tensors, later[6], strict=True):
                tensor.copy_(value, non_blocking=True)


@pytest.mark.parametrize("staging_bytes", [None, 0, 5 * MIB])
@pytest.mark.parametrize("snapshots", [False, True])
def test_a_state_may_change_when_it_is_being_saved(
    forks: Worlds, mount: Mount, device: str, snapshots: bool, staging_bytes: int | None
) -> None:
    path = mount.root / "changing"
    forks.start(1, save_what_changes, device, path, snapshots, staging_bytes).values()
    for step in range(1, 6):
        assert only_value(torch.load(f"{path}.{step}", map_location="cpu")) == step


def train(device: str, path: str, how: str) -> list[bool]:
    """As a rank: train and save at each step, the optimizer known; what is there in the end."""
    at = begin(device)
    training = Training(OPTIMIZERS["AdamW"], at)
    expected, loaded = [], []
    with AsyncSaver(optimizers=training.optimizer) as saver:
        stager = fpfs.dcp.Stager(optimizers=training.optimizer)
        for step in range(4):
            state = training.state()
            expected.append(copy.deepcopy(to_cpu(state)))
            if how == "AsyncSaver":
                wait = saver.save(state, f"{path}.{step}").durable.result
            else:
                writer = fpfs.dcp.Writer(f"{path}.{step}")
                saving = dcp.async_save(
                    state, storage_writer=writer, async_stager=stager, no_dist=True
                )
                wait = saving.upload_completion.result
            training.forward_and_backward()
            training.optimizer.step()
            wait(60)
        stager.close()
    for step in range(4):
        state = Training(OPTIMIZERS["AdamW"], at).state()
        if how == "AsyncSaver":
            state = client.load(f"{path}.{step}")
        else:
            reader = fpfs.dcp.Reader(f"{path}.{step}")
            dcp.load(state, storage_reader=reader, no_dist=True)
        loaded.append(to_cpu(state))
    return [same(*each) for each in zip(loaded, expected, strict=True)]


@pytest.mark.parametrize("how", ["AsyncSaver", "dcp"])
def test_training_goes_on(forks: Worlds, mount: Mount, device: str, how: str) -> None:
    assert forks.start(1, train, device, mount.root / how, how).values() == [[True] * 4]


def save_together(device: str, root: str) -> None:
    """As a rank: all formats, from one device."""
    at = begin(device)
    tensors = {key: value.to(at) for key, value in large_state(seed=5).items()}
    client.save(tensors, f"{root}/state.pt")
    client.save_safetensors(tensors, f"{root}/state.safetensors")
    own = own_directory(root, dist.get_world_size())
    client.save_shares(tensors, own)
    filled = each_tensor(tensors, torch.zeros_like)
    client.load(f"{root}/state.pt", into=filled)
    assert same(to_cpu(filled), to_cpu(tensors))
    filled = each_tensor(tensors, torch.zeros_like)
    client.load_shares(own, into=filled)
    assert same(to_cpu(filled), to_cpu(tensors))


def test_ranks_and_formats(forks: Worlds, mount: Mount, device: str) -> None:
    forks.start(2, save_together, device, mount.root).values()
    expected = large_state(seed=5)
    assert same(torch.load(mount.root / "state.pt", map_location="cpu"), expected)
    assert same(load_file(mount.root / "state.safetensors"), expected)
    loaded = client.load_shares(directories(mount.root, 2), map_location="cpu")
    assert same(loaded, expected)


def save_often(device: str, path: str) -> list[int]:
    """As a rank: by how much the device's memory that is in use grows with saves."""
    at = begin(device)
    tensors = [torch.ones(MIB, device=at) for _ in range(3)]

    def in_use() -> int:
        if device == SIMULATED:
            return accelerator.use().device_bytes
        return int(torch.cuda.memory_allocated(at))

    before = in_use()
    with AsyncSaver(in_flight=2) as saver:
        for number in itertools.islice(itertools.cycle(range(2)), 30):
            saver.save(tensors, f"{path}.{number}")
    return [in_use() - before]


def test_saves_leave_no_memory_of_the_device(forks: Worlds, mount: Mount, device: str) -> None:
    assert forks.start(1, save_often, device, mount.root / "often").values() == [[0]]
