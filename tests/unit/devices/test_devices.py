"""Device directories: formatting, knowing them again, and every refusal's message."""

import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fpfs.core.refusal import Refused
from fpfs.daemon.devices import directory
from fpfs.daemon.devices.directory import DEVICES_MAX, find_devices, open_devices
from fpfs.daemon.devices.label import FORMAT_VERSION, STAMP_NAME, lock_unnoted
from fpfs.daemon.devices.opened_set import DeviceSet
from tests.support.images import make_image, mounted_image, needs_filesystem_identity
from tests.support.processes import run
from tests.support.servers import draining


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three empty directories."""
    made = [tmp_path / name for name in ("a", "b", "c")]
    for folder in made:
        folder.mkdir()
    return made


def opened(folders: Sequence[Path], *, adopt: bool = False) -> DeviceSet:
    return open_devices(
        [str(folder) for folder in folders], mountpoint="", asked="mount at /ckpt", adopt=adopt
    )


def formatted(folders: Sequence[Path]) -> str:
    with opened(folders) as devices:
        assert devices.formatted
        return devices.filesystem_id


def refusal(folders: Sequence[Path], *, adopt: bool = False) -> str:
    with pytest.raises(Refused) as raised:
        opened(folders, adopt=adopt)
    message = str(raised.value)
    assert re.fullmatch(r"mount at /ckpt: [^\n]+; [^\n]+", message)
    return message


def edit_stamp(folder: Path, **changes: object) -> None:
    stamp = folder / "fpfs.json"
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), **changes}))


def test_empty_directories_are_formatted_and_known_again(folders: list[Path]) -> None:
    (folders[1] / "lost+found").mkdir()
    filesystem_id = formatted(folders)
    with opened(folders) as devices:
        assert not devices.formatted
        assert devices.filesystem_id == filesystem_id
        assert [device.number for device in devices.devices] == [0, 1, 2]
        assert [device.path for device in devices.devices] == [str(folder) for folder in folders]
        assert devices.catalog_directories == (str(folders[0]), str(folders[1]))
    assert all((folder / "objects").is_dir() for folder in folders)


def test_order_on_the_command_line_does_not_matter(folders: list[Path]) -> None:
    formatted(folders)
    with opened(folders[::-1]) as devices:
        assert [device.path for device in devices.devices] == [str(folder) for folder in folders]


def test_a_shared_filesystem_is_noted(folders: list[Path]) -> None:
    with opened(folders[:2]) as devices:
        (note,) = devices.notes
    assert note.startswith(f"{folders[0]} and {folders[1]} lie on one filesystem")


def test_a_directory_in_use_is_refused(folders: list[Path]) -> None:
    with opened(folders):
        message = refusal(folders)
    assert f"{folders[0]} is in use (process {os.getpid()}); unmount it there" in message
    with opened(folders):
        pass


def contents(folders: Sequence[Path]) -> list[bytes | None]:
    """The stamps as they are, byte for byte."""
    stamps = [folder / STAMP_NAME for folder in folders]
    return [stamp.read_bytes() if stamp.exists() else None for stamp in stamps]


def remove_the_second(folders: Sequence[Path]) -> None:
    edit_stamp(folders[0], device_count=3, removed=[1], catalog_devices=[0, 2], generation=3)
    (folders[1] / "objects").rmdir()
    (folders[1] / STAMP_NAME).unlink()


def add_a_third(folders: Sequence[Path]) -> None:
    paths = [str(folder) for folder in folders]
    for folder in folders[:2]:
        edit_stamp(folder, device_count=3, generation=1, paths=paths)


@pytest.mark.parametrize(
    ("change", "awaited", "why"),
    [
        (remove_the_second, 1, "{1} is empty, while {0} belongs to a filesystem; name"),
        (add_a_third, 0, "of 3 devices, device 2 (last at {2}) is missing; name all"),
    ],
)
def test_devices_that_change_while_their_mount_is_waited_for(
    change: Callable[[Sequence[Path]], None],
    awaited: int,
    why: str,
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits does not undo it: the stamps stay as that mount left them."""
    formatted(folders[:2])
    left: list[bytes | None] = []

    def last() -> None:
        change(folders)
        left.extend(contents(folders))

    with draining(folders[awaited], monkeypatch, last=last):
        message = refusal(folders[:2])
    assert why.format(*folders) in message
    assert contents(folders) == left


