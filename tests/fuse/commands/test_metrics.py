"""Metrics of a real mount, scraped by a real Prometheus, and by what is none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fpfs.core.engine import BLOCK_BYTES
from fpfs.testing.mounted import mounted
from tests.support.refusals import refusal
from tests.support.servers import kill

DEADLINE_S = 60
SIZE = 5_000_000

Samples = dict[tuple[str, str], float]
"""Values by the name of a sample and its device."""


def free_port() -> int:
    """A port that nobody listens on, of those that the kernel gives to no connection.

    Processes that run tests at the same time begin at different ones.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = 12_000 + 400 * (worker % 48)
    for port in range(first, first + 400):
        with (
            contextlib.suppress(OSError),
            contextlib.closing(socket.create_server(("127.0.0.1", port))),
        ):
            return port
    raise AssertionError(f"all ports from {first} on are in use")


def parsed(text: str) -> Samples:
    """What a scrape says; buckets are left out."""
    return {
        (sample.name, sample.labels.get("device", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
        return parsed(answer.read().decode())


def scrape_until(port: int, is_wanted: Callable[[Samples], bool]) -> Samples:
    """Scrape until the figures are those: they may be a moment old, or nobody listens yet."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(OSError):
            found = scrape(port)
            if is_wanted(found):
                return found
            assert time.monotonic() < deadline_s, found
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


class UnixConnection(HTTPConnection):
    """HTTP on a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=DEADLINE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def test_the_figures_of_a_save() -> None:
    port = free_port()
    with mounted(options=(f"metrics=127.0.0.1:{port}",)) as mount:
        before = scrape(port)
        assert before["fpfs_device_up", "0"] == before["fpfs_device_up", "1"] == 1
        content = os.urandom(SIZE)
        with open(mount.root / "file.pt", "wb") as stream:
            stream.write(content)
            stream.flush()
            written = scrape_until(port, lambda found: found["fpfs_files_written", ""] == 1)
            assert written["fpfs_pending_bytes", ""] == SIZE
            assert written["fpfs_oldest_pending_seconds", ""] > 0
            assert written["fpfs_open_handles", ""] == 1
            os.fsync(stream.fileno())
            synced = scrape_until(
                port, lambda found: found["fpfs_ack_to_durable_seconds_count", ""] == 1
            )
            assert synced["fpfs_ack_to_durable_seconds_sum", ""] > 0
            assert synced["fpfs_pending_bytes", ""] == 0
            assert synced["fpfs_oldest_pending_seconds", ""] == 0
        assert (mount.root / "file.pt").read_bytes() == content
        after = scrape_until(port, lambda found: found["fpfs_read_bytes_total", ""] >= SIZE)
        assert after["fpfs_written_bytes_total", ""] == SIZE
        assert after["fpfs_write_to_ack_seconds_count", ""] == after["fpfs_writes_total", ""]
        assert after["fpfs_versions_committed_total", ""] == 1
        assert after["fpfs_catalog_copies", ""] == 2
        for device in ("0", "1"):
            assert after["fpfs_device_written_bytes_total", device] > 0
            assert after["fpfs_device_write_duration_seconds_count", device] > 0
            assert after["fpfs_device_write_duration_seconds_sum", device] > 0
            assert after["fpfs_device_flush_duration_seconds_count", device] > 0
            assert after["fpfs_device_requests_in_flight", device] == 0
        # Counted in whole blocks of the device.
        written_bytes = sum(after["fpfs_device_written_bytes_total", d] for d in ("0", "1"))
        assert SIZE <= written_bytes < SIZE + BLOCK_BYTES


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """Debian's Prometheus that scrapes `target`; yields its address."""
    port = free_port()
    configuration = folder / "prometheus.yml"
    configuration.write_text(
        "scrape_configs: [{job_name: fpfs, scrape_interval: 200ms, scrape_timeout: 200ms,"
        f" static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ],
        stdin=subprocess.DEVNULL,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE_S)


def ask(address: str, query: str) -> list[dict[str, object]]:
    """The results of an instant query; none where the server does not answer yet."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            reply = json.load(answer)
    except OSError:
        return []
    assert reply["status"] == "success"
    return list(reply["data"]["result"])


def wait_for(found: Callable[[], list[dict[str, object]]]) -> list[dict[str, object]]:
    """Ask until there is an answer."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not (results := found()):
        assert time.monotonic() < deadline_s, "Prometheus has no such sample"
        time.sleep(0.05)
    return results


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed")
def test_a_prometheus_scrapes_and_answers_queries(tmp_path: Path) -> None:
    port = free_port()
    with (
        mounted(options=(f"metrics=127.0.0.1:{port}",)) as mount,
        prometheus(tmp_path, f"127.0.0.1:{port}") as address,
    ):
        (mount.root / "file").write_bytes(bytes(SIZE))
        mount.flush()
        query = f"fpfs_written_bytes_total == {SIZE}"
        (written,) = wait_for(lambda: ask(address, query))
        assert written["metric"]["mountpoint"] == str(mount.root)  # type: ignore[index]
        (quantile,) = wait_for(
            lambda: ask(address, "histogram_quantile(0.5, fpfs_ack_to_durable_seconds_bucket)")
        )
        assert 0 < float(quantile["value"][1]) < DEADLINE_S  # type: ignore[index]
        by_device = wait_for(lambda: ask(address, "fpfs_device_written_bytes_total > 0"))
        assert {each["metric"]["device"] for each in by_device} == {"0", "1"}  # type: ignore[index]
        assert wait_for(lambda: ask(address, "up == 1"))


def test_a_server_that_takes_over_serves_metrics_again() -> None:
    port = free_port()
    with mounted(options=(f"metrics=127.0.0.1:{port}",)) as mount:
        mount.expect_log(r"server \d+ died \(signal 9\)")
        (mount.root / "file").write_bytes(b"content")
        assert scrape(port)["fpfs_server_restarts_total", ""] == 0
        kill(mount)
        scrape_until(port, lambda found: found["fpfs_server_restarts_total", ""] == 1)


def test_a_place_that_was_taken_meanwhile_is_taken_back(tmp_path: Path) -> None:
    place = tmp_path / "metrics"
    with mounted(options=(f"metrics=unix:{place}",)) as mount:
        mount.expect_log(r"server \d+ died \(signal 9\)")
        mount.expect_log("metrics are not served until they can be: there is a file")
        place.unlink()
        place.write_text("somebody's")
        kill(mount)
        (mount.root / "file").write_bytes(b"content")  # the mount goes on
        assert mount.status().restarts == 1
        assert place.read_text() == "somebody's"


def test_a_unix_socket(tmp_path: Path) -> None:
    place = tmp_path / "metrics"
    with mounted(options=(f"metrics=unix:{place}", "noallow_other")):
        assert place.stat().st_mode & 0o777 == 0o600
        connection = UnixConnection(place)
        connection.request("GET", "/metrics")
        assert parsed(connection.getresponse().read().decode())["fpfs_device_up", "0"] == 1
        connection.close()
    assert not place.exists()


def test_a_port_in_use_is_refused_at_the_mount(places: tuple[Path, Path]) -> None:
    device, mountpoint = places
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = (
            "mount",
            "-d",
            device,
            "--staging",
            "16M",
            "-o",
            f"metrics={address}",
            mountpoint,
        )
        assert refusal(*command) == (
            f"fpfs: mount at {mountpoint}: metrics cannot be served at {address}"
            " (Address already in use); take another address or port for metrics=, or leave it"
            " out\n"
        )
    assert os.listdir(device) == []


def test_clients_that_are_none_do_not_disturb_the_mount() -> None:
    port = free_port()
    with mounted(options=(f"metrics=127.0.0.1:{port}",)) as mount, contextlib.ExitStack() as stack:
        for number in range(200):
            client = stack.enter_context(
                contextlib.closing(socket.create_connection(("127.0.0.1", port)))
            )
            with contextlib.suppress(ConnectionError):
                client.sendall((b"GET /met", b"\x00\xff\r\n\r\n", b"")[number % 3])
        (mount.root / "file").write_bytes(bytes(SIZE))
        mount.flush()
        scrape_until(port, lambda found: found["fpfs_written_bytes_total", ""] == SIZE)
