"""Places outside the device directories."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_containing
from fpfs.core.refusal import Refused
from fpfs.daemon.mount.paths import (
    SETTLED_S,
    default_device,
    default_log,
    make_runtime_folder,
    remove_what_ended,
)


def bound(path: Path, *, listening: bool, age_s: float) -> socket.socket:
    """A Unix socket at a path, as old as asked."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    if listening:
        made.listen(1)
    moment_s = path.stat().st_mtime - age_s
    os.utime(path, (moment_s, moment_s))
    return made


def test_only_sockets_that_nobody_listens_on_are_removed(tmp_path: Path) -> None:
    old_s = 2 * SETTLED_S
    (tmp_path / "other").touch()
    living = bound(tmp_path / "living.sock", listening=True, age_s=old_s)
    starting = bound(tmp_path / "starting.sock", listening=False, age_s=0)
    dead = bound(tmp_path / "dead.sock", listening=True, age_s=old_s)
    dead.close()
    remove_what_ended(str(tmp_path))
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["living.sock", "other", "starting.sock"]
    living.close()
    starting.close()


def test_sockets_of_what_is_there_or_comes_back_stay(tmp_path: Path) -> None:
    """No server listens while one is replaced, or when all were killed and the mount was left."""
    number = mount_containing(str(tmp_path)).device.replace(":", "-")
    with subprocess.Popen(["true"]) as nobody:
        nobody.wait()
    names = f"{number}.{nobody.pid}", f"0-999999.{os.getpid()}", f"0-999999.{nobody.pid}"
    for name in names:
        bound(tmp_path / f"{name}.sock", listening=True, age_s=2 * SETTLED_S).close()
    remove_what_ended(str(tmp_path))
    assert {path.name.removesuffix(".sock") for path in tmp_path.iterdir()} == set(names[:2])


def test_what_ends_came_to_is_removed_when_everybody_knows(tmp_path: Path) -> None:
    for name, age_s in (("old.ended", 2 * SETTLED_S), ("new.ended", 0)):
        (tmp_path / name).touch()
        moment_s = (tmp_path / name).stat().st_mtime - age_s
        os.utime(tmp_path / name, (moment_s, moment_s))
    remove_what_ended(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["new.ended"]


def test_users_places_follow_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert default_log("/mnt/my-ckpt") == f"{tmp_path}/.local/state/fpfs/mnt-my%2dckpt.log"
    assert default_device() == f"{tmp_path}/.local/share/fpfs/default"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_device() == f"{tmp_path}/data/fpfs/default"


def test_two_mountpoints_never_share_a_log() -> None:
    paths = ("/a/b", "/a-b", "/a--b", "/a/-b", "/a-/b", "/a/b/c", "/a%2db")
    assert len({default_log(path) for path in paths}) == len(paths)


def test_the_runtime_folder_is_ours() -> None:
    folder = make_runtime_folder(asked="mount")
    assert os.stat(folder).st_uid == os.geteuid()


def test_a_user_without_a_runtime_folder_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file has the name in the user's folder; those that others could make are not taken."""
    user = 2**31 + os.getpid()  # nobody's, and no other test's folder is called after it
    (tmp_path / "fpfs").touch()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made_by_another = Path(f"/tmp/fpfs-{user}")
    made_by_another.mkdir()
    try:
        with pytest.raises(Refused) as refused:
            make_runtime_folder(asked="mount")
    finally:
        made_by_another.rmdir()
    tried = f"{tmp_path}/fpfs, /run/user/{user}/fpfs, {made_by_another}"
    assert str(refused.value) == (
        f"mount: no folder for the control socket can be made (tried {tried});"
        " set XDG_RUNTIME_DIR to a folder of yours"
    )
