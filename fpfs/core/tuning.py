"""Finding good placement settings by measuring: chunk size, depth and width.

`climb` goes along one axis after the other, as long as that makes writing faster: width first,
since it matters most, then depth and chunk size. It measures a few settings out of all, which
`sweep` does.

Invariants:
  * A setting is measured once.
  * Of settings that are alike, the one that restricts least wins: more devices, which loads and
    other writers gain by, more depth, a chunk closer to the default.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fpfs.core.policy import CHUNK_BYTES_DEFAULT

ALIKE = 0.02
"""Rates that differ by less than this part are alike: so far apart are two runs of one setting."""

CHUNKS_BYTES = tuple(128 * 1024 * 2**power for power in range(8))
"""128 KiB to 16 MiB."""


class Setting(NamedTuple):
    """What is tried. `width` is in devices, `depth` in chunks on their way to each of them."""

    chunk_bytes: int
    depth: int
    width: int


class Measured(NamedTuple):
    """A setting, and the bytes that it wrote durably in a second."""

    setting: Setting
    bytes_per_s: float


class Space(NamedTuple):
    """The values of each axis, in rising order."""

    chunks_bytes: Sequence[int]
    depths: Sequence[int]
    widths: Sequence[int]

    def all(self) -> Iterator[Setting]:
        """Yield every setting."""
        for each in itertools.product(self.chunks_bytes, self.depths, self.widths):
            yield Setting(*each)

    @property
    def start(self) -> Setting:
        """The setting that needs no tuning on most machines: all there is, and default chunks."""
        chunk_bytes = min(self.chunks_bytes, key=lambda size: abs(size - CHUNK_BYTES_DEFAULT))
        return Setting(chunk_bytes, self.depths[-1], self.widths[-1])


class BudgetSpent(Exception):
    """There are no bytes, or no time, for another measurement."""


Measure = Callable[[Setting], float]
"""Returns the bytes that a setting writes durably in a second. Raises `BudgetSpent`."""


def space_of(*, slot_bytes: int, depth: int, device_count: int) -> Space:
    """Return what can be tried on a mount."""
    chunks = [size for size in CHUNKS_BYTES if size <= slot_bytes or size % slot_bytes == 0]
    return Space(chunks, _powers_up_to(depth), _powers_up_to(device_count))


def _powers_up_to(most: int) -> list[int]:
    """Return the powers of two below a number, and that."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


class Climb:
    """A search that goes uphill along each axis."""

    def __init__(self, space: Space, measure: Measure) -> None:
        """Begin at the start of the space when `run` is called."""
        self._space = space
        self._measure = measure
        self._rates: dict[Setting, float] = {}

    @property
    def measured(self) -> list[Measured]:
        """What was measured, in that order."""
        return [Measured(setting, rate) for setting, rate in self._rates.items()]

    def run(self) -> Setting:
        """Return the setting to take. Raises `BudgetSpent` when not even the first was measured."""
        best = self._space.start
        self._rate(best)
        try:
            best = self._along(best, "width", self._space.widths, ways=(-1,))
            best = self._along(best, "depth", self._space.depths, ways=(-1,))
            best = self._along(best, "chunk_bytes", self._space.chunks_bytes, ways=(2, -2))
        except BudgetSpent:
            best = max(self._rates, key=self._rates.__getitem__)
        return best

    def _rate(self, setting: Setting) -> float:
        if setting not in self._rates:
            self._rates[setting] = self._measure(setting)
        return self._rates[setting]

    def _along(
        self, best: Setting, axis: str, values: Sequence[int], *, ways: Sequence[int]
    ) -> Setting:
        """Go along an axis one of the ways, so many values at a time, as long as it is faster."""
        start = values.index(getattr(best, axis))
        for way in ways:
            index = start + way
            while 0 <= index < len(values):
                tried = best._replace(**{axis: values[index]})
                if self._rate(tried) <= self._rate(best) * (1 + ALIKE):
                    break
                best = tried
                index += way
            if getattr(best, axis) != values[start]:
                break
        return best


def sweep(space: Space, measure: Measure) -> Iterator[Measured]:
    """Measure every setting, as far as there are bytes and time."""
    for setting in space.all():
        try:
            yield Measured(setting, measure(setting))
        except BudgetSpent:
            return
