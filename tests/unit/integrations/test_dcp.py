"""torch.distributed.checkpoint by fpfs: what either writes, both read, whole or not at all."""

from __future__ import annotations

import errno
import gc
import gzip
import os
import re
import signal
import subprocess
import threading
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fpfs
from fpfs.client import archives, writing
from fpfs.client.replacement import Replacement
from fpfs.core.temporary_names import make_temporary
from fpfs.dcp import Reader, Stager, Writer
from fpfs.integrations import dcp as integration
from tests.support.failures.calls import die, full
from tests.support.processes import DEADLINE_S
from tests.support.ranks import Worlds
from tests.support.states import DTYPES, large_state, odd_state, random_tensor, same
from tests.support.waiting import wait_until

pytestmark = [
    # torch's own: of one process, of what it does itself, of types that it is not done with.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a checkpoint is saved."""
    return tmp_path / "checkpoint"


def state(*, seed: int) -> dict[str, Any]:
    """Tensors that lie in memory in every way, and other things."""
    base = random_tensor(torch.float32, (60, 50), seed=seed)
    return {
        "model": {
            **large_state(seed=seed, tensors=3),
            "whole": base,
            "transposed": base.t().clone().t(),
            "view": base[3:7],
            "columns": base[:, 2:9],
            "strided": base.flatten()[::7],
            "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 3),
            "half": random_tensor(torch.bfloat16, (7, 9), seed=seed),
            "again": base,
        },
        "step": seed,
        "list": [seed, torch.full((3,), seed)],
    }


def like(given: Any) -> Any:
    """The same, with other values."""
    if isinstance(given, torch.Tensor):
        return torch.zeros(given.shape, dtype=given.dtype)
    if isinstance(given, dict):
        return {key: like(value) for key, value in given.items()}
    return [like(value) for value in given] if isinstance(given, list) else None


def loaded(folder: Path, given: Any, reader: type[dcp.FileSystemReader] = Reader) -> Any:
    into = like(given)
    dcp.load(into, storage_reader=reader(folder), no_dist=True)
    return into


def equal(found: Any, expected: Any) -> bool:
    """Whether all values are."""
    if isinstance(expected, torch.Tensor):
        return bool(same(found.contiguous(), expected.contiguous()))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            equal(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return all(equal(*pair) for pair in zip(found, expected, strict=True))
    return bool(found == expected)


READERS = (Reader, dcp.FileSystemReader)
TORCH_REFUSES = {"meta", "nested", "of a subclass", "quantized to four bits"} | {
    name for name in (*odd_state(), *map(str, DTYPES)) if name.startswith(("sparse", "torch.bits"))
}
"""What torch.distributed.checkpoint itself does not save, or not load."""


@pytest.mark.parametrize("reader", READERS)
def test_what_is_saved_is_loaded(folder: Path, reader: type[dcp.FileSystemReader]) -> None:
    saved = state(seed=1)
    dcp.save(saved, storage_writer=Writer(folder), no_dist=True)
    assert equal(loaded(folder, saved, reader), saved)


def test_what_torch_has_saved_is_loaded(folder: Path) -> None:
    saved = state(seed=1)
    writer = dcp.FileSystemWriter(folder, thread_count=3)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    assert equal(loaded(folder, saved), saved)


def test_a_torch_that_does_not_tell_where_tensors_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = state(seed=1)
    dcp.save(saved, storage_writer=Writer(folder), no_dist=True)
    monkeypatch.setattr(archives, "offset_of", lambda _: -1)
    assert equal(loaded(folder, saved), saved)
    with pytest.raises(ValueError, match="with a torch older than 2.13: load it without into="):
        fpfs.client.save(saved["model"], folder / "state.pt")
        fpfs.load(folder / "state.pt", into=saved["model"])


@pytest.mark.parametrize("name", [*odd_state(), *map(str, DTYPES)])
def test_whatever_torch_saves(folder: Path, name: str) -> None:
    """Of what torch refuses here the error is not the same."""
    torch.manual_seed(0)
    saved = {"value": odd_state()[name]}

    def outcome(writer: Any, reader: type[dcp.FileSystemReader]) -> Any:
        torch.manual_seed(1)
        into = {"value": odd_state()[name]}
        try:
            if isinstance(into["value"], torch.Tensor):
                into["value"] = torch.zeros_like(into["value"].detach())
        except (RuntimeError, NotImplementedError):
            pass  # filled with what it has
        try:
            dcp.save(saved, storage_writer=writer, no_dist=True)
            dcp.load(into, storage_reader=reader(folder), no_dist=True)
        except CheckpointException:
            return None
        return into

    theirs = outcome(dcp.FileSystemWriter(folder), dcp.FileSystemReader)
    for reader in READERS:
        ours = outcome(Writer(folder), reader)
        assert same(ours, theirs) if theirs is not None else name in TORCH_REFUSES


def test_an_archive_for_each_tensor(folder: Path) -> None:
    """torch.load reads each by itself, and checks its CRC32."""
    tensors = list(state(seed=2)["model"].values())
    container, places = archives.lay_out_each([memoryview(b"text"), *tensors])
    path = folder.with_name("file")
    with path.open("w+b") as file:
        writing.write(integration._all_of(container), container, fd=file.fileno(), threads=2)
        content = path.read_bytes()
    assert len(content) == container.bytes
    assert content[: places[0].bytes] == b"text"
    for place, tensor in zip(places[1:], tensors, strict=True):
        part = folder.with_name("part")
        part.write_bytes(content[place.offset : place.offset + place.bytes])
        assert place.offset % archives.ALIGNMENT == 0
        found = torch.load(part)
        assert equal(found, tensor)
        assert found.untyped_storage().nbytes() == tensor.nbytes
        assert zipfile.ZipFile(part).testzip() is None


# --- whole or not at all ---


def test_the_next_one_takes_the_place_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = state(seed=1), state(seed=2)
    dcp.save(first, storage_writer=Writer(folder), no_dist=True)
    before = set(os.listdir(folder))
    commit = Replacement.commit

    def commit_and_look(replacement: Replacement, *, durable: bool) -> None:
        assert equal(loaded(folder, first), first)
        commit(replacement, durable=durable)
        assert equal(loaded(folder, second), second)

    monkeypatch.setattr(Replacement, "commit", commit_and_look)
    dcp.save(second, storage_writer=Writer(folder), no_dist=True)
    assert equal(loaded(folder, second), second)
    assert len(os.listdir(folder)) == len(before) == 2
    assert set(os.listdir(folder)) & before == {".metadata"}


@pytest.mark.parametrize("fails", ["write_pieces", "reserve_file", "fsync", "commit"])
def test_a_failure_leaves_the_former(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    first = state(seed=1)
    dcp.save(first, storage_writer=Writer(folder), no_dist=True)
    before = sorted(os.listdir(folder))

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target: Any = {
        "write_pieces": writing,
        "reserve_file": integration,
        "fsync": os,
        "commit": Replacement,
    }[fails]
    with monkeypatch.context() as patch:
        patch.setattr(target, fails, fail)
        of_file = "" if fails == "commit" else r": '.*\.distcp'"
        with pytest.raises(CheckpointException, match=f"No space left on device{of_file}"):
            dcp.save(state(seed=2), storage_writer=Writer(folder), no_dist=True)
    assert equal(loaded(folder, first), first)
    left = sorted(os.listdir(folder))
    assert left == before or fails == "commit"
    # What it has left is gone with the next one.
    dcp.save(first, storage_writer=Writer(folder), no_dist=True)
    assert len(os.listdir(folder)) == 2


@pytest.mark.root
def test_what_was_killed_leaves_room(tmp_path: Path) -> None:
    """On a device that has room for two: the former one and the next one."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "fpfs-test", folder], check=True)
    try:
        given = {"a": torch.rand(1 << 20)}
        dcp.save(given, storage_writer=Writer(folder), no_dist=True)
        for number in range(3):
            (folder / f"__0_00{number}.distcp").write_bytes(bytes(1 << 20))
        # Killed before it had its name.
        temporary = os.fsdecode(make_temporary(b".metadata"))
        (folder / temporary).write_bytes(b"__0_000.distcp __0_001.distcp __0_002.distcp")
        for _ in range(2):
            dcp.save(given, storage_writer=Writer(folder), no_dist=True)
        assert equal(loaded(folder, given), given)
        assert len(os.listdir(folder)) == 2
    finally:
        subprocess.run(["umount", folder], check=True)


def test_checkpoints_of_both_kinds_do_not_destroy_each_other(folder: Path) -> None:
    given = {"a": torch.rand(5)}
    dcp.save(given, storage_writer=Writer(folder), no_dist=True)
    writer = Writer(folder)
    dcp.save({"b": torch.rand(5)}, storage_writer=writer, no_dist=True, use_collectives=False)
    assert equal(loaded(folder, given), given)
    with pytest.raises(
        CheckpointException, match="Checkpoint already exists in .*, and overwrite is False"
    ):
        dcp.save(given, storage_writer=Writer(folder, overwrite=False), no_dist=True)


def test_other_files_stay(folder: Path) -> None:
    folder.mkdir()
    others = ["config.json", "__0_0.distcp.bak", "notes.distcp"]
    for name in others:
        (folder / name).touch()
    dcp.save(state(seed=1), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    dcp.save(state(seed=2), storage_writer=Writer(folder), no_dist=True)
    assert set(others) < set(os.listdir(folder))
    assert not (folder / "__0_0.distcp").exists()
    assert equal(loaded(folder, state(seed=2)), state(seed=2))


def test_two_at_once_do_not_make_one_that_is_not_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Writer.finish

    def finish_late(writer: Writer, *arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(Writer, "finish", finish)
        dcp.save(state(seed=2), storage_writer=Writer(folder), no_dist=True)
        finish(writer, *arguments, **options)

    monkeypatch.setattr(Writer, "finish", finish_late)
    with pytest.raises(CheckpointException, match="save into it one after the other"):
        dcp.save(state(seed=1), storage_writer=Writer(folder), no_dist=True)
    assert equal(loaded(folder, state(seed=2)), state(seed=2))


def test_one_that_begins_when_another_one_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes nothing of it, and fails itself later."""
    begins = threading.Event()
    commit, lock, remove = Replacement.commit, integration.locked_directory, Writer._remove_unnamed
    failures: list[BaseException] = []

    def save() -> None:
        try:
            dcp.save(state(seed=2), storage_writer=Writer(folder), no_dist=True)
        except CheckpointException as error:
            failures.append(error)

    other = threading.Thread(target=save)

    def lock_late(path: str) -> Any:
        begins.set()
        return lock(path)

    def remove_early(writer: Writer) -> None:
        remove(writer)
        begins.set()

    def commit_late(replacement: Replacement, *, durable: bool) -> None:
        monkeypatch.setattr(Replacement, "commit", commit)
        monkeypatch.setattr(integration, "reserve_file", full)
        monkeypatch.setattr(integration, "locked_directory", lock_late)
        monkeypatch.setattr(Writer, "_remove_unnamed", remove_early)
        other.start()
        assert begins.wait(60)
        commit(replacement, durable=durable)

    monkeypatch.setattr(Replacement, "commit", commit_late)
    dcp.save(state(seed=1), storage_writer=Writer(folder), no_dist=True)
    other.join(60)
    assert "No space left" in str(failures)
    assert equal(loaded(folder, state(seed=2)), state(seed=1))


def test_without_overwrite(folder: Path) -> None:
    writer = Writer(folder, overwrite=False)
    dcp.save(state(seed=1), storage_writer=writer, no_dist=True)
    with pytest.raises(
        CheckpointException, match="Checkpoint already exists in .*, and overwrite is False"
    ):
        dcp.save(state(seed=2), storage_writer=writer, no_dist=True)
    assert equal(loaded(folder, state(seed=1)), state(seed=1))


def test_one_writer_for_many(tmp_path: Path) -> None:
    writer = Writer(threads=1, durable=False)
    wrong = "ValueError: where to save\\? give Writer a path, or the save a checkpoint_id"
    with pytest.raises(CheckpointException, match=wrong):
        dcp.save(state(seed=1), storage_writer=writer, no_dist=True)
    for seed in (1, 2):
        dcp.save(
            state(seed=seed),
            checkpoint_id=tmp_path / f"step{seed}",
            storage_writer=writer,
            no_dist=True,
        )
    for seed in (1, 2):
        assert equal(loaded(tmp_path / f"step{seed}", state(seed=seed)), state(seed=seed))


def test_nonsense_is_refused(folder: Path) -> None:
    for threads in (0, "4"):
        with pytest.raises(ValueError, match="threads is"):
            Writer(folder, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fpfs takes a path, not int"):
        Writer(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory_bytes is -1"):
        Stager(memory_bytes=-1)
    folder.touch()
    with pytest.raises(CheckpointException, match="File exists"):
        dcp.save(state(seed=1), storage_writer=Writer(folder), no_dist=True)


def test_what_loads_it_is_told_to_who_calls_load(folder: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=Writer(folder), no_dist=True)
    with pytest.raises(IsADirectoryError, match=r"fpfs\.dcp\.Reader\(path\)\) loads"):
        fpfs.load(folder)


def test_what_is_found_damaged(folder: Path) -> None:
    saved = state(seed=1)
    dcp.save(saved, storage_writer=Writer(folder), no_dist=True)
    (file,) = folder.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointException):
        loaded(folder, saved)
    file.unlink()
    with pytest.raises(CheckpointException, match="No such file"):
        loaded(folder, saved)


def test_a_state_of_another_shape(folder: Path) -> None:
    dcp.save({"a": torch.ones(3, 4)}, storage_writer=Writer(folder), no_dist=True)
    with pytest.raises(CheckpointException):
        dcp.load({"a": torch.ones(4, 4)}, storage_reader=Reader(folder), no_dist=True)


def test_planners_commit_what_was_read(folder: Path) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=Writer(folder), no_dist=True)
    committed = []

    class Planner(DefaultLoadPlanner):
        def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
            committed.append((item.dest_index.fqn, tensor.tolist()))

    into = {"a": torch.zeros(3)}
    dcp.load(into, storage_reader=Reader(folder), planner=Planner(), no_dist=True)
    assert committed == [("a", [1.0] * 3)]


class Gzip(StreamTransformExtension):
    """Compresses."""

    @staticmethod
    def from_descriptor(_version: str) -> Gzip:
        return Gzip()

    @staticmethod
    def registry_name() -> str:
        return "stream.gzip"

    def get_descriptor(self) -> str:
        return "stream.gzip/1"

    def transform_to(self, output: Any) -> Any:
        return gzip.GzipFile(fileobj=output, mode="wb")

    def transform_from(self, stream: Any) -> Any:
        return gzip.GzipFile(fileobj=stream, mode="rb")


def test_what_is_compressed_is_left_to_torch(folder: Path) -> None:
    given = {"a": torch.arange(1000.0), "b": torch.ones(3)}
    writer = dcp.FileSystemWriter(folder, _extensions=[Gzip()])
    dcp.save(given, storage_writer=writer, no_dist=True)
    registry = ExtensionRegistry()
    registry.register(Gzip)
    into = like(given)
    reader = Reader(folder, _extension_registry=registry)
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert equal(into, given)


def test_types_are_converted(folder: Path) -> None:
    saved = {"a": torch.arange(12.0).reshape(3, 4)}
    dcp.save(saved, storage_writer=Writer(folder), no_dist=True)
    into = {"a": torch.zeros(4, 3, dtype=torch.float64).t()}
    dcp.load(into, storage_reader=Reader(folder), no_dist=True)
    assert torch.equal(into["a"], saved["a"].double())


@pytest.mark.parametrize("reader", READERS)
def test_torch_counts_what_is_changed(folder: Path, reader: type[dcp.FileSystemReader]) -> None:
    dcp.save({"a": torch.ones(3)}, storage_writer=Writer(folder), no_dist=True)
    into = {"a": torch.nn.Parameter(torch.zeros(3))}
    before = into["a"]._version
    dcp.load(into, storage_reader=reader(folder), no_dist=True)
    assert into["a"].tolist() == [1, 1, 1]
    assert into["a"]._version > before


# --- staging ---


class Held(NamedTuple):
    """Writers do not begin until `go` is called."""

    go: Callable[[], None]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Saves wait before they write."""
    event = threading.Event()
    lay_out = archives.lay_out_each

    def wait(items: Any) -> Any:
        assert event.wait(60)
        return lay_out(items)

    monkeypatch.setattr(integration, "lay_out_each", wait)
    return Held(event.set)


def async_save(given: Any, folder: Path, stager: Stager, **options: Any) -> Any:
    return dcp.async_save(
        given, storage_writer=Writer(folder), async_stager=stager, no_dist=True, **options
    )


def test_what_changes_afterwards_is_not_saved(folder: Path, held: Held) -> None:
    saved, before = state(seed=1), state(seed=1)
    saved["list"].append([1])
    before["list"].append([1])
    future = async_save(saved, folder, Stager())
    for tensor in saved["model"].values():
        tensor.zero_()
    saved["list"][1].zero_()
    saved["list"][2].append(2)
    held.go()
    future.result(60)
    for reader in READERS:
        assert equal(loaded(folder, before, reader), before)


def test_memory_is_used_again(tmp_path: Path) -> None:
    stager = Stager()
    addresses = set()
    for seed in (1, 2, 3):
        staged = stager.stage(state(seed=seed))
        assert equal(staged, state(seed=seed))
        addresses.add(staged["model"]["whole"].untyped_storage().data_ptr())
        del staged
    assert len(addresses) == 1


def test_a_stager_that_is_used_twice(tmp_path: Path, held: Held) -> None:
    """The second state does not take the place of the first, which is still being saved."""
    stager = Stager()
    futures = [async_save(state(seed=seed), tmp_path / f"{seed}", stager) for seed in (1, 2, 3)]
    held.go()
    for future in futures:
        future.result(60)
    for seed in (1, 2, 3):
        assert equal(loaded(tmp_path / f"{seed}", state(seed=seed)), state(seed=seed))
    del future, futures
    wait_until(lambda: all(space.is_free for space in stager._spaces))  # torch's thread has ended
    # What three took is there for three.
    kept = len(stager._spaces)
    staged = [stager.stage(state(seed=seed)) for seed in (1, 2, 3)]
    assert len(staged) == kept == len(stager._spaces) == 3


def test_saves_that_fail_leave_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose state cannot be copied."""

    class Odd:
        def __deepcopy__(self, _memo: Any) -> Any:
            raise OSError("cannot be copied")

    stager = Stager()
    errors: list[BaseException | None] = []
    gc.disable()
    try:
        for number in range(6):
            with pytest.raises(OSError, match="cannot be copied") as odd:
                stager.stage({**state(seed=1), "odd": Odd()})
            errors.append(odd.value)
            with monkeypatch.context() as patch:
                patch.setattr(integration, "reserve_file", no_space)
                async_save(state(seed=1), tmp_path / f"{number}", stager).exception(60)
        assert len(stager._spaces) <= 2
    finally:
        gc.enable()


def test_a_target_that_wraps_another(folder: Path) -> None:
    saved = {"a": torch.rand(6)}
    dcp.save(saved, storage_writer=Writer(folder), no_dist=True)
    within = torch.zeros(6)
    dcp.load({"a": Wrapper(within)}, storage_reader=Reader(folder), no_dist=True)
    assert torch.equal(within, saved["a"])


class Wrapper(torch.Tensor):
    """One whose bytes are another's, as torchao's are."""

    @staticmethod
    def __new__(cls: Any, within: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, within.shape, dtype=within.dtype)
        made.within = within
        return made

    def __init__(self, within: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, _types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        plain = [each.within if isinstance(each, cls) else each for each in arguments]
        found = function(*plain, **(options or {}))
        if function is torch.ops.aten.detach.default:
            return cls(found)
        return arguments[0] if function is torch.ops.aten.copy_.default else found


def test_a_stager_that_is_closed(folder: Path, held: Held) -> None:
    stager = Stager()
    future = async_save(state(seed=1), folder, stager)
    stager.close()
    stager.close()
    with pytest.raises(ValueError, match="make another one"):
        stager.stage(state(seed=2))
    held.go()
    future.result(60)
    assert equal(loaded(folder, state(seed=1)), state(seed=1))


# --- ranks ---


def rank_saves(folder: str, how: str) -> list[str]:
    """As a rank: save sharded and replicated tensors, and load them in the same world."""
    warnings.simplefilter("ignore")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    wholes = rank_wholes()
    given = {
        "rows": distribute_tensor(wholes["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(wholes["columns"], mesh, [Shard(1)]),
        "all": distribute_tensor(wholes["all"], mesh, [Replicate()]),
        "plain": wholes["plain"],
        "step": 5,
    }
    if how == "async":
        stager = Stager()
        dcp.async_save(given, storage_writer=Writer(folder), async_stager=stager).result()
    elif how == "cached":
        is_new = []

        class Told(Writer):
            """Tells which plans are none that torch has kept."""

            def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
                prepared = super().prepare_local_plan(plan)
                is_new.append(prepared.usable)
                return prepared

        for number in range(3):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save({**given, "step": number + 3}, storage_writer=Told(folder), planner=planner)
        assert is_new == [True, False, False]
    else:
        dcp.save(given, storage_writer=Writer(folder))
    into = {
        name: None if name == "step" else torch.zeros_like(value) for name, value in given.items()
    }
    dcp.load(into, storage_reader=Reader(folder))
    assert into["step"] == 5
    for name, whole in wholes.items():
        found = into[name].full_tensor() if isinstance(into[name], DTensor) else into[name]
        assert torch.equal(found, whole), name
    return sorted(os.listdir(folder))


def rank_wholes() -> dict[str, torch.Tensor]:
    return {
        "rows": random_tensor(torch.float32, (37, 20), seed=1).nan_to_num(),
        "columns": random_tensor(torch.float32, (40, 23), seed=2).nan_to_num(),
        "all": random_tensor(torch.float32, (300, 7), seed=3).nan_to_num(),
        "plain": random_tensor(torch.float32, (99,), seed=4).nan_to_num(),
    }


@pytest.mark.parametrize(
    ("size", "how"), [(1, "save"), (2, "save"), (3, "save"), (2, "async"), (2, "cached")]
)
def test_ranks(forks: Worlds, folder: Path, size: int, how: str) -> None:
    for names in forks.start(size, rank_saves, folder, how).values():
        assert names[0] == ".metadata"
        assert 1 < len(names) <= size + 1
    # Another world, of one rank; and what all have is there once.
    wholes = {**rank_wholes(), "step": 5}
    for reader in READERS:
        assert equal(loaded(folder, wholes, reader), wholes)
    stored = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    content = sum(tensor.nbytes for tensor in rank_wholes().values())
    assert content < stored < content + 40_000


def rank_loads(folder: str) -> None:
    """As a rank: load what another world has saved, cut in another way."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for placement in (Shard(0), Shard(1), Replicate()):
        wholes = {name: tensor for name, tensor in rank_wholes().items() if tensor.ndim == 2}
        into = {
            name: distribute_tensor(torch.zeros_like(whole), mesh, [placement])
            for name, whole in wholes.items()
        }
        dcp.load(into, storage_reader=Reader(folder))
        for name, whole in wholes.items():
            assert torch.equal(into[name].full_tensor(), whole), (name, placement)


@pytest.mark.parametrize(("saving", "loading"), [(1, 3), (2, 3), (3, 2)])
def test_another_world_loads(forks: Worlds, folder: Path, saving: int, loading: int) -> None:
    forks.start(saving, rank_saves, folder, "save").values()
    assert forks.start(loading, rank_loads, folder).values() == [None] * loading


def rank_fails(folder: str, other: str) -> None:
    """As a rank: the last one fails, or sees another directory."""
    warnings.simplefilter("ignore")
    if dist.get_rank() == dist.get_world_size() - 1:
        if other == "directory":
            folder += "-other"
        else:
            integration.reserve_file = no_space
    dcp.save(rank_wholes(), storage_writer=Writer(folder))


def no_space(*_arguments: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("other", "why"),
    [("directory", "all ranks must see one directory"), ("failure", "No space left on device")],
)
def test_a_rank_that_fails(forks: Worlds, folder: Path, other: str, why: str) -> None:
    dcp.save(rank_wholes(), storage_writer=Writer(folder), no_dist=True)
    for outcome in forks.start(2, rank_fails, folder, other).outcomes():
        assert str(outcome.error).startswith("CheckpointException")
        assert why in str(outcome.error)
    assert equal(loaded(folder, rank_wholes()), rank_wholes())


def rank_dies(folder: str, rank: int) -> None:
    """As a rank: save beside training; one dies when all is copied and nothing is written."""
    warnings.simplefilter("ignore")
    if dist.get_rank() == rank:
        integration.reserve_file = die
    changed = {name: tensor + 1 for name, tensor in rank_wholes().items()}
    saving = dcp.async_save(changed, storage_writer=Writer(folder), async_stager=Stager())
    assert isinstance(saving, Future)  # It is staged.
    saving.result()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_beside_training(forks: Worlds, folder: Path, rank: int) -> None:
    dcp.save(rank_wholes(), storage_writer=Writer(folder), no_dist=True)
    errors = [outcome.error for outcome in forks.start(2, rank_dies, folder, rank).outcomes()]
    assert errors.pop(rank) == -signal.SIGKILL
    assert re.search("Connection (closed|reset) by peer", str(errors[0]))
    assert equal(loaded(folder, rank_wholes()), rank_wholes())


def rank_by_itself(folder: str) -> None:
    """As a rank: save without the others."""
    warnings.simplefilter("ignore")
    for number in range(2):
        given = {f"of {dist.get_rank()}": torch.full((5,), dist.get_rank() + 10 * number)}
        dcp.save(given, storage_writer=Writer(folder), use_collectives=False)
        into = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
        dcp.load(into, storage_reader=Reader(folder))
        assert same(into, given)


def test_ranks_by_themselves(forks: Worlds, folder: Path) -> None:
    forks.start(2, rank_by_itself, folder).values()
    names = sorted(os.listdir(folder))
    assert [name for name in names if "metadata" in name] == ["__0.metadata", "__1.metadata"]
    assert len(names) == 4


def test_a_process_saves(folder: Path) -> None:
    """torch's executor that is a process gets the staged state."""
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        saved = state(seed=3)
        stager = Stager()
        for writer in (Writer(), Writer(folder)):
            dcp.async_save(
                saved,
                checkpoint_id=folder,
                storage_writer=writer,
                async_stager=stager,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            ).result(DEADLINE_S)
        assert equal(loaded(folder, saved), saved)
    finally:
        dist.destroy_process_group()


def test_names() -> None:
    assert fpfs.dcp.Writer is Writer
    assert "dcp" in dir(fpfs)
