"""The file that takes a name's place: what is left of it when, and whose leftovers go."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fpfs.client import replacement
from fpfs.client.replacement import Replacement
from fpfs.core.temporary_names import PREFIX
from tests.support.nobody import NOBODY, being_nobody


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Another process that has written half of a file, and is killed at the end."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        replacement = Replacement(str(path))
        os.write(replacement.fd, b"half")
        os.write(told, b"half")
        signal.pause()
    try:
        assert os.read(ready, 4) == b"half"
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(told)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def replace(path: Path, content: bytes) -> None:
    with Replacement(str(path)) as replacement:
        os.write(replacement.fd, content)
        replacement.commit(durable=True)


def test_the_name_has_one_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"former")
    with Replacement(str(path)) as replacement:
        os.write(replacement.fd, b"new")
        assert path.read_bytes() == b"former"
        replacement.commit(durable=False)
        assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["state.pt"]


def test_without_a_commit_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"former")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), Replacement(str(path)) as replacement:
        os.write(replacement.fd, b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"former"
    assert names(tmp_path) == ["state.pt"]
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    path, other = tmp_path / "state.pt", tmp_path / "other.pt"
    for target in (path, other):
        with writing(target):
            # One that is being written stays.
            replace(target, b"new")
            assert len(names(tmp_path)) == 2
        (left,) = (name for name in names(tmp_path) if os.fsencode(name).startswith(PREFIX))
        assert left.endswith(f".{target.name}")
        replace(path if target == other else other, b"not its own")
        assert left in names(tmp_path)
        replace(target, b"newer")
        assert left not in names(tmp_path)
        other.unlink()
        path.unlink()


def test_several_processes_replace_one_name(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    pids = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for _ in range(100):
                    replace(path, bytes([number]) * 10_000)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert path.read_bytes() in [bytes([number]) * 10_000 for number in range(4)]
    assert names(tmp_path) == ["state.pt"]


def test_what_else_bears_such_a_name_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    left = [tmp_path / f"{PREFIX.decode()}{number:016x}.state.pt" for number in range(4)]
    left[0].mkdir()
    os.mkfifo(left[1])
    left[2].symlink_to(left[2])
    left[3].symlink_to("/dev/zero")
    other = tmp_path / f"{PREFIX.decode()}not-a-number-01.state.pt"
    other.touch()
    replace(path, b"new")
    assert names(tmp_path) == sorted(each.name for each in (path, other, *left))


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o700])
def test_nobody_is_let_in_on_the_way(tmp_path: Path, mode: int, monkeypatch: Any) -> None:
    path = tmp_path / "state.pt"
    path.touch()
    path.chmod(mode)
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)
    with Replacement(str(path)) as replacement:
        made = stat.S_IMODE(os.fstat(replacement.fd).st_mode)
        assert made & ~mode == 0


@pytest.mark.root
def test_another_group_is_not_let_in() -> None:
    """Who may not give a file to the group that its former one had."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        path = Path(folder, "state.pt")
        path.touch()
        for place, group, mode in ((Path(folder), 0, 0o755), (path, 1234, 0o664)):
            os.chown(place, NOBODY, group)
            place.chmod(mode)
        with being_nobody():
            replace(path, b"new")
        found = path.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (NOBODY, 0, 0o604)


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Replacement(str(tmp_path / "none" / "state.pt"))


def test_names_as_long_as_names_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".ckpt")
    replace(path, b"new")
    assert names(tmp_path) == [path.name]


def test_room_is_reserved(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with Replacement(str(path)) as replacement:
        replacement.reserve(3_000_000)
        status = os.fstat(replacement.fd)
        assert status.st_size == 3_000_000
        assert status.st_blocks * 512 >= 3_000_000
        with pytest.raises(OSError, match=r"No space left|File too large"):
            replacement.reserve(2**62)
    assert names(tmp_path) == []


@contextlib.contextmanager
def child() -> Iterator[None]:
    """A process that is forked here, and so has all descriptors as long as it lives."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_child_does_not_keep_a_directory_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "LOCK_S", 1.0)
    with contextlib.ExitStack() as children:
        with replacement.locked_directory(str(tmp_path)):
            children.enter_context(child())
        with replacement.locked_directory(str(tmp_path)):
            pass


@pytest.mark.parametrize("on_fpfs", [False, True])
def test_a_child_does_not_keep_a_file_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_fpfs: bool
) -> None:
    """As a share that the next checkpoint is to remove. On fpfs another descriptor has the lock."""
    monkeypatch.setattr(replacement, "is_on_fpfs", lambda _: on_fpfs)
    with contextlib.ExitStack() as children:
        with Replacement(str(tmp_path / "share")) as file:
            children.enter_context(child())
            file.commit(durable=False)
        assert names(tmp_path) == ["share"]
        replacement.remove_left(str(tmp_path / "manifest"), of=lambda found: found == b"share")
        assert names(tmp_path) == []
