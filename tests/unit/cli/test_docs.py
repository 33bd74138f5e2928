"""What the documentation names exists: tests, sources, options, commands. Its tables are whole."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fpfs.cli import ctl, main
from fpfs.core.options import (
    _EXAMPLES,
    _FLAGS,
    _KERNEL,
    _WITHOUT_EFFECT,
    parse_mount_options,
)

ROOT = Path(__file__).resolve().parents[3]
_NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def named_tests(text: str) -> set[tuple[str, str]]:
    """Return (file name, test) of every test that a document names."""
    return set(_NAMED.findall(text))


@pytest.mark.parametrize(
    "document", ["semantics.md", "testing.md", "client.md", "multi-node.md", "frameworks.md"]
)
def test_every_named_test_exists(document: str) -> None:
    """A promise whose test was renamed or removed is no longer shown by it."""
    named = named_tests((ROOT / "docs" / document).read_text())
    assert len(named) > 10
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
        "atomic directory",
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


def documented_options() -> set[str]:
    """The names in the first column of docs/mounting.md's table of options."""
    text = (ROOT / "docs" / "mounting.md").read_text()
    (table,) = [t for t in tables(text) if t[0].startswith("| option")]
    words = re.findall(r"`(?:-o )?([^`]+)`", " ".join(cells(row)[0] for row in table[2:]))
    return {word.split("=")[0] for word in words}


def test_the_table_of_options_is_whole() -> None:
    """All that fpfs has of its own, and no other; of what mount(8) knows it names some."""
    own = {*_EXAMPLES, *_FLAGS}
    assert own <= documented_options()
    assert documented_options() - own <= _KERNEL | _WITHOUT_EFFECT


def commands(text: str) -> list[list[str]]:
    """The lines of a document's code that run ``fpfs`` or ``fpfs-ctl``, as words."""
    code = "".join(re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^(fpfs(?:-ctl)? .*)$", code, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


COMMANDS = {
    name: commands((ROOT / name).read_text())
    for name in ("README.md", "docs/mounting.md", "docs/fpfs-ctl.md")
}


@pytest.mark.parametrize("words", [each for found in COMMANDS.values() for each in found])
def test_each_command_can_be_read(words: list[str]) -> None:
    app = {"fpfs": main.app, "fpfs-ctl": ctl.app}[words[0]]
    app.parse_args(words[1:], exit_on_error=False, print_error=False)


def test_there_are_commands() -> None:
    assert all(COMMANDS.values())
    assert len(COMMANDS["docs/fpfs-ctl.md"]) > 20


def test_the_fstab_line_waits_for_each_drive() -> None:
    """systemd itself mounts the first one's before: it takes the source for one path."""
    page = (ROOT / "docs" / "mounting.md").read_text()
    (line,) = re.findall(r"^\S+ +/\S+ +fuse\.fpfs .*$", page, re.MULTILINE)
    source, _, _, options, *_ = line.split()
    parse_mount_options([options])
    waited = re.findall(r"x-systemd\.requires-mounts-for=([^,]+)", options)
    assert waited == [str(Path(device).parent) for device in source.split(":")[1:]] != []


SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("fpfs", "native", "tests", "benchmarks", "mount_scripts", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cc", ".h")
}
CLASSES: dict[str, list[str]] = {}
"""The sources that define a Python class of a name."""
for _source in SOURCES.values():
    for _name in re.findall(r"^class (\w+)", _source, re.MULTILINE):
        CLASSES.setdefault(_name, []).append(_source)
NATIVE = [source for path, source in SOURCES.items() if not path.endswith(".py")]


@pytest.mark.parametrize("document", ["architecture.md", "concurrency.md", "format.md"])
def test_named_sources_exist(document: str) -> None:
    """Files, native functions and Python methods by which a reader is to find his way."""
    text = (ROOT / "docs" / document).read_text()
    missing = [
        name
        for name in re.findall(r"[\w/]*\w\.(?:py|cc|h)\b", text)
        if not any(path == name or path.endswith(f"/{name}") for path in SOURCES)
    ]
    for kind, member in re.findall(r"`(\w+)::(\w+)`", text):
        if not any(re.search(rf"\b{kind}\b[^\0]*\b{member}\b", s) for s in NATIVE):
            missing.append(f"{kind}::{member}")
    for kind, method in re.findall(r"`(?:\w+\.)*([A-Z]\w+)\.([a-z_]\w*)`", text):
        if not any(re.search(rf"(def |self\.){method}\b", s) for s in CLASSES.get(kind, ())):
            missing.append(f"{kind}.{method}")
    assert missing == []
