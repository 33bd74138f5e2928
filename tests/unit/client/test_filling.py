"""A file is loaded into tensors that are there already."""

from __future__ import annotations

import collections
import copy
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

from fpfs import client
from fpfs.client import filling, loading, parallel_file
from tests.support.ranks import Worlds
from tests.support.states import DTYPES, a_mesh, large_state, random_tensor, same

# torch's own, of types that it is not done with.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Pair = collections.namedtuple("Pair", ["first", "second"])


def emptied(state: Any) -> Any:
    """A state like it, whose tensors hold zeros, and which has nothing else."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        made = copy.copy(state)
        made.update((key, emptied(value)) for key, value in state.items())
        return made
    if isinstance(state, Pair):
        return Pair(*map(emptied, state))
    if isinstance(state, list | tuple):
        return type(state)(map(emptied, state))
    return None


def test_a_nested_state(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    state = {
        "model": collections.OrderedDict(large_state(seed=1)),
        "types": {str(dtype): random_tensor(dtype, (7, 3), seed=2) for dtype in DTYPES},
        "list": [torch.arange(3), (torch.ones(()), "text"), 7],
        "pair": Pair(torch.ones(2), None),
        "parameter": torch.nn.Parameter(torch.ones(4)),
        "none": torch.empty(0, 5),
        "step": 12,
    }
    torch.save(state, path)
    into = emptied(state)
    tensors = dict(into["model"])
    loaded = client.load(path, into=into, weights_only=False)
    assert same(loaded, state | {"parameter": state["parameter"].detach()})
    for name, tensor in tensors.items():
        assert loaded["model"][name] is tensor


@given(data=st.data())
def test_tensors_that_lie_differently(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Strides and types of the file's and the state's tensors, by blocks of some rows."""
    path = tmp_path_factory.mktemp("filling") / "state.pt"

    def tensor(dtype: torch.dtype, seed: int) -> torch.Tensor:
        made = torch.randint(-100, 100, (5, 4, 6), generator=torch.Generator().manual_seed(seed))
        how = data.draw(st.sampled_from(["plain", "permuted", "sliced"]))
        made = made.to(dtype)
        if how == "permuted":
            order = data.draw(st.permutations([0, 1, 2]))
            inverse = [order.index(dim) for dim in range(3)]
            return made.permute(order).contiguous().permute(inverse)
        if how == "sliced":
            wide = torch.zeros(11, 5, 7, dtype=dtype)
            wide[1:11:2, 1:, :6] = made
            return wide[1:11:2, 1:, :6]
        return made

    types = st.sampled_from([torch.float32, torch.float64, torch.int16])
    saved, target = tensor(data.draw(types), 1), tensor(data.draw(types), 2)
    torch.save([saved], path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "BUFFER_BYTES", data.draw(st.sampled_from([1, 500, 10**6])))
        client.load(path, into=[target])
    assert torch.equal(target, saved.to(target.dtype))


@given(data=st.data())
def test_tensors_that_share_memory(data: st.DataObject, tmp_path_factory: Any) -> None:
    """They are filled in their order, as load_state_dict does, whatever the file's."""
    path = tmp_path_factory.mktemp("filling") / "state.pt"
    ends = st.lists(st.integers(0, 12), min_size=2, max_size=2, unique=True).map(sorted)

    def views(flat: torch.Tensor, how: list[tuple[str, list[int]]]) -> dict[str, torch.Tensor]:
        kinds = {
            "rows": lambda begin, end: flat.view(12, 12)[begin:end],
            "columns": lambda begin, end: flat.view(12, 12)[:, begin:end],
            "permuted": lambda begin, end: flat.view(12, 12)[begin:end].t(),
        }
        return {f"{number}": kinds[kind](*cut) for number, (kind, cut) in enumerate(how)}

    kinds = st.sampled_from(["rows", "columns", "permuted"])
    how = data.draw(st.lists(st.tuples(kinds, ends), min_size=2, max_size=5))
    expected, flat = torch.zeros(144), torch.zeros(144)
    types = st.sampled_from([torch.float32, torch.float64])
    saved = {}
    for number, (name, view) in enumerate(views(expected, how).items()):
        saved[name] = torch.full(view.shape, number + 1, dtype=data.draw(types))
        view.copy_(saved[name])
    torch.save(dict(data.draw(st.permutations(list(saved.items())))), path)
    client.load(path, into=views(flat, how))
    assert torch.equal(flat, expected)


class Subclass(torch.Tensor):
    """As some libraries' tensors."""


