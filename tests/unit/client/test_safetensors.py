"""Files of safetensors: byte for byte as its own, shards as huggingface_hub divides, by ranks."""

from __future__ import annotations

import json
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fpfs import client
from fpfs.client import planning, safetensors, save_safetensors, saving, writing
from fpfs.core import transfers
from fpfs.core.temporary_names import make_temporary
from tests.support.failures.calls import full, tell_steps, told_steps
from tests.support.nobody import being_nobody
from tests.support.ranks import Worlds
from tests.support.states import DTYPES, Named, odd_state, only_value, random_tensor

# torch's own, of types that it is not done with.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

METADATA = {"format": "pt"}
KNOWN = tuple(dtype for dtype in DTYPES if dtype in safetensors.TYPES)


def model(*, seed: int = 1) -> dict[str, torch.Tensor]:
    """Tensors of all kinds."""
    tensors = {
        f"of {dtype}": random_tensor(dtype, (7, 3), seed=seed + number)
        for number, dtype in enumerate(KNOWN)
    }
    return {
        "layer.weight": random_tensor(torch.float32, (321, 1009), seed=seed),
        "no element": torch.empty(0, 4),
        "one": torch.tensor(seed),
        "Größe \"'\n\x1f\x7f\U0001f600": torch.ones(3, dtype=torch.bool),
        **tensors,
    }


def assert_same_tensors(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        # Of random bits some are NaNs.
        bits = tensor.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(found[name].view(-1).view(torch.uint8), bits), name


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("metadata", [None, METADATA, {}])
def test_the_file_is_safetensors_own(path: Path, metadata: dict[str, str] | None) -> None:
    save_file(model(), path, metadata=metadata)
    expected = path.read_bytes()
    path.unlink()
    saved = save_safetensors(model(), path, metadata=metadata)
    assert path.read_bytes() == expected
    assert_same_tensors(path, model())
    assert (saved.path, saved.bytes) == (str(path), len(expected))
    assert os.listdir(path.parent) == [path.name]


def test_all_types_that_safetensors_has(path: Path) -> None:
    """Whatever it refuses, this does."""
    for number, dtype in enumerate(DTYPES):
        tensors = {"x": random_tensor(dtype, (5,), seed=number)}
        try:
            save_file(tensors, path)
        except KeyError:
            with pytest.raises(ValueError, match=f"'x' is of {dtype}, which safetensors has not"):
                save_safetensors(tensors, path)
        else:
            expected = path.read_bytes()
            save_safetensors(tensors, path)
            assert path.read_bytes() == expected


@settings(max_examples=60)
@given(
    shapes=st.dictionaries(
        st.text(max_size=5),
        st.tuples(st.sampled_from(KNOWN), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
        max_size=8,
    ),
    # safetensors 0.8 writes no JSON for metadata that are empty; of several, in any order.
    metadata=st.none()
    | st.dictionaries(st.text(max_size=3), st.text(max_size=9), min_size=1, max_size=1),
)
def test_random_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: dict[str, tuple[torch.dtype, list[int]]],
    metadata: dict[str, str] | None,
) -> None:
    folder = tmp_path_factory.mktemp("random")
    tensors = {
        name: random_tensor(dtype, tuple(shape), seed=len(name))
        for name, (dtype, shape) in shapes.items()
    }
    save_file(tensors, folder / "expected", metadata=metadata)
    save_safetensors(tensors, folder / "found", metadata=metadata)
    assert (folder / "found").read_bytes() == (folder / "expected").read_bytes()


def test_tensors_with_gaps_become_contiguous(path: Path) -> None:
    base = torch.arange(1200.0).reshape(30, 40)
    tensors = {
        "transposed": base.clone().t(),
        "left": base[:, :7],
        "right": base[:, 7:],
        "expanded": torch.ones(1).expand(1000),
        "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    save_safetensors(tensors, path)
    found = load_file(path)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def hard_to_compare() -> dict[str, torch.Tensor]:
    """Two that have their last elements in common: whether any, numpy finds out by trying."""
    strides = [5**n for n in range(11)], [3**n for n in range(14)]
    last = max(map(sum, strides))
    base = torch.zeros(last + 1, dtype=torch.uint8)
    a, b = (base.as_strided([2] * len(each), each, last - sum(each)) for each in strides)
    return {"a": a, "b": b}


BASE = torch.arange(12.0).reshape(3, 4)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([BASE], TypeError, "a dictionary of tensors, not a list"),
    "number": ({"a": 1}, TypeError, "'a' is of type int: safetensors holds tensors alone"),
    "name": ({1: BASE}, TypeError, "1 is no name"),
    "reserved": ({"__metadata__": BASE}, TypeError, "'__metadata__' is no name"),
    "no UTF-8": ({"\udc00": BASE}, ValueError, "is no UTF-8"),
    "tied": ({"a": BASE, "b": BASE.t()}, ValueError, "'a' and 'b' share memory"),
    "part": ({"a": BASE, "b": BASE[1]}, ValueError, "'a' and 'b' share memory"),
    "gaps": ({"a": BASE[:, :3], "b": BASE[:, 2:]}, ValueError, "'a' and 'b' share memory"),
    "hard to tell": (hard_to_compare(), ValueError, "'a' and 'b' share memory"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, ValueError, "'a' is no dense tensor"),
    "meta": ({"a": torch.empty(3, device="meta")}, ValueError, "'a' has no memory"),
    "complex": ({"a": BASE.to(torch.complex128)}, ValueError, "is of torch.complex128"),
    "nested": ({"a": odd_state()["nested"]}, ValueError, "'a' is no dense tensor"),
    "float4": (
        {"a": torch.ones(1, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)[0]},
        ValueError,
        "'a' of torch.float4_e2m1fn_x2 has no dimension",
    ),
    "subclass": ({"a": BASE.as_subclass(Named)}, ValueError, r"'a' is no dense tensor \(Named\)"),
}


@pytest.mark.parametrize("limit", [None, 10])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_saved(path: Path, kind: str, limit: int | None) -> None:
    path.write_bytes(b"as before")
    tensors, error, message = REFUSED[kind]
    with pytest.raises(error, match=message) as raised:
        save_safetensors(tensors, path, max_shard_bytes=limit)
    assert "\n" not in str(raised.value)
    assert contents(path.parent) == {path.name: b"as before"}


@pytest.mark.parametrize("metadata", [{"step": 3}, {3: "step"}, ["a"], "abc", 5])
def test_metadata_that_are_no_texts(path: Path, metadata: Any) -> None:
    with pytest.raises(TypeError, match=r"metadata (has .*: safetensors has texts alone|is a )"):
        save_safetensors({}, path, metadata=metadata)
    assert os.listdir(path.parent) == []


def test_a_header_that_nobody_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "HEADER_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match="save fewer tensors in a file"):
        save_safetensors({f"layer{number}": torch.ones(1) for number in range(100)}, path)


# --- shards ---


def sizes_to_tensors(sizes: list[int]) -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate(sizes)}


