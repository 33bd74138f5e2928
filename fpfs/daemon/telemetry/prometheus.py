"""What Prometheus is told: the figures of one moment, as metric families.

Names follow Prometheus' conventions: base units (seconds, bytes), `_total` for counters. Every
metric has the label `mountpoint`. docs/metrics.md lists them all; a test compares it.

Concurrency: a `Collector` holds figures of one moment and may be used in any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from fpfs.core.statistics import (
    DURATION_BOUNDS_NS,
    DeviceStatistics,
    Durations,
    EngineStatistics,
)


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A device; without `statistics` it is missing. Sizes are those of its filesystem."""

    number: int
    path: str
    takes_chunks: bool
    statistics: DeviceStatistics | None
    bytes_free: int
    bytes_total: int

    @property
    def is_up(self) -> bool:
        """Whether new chunks go there."""
        return self.takes_chunks and self.statistics is not None and not self.statistics.failed


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A server's figures of one moment."""

    mountpoint: str
    version: str
    filesystem_id: str
    restarts: int
    started_unix_s: float
    engine: EngineStatistics
    devices: Sequence[DeviceFigures]
    ack_to_durable: Durations
    files_written: int
    bytes_pending: int
    oldest_pending_s: float
    versions_pending: int
    versions_committed: int
    transactions: int
    versions_failed: int
    catalog_flushes: int
    catalog_copies: int


