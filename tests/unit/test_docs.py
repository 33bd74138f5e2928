"""The documentation names tests, which exist, and its tables are whole."""

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


def tables(text: str) -> list[list[str]]:
    """Each table of a document, as its lines."""
    found: list[list[str]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            found[-1].append(line)
        before = line
    return found


def cells(line: str) -> list[str]:
    """What stands between the bars of a table's line."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_each_cell_of_what_holds_names_its_test() -> None:
    """The promise is a table: no cell of it is without proof."""
    text = (ROOT / "docs" / "semantics.md").read_text()
    head, _, *rows = tables(text[text.index("## What holds when") :])[0]
    assert [cells(row)[0] for row in rows] == [
        "`write`",
        "`close`",
        "`fsync`",
        "`rename`",
        "group commit",
    ]
    events = cells(head)[1:]
    for row in rows:
        answered, *columns = cells(row)
        assert len(columns) == len(events), answered
        for event, cell in zip(events, columns, strict=True):
            assert named_tests(cell), f"{answered}, {event}: {cell}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_tables_are_in_one_piece(path: Path) -> None:
    """A blank line in a table leaves rows without head, shown as text."""
    for table in tables(path.read_text()):
        assert len(table) > 1, table
        assert set(table[1]) <= set("|-: "), table[0]
