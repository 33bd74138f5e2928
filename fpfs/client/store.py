"""The key-value store of torch.distributed, for which nobody waits longer than a limit.

A TCPStore waits for an answer for as long as TCP does, which is a quarter of an hour when a link is
cut, and its own timeouts do not change that. So a thread makes the calls, and whoever waits for it
gives up.

Concurrency: calls may come from several threads; they are made one after the other, as a TCPStore
does itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_NOTHING = "nothing"
"""What no key has as its value."""


class Store:
    """A store, from `open` to `close`. Each call raises DistError when the store has gone.

    prefix: of all keys. timeout_s: how long an answer is waited for; whoever has waited so long
    once does not wait again.
    """

    def __init__(self, store: dist.Store, *, prefix: str, timeout_s: float) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._timeout_s = timeout_s
        self._gone = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # A thread that waits for TCP must not keep the process from ending.
        self._thread = threading.Thread(target=self._make_calls, name="fpfs-store", daemon=True)

    def open(self) -> None:
        """Make calls possible."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; it is left alone if the store has gone."""
        self._calls.put(None)
        if not self._gone:
            self._thread.join()

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._call(lambda: self._store.set(key, value))

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

    def _call(self, function: Callable[[], Any]) -> Any:
        call = _Call(function)
        if not self._gone:
            self._calls.put(call)
            if call.is_done.acquire(timeout=self._timeout_s):
                return call.outcome()
            self._gone = True
        raise dist.DistNetworkError(f"it has not answered for {self._timeout_s:.0f} s")

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()


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
