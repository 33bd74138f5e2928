"""The container that is laid out is the one that torch.save writes."""

from __future__ import annotations

import ctypes
import io
import itertools
import os
import signal
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.serialization import config

from fpfs.client import container
from fpfs.client.archives import Entries, check_archive
from fpfs.client.container import Container, Record, Text, lay_out
from tests.support.states import large_state, some_states, without_id

# torch's own, of types that it is not done with.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def filled(container: Container) -> bytes:
    """The file, made one byte after the other, without the client's native part."""
    made = bytearray()
    crcs = []
    for part in container.parts:
        assert part.offset == len(made)
        if isinstance(part, Text):
            made += container.text[part.start : part.start + part.bytes]
        else:
            storage = ctypes.string_at(part.storage.data_ptr(), part.bytes)
            crcs.append(zlib.crc32(storage))
            made += storage
    for number in range(len(crcs) + 1):
        for record, offset in container.crc_places.get(number, ()):
            struct.pack_into("<L", made, offset, crcs[record])
    return bytes(made)


@pytest.mark.parametrize("name", ["odd", "large", "empty", "tensor", "text"])
@pytest.mark.parametrize("alignment", [64, 4096])
def test_it_is_torchs_own(name: str, alignment: int) -> None:
    state = some_states()[name]
    expected = io.BytesIO()
    with config.patch({"save.storage_alignment": alignment}):
        torch.save(state, expected)
        container = lay_out(state)
    assert without_id(filled(container)) == without_id(expected.getvalue())
    records = [part for part in container.parts if isinstance(part, Record)]
    assert not any(record.offset % alignment for record in records)


def test_no_bytes_are_moved() -> None:
    state = large_state(seed=2)
    container = lay_out(state)
    records = [part for part in container.parts if isinstance(part, Record)]
    assert [record.storage.data_ptr() for record in records] == [
        tensor.data_ptr() for tensor in state.values()
    ]
    assert len(container.text) < 10_000


def test_files_of_more_than_four_gibibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers have other places. Memory that is not touched is none."""
    state = {
        "before": torch.arange(3),
        "large": torch.empty(2**32 + 7, dtype=torch.uint8),
        "after": torch.arange(5),
    }
    container = lay_out(state)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        for part in container.parts:
            if isinstance(part, Text):
                content = container.text[part.start : part.start + part.bytes]
                os.pwrite(file.fileno(), content, part.offset)
        for number, offset in itertools.chain.from_iterable(container.crc_places.values()):
            record = container.record(number)
            if record.bytes < 100:
                content = ctypes.string_at(record.storage.data_ptr(), record.bytes)
                os.pwrite(file.fileno(), content, record.offset)
                os.pwrite(file.fileno(), zlib.crc32(content).to_bytes(4, "little"), offset)
    with zipfile.ZipFile(path) as archive:
        for number in (0, 2):
            archive.read(f"archive/data/{number}")  # checks its CRC32
    found = torch.load(path, mmap=True)
    for name in ("before", "after"):
        assert torch.equal(found[name], state[name])
    assert found["large"].shape == state["large"].shape
    # The directory alone says where each tensor is: a header of each would cost a read of each.
    monkeypatch.delattr(Entries, "_begin_by_header")
    with path.open("rb") as file:
        entries = check_archive(file)
        for name, tensor in torch.load(file, map_location="meta", mmap=False).items():
            entries.check(tensor, name)


def test_a_shared_storage_is_saved_once() -> None:
    base = torch.arange(1000)
    container = lay_out([base, base[5:], {"again": base.view(10, 100)}])
    (record,) = (part for part in container.parts if isinstance(part, Record))
    assert record.bytes == 8000


class Refusing:
    """An object that is not pickled for a reason of its own."""

    def __reduce__(self) -> Any:
        try:
            return vars(self)["x"]
        except KeyError:
            raise RuntimeError("what has no x is not saved") from None


def test_what_torch_refuses_is_refused_as_torch_does() -> None:
    bits = torch.zeros(4, dtype=torch.int32)
    for state, error in (
        ([bits, bits.view(torch.float32)], "view the same data as different types"),
        (lambda: None, "pickle"),
        (Refusing(), "what has no x is not saved"),
    ):
        with pytest.raises(Exception, match=error) as ours:
            lay_out(state)
        with pytest.raises(Exception, match=error) as theirs:
            torch.save(state, io.BytesIO())
        assert type(ours.value) is type(theirs.value)
    # It skips no bytes of what is saved afterwards.
    after = io.BytesIO()
    torch.save(torch.ones(3), after)
    after.seek(0)
    assert torch.equal(torch.load(after), torch.ones(3))


@pytest.mark.parametrize("longer", [10, 1000])
def test_the_layout_of_another_rank(longer: int) -> None:
    """Behind four gibibytes headers have their own offsets in them."""
    tensors = {"large": torch.empty(2**32 + 7, dtype=torch.uint8), "small": torch.arange(5)}
    tensors["last"] = torch.ones(3)
    theirs, own = lay_out({"host": "x", **tensors}), lay_out({"host": "x" * longer, **tensors})
    assert own.records().digest == theirs.records().digest
    same = own.layout_digest() == theirs.layout_digest()
    assert same == (own.record(0).offset == theirs.record(0).offset)
    found = own.laid_out_as(theirs.layout())
    assert found.records() == theirs.records()
    assert found.bytes == theirs.bytes
    assert found.layout_digest() != own.layout_digest() or same
    for number in range(1, len(tensors)):
        texts = [
            each.text[text.start : text.start + text.bytes]
            for each, text in ((found, found.text_part(number)), (theirs, theirs.text_part(number)))
        ]
        assert texts[0] == texts[1]
        assert found.text_part(number).offset == theirs.text_part(number).offset
        assert found.crc_places[number] == theirs.crc_places[number]
    assert [found.record(number).storage for number in range(3)] == [
        own.record(number).storage for number in range(3)
    ]


class Signaling:
    """An object that is pickled when a signal comes."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGINT)
        return int, ()


def time_out(*_: object) -> NoReturn:
    """Handle a signal as a program that gives itself a time."""
    raise TimeoutError("it takes too long")


@pytest.mark.parametrize(
    ("handler", "error"),
    [(signal.default_int_handler, KeyboardInterrupt), (time_out, TimeoutError)],
)
def test_what_a_handler_raises(
    monkeypatch: pytest.MonkeyPatch, handler: Any, error: type[BaseException]
) -> None:
    """The call raises it whenever the signal comes: torch's writer makes a RuntimeError of it."""
    tensors = {"first": torch.ones(10), "second": torch.ones(3)}
    calls = itertools.count()
    interrupted = -1

    class Sink(container._Sink):
        def write(self, data: bytes | memoryview) -> int:
            if next(calls) == interrupted:
                signal.raise_signal(signal.SIGINT)
            return super().write(data)

        def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
            if next(calls) == interrupted:
                signal.raise_signal(signal.SIGINT)
            return super().seek(offset, whence)

    monkeypatch.setattr(container, "_Sink", Sink)
    lay_out(tensors)
    count = next(calls)
    former = signal.signal(signal.SIGINT, handler)
    try:
        for number in range(count):
            interrupted, calls = number, itertools.count()
            with pytest.raises(error):
                lay_out(tensors)
        with pytest.raises(error):
            lay_out([torch.ones(3), Signaling()])
    finally:
        signal.signal(signal.SIGINT, former)
