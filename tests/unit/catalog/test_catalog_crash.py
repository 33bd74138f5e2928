"""The catalog's process is killed at random moments, and one of its copies is taken away then."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import trio.testing

from tests.support.catalog.catalogs import (
    FILES,
    make_catalog,
    name_plane,
    open_catalog,
    paths_of,
    tables,
)
from tests.support.processes import REPOSITORY
from tests.support.seeds import IS_LONG

ROUNDS = int(os.environ.get("FPFS_CATALOG_KILLS", "30" if IS_LONG else "8"))


def _run_and_kill(folder: Path, *, first: int, seed: int) -> tuple[int, int]:
    """Let a writer work for a while; returns the last numbers that were answered and durable."""
    answered = durable = first - 1
    lines = random.Random(seed).choice((1, 5, 50, 400))
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.catalog.writer",
            folder,
            str(first),
            str(seed),
        ],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    ) as writer:
        assert writer.stdout is not None
        for count, line in enumerate(writer.stdout):
            if count == lines:
                writer.kill()  # what it has said by then is still read
            kind, number = line.split()
            if kind == b"a":
                answered = int(number)
            else:
                durable = int(number)
    return answered, durable


async def _numbers(folder: Path) -> list[int]:
    """The files that are there, each checked to be as it was made."""
    catalog = open_catalog(folder)
    plane = await catalog.read(name_plane)
    await catalog.close()
    assert not any(status.trouble for status in catalog.copies())
    for name, (_ino, mode, uid, gid, _nlink, size, mtime_ns, value) in plane.items():
        number = int(name[1:])
        assert (mode & 0o777, uid, gid) == (number % 0o1000, number, number + 1)
        assert (size, mtime_ns, value) == (number * 7, number, b"%d" % number * 20)
    return sorted(int(name[1:]) for name in plane)


@trio.testing.trio_test
async def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    """And what was durable survives the loss of either copy, too."""
    folder = tmp_path / "catalog"
    await make_catalog(folder).close()
    known = 0
    for seed in range(ROUNDS):
        answered, durable = _run_and_kill(folder, first=known, seed=seed)
        print(f"round {seed}: answered up to {answered}, durable up to {durable}")
        for device in "ab":
            cut = tmp_path / f"without {device}"
            shutil.copytree(folder, cut)
            for name in FILES:
                (cut / device / name).unlink(missing_ok=True)
            numbers = await _numbers(cut)
            assert numbers == list(range(len(numbers)))
            assert durable < len(numbers) <= answered + 2
            shutil.rmtree(cut)
        numbers = await _numbers(folder)
        # One more may have been done and not answered.
        assert len(numbers) in (answered + 1, answered + 2)
        assert numbers == list(range(len(numbers)))
        first, second = paths_of(folder)
        assert tables(first) == tables(second)
        known = len(numbers)
