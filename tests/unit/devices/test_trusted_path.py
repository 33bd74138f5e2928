"""Which paths of device directories are refused, since others could change where they lead."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fpfs.core.refusal import Refused
from fpfs.daemon.devices.directory import open_devices
from fpfs.daemon.devices.trusted_path import check_trusted
from fpfs.daemon.mount.launch import format_devices
from fpfs.daemon.offline.export import export
from fpfs.daemon.offline.fsck import Wishes, check_devices

NOBODY_UID = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing owners needs root")


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """An empty directory two folders below one that nobody else may write to."""
    folder = tmp_path / "above" / "device"
    folder.mkdir(parents=True)
    return folder


def refusal(path: Path | str) -> str:
    """What is wrong, and what to do about it, from one line."""
    with pytest.raises(Refused) as raised:
        check_trusted(str(path), asked="mount at /ckpt")
    start = f"mount at /ckpt: the device directory {path} is not safe from others: "
    assert str(raised.value).startswith(start)
    said = str(raised.value).removeprefix(start)
    assert re.fullmatch(r"[^\n;]+; [^\n;]+", said)
    return said


def test_a_directory_of_ones_own_below_a_sticky_folder(device: Path) -> None:
    device.parent.chmod(0o1777)
    check_trusted(str(device), asked="mount")


@pytest.mark.parametrize(
    ("mode", "who"), [(0o775, "its group"), (0o757, "everybody"), (0o1777, "everybody")]
)
def test_others_may_not_write_to_the_device(device: Path, mode: int, who: str) -> None:
    device.chmod(mode)
    assert refusal(device) == (
        f"{who} may write to {device} (mode {mode:04o}); run chmod go-w {device}, or name a"
        " directory elsewhere"
    )


@pytest.mark.parametrize(("mode", "who"), [(0o775, "its group"), (0o777, "everybody")])
def test_others_may_not_write_to_a_folder_above(device: Path, mode: int, who: str) -> None:
    device.parent.chmod(mode)
    assert f"{who} may write to {device.parent} (mode {mode:04o})" in refusal(device)


@needs_root
@pytest.mark.parametrize("which", ["device", "above"])
def test_others_may_not_own_what_is_on_the_way(device: Path, which: str) -> None:
    place = device if which == "device" else device.parent
    os.chown(place, NOBODY_UID, -1)
    assert f"{place} belongs to nobody, who may change what is there" in refusal(device)


@needs_root
def test_a_link_of_somebody_else_is_not_followed(device: Path, tmp_path: Path) -> None:
    """In a sticky folder he could make it lead elsewhere, and where it leads is his choice."""
    shared, link = tmp_path / "shared", tmp_path / "shared" / "link"
    shared.mkdir()
    shared.chmod(0o1777)
    link.symlink_to(device)
    check_trusted(str(link), asked="mount")
    os.chown(link, NOBODY_UID, -1, follow_symlinks=False)
    assert f"{link} belongs to nobody" in refusal(link)
    assert f"{link} belongs to nobody" in refusal(f"{link}/../device")


def test_what_a_link_leads_through_is_looked_at(device: Path, tmp_path: Path) -> None:
    """Also when the link leads back out of it: whoever writes there can replace what is passed."""
    device.parent.chmod(0o777)
    (tmp_path / "safe").mkdir()
    (tmp_path / "link").symlink_to("above/device/../../safe")
    check_trusted(str(tmp_path / "safe"), asked="mount")
    assert f"everybody may write to {device.parent}" in refusal(tmp_path / "link")


def test_links_that_lead_to_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(Refused, match="Too many levels of symbolic links"):
        check_trusted(str(tmp_path / "a"), asked="mount")


def test_nothing_is_formatted_where_others_may_write(device: Path) -> None:
    device.chmod(0o777)
    with pytest.raises(Refused, match="everybody may write"):
        format_devices([str(device)])
    assert os.listdir(device) == []


def test_the_folders_of_the_default_device_are_made_for_oneself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask: many users have one that lets their groups write."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "new" / "data"))
    before = os.umask(0o002)
    try:
        made = format_devices([])
        assert os.umask(0o002) == 0o002, "as it was"
    finally:
        os.umask(before)
    assert [device.path for device in made.devices] == [f"{tmp_path}/new/data/fpfs/default"]
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_no_mount_uses_what_others_may_write_to(device: Path) -> None:
    """The server looks by itself: what its starter saw may have changed."""
    format_devices([str(device)])
    before = sorted(os.listdir(device))
    device.parent.chmod(0o777)
    with pytest.raises(Refused, match="everybody may write"):
        open_devices([str(device)], mountpoint="/ckpt", asked="mount")
    assert sorted(os.listdir(device)) == before


def test_nothing_is_repaired_where_others_may_write(device: Path) -> None:
    """A check alone reads regular files, which may be anybody's, and writes nothing."""
    format_devices([str(device)])
    device.parent.chmod(0o777)
    look = Wishes(repair=False, data=False, progress=lambda _done, _total: None)
    check_devices([str(device)], look)
    with pytest.raises(Refused, match="everybody may write"):
        check_devices([str(device)], look._replace(repair=True))


@needs_root
def test_root_exports_nothing_from_where_others_may_write(device: Path, tmp_path: Path) -> None:
    """They would choose what becomes a set-user-id program of root, or a device node."""
    format_devices([str(device)])
    device.parent.chmod(0o777)
    with pytest.raises(Refused, match="everybody may write"):
        export(
            [str(device)],
            str(tmp_path / "copy"),
            subtree="/",
            progress=lambda _done, _total: None,
        )
    assert not (tmp_path / "copy").exists()


def test_a_link_is_looked_at_before_it_is_resolved(device: Path, tmp_path: Path) -> None:
    device.parent.chmod(0o777)
    (tmp_path / "safe").mkdir()
    (tmp_path / "link").symlink_to("above/device/../../safe")
    with pytest.raises(Refused, match="everybody may write"):
        format_devices([str(tmp_path / "link")])


def test_a_server_that_takes_over_goes_on_with_what_was_used(device: Path) -> None:
    """Programs have files open there, which end with the mount."""
    format_devices([str(device)])
    with open_devices([str(device)], mountpoint="/ckpt", asked="mount") as first:
        device.parent.chmod(0o777)
        held = [os.dup(lock_fd) for lock_fd in first.lock_fds]
        with open_devices(
            [str(device)], mountpoint="/ckpt", asked="mount", held_fds=held
        ) as second:
            assert second.devices == first.devices
