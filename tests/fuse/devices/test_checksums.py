"""Contents that changed on a device: EIO, a line in the log, and never wrong bytes."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fpfs.core.engine import BLOCK_BYTES
from fpfs.testing.mounted import Mount, mounted
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.crash import crash_and_mount
from tests.support.failures.damage import (
    StoredBlock,
    blocks_of,
    flip,
    read_past_caches,
    stored_blocks,
    whole_size,
)
from tests.support.seeds import chosen_seed

CONTENT = random_bytes(5 * 2**20 + 70_001, seed=31)
OTHER = random_bytes(3 * 2**20, seed=32)
FLIPS = 500
FAILED = "inode .* failed: .*(Errno 5|Input/output error)"
NOT_KEPT = "keeps its previous version, the new one failed"


def eio(act: Callable[[], object]) -> None:
    """Check that `act` fails with EIO."""
    with pytest.raises(OSError, match="Errno 5") as failure:
        act()
    assert failure.value.errno == errno.EIO


def plant(mount: Mount) -> tuple[Path, Path]:
    """Two files, durable: of `CONTENT` and of `OTHER`."""
    file, other = mount.root / "file", mount.root / "other"
    file.write_bytes(CONTENT)
    other.write_bytes(OTHER)
    assert not mount.flush().failures
    return file, other


def check_one_damaged_block(mount: Mount, damaged: StoredBlock) -> None:
    """Check that of `CONTENT` all but a block is read, and of `OTHER` all."""
    file = mount.root / "file"
    begin, end = damaged.block * BLOCK_BYTES, (damaged.block + 1) * BLOCK_BYTES
    eio(file.read_bytes)
    with file.open("rb", buffering=0) as reader:
        eio(lambda: os.pread(reader.fileno(), 1, begin))
        eio(lambda: os.pread(reader.fileno(), 10, end - 10))
        assert_same(os.pread(reader.fileno(), begin, 0), CONTENT[:begin])
        assert_same(os.pread(reader.fileno(), len(CONTENT), end), CONTENT[end:])
    eio(lambda: read_past_caches(file, begin, 4096))
    assert_same((mount.root / "other").read_bytes(), OTHER)
    devices = mount.status().devices
    assert devices[damaged.device].checksum_errors >= 3
    assert all(not d.checksum_errors for d in devices if d.number != damaged.device)
    named = [line for line in mount.log_text().splitlines() if "is damaged" in line]
    assert len(named) == 1, "a place is logged once"


def test_damage_under_an_unmounted_filesystem() -> None:
    with mounted() as mount:
        file, _ = plant(mount)
        damaged = blocks_of(mount, file)[20]
        mount.expect_log(damaged.log_pattern())
        mount.unmount()
        flip(damaged.path, damaged.offset + 12_345)
        mount.mount()
        check_one_damaged_block(mount, damaged)


def test_damage_under_a_mounted_filesystem() -> None:
    with mounted() as mount:
        file, _ = plant(mount)
        damaged = blocks_of(mount, file)[-2]
        mount.expect_log(damaged.log_pattern())
        flip(damaged.path, damaged.offset)
        check_one_damaged_block(mount, damaged)
        flip(damaged.path, damaged.offset)
        assert_same(read_past_caches(file, 0, whole_size(len(CONTENT))), CONTENT)


def test_an_object_that_was_cut_short() -> None:
    with mounted(devices=1) as mount:
        file, _ = plant(mount)
        damaged = blocks_of(mount, file)[30]
        mount.allow_log("is damaged: ")
        mount.expect_log(damaged.log_pattern())
        os.truncate(damaged.path, damaged.offset + 8_192)
        begin = damaged.block * BLOCK_BYTES
        eio(lambda: read_past_caches(file, begin, 4096))
        eio(lambda: read_past_caches(file, begin + 3 * BLOCK_BYTES, 4096))
        assert_same(read_past_caches(file, 0, begin), CONTENT[:begin])


def test_a_rewrite_launders_no_wrong_bytes() -> None:
    with mounted() as mount:
        file, other = plant(mount)
        damaged = blocks_of(mount, file)[7]
        for pattern in (damaged.log_pattern(), NOT_KEPT, "what a write leaves of a block failed"):
            mount.expect_log(pattern)
        mount.allow_log(f"staged bytes could be written to no device|{FAILED}")
        flip(damaged.path, damaged.offset + 60_000)
        begin = damaged.block * BLOCK_BYTES
        with file.open("r+b", buffering=0) as writer:
            os.pwrite(writer.fileno(), b"new", begin + 100)
            eio(lambda: os.fsync(writer.fileno()))
        assert_same(other.read_bytes(), OTHER)
        crash_and_mount(mount)  # what cannot be kept keeps the mount from ending well
        eio(lambda: read_past_caches(file, begin, BLOCK_BYTES))
        flip(damaged.path, damaged.offset + 60_000)
        assert_same(read_past_caches(file, 0, whole_size(len(CONTENT))), CONTENT)


def test_a_damaged_block_that_is_rewritten_whole_is_sound_again() -> None:
    with mounted() as mount:
        file, _ = plant(mount)
        damaged = blocks_of(mount, file)[7]
        flip(damaged.path, damaged.offset + 60_000)
        begin = damaged.block * BLOCK_BYTES
        fresh = random_bytes(BLOCK_BYTES, seed=33)
        with file.open("r+b", buffering=0) as writer:
            os.pwrite(writer.fileno(), fresh, begin)
            os.fsync(writer.fileno())
        mount.remount()
        assert_same(file.read_bytes(), CONTENT[:begin] + fresh + CONTENT[begin + BLOCK_BYTES :])


def test_a_damaged_file_is_not_copied() -> None:
    with mounted() as mount:
        file, _ = plant(mount)
        damaged = blocks_of(mount, file)[3]
        mount.expect_log(damaged.log_pattern())
        flip(damaged.path, damaged.offset + 1)
        with file.open("rb") as source, (mount.root / "copy").open("wb") as target:
            eio(lambda: os.copy_file_range(source.fileno(), target.fileno(), len(CONTENT)))
            assert os.fstat(target.fileno()).st_size <= damaged.block * BLOCK_BYTES


def test_without_checksums_contents_are_stored_and_read_unverified() -> None:
    with mounted(options=["checksums=off"]) as mount:
        file, other = plant(mount)
        assert_same(file.read_bytes(), CONTENT)
        mount.remount("checksums=on", "staging=64M")
        assert_same(file.read_bytes(), CONTENT)
        changed = blocks_of(mount, file)[5]
        flip(changed.path, changed.offset)
        with_flip = bytearray(CONTENT)
        with_flip[changed.block * BLOCK_BYTES] ^= 1 << 4
        assert_same(read_past_caches(file, 0, whole_size(len(CONTENT))), with_flip)
        # What is written from now on is verified.
        other.write_bytes(OTHER)
        assert not mount.flush().failures
        damaged = blocks_of(mount, other)[9]
        mount.expect_log(damaged.log_pattern())
        flip(damaged.path, damaged.offset)
        eio(other.read_bytes)


def write_oddly(root: Path, chooser: random.Random) -> dict[Path, bytes]:
    """Files that were rewritten, cut, punched and extended, and what is in them."""
    contents = {}
    for number in range(6):
        path = root / f"file{number}"
        content = bytearray()
        with path.open("w+b", buffering=0) as file:
            for _ in range(12):
                offset = chooser.randrange(1_500_000)
                piece = chooser.randbytes(chooser.randrange(1, 400_000))
                os.pwrite(file.fileno(), piece, offset)
                content.extend(bytes(max(0, offset + len(piece) - len(content))))
                content[offset : offset + len(piece)] = piece
                if chooser.random() < 0.3:
                    os.fsync(file.fileno())
                if chooser.random() < 0.3:
                    size = chooser.randrange(20_000, 1_900_000)
                    file.truncate(size)
                    content = content[:size] + bytes(max(0, size - len(content)))
        contents[path] = bytes(content)
    return contents


def check_flipped(path: Path, content: bytes, block: int) -> None:
    """Check that of a file one block gives EIO, and the others what was written."""
    begin, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
    eio(lambda: read_past_caches(path, begin, 4096))
    if begin:
        assert_same(read_past_caches(path, 0, begin), content[:begin])
    assert_same(read_past_caches(path, end, whole_size(len(content))), content[end:])


def test_flipped_bits_give_eio_or_right_bytes() -> None:
    chooser = random.Random(chosen_seed())
    with mounted() as mount:
        mount.allow_log("is damaged: ")
        contents = write_oddly(mount.root, chooser)
        mount.remount()
        by_ino = {path.stat().st_ino: path for path in contents}
        blocks = {(b.path, b.object_block): b for b in stored_blocks(mount)}
        objects = sorted({block.path for block in blocks.values()})
        damaged = 0
        for _ in range(FLIPS):
            place, bit = chooser.choice(objects), chooser.randrange(8)
            offset = chooser.randrange(place.stat().st_size)
            flip(place, offset, bit=bit)
            block = blocks.get((place, offset // BLOCK_BYTES))
            if block is None:  # given back, or never used
                path = chooser.choice(list(contents))
                size = whole_size(len(contents[path]))
                assert_same(read_past_caches(path, 0, size), contents[path])
            else:
                path = by_ino[block.ino]
                check_flipped(path, contents[path], block.block)
                damaged += 1
            flip(place, offset, bit=bit)
        assert damaged > FLIPS // 4
        for path, content in contents.items():
            assert_same(path.read_bytes(), content)
