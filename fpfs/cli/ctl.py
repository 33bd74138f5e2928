"""The command ``fpfs-ctl``: what a mount is doing, and waiting until things are durable."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from cyclopts import App

import fpfs
from fpfs.cli.asking import Flag, Json, ask, print_json, waiting
from fpfs.cli.commands import commit, devices, policy
from fpfs.cli.commands import scrub as scrubbing
from fpfs.cli.commands import top as live
from fpfs.cli.commands import trace as tracing
from fpfs.cli.commands import versions as former
from fpfs.cli.commands.listing import ls
from fpfs.cli.commands.plan import plan
from fpfs.cli.commands.recovery import describe_recovery
from fpfs.cli.commands.shares import gather, verify
from fpfs.cli.commands.stat import stat
from fpfs.cli.commands.status import STATUS_TIMEOUT_S, status
from fpfs.cli.commands.tune import tune
from fpfs.cli.completion import completion
from fpfs.cli.show import check_timeout, run_app, show_failures
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import AskStatus, FlushAll, RestartServer
from fpfs.core.protocol.reports import Flushed
from fpfs.core.protocol.whereabouts import wait_for
from fpfs.core.refusal import Refused
from fpfs.core.units import parse_size_bytes

RESTART_TIMEOUT_S = 120.0
SURPLUS = dict.fromkeys(
    (
        "status",
        "wait",
        "flush",
        "restart",
        "scrub",
        "fsck",
        "recovery",
        "versions",
        "restore",
        "commit",
        "tune",
        "trace",
        "top",
        "plan",
    ),
    "there is one path",
)
"""Where words belong that a command has no place for."""

app = App(
    name="fpfs-ctl",
    help="Show and direct mounted fpfs filesystems.",
    version=f"fpfs {fpfs.__version__}",
    suppress_keyboard_interrupt=False,
)
app.command(policy.app)
app.command(tune)
app.command(former.versions)
app.command(former.restore)
app.command(commit.app)
app.command(completion)
app.command(devices.app)
app.command(tracing.trace)
app.command(stat)
app.command(ls)
app.command(plan)
app.command(gather)
app.command(verify)
app.command(live.top)
app.command(status)


@app.command
def wait(path: str, /, *, timeout: float | None = None, json: Json = False) -> int:
    """Wait until PATH is durable: a file, or a directory with everything in it and below.

    A file that is open for writing must be closed first. Of a directory that counts which is in it
    when the command begins. Exit status: 0 all is durable, 1 not: it timed out, something could not
    be kept (its previous version stays, and the line says why), or the mount ended.

    Parameters
    ----------
    timeout
        Give up after so many seconds, with exit status 1.
    """
    check_timeout(timeout)
    with waiting(f"waiting until {path} is durable"):
        flushed = wait_for(path, timeout_s=timeout)
    return _show_flushed(flushed, json=json)


def _show_flushed(flushed: Flushed, *, json: bool) -> int:
    if json:
        print_json(flushed)
    return show_failures(flushed)


class Restarted(msgspec.Struct, kw_only=True, frozen=True):
    """One server was replaced by another."""

    mountpoint: str
    server_pid_before: int
    server_pid: int
    version_before: str
    version: str


@app.command
def restart(mountpoint: str, /, *, timeout: float = RESTART_TIMEOUT_S, json: Json = False) -> int:
    """Upgrade the server of MOUNTPOINT to the installed fpfs, without unmounting.

    Programs that use the mount wait for a moment, and see no error. If the installed fpfs does not
    start, or cannot take over, it is refused, and the running server stays.

    Parameters
    ----------
    timeout
        Give up after so many seconds, with exit status 1.
    """
    check_timeout(timeout)
    asked = f"restart of {mountpoint}"
    entry = find_fpfs(mountpoint, asked=asked)
    with waiting(f"replacing the server of {mountpoint}"):
        with ControlClient(entry, asked=asked) as client:
            before = client.ask(AskStatus(), timeout_s=timeout)
            installed = client.ask(RestartServer(), timeout_s=timeout)
            client.wait_for_exit(timeout_s=timeout)
        with ControlClient(entry, asked=asked) as client:
            after = client.ask(AskStatus(), timeout_s=timeout)
    if after.version == before.version != installed.version:
        raise Refused(
            asked=asked,
            wrong=f"fpfs {installed.version} could not be executed, and {after.version} goes on",
            remedy="install it again, and repeat",
        )
    if json:
        print_json(
            Restarted(
                mountpoint=before.mountpoint,
                server_pid_before=before.server_pid,
                server_pid=after.server_pid,
                version_before=before.version,
                version=after.version,
            )
        )
        return 0
    sys.stdout.write(
        f"{before.mountpoint}: server {before.server_pid} (fpfs {before.version})"
        f" was replaced by {after.server_pid} (fpfs {after.version})\n"
    )
    return 0


@app.command
def flush(mountpoint: str, /, *, timeout: float | None = None, json: Json = False) -> int:
    """Make everything on the mount at MOUNTPOINT durable, files that are open included.

    A checkpoint (*.pt, see whole=) that is being written is durable when it is closed, not before.
    Exit status: 0 all is durable, 1 not: it timed out, something could not be kept (its previous
    version stays, and the line says why), or the mount ended.

    Parameters
    ----------
    timeout
        Give up after so many seconds, with exit status 1.
    """
    check_timeout(timeout)
    asked = f"flush of {mountpoint}"
    with waiting(f"making everything on {mountpoint} durable"):
        flushed = ask(mountpoint, FlushAll(), asked=asked, timeout_s=timeout)
    return _show_flushed(flushed, json=json)


@app.command
def scrub(
    path: str = ".",
    /,
    *,
    rate: str | None = None,
    json: Json = False,
) -> int:
    """Read what is committed from the devices, compare it with its checksums, name what differs.

    PATH is a file, a directory, or the mountpoint for everything; without one, the current
    directory. Exit status 1 when anything is damaged.

    Parameters
    ----------
    rate
        Bytes to read in a second at most, such as 500M (default: as fast as it goes).
    """
    bytes_per_s = None if rate is None else parse_size_bytes(rate, name="--rate")
    if bytes_per_s == 0:
        raise Refused(asked="--rate 0", wrong="nothing would be read", remedy="take 1M or more")
    return scrubbing.scrub(path, bytes_per_s=bytes_per_s, json=json)


@app.command
def recovery(
    mountpoint: str,
    /,
    *,
    json: Json = False,
    timeout: float = STATUS_TIMEOUT_S,
) -> int:
    """Show what the server of the mount at MOUNTPOINT found and did when it began.

    Parameters
    ----------
    timeout
        Give up after so many seconds, with exit status 1.
    """
    check_timeout(timeout)
    asked = f"recovery of {mountpoint}"
    found = ask(mountpoint, AskStatus(), asked=asked, timeout_s=timeout)
    if json:
        print_json(found.recovery)
    else:
        for line in describe_recovery(found):
            sys.stdout.write(line + "\n")
    return 0


@app.command(name="fsck")
def check(
    mountpoint: str,
    /,
    *,
    data: Flag = False,
    json: Json = False,
) -> int:
    """Check the catalog of the mount at MOUNTPOINT against the objects on its devices.

    Programs go on meanwhile, and nothing is changed. Exit status: 0 all is well, 4 something is
    wrong, 8 it could not be checked.

    Parameters
    ----------
    data
        Read all contents, too, and compare them with their checksums (as scrub does).
    """
    # Imported late: other commands need neither the catalog nor the extension.
    from fpfs.cli.commands import fsck as checking

    return checking.fsck_mounted(mountpoint, data=data, json=json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command ``fpfs-ctl``; the arguments are the process's unless given."""
    return run_app(app, sys.argv[1:] if arguments is None else arguments, surplus=SURPLUS)


if __name__ == "__main__":
    sys.exit(main())
