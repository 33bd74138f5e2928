"""Single bits that are wrong, in objects under a mount and in the arena that a dead one left.

FPFS_OBJECT_FLIPS and FPFS_ARENA_FLIPS say how many are tried, FPFS_SEED which.
Flips in catalogs are in tests/unit/catalog/test_catalog_copies.py (FPFS_DAMAGES), more in arenas in
native/tests/engine/takeover_flip_test.cc (FPFS_FLIPS).
"""

from __future__ import annotations

import errno
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from fpfs.testing.mounted import CommandFailed, Mount, mounted
from tests.support import arena
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.crash import close_dead
from tests.support.failures.damage import StoredBlock, blocks_of, flip, read_past_caches
from tests.support.seeds import chosen_seed

OBJECT_FLIPS = int(os.environ.get("FPFS_OBJECT_FLIPS", "40"))
ARENA_FLIPS = int(os.environ.get("FPFS_ARENA_FLIPS", "4"))
BLOCK_BYTES = 64 * 1024
OLD = random_bytes(1_000_000, seed=51)
NEW = random_bytes(1_300_000, seed=52)
CLOSED, OPEN, WHOLE = "closed", "open", "whole.pt"
REFUSED = r"fpfs\.server: mount at .* cannot be taken over: "
DAMAGED = (
    r"fpfs\.engine: the staging arena is damaged"
    r"|fpfs\.daemon\.maintenance\.crash_resume: inode \d+ .* is lost"
    r"|fpfs\.daemon\.maintenance\.crash_resume: .* was made and never finished"
    r"|fpfs\.daemon\.commit\.quarantine: "
)


@pytest.fixture
def seed() -> int:
    """Where the random numbers begin."""
    return chosen_seed()


def is_eio(path: Path, block: StoredBlock) -> bool:
    """Whether a block cannot be read."""
    try:
        read_past_caches(path, block.block * BLOCK_BYTES, BLOCK_BYTES)
    except OSError as error:
        assert error.errno == errno.EIO
        return True
    return False


def test_wrong_bits_in_objects_are_eio_and_never_data(seed: int) -> None:
    """Also where nothing is stored behind a file's end: its block is compared as a whole."""
    numbers = random.Random(seed)
    with mounted(devices=2) as mount:
        mount.expect_log(r"fpfs\.engine: inode \d+: its block \d+ \(64 KiB\) is damaged")
        path = mount.root / "file"
        path.write_bytes(NEW)
        mount.flush()
        blocks = blocks_of(mount, path)
        for _ in range(OBJECT_FLIPS):
            block = numbers.choice(blocks)
            stored = min(BLOCK_BYTES, block.path.stat().st_size - block.offset)
            at, bit = block.offset + numbers.randrange(stored), numbers.randrange(8)
            flip(block.path, at, bit=bit)
            assert is_eio(path, block), f"bit {bit} of {at} in {block.path}"
            flip(block.path, at, bit=bit)
            assert not is_eio(path, block)
        assert_same(path.read_bytes(), NEW)
    print(f"{OBJECT_FLIPS} bits in objects, each EIO")


def write_all(path: Path, content: bytes) -> int:
    """Replace a content; returns the descriptor, which is open."""
    descriptor = os.open(path, os.O_RDWR | os.O_TRUNC)
    os.write(descriptor, content)
    return descriptor


def flip_and_mount(mount: Mount, numbers: random.Random) -> str:
    """Die with changes, flip a bit in what is left of them, mount; returns what came of it."""
    for name in (CLOSED, OPEN, WHOLE):
        (mount.root / name).write_bytes(OLD)
    mount.flush()
    descriptors = [write_all(mount.root / name, NEW) for name in (OPEN, WHOLE, CLOSED)]
    os.close(descriptors.pop())
    mount.kill(mount.keeper_pid, mount.server_pid)
    mount.tear_down()
    for descriptor in descriptors:
        close_dead(descriptor)
    path = arena.path_of(mount)
    kind, offset, bit = arena.random_flip(path, numbers)
    print(f"bit {bit} of byte {offset}, in a table of kind {kind}")
    arena.flip(path, offset, bit)
    try:
        mount.mount()
    except CommandFailed as refused:
        assert re.search("or remove it: what was not committed is lost", str(refused))
        path.unlink()
        mount.mount()
        return "refused"
    return "told" if mount.status().recovery.files_lost else "harmless"


def check_contents(mount: Mount, *, is_told: bool) -> None:
    """Each file is old or new; old only where something was told of."""
    mount.flush()
    for name in (CLOSED, OPEN, WHOLE):
        content = (mount.root / name).read_bytes()
        if content == NEW:
            assert name != WHOLE, "it was never finished"
        else:
            assert_same(content, OLD)
            assert name == WHOLE or is_told, "an acknowledged write is lost, and nobody said so"
    assert mount.status().commit.failures == ()


def test_wrong_bits_in_an_arena_are_told_of_or_harmless(seed: int) -> None:
    numbers = random.Random(seed)
    outcomes: Counter[str] = Counter()
    with mounted(devices=2, staging="16M") as mount:
        mount.allow_log(f"{REFUSED}|{DAMAGED}")
        for _ in range(ARENA_FLIPS):
            said_before = len(mount.log_text())
            outcome = flip_and_mount(mount, numbers)
            outcomes[outcome] += 1
            is_told = outcome == "refused" or "is damaged" in mount.log_text()[said_before:]
            check_contents(mount, is_told=is_told)
    print(f"{ARENA_FLIPS} bits in arenas: {dict(outcomes)}")
