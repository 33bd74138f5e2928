"""What Stager copies of a state for torch.distributed.checkpoint; test_dcp.py saves it."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from fpfs.dcp import Stager
from tests.support.states import odd_state, same
from tests.unit.integrations.test_dcp import equal

# torch's own, of types that it is not done with.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_types_and_identities_stay() -> None:
    class Wrapped:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    class Made(Mapping[str, torch.Tensor]):
        """Makes its tensors when it is asked."""

        def __getitem__(self, key: str) -> torch.Tensor:
            return torch.full((4,), float(key))

        def __iter__(self) -> Iterator[str]:
            return iter("01234")

        def __len__(self) -> int:
            return 5

    class Limited(list[Any]):
        def __init__(self, limit: int = 3) -> None:
            super().__init__()
            self.limit = limit

    tensor = torch.rand(3)
    module = torch.nn.Linear(2, 2).state_dict()
    limited = Limited(5)
    limited += [1, tensor]
    wrapped = Wrapped(tensor)
    staged = Stager().stage(
        {
            "module": module,
            "counter": Counter("ab"),
            "default": defaultdict(list, {1: [2]}),
            "named": Place(1, tensor),
            "limited": limited,
            "tensor": tensor,
            "wrapped": [wrapped, wrapped],
            "made": Made(),
        }
    )
    assert type(staged["module"]) is OrderedDict
    assert staged["module"]._metadata == module._metadata
    assert list(staged["module"]) == list(module)
    assert type(staged["counter"]) is Counter
    assert staged["default"][7] == []
    assert staged["named"].rank == 1
    assert staged["named"].tensor is staged["tensor"] is staged["limited"][1]
    assert (type(staged["limited"]), staged["limited"].limit) == (Limited, 5)
    assert staged["wrapped"][0] is staged["wrapped"][1] is not wrapped
    assert staged["wrapped"][0].tensor is staged["tensor"]
    assert {key: value[0].item() for key, value in staged["made"].items()} == {
        key: float(key) for key in "01234"
    }


class Place(NamedTuple):
    """With a tensor."""

    rank: int
    tensor: torch.Tensor


def test_staged_in_inference_mode() -> None:
    stager = Stager()
    with torch.inference_mode():
        first = stager.stage({"a": torch.ones(3)})
    assert not first["a"].is_inference()
    del first
    assert equal(stager.stage({"a": torch.zeros(3)}), {"a": torch.zeros(3)})


def test_a_state_that_grows_and_shrinks() -> None:
    stager = Stager(memory_bytes=1000)
    for elements in (10, 100_000, 10, 300_000):
        given = {"a": torch.rand(elements)}
        assert equal(stager.stage(given), given)
    assert len(stager._spaces) == 1


def test_what_is_one_stays_one() -> None:
    tensor = torch.rand(4)
    staged = Stager().stage({"a": tensor, "b": [tensor, (tensor,)]})
    assert staged["a"] is staged["b"][0] is staged["b"][1][0]
    assert staged["a"].data_ptr() != tensor.data_ptr()


def test_what_is_one_in_memory_is_copied_once() -> None:
    """As state_dict() gives tied weights: tensors that are several."""
    tied = torch.nn.Module()
    tied.a = torch.nn.Parameter(torch.rand(1000))
    tied.b = tied.a
    stager = Stager()
    staged = stager.stage(tied.state_dict())
    assert staged["a"].data_ptr() == staged["b"].data_ptr()
    assert equal(staged, tied.state_dict())
    assert [space.size for space in stager._spaces] == [4032]
    # The same place in memory, and other values.
    given = torch.rand(4, 4, dtype=torch.complex64)
    views = {
        "narrow": torch.view_as_real(given).view(torch.int16).flatten()[:4],
        "itself": given,
        "other": given + 1,
        "row": given[0],
        "column": given[:, 0],
        "part": given[:2],
        "transposed": given.t(),
        "conjugate": given.conj(),
        "negative": torch._neg_view(given),
        "numbers": torch.view_as_real(given),
        "empty": given[:0],
        "also empty": given[:0, :0],
    }
    for name, copied in stager.stage(views).items():
        assert torch.equal(copied, views[name]), name


def test_all_kinds_are_staged() -> None:
    given = odd_state()
    staged = Stager().stage(given)
    assert staged.keys() == given.keys()
    for name, value in given.items():
        if isinstance(value, torch.nn.Parameter):
            assert same(staged[name], value.detach())
        elif isinstance(value, torch.Tensor):
            expected = value.resolve_conj().resolve_neg()
            if name in {"view", "strided", "expanded"}:
                expected = expected.contiguous()  # without what is between its elements
            assert same(staged[name], expected), name
            assert staged[name] is not value
        else:
            assert same(staged[name], value), name


def test_no_memory() -> None:
    stager = Stager()
    huge = torch.empty(1, dtype=torch.uint8).expand(1 << 47)
    with pytest.raises(MemoryError, match=r"needs 128 TiB"):
        stager.stage({"a": huge})
    assert equal(stager.stage({"a": torch.ones(3)}), {"a": torch.ones(3)})
