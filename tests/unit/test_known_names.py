"""Known names: what is certainly not there, and the bound on what is remembered."""

from __future__ import annotations

import pytest

from fpfs.daemon import known_names
from fpfs.daemon.known_names import KnownNames


def test_only_a_listed_directory_lacks_names() -> None:
    names = KnownNames()
    assert names.wants(1)
    assert not names.lacks(1, b"a")
    names.listed(1, [b"a"])
    assert not names.wants(1)
    assert names.lacks(1, b"b")
    assert not names.lacks(1, b"a")
    names.added(1, b"b")
    names.removed(1, b"a")
    assert names.lacks(1, b"a")
    assert not names.lacks(1, b"b")
    names.forget(1)
    assert not names.lacks(1, b"a")


def test_large_directories_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_names, "NAMES_LISTED_MAX", 3)
    names = KnownNames()
    names.listed(1, [b"a", b"b", b"c", b"d"])
    assert not names.wants(1)
    assert not names.lacks(1, b"x")


def test_the_bound_counts_names_of_all_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_names, "NAMES_MAX", 4)
    names = KnownNames()
    names.listed(1, [b"a", b"b"])
    names.listed(2, [b"c", b"d"])
    names.removed(2, b"d")
    names.removed(2, b"d")
    names.added(1, b"e")
    names.added(1, b"e")
    assert names.lacks(1, b"x")
    names.added(1, b"f")  # The fifth: what is known of its directory is given up.
    assert not names.lacks(1, b"x")
    assert names.lacks(2, b"x")
    names.added(2, b"g")
    names.added(2, b"h")
    names.added(2, b"i")
    assert names.lacks(2, b"x")
    names.added(2, b"j")
    assert not names.lacks(2, b"x")