@settings(max_examples=60)
@example(sizes=[0, 30, 30, 0], limit=30)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9), limit=st.integers(1, 60))
def test_shards_are_hugging_faces(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    """Files, what is in which, and what the index says."""
    tensors = sizes_to_tensors(sizes)
    folder = tmp_path_factory.mktemp("shards")
    expected = huggingface_hub.split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    saved = save_safetensors(tensors, folder / "model.safetensors", max_shard_bytes=limit)
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found[path.name] = sorted(file.keys())
    assert found == {name: sorted(some) for name, some in expected.filename_to_tensors.items()}
    if expected.is_sharded:
        index = {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}
        text = (folder / "model.safetensors.index.json").read_text()
        assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
        assert saved.path == str(folder / "model.safetensors.index.json")
    assert len(os.listdir(folder)) == len(found) + expected.is_sharded
    assert saved.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert saved.bytes == sum(part.bytes for part in saved.written)


def load_sharded(folder: Path) -> dict[str, torch.Tensor]:
    """As Hugging Face's libraries do: one file, if there is one, or those that the index names."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(folder / name)
    assert sorted(found) == sorted(index["weight_map"])
    return found


def test_what_was_there_of_the_model_goes(tmp_path: Path) -> None:
    """One file or many, fewer or more: nothing is left of what was; what else lies there stays."""
    others = ("model-00001-of-00002.bin", "other-00001-of-00002.safetensors", "config.json")
    for name in others:
        (tmp_path / name).write_bytes(b"stays")
    for step, limit in enumerate((None, 40, 100, 10**9, 50, None)):
        tensors = {name: tensor + step for name, tensor in sizes_to_tensors([40] * 6).items()}
        path = tmp_path / "model.safetensors"
        save_safetensors(tensors, path, max_shard_bytes=limit, durable=step % 2 == 0)
        if limit is not None:
            found = load_sharded(tmp_path)
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        for name in others:
            assert (tmp_path / name).read_bytes() == b"stays"
        shards = {None: None, 40: 6, 100: 3, 10**9: 0, 50: 6}[limit]
        if shards is not None:
            there = [name for name in os.listdir(tmp_path) if name not in others]
            assert len(there) == (shards + 1 if shards else 1)
    # Without a limit it is one file, and of others nothing is known.
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 6


def test_an_index_goes_before_the_shards_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "root" / "model.safetensors", tmp_path / "log"
    path.parent.mkdir()
    save_safetensors(sizes_to_tensors([30] * 9), path, max_shard_bytes=30)
    tell_steps(log, monkeypatch)
    save_safetensors(sizes_to_tensors([30]), path, max_shard_bytes=30)
    removed = [step for step in told_steps(log, path.parent) if step.startswith("remove ")]
    assert removed[0] == "remove model.safetensors.index.json"
    assert len(removed) == 10


def in_the_way(folder: Path) -> Iterator[None]:
    """What is at the one file's name, where nothing is written, cannot be removed."""
    (folder / "model.safetensors").mkdir()
    yield
    (folder / "model.safetensors").rmdir()


def no_file(folder: Path) -> Iterator[None]:
    os.mkfifo(folder / "model-00009-of-00009.safetensors")
    yield
    (folder / "model-00009-of-00009.safetensors").unlink()


def files_may_not_be_large(folder: Path) -> Iterator[None]:
    """As on a full device: the second of three shards is too large."""
    del folder
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("obstacle", [in_the_way, no_file, files_may_not_be_large])
def test_a_failure_leaves_the_former_shards(
    tmp_path: Path, obstacle: Callable[[Path], Iterator[None]]
) -> None:
    path = tmp_path / "model.safetensors"
    save_safetensors(sizes_to_tensors([3000, 3000, 3000]), path, max_shard_bytes=3000)
    before = contents(tmp_path)
    tensors = {name: tensor + 1 for name, tensor in sizes_to_tensors([3000, 3000, 7000]).items()}
    steps = obstacle(tmp_path)
    next(steps)
    try:
        with pytest.raises(OSError, match=r"model.*safetensors") as raised:
            save_safetensors(tensors, path, max_shard_bytes=3000)
    finally:
        next(steps, None)
    names = {
        in_the_way: "model.safetensors",
        no_file: "model-00009-of-00009.safetensors",
        files_may_not_be_large: "model-00002-of-00003.safetensors",
    }
    assert raised.value.filename == str(tmp_path / names[obstacle])
    assert contents(tmp_path) == before


def test_room_is_found_for_all_shards_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = saving.Replacement.reserve

    def full_at_last(self: saving.Replacement, size: int) -> None:
        (full if self.path.endswith(".index.json") else reserve)(self, size)

    monkeypatch.setattr(saving.Replacement, "reserve", full_at_last)
    before = transfers.moved_bytes()
    with pytest.raises(OSError, match="No space left"):
        save_safetensors(
            sizes_to_tensors([30, 30]), tmp_path / "model.safetensors", max_shard_bytes=30
        )
    assert transfers.moved_bytes() == before
    assert contents(tmp_path) == {}


def test_shards_get_their_names_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last one is written, and the index, which is of more of them, at last."""
    path = tmp_path / "model.safetensors"
    save_safetensors(sizes_to_tensors([30, 30]), path, max_shard_bytes=30)
    before = contents(tmp_path)
    done: list[str] = []
    takes_name, write = saving.Replacement.take_name, writing.write_pieces

    def take_name(self: saving.Replacement) -> None:
        if done[-1] == "writes":
            found = contents(tmp_path)
            assert {name: found[name] for name in before} == before
        takes_name(self)
        done.append(self.path.rpartition("/")[2])

    def write_pieces(*arguments: Any, **options: Any) -> Any:
        done.append("writes")
        return write(*arguments, **options)

    monkeypatch.setattr(saving.Replacement, "take_name", take_name)
    monkeypatch.setattr(writing, "write_pieces", write_pieces)
    save_safetensors(sizes_to_tensors([30, 30, 30]), path, max_shard_bytes=30)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert done[done.index(shards[0]) :] == [*shards, "model.safetensors.index.json"]
    assert done.count("writes") >= len(shards)


@pytest.mark.parametrize("limit", [0, -1, "5GB", 1.5, True])
def test_limits_that_are_none(path: Path, limit: Any) -> None:
    with pytest.raises(ValueError, match="give a number of bytes"):
        save_safetensors(model(), path, max_shard_bytes=limit)
    assert os.listdir(path.parent) == []


@pytest.mark.root
def test_files_that_may_not_be_written_stay() -> None:
    """A directory that everybody may write to lets them be renamed over and removed."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        save_safetensors(sizes_to_tensors([30, 30]), folder / "m.st", max_shard_bytes=30)
        before = contents(folder)
        # In a sticky one they may not, whoever may write to them.
        for mode, of_files in ((0o777, 0o644), (0o1777, 0o666)):
            folder.chmod(mode)
            for path in folder.iterdir():
                path.chmod(of_files)
            for sizes in ([30, 30], [30]):
                with being_nobody(), pytest.raises(PermissionError, match=r"m.*\.st"):
                    save_safetensors(sizes_to_tensors(sizes), folder / "m.st", max_shard_bytes=30)
            assert contents(folder) == before


def test_links_are_replaced(tmp_path: Path) -> None:
    """As in a cache of Hugging Face, whose blobs others have, too."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    save_safetensors(sizes_to_tensors([30, 30]), blobs_of(blobs) / "m.st", max_shard_bytes=30)
    before = contents(blobs)
    folder.mkdir()
    for name in before:
        (folder / name).symlink_to(blobs / name)
    (tmp_path / "linked").symlink_to(folder)
    path = tmp_path / "linked" / "m.st"
    save_safetensors(sizes_to_tensors([30, 30, 30]), path, max_shard_bytes=30)
    assert contents(blobs) == before
    assert not any(each.is_symlink() for each in folder.iterdir())
    assert len(contents(folder)) == 4
    path.symlink_to(blobs / "m.st.index.json")
    save_safetensors(sizes_to_tensors([20]), path, max_shard_bytes=30)
    assert contents(blobs) == before
    assert contents(folder).keys() == {"m.st"}


def blobs_of(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_what_killed_saves_have_left_goes(tmp_path: Path) -> None:
    """Also of shards that there are no more."""
    for name in (b"model.safetensors", b"model-00002-of-00007.safetensors", b"model-1.safetensors"):
        (tmp_path / os.fsdecode(make_temporary(name))).write_bytes(b"left")
    save_safetensors(model(), tmp_path / "model.safetensors", max_shard_bytes=10**9)
    others = sorted(path.name for path in tmp_path.iterdir() if path.name != "model.safetensors")
    assert len(others) == 1
    assert others[0].endswith(".model-1.safetensors")


def test_two_at_once_are_one_or_the_other(tmp_path: Path) -> None:
    """Models of two and of three shards, and others of two, at one path, over and over."""

    def save(shards: int, value: int) -> None:
        tensors = {
            name: torch.full_like(tensor, value)
            for name, tensor in sizes_to_tensors([30] * shards).items()
        }
        save_safetensors(tensors, tmp_path / "model.safetensors", max_shard_bytes=30)

    models = ((2, 0), (3, 1), (2, 2))
    for _ in range(40):
        threads = [threading.Thread(target=save, args=model) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = load_sharded(tmp_path)
        assert len(found) == len(os.listdir(tmp_path)) - 1
        assert (len(found), only_value(found.values())) in models


def test_a_former_file_may_go_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another save removes it: here when it is looked at."""
    former = tmp_path / "model-00003-of-00003.safetensors"
    former.touch()

    access = os.access

    def access_what_is_removed(path: str, mode: int, **options: bool) -> bool:
        former.unlink(missing_ok=True)
        return access(path, mode, **options)

    monkeypatch.setattr(os, "access", access_what_is_removed)
    save_safetensors(model(), tmp_path / "model.safetensors", max_shard_bytes=10**9)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_many_views_of_one_tensor(path: Path) -> None:
    base = torch.arange(900.0**2).reshape(900, 900)
    views = {str(number): base[:, number] for number in range(900)}
    save_safetensors(views, path)
    assert torch.equal(load_file(path)["7"], base[:, 7])
    with pytest.raises(ValueError, match="'7' and 'again' share memory"):
        save_safetensors(views | {"again": base[:, 7]}, path)


# --- beside training ---


def test_beside_training(path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in model().items()}
    with client.AsyncSaver() as saver:
        saver.save_safetensors(tensors, path, metadata=METADATA)
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8).zero_()
    found = path.read_bytes()
    save_file(model(), path, metadata=METADATA)
    assert found == path.read_bytes()
    assert os.listdir(path.parent) == [path.name]


