"""Golden files: what a command prints, kept in tests/golden and changed only by `make golden`."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "golden"
WRITES = os.environ.get("FPFS_GOLDEN") == "write"
"""Whether golden files are written instead of compared."""


def check(name: str, text: str, *, folder: Path = FOLDER) -> None:
    """Compare a text with a golden file, or write it there."""
    path = folder / name
    if WRITES:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    assert path.exists(), f"{path} is missing: make golden writes it"
    kept = path.read_text()
    if text != kept:
        lines = (kept.splitlines(), text.splitlines())
        shown = "\n".join(difflib.unified_diff(*lines, str(path), "now", lineterm=""))
        raise AssertionError(f"make golden, if this is meant:\n{shown}")
