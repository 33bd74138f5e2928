"""fio's figure for a directory's devices: the speed that the hardware gives to a careful writer."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.framework import Contender, Unavailable
from benchmarks.places import sync

NAME = "fpfs-bench-fio"


def overwriting(directory: Path, *, total_bytes: int) -> Contender:
    """What a disk takes of one file again and again, which has been written once."""

    def play() -> float:
        return write_gb_per_s(directory, total_bytes=total_bytes, overwrite=True)

    play()
    return Contender(name="fio, overwriting", play=play, quiesce=sync)


def write_gb_per_s(directory: Path, *, total_bytes: int, overwrite: bool = False) -> float:
    """Sequential direct writes, eight requests of 4 MiB in flight, fsync at the end, which fio
    counts in its run time. GB/s.

    They go to a fresh file, or `overwrite` the one of the call before: the device's own limit.
    """
    if shutil.which("fio") is None:
        raise Unavailable("fio is not installed (apt-get install fio)")
    path = directory / NAME
    if not overwrite:
        path.unlink(missing_ok=True)
    command = [
        "fio",
        f"--name={NAME}",
        f"--filename={path}",
        "--rw=write",
        "--bs=4M",
        "--iodepth=8",
        "--direct=1",
        "--end_fsync=1",
        f"--overwrite={int(overwrite)}",
        "--ioengine=io_uring",
        f"--size={total_bytes}",
        "--output-format=json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    if not overwrite:
        path.unlink()
    write = json.loads(result.stdout)["jobs"][0]["write"]
    if write["io_bytes"] != total_bytes:
        raise RuntimeError(f"fio wrote {write['io_bytes']} of {total_bytes} bytes")
    run_time_s = float(write["runtime"]) / 1000
    return total_bytes / run_time_s / 1e9


def read_gb_per_s(path: Path) -> float:
    """Sequential direct reads of a whole file, eight requests of 4 MiB in flight. GB/s."""
    command = [
        "fio",
        f"--name={NAME}",
        f"--filename={path}",
        "--rw=read",
        "--bs=4M",
        "--iodepth=8",
        "--direct=1",
        "--ioengine=io_uring",
        "--output-format=json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    read = json.loads(result.stdout)["jobs"][0]["read"]
    return float(read["io_bytes"]) / (float(read["runtime"]) / 1000) / 1e9
