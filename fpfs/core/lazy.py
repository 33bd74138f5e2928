"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    places: the module of each name, or the module that the name is.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(places[name])
            return module if places[name] == f"{package}.{name}" else getattr(module, name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "numpy"):
                raise
            message = f"{package}.{name} needs {error.name}: pip install 'fpfs[torch]'"
            raise ModuleNotFoundError(message, name=error.name) from error

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, names


__all__ = ["lazily"]
