"""What an integration says where its framework is not installed."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder

import pytest

from fpfs.core.lazy import needing
from tests.support.processes import run


class Missing(MetaPathFinder):
    """A package that is not installed."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("name", ["accelerate", "deepspeed", "torch_checkpointing", "transformers"])
def test_a_line_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, f"fpfs.integrations.{name}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(name), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(f"fpfs.integrations.{name}")
    said = f"fpfs.integrations.{name} needs {name}: pip install '.[{name}]' in a clone of fpfs"
    assert (str(raised.value), raised.value.name) == (said, name)


def test_lightnings_plugin_needs_torch_alone() -> None:
    """It imports nothing of Lightning, of which there are two packages."""
    code = """if True:
        import sys
        sys.modules["torch"] = None
        try:
            import fpfs.integrations.lightning
        except ImportError as error:
            print(error)
    """
    said = "fpfs.integrations.lightning needs torch: pip install '.[lightning]' in a clone of fpfs"
    assert run(sys.executable, "-c", code) == f"{said}\n"


def test_a_module_that_another_version_lacks_is_named() -> None:
    """To install the extra would change nothing."""
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'json.nothing'"),
        needing("this", extra="torch"),
    ):
        importlib.import_module("json.nothing")
