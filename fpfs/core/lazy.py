"""Names of a package that are imported when they are first used, and what to install for them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

NUMPY = "pip install numpy in the environment of fpfs"
"""How it is installed for commands, which need it and not torch."""


def install(extra: str) -> str:
    """Return how what an extra of fpfs names is installed: PyPI's `fpfs` is another project."""
    return f"pip install '.[{extra}]' in a clone of fpfs"


@contextlib.contextmanager
def needing(asked: str, *, extra: str) -> Iterator[None]:
    """Within this a package that is missing is told in a line, with the extra that has it.

    asked: what needs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # A package that lacks a module is there, in another version: the module's name says more.
        if error.name is None or "." in error.name:
            raise
        message = f"{asked} needs {error.name}: {install(extra)}"
        raise ModuleNotFoundError(message, name=error.name) from error


def lazily(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    places: the module of each name, or the module that the name is.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needing(f"{package}.{name}", extra="torch"):
            module = import_module(places[name])
            return module if places[name] == f"{package}.{name}" else getattr(module, name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names


__all__ = ["NUMPY", "install", "lazily", "needing"]
