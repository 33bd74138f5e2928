"""Where the staging arena of a filesystem is: in memory, by the number of its devices."""

from __future__ import annotations

import os
from pathlib import Path

ARENA_FOLDER = "/dev/shm"


def arena_path(filesystem_id: str) -> str:
    """The staging arena's file, named after this boot: what an older boot left cannot be taken."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.path.join(ARENA_FOLDER, f"fpfs-{filesystem_id}-{boot_id[:8]}")
