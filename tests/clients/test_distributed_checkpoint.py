"""torch.distributed.checkpoint, unmodified and by fpfs: one process alone, and two over gloo."""

from __future__ import annotations

import random
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fpfs.dcp import Reader, Stager, Writer
from fpfs.testing.mounted import Mount, check_fpfs, mounted
from tests.support.failures.crash import crash_and_mount
from tests.support.fixtures import Example
from tests.support.ranks import World, Worlds
from tests.support.seeds import IS_LONG, chosen_seed
from tests.support.servers import assert_read, reads_of
from tests.support.target import Target
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def state(*, seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"layer{i}.weight": torch.randn(321 + i, 1009, generator=generator) for i in range(8)
    }
    return {"model": tensors, "step": seed}


def assert_loads(folder: Path, expected: dict[str, object]) -> None:
    loaded = state(seed=99)
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert loaded["step"] == expected["step"]
    for name, tensor in expected["model"].items():
        assert torch.equal(loaded["model"][name], tensor), name


def test_save_and_load_without_a_group(target: Target, directory: Path) -> None:
    saved = state(seed=1)
    dcp.save(saved, checkpoint_id=directory / "step1", no_dist=True)
    assert sorted(p.name for p in (directory / "step1").iterdir()) == [".metadata", "__0_0.distcp"]
    assert_loads(directory / "step1", saved)
    target.remount()
    assert_loads(directory / "step1", saved)


def test_overwrite_a_checkpoint(directory: Path) -> None:
    for seed in (2, 3):
        saved = state(seed=seed)
        dcp.save(saved, checkpoint_id=directory / "latest", no_dist=True)
        assert_loads(directory / "latest", saved)


def test_async_save_without_a_group(directory: Path) -> None:
    saved = state(seed=4)
    future = dcp.async_save(saved, checkpoint_id=directory / "async", no_dist=True)
    future.result(timeout=300)
    assert_loads(directory / "async", saved)


