"""The soak program on a mount: short in every run, long in `make soak`; and it finds errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model import soak
from tests.support.target import Target, open_target, plain_target

SOAK_SECONDS = float(os.environ.get("FPFS_SOAK_SECONDS", "0"))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with open_target(staging="16M") as opened:
        yield opened


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_some_operations(target: Target, seed: int) -> None:
    folder = target.root / f"soak{seed}"
    folder.mkdir()
    assert soak.run(folder, seconds=0, seed=seed, operations=400) == 0


@pytest.mark.skipif(SOAK_SECONDS == 0, reason="only in make soak (FPFS_SOAK_SECONDS)")
def test_operations_for_long(target: Target) -> None:
    """Several seeds, each for a while; a new mount of the same devices in between."""
    rounds = 5
    for number in range(rounds):
        folder = target.root / f"long{number}"
        folder.mkdir()
        seed = int.from_bytes(os.urandom(4), "little")
        seconds = SOAK_SECONDS / 2 / rounds
        assert soak.run(folder, seconds=seconds, seed=seed, operations=None) == 0
        target.remount()


def test_a_wrong_byte_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a plain directory with one write in thirty losing its last byte."""
    lost = 0
    write = os.pwrite

    def losing(fd: int, data: bytes, offset: int) -> int:
        nonlocal lost
        lost += 1
        if lost % 30 == 0 and len(data) > 1:
            return write(fd, data[:-1], offset) + 1
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", losing)
    with plain_target() as plain:
        assert soak.run(Path(plain.root), seconds=0, seed=4, operations=1000) == 1
    assert "repeat: python -m tests.model.soak --seed 4" in capsys.readouterr().out
