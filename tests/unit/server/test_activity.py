"""The live view: rates between two looks, and tables that fit a terminal of 80 by 24."""

from __future__ import annotations

import io

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from rich.cells import cell_len
from rich.console import Console

from fpfs.cli.commands.activity_view import activity_tables, distinct, format_time, shortened
from fpfs.cli.commands.status import DeviceNow, FileNow, report_activity
from fpfs.cli.commands.top import Look, file_rates
from fpfs.core.protocol.activity import (
    Activity,
    DeviceActivity,
    FileInProgress,
    FilesInProgress,
    rates_between,
)
from fpfs.core.protocol.reports import DeviceState
from fpfs.core.statistics import DurationHistogram, Durations

COLUMNS, LINES = 80, 24


def durations(*each_ns: int) -> Durations:
    histogram = DurationHistogram()
    for duration_ns in each_ns:
        histogram.record(duration_ns)
    return histogram.read()


def device(number: int = 0, **changes: object) -> DeviceActivity:
    made = DeviceActivity(number=number, path=f"/nvme{number}/fpfs", state=DeviceState.OK)
    return msgspec.structs.replace(made, **changes)


def activity(**changes: object) -> Activity:
    """Figures of a mount that does nothing."""
    made = Activity(
        mountpoint="/ckpt",
        version="0.1.0",
        server_pid=1,
        restarts=0,
        started_unix_s=0.0,
        measured_s=100.0,
        staging_bytes_used=0,
        staging_bytes_total=2**30,
        writes=0,
        bytes_acknowledged=0,
        writes_waiting=0,
        write_to_ack=Durations(),
        ack_to_durable=Durations(),
        files_written=0,
        bytes_pending=0,
        oldest_pending_s=0.0,
        versions_pending=0,
        versions_committed=0,
        versions_failed=0,
        catalog_copies=2,
        catalog_copies_in_service=2,
        devices=(device(),),
    )
    return msgspec.structs.replace(made, **changes)


def in_progress(ino: int, *, path: str = "model.pt", acknowledged: int = 0) -> FileInProgress:
    return FileInProgress(
        ino=ino,
        writers=1,
        bytes_acknowledged=acknowledged,
        bytes_pending=10,
        bytes_staged=5,
        age_s=0.5,
        path=path,
    )


def listed(*files: FileInProgress, measured_s: float = 0.0, count: int = 0) -> FilesInProgress:
    return FilesInProgress(measured_s=measured_s, count=count or len(files), files=files)


def shown(now: Activity, files: FilesInProgress | None, *, before: Activity | None = None) -> str:
    """What stands on a terminal."""
    out = io.StringIO()
    console = Console(file=out, width=COLUMNS, highlight=False, markup=False, emoji=False)
    rates = rates_between(before or activity(), now)
    console.print(activity_tables(now, rates, files, file_rates={}, lines=LINES))
    return out.getvalue()


def test_rates_are_of_what_came_between() -> None:
    before = activity(
        bytes_acknowledged=1000,
        writes=5,
        write_to_ack=durations(10**9),
        devices=(device(bytes_written=100, write_latency=durations(10**9)),),
    )
    after = activity(
        measured_s=102.0,
        bytes_acknowledged=5000,
        writes=9,
        write_to_ack=durations(10**9, 2000, 4000),
        ack_to_durable=durations(10**6),
        devices=(
            device(bytes_written=500, write_latency=durations(10**9, 6000)),
            device(1, bytes_written=7),  # it was added
        ),
    )
    rates = rates_between(before, after)
    assert rates.bytes_acknowledged_per_s == 2000
    assert rates.writes_per_s == 2
    assert rates.write_to_ack_s == pytest.approx(3e-6)
    assert rates.ack_to_durable_s == pytest.approx(1e-3)
    assert rates.devices.keys() == {0}
    assert rates.devices[0].written_per_s == 200
    assert rates.devices[0].write_s == pytest.approx(6e-6)
    assert rates.devices[0].flush_s is None


