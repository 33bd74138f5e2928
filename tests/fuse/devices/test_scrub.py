"""fpfs-ctl scrub on real mounts: finds what was damaged and nothing else, also under load."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from fpfs.core.engine import BLOCK_BYTES
from fpfs.testing.mounted import Mount, mounted, run_fpfs
from tests.support.contents import random_bytes
from tests.support.failures.damage import blocks_of, flip, stored_blocks
from tests.support.files_changing import keep_changing
from tests.support.processes import python_child
from tests.support.waiting import wait_until


def scrub(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``fpfs-ctl scrub``."""
    return run_fpfs("scrub", *arguments, module="fpfs.cli.ctl")


def found(*arguments: str | Path) -> set[tuple[str, int]]:
    """What a scrub names as damaged: paths and offsets of blocks. The exit status fits."""
    done = scrub("--json", *arguments)
    assert done.stderr == ""
    damage = {
        (each["path"], each["offset_bytes"] + offset)
        for each in json.loads(done.stdout)["damage"]
        for offset in range(0, each["size_bytes"], BLOCK_BYTES)
    }
    assert done.returncode == bool(damage)
    return damage


def plant(mount: Mount, names: Sequence[str]) -> None:
    """Files of some MiB, durable."""
    for seed, name in enumerate(names):
        path = mount.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random_bytes(2_500_000 + seed, seed=seed))
    assert not mount.flush().failures


def test_a_sound_filesystem() -> None:
    with mounted() as mount:
        plant(mount, ["a", "folder/b"])
        (mount.root / "small").write_bytes(b"in the catalog")
        done = scrub(mount.root)
        assert (done.returncode, done.stderr) == (0, "")
        assert "all is well" in done.stdout
        assert done.stdout.startswith("checked 4.")


def test_exactly_what_was_damaged_is_found() -> None:
    chooser = random.Random(5)
    with mounted() as mount:
        mount.allow_log("is damaged: ")
        plant(mount, ["a", "folder/b", "folder/deeper/c", "d"])
        names = {path.stat().st_ino: str(path.relative_to(mount.root)) for path in files(mount)}
        damaged = set()
        for block in chooser.sample(stored_blocks(mount), 12):
            # The last block of a file is stored in part.
            flip(block.path, block.offset + chooser.randrange(4096))
            damaged.add((names[block.ino], block.block * BLOCK_BYTES))
        assert found(mount.root) == damaged
        assert found(mount.root / "folder") == {e for e in damaged if e[0].startswith("folder/")}
        for path in files(mount):
            name = str(path.relative_to(mount.root))
            assert found(path) == {each for each in damaged if each[0] == name}
        text = scrub(mount.root)
        assert text.returncode == 1
        for name, offset in damaged:
            assert f"damaged: {name} (inode " in text.stdout
            assert f") bytes {offset} to {offset + BLOCK_BYTES - 1}: block " in text.stdout
        assert sum(device.checksum_errors for device in mount.status().devices) >= 12


def files(mount: Mount) -> list[Path]:
    """All regular files."""
    return sorted(path for path in mount.root.rglob("*") if path.is_file())


def test_an_object_that_is_missing_is_found() -> None:
    with mounted(devices=1) as mount:
        plant(mount, ["a", "b"])
        mount.unmount()
        blocks = [b for b in stored_blocks(mount) if b.path == stored_blocks(mount)[0].path]
        blocks[0].path.unlink()
        mount.mount()
        assert {offset for _, offset in found(mount.root)} == {b.block * 65_536 for b in blocks}


def test_the_cache_of_the_kernel_hides_nothing() -> None:
    with mounted() as mount:
        plant(mount, ["a"])
        content = (mount.root / "a").read_bytes()
        block = blocks_of(mount, mount.root / "a")[4]
        mount.expect_log(block.log_pattern())
        flip(block.path, block.offset)
        with (mount.root / "a").open("rb") as file:
            assert file.read() == content  # as the kernel has it
        assert found(mount.root) == {("a", 4 * BLOCK_BYTES)}


def test_a_busy_filesystem_has_no_false_damage() -> None:
    with mounted(staging="16M") as mount:
        plant(mount, ["still"])
        ended = threading.Event()
        writers = [
            threading.Thread(target=keep_changing, args=(mount.root, seed, ended))
            for seed in range(3)
        ]
        for writer in writers:
            writer.start()
        try:
            wait_until((mount.root / "folder0").exists)
            for _ in range(12):
                assert found(mount.root) == set()
                assert found(mount.root / "folder0") == set()
        finally:
            ended.set()
            for writer in writers:
                writer.join()
        assert found(mount.root) == set()


def test_a_scrub_goes_on_with_the_next_server() -> None:
    with mounted() as mount:
        mount.allow_log("another takes over|server .* ended|died|killed")
        plant(mount, ["a", "b", "c", "d"])
        block = blocks_of(mount, mount.root / "d")[-2]
        mount.expect_log(block.log_pattern())
        flip(block.path, block.offset + 9)
        code = "import sys; from fpfs.cli.ctl import main; sys.exit(main(sys.argv[1:]))"
        with python_child(code, "scrub", "--json", "--rate", "4M", mount.root) as child:
            while not read_from_devices(mount):
                pass
            os.kill(mount.server_pid, signal.SIGKILL)
            output, _ = child.communicate(timeout=60)
        assert child.returncode == 1
        (damage,) = json.loads(output)["damage"]
        assert damage["path"] == "d"
        mount.note_processes()


def read_from_devices(mount: Mount) -> int:
    """Bytes that the server has read."""
    return sum(device.bytes_read for device in mount.status().devices)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "nothing would be read"),
        (["--rate", "fast"], "not a size in whole bytes"),
        (["/proc"], "is not on an fpfs mount"),
        (["absent"], "No such file"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    with mounted() as mount:
        words = [str(mount.root / each) if each == "absent" else each for each in arguments]
        if not words[-1].startswith("/"):
            words.append(str(mount.root))
        done = scrub(*words)
        assert done.returncode == 1
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
