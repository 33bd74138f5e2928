"""A file is loaded into tensors that are there already."""

from __future__ import annotations

import collections
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fpfs import client
from fpfs.client import filling, loading
from tests.support.states import DTYPES, large_state, random_tensor, same

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


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "state.pt", []
    state = large_state(seed=3)
    torch.save({"model": state, "step": 3}, path)
    native = loading.read_pieces

    def count(pieces: Any, **options: Any) -> Any:
        read.append(sum(piece[1] for piece in pieces))
        return native(pieces, **options)

    monkeypatch.setattr(loading, "read_pieces", count)
    name = next(iter(state))
    loaded = client.load(path, into={"model": {name: torch.zeros_like(state[name])}})
    assert same(loaded, {"model": {name: state[name]}})
    assert sum(read) == state[name].nbytes


def test_ranks_begin_at_different_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, offsets = tmp_path / "state.pt", []
    state = {str(number): torch.full((500_000,), number) for number in range(5)}
    torch.save(state, path)
    native = loading.read_pieces

    def note(pieces: Any, **options: Any) -> Any:
        offsets.extend(offset for _, _, offset in pieces)
        return native(pieces, **options)

    monkeypatch.setattr(loading, "read_pieces", note)
    for rank in range(4):
        monkeypatch.setattr(loading, "place_in", lambda _, rank=rank: (rank, 4))
        offsets.clear()
        assert same(client.load(path, into=emptied(state)), state)
        first = offsets[0] / path.stat().st_size
        assert first == pytest.approx(rank / 4, abs=0.01)


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
