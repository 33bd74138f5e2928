"""What saving and loading do with names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fpfs.client.paths import exchange


def test_names_are_exchanged(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / path.name).touch()
    assert exchange(str(one), str(other))
    assert [path.name for path in (*one.iterdir(), *other.iterdir())] == ["other", "one"]


def test_names_that_cannot_be_exchanged(tmp_path: Path) -> None:
    """A filesystem that exchanges none says the same as of a directory and one within it."""
    within = tmp_path / "within"
    within.mkdir()
    assert not exchange(str(tmp_path), str(within))
    assert within.is_dir()
    with pytest.raises(FileNotFoundError) as raised:
        exchange(str(within), str(tmp_path / "none"))
    assert raised.value.filename == str(within)
    assert raised.value.filename2 == str(tmp_path / "none")
