"""Policies as TOML: a table for each directory, by its path, and what differs from what is set."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import tomli_w

from fpfs.core.policy import parse_setting
from fpfs.core.refusal import Refused

FILE_BYTES_MAX = 16 * 1024 * 1024

HEAD = "# Policies of directories, for fpfs-ctl policy apply. Paths are below its DIRECTORY.\n\n"


class Difference(NamedTuple):
    """A setting of a directory that is to change; None where it is not set."""

    path: str
    key: str
    before: str | None
    after: str | None

    def shown(self) -> str:
        """Return the line of a diff."""
        if self.after is None:
            return f"- {self.path}: {self.key}={self.before}"
        if self.before is None:
            return f"+ {self.path}: {self.key}={self.after}"
        return f"~ {self.path}: {self.key}={self.before} becomes {self.after}"


def write_settings(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return the TOML of settings by path."""
    tables = {path: dict(sorted(values.items())) for path, values in sorted(settings.items())}
    return HEAD + tomli_w.dumps(tables)


def read_settings(file: str, *, asked: str) -> dict[str, dict[str, str]]:
    """Return the settings by path that a TOML file has. Raises `Refused`."""
    tables = _read(file, asked=asked)
    found: dict[str, dict[str, str]] = {}
    for path, values in tables.items():
        if not isinstance(values, dict):
            raise Refused(
                asked=asked,
                wrong=f"{file} has '{path}' outside of a directory's table",
                remedy='write it below a line such as ["run"], or ["."] for the directory itself',
            )
        clean = os.path.normpath(path)
        if os.path.isabs(path) or clean.startswith("..") or clean in found or "\0" in path:
            raise Refused(
                asked=asked,
                wrong=f"{file} has the path '{path}', which is not below the directory, or twice",
                remedy='write each path once, from the directory on; "." is the directory itself',
            )
        found[clean] = {
            key: parse_setting(key, _text(key, value, asked=asked), asked=f"{asked}: {path}")
            for key, value in values.items()
        }
    return found


def _text(key: str, value: object, *, asked: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Refused(
            asked=asked, wrong=f"{key} is neither text nor a number", remedy='write it as "…"'
        )
    return str(value)


def _read(file: str, *, asked: str) -> Mapping[str, object]:
    try:
        if file == "-":
            raw = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(file).open("rb") as stream:
                raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Refused(
            asked=asked, wrong=f"{file} cannot be read ({error.strerror})", remedy="name another"
        ) from None
    try:
        if len(raw) > FILE_BYTES_MAX:
            raise ValueError("it is larger than 16 MiB")
        return tomllib.loads(raw.decode())
    except ValueError as error:  # of TOML and of UTF-8
        raise Refused(
            asked=asked,
            wrong=f"{file} is no TOML ({error})",
            remedy="fpfs-ctl policy export shows the form",
        ) from None


def difference(
    present: Mapping[str, Mapping[str, str]], wanted: Mapping[str, Mapping[str, str]]
) -> list[Difference]:
    """Return what has to change for `present` to become `wanted`, by path and key."""
    found = []
    for path in sorted({*present, *wanted}):
        before, after = present.get(path, {}), wanted.get(path, {})
        found += [
            Difference(path, key, before.get(key), after.get(key))
            for key in sorted({*before, *after})
            if before.get(key) != after.get(key)
        ]
    return found