def build_model(seed: int) -> torch.nn.Module:
    """As a rank: the same parameters on every one, sharded over them."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(517, 1024), torch.nn.Linear(1024, 203))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def save_and_load(name: str) -> int:
    """As a rank: save, at once and beside training, and load; returns how many tensors it has."""
    folder = Path(name)
    saved = build_model(seed=1)
    dcp.save({"model": saved.state_dict(), "step": 7}, checkpoint_id=folder / "sync")
    state = {"model": saved.state_dict(), "step": 8}
    dcp.async_save(state, checkpoint_id=folder / "async").result()
    for name, step in (("sync", 7), ("async", 8)):
        loaded = build_model(seed=2)
        state = {"model": loaded.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=folder / name)
        loaded.load_state_dict(state["model"])
        assert state["step"] == step
        for found, tensor in zip(loaded.parameters(), saved.parameters(), strict=True):
            assert torch.equal(found.to_local(), tensor.to_local())
    return len(list(saved.parameters()))


def test_two_processes(directory: Path, forks: Worlds) -> None:
    assert forks.start(2, save_and_load, directory).values() == [4, 4]
    for name in ("sync", "async"):
        names = sorted(path.name for path in (directory / name).iterdir())
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp"]


ROUNDS = 3 if IS_LONG else 1
# Saving again removes the marker of before, which power loss may undo before the group goes back.
LOGGED = (
    r"not committed (again )?when the last mount ended|never finished|took over|cut off by"
    r"|was removed after something was saved that is lost: it is back$"
)


@pytest.fixture
def own() -> Iterator[Mount]:
    """A mount to crash, with a folder of groups."""
    with mounted() as mount:
        mount.allow_log(LOGGED)
        (mount.root / "run").mkdir()
        check_fpfs("policy", "set", mount.root / "run", "commit=group", module="fpfs.cli.ctl")
        yield mount


SHAPE = (700, 1009)
TENSORS = 4


def saved_state(step: int) -> dict[str, object]:
    """What is saved in a step: it tells the step."""
    tensors = {f"layer{i}": torch.full(SHAPE, float(step * TENSORS + i)) for i in range(TENSORS)}
    return {"model": tensors, "step": step}


def save_over_and_over(folder: str, name: str, writer: str, record: str) -> None:
    """As a rank: save one step after the other, and say on a line of `record` when each is saved.

    To `name` of the folder, with the step's number in the place of {}.
    """
    warnings.simplefilter("ignore")
    with open(record, "a", buffering=1) as lines:
        step = 0
        while True:
            step += 1
            path = Path(folder, name.format(step))
            if writer == "fpfs":
                storage = Writer(path)
            else:
                storage = dcp.FileSystemWriter(path, thread_count=3, overwrite=True)
            dcp.save(saved_state(step), storage_writer=storage, no_dist=True)
            lines.write(f"{step}\n")


class Saver:
    """A process that saves over and over."""

    def __init__(self, forks: Worlds, folder: Path, name: str, writer: str, record: Path) -> None:
        """Start; returns when it has saved twice."""
        record.write_text("")
        self._record = record
        self._world: World = forks.start(1, save_over_and_over, folder, name, writer, record)
        wait_until(lambda: self.last >= 2)

    @property
    def last(self) -> int:
        """The last step that it said it saved."""
        return self._record.read_text().count("\n")

    def kill(self) -> None:
        """At once, if it has not failed, its mount being gone; returns when it is no more."""
        self._world.end()


def save_until_everything_dies(
    mount: Mount, saver: Saver, *, after_s: float, is_power_lost: bool
) -> int:
    """Let the mount die under who saves; returns the last step that it said it saved."""
    time.sleep(after_s)  # any moment of a save will do
    mount.kill(mount.keeper_pid, mount.server_pid)
    mount.tear_down()
    saver.kill()  # its threads may wait for each other by now
    if is_power_lost:
        mount.remove_arena()
    mount.mount()
    return saver.last


def loaded_step(folder: Path) -> int:
    """The step of a checkpoint, all of whose tensors are of this step."""
    found = saved_state(0)
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    expected = saved_state(found["step"])
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    return int(found["step"])


@pytest.mark.parametrize("is_power_lost", [False, True])
def test_a_checkpoint_in_a_group_is_whole_or_not_there(
    own: Mount, forks: Worlds, tmp_path: Path, is_power_lost: bool
) -> None:
    chance = random.Random(chosen_seed())
    for _ in range(ROUNDS):
        run = own.root / "run"
        saver = Saver(forks, run, "step{}", "torch", tmp_path / "record")
        last = save_until_everything_dies(
            own, saver, after_s=chance.uniform(0, 0.2), is_power_lost=is_power_lost
        )
        found = {path.name for path in run.iterdir()}
        # The last save may have been complete, and its end not told.
        assert found in [{f"step{n}" for n in range(1, end + 1)} for end in (last, last + 1)]
        assert {loaded_step(path) for path in run.iterdir()} == {int(name[4:]) for name in found}
        for path in (own.root / ".fpfs/uncommitted").iterdir():
            assert not (path / ".metadata").exists()
            shutil.rmtree(path)
        shutil.rmtree(run)
        run.mkdir()
        check_fpfs("policy", "set", run, "commit=group", module="fpfs.cli.ctl")


@pytest.mark.parametrize("is_power_lost", [False, True])
@pytest.mark.parametrize(("writer", "place"), [("torch", "run"), ("fpfs", "run"), ("fpfs", "")])
def test_a_checkpoint_that_is_saved_again_is_one_of_both(
    own: Mount, forks: Worlds, tmp_path: Path, writer: str, place: str, is_power_lost: bool
) -> None:
    """Atomic directories have those of both, and any directory those of fpfs."""
    own.allow_log("is quarantined|removed")
    folder = own.root / place
    chance = random.Random(chosen_seed())
    for _ in range(ROUNDS):
        saver = Saver(forks, folder, "latest", writer, tmp_path / "record")
        last = save_until_everything_dies(
            own, saver, after_s=chance.uniform(0, 0.2), is_power_lost=is_power_lost
        )
        assert loaded_step(folder / "latest") in (last, last + 1)


@pytest.mark.parametrize("is_on_fpfs", [True, False])
def test_whoever_is_killed_while_fpfs_saves_again(
    own: Mount, plain: Path, forks: Worlds, tmp_path: Path, is_on_fpfs: bool
) -> None:
    """In an ordinary directory, of any filesystem."""
    own.allow_log("is quarantined|removed")
    chance = random.Random(chosen_seed())
    folder = own.root if is_on_fpfs else plain
    last = 0
    for _ in range(30 if IS_LONG else 2):
        saver = Saver(forks, folder, "latest", "fpfs", tmp_path / "record")
        time.sleep(chance.uniform(0, 0.1))  # any moment of a save will do
        saver.kill()
        last = saver.last
        assert loaded_step(folder / "latest") in (last, last + 1)
    dcp.save(saved_state(last), storage_writer=Writer(folder / "latest"), no_dist=True)
    assert loaded_step(folder / "latest") == last
    assert len(list((folder / "latest").glob("[!.]*"))) == 1


def test_by_fpfs(target: Target, directory: Path) -> None:
    saved = state(seed=5)
    stager = Stager()
    for name in ("one", "two", "one"):
        writer = Writer(directory / name)
        dcp.async_save(saved, storage_writer=writer, async_stager=stager, no_dist=True).result(60)
        assert_loads(directory / name, saved)
    target.remount()
    for name in ("one", "two"):
        loaded = state(seed=99)
        dcp.load(loaded, storage_reader=Reader(directory / name), no_dist=True)
        assert loaded["step"] == saved["step"]
        for tensor, expected in zip(loaded["model"].values(), saved["model"].values(), strict=True):
            assert torch.equal(tensor, expected)


def test_two_processes_save_into_a_group(own: Mount, forks: Worlds) -> None:
    assert forks.start(2, save_and_load, own.root / "run").values() == [4, 4]
    assert own.status().uncommitted == ()
    before = {p: p.read_bytes() for p in (own.root / "run").rglob("*") if p.is_file()}
    crash_and_mount(own)
    assert {p: p.read_bytes() for p in (own.root / "run").rglob("*") if p.is_file()} == before


def replicas() -> dict[str, torch.Tensor]:
    """What all ranks have."""
    return {str(number): torch.full((4_000_000,), float(number)) for number in range(4)}


def load_replicas(folder: str) -> bool:
    """As a rank: load; returns whether it is what was saved."""
    into = {name: torch.zeros_like(tensor) for name, tensor in replicas().items()}
    dist.barrier()
    dcp.load(into, storage_reader=Reader(folder))
    return all(torch.equal(into[name], tensor) for name, tensor in replicas().items())


def test_what_all_ranks_load_is_read_once(own: Mount, forks: Worlds) -> None:
    folder = own.root / "replicas"
    dcp.save(replicas(), storage_writer=Writer(folder), no_dist=True)
    own.remount()
    before = reads_of(own)
    assert forks.start(3, load_replicas, folder).values() == [True] * 3
    assert_read(own, before, sum(path.stat().st_size for path in folder.iterdir()))


def test_the_example(directory: Path, run_example: Example) -> None:
    """Each goes on from what the one before has saved, on another number of ranks."""
    for ranks, epochs in ((2, "0 to 2"), (1, "3 to 5")):
        printed = run_example("distributed_checkpoint.py", directory, ranks=ranks)
        assert printed == f"epochs {epochs} by {ranks} ranks\n"
    assert len(list((directory / "latest").glob("*.distcp"))) == 1
