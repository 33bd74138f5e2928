"""fio with verify=crc32c: every engine, direct or not, random and sequential, several jobs.

fio checks each block against the checksum in its header, after the job wrote everything and again
in a second run that only reads, after a remount.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.contents import digest
from tests.support.processes import run
from tests.support.target import Target

pytestmark = pytest.mark.clients


def fio(directory: Path, *options: str) -> dict[str, int]:
    """Run one group of jobs; returns bytes written and read, and fails on any error.

    With --verify_only fio counts the writes that it leaves out.
    """
    output = run(
        "fio",
        "--name=job",
        f"--directory={directory}",
        "--output-format=json",
        "--group_reporting=1",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--randrepeat=1",
        "--allow_file_create=1",
        *options,
        cwd=directory,
    )
    (job,) = json.loads(output[output.index("{") :])["jobs"]
    assert job["error"] == 0
    return {"written": job["write"]["io_bytes"], "read": job["read"]["io_bytes"]}


def write_and_verify(target: Target, directory: Path, total_bytes: int, *options: str) -> None:
    done = fio(directory, "--do_verify=1", *options)
    assert done["written"] >= total_bytes
    assert done["read"] >= total_bytes
    target.remount()
    before = digests(directory)
    again = fio(directory, "--verify_only=1", *options)
    assert again["read"] >= total_bytes
    assert digests(directory) == before


def digests(directory: Path) -> dict[str, str]:
    return {path.name: digest(path) for path in directory.iterdir()}


def test_a_flipped_byte_is_found(directory: Path) -> None:
    """What the other tests rely on: the second run does read and compare."""
    options = ("--ioengine=psync", "--rw=write", "--bs=64k", "--size=1m")
    fio(directory, *options)
    (path,) = directory.iterdir()
    with path.open("r+b") as file:
        file.seek(300_000)
        byte = file.read(1)
        file.seek(300_000)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(AssertionError, match="verify"):
        fio(directory, "--verify_only=1", *options)


@pytest.mark.parametrize("engine", ["psync", "libaio", "io_uring"])
@pytest.mark.parametrize("direct", [0, 1])
@pytest.mark.parametrize("pattern", ["write", "randwrite"])
def test_engines(target: Target, directory: Path, engine: str, direct: int, pattern: str) -> None:
    write_and_verify(
        target,
        directory,
        24 * 2**20,
        f"--ioengine={engine}",
        f"--direct={direct}",
        f"--rw={pattern}",
        "--bs=16k",
        "--size=24m",
        "--iodepth=8",
    )


@pytest.mark.parametrize("fallocate", ["none", "posix", "keep", "truncate"])
def test_preallocated(target: Target, directory: Path, fallocate: str) -> None:
    write_and_verify(
        target,
        directory,
        16 * 2**20,
        f"--fallocate={fallocate}",
        "--ioengine=psync",
        "--rw=randwrite",
        "--bs=64k",
        "--size=16m",
    )


def test_odd_block_sizes(target: Target, directory: Path) -> None:
    write_and_verify(
        target,
        directory,
        10 * 2**20,
        "--ioengine=psync",
        "--rw=randwrite",
        "--bsrange=512-137k",
        "--bs_unaligned=1",
        "--verify_interval=512",
        "--size=12m",
        "--norandommap=0",
    )


def test_several_jobs_with_files_of_their_own(target: Target, directory: Path) -> None:
    write_and_verify(
        target,
        directory,
        4 * 12 * 2**20,
        "--ioengine=psync",
        "--numjobs=4",
        "--rw=write",
        "--bs=1m",
        "--size=12m",
        "--end_fsync=1",
    )


@pytest.mark.parametrize("direct", [0, 1])
def test_several_jobs_in_one_file(target: Target, directory: Path, direct: int) -> None:
    """Four jobs, each with its quarter of one file, preallocated and not."""
    write_and_verify(
        target,
        directory,
        4 * 8 * 2**20,
        "--ioengine=libaio",
        "--iodepth=4",
        f"--direct={direct}",
        "--numjobs=4",
        "--filename=shared",
        "--rw=randwrite",
        "--bs=32k",
        "--size=8m",
        "--offset_increment=8m",
    )


def test_rewrites_mixed_with_reads_and_fsync(directory: Path) -> None:
    """Reads verify what was written before in the same run, while blocks are rewritten."""
    done = fio(
        directory,
        "--ioengine=psync",
        "--rw=randrw",
        "--rwmixread=40",
        "--bs=12k",
        "--size=12m",
        "--loops=3",
        "--fsync=64",
        "--verify_backlog=32",
    )
    assert done["written"] > 12 * 2**20


def test_mapped_memory(target: Target, directory: Path) -> None:
    write_and_verify(
        target,
        directory,
        8 * 2**20,
        "--ioengine=mmap",
        "--rw=randwrite",
        "--bs=4k",
        "--size=8m",
    )
