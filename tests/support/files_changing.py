"""A program that changes files without end."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path


def keep_changing(root: Path, seed: int, ended: threading.Event) -> None:
    """Rewrite, cut, remove and make files anew until told to stop."""
    chooser = random.Random(seed)
    folder = root / f"folder{seed}"
    folder.mkdir()
    while not ended.is_set():
        path = folder / f"file{chooser.randrange(4)}"
        with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
            os.pwrite(file.fileno(), chooser.randbytes(500_000), chooser.randrange(2_000_000))
            if chooser.random() < 0.5:
                os.fsync(file.fileno())
            if chooser.random() < 0.3:
                file.truncate(chooser.randrange(2_000_000))
        if chooser.random() < 0.2:
            path.unlink()