def test_a_server_that_took_over_counts_from_zero() -> None:
    before = activity(bytes_acknowledged=10**9, devices=(device(bytes_written=10**9),))
    after = activity(
        server_pid=2,
        measured_s=101.0,
        bytes_acknowledged=500,
        devices=(device(bytes_written=300),),
    )
    rates = rates_between(before, after)
    assert rates.bytes_acknowledged_per_s == 500
    assert rates.devices[0].written_per_s == 300


def test_rates_of_files() -> None:
    before = listed(in_progress(1, acknowledged=100), in_progress(2, acknowledged=100))
    now = listed(
        in_progress(1, acknowledged=300),
        in_progress(2, acknowledged=50),  # it was unloaded in between
        in_progress(3, acknowledged=900),
        measured_s=2.0,
    )
    assert file_rates(before, now) == {1: 100.0}
    assert file_rates(None, now) == file_rates(now, now) == {}


def test_the_same_as_figures() -> None:
    before = activity(devices=(device(), device(1)))
    now = activity(
        measured_s=102.0,
        bytes_acknowledged=4000,
        writes=6,
        writes_waiting=3,
        write_to_ack=durations(2000, 4000),
        staging_bytes_used=2**29,
        bytes_pending=10,
        oldest_pending_s=0.25,
        devices=(
            device(
                bytes_written=10,
                bytes_read=400,
                requests_in_flight=16,
                requests_queued=4,
                errors=7,
                write_latency=durations(6000),
            ),
            device(1, state=DeviceState.FAILED),
            device(2),  # it was added in between
        ),
    )
    files = listed(in_progress(5), in_progress(6), count=30)
    told = report_activity(Look(now, rates_between(before, now), files, {5: 100.0}))
    assert (told.interval_s, told.bytes_acknowledged_per_s, told.writes_per_s) == (2, 2000, 3)
    assert told.write_to_ack_s == pytest.approx(3e-6)
    assert told.ack_to_durable_s is None
    assert (told.staging_bytes_used, told.staging_bytes_total) == (2**29, 2**30)
    assert (told.writes_waiting, told.bytes_pending, told.oldest_pending_s) == (3, 10, 0.25)
    idle = DeviceNow(
        number=1,
        path="/nvme1/fpfs",
        state=DeviceState.FAILED,
        bytes_written_per_s=0,
        bytes_read_per_s=0,
        write_s=None,
        read_s=None,
        flush_s=None,
        requests_in_flight=0,
        requests_queued=0,
        errors=0,
    )
    busy, second, third = told.devices
    assert second == idle
    assert third == msgspec.structs.replace(
        idle, number=2, path="/nvme2/fpfs", state=DeviceState.OK
    )
    assert (busy.bytes_written_per_s, busy.bytes_read_per_s) == (5, 200)
    assert busy.write_s == pytest.approx(6e-6)
    assert (busy.requests_in_flight, busy.requests_queued, busy.errors) == (16, 4, 7)
    written = FileNow(
        ino=5,
        path="model.pt",
        writers=1,
        bytes_acknowledged_per_s=100,
        bytes_pending=10,
        bytes_staged=5,
        age_s=0.5,
        durable_in_s=1.0,  # 5 bytes, and both devices take 5 in a second
    )
    assert told.files_count == 30
    assert told.files is not None
    assert told.files[0] == written
    assert told.files[1].bytes_acknowledged_per_s is None
    unseen = report_activity(Look(now, rates_between(before, now), None, {}))
    assert unseen.files is unseen.files_count is None


