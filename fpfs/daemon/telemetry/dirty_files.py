"""Files that are being written, or were and are not durable yet.

Concurrency: trio thread only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fpfs.core.protocol.activity import FileInProgress

if TYPE_CHECKING:
    from fpfs.core.engine import Engine
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.names.open_files import Files


def files_in_progress(
    *, files: Files, commit: Commit, engine: Engine
) -> tuple[FileInProgress, ...]:
    """All of them, by inode number."""
    writers = {inode.ino: inode.writers for inode in files.written()}
    inos = writers.keys() | commit.queued()
    oldest_ns = commit.durability.oldest_ns_by_ino()
    now_ns = time.monotonic_ns()
    found = []
    for ino in sorted(inos):
        if not engine.loaded(ino):
            continue
        unsaved = engine.unsaved(ino)
        known = [ns for ns in (unsaved.oldest_ns, oldest_ns.get(ino)) if ns]
        found.append(
            FileInProgress(
                ino=ino,
                writers=writers.get(ino, 0),
                bytes_acknowledged=unsaved.bytes_acknowledged,
                bytes_pending=unsaved.bytes_uncommitted,
                bytes_staged=unsaved.bytes_staged,
                age_s=(now_ns - min(known)) / 1e9 if known else 0.0,
            )
        )
    return tuple(found)
