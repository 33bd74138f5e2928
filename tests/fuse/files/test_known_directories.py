"""What the channel answers for directories by itself: always what is true at that moment."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fpfs.testing.mounted import Mount
from tests.support.system import RenameFlag, renameat2, stat_from_server
from tests.support.target import plain_target


class Seen(NamedTuple):
    """What a change does to a directory's attributes: all but the moment itself."""

    mode: int
    links: int
    owner: tuple[int, int]
    mtime_changed: bool
    ctime_changed: bool


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("create", lambda d: (d / "a/file").touch()),
    ("create again", lambda d: (d / "a/file").touch()),
    ("mkdir", lambda d: (d / "a/inner").mkdir()),
    ("mknod", lambda d: os.mkfifo(d / "a/fifo")),
    ("symlink", lambda d: (d / "a/link").symlink_to("file")),
    ("link", lambda d: os.link(d / "a/file", d / "b/second")),
    ("rename here", lambda d: (d / "a/file").rename(d / "a/renamed")),
    ("rename there", lambda d: (d / "a/renamed").rename(d / "b/renamed")),
    ("rename a directory there", lambda d: (d / "a/inner").rename(d / "b/inner")),
    ("mkdir both", lambda d: ((d / "a/empty").mkdir(), (d / "b/replaced").mkdir())),
    ("replace a directory", lambda d: (d / "a/empty").rename(d / "b/replaced")),
    (
        "exchange a directory and a file",
        lambda d: renameat2(d / "a/fifo", d / "b/inner", RenameFlag.EXCHANGE),
    ),
    ("unlink", lambda d: (d / "a/link").unlink()),
    ("rmdir", lambda d: (d / "b/replaced").rmdir()),
    ("chmod", lambda d: (d / "a").chmod(0o2750)),
    ("chown", lambda d: os.chown(d / "a", 12, 34)),
    ("utimens", lambda d: os.utime(d / "b", ns=(-1_500_000_000, 1_500_000_001))),
    ("setxattr", lambda d: os.setxattr(d / "b", "user.note", b"value")),
    ("removexattr", lambda d: os.removexattr(d / "b", "user.note")),
    ("write a file in it", lambda d: (d / "b/renamed").write_bytes(b"bytes")),
]


def play(root: Path) -> dict[str, list[Seen]]:
    """Make all changes; after each, what is seen of both directories, without caches."""
    for name in "ab":
        (root / name).mkdir(mode=0o755)
    seen = {}
    for change, make in CHANGES:
        before = [stat_from_server(root / name) for name in "ab"]
        wait_for_a_later_time(root)
        make(root)
        after = [stat_from_server(root / name) for name in "ab"]
        seen[change] = [
            Seen(
                mode=new.mode,
                links=new.nlink,
                owner=(new.uid, new.gid),
                mtime_changed=new.mtime_ns != old.mtime_ns,
                ctime_changed=new.ctime_ns != old.ctime_ns,
            )
            for old, new in zip(before, after, strict=True)
        ]
    return seen


def wait_for_a_later_time(root: Path) -> None:
    """Return when a file made now has another time than one made before: kernels count in ticks."""
    probe = root / "probe"
    probe.touch()
    first_ns = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == first_ns:
        probe.chmod(0o600)
    probe.unlink()


@pytest.mark.root
def test_attributes_are_true_after_every_change(mount: Mount, directory: Path) -> None:
    played = play(directory)
    with plain_target() as plain:
        assert played == play(plain.root)
    kept = [stat_from_server(directory / name) for name in "ab"]
    mount.remount()
    assert [stat_from_server(directory / name) for name in "ab"] == kept
    assert (kept[1].atime_ns, kept[1].mtime_ns) == (-1_500_000_000, 1_500_000_001)


def test_negative_times_arrive(directory: Path) -> None:
    os.utime(directory, ns=(-1_500_000_000, -1))
    for _ in range(2):  # the first answer may be pyfuse3's
        seen = stat_from_server(directory)
        assert (seen.atime_ns, seen.mtime_ns) == (-1_500_000_000, -1)


def relayed(mount: Mount) -> int:
    return mount.status().channel["relayed"]


def test_what_is_known_never_reaches_python(mount: Mount, directory: Path) -> None:
    stat_from_server(directory)
    (directory / "first").exists()
    (directory / "file").touch()
    before = relayed(mount)
    for number in range(100):
        assert not (directory / f"absent{number}").exists()
        assert stat.S_ISDIR(stat_from_server(directory).mode)
    assert relayed(mount) == before
    assert (directory / "file").exists()
    with pytest.raises(FileNotFoundError):
        (directory / "absent0").stat()
    (directory / "absent0").touch()
    assert relayed(mount) > before
    assert (directory / "absent0").exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_stat_of_a_cached_name_never_reaches_python(
    mount: Mount, directory: Path, kind: str
) -> None:
    path = directory / "below" / kind
    before_creation = relayed(mount)
    path.parent.mkdir()
    make = {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to("file")}
    make[kind]()
    mount.flush()  # what a commit changes is told to the kernel before
    first = path.lstat()
    before = relayed(mount)
    assert before > before_creation, "a counter that stands still shows nothing"
    for _ in range(1000):
        assert path.lstat() == first
    assert relayed(mount) == before


def forget_names() -> None:
    """Make the kernel look up again what it knows."""
    Path("/proc/sys/vm/drop_caches").write_text("2")


@pytest.mark.alone
@pytest.mark.root
def test_names_that_come_and_go_are_found(mount: Mount, directory: Path) -> None:
    """A directory whose names are known, after every operation on names, and after a remount."""
    (directory / "sub").mkdir()
    assert not (directory / "x").exists()
    # What is open stays known to the kernel, and with it its names to the channel.
    opened = [os.open(path, os.O_DIRECTORY) for path in (directory, directory / "sub")]
    (directory / "x").touch()
    (directory / "x").rename(directory / "y")
    (directory / "y").rename(directory / "sub/z")
    os.link(directory / "sub/z", directory / "linked")
    (directory / "symbolic").symlink_to("linked")
    renameat2(directory / "linked", directory / "sub/z", RenameFlag.EXCHANGE)
    (directory / "sub").rename(directory / "moved")
    (directory / "made").mkdir()
    os.mkfifo(directory / "fifo")
    (directory / "gone").touch()
    (directory / "gone").unlink()
    (directory / "made/gone").mkdir()
    (directory / "made/gone").rmdir()
    expected = ["fifo", "linked", "made", "moved", "symbolic"]
    for _ in range(2):
        forget_names()
        for name in ["x", "y", "sub", "z", "gone", *expected]:
            assert (directory / name).exists() == (name in expected), name
        assert (directory / "moved/z").exists()
        assert not (directory / "made/gone").exists()
        assert sorted(os.listdir(directory)) == expected
        for fd in opened:
            os.close(fd)
        opened = []
        mount.remount()