def test_subclasses_that_share_memory(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(
        {"first": torch.ones(4), "last": torch.full((4,), 2.0), "none": torch.ones(0, 0)}, path
    )
    weight = torch.zeros(4)
    into = {
        "first": weight.as_subclass(Subclass),
        "last": weight,
        "none": torch.ones(0, 0).as_subclass(Subclass),
    }
    client.load(path, into=into)
    assert weight.unique().tolist() == [2]


def test_gaps_between_elements_are_filled_by_others(tmp_path: Path) -> None:
    """Where the last one reaches as far as the others, and has not all of their elements."""
    path = tmp_path / "state.pt"
    torch.save({"first": torch.ones(8), "last": torch.full((2, 2, 2), 2.0)}, path)
    weight = torch.zeros(8)
    # Two of its elements are one, which torch does not find out.
    last = weight.as_strided((2, 2, 2), (1, 3, 3))
    client.load(path, into={"first": weight, "last": last})
    assert weight.tolist() == [2, 2, 1, 2, 2, 1, 2, 2]


def test_tied_weights_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the last name, by native threads."""
    path, read = tmp_path / "state.pt", []
    torch.save({"first": torch.ones(1000), "last": torch.full((1000,), 2.0)}, path)
    weight = torch.zeros(1000)
    native = parallel_file.read_pieces

    def note(pieces: Any, **options: Any) -> Any:
        read.extend(count for _, count, _ in pieces)
        return native(pieces, **options)

    monkeypatch.setattr(filling, "_fill_by_buffer", None)
    monkeypatch.setattr(parallel_file, "read_pieces", note)
    client.load(path, into={"first": weight, "last": weight})
    assert weight.unique().tolist() == [2]
    assert read == [weight.nbytes]


@pytest.mark.parametrize(
    "saved",
    [
        torch.ones(1).expand(100, 3),
        torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
        torch._neg_view(torch.arange(5.0)),
        torch.tensor(7.0).to(torch.bfloat16),
    ],
    ids=["expanded", "conjugate", "negative", "scalar"],
)
def test_views(tmp_path: Path, saved: torch.Tensor) -> None:
    path = tmp_path / "state.pt"
    torch.save({"view": saved}, path)
    target = torch.zeros(saved.shape, dtype=saved.dtype)
    client.load(path, into={"view": target})
    assert torch.equal(target, saved)


@pytest.mark.parametrize("mode", [False, True])
def test_tensors_of_inference_mode(tmp_path: Path, mode: bool) -> None:
    path = tmp_path / "state.pt"
    saved = torch.arange(6.0).reshape(2, 3)
    torch.save([saved] * 4, path)
    with torch.inference_mode():
        into = [torch.zeros(2, 3), torch.zeros(2, 3).double(), torch.zeros(3, 2).t()]
    assert all(tensor.is_inference() for tensor in into)
    into.append(torch.zeros(3, 2).t())
    with torch.inference_mode(mode=mode):
        client.load(path, into=into)
    assert [tensor.tolist() for tensor in into] == [saved.tolist()] * 4


def test_torch_counts_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, counted = tmp_path / "state.pt", []
    tensors = [torch.zeros(6), torch.zeros(6).double()]
    before = [tensor._version for tensor in tensors]
    native = parallel_file.read_pieces

    def note(pieces: Any, **options: Any) -> Any:
        counted.append([tensor._version for tensor in tensors])
        return native(pieces, **options)

    monkeypatch.setattr(parallel_file, "read_pieces", note)
    torch.save([torch.ones(6)] * 2, path)
    client.load(path, into=tensors)
    assert all(now > then for now, then in zip(counted[0], before, strict=True))


def test_torch_counts_what_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    given = torch.ones(6, requires_grad=True)
    tensors = [torch.nn.Parameter(torch.zeros(6)), torch.zeros(12), torch.zeros(6).double()]
    torch.save([torch.ones(6)] * 3, path)
    products = [given * tensor[:6] for tensor in tensors]
    client.load(path, into=[tensors[0].detach(), tensors[1][::2], tensors[2]])
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def load_dtensor(path: str) -> list[bool]:
    """As a rank: whether torch has counted the change of a DTensor, and of this rank's part."""
    whole = distribute_tensor(torch.zeros(4), a_mesh(), [Shard(0)])
    tensors = [whole, whole.to_local()]
    before = [tensor._version for tensor in tensors]
    client.load(path, into=[whole])
    assert tensors[1].tolist() == [1, 1]
    return [tensor._version > version for tensor, version in zip(tensors, before, strict=True)]


def test_torch_counts_that_dtensors_are_changed(forks: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save([torch.ones(4)], path)
    assert forks.start(2, load_dtensor, path).values() == [[True, True]] * 2


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by threads nor as torch reads."""
    path, read = tmp_path / "state.pt", []
    wanted = torch.randn(700_000)
    torch.save({"model": {"a": torch.ones(3_000_000), "b": wanted, "c": wanted + 1}}, path)
    native, readinto = parallel_file.read_pieces, parallel_file.ParallelFile.readinto

    def count(pieces: Any, **options: Any) -> Any:
        read.append(sum(piece[1] for piece in pieces))
        return native(pieces, **options)

    def count_small(self: Any, buffer: Any) -> int:
        count = readinto(self, buffer)
        read.append(count)
        return count

    monkeypatch.setattr(parallel_file, "read_pieces", count)
    monkeypatch.setattr(parallel_file.ParallelFile, "readinto", count_small)
    loaded = client.load(path, into={"model": {"b": torch.zeros_like(wanted)}})
    assert same(loaded, {"model": {"b": wanted}})
    assert wanted.nbytes in read
    assert sum(read) < wanted.nbytes + 20_000


def test_ranks_begin_at_different_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, offsets = tmp_path / "state.pt", []
    state = {str(number): torch.full((500_000,), number) for number in range(5)}
    torch.save(state, path)
    native = parallel_file.read_pieces

    def note(pieces: Any, **options: Any) -> Any:
        offsets.extend(offset for _, _, offset in pieces)
        return native(pieces, **options)

    monkeypatch.setattr(parallel_file, "read_pieces", note)
    for rank in range(4):
        monkeypatch.setattr(loading, "place_in", lambda _, rank=rank: (rank, 4))
        offsets.clear()
        assert same(client.load(path, into=emptied(state)), state)
        first = offsets[0] / path.stat().st_size
        assert first == pytest.approx(rank / 4, abs=0.01)


def test_tensors_stay_where_they_are_whatever_the_default_device(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    saved = {
        "rows": torch.arange(60.0).reshape(6, 10),
        "columns": torch.arange(60.0).view(10, 6).t(),
    }
    torch.save(saved, path)
    into = {name: torch.zeros(6, 10, dtype=torch.float64) for name in saved}
    with torch.device("meta"):
        client.load(path, into=into)
    for name, tensor in saved.items():
        assert torch.equal(into[name], tensor.double())


@pytest.mark.parametrize("how", ["rows", "transposed", "permuted"])
def test_blocks_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Whatever the order of the dimensions in the file, and also if a row is more than a block."""
    path, read = tmp_path / "state.pt", []
    saved = torch.arange(60_000).reshape(20, 50, 60)
    order = {"rows": (0, 1, 2), "transposed": (2, 1, 0), "permuted": (1, 2, 0)}[how]
    torch.save([saved.permute(order)], path)
    native = parallel_file.read_pieces

    def note(pieces: Any, **options: Any) -> Any:
        read.extend(count for _, count, _ in pieces)
        return native(pieces, **options)

    monkeypatch.setattr(parallel_file, "read_pieces", note)
    monkeypatch.setattr(filling, "BUFFER_BYTES", 3000)
    target = torch.zeros(saved.permute(order).shape, dtype=torch.float64)
    client.load(path, into=[target])
    assert torch.equal(target, saved.permute(order).to(torch.float64))
    assert max(read) <= 3000
    assert sum(read) == saved.nbytes


def recompressed(path: Path) -> None:
    """As zip -r would write it again."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def contents_of(path: Path, *, without: str) -> dict[str, bytes]:
    """An archive's entries, but for one."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith(f"/{without}")]
        return {name: archive.read(name) for name in names}


def with_other_byte_order(path: Path) -> None:
    """As from another machine, as far as that is looked at."""
    contents = contents_of(path, without="byteorder")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr(f"{min(contents).partition('/')[0]}/byteorder", "big")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (recompressed, "the file is compressed: load it without into="),
        (with_other_byte_order, "the file is big-endian: load it without into="),
    ],
)
def test_bytes_that_are_not_as_in_memory(
    tmp_path: Path, change: Callable[[Path], None], told: str
) -> None:
    path = tmp_path / "state.pt"
    torch.save({"weight": torch.ones(100)}, path)
    change(path)
    with pytest.raises(ValueError, match=told):
        client.load(path, into={"weight": torch.zeros(100)})


