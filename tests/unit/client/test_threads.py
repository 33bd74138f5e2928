"""Transfers where the system has no more threads: they go on with those that there are, or fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FEW_THREADS = """
import ctypes, mmap, resource, signal, sys
from fpfs.core.transfers import write_memory

MIB = 1 << 20
memory = ctypes.create_string_buffer(b"x", 8 * MIB)
with open(sys.argv[1], "wb") as file, open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * mmap.PAGESIZE
    room = int(sys.argv[2]) * MIB
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    pieces = [(ctypes.addressof(memory), len(memory), 0)]
    try:
        write_memory(pieces, memory, fd=file.fileno(), request_bytes=MIB, threads=8)
    except OSError as error:
        print(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("blocked:", *signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.parametrize(
    ("room_mib", "told", "size"),
    [
        (100, "blocked:\n", 8 << 20),
        (
            32,
            "[Errno 11] no thread can be started: Resource temporarily unavailable\nblocked:\n",
            0,
        ),
    ],
)
def test_few_threads(tmp_path: Path, room_mib: int, told: str, size: int) -> None:
    """And no signal stays blocked, or nothing would end the process."""
    path = tmp_path / "file"
    # The size of stacks is that of the limit when a program starts.
    words = ["sh", "-c", 'ulimit -s 65536; exec "$@"', "sh"]
    words += [sys.executable, "-c", FEW_THREADS, str(path), str(room_mib)]
    found = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    assert found.stdout == told
    assert path.stat().st_size == size
