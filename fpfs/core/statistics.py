"""Figures of a running engine, typed, and durations counted in the engine's buckets.

The engine counts without locks, so figures that are read together may be a request apart.

Concurrency: a `DurationHistogram` belongs to one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import msgspec

DURATION_BOUNDS_NS: tuple[int, ...] = tuple(1000 << index for index in range(27))
"""Upper bounds of the buckets that durations are counted in: 1 µs to 67 s, each twice the one
before. One more bucket has what took longer. As in native/src/base/duration_histogram.h."""

BUCKETS = len(DURATION_BOUNDS_NS) + 1


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """How long things took: how many fell into each bucket, and nanoseconds of all together."""

    counts: tuple[int, ...] = (0,) * BUCKETS
    sum_ns: int = 0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def since(self, earlier: Durations) -> Durations:
        """What came after `earlier` was read."""
        pairs = zip(self.counts, earlier.counts, strict=True)
        return Durations(
            counts=tuple(now - before for now, before in pairs),
            sum_ns=self.sum_ns - earlier.sum_ns,
        )


class DurationHistogram:
    """Counts durations, as the engine's own histograms do."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        self._counts = [0] * BUCKETS
        self._sum_ns = 0

    def record(self, duration_ns: int) -> None:
        """Count one."""
        duration_ns = max(0, duration_ns)
        self._counts[bisect_left(DURATION_BOUNDS_NS, duration_ns)] += 1
        self._sum_ns += duration_ns

    def read(self) -> Durations:
        """Return what was counted."""
        return Durations(counts=tuple(self._counts), sum_ns=self._sum_ns)


class StagingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The staging arena, in slots of `slot_bytes`.

    `bytes_used` are those with acknowledged bytes, and one kept ready.
    """

    slot_bytes: int = 0
    bytes_used: int = 0
    bytes_total: int = 0
    pinned: bool = False


class DeviceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One device, since the server started.

    `in_flight` are requests that the kernel works on, `queued` those that wait before that. The
    latencies are from there to completion, of transfers and flushes that failed, too; `errors` are
    requests of any kind that failed. `kept_bytes` are of removed objects that are kept for new
    bytes, and count as free.
    """

    bytes_written: int
    bytes_read: int
    in_flight: int
    in_flight_max: int
    queued: int
    errors: int
    kept_bytes: int
    checksum_errors: int
    read_errors: int
    write_latency: Durations
    read_latency: Durations
    flush_latency: Durations
    backend: str
    direct: bool
    buffers_registered: bool
    failed: bool


class ChannelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of the kernel, since the server started; zeros before it serves.

    `write_to_ack` is the time from a WRITE's receipt to its answer: of those that wait for staging
    (`writes_parked`, of which `writes_waiting` still do) or for durability (O_SYNC) with the wait,
    and without those that were refused.
    """

    writes: int = 0
    write_bytes: int = 0
    writes_in_place: int = 0
    writes_parked: int = 0
    writes_waiting: int = 0
    reads: int = 0
    read_bytes: int = 0
    reads_ahead: int = 0
    """Reads that were answered with what had been read ahead."""
    relayed: int = 0
    handles: int = 0
    write_to_ack: Durations = Durations()


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of an engine; `devices` by number."""

    staging: StagingStatistics = StagingStatistics()
    devices: Mapping[int, DeviceStatistics] = {}
    channel: ChannelStatistics = ChannelStatistics()

    @property
    def kept_bytes(self) -> Mapping[int, int]:
        """What each device keeps of removed objects."""
        return {number: device.kept_bytes for number, device in self.devices.items()}


class Unsaved(msgspec.Struct, frozen=True, kw_only=True):
    """What of an inode was acknowledged since it was loaded, and what of that is not committed.

    Bytes that are written twice count twice, but not among those that are in staging alone
    (`bytes_staged`). `oldest_ns` is when the oldest byte that is not committed was acknowledged, by
    ``time.monotonic_ns()``; 0 when there is none. What a server that died had acknowledged is as
    old as its successor.
    """

    bytes_acknowledged: int = 0
    bytes_uncommitted: int = 0
    bytes_staged: int = 0
    oldest_ns: int = 0