def changed(path: Path, *changes: tuple[bytes, bytes]) -> None:
    """Change a file's pickle, and not how long it is."""
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        former = made = archive.read(name)
    for before, after in changes:
        assert made.count(before) == 1
        made = made.replace(before, after)
    content = path.read_bytes()
    assert content.count(former) == 1
    path.write_bytes(content.replace(former, made))


STORAGE, SHAPE = (b"K\x04t", b"K\xc8t"), (b"K\x04\x85", b"K\xc8\x85")
"""In a pickle, of the tensor with 4 elements: it claims 200."""


@pytest.mark.parametrize(
    ("changes", "wanted", "told"),
    [
        ([SHAPE], {"a": 200}, "the file is damaged: it has 16 bytes for a, which takes 800"),
        (
            [STORAGE, SHAPE],
            {"a": 200},
            "the file is damaged: it has 16 bytes for a, which takes 800",
        ),
        ([STORAGE], {"a": 4}, "the file is damaged: it has 16 bytes for a, which takes 800"),
        ([STORAGE], {"b": 50}, "the file does not have b where torch calculates it"),
    ],
    ids=["shape", "storage and shape", "storage", "storage before"],
)
def test_a_file_that_claims_more_than_it_has(
    tmp_path: Path, changes: list[tuple[bytes, bytes]], wanted: dict[str, int], told: str
) -> None:
    """torch.load refuses it, and so does this: no tensor is filled with bytes of others."""
    path = tmp_path / "state.pt"
    state = {"first": torch.ones(3), "a": torch.arange(4.0), "b": torch.full((50,), 7.0)}
    torch.save(state, path)
    changed(path, *changes)
    with pytest.raises(RuntimeError, match="not resizable|does not match expected size"):
        torch.load(path)
    into = {"first": torch.zeros(3)}
    into |= {name: torch.zeros(count) for name, count in wanted.items()}
    with pytest.raises(ValueError, match=told):
        client.load(path, into=into)
    assert not any(tensor.any() for tensor in into.values()), "nothing is changed"


