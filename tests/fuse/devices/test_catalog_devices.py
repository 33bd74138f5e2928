"""The two copies of the catalog under a mount: one that is gone or damaged, and both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fpfs.core.protocol.reports import RecoveryStatus
from fpfs.testing.mounted import CommandFailed, Mount, check_fpfs, mounted
from tests.support.catalog.catalogs import Damage
from tests.support.failures.crash import close_dead, crash
from tests.support.servers import wait_collected

REMADE = r"fpfs\.daemon\.catalog\.open_replicas: catalog .* was made anew from .*: "


def make_names(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Names with modes, sizes and attributes; returns what `names` finds of them."""
    for number in range(20):
        path = root / f"file{number}"
        path.write_bytes(b"x" * number * 100)
        path.chmod(0o600 + number % 8)
        os.setxattr(path, "user.number", b"%d" % number)
    (root / "file3").rename(root / "moved")
    (root / "file4").unlink()
    return names(root)


def names(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, size and attribute of everything in a folder."""
    return {
        path.name: (path.stat().st_mode, path.stat().st_size, os.getxattr(path, "user.number"))
        for path in root.iterdir()
    }


def remove_all(folder: Path) -> None:
    """Remove a copy of the catalog."""
    for name in ("catalog.db", "catalog.db-wal", "catalog.sums"):
        (folder / name).unlink(missing_ok=True)


def cut_database(folder: Path) -> None:
    """Cut the database short."""
    Damage(folder.name, "catalog.db", "truncate", 1).apply(folder.parent)


def flip_sums(folder: Path) -> None:
    """Change bytes of the checksums."""
    Damage(folder.name, "catalog.sums", "flip", 2).apply(folder.parent)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", [remove_all, cut_database, flip_sums])
@pytest.mark.parametrize("ending", [Mount.unmount, crash])
def test_a_mount_without_one_copy_makes_it_anew(
    number: int, damage: Callable[[Path], None], ending: Callable[[Mount], None]
) -> None:
    with mounted(devices=2) as mount:
        mount.expect_log(REMADE)
        expected = make_names(mount.root)
        mount.flush()
        ending(mount)
        damage(mount.devices[number])
        mount.mount()
        assert names(mount.root) == expected
        status = mount.status()
        assert status.catalog.copies_in_service == 2
        (line,) = status.recovery.catalog
        assert str(mount.devices[number]) in line
        wait_collected(mount)
        mount.remount()
        assert names(mount.root) == expected
        assert mount.status().recovery == RecoveryStatus()


def test_a_mount_with_both_copies_damaged_is_refused() -> None:
    with mounted(devices=2) as mount:
        mount.expect_log("fpfs.server: mount at .* cannot be used: .* cannot be used: ")
        expected = make_names(mount.root)
        mount.unmount()
        kept = {device: (device / "catalog.db").read_bytes() for device in mount.devices}
        for device in mount.devices:
            cut_database(device)
        with pytest.raises(CommandFailed, match="put back catalog.db and catalog.sums of one"):
            mount.mount()
        for device, content in kept.items():
            (device / "catalog.db").write_bytes(content)
        mount.mount()
        assert names(mount.root) == expected


def test_what_was_recovered_is_told() -> None:
    """A file with staged bytes, one that was open without a name, objects of no version."""
    with mounted(devices=2) as mount:
        staged = os.open(mount.root / "staged", os.O_RDWR | os.O_CREAT)
        os.write(staged, b"x" * 100)
        unnamed = os.open(mount.root / "unnamed", os.O_RDWR | os.O_CREAT)
        (mount.root / "unnamed").unlink()
        mount.kill(mount.keeper_pid, mount.server_pid)
        mount.tear_down()
        close_dead(staged)
        close_dead(unnamed)
        mount.mount()
        wait_collected(mount)
        found = mount.status().recovery
        assert (found.files_taken_over, found.inodes_deleted) == (1, 1)
        assert (found.handles_taken_over, found.catalog) == (0, ())
        assert found.objects_removed, "some were kept ready"
        assert (mount.root / "staged").read_bytes() == b"x" * 100
        text = check_fpfs("recovery", mount.root, module="fpfs.cli.ctl")
        assert "finished: 1 file with changes that were acknowledged and not committed" in text
        assert "rolled back: 1 file without a name, or never finished, deleted" in text
        assert f"rolled back: {found.objects_removed} object" in text
        as_json = check_fpfs("recovery", "--json", mount.root, module="fpfs.cli.ctl")
        assert msgspec.json.decode(as_json, type=RecoveryStatus) == found
        mount.remount()
        assert "nothing had to be recovered" in check_fpfs(
            "recovery", mount.root, module="fpfs.cli.ctl"
        )