def test_from_several_threads(tmp_path: Path) -> None:
    def save(number: int) -> None:
        save_safetensors(model(seed=number), tmp_path / str(number), group=client.ALONE)

    threads = [threading.Thread(target=save, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        assert_same_tensors(tmp_path / str(number), model(seed=number))


# --- by ranks ---


def whole_model() -> dict[str, torch.Tensor]:
    return {
        "replicated": torch.arange(60_000.0).reshape(200, 300),
        "rows": torch.arange(60_000, 120_000.0).reshape(200, 300),
        "columns": torch.arange(60_000).reshape(300, 200),
        "small": torch.arange(7, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        # Each rank has all of some of them.
        **{f"layer{number}": torch.arange(64.0) + number for number in range(300)},
    }


def save_by_ranks(path: str, limit: int | None) -> Any:
    """As a rank: metadata are rank 0's, whatever others have."""
    planning.CHUNK_BYTES_DEFAULT = 512
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = whole_model()
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("small", Replicate())):
        tensors[name] = distribute_tensor(tensors[name], mesh, [placement])
    metadata = {"format": "pt", "rank": "0" * (1 + 30 * dist.get_rank())}
    saved = save_safetensors(tensors, path, metadata=metadata, max_shard_bytes=limit)
    return [saved.path, saved.bytes, [part.bytes for part in saved.written]]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("limit", [None, 240_000])
def test_ranks_save_one_model(forks: Worlds, tmp_path: Path, size: int, limit: int | None) -> None:
    path = tmp_path / "model.safetensors"
    (first, *others) = forks.start(size, save_by_ranks, path, limit).values()
    assert others == [first] * (size - 1)
    assert first[1] == sum(first[2]) == sum(each.stat().st_size for each in tmp_path.iterdir())
    found = load_sharded(tmp_path)
    assert found.keys() == whole_model().keys()
    for name, tensor in whole_model().items():
        assert torch.equal(found[name], tensor), name
    if limit is None:
        save_file(whole_model(), tmp_path / "own", metadata=None)
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt", "rank": "0"}
        offset = -sum(tensor.nbytes for tensor in whole_model().values())
        assert path.read_bytes()[offset:] == (tmp_path / "own").read_bytes()[offset:]


def save_what_differs(path: str, what: str) -> None:
    """As a rank, of which the last one saves something else."""
    tensors, limit = whole_model(), 240_000
    if dist.get_rank() == dist.get_world_size() - 1:
        if what == "tensor":
            tensors["replicated"] = tensors["replicated"][1:].clone()
        if what == "limit":
            limit = 500_000
        if what == "object":
            tensors["small"] = "text"  # type: ignore[assignment]
    save_safetensors(tensors, path, max_shard_bytes=limit)


@pytest.mark.parametrize(
    ("what", "own"),
    [
        ("tensor", "rank 1: saves 1 tensor in"),
        ("limit", "rank 1: saves to"),
        ("object", "TypeError"),
    ],
)
def test_ranks_that_differ(forks: Worlds, tmp_path: Path, what: str, own: str) -> None:
    path = tmp_path / "model.safetensors"
    save_safetensors({"former": torch.ones(3)}, path)
    before = contents(tmp_path)
    outcomes = forks.start(2, save_what_differs, path, what).outcomes()
    assert all("rank 1" in str(outcome.error) for outcome in outcomes[:1])
    assert own in str(outcomes[1].error)
    assert contents(tmp_path) == before


def save_alone_what_is_sharded(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {"w": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])}
    save_safetensors(tensors, f"{path}{dist.get_rank()}", group=client.ALONE)


def test_a_part_is_not_saved_as_a_whole(forks: Worlds, path: Path) -> None:
    for outcome in forks.start(2, save_alone_what_is_sharded, path).outcomes():
        assert "'w' is a DTensor: let the ranks of its mesh save it together" in str(outcome.error)
    assert os.listdir(path.parent) == []