def stored_again(path: Path, *, without: str) -> None:
    """Write a file again as zip -0 would: no entry begins at a multiple of 64 bytes."""
    contents = contents_of(path, without=without)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def through_a_pipe(path: Path, *, without: str) -> None:
    """Write a file again as a program does that cannot go back: sizes follow the contents."""
    contents = contents_of(path, without=without)
    reading, writing = os.pipe()
    with open(reading, "rb") as made:
        with open(writing, "wb") as pipe, zipfile.ZipFile(pipe, "w") as archive:
            for name, content in contents.items():
                with archive.open(name, "w", force_zip64=True) as entry:
                    entry.write(content)
        path.write_bytes(made.read())


@pytest.mark.parametrize("write", [stored_again, through_a_pipe])
def test_archives_that_another_program_has_written(
    tmp_path: Path, write: Callable[..., None]
) -> None:
    """With the version torch calculates where tensors are, as it would have written them."""
    path = tmp_path / "state.pt"
    state = {"a": torch.arange(4.0), "none": torch.empty(0), "b": torch.full((50,), 7.0)}
    torch.save(state, path)
    write(path, without="")
    into = emptied(state)
    with pytest.raises(ValueError, match="the file does not have b where torch calculates it"):
        client.load(path, into=into)
    assert same(into, emptied(state))
    write(path, without=".format_version")
    assert same(client.load(path, into=into), state)


