"""A df that calls filesystems by another name: suites ask it what they are on."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_DF = """#!/bin/sh
exec {df} "$@" | sed -E '2,$s/^([^ ]+ +){pattern}/\\1{name}/'
"""


@contextlib.contextmanager
def named_filesystem(name: str, *, pattern: str = "fuse\\.fpfs") -> Iterator[Mapping[str, str]]:
    """An environment in which df calls every filesystem `name` whose type is like `pattern`."""
    folder = Path(tempfile.mkdtemp(prefix="fpfs-conformance-"))
    try:
        text = _DF.format(df=shutil.which("df"), pattern=pattern, name=name)
        (folder / "df").write_text(text)
        (folder / "df").chmod(0o755)
        yield {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    finally:
        shutil.rmtree(folder)
