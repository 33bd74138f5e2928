"""Known directories: what is certainly not there, and the bound on what is remembered."""

from __future__ import annotations

from fpfs.core.engine import KnownDirectories


def known(*, names_max: int = 100, listed_max: int = 100) -> KnownDirectories:
    return KnownDirectories(names_max=names_max, listed_max=listed_max, valid_s=1)


def test_only_a_listed_directory_lacks_names() -> None:
    names = known()
    assert names.wants(1)
    assert not names.lacks(1, b"a")
    names.added(1, b"a")
    assert not names.lacks(1, b"b")
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
    assert names.wants(1)


def test_large_directories_are_refused() -> None:
    names = known(listed_max=3)
    names.listed(1, [b"a", b"b", b"c", b"d"])
    assert not names.wants(1)
    assert not names.lacks(1, b"x")
    names.forget(1)
    assert names.wants(1)
    names.listed(1, [b"a", b"b", b"c"])
    assert names.lacks(1, b"x")


def test_all_sets_together_are_bounded() -> None:
    names = known(names_max=4)
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
    names.listed(3, [b"k", b"l", b"m", b"n"])
    assert names.lacks(3, b"x")
    names.listed(3, [b"o"])
    names.listed(4, [b"p", b"q", b"r"])
    assert names.lacks(4, b"x")


def test_names_are_bytes_of_any_kind() -> None:
    names = known()
    names.listed(1, [b"\xff\xfe", b"with\nline", b"n" * 255])
    assert not names.lacks(1, b"\xff\xfe")
    assert not names.lacks(1, b"n" * 255)
    assert names.lacks(1, b"\xff")
    assert names.lacks(1, b"n" * 254)


def test_attributes_are_known_until_the_directory_is_forgotten() -> None:
    directories = known()
    assert not directories.has_attributes(1)
    directories.listed(1, [])
    assert not directories.has_attributes(1)
    directories.set_attributes(
        ino=1, mode=0o40755, nlink=2, uid=0, gid=0, atime_ns=-1, mtime_ns=0, ctime_ns=1
    )
    assert directories.has_attributes(1)
    assert directories.lacks(1, b"a")
    directories.forget(1)
    assert not directories.has_attributes(1)
    assert not directories.lacks(1, b"a")
