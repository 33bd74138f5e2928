"""What is durable of a directory while it becomes a device, or ceases to be one."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from fpfs.daemon.devices import attach
from fpfs.daemon.devices.label import STAMP_NAME
from fpfs.daemon.devices.opened_set import OBJECTS_NAME, DeviceDirectory


class Flushes:
    """Notes what a directory holds whenever the module flushes it, and when it loses its stamp."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.durable: set[str] = set()
        self.durable_without_stamp: set[str] | None = None
        flush_directory = attach.flush_directory

        def flush(path: Path) -> None:
            flush_directory(path)
            self.durable = set(os.listdir(path))

        def unlink(path: str) -> None:
            os.unlink(path)
            if os.path.basename(path) == STAMP_NAME:
                self.durable_without_stamp = set(self.durable)

        monkeypatch.setattr(attach, "flush_directory", flush)
        own_os = types.SimpleNamespace(**{**vars(os), "unlink": unlink})
        monkeypatch.setattr(attach, "os", own_os)


@pytest.fixture
def device(tmp_path: Path) -> DeviceDirectory:
    """An empty directory that is to be a device."""
    folder = tmp_path / "device"
    folder.mkdir()
    return DeviceDirectory(1, str(folder), "ab" * 8)


def test_the_catalog_may_know_a_device_whose_objects_are_durable(
    device: DeviceDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    attach.stamp_joining(device, [], "f" * 16)
    assert flushes.durable == {STAMP_NAME, OBJECTS_NAME}


def test_a_stamp_goes_when_the_objects_are_gone_for_good(
    device: DeviceDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach.stamp_joining(device, [], "f" * 16)
    ahead_of_need = Path(device.path) / OBJECTS_NAME / "00"
    ahead_of_need.mkdir()
    (ahead_of_need / "object").touch()
    flushes = Flushes(monkeypatch)
    flushes.durable = {STAMP_NAME, OBJECTS_NAME}
    attach.give_back(device.path, asked="test")
    assert flushes.durable_without_stamp == {STAMP_NAME}
    assert flushes.durable == set()


def test_a_directory_with_content_keeps_its_stamp(
    device: DeviceDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    attach.stamp_joining(device, [], "f" * 16)
    folder = Path(device.path) / OBJECTS_NAME / "00"
    folder.mkdir()
    (folder / "object").write_bytes(b"content")
    assert not attach.empty_directory(device.path)
    assert (folder / "object").read_bytes() == b"content"
    assert (Path(device.path) / STAMP_NAME).exists()
    assert "is not empty" in caplog.text
