"""What ``fpfs`` refuses: in one line, and without a mount that is left."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fpfs.core.mounts import mount_at
from fpfs.testing.mounted import run_fpfs


def refusal(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> str:
    """The one line with which ``fpfs`` refuses; nothing may be mounted by it.

    The last argument is the mountpoint (or what stands in its place).
    """
    mountpoint = str(arguments[-1])
    before = mount_at(mountpoint)
    done = run_fpfs(*arguments, environment=environment, prefix=prefix)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"fpfs: [^\n]+: [^\n]+; [^\n]+\n", done.stderr), done.stderr
    assert mount_at(mountpoint) == before
    return done.stderr


def with_mounts(commands: str) -> Sequence[str]:
    """A prefix for a command that sees the mounts which shell `commands` make, and nobody else."""
    return ("unshare", "--mount", "sh", "-euc", f'{commands}\nexec "$@"', "sh")
