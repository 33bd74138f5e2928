"""Metrics: what is exported is what the document says, and its server outlives its clients."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from prometheus_client.parser import text_string_to_metric_families

from fpfs.core.addresses import ListenAddress, parse_listen_address
from fpfs.core.refusal import Refused
from fpfs.core.statistics import (
    ChannelStatistics,
    DeviceStatistics,
    DurationHistogram,
    Durations,
    EngineStatistics,
    StagingStatistics,
)
from fpfs.daemon.telemetry import http
from fpfs.daemon.telemetry.http import (
    CONNECTIONS_MAX,
    HEADER_BYTES_MAX,
    MetricsServer,
    listen,
    listen_or_refuse,
)
from fpfs.daemon.telemetry.prometheus import DeviceFigures, Figures, render

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(fpfs_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


def durations(*each_ns: int) -> Durations:
    """What a histogram has counted."""
    histogram = DurationHistogram()
    for duration_ns in each_ns:
        histogram.record(duration_ns)
    return histogram.read()


def device_figures(
    number: int, path: str, statistics: DeviceStatistics | None, *, takes_chunks: bool = True
) -> DeviceFigures:
    return DeviceFigures(
        number=number,
        path=path,
        takes_chunks=takes_chunks,
        statistics=statistics,
        bytes_free=1,
        bytes_total=2,
    )


def figures(*, mountpoint: str = "/ckpt") -> Figures:
    """Figures of a mount with one device, one that is missing, and one that is to go."""
    device = DeviceStatistics(
        bytes_written=100,
        bytes_read=200,
        in_flight=3,
        in_flight_max=5,
        queued=4,
        errors=6,
        kept_bytes=12,
        checksum_errors=7,
        read_errors=8,
        write_latency=durations(1000, 1001, 10**12),
        read_latency=durations(),
        flush_latency=durations(5),
        backend="io_uring",
        direct=True,
        buffers_registered=True,
        failed=False,
    )
    return Figures(
        mountpoint=mountpoint,
        version="1",
        filesystem_id="f",
        restarts=1,
        started_unix_s=1.5,
        engine=EngineStatistics(
            staging=StagingStatistics(bytes_used=9, bytes_total=10),
            devices={0: device},
            channel=ChannelStatistics(writes=11, write_to_ack=durations(4000)),
        ),
        devices=[
            device_figures(0, "/a", device),
            device_figures(1, "/b", None),
            device_figures(2, "/c", device, takes_chunks=False),
        ],
        ack_to_durable=durations(10**9),
        files_written=12,
        bytes_pending=13,
        oldest_pending_s=14.5,
        versions_pending=15,
        versions_committed=16,
        transactions=17,
        versions_failed=18,
        catalog_flushes=19,
        catalog_copies=2,
    )


def exported() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of each metric, by its name as the document has it."""
    text, _ = render(figures(), accept="application/openmetrics-text;version=1.0.0")
    from prometheus_client.openmetrics import parser

    found = {}
    for family in parser.text_string_to_metric_families(text.decode()):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {label for sample in family.samples for label in sample.labels}
        found[name] = (family.type, labels - {"mountpoint", "le"})
        assert family.documentation
    return found


def test_the_document_lists_what_is_exported() -> None:
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in ROW.findall(DOCUMENT.read_text())
    }
    assert documented == exported()


