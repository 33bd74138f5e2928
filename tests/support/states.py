"""States that are saved: all that tensors may be, random nested ones, and their comparison."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import mse_loss

from fpfs.client import AsyncSaver, peers, planning, snapshot
from fpfs.client.replacement import Replacement
from fpfs.client.shares.saving import save_shares
from tests.support.contents import random_bytes
from tests.support.processes import DEADLINE_S

DTYPES = tuple(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not re.search(r"qu?int|\bu?int[1-7]$", str(dtype))
)
"""Those of ordinary tensors that torch.save takes."""


class Custom:
    """An object of the caller's own, which is pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


class Named(torch.Tensor):
    """A subclass of tensors with an attribute."""

    label: str


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """Random bits, as a tensor; NaNs are among them."""
    count = dtype.itemsize
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(random_bytes(count, seed=seed)), dtype=torch.uint8).clone()
    if dtype == torch.bool:
        raw &= 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental", UserWarning)
        return raw.view(dtype).reshape(shape)


def odd_state() -> dict[str, Any]:
    """Every kind of tensor that torch.save takes."""
    base = random_tensor(torch.float32, (40, 30), seed=1)
    named = random_tensor(torch.float32, (3, 5), seed=2).as_subclass(Named)
    named.label = "of a subclass"
    raw = random_tensor(torch.uint8, (7,), seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = {
            "quantized": [
                torch.quantize_per_tensor(torch.randn(5, 5), 0.1, 3, dtype)
                for dtype in (torch.qint8, torch.quint8, torch.qint32)
            ],
            "quantized by channel": torch.quantize_per_channel(
                torch.randn(4, 4), torch.rand(4) + 0.1, torch.zeros(4), 0, torch.qint8
            ),
            "quantized to four bits": torch.quantize_per_channel(
                torch.randn(4, 4), torch.rand(4) + 0.1, torch.zeros(4), 0, torch.quint4x2
            ),
            "sparse": torch.eye(5).to_sparse(),
            "sparse in part": torch.sparse_coo_tensor([[0, 0]], torch.randn(2, 3), (5, 3)),
            "sparse rows": torch.eye(5).to_sparse_csr(),
            "sparse columns": torch.eye(5).to_sparse_csc(),
            "sparse blocks": torch.eye(6).to_sparse_bsr((2, 3)),
            "nested": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
        }
    return (
        odd
        | {
            "whole": base,
            "view": base[3:7, 2:],
            "transposed": base.t(),
            "strided": base.flatten()[::7],
            "expanded": torch.ones(1).expand(1000),
            "again": base,
            "parameter": torch.nn.Parameter(base[:2].clone()),
            "of a subclass": named,
            "conjugate": random_tensor(torch.complex64, (4,), seed=3).conj(),
            "negative": torch._neg_view(torch.ones(3)),
            "empty": torch.empty(0, 3),
            "also empty": torch.empty(0, 3),
            "scalar": torch.tensor(7),
            "meta": torch.empty(5, device="meta"),
            "storages": [raw, raw.untyped_storage(), torch.ones(3).untyped_storage()],
            "object": Custom([base, {"deep": base[0]}]),
            "ordered": OrderedDict(b=1, a=None),
            "plain": [1, 2.5, "text", b"bytes", {3, 4}, (None, True), 10**30],
        }
        | {str(dtype): random_tensor(dtype, (3, 7), seed=4) for dtype in DTYPES}
    )


def large_state(*, seed: int, tensors: int = 6, elements: int = 700_001) -> dict[str, torch.Tensor]:
    """Tensors of some MiB each, of odd sizes."""
    return {
        f"layer{number}": random_tensor(
            torch.uint8, (4 * (elements + number) + 1,), seed=seed + number
        )
        for number in range(tensors)
    }


def some_states() -> dict[str, Any]:
    """States by what is special about them."""
    return {
        "odd": odd_state(),
        "large": large_state(seed=1),
        "empty": {},
        "tensor": torch.arange(3),
        "text": "text",
    }


def nested_states() -> st.SearchStrategy[Any]:
    """Random nestings of tensors of random types and shapes with plain values."""
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    tensors = st.builds(
        random_tensor, st.sampled_from(DTYPES), shapes, seed=st.integers(0, 2**31 - 1)
    )
    leaves = tensors | st.integers() | st.text(max_size=5) | st.none() | st.binary(max_size=9)
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.dictionaries(st.text(max_size=5), inner, max_size=5)
            | st.tuples(inner, inner)
            # The same twice: tensors that share their storage.
            | inner.map(lambda value: [value, value])
        ),
        max_leaves=12,
    )


