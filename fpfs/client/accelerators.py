"""Memory of accelerators: bytes are copied from and to it beside what a device computes.

An accelerator does what is queued on one of its streams in order, and what is on several of them
beside each other. What training queues is on the current stream. Copies are on a stream of their
own, so what is computed meanwhile does not wait for them; they wait for what was queued when the
state was to be saved (`Moment`).

A device that torch knows no streams of is copied from at once.

Concurrency: a `Copies` is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

import torch

from fpfs.core.transfers import count_moved
from fpfs.core.units import format_size

logger = logging.getLogger(__name__)

_TORCH_KNOWS_STREAMS = hasattr(torch.Stream, "__enter__") and hasattr(
    getattr(torch, "accelerator", None), "set_device_index"
)
"""For any accelerator. torch 2.6 does not."""

_PORTABLE = 1
"""To cudaHostRegister: for all devices."""

_MARK_BYTES = 256 * 1024 * 1024
"""After so many that were begun it is asked whether they are copied."""

POLL_S = 0.0002
"""How often it is asked whether copies are done: torch's own wait cannot be interrupted."""


class Moment(NamedTuple):
    """What devices still had to do at one time, by events on their streams."""

    events: dict[torch.device, torch.Event]
    current_device: int | None
    """The current one then, if there are streams."""


def now(devices: Iterable[torch.device]) -> Moment:
    """This moment, of the streams that are this thread's current ones."""
    found = {}
    for device in set(devices):
        if has_streams(device):
            found[device] = torch.accelerator.current_stream(device).record_event()
    return Moment(found, torch.accelerator.current_device_index() if found else None)


def has_streams(device: torch.device) -> bool:
    """Whether copies can be made beside what the device computes."""
    if device.type in ("cpu", "mps") or not _TORCH_KNOWS_STREAMS:
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


@functools.cache
def _stream_of(device: torch.device) -> torch.Stream:
    """A stream for copies: one for each device, for as long as the process lives.

    Threads that are the first at the same time get several.
    """
    return torch.Stream(device=device)


def free_bytes(device: torch.device) -> int:
    """How much of its memory nobody has taken, nor keeps for later; 0: that cannot be told."""
    get = getattr(torch.accelerator, "get_memory_info", None)  # not before torch 2.9
    try:
        return 0 if get is None else int(get(device)[0])
    except RuntimeError:
        return 0


def memory_for(size: int, devices: Iterable[torch.device]) -> torch.Tensor:
    """Memory for copies from and to these devices, of type uint8: pinned, if that is of use.

    torch keeps what is pinned, in sizes that are powers of two, for whoever asks next.
    """
    with torch.inference_mode(mode=False):
        if any(map(has_streams, devices)):
            try:
                return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                _say_slow(size, str(error).partition("\n")[0])
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _say_slow(size: int, why: str) -> None:
    logger.warning("%s cannot be pinned (%s): copies from devices are slow", format_size(size), why)


class Copies:
    """Copies between devices and the processor's memory.

    after: what they wait for.
    """

    def __init__(self, after: Moment) -> None:
        self._after = after
        self._streams = dict[torch.device, torch.Stream]()
        """On which copies were begun."""
        self._tensors = list[torch.Tensor]()
        """What is copied, from and to, which must stay till then."""
        self._marks = deque[tuple[torch.Event, int]]()
        """On streams, after how many bytes each, which are not counted yet."""
        self._unmarked_bytes = 0

    def begin(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy to a tensor of the same shape; it is there after `wait`."""
        device = to.device if source.device.type == "cpu" else source.device
        with torch.no_grad():
            if not has_streams(device):
                to.copy_(source)
                return
            self._be_where_it_was_begun()
            if device not in self._streams:
                stream = _stream_of(device)
                if device in self._after.events:
                    stream.wait_event(self._after.events[device])
                self._streams[device] = stream
            self._tensors += (to, source)
            with self._streams[device]:
                to.copy_(source, non_blocking=True)
            self._unmarked_bytes += source.nbytes
            if self._unmarked_bytes >= _MARK_BYTES:
                event = self._streams[device].record_event()
                self._marks.append((event, self._unmarked_bytes))
                self._unmarked_bytes = 0
                # Memory that is not pinned has them by now.
                self._count_marked()

    def _be_where_it_was_begun(self) -> None:
        # A new thread's current device is the first one, which may be another rank's: to touch it
        # would take memory of it.
        if self._after.current_device is not None:
            torch.accelerator.set_device_index(self._after.current_device)

    def hold_back(self, devices: Container[torch.device]) -> None:
        """Have current streams of these do what is queued from now on after what was begun."""
        for device, stream in self._streams.items():
            if device in devices:
                torch.accelerator.current_stream(device).wait_event(stream.record_event())

    def wait(self, *, check: Callable[[], object] = lambda: None) -> None:
        """Return when all that was begun is copied; what `check` raises ends that, too."""
        self._be_where_it_was_begun()
        for stream in list(self._streams.values()):
            done = stream.record_event()
            while not done.query():
                self._count_marked()
                check()
                time.sleep(POLL_S)
        self._count_marked()
        count_moved(self._unmarked_bytes)
        self._unmarked_bytes = 0
        self._tensors.clear()

    def _count_marked(self) -> None:
        """Let who waits for the copies learn that they move."""
        while self._marks and self._marks[0][0].query():
            _, count = self._marks.popleft()
            count_moved(count)


def pin(address: int, size: int, device: torch.device) -> Callable[[], object] | None:
    """Have devices copy to the processor's memory at an address by themselves.

    Returns what ends that, to be called before the memory goes. None: the kind of device cannot, or
    not so much; its copies are made one after the other then, while they are waited for.
    """
    runtime = getattr(torch.get_device_module(device), "cudart", None)
    if runtime is None:
        return None
    found = runtime()
    failure = int(found.cudaHostRegister(address, size, _PORTABLE))
    if failure != 0:
        _say_slow(size, f"CUDA's error {failure}")
        # CUDA tells of it again when the next kernel is started.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        return None
    return functools.partial(found.cudaHostUnregister, address)


__all__ = ["Copies", "Moment", "free_bytes", "has_streams", "memory_for", "now", "pin"]
