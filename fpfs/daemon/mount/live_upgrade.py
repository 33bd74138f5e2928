"""Renewal: a mount upgrades to the installed program while programs use it.

The server asks the installed program what it is, and makes room; the keeper executes it in its own
place. That is as if the server had died: the next one takes over (`maintenance.crash_resume`).

Invariants:
  * Nothing is given up before the installed program has started once and has said that it
    understands what it is to take over.
  * No module comes from the working directory (``-P``): another user may write there.

Concurrency: functions that block; `execute` returns only by an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

import msgspec

import fpfs
from fpfs.core.engine import ARENA_FORMAT
from fpfs.core.errors import InvalidOperation
from fpfs.core.options import ServerConfig
from fpfs.daemon.mount.supervisor import STATE_FORMAT, KeeperState

MODULE = "fpfs.daemon.mount.main"
CHECK_S = 60
"""How long the installed program may take to say what it is."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program, and the formats of what it can take over."""

    version: str
    state_format: int
    arena_format: int


class _Left(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper leaves in a file to the program that it executes."""

    config: ServerConfig
    state: KeeperState


def this_program() -> Program:
    """What is running."""
    return Program(version=fpfs.__version__, state_format=STATE_FORMAT, arena_format=ARENA_FORMAT)


def check_installed() -> Program:
    """Start the installed program once; returns what it is. Blocks.

    Raises `InvalidOperation` when it does not start, or cannot take over what this one leaves.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", MODULE, "--check"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidOperation(f"the installed fpfs does not start ({error})") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise InvalidOperation(f"the installed fpfs does not start ({last})")
    try:
        installed = msgspec.json.decode(done.stdout, type=Program)
    except msgspec.MsgspecError as error:
        raise InvalidOperation(f"the installed fpfs does not say what it is ({error})") from error
    if msgspec.structs.replace(installed, version=fpfs.__version__) != this_program():
        raise InvalidOperation(
            f"the installed fpfs {installed.version} cannot take over from {fpfs.__version__},"
            " which keeps open files in another format: unmount and mount again"
        )
    return installed


def execute(config: ServerConfig, state: KeeperState) -> NoReturn:
    """Execute the installed program in the place of this one, with what is to be held.

    Raises OSError when it cannot be executed: it was removed since `check_installed`. Nothing is
    changed then.
    """
    left = os.memfd_create("fpfs-keeper", 0)
    try:
        os.write(left, msgspec.json.encode(_Left(config=config, state=state)))
        os.lseek(left, 0, os.SEEK_SET)
        for descriptor in (left, *state.descriptors):
            os.set_inheritable(descriptor, True)
        os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, "--renewed", str(left)])
    finally:
        os.close(left)
        for descriptor in state.descriptors:
            os.set_inheritable(descriptor, False)


def take_state(descriptor: int) -> tuple[ServerConfig, KeeperState]:
    """What the keeper left that executed this program."""
    with open(descriptor, "rb") as stream:
        left = msgspec.json.decode(stream.read(), type=_Left)
    for held in left.state.descriptors:
        os.set_inheritable(held, False)
    return msgspec.structs.replace(left.config, ready_fd=-1), left.state
