"""The key-value store of torch.distributed, for which nobody waits longer than a limit.

Messages have any size, and those of many ranks are one call.

A TCPStore waits for an answer for as long as TCP does, which is a quarter of an hour when a link is
cut, and its own timeouts do not change that. So a thread makes the calls, and whoever waits for it
gives up. Where there can be no thread, a rank says so itself, for as long as TCP waits.

Concurrency: calls may come from several threads; they are made one after the other, as a TCPStore
does itself.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

VALUE_BYTES_MAX = 4 * 1024 * 1024
"""TCPStore refuses values above 8 MiB."""
BATCH_BYTES_MAX = 1024 * 1024
"""Of one request of several values: some of 16 MiB take 10 s, and its values one by one 0.04."""
BATCH_KEYS_MAX = 10_000

_NOTHING = "nothing"
"""What no key has as its value."""


class Store:
    """A store, from `open` to `close`. Each call raises DistError when the store has gone.

    prefix: of all keys. timeout_s: how long an answer is waited for; whoever has waited so long
    once does not wait again. beat: called about every `beat_s` by the thread, which alone may use
    what it is given.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        prefix: str,
        timeout_s: float,
        beat: Callable[[dist.Store], object] = lambda _: None,
        beat_s: float = 3600.0,
    ) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._timeout_s = timeout_s
        self._beat, self._beat_s = beat, beat_s
        self._gone = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._has_thread = True
        # A thread that waits for TCP must not keep the process from ending.
        self._thread = threading.Thread(target=self._make_calls, name="fpfs-store", daemon=True)

    def open(self) -> None:
        """Have the thread make calls. RuntimeError: there can be none, and whoever calls makes
        them, for as long as TCP waits.
        """
        try:
            self._thread.start()
        except RuntimeError:
            self._has_thread = False
            raise

    def close(self) -> None:
        """End the thread; it is left alone if the store has gone."""
        self._calls.put(None)
        if self._has_thread and not self._gone:
            self._thread.join(self._timeout_s)

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._call(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: bytes) -> None:
        """Give a key a value, unless it has one."""
        self._call(lambda: self._store.compare_set(key, "", value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return bytes(self._call(lambda: self._store.get(key)))

    def find(self, key: str) -> bytes | None:
        """Return the value of a key, if it is there, which others may delete meanwhile."""
        # `get` would wait for a key that was deleted since `check` saw it.
        found = bytes(self._call(lambda: self._store.compare_set(key, _NOTHING, _NOTHING)))
        return None if found == _NOTHING.encode() else found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._call(lambda: self._store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Add to a key's number, which is 0 until then; return the sum."""
        return int(self._call(lambda: self._store.add(key, amount)))

    def delete_key(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._call(lambda: self._store.delete_key(key))

    def those_there(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there."""
        return list(self._call(lambda: [self._store.check([key]) for key in keys]))

    def numbers(self, keys: Sequence[str]) -> list[int]:
        """Return what `add` has added up for each key."""
        return list(self._call(lambda: [self._store.add(key, 0) for key in keys]))

    def put(self, messages: Mapping[str, bytes]) -> None:
        """Put messages under their keys, which are there when the messages are."""
        self._call(lambda: self._put(messages))

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the messages of keys that are there."""
        return list(self._call(lambda: self._read(keys)))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are there."""
        return list(self._call(lambda: self._get_all(keys)))

    def remove(self, keys: Sequence[str]) -> None:
        """Remove messages, of those that are there."""

        def remove() -> None:
            for key in keys:
                if self._store.check([key]):
                    for name in [*_names_of_rest(key, self._store.get(key)), key]:
                        self._store.delete_key(name)

        self._call(remove)

    def _put(self, messages: Mapping[str, bytes]) -> None:
        values = dict(value for key, message in messages.items() for value in _cut(key, message))
        for batch in _batches(values):
            if len(batch) > 1 and self._store.has_extended_api():
                self._store.multi_set(list(batch), list(batch.values()))
            else:
                for key, value in batch.items():
                    self._store.set(key, value)

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        found = []
        for key, first in zip(keys, self._get_all(keys), strict=True):
            rest = self._get_all(_names_of_rest(key, first))
            found.append(b"".join([first[_COUNT_BYTES:], *(each[_COUNT_BYTES:] for each in rest)]))
        return found

    def _get_all(self, keys: Sequence[str]) -> list[bytes]:
        found: list[bytes] = []
        count = 1
        while len(found) < len(keys):
            batch = list(keys[len(found) : len(found) + count])
            if len(batch) > 1 and self._store.has_extended_api():
                values = list(map(bytes, self._store.multi_get(batch)))
            else:
                values = [bytes(self._store.get(key)) for key in batch]
            found += values
            # Those of one call are about as large as each other.
            largest = max(map(len, values))
            count = max(1, min(BATCH_BYTES_MAX // max(1, largest), BATCH_KEYS_MAX))
        return found

    def _call(self, function: Callable[[], Any]) -> Any:
        call = _Call(function)
        if not self._gone:
            if self._has_thread:
                self._calls.put(call)
            else:
                call.make()
            if call.is_done.acquire(timeout=self._timeout_s):
                return call.outcome()
            self._gone = True
        raise dist.DistNetworkError(f"it has not answered for {self._timeout_s:.0f} s")

    def _make_calls(self) -> None:
        beat_s = time.monotonic() + self._beat_s
        while True:
            try:
                call = self._calls.get(timeout=max(0.0, beat_s - time.monotonic()))
            except queue.Empty:
                # Who calls next finds out that the store has gone.
                with contextlib.suppress(dist.DistError):
                    self._beat(self._store)
                beat_s = time.monotonic() + self._beat_s
            else:
                if call is None:
                    return
                call.make()


_COUNT_BYTES = 4
"""Of each value of a message: how many it has."""


def _cut(key: str, message: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a message's keys and values; the last one is the key that is waited for."""
    starts = range(0, len(message), VALUE_BYTES_MAX) or range(1)
    count = len(starts).to_bytes(_COUNT_BYTES, "little")
    for number in reversed(range(len(starts))):
        name = key if number == 0 else f"{key}/{number}"
        yield name, count + message[starts[number] : starts[number] + VALUE_BYTES_MAX]


def _names_of_rest(key: str, first: bytes) -> list[str]:
    return [
        f"{key}/{number}" for number in range(1, int.from_bytes(first[:_COUNT_BYTES], "little"))
    ]


def _batches(values: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    batch: dict[str, bytes] = {}
    size = 0
    for key, value in values.items():
        if batch and (size + len(value) > BATCH_BYTES_MAX or len(batch) == BATCH_KEYS_MAX):
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += len(value)
    if batch:
        yield batch


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._returned: Any = None
        self._raised: BaseException | None = None
        # A Future costs several times as much, and most calls take 25 us.
        self.is_done = threading.Lock()
        self.is_done.acquire()

    def make(self) -> None:
        try:
            self._returned = self._function()
        except BaseException as error:  # noqa: BLE001 it is the caller's
            self._raised = error
        self.is_done.release()

    def outcome(self) -> Any:
        """Return what the function has returned, or raise what it has raised."""
        raised, self._raised = self._raised, None
        try:
            if raised is not None:
                raise raised
        finally:
            del raised  # it has this frame
        return self._returned


__all__ = ["Store"]
