"""Where storages lie in a file, and in which order torch.load asks for them."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fpfs.client.archive import find_storages
from tests.support.states import odd_state

# torch's own, of types that it is not done with.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def stored(state: Any) -> io.BytesIO:
    """A file of torch.save."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer


def test_each_storage_once_and_none_of_no_bytes() -> None:
    base = torch.arange(100, dtype=torch.uint8)
    file = stored([torch.zeros(0), base, torch.ones(2), base[5:]])
    found = find_storages(file)
    assert found is not None
    assert [each.bytes for each in found] == [100, 8]
    content = file.getvalue()
    assert content[found[0].offset :][:100] == bytes(range(100))


def test_the_order_is_that_of_use_and_not_of_names() -> None:
    """Who writes such files by other means may number storages as they like."""
    buffer = stored([torch.zeros(3), torch.ones(5)])
    swapped = io.BytesIO()
    with zipfile.ZipFile(buffer) as archive, zipfile.ZipFile(swapped, "w") as made:
        for name in archive.namelist():
            content = archive.read(name)
            if name.endswith("data.pkl"):
                zero, one = b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"
                assert (content.count(zero), content.count(one)) == (1, 1)
                content = content.replace(zero, b"?").replace(one, zero).replace(b"?", one)
            number = {"0": "1", "1": "0"}.get(name.rpartition("data/")[2])
            made.writestr(name if number is None else f"{name[:-1]}{number}", content)
    found = find_storages(swapped)
    assert found is not None
    assert [each.bytes for each in found] == [12, 20]


def test_nothing_that_is_named_is_called(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()

    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.unlink, (victim,))

    assert find_storages(stored([Bomb(), torch.zeros(2)])) is not None
    assert victim.exists()


def test_all_that_is_saved_can_be_gone_through() -> None:
    state = odd_state()
    found = find_storages(stored(state))
    assert found is not None
    assert len(found) > 30


@pytest.mark.parametrize("content", [b"", b"text", pickle.dumps({"no": "archive"})])
def test_no_archive(content: bytes) -> None:
    assert find_storages(io.BytesIO(content)) is None


def replaced(name: str, content: bytes | None) -> io.BytesIO:
    """A torch.save file, of which a record is another or is not there."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(stored([torch.zeros(3)])) as archive,
        zipfile.ZipFile(made, "w") as changed,
    ):
        for each in archive.namelist():
            if not each.endswith(f"/{name}"):
                changed.writestr(each, archive.read(each))
            elif content is not None:
                changed.writestr(each, content)
    return made


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("byteorder", b"big"),
        ("data.pkl", None),
        ("data.pkl", b"\x80\x02cut off"),
        ("data/0", None),
    ],
)
def test_not_as_torch_save_writes(name: str, content: bytes | None) -> None:
    assert find_storages(replaced(name, content)) is None
