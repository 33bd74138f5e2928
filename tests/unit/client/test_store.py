"""Messages through the key-value store of torch.distributed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fpfs.client import store as stores
from fpfs.client.store import Store


@pytest.fixture(params=["tcp", "file"])
def raw(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    """One that takes many keys a request, and one that takes them one by one."""
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return dist.FileStore(str(tmp_path / "store"), -1)


@pytest.fixture
def store(raw: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(stores, "VALUE_BYTES_MAX", 100)
    monkeypatch.setattr(stores, "BATCH_BYTES_MAX", 250)
    monkeypatch.setattr(stores, "BATCH_KEYS_MAX", 3)
    opened = Store(raw, prefix="test", timeout_s=30)
    opened.open()
    yield opened
    opened.close()


def test_messages_of_any_size_are_read_as_they_were_put(store: Store, raw: dist.Store) -> None:
    sizes = [0, 1, 99, 100, 101, 200, 950, 3, 100]
    messages = {f"message {size}.{n}": os.urandom(size) for n, size in enumerate(sizes)}
    keys_before = raw.num_keys()
    store.put(messages)
    backwards = list(reversed(messages))
    assert store.read(backwards) == [messages[key] for key in backwards]
    assert store.read([]) == []
    assert store.check(list(messages))
    store.remove(backwards)
    assert store.those_there(backwards) == [False] * len(sizes)
    # Of none is a part left.
    assert raw.num_keys() == keys_before


def test_a_shorter_message_replaces_a_longer_one_that_was_removed(store: Store) -> None:
    for size in (950, 5, 300):
        message = os.urandom(size)
        store.remove(["message", "and none"])
        store.put({"message": message})
        assert store.read(["message"]) == [message]


def test_many_keys_are_asked_for_at_once(store: Store) -> None:
    for number in range(0, 8, 2):
        store.add(f"counter {number}", number + 1)
        store.set(f"value {number}", str(number))
    assert store.numbers([f"counter {number}" for number in range(8)]) == [1, 0, 3, 0, 5, 0, 7, 0]
    there = store.those_there([f"value {number}" for number in range(8)])
    assert there == list(itertools.islice(itertools.cycle([True, False]), 8))
    values = store.get_all([f"value {number}" for number in range(0, 8, 2)])
    assert values == [b"0", b"2", b"4", b"6"]
    assert store.find("value 1") is None
    assert store.find("value 2") == b"2"