def render(figures: Figures, *, accept: str) -> tuple[bytes, str]:
    """The text that a scrape gets, and its content type, in the format that it accepts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(figures))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class Collector:
    """A collector for prometheus-client."""

    def __init__(self, figures: Figures) -> None:
        """Tell of these figures."""
        self._figures = figures
        self._mountpoint = _text(figures.mountpoint)

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from self._server()
        yield from self._writes()
        yield from self._commits()
        yield from self._staging()
        yield from self._devices()

    def _server(self) -> Iterator[Metric]:
        figures = self._figures
        info = InfoMetricFamily("fpfs", "The program and the filesystem.", labels=["mountpoint"])
        info.add_metric(
            [self._mountpoint],
            {"version": figures.version, "filesystem": figures.filesystem_id},
        )
        yield info
        yield self._gauge(
            "start_time_seconds", "When the mount was made, since 1970.", figures.started_unix_s
        )
        yield self._counter("server_restarts", "Servers that took over.", figures.restarts)

    def _writes(self) -> Iterator[Metric]:
        channel = self._figures.engine.channel
        yield self._histogram(
            "write_to_ack_seconds",
            "From a write's receipt to its answer, waits for staging included.",
            channel.write_to_ack,
        )
        yield self._counter("writes", "Write requests received.", channel.writes)
        yield self._counter("written_bytes", "Bytes of these.", channel.write_bytes)
        yield self._counter(
            "writes_in_place",
            "Writes that the kernel's copy put where they belong.",
            channel.writes_in_place,
        )
        yield self._counter(
            "writes_parked", "Writes that had to wait for staging or space.", channel.writes_parked
        )
        yield self._gauge("writes_waiting", "Writes that wait now.", channel.writes_waiting)
        yield self._counter("reads", "Read requests received.", channel.reads)
        yield self._counter("read_bytes", "Bytes they were answered with.", channel.read_bytes)
        yield self._counter("relayed_requests", "Requests that Python answers.", channel.relayed)
        yield self._gauge("open_handles", "Open files.", channel.handles)
        yield self._gauge(
            "files_written", "Files that are open for writing.", self._figures.files_written
        )

    def _commits(self) -> Iterator[Metric]:
        figures = self._figures
        yield self._histogram(
            "ack_to_durable_seconds",
            "From the acknowledgement of a version's oldest byte until it is durable.",
            figures.ack_to_durable,
        )
        yield self._gauge(
            "pending_bytes", "Bytes acknowledged and in no version yet.", figures.bytes_pending
        )
        yield self._gauge(
            "oldest_pending_seconds",
            "Since the oldest byte that is not durable was acknowledged; 0 if all are.",
            figures.oldest_pending_s,
        )
        yield self._gauge(
            "versions_pending", "Closed versions that are not current.", figures.versions_pending
        )
        yield self._counter(
            "versions_committed", "Versions made current.", figures.versions_committed
        )
        yield self._counter("commit_transactions", "Transactions of these.", figures.transactions)
        yield self._gauge(
            "versions_failed",
            "Files whose last version could not be kept.",
            figures.versions_failed,
        )
        yield self._counter(
            "catalog_flushes", "Flushes of the catalog's log.", figures.catalog_flushes
        )
        yield self._gauge(
            "catalog_copies", "Copies of the catalog in service.", figures.catalog_copies
        )

    def _staging(self) -> Iterator[Metric]:
        staging = self._figures.engine.staging
        yield self._gauge("staging_used_bytes", "Staging memory in use.", staging.bytes_used)
        yield self._gauge("staging_size_bytes", "Staging memory.", staging.bytes_total)

    def _devices(self) -> Iterator[Metric]:
        devices = self._figures.devices
        labels = ["mountpoint", "device", "path"]
        up = GaugeMetricFamily("fpfs_device_up", "1 if new chunks go there.", labels=labels)
        for device in devices:
            up.add_metric(
                [self._mountpoint, str(device.number), _text(device.path)], int(device.is_up)
            )
        yield up
        present = [(d, d.statistics) for d in devices if d.statistics is not None]
        for name, about, value in _DEVICE_COUNTERS:
            counter = CounterMetricFamily(f"fpfs_device_{name}", about, labels=_DEVICE_LABELS)
            for device, statistics in present:
                counter.add_metric(self._labels(device), getattr(statistics, value))
            yield counter
        for name, about, value in _DEVICE_GAUGES:
            gauge = GaugeMetricFamily(f"fpfs_device_{name}", about, labels=_DEVICE_LABELS)
            for device, statistics in present:
                gauge.add_metric(self._labels(device), getattr(statistics, value))
            yield gauge
        for name, about, value in _DEVICE_SIZES:
            gauge = GaugeMetricFamily(f"fpfs_device_{name}", about, labels=_DEVICE_LABELS)
            for device, _ in present:
                gauge.add_metric(self._labels(device), getattr(device, value))
            yield gauge
        for name, about, value in _DEVICE_HISTOGRAMS:
            family = HistogramMetricFamily(f"fpfs_device_{name}", about, labels=_DEVICE_LABELS)
            for device, statistics in present:
                durations = getattr(statistics, value)
                family.add_metric(self._labels(device), *_buckets(durations))
            yield family

    def _labels(self, device: DeviceFigures) -> list[str]:
        return [self._mountpoint, str(device.number)]

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"fpfs_{name}", about, labels=["mountpoint"])
        family.add_metric([self._mountpoint], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(f"fpfs_{name}", about, labels=["mountpoint"])
        family.add_metric([self._mountpoint], value)
        return family

    def _histogram(self, name: str, about: str, durations: Durations) -> Metric:
        family = HistogramMetricFamily(f"fpfs_{name}", about, labels=["mountpoint"])
        family.add_metric([self._mountpoint], *_buckets(durations))
        return family


_DEVICE_LABELS = ["mountpoint", "device"]
_DEVICE_COUNTERS = (
    ("written_bytes", "Bytes written.", "bytes_written"),
    ("read_bytes", "Bytes read.", "bytes_read"),
    ("errors", "Requests that failed.", "errors"),
    ("read_errors", "Reads of contents that failed.", "read_errors"),
    ("checksum_errors", "Blocks met that are not what was written.", "checksum_errors"),
)
_DEVICE_GAUGES = (
    ("requests_in_flight", "Requests that the kernel works on.", "in_flight"),
    ("requests_queued", "Requests that wait for that.", "queued"),
    ("kept_bytes", "Of removed files, kept for new ones; free all the same.", "kept_bytes"),
)
_DEVICE_SIZES = (
    ("filesystem_free_bytes", "Free space of the device's filesystem.", "bytes_free"),
    ("filesystem_size_bytes", "Size of the device's filesystem.", "bytes_total"),
)
_DEVICE_HISTOGRAMS = (
    ("write_duration_seconds", "How long the device took for writes.", "write_latency"),
    ("read_duration_seconds", "How long the device took for reads.", "read_latency"),
    ("flush_duration_seconds", "How long the device took for flushes.", "flush_latency"),
)
"""Name, help, and the field of `DeviceStatistics` or `DeviceFigures`."""


def _buckets(durations: Durations) -> tuple[list[tuple[str, float]], float]:
    """Cumulated counts by upper bound in seconds, and the sum."""
    bounds = [*(repr(bound / 1e9) for bound in DURATION_BOUNDS_NS), "+Inf"]
    counts = itertools.accumulate(durations.counts)
    return list(zip(bounds, counts, strict=True)), durations.sum_ns / 1e9


def _text(path: str) -> str:
    """A path as a label; bytes that are no text are shown as escapes."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")
