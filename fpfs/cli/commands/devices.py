"""``fpfs-ctl device``: the devices of a mount, and changes of them while it is in use."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import App, Parameter

from fpfs.cli.asking import Json, ask, print_json
from fpfs.cli.commands.drain import DrainReport, drain_device
from fpfs.cli.show import (
    add_figures,
    add_texts,
    check_timeout,
    new_table,
    open_console,
    say,
)
from fpfs.core.device_names import parse_tags
from fpfs.core.paths import show_text
from fpfs.core.protocol.questions import AddDevice, AskStatus, EndDrain, RemoveDevice, TagDevice
from fpfs.core.protocol.reports import DeviceState, DeviceStatus
from fpfs.core.refusal import Refused, refuse_empty
from fpfs.core.units import format_size, parse_size_bytes

app = App(
    name="device",
    help="Show and change the devices of a mounted filesystem.\n\n"
    "A device is named by its number, its directory, or a tag that it alone has.",
)

LIST_TIMEOUT_S = 60.0


@app.command(name="list")
def list_(mountpoint: str, /, *, json: Json = False, timeout: float = LIST_TIMEOUT_S) -> int:
    """List the devices of the mount at MOUNTPOINT.

    Parameters
    ----------
    timeout
        Give up after so many seconds, with exit status 1.
    """
    check_timeout(timeout)
    asked = f"devices of {mountpoint}"
    devices = ask(mountpoint, AskStatus(), asked=asked, timeout_s=timeout).devices
    if json:
        print_json(devices)
    else:
        _show_devices(devices)
    return 0


def _show_devices(devices: tuple[DeviceStatus, ...]) -> None:
    console = open_console()
    table = new_table()
    add_figures(table, "device")
    add_texts(table, "directory", "tags", "state", "holds")
    add_figures(table, "used", "free")
    for device in devices:
        table.add_row(
            str(device.number),
            show_text(device.path),
            " ".join(device.tags),
            device.state,
            _held_by(device),
            format_size(device.bytes_used),
            format_size(device.bytes_free),
        )
    console.print(table)
    for device in devices:
        if device.error:
            say(console, f"warning: device {device.number} ({device.path}): {device.error}")


def _held_by(device: DeviceStatus) -> str:
    """Say in words what is on a device."""
    is_drained = device.state is DeviceState.DRAINING and not device.bytes_used
    held = [] if is_drained else ["contents"]
    if device.has_catalog:
        held.append("catalog")
    return ", ".join(held) or "nothing"


@app.command
def tag(
    mountpoint: str,
    device: str,
    /,
    *changes: Annotated[str, Parameter(allow_leading_hyphen=True)],
    json: Json = False,
) -> int:
    """Give tags to a device of the mount at MOUNTPOINT, and take others away.

    Parameters
    ----------
    device
        Its number, its directory, or a tag that it alone has.
    changes
        +TAG or -TAG, each.
    """
    asked = f"device tag {mountpoint} {device}"
    change = parse_tags(changes, asked=asked)
    question = TagDevice(
        device=name_of(device, asked=asked), added=change.added, dropped=change.dropped
    )
    tags = ask(mountpoint, question, asked=asked)
    if json:
        print_json(tags)
    else:
        having = ", ".join(tags.tags) or "no tags"
        sys.stdout.write(f"device {tags.number} ({show_text(tags.path)}): {having}\n")
    return 0


@app.command
def add(mountpoint: str, directory: str, /, *, json: Json = False) -> int:
    """Add DIRECTORY, which is empty, to the devices of the mount at MOUNTPOINT; new files use it.

    From then on the filesystem has to be mounted with it.
    """
    asked = f"device add {mountpoint} {directory}"
    refuse_empty(directory, what="directory", asked=asked)
    # The server resolves it: whose links it leads through matters.
    path = os.path.join(os.getcwd(), directory)
    added = ask(mountpoint, AddDevice(path=path), asked=asked)
    if json:
        print_json(added)
    else:
        sys.stdout.write(
            f"device {added.number} ({show_text(added.path)}) is in use; name it, too, when the"
            " filesystem is mounted\n"
        )
    return 0


@app.command
def drain(
    mountpoint: str,
    device: str,
    /,
    *,
    rate: str | None = None,
    cancel: bool = False,
    json: Json = False,
) -> int:
    """Move what a device of the mount at MOUNTPOINT holds to the others, while programs go on.

    From the beginning on no new chunk goes there, also after a remount. What is being written is
    moved when it is closed. It can be interrupted, and goes on where it was when it is asked for
    again. Exit status 1 when something on it is damaged, which stays there, or when it refuses to
    give space back.

    Parameters
    ----------
    device
        Its number, its directory, or a tag that it alone has.
    rate
        Bytes to move in a second at most, such as 500M (default: as fast as it goes).
    cancel
        Use the device again: new chunks go there, and what was moved stays where it is.
    json
        Print the result as JSON; sizes in bytes.
    """
    bytes_per_s = None if rate is None else parse_size_bytes(rate, name="--rate")
    if bytes_per_s == 0:
        raise Refused(asked="--rate 0", wrong="nothing would be moved", remedy="take 1M or more")
    asked = f"device drain {mountpoint} {device}"
    if cancel:
        if rate is not None:
            wrong, remedy = "--cancel moves nothing", "leave --rate away"
            raise Refused(asked=f"--rate {rate}", wrong=wrong, remedy=remedy)
        return _end_drain(mountpoint, name_of(device, asked=asked), json=json, asked=asked)
    return drain_device(
        mountpoint, name_of(device, asked=asked), bytes_per_s=bytes_per_s, json=json, asked=asked
    )


def _end_drain(mountpoint: str, device: str, *, json: bool, asked: str) -> int:
    kept = ask(mountpoint, EndDrain(device=device), asked=asked)
    if json:
        print_json(DrainReport(number=kept.number, path=kept.path))
    else:
        sys.stdout.write(f"device {kept.number} ({show_text(kept.path)}) is in use\n")
    return 0


@app.command
def remove(mountpoint: str, device: str, /, *, json: Json = False) -> int:
    """Take a device out of the mount at MOUNTPOINT that was drained.

    From then on the filesystem is mounted without it. Its directory is made empty. One that is
    missing can be removed when no file has anything on it. Its number is never used again.

    Parameters
    ----------
    device
        Its number, its directory, or a tag that it alone has.
    """
    asked = f"device remove {mountpoint} {device}"
    removed = ask(mountpoint, RemoveDevice(device=name_of(device, asked=asked)), asked=asked)
    if json:
        print_json(removed)
    else:
        left = "which is empty" if removed.is_empty else "in which nothing is needed any more"
        sys.stdout.write(
            f"device {removed.number} is removed; leave its directory {show_text(removed.path)},"
            f" {left}, away when the filesystem is mounted\n"
        )
    return 0


def name_of(device: str, *, asked: str) -> str:
    """Return what a server knows a device by: for a directory its absolute path."""
    refuse_empty(device, what="device", asked=asked)
    return os.path.realpath(device) if "/" in device or device in (".", "..") else device