def test_values_and_buckets() -> None:
    text, content_type = render(figures(mountpoint="/a\udcff"), accept="")
    assert content_type.startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, sample.labels.get("device", ""), sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    written = "fpfs_device_write_duration_seconds"
    assert samples[f"{written}_bucket", "0", "1e-06"] == 1
    assert samples[f"{written}_bucket", "0", "2e-06"] == 2
    assert samples[f"{written}_bucket", "0", "67.108864"] == 2
    assert samples[f"{written}_bucket", "0", "+Inf"] == 3
    assert samples[f"{written}_count", "0", ""] == 3
    assert samples[f"{written}_sum", "0", ""] == pytest.approx(1000.000002001)
    assert samples["fpfs_device_up", "0", ""] == 1
    assert samples["fpfs_device_up", "1", ""] == samples["fpfs_device_up", "2", ""] == 0
    assert ("fpfs_device_errors_total", "1", "") not in samples
    assert samples["fpfs_device_requests_queued", "0", ""] == 4
    assert samples["fpfs_oldest_pending_seconds", "", ""] == 14.5
    assert samples["fpfs_writes_total", "", ""] == 11
    assert b'mountpoint="/a\\\\xff"' in text


def test_queries_of_the_document_name_metrics() -> None:
    text = DOCUMENT.read_text()
    names = set(re.findall(r"\bfpfs_\w+", text))
    known = {variant for name in exported() for variant in (name, f"{name}_bucket")}
    assert names <= known


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ListenAddress("127.0.0.1", 9464)),
        ("0.0.0.0:1", ListenAddress("0.0.0.0", 1)),
        ("[::1]:65535", ListenAddress("::1", 65535)),
        ("unix:/run/m", ListenAddress(path="/run/m")),
        (f"unix:/{'x' * 106}", ListenAddress(path=f"/{'x' * 106}")),
    ],
)
def test_addresses(text: str, address: ListenAddress) -> None:
    assert parse_listen_address(text, name="metrics") == address


@pytest.mark.parametrize(
    "text",
    ["", "9464", ":9464", "localhost:9464", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536",
     "127.0.0.1:+1", "::1:9464", "[127.0.0.1]:1", "[::1]", "[fe80::1%eth0]:1", "unix:", "unix:m",
     f"unix:/{'x' * 107}", "127.0.0.1:٣"],
)  # fmt: skip
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(Refused, match="metrics=") as refused:
        parse_listen_address(text, name="metrics")
    assert "\n" not in str(refused.value)


