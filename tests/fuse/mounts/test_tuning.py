"""Options that tune: whatever their values, files hold the same bytes."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount, check_fpfs, mounted
from tests.support.contents import assert_same, assert_same_files, random_bytes
from tests.support.waiting import wait_until

MIB = 1024 * 1024
FILE_BYTES = 40 * MIB + 12_345


def overwrite(paths: list[Path], *, seed: int, count: int = 40) -> None:
    """The same writes at odd places to each of `paths`."""
    order = random.Random(seed)
    fds = [os.open(path, os.O_RDWR | os.O_CREAT) for path in paths]
    for number in range(count):
        offset = order.randrange(FILE_BYTES)
        content = random_bytes(order.randrange(1, 3 * MIB), seed=seed + number)
        for fd in fds:
            assert os.pwrite(fd, content, offset) == len(content)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    "chunks", [("16M", "128K", "1M"), ("128K", "4M", "256K")], ids=lambda chunks: "-".join(chunks)
)
def test_a_file_lives_under_mounts_with_other_chunk_sizes(
    tmp_path: Path, chunks: tuple[str, ...]
) -> None:
    plain = tmp_path / "plain"
    with mounted(devices=3, staging="256M", options=(f"chunk={chunks[0]}",)) as mount:
        path = mount.root / "file"
        for number, chunk in enumerate(chunks):
            mount.remount("staging=256M", f"chunk={chunk}")
            if number > 0:
                assert_same_files(path, plain)
            overwrite([path, plain], seed=100 * number)
            assert_same_files(path, plain)
            (mount.root / f"of {chunk}").write_bytes(random_bytes(9 * MIB + 1, seed=number))
        mount.remount()
        assert_same_files(path, plain)
        for number, chunk in enumerate(chunks):
            found = (mount.root / f"of {chunk}").read_bytes()
            assert_same(found, random_bytes(9 * MIB + 1, seed=number))


def test_large_chunks_go_round_the_devices() -> None:
    with mounted(devices=2, staging="128M", options=("chunk=8M",)) as mount:
        (mount.root / "file").write_bytes(random_bytes(32 * MIB, seed=1))
        mount.flush()
        used = [device.bytes_used for device in mount.status().devices]
        assert used[0] == pytest.approx(used[1], abs=2 * MIB)


@pytest.fixture(params=[2, 5])
def receivers(request: pytest.FixtureRequest) -> Iterator[Mount]:
    """A mount with several receiving threads."""
    with mounted(options=(f"receivers={request.param}",)) as mount:
        yield mount


def test_several_receivers_and_a_file_for_each_writer(receivers: Mount, tmp_path: Path) -> None:
    def write(number: int) -> None:
        plain = tmp_path / f"{number}"
        path = receivers.root / plain.name
        overwrite([path, plain], seed=1000 * number, count=25)
        assert_same_files(path, plain)

    with ThreadPoolExecutor(6) as writers:
        list(writers.map(write, range(6)))
    receivers.remount()
    for number in range(6):
        assert_same_files(receivers.root / f"{number}", tmp_path / f"{number}")


def test_several_receivers_and_one_file_for_all_writers(receivers: Mount) -> None:
    content = random_bytes(FILE_BYTES, seed=3)
    path = receivers.root / "file"
    pieces = [(at, min(at + 300_007, FILE_BYTES)) for at in range(0, FILE_BYTES, 300_007)]
    random.Random(4).shuffle(pieces)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)

    def write(piece: tuple[int, int]) -> None:
        begin, end = piece
        assert os.pwrite(fd, content[begin:end], begin) == end - begin

    with ThreadPoolExecutor(6) as writers:
        list(writers.map(write, pieces))
    os.close(fd)
    assert_same(path.read_bytes(), content)
    receivers.remount()
    assert_same(path.read_bytes(), content)


CPU_LATENCY = Path("/dev/cpu_dma_latency")


def bounds_latency(mount: Mount) -> bool:
    """Whether the server keeps processors out of deep idle states now."""
    held = []
    for fd in Path(f"/proc/{mount.server_pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was read
            held.append(fd.readlink())
    return CPU_LATENCY in held


needs_cpu_latency = pytest.mark.skipif(
    not os.access(CPU_LATENCY, os.W_OK), reason=f"{CPU_LATENCY} cannot be written"
)


@needs_cpu_latency
@pytest.mark.parametrize("receivers", [1, 3])
def test_processors_sleep_lightly_while_requests_come_and_only_then(receivers: int) -> None:
    with mounted(options=(f"receivers={receivers}",)) as mount:
        wait_until(lambda: not bounds_latency(mount))
        ended = threading.Event()

        def keep_writing() -> None:
            with (mount.root / "file").open("wb", buffering=0) as file:
                while not ended.is_set():
                    os.pwrite(file.fileno(), bytes(MIB), 0)

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(keep_writing)
            try:
                wait_until(lambda: bounds_latency(mount))
            finally:
                ended.set()
            writing.result()
        wait_until(lambda: not bounds_latency(mount))


@needs_cpu_latency
def test_processors_may_be_left_to_sleep() -> None:
    with mounted(options=("idle=deep",)) as mount:
        for _ in range(10):
            (mount.root / "file").write_bytes(bytes(16 * MIB))
            assert not bounds_latency(mount)


def test_staging_for_too_few_chunks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    (tmp_path / "mount").mkdir()
    with pytest.raises(AssertionError, match=r"staging needs at least 16 chunks.*staging=256M"):
        check_fpfs(
            "mount", "-d", tmp_path / "device", "-o", "chunk=16M,staging=64M", tmp_path / "mount"
        )