class Holder:
    """An object with a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3)


@pytest.mark.parametrize("value", [Holder(), {torch.ones(2)}, torch.nn.Linear(2, 2)])
def test_tensors_in_objects(tmp_path: Path, value: Any) -> None:
    """They would come without their bytes."""
    path = tmp_path / "state.pt"
    torch.save({"held": value, "step": {1, 2}}, path)
    with pytest.raises(ValueError, match="held: the file has tensors, the state a NoneType"):
        client.load(path, into={"held": None}, weights_only=False)
    assert client.load(path, into={"step": None}, weights_only=False) == {"step": {1, 2}}


SPARSE = torch.eye(3).to_sparse()
MISFITS: dict[str, tuple[Any, Any, str]] = {
    "a missing name": (
        {"model": {}},
        {"model": {"weight": torch.zeros(2)}},
        "the file has no model.weight",
    ),
    "another shape": (
        {"weight": torch.ones(3, 2)},
        {"weight": torch.zeros(2, 3)},
        "weight: the file has (3, 2), the state (2, 3)",
    ),
    "no tensor in the file": (
        {"weight": 7},
        {"weight": torch.zeros(2)},
        "weight: the file has a int, the state a tensor",
    ),
    "no tensor in the state": (
        {"weight": {"a": [torch.ones(3)]}},
        {"weight": None},
        "weight: the file has tensors, the state a NoneType",
    ),
    "no dictionary": (
        {"model": [1]},
        {"model": {"weight": torch.zeros(2)}},
        "model: the file has a list, the state a dictionary",
    ),
    "fewer items": (
        [1, 2],
        [torch.zeros(2)],
        "the state: the file has 2 items, the state 1 items",
    ),
    "an empty dictionary": (
        {"state": {"exp_avg": torch.ones(3)}},
        {"state": {}},
        "state: the file has 1 items, the state none",
    ),
    "an empty list": (
        {"history": [[torch.ones(3)]]},
        {"history": [[]]},
        "history.0: the file has 1 items, the state 0 items",
    ),
    "a plain name that is missing": (
        {"state": {"exp_avg": torch.ones(3)}},
        {"state": {"exp_avg": torch.zeros(3), "step": 1}},
        "the file has no state.step",
    ),
    "elements that share memory": (
        {"weight": torch.ones(3)},
        {"weight": torch.zeros(1).expand(3)},
        "elements of weight of the state share memory: clone() it first",
    ),
    "a type that is not converted": (
        {"weight": torch.zeros(3, dtype=torch.bits8)},
        {"weight": torch.zeros(3)},
        "weight: the file has torch.bits8, the state torch.float32",
    ),
    "a sparse tensor": (
        {"weight": SPARSE},
        {"weight": torch.zeros(3, 3)},
        "weight of the file is no dense tensor: load it without into=",
    ),
    "a sparse target": (
        {"weight": torch.zeros(3, 3)},
        {"weight": SPARSE},
        "weight of the state is no dense tensor: load it without into=",
    ),
    "no memory": (
        {"weight": torch.zeros(3)},
        {"weight": torch.zeros(3, device="meta")},
        "weight of the state has no memory: to_empty() it first",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit(tmp_path: Path, what: str) -> None:
    saved, into, told = MISFITS[what]
    path = tmp_path / "state.pt"
    first = torch.zeros(4)
    if isinstance(saved, dict):
        saved, into = {"first": torch.ones(4)} | saved, {"first": first} | into
    torch.save(saved, path)
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole text is compared
        client.load(path, into=into)
    assert str(refused.value) == told
    assert not first.any(), "nothing is changed"


PLAIN: dict[str, tuple[Any, Any]] = {
    "a list that has grown": ([1, [2], 3], []),
    "a list that has shrunk": ([1], [4, 5]),
    "other names": ({"milestones": {30: 1}}, {"milestones": {20: 1}}),
    "more names": ({"best": 1.5, "names": ["x"]}, {"best": None}),
    "a full dictionary": ({"a": {"b": 1}}, {}),
    "an empty dictionary": ({}, {"a": [1]}),
    "another length of a tuple": ((1, 2), (3,)),
    "nothing": (None, [1]),
    "something": ([1, (2,)], None),
}


@pytest.mark.parametrize("what", PLAIN)
def test_plain_values_are_as_the_file_has_them(tmp_path: Path, what: str) -> None:
    """Beside tensors, at any depth, and by themselves."""
    saved, into = PLAIN[what]
    path = tmp_path / "state.pt"
    torch.save({"model": [torch.ones(2), saved], "more": saved}, path)
    target = torch.zeros(2)
    loaded = client.load(path, into={"model": (target, into), "more": into})
    assert loaded == {"model": (target, saved), "more": saved}
    assert target.tolist() == [1, 1]
    torch.save(saved, path)
    assert into is None or client.load(path, into=into) == saved


def test_where_tensors_are_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({}, path)
    for option in ({"mmap": True}, {"map_location": "cpu"}):
        with pytest.raises(ValueError, match="into= says where tensors are"):
            client.load(path, into={}, **option)


def test_files_of_old(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"weight": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="where weight is in the file is not known"):
        client.load(path, into={"weight": torch.zeros(3)})


def test_a_file_that_ends_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.pt"
    torch.save({"weight": torch.ones(3)}, path)
    monkeypatch.setattr(filling.Filling, "offset", path.stat().st_size - 4)
    with pytest.raises(OSError, match="the file ends at"):
        client.load(path, into={"weight": torch.zeros(3)})