def test_what_is_shown() -> None:
    now = activity(
        measured_s=101.0,
        restarts=1,
        staging_bytes_used=2**29,
        writes_waiting=3,
        bytes_pending=10,
        oldest_pending_s=0.25,
        versions_failed=2,
        bytes_acknowledged=2 * 10**9,
        write_to_ack=durations(10**6),
        devices=(
            device(bytes_written=10**9, requests_in_flight=16, requests_queued=4, errors=7),
            device(1, state=DeviceState.MISSING),
        ),
    )
    text = shown(now, listed(in_progress(1), in_progress(2, path="")))
    assert "1 restart\n" in text
    assert "[##########..........] 512 MiB of 1.00 GiB, 3 writers wait" in text
    assert "0 done, 0 under way, 2 not kept; catalog 2 of 2 copies" in text
    assert "2.00 GB/s, answered in 1 ms, durable in -" in text
    assert "10 B in no version yet, the oldest for 250 ms" in text
    lines = text.splitlines()
    (first,) = [line for line in lines if line.startswith("0 ")]
    assert first.split()[2:] == ["ok", "1.00", "GB/s", "0", "kB/s", "-", "-", "16+4", "7"]
    (missing,) = [line for line in lines if line.startswith("1 ")]
    assert missing.split()[2:] == ["missing", *["-"] * 6]
    assert "model.pt" in text
    assert "inode 2, no name known" in text
    assert "only root and the mount's owner" in shown(now, None)
    assert "no file is being written" in shown(now, listed())
    assert "all is durable" in shown(activity(), None)


PATHS = st.text(st.characters(codec="utf-8"), max_size=120)
COUNTS = st.integers(0, 10**13)
DEVICES = st.builds(
    DeviceActivity,
    number=st.integers(0, 999),
    path=PATHS,
    state=st.sampled_from(DeviceState),
    bytes_written=COUNTS.map(lambda n: n // 1000),
    bytes_read=COUNTS.map(lambda n: n // 1000),
    requests_in_flight=st.integers(0, 1024),
    requests_queued=st.integers(0, 999),
    errors=st.integers(0, 999_999),
    write_latency=st.integers(0, 10**11).map(durations),
    flush_latency=st.integers(0, 10**11).map(durations),
)
FILES = st.builds(
    FileInProgress,
    ino=st.integers(0, 2**63),
    writers=st.integers(0, 9999),
    bytes_acknowledged=COUNTS,
    bytes_pending=COUNTS,
    bytes_staged=COUNTS.map(lambda n: n // 100),
    age_s=st.floats(0, 100_000),
    path=PATHS,
)


@given(
    st.lists(DEVICES, max_size=8, unique_by=lambda device: device.number),
    st.lists(FILES, max_size=20),
    st.integers(0, 500),
    PATHS,
    COUNTS,
)
def test_it_fits_a_terminal(
    devices: list[DeviceActivity],
    files: list[FileInProgress],
    more: int,
    mountpoint: str,
    count: int,
) -> None:
    before = activity(devices=tuple(device(each.number) for each in devices))
    now = activity(
        measured_s=101.0,
        mountpoint=mountpoint,
        devices=tuple(devices),
        bytes_acknowledged=count,
        bytes_pending=count,
        versions_committed=count,
        oldest_pending_s=count / 1e9,
    )
    text = shown(now, listed(*files, count=len(files) + more), before=before)
    lines = text.splitlines()
    assert len(lines) <= LINES
    assert all(cell_len(line) <= COLUMNS for line in lines)  # some characters take none, or two


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (None, "-"),
        (0, "0 us"),
        (1.5e-6, "1.5 us"),
        (0.9994e-3, "999 us"),
        (0.001, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.25, "250 ms"),
        (1, "1 s"),
        (119, "119 s"),
        (120, "2:00"),
        (3661, "1:01:01"),
    ],
)
def test_times(duration_s: float | None, text: str) -> None:
    assert format_time(duration_s) == text


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("short", "short"),
        ("run/step100.pt", "...step100.pt"),
        ("run/a-very-long-name.pt", "a-very-lon..."),
    ],
)
def test_shortened_paths(path: str, text: str) -> None:
    assert shortened(path, 13) == text


def test_device_directories_that_end_alike_are_told_apart() -> None:
    assert distinct(["/nvme0/fpfs", "/nvme1/fpfs"], 12) == ["/nvme0/fpfs", "/nvme1/fpfs"]
    long = [f"/mnt/nvme{number}n1/checkpoints/fpfs" for number in range(2)]
    assert distinct(long, 12) == [".../nvme0n1", ".../nvme1n1"]
    assert distinct(long[:1], 12) == ["...ints/fpfs"]
    assert distinct([], 12) == []
    assert distinct(["/a/b/c/d/e/fpfs", "/fpfs"], 12) == [".../d/e/fpfs", "/fpfs"]
