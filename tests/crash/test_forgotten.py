"""Files without a name whose end a server that died had taken note of, and nobody else."""

from __future__ import annotations

import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fpfs.testing.mounted import Mount
from tests.support.failures.poison import Orders, poisoned_mount
from tests.support.servers import EXIT_TIMEOUT_S, kill
from tests.support.waiting import inodes_used, wait_until

SIZE = 20_000_000


def test_the_space_of_a_file_comes_back_although_its_end_was_told_to_a_dead_server(
    tmp_path: Path,
) -> None:
    with poisoned_mount(tmp_path) as (mount, orders):
        mount.expect_log(r"fpfs.keeper: server \d+ died \(signal 9\)")
        (mount.root / "other").write_bytes(b"content")
        inodes_before = inodes_used(mount.root)
        with (mount.root / "still open").open("w+b", buffering=0) as still_open:
            still_open.write(b"content of a handle")
            (mount.root / "still open").unlink()
            for _ in range(3):
                close_while_names_are_stuck(mount, orders)
            still_open.seek(0)
            assert still_open.read() == b"content of a handle"
            wait_until_given_back(mount, inodes_before + 1)
        wait_until_given_back(mount, inodes_before)


def test_what_the_kernel_refers_to_without_an_open_file_stays(tmp_path: Path) -> None:
    with poisoned_mount(tmp_path) as (mount, _orders):
        mount.expect_log(r"fpfs.keeper: server \d+ died \(signal 9\)")
        path = mount.root / "file"
        path.write_bytes(b"content")
        inodes_before = inodes_used(mount.root)
        reference = os.open(path, os.O_PATH)
        path.unlink()
        for _ in range(2):
            kill(mount)
            mount.flush()
            assert Path(f"/proc/self/fd/{reference}").read_bytes() == b"content"
            assert os.fstat(reference).st_nlink == 0
        os.close(reference)
        wait_until_given_back(mount, inodes_before - 1)


def close_while_names_are_stuck(mount: Mount, orders: Orders) -> None:
    """Let the kernel forget a file, and the server die before it does anything about it."""
    path = mount.root / "large"
    stream = path.open("wb", buffering=0)
    stream.write(os.urandom(SIZE))
    os.fsync(stream.fileno())
    path.unlink()
    orders.give("stuck", "block")
    with ThreadPoolExecutor(1) as pool, (mount.root / "other").open("rb") as other:
        answer = pool.submit(ask, mount.root / "other")
        try:
            orders.wait_met("stuck")
            stream.close()
            # The channel answers these by itself, after it has taken what came before.
            for _ in range(100):
                assert os.lseek(other.fileno(), 0, os.SEEK_DATA) == 0
        finally:
            os.kill(mount.server_pid, signal.SIGKILL)
            orders.take_back("stuck")
        assert answer.result(EXIT_TIMEOUT_S) == errno.ENODATA
    mount.note_processes()


def ask(path: Path) -> int:
    """Ask for the attribute that nobody answers; returns the errno at last."""
    try:
        os.getxattr(path, "user.stuck")
    except OSError as error:
        return error.errno or 0
    return 0


def wait_until_given_back(mount: Mount, inodes: int) -> None:
    """Wait until nothing but small contents is left."""

    def is_given_back() -> bool:
        mount.flush()
        return inodes_used(mount.root) <= inodes and mount.stored_bytes() <= SIZE / 2

    wait_until(is_given_back, "the space does not come back")
    assert inodes_used(mount.root) == inodes