class Served:
    """A server on a port that was free, with a count of how often it was asked for figures."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.rendered = 0
        self.fails = False

    async def render(self, accept: str) -> tuple[bytes, str]:
        self.rendered += 1
        if self.fails:
            raise ValueError("no figures")
        return b"figures", f"accepted/{len(accept)}"

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(*self.address)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    """Serve in the background."""
    address = ListenAddress("127.0.0.1", 0)
    listener = listen(address, open_to_others=False)
    made = Served(listener.getsockname())
    server = MetricsServer(address=address, open_to_others=False, render=made.render)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, listener)
        yield made
        nursery.cancel_scope.cancel()


async def all_of(stream: trio.SocketStream) -> bytes:
    """What comes until the server closes."""
    received = b""
    with contextlib.suppress(trio.BrokenResourceError):
        async for piece in stream:
            received += piece
    return received


async def scrape(served: Served, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n") -> bytes:
    """The whole answer to a request, whose connection ends with it."""
    async with await served.connect() as stream:
        await stream.send_all(request + b"Connection: close\r\n\r\n")
        return await all_of(stream)


@trio.testing.trio_test
async def test_a_scrape() -> None:
    async with serving() as served:
        answer = await scrape(served)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"content-type: accepted/0\r\n" in answer.lower()
        assert answer.endswith(b"\r\n\r\nfigures")
        assert (await scrape(served, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n")).startswith(
            b"HTTP/1.1 200 "
        )
        assert (await scrape(served, b"GET / HTTP/1.1\r\nHost: x\r\n")).startswith(b"HTTP/1.1 404 ")
        assert (await scrape(served, b"POST /metrics HTTP/1.1\r\nHost: x\r\n")).startswith(
            b"HTTP/1.1 405 "
        )


@trio.testing.trio_test
async def test_requests_follow_each_other_on_one_connection() -> None:
    async with serving() as served, await served.connect() as stream:
        for _ in range(3):
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            received = b""
            while not received.endswith(b"figures"):
                received += await stream.receive_some()
        assert served.rendered <= 3


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01 no http\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",  # no Host
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 2 * HEADER_BYTES_MAX + b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n" + b"z" * 999_999,
    ],
    ids=["noise", "short", "no host", "length", "headers", "body"],
)
@trio.testing.trio_test
async def test_what_is_no_request_is_refused_and_closed(request_: bytes) -> None:
    async with serving() as served:
        async with await served.connect() as stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(request_)
            answer = await all_of(stream)
        assert answer.startswith(b"HTTP/1.1 4") or len(request_) > 100_000
        assert (await scrape(served)).endswith(b"figures")


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=200), max_size=5), st.booleans())
def test_any_bytes_leave_it_serving(pieces: list[bytes], is_prefixed: bool) -> None:
    async def run() -> None:
        async with serving() as served:
            async with await served.connect() as stream:
                with contextlib.suppress(trio.BrokenResourceError):
                    if is_prefixed:
                        await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
                    for piece in pieces:
                        await stream.send_all(piece)
            assert (await scrape(served)).endswith(b"figures")

    trio.run(run)


@trio.testing.trio_test
async def test_clients_that_say_nothing_make_room_for_those_that_do() -> None:
    async with serving() as served, contextlib.AsyncExitStack() as stack:
        silent = [
            await stack.enter_async_context(await served.connect())
            for _ in range(CONNECTIONS_MAX + 20)
        ]
        assert (await scrape(served)).endswith(b"figures")
        # The first ones were ended.
        for stream in silent[:20]:
            assert await all_of(stream) == b""


def test_slow_clients_are_ended_in_time(autojump_clock: trio.testing.MockClock) -> None:
    """A byte now and then does not hold a connection for ever."""

    async def run() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        server = MetricsServer(
            address=ListenAddress(), open_to_others=False, render=Served(("", 0)).render
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.converse, theirs)
            began_s = trio.current_time()
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await ours.send_all(b"G")
                    await trio.sleep(1)
            assert trio.current_time() - began_s <= http.REQUEST_S + 1

    trio.run(run, clock=autojump_clock)


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


def test_figures_are_gathered_once_for_many() -> None:
    """Those of a moment ago are told again; later ones are gathered anew."""
    clock = trio.testing.MockClock()

    async def run() -> None:
        async with serving() as served:
            for moments in (1, 2):
                async with trio.open_nursery() as nursery:
                    for _ in range(30):
                        nursery.start_soon(scrape, served)
                assert served.rendered == moments
                clock.jump(2 * http.FRESH_S)

    trio.run(run, clock=clock)


@trio.testing.trio_test
async def test_figures_that_cannot_be_told(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        served.fails = True
        answer = await scrape(served)
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert "the metrics cannot be told" in caplog.text
        served.fails = False
        assert (await scrape(served)).endswith(b"figures")


def test_a_port_in_use_is_refused() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        text = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Refused, match=f"metrics cannot be served at {text}") as refused:
            listen_or_refuse(
                parse_listen_address(text, name="metrics"),
                asked="mount",
                text=text,
                open_to_others=False,
            )
    assert "Address already in use" in str(refused.value)


def test_a_unix_socket_replaces_only_what_nobody_listens_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    address = ListenAddress(path=str(path))
    left = listen(address, open_to_others=False)
    with pytest.raises(OSError, match="somebody listens there"):
        listen(address, open_to_others=False)
    left.close()
    with contextlib.closing(listen(address, open_to_others=False)):
        assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.write_text("a file of somebody's")
    with pytest.raises(FileExistsError):
        listen(address, open_to_others=True)
    assert path.read_text() == "a file of somebody's"
    assert os.listdir(tmp_path) == ["metrics.sock"]
    path.unlink()
    with contextlib.closing(listen(address, open_to_others=True)):
        assert path.stat().st_mode & 0o777 == 0o666
