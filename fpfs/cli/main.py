"""The command ``fpfs``: mount, umount, format, fsck, export, version."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter

import fpfs
from fpfs.cli.asking import Flag, Json, waiting
from fpfs.cli.show import (
    add_figures,
    add_texts,
    new_table,
    open_console,
    run_app,
    say,
    show_failures,
)
from fpfs.core.options import MountOptions, parse_mount_options
from fpfs.core.paths import show_text
from fpfs.daemon.mount import launch

app = App(
    name="fpfs",
    help="A filesystem that makes saving a checkpoint as fast as the devices under it.",
    version=f"fpfs {fpfs.__version__}",
    suppress_keyboard_interrupt=False,
)

_ONE_MOUNTPOINT = "there is one mountpoint"
SURPLUS = {
    "mount": f"{_ONE_MOUNTPOINT}, and every device directory is named with -d",
    "umount": _ONE_MOUNTPOINT,
    "unmount": _ONE_MOUNTPOINT,
    "format": "every device directory is named with -d",
}
"""Where words belong that a command has no place for."""

Devices = Annotated[
    list[str] | None,
    Parameter(
        name=["--device", "-d"],
        negative="",
        help="Device directory; several stripe files over them. Empty ones are formatted.",
    ),
]


def _flags_as_options(**values: str | None) -> list[str]:
    return [f"{name}={value}" for name, value in values.items() if value is not None]


@app.command
def mount(
    mountpoint: str,
    /,
    *,
    device: Devices = None,
    option: Annotated[
        list[str] | None,
        Parameter(
            name=["--option", "-o"],
            negative="",
            help="Options as in fstab, a,b=c: the flags here, whole, reuse, metrics, checksums,"
            " adopt, ro, nosuid, noatime, allow_other, ...; docs/mounting.md has the table.",
        ),
    ] = None,
    foreground: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    degraded: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    staging: str | None = None,
    chunk: str | None = None,
    depth: str | None = None,
    receivers: str | None = None,
    backend: str | None = None,
    idle: str | None = None,
    ack: str | None = None,
    log: str | None = None,
) -> int:
    """Mount at MOUNTPOINT; returns when the mount answers.

    Without a device, a directory under the user's data folder is used.

    Parameters
    ----------
    foreground
        Serve in this process and log to stderr, until unmounted or interrupted.
    degraded
        Mount although devices are missing: what lies on them gives errors, everything else works.
    staging
        Memory for acknowledged bytes, such as 512M (default: an eighth of all, at most 1G).
    chunk
        Bytes of a file on one device before the next one's turn, such as 256K (default 1M).
    depth
        Requests in flight on each device (default 16).
    receivers
        Threads that receive writes, for many processes at once (default: one for four cores, at
        most 8).
    backend
        auto (the default), io_uring or threads.
    idle
        shallow (the default): processors stay out of deep idle states in bursts. deep: left alone.
    ack
        early (the default): write() answers when staged. close: close() waits until durable.
        durable: each write() does.
    log
        File for the server's log.
    """
    flags = _flags_as_options(
        staging=staging,
        chunk=chunk,
        depth=depth,
        receivers=receivers,
        backend=backend,
        idle=idle,
        ack=ack,
        log=log,
    )
    options = parse_mount_options([*(option or []), *flags, *(["degraded"] * degraded)])
    if foreground:
        return _serve_here(mountpoint, device or [], options)
    _start(mountpoint, device or [], options)
    return 0


def _serve_here(mountpoint: str, devices: list[str], options: MountOptions) -> int:
    # Imported late: only a server needs pyfuse3.
    from fpfs.daemon.mount import main as process

    config = launch.prepare(
        mountpoint=mountpoint, devices=devices, options=options, log=options.log, ready_fd=-1
    )
    if config.log:
        launch.open_log(config).close()
    return process.run(config)


def _start(mountpoint: str, devices: list[str], options: MountOptions) -> None:
    with waiting(f"mounting at {mountpoint}; the server's log says what it waits for"):
        started = launch.start(mountpoint=mountpoint, devices=devices, options=options)
    console = open_console()
    verb = "formatted and mounted" if started.readiness.formatted else "mounted"
    over = ", ".join(started.devices)
    say(console, f"{verb} at {started.mountpoint} over {over} (log {started.log})")
    for note in started.readiness.notes:
        say(console, f"note: {note}")


@app.command(name=["umount", "unmount"])
def umount(mountpoint: str, /) -> int:
    """Unmount MOUNTPOINT; returns when everything on it is durable."""
    with waiting(f"making everything on {mountpoint} durable"):
        flushed = launch.stop(mountpoint)
    return show_failures(flushed)


@app.command(name="format")
def format_devices(*, device: Devices = None) -> int:
    """Make a new filesystem of empty device directories, without mounting it."""
    made = launch.format_devices(device or [])
    console = open_console()
    say(console, f"filesystem {made.filesystem_id}")
    table = new_table()
    add_figures(table, "device")
    add_texts(table, "directory")
    add_figures(table, "id")
    for entry in made.devices:
        table.add_row(str(entry.number), show_text(entry.path), entry.device_id)
    console.print(table)
    return 0


@app.command(name="fsck")
def check(
    *places: str,
    repair: Flag = False,
    data: Flag = False,
    json: Json = False,
) -> int:
    """Check the catalog against the objects on the devices, and name what is wrong.

    PLACES are all device directories of a filesystem that is not mounted, or the place where it is
    mounted. Without --repair nothing is changed. Exit status: 0 all is well, 1 everything that was
    wrong is corrected, 4 something is left as it is, 5 both, 8 it could not be checked.

    Parameters
    ----------
    repair
        Correct what can be corrected; files without a name get one in lost+found. Not while it is
        mounted.
    data
        Read all contents, too, and compare them with their checksums.
    """
    # Imported late: other commands need neither the catalog nor the extension.
    from fpfs.cli.commands import fsck as checking

    return checking.fsck(places, repair=repair, data=data, json=json)


@app.command
def export(*places: str, path: str = "") -> int:
    """Copy files out of device directories, without mounting them and without changing them.

    PLACES are all device directories of a filesystem that is not mounted, and an empty or new
    directory to copy to. Every block is compared with its checksum: a file that is not whole gets
    .damaged behind its name, and zeros where bytes are lost. Exit status: 0 everything is copied,
    1 refused, 4 something is not whole.

    Parameters
    ----------
    path
        Copy only what is at this path below the mountpoint.
    """
    # Imported late: other commands need neither the catalog nor the extension.
    from fpfs.cli.commands.export import run_export

    return run_export(places, path=path)


@app.command
def version() -> int:
    """Print the version."""
    sys.stdout.write(f"fpfs {fpfs.__version__}\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command ``fpfs``; the arguments are the process's unless given."""
    return run_app(app, sys.argv[1:] if arguments is None else arguments, surplus=SURPLUS)


if __name__ == "__main__":
    sys.exit(main())
