"""Devices whose filesystem takes writes with O_DIRECT and cannot read with it: they are refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import check_fpfs, mounted, run_fpfs
from tests.support.failures.injection import Call, Fault, Injector

NO_DIRECT_READ = Fault(Call.READ, 1, errno.EINVAL)
REFUSED = "cannot be read with it (Invalid argument)"


@pytest.fixture
def injector(tmp_path: Path) -> Injector:
    return Injector(tmp_path / "faults")


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """An empty directory."""
    path = tmp_path / "device"
    path.mkdir()
    return path


def test_format_refuses_a_device_without_direct_reads(injector: Injector, device: Path) -> None:
    injector.begin(NO_DIRECT_READ)
    done = run_fpfs("format", "-d", device, environment=injector.environment([device]))
    assert injector.end()
    assert done.returncode == 1
    assert REFUSED in done.stderr
    assert done.stderr.count("\n") == 1
    assert os.listdir(device) == ["lock"]
    check_fpfs("format", "-d", device)


def test_mount_refuses_a_device_without_direct_reads(
    injector: Injector, device: Path, tmp_path: Path
) -> None:
    check_fpfs("format", "-d", device)
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    injector.begin(NO_DIRECT_READ)
    done = run_fpfs(
        *("mount", "-d", device, "-o", "staging=16M", "--log", tmp_path / "log", mountpoint),
        environment=injector.environment([device]),
    )
    fired = injector.end()
    if mount_at(str(mountpoint)) is not None:
        check_fpfs("umount", mountpoint)
    assert fired
    assert done.returncode == 1
    assert REFUSED in done.stderr
    assert done.stderr.count("\n") == 1


def test_add_refuses_a_device_without_direct_reads(
    injector: Injector, device: Path, tmp_path: Path
) -> None:
    with mounted(devices=1, parent=tmp_path, environment=injector.environment([device])) as mount:
        injector.begin(NO_DIRECT_READ)
        done = run_fpfs("device", "add", mount.root, device, module="fpfs.cli.ctl")
        assert injector.end()
        assert done.returncode == 1
        assert REFUSED in done.stderr
        assert done.stderr.count("\n") == 1
        assert len(mount.status().devices) == 1
        check_fpfs("device", "add", mount.root, device, module="fpfs.cli.ctl")