def a_mesh(*shape: int) -> DeviceMesh:
    """All ranks, in as many dimensions; the last of as many as are left."""
    rest = dist.get_world_size() // math.prod(shape)
    return init_device_mesh("cpu", (*shape, rest))


def wholes() -> dict[str, torch.Tensor]:
    """The tensors that DTensors are made of."""
    shapes = {"matrix": (37, 24), "short": (3, 5), "cube": (4, 9, 6), "scalar": (), "none": (0, 4)}
    return {
        f"{name} {dtype}": random_tensor(dtype, shape, seed=index)
        for index, (name, shape) in enumerate(shapes.items())
        for dtype in (torch.float32, torch.bfloat16, torch.complex64)
    }


PLACEMENTS: dict[str, list[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicas": [Replicate()],
    "replicas of rows": [Replicate(), Shard(0)],
    "rows and columns": [Shard(0), Shard(1)],
    "rows of rows": [Shard(0), Shard(0)],
}


def sharded(placements: list[Placement]) -> dict[str, Any]:
    """As a rank: the wholes as DTensors; what has no such dimension has replicas."""
    mesh = a_mesh(*(2,) * (len(placements) - 1))
    state: dict[str, Any] = {"step": 7}
    for name, whole in wholes().items():
        fit = [
            Replicate() if isinstance(each, Shard) and each.dim >= whole.ndim else each
            for each in placements
        ]
        state[name] = distribute_tensor(whole, mesh, fit)
        state[f"{name} ordinary"] = whole
    state["parameter"] = torch.nn.Parameter(state["matrix torch.float32"].detach())
    state["again"] = state["matrix torch.float32"]
    return state


def fitting(size: int) -> list[str]:
    """The placements that so many ranks can have."""
    return [name for name, each in PLACEMENTS.items() if size % 2 ** (len(each) - 1) == 0]


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def own_directory(root: str, nodes: int) -> str:
    """As a rank: where its node saves. Nodes have as many ranks as each other."""
    node = dist.get_rank() * nodes // dist.get_world_size()
    return os.path.join(root, f"node{node}", "step7")


def directories(root: Path, nodes: int) -> list[str]:
    """Where all nodes save."""
    return [str(root / f"node{node}" / "step7") for node in range(nodes)]


def answer_patiently() -> None:
    """As a rank: a short `timeout_s` is for ranks that do not come, and not for the store.

    A healthy store may take as long to answer, where there is much to do.
    """
    store = peers.Store

    def patient(*arguments: Any, **options: Any) -> Any:
        return store(*arguments, **{**options, "timeout_s": DEADLINE_S})

    peers.Store = patient  # type: ignore[assignment, misc]


def let_go(saver: AsyncSaver) -> None:
    """Return when its threads have let go of calls that have ended."""
    for thread in (saver._copying, saver._writing):
        thread.submit(int).result(60)


def save_state(root: str, nodes: int, step: int, copies: int = 1) -> None:
    """As a rank: save what tells its step. All ranks have to write of it."""
    planning.CHUNK_BYTES_DEFAULT = 1 << 16  # type: ignore[attr-defined]
    save_shares(numbered(step), own_directory(root, nodes), copies=copies)


def numbered(step: int) -> dict[str, Any]:
    """A state that tells its step."""
    return {"step": step, "weight": torch.full((300_000,), float(step))}


def only_value(tensors: Iterable[torch.Tensor]) -> int:
    """The one value that all elements of all tensors have."""
    (value,) = {int(bound) for tensor in tensors for bound in tensor.aminmax()}
    return value


def same(found: Any, expected: Any) -> bool:
    """Whether two states are equal, tensors in type, shape, strides and every bit."""
    if isinstance(expected, torch.UntypedStorage | torch.TypedStorage):
        # torch.load makes one of another class.
        return _untyped(found) == _untyped(expected)
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return _same_tensors(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(
            same(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def _untyped(storage: Any) -> bytes:
    return bytes(getattr(storage, "_untyped_storage", storage))


def _same_tensors(found: torch.Tensor, expected: torch.Tensor) -> bool:
    names = ("dtype", "shape", "layout", "device", "requires_grad", "is_quantized", "is_nested")
    if any(getattr(found, name) != getattr(expected, name) for name in names if name != "shape"):
        return False
    if expected.is_nested:
        parts = found.unbind(), expected.unbind()
        return len(parts[0]) == len(parts[1]) and all(map(_same_tensors, *parts))
    if found.shape != expected.shape or vars(found) != vars(expected):
        return False
    if expected.device.type == "meta":
        return True
    if expected.layout != torch.strided:
        return _same_tensors(found.to_dense(), expected.to_dense())
    if expected.is_quantized:
        return _same_tensors(found.int_repr(), expected.int_repr()) and _same_tensors(
            found.dequantize(), expected.dequantize()
        )
    return (
        found.stride() == expected.stride()
        and found.is_conj() == expected.is_conj()
        and found.is_neg() == expected.is_neg()
        and torch.equal(_bits(found), _bits(expected))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def without_id(content: bytes) -> bytes:
    """An archive, but for the hash that torch calls its id, and that one's two CRC32s."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        (info,) = (each for each in archive.infolist() if each.filename.endswith("ialization_id"))
        value = archive.read(info)
    crc = info.CRC.to_bytes(4, "little")
    assert (content.count(value), content.count(crc)) == (1, 2)
    return content.replace(value, b"").replace(crc, b"")


FORMER = {"step": 1}
"""What a name has before a save that fails."""


def is_as_before(path: Path) -> bool:
    """Whether `path` still has FORMER, and nothing lies beside it."""
    return os.listdir(path.parent) == [path.name] and bool(torch.load(path) == FORMER)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "foreach AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


FEATURES = 300
"""Of what models get."""


def placed_state(place: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Tensors of all sizes and kinds, most of them where `place` moves them."""
    base = place(random_tensor(torch.float32, (40, 30), seed=1))
    return {
        "small": [place(random_tensor(torch.uint8, (n,), seed=n)) for n in range(0, 60, 7)],
        "large": {key: place(value) for key, value in large_state(seed=3, tensors=3).items()},
        "half": place(random_tensor(torch.bfloat16, (33, 5), seed=2)),
        "view": base[3:9],
        "transposed": base.T,
        "again": base,
        "here": random_tensor(torch.float64, (100,), seed=4),
        "step": 7,
    }


def each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a state, of dictionaries and lists, with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: each_tensor(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [each_tensor(each, change) for each in value]
    return value


def to_cpu(value: Any) -> Any:
    """Return a state with each tensor in the processor's memory."""
    return each_tensor(value, lambda tensor: tensor.cpu())


class Training:
    """A model that has buffers, and its optimizer, which has states."""

    def __init__(
        self, make: Callable[[Any], torch.optim.Optimizer], device: str | torch.device = "cpu"
    ) -> None:
        torch.random.default_generator.manual_seed(0)
        self._device = device
        self.model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, FEATURES),
            torch.nn.BatchNorm1d(FEATURES),
            torch.nn.Linear(FEATURES, 1),
        ).to(device)
        self.optimizer = make(self.model.parameters())
        self.forward_and_backward()
        self.optimizer.step()

    def forward_and_backward(self) -> None:
        """Changes buffers, too."""
        inputs = torch.randn(8, FEATURES).to(self._device)
        mse_loss(self.model(inputs), inputs.sum(1, keepdim=True)).backward()

    def state(self) -> dict[str, Any]:
        """What is saved of it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def when_awaited(future: Future[Any], act: Callable[[], None]) -> None:
    """Have who waits for it do this first."""
    wait = future.exception

    def exception(timeout: float | None = None) -> BaseException | None:
        act()
        return wait(timeout)

    future.exception = exception  # type: ignore[method-assign]


def hold_copies(patch: pytest.MonkeyPatch, module: ModuleType) -> Callable[[], None]:
    """What is left to the thread, it does not copy until what is returned here is called."""
    go = threading.Event()

    def copy_rest(uncopied: snapshot.Uncopied) -> None:
        assert uncopied
        assert go.wait(60)
        snapshot.copy_rest(uncopied)

    patch.setattr(module, "copy_rest", copy_rest)
    return go.set


@contextlib.contextmanager
def flushed_files() -> Iterator[list[str]]:
    """The names of files that fpfs's client flushes, and then flushes their names, in order."""
    found: list[str] = []
    complete, flush_name = Replacement.complete, Replacement.flush_name
    flushed: list[str] = []

    def complete_and_tell(self: Replacement, *, durable: bool) -> None:
        complete(self, durable=durable)
        if durable:
            flushed.append(self.path)

    def flush_and_tell(self: Replacement) -> None:
        flush_name(self)
        if self.path in flushed:
            found.append(os.path.basename(self.path))

    with (
        mock.patch.object(Replacement, "complete", complete_and_tell),
        mock.patch.object(Replacement, "flush_name", flush_and_tell),
    ):
        yield found