def test_stamps_are_those_that_the_mount_left_that_was_waited_for(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    formatted(folders)

    def move_the_catalog() -> None:
        for folder in folders:
            edit_stamp(folder, catalog_devices=[0, 2], generation=1)

    with (
        draining(folders[2], monkeypatch, last=move_the_catalog),
        opened(folders) as devices,
    ):
        assert devices.catalog_directories == (str(folders[0]), str(folders[2]))
    stamps = [json.loads((folder / STAMP_NAME).read_text()) for folder in folders]
    assert [stamp["catalog_devices"] for stamp in stamps] == [[0, 2]] * 3
    assert [stamp["generation"] for stamp in stamps] == [1] * 3


def test_what_comes_into_an_empty_directory_while_it_is_waited_for(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with draining(folders[0], monkeypatch, last=(folders[1] / "thesis.tex").touch):
        message = refusal(folders[:2])
    assert f"{folders[1]} is not empty (thesis.tex is in it)" in message
    assert contents(folders) == [None, None, None]


def test_who_only_looks_sees_what_a_mount_left_that_ended_in_between(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    formatted(folders)

    def locked(path: str, *, asked: str, alone: bool) -> int:
        edit_stamp(Path(path), catalog_devices=[0, 2], generation=1)
        return lock_unnoted(path, asked=asked, alone=alone)

    monkeypatch.setattr(directory, "lock_unnoted", locked)
    with find_devices([str(folder) for folder in folders], asked="fsck") as devices:
        assert devices.catalog_directories == (str(folders[0]), str(folders[2]))


def test_too_many_devices(folders: list[Path]) -> None:
    message = refusal([folders[0]] * (DEVICES_MAX + 1))
    assert (
        message
        == "mount at /ckpt: 65536 devices are more than 65535; name fewer directories with -d"
    )
    assert os.listdir(folders[0]) == []


def test_what_does_not_exist(folders: list[Path]) -> None:
    missing = folders[0] / "missing"
    assert f"the device directory {missing} does not exist" in refusal([missing])


def test_what_is_no_directory(folders: list[Path]) -> None:
    file = folders[0] / "file"
    file.touch()
    assert f"the device directory {file} is not a directory" in refusal([file])


def test_a_directory_with_other_things(folders: list[Path]) -> None:
    (folders[0] / "thesis.tex").touch()
    message = refusal(folders)
    assert f"{folders[0]} is not empty (thesis.tex is in it) and holds no fpfs device" in message
    assert sorted(path.name for path in folders[1].iterdir()) == []


def test_a_directory_given_twice(folders: list[Path]) -> None:
    link = folders[0].parent / "link"
    link.symlink_to(folders[0])
    assert f"the device directory {folders[0]} is given twice" in refusal([folders[0], folders[0]])
    assert "is given twice" in refusal([folders[0], link])


def test_directories_within_each_other(folders: list[Path]) -> None:
    inner = folders[0] / "inner"
    inner.mkdir()
    assert "lie within each other" in refusal([folders[0], inner])


def test_a_device_missing(folders: list[Path]) -> None:
    formatted(folders)
    message = refusal([folders[0], folders[2]])
    assert f"of 3 devices, device 1 (last at {folders[1]}) is missing; name all" in message


def test_a_device_of_another_filesystem(folders: list[Path]) -> None:
    first, second = formatted(folders[:2]), formatted(folders[2:])
    message = refusal(folders)
    assert f"{folders[2]} belongs to filesystem {second}, and {folders[0]} to {first}" in message


def test_an_empty_directory_beside_formatted_ones(folders: list[Path]) -> None:
    formatted(folders[:2])
    assert f"{folders[2]} is empty, while {folders[0]} belongs to a filesystem" in refusal(folders)


def test_a_copy_beside_the_original(folders: list[Path]) -> None:
    formatted(folders[:2])
    copy = folders[2] / "copy"
    shutil.copytree(folders[1], copy)
    message = refusal([*folders[:2], copy])
    assert f"{folders[1]} and {copy} are both device 1: one is a copy" in message


def test_a_copy_instead_of_the_original(folders: list[Path]) -> None:
    formatted(folders[:2])
    copy = folders[2] / "copy"
    shutil.copytree(folders[1], copy)
    message = refusal([folders[0], copy])
    assert f"{copy} was copied or moved" in message
    assert f"(last at {folders[1]})" in message
    with opened([folders[0], copy], adopt=True):
        pass
    with opened([folders[0], copy]) as devices:
        assert devices.devices[1].path == str(copy)


@pytest.mark.root
@needs_filesystem_identity
def test_a_copy_of_the_whole_filesystem(tmp_path: Path) -> None:
    """Everything in it is the same, the directory's inode included: only its identity differs."""
    original, copy = tmp_path / "original.img", tmp_path / "copy.img"
    make_image(original)
    with mounted_image(original) as mountpoint:
        folder = mountpoint / "device"
        folder.mkdir()
        formatted([folder])
        with opened([folder]):
            pass
    shutil.copy(original, copy)
    # tune2fs wants a check later than the last mount, in seconds. (1: it had something to set.)
    checked = subprocess.run(["e2fsck", "-fy", copy], capture_output=True, check=False)
    assert checked.returncode in (0, 1), checked.stdout
    run("tune2fs", "-U", uuid.uuid4(), copy)
    with mounted_image(copy) as mountpoint:
        copied = mountpoint / "device"
        message = refusal([copied])
        assert f"{copied} was copied or moved: its stamp was written for another" in message
        assert f"(last at {folder}); mount the original, or accept this one for good" in message
        with opened([copied], adopt=True):
            pass
        with opened([copied]) as devices:
            assert devices.devices[0].path == str(copied)


@pytest.mark.root
@needs_filesystem_identity
def test_where_no_identity_was_known_the_inode_decides(tmp_path: Path) -> None:
    """Stamped under a kernel that tells none; from now on it is known."""
    identity = make_image(tmp_path / "image.img")
    with mounted_image(tmp_path / "image.img") as mountpoint:
        folder = mountpoint / "device"
        folder.mkdir()
        formatted([folder])
        inode = folder.stat().st_ino
        edit_stamp(folder, backing={"uuid": "", "inode": inode})
        with opened([folder]) as devices:
            assert not devices.formatted
        known = json.loads((folder / "fpfs.json").read_text())["backing"]
        assert known == {"uuid": identity.hex, "inode": inode}
        edit_stamp(folder, backing={"uuid": "", "inode": inode + 1})
        assert "was copied or moved" in refusal([folder])


def test_a_newer_format(folders: list[Path]) -> None:
    formatted(folders[:1])
    edit_stamp(folders[0], format_version=FORMAT_VERSION + 1, something_new=True)
    message = refusal(folders[:1])
    assert f"{folders[0]} has format {FORMAT_VERSION + 1}, and this fpfs knows formats up to" in (
        message
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format_version": 1}', b"\xff\x00"])
def test_a_damaged_stamp(folders: list[Path], content: bytes) -> None:
    formatted(folders[:1])
    (folders[0] / "fpfs.json").write_bytes(content)
    assert f"{folders[0]}/fpfs.json is damaged" in refusal(folders[:1])


def test_a_refusal_leaves_nothing_locked(folders: list[Path]) -> None:
    formatted(folders)
    refusal(folders[:2])
    with opened(folders):
        pass


def test_none_of_them_can_be_used(tmp_path: Path) -> None:
    """Which ones hold the catalog, nothing that is there says: drains have moved it."""
    with pytest.raises(Refused, match=r"is empty.*; name at least one that holds catalog\.db$"):
        open_devices([str(tmp_path)], mountpoint="", asked="mount at /ckpt", degraded=True)
