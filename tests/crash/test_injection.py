"""Errors injected one by one, some of them; `make faults` has all. And whether they are noticed."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import injection
from tests.crash.injection import NEW, SAVES, Saver, inject, saver
from tests.support.seeds import chosen_seed

EVERY = 32


def test_no_error_of_a_call_breaks_a_save(tmp_path: Path) -> None:
    start = random.Random(chosen_seed()).randrange(EVERY)
    print(f"python -m tests.crash.injection --every {EVERY} --start {start}")
    totals = inject(tmp_path, every=EVERY, start=start)
    assert totals["injections"] > 0
    assert totals["violations"] == 0


class _Careless(Saver):
    """Forgets the last byte, and says that all went well."""

    def save(self, path: Path) -> bool:
        path.write_bytes(NEW[:-1])
        return True


class _Leaking(Saver):
    """Keeps the file open."""

    descriptor = -1

    def save(self, path: Path) -> bool:
        saved = super().save(path)
        self.descriptor = os.open(path, os.O_RDONLY)
        return saved


class _Littering(Saver):
    """Leaves an object on a device that no catalog names."""

    def save(self, path: Path) -> bool:
        saved = super().save(path)
        self.mount.flush()
        known = next((self.mount.devices[0] / "objects").glob("??/*"))
        known.with_name(known.name[:2] + "f" * 14).write_bytes(known.read_bytes())
        return saved


def test_what_a_mount_says_at_its_end_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter(["", "Traceback (most recent call last):\n"])  # the first mount only counts

    @contextlib.contextmanager
    def complaining(parent: Path) -> Iterator[Saver]:
        with saver(parent) as saves:
            yield saves
            with saves.mount.log.open("a") as log:
                log.write(next(ends))

    monkeypatch.setattr(injection, "saver", complaining)
    assert inject(tmp_path, every=1000)["violations"] == 1


def test_a_wrong_content_is_noticed(tmp_path: Path) -> None:
    with saver(tmp_path, _Careless) as saves, pytest.raises(AssertionError):
        saves.run(saves.path(SAVES[1]), None)


def test_an_open_handle_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection, "PATIENCE_S", 1.0)
    with saver(tmp_path, _Leaking) as saves:
        assert isinstance(saves, _Leaking)
        with pytest.raises(AssertionError, match="handles or slots stay"):
            saves.run(saves.path(SAVES[1]), None)
        os.close(saves.descriptor)


def test_an_object_that_is_left_over_is_noticed(tmp_path: Path) -> None:
    with saver(tmp_path, _Littering) as saves:
        with pytest.raises(AssertionError, match="objects are left over"):
            saves.run(saves.path(SAVES[1]), None)
        saves.mount.mount()
