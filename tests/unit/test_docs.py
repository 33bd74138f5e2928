"""The documentation names tests: they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def named_tests(text: str) -> set[tuple[str, str]]:
    """Return (file name, test) of every test that a document names."""
    return set(_NAMED.findall(text))


@pytest.mark.parametrize("document", ["semantics.md"])
def test_every_named_test_exists(document: str) -> None:
    """A promise whose test was renamed or removed is no longer shown by it."""
    named = named_tests((ROOT / "docs" / document).read_text())
    assert len(named) > 20
    sources: dict[str, str] = {}  # two folders may have a file of one name
    for path in (ROOT / "tests").rglob("test_*.py"):
        sources[path.name] = sources.get(path.name, "") + path.read_text()
    missing = [
        f"{name}::{test}"
        for name, test in sorted(named)
        if not re.search(rf"^(async )?def {test}\(", sources.get(name, ""), re.MULTILINE)
    ]
    assert missing == []


def test_a_missing_test_is_found() -> None:
    """The pattern sees what the documents contain."""
    assert named_tests("`test_x.py::test_y` and `other`") == {("test_x.py", "test_y")}
