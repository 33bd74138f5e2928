"""Committing a directory as a whole, from any program."""

from __future__ import annotations

from fpfs.core.paths import inode_of_directory
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import CommitGroup


def commit_group(directory: str, *, timeout_s: float | None = None) -> None:
    """Commit a directory that commits as a group; on return it is durable, and complete.

    What was closed in it before the call is in it then. Raises `Refused` for what is no group, when
    a content could not be kept, and on timeout.
    """
    asked = f"commit {directory}"
    entry = find_fpfs(directory, asked=asked)
    with ControlClient(entry, asked=asked) as client:
        # Found out when connected: what a server that died left answers ENOTCONN to stat.
        ino = inode_of_directory(directory, asked=asked)
        client.ask(CommitGroup(ino=ino), timeout_s=timeout_s)
